"""Events of one's own: from a file to sequences, parts, a trained model and its scores."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from constmem.data import EventLog, Events
from constmem.evaluation import pictures
from constmem.evaluation.pictures import plot_runs
from constmem.evaluation.runs import evaluate_run
from constmem.evaluation.tables import print_runs
from constmem.point_processes import CMHP
from constmem.training import fit_events, fit_file
from constmem.training.recipes import event_recipe
from tests.command import command
from tests.training.files import write

SIZES = {"dim": 8, "depth": 1, "num_slots": 3, "num_latents": 2, "hidden": 8, "num_heads": 2, "components": 2}
TINY = [*(f"model.{key}={value}" for key, value in SIZES.items()), "batch=4", "warmup=1", "validate_every=4"]
HEADER = ["customer", "what", "when", "note"]


def rows(users: int = 12, count: int = 6) -> list[list[Any]]:
    """Events of all users in turns, sorted by time; the kinds look, cart and buy come one after the other."""
    kinds = ("look", "cart", "buy")
    return [
        [f"c{user}", kinds[i % 3], 10 * i + user / 10 + (i * i % 7), "x"]
        for i in range(count)
        for user in range(users)
    ]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "shop.csv", HEADER, rows())


COLUMNS = {"user": "customer", "mark": "what", "time": "when"}


def same(one: Events, other: Events) -> bool:
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("times", "marks", "mask"))


# Reading


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_marks_of_any_text_are_numbered_in_their_order_and_keep_their_names(
    tmp_path: Path, delimiter: str
) -> None:
    log = EventLog.read(write(tmp_path / "shop.csv", HEADER, rows(), delimiter), **COLUMNS, unit="minute")
    assert log.labels == ["buy", "cart", "look"]
    assert log.events.marks[0].tolist() == [2, 1, 0, 2, 1, 0]
    assert log.events.times[3].tolist() == [r[2] for r in rows() if r[0] == "c3"]
    assert log.events.unit == "minute"
    assert "12 sequences, 72 events of 3 kinds, in minutes, split by sequences" in log.statement


def test_numbers_as_marks_are_ordered_by_size_and_an_empty_mark_is_unknown(tmp_path: Path) -> None:
    content = [[u, mark, t] for u in range(5) for t, mark in enumerate(("10", "9", "", "200"))]
    log = EventLog.read(write(tmp_path / "log.csv", ["user_id", "item_id", "timestamp"], content))
    assert log.labels == ["9", "10", "200"]
    assert log.events.marks[0].tolist() == [1, 0, -1, 2]


def test_the_order_of_marks_is_the_same_for_any_order_of_rows_even_if_one_is_called_nan(
    tmp_path: Path,
) -> None:
    found = []
    for turn in range(5):
        kinds = ["nan", "3", "1", "b", "inf", "2"]
        kinds = kinds[turn:] + kinds[:turn]
        content = [[u, mark, t] for u in range(5) for t, mark in enumerate(kinds)]
        found.append(EventLog.read(write(tmp_path / "log.csv", ["user", "mark", "time"], content)).labels)
    assert found == [["1", "2", "3", "b", "inf", "nan"]] * 5


def test_numbers_among_dates_are_refused_and_lines_are_those_of_the_file(tmp_path: Path) -> None:
    content = [["u", "a\nb", "2024-05-01"], ["u", "a", "2024-05-02"], ["u", "a", "1800000000"]]
    path = write(tmp_path / "log.csv", ["user", "mark", "time"], content)
    with pytest.raises(ValueError, match=r"line 5 .* is '1800000000', but line 3 .* is '2024-05-01'"):
        EventLog.read(path)
    path = write(tmp_path / "log.csv", ["user", "mark", "time"], [["u", "a", 1], ["u", "a", "2024-05-02"]])
    with pytest.raises(ValueError, match=r"line 3 .* is '2024-05-02', but line 2 .* is '1'"):
        EventLog.read(path)


def test_an_event_of_nobody_is_refused_unless_all_are_one_sequence(tmp_path: Path) -> None:
    content = [["" if i % 9 == 4 else "u", "a", i] for i in range(50)]
    path = write(tmp_path / "log.csv", ["user", "mark", "time"], content)
    with pytest.raises(ValueError, match=r"line 6 of .* does not say whose event it is"):
        EventLog.read(path)
    assert EventLog.read(path, user="-", by="time").events.num_events == 50


def test_dates_are_counted_in_the_unit(tmp_path: Path) -> None:
    dates = ("2024-02-28T22:00:00", "2024-02-29T04:00:00+00:00", "2024-03-01 01:30:00+02:00")
    content = [[u, "a", date] for u in range(5) for date in dates]
    path = write(tmp_path / "log.csv", ["user", "mark", "time"], content)
    log = EventLog.read(path, unit="hour", end="2024-03-01T00:00:00Z")
    assert log.events.gaps[0].tolist() == [0.0, 6.0, 19.5]
    assert log.events.t_end is not None
    assert float(log.events.t_end[0] - log.events.times[0, -1]) == 0.5


def test_one_stream_without_users_or_marks_is_parted_by_time(tmp_path: Path) -> None:
    path = write(tmp_path / "log.csv", ["t"], [[i * i] for i in range(100)])
    log = EventLog.read(path, user="-", mark="-", by="time", end="last")
    training, validation, test = log.parts()
    assert [part.num_events for part in (training, validation, test)] == [80, 10, 10]
    assert log.events.num_marks == 1
    assert float(validation.t_start) == 79.0**2  # the event before
    assert validation.gaps[0, 0] == 80.0**2 - 79.0**2
    assert validation.t_end is not None
    assert [float(part.t_end) for part in (training, validation, test)] == [80.0**2, 90.0**2, 99.0**2]


def test_sequences_that_a_cut_leaves_empty_are_in_no_part() -> None:
    events = Events.from_arrival_times([[0.0, 1.0], [*range(40)], [39.5, 39.6]], t_start=0.0, unit="day")
    training, validation, test = EventLog.of(events, by="time").parts()
    assert [len(part) for part in (training, validation, test)] == [2, 1, 2]
    assert sum(part.num_events for part in (training, validation, test)) == 44


def test_too_few_labels_and_no_events_at_all_are_refused() -> None:
    events = Events.from_gaps([[0.0, 1.0]] * 10, marks=[[0, 1]] * 10, num_marks=2, unit="hour")
    with pytest.raises(ValueError, match="1 labels for 2 marks"):
        EventLog.of(events, labels=["shop"])
    for by in ("sequence", "time"):
        with pytest.raises(ValueError, match="shop has no events"):
            EventLog.of(Events.from_gaps([[]] * 10, unit="hour"), by=by, name="shop")


def test_every_sequence_is_in_one_part_always_the_same(file: Path) -> None:
    log = EventLog.read(file, **COLUMNS)
    parts = log.parts()
    assert [len(part) for part in parts] == [10, 1, 1]
    found = sorted(float(t) for part in parts for t in part.t_start)
    assert found == sorted(log.events.t_start.tolist())
    assert all(same(a, b) for a, b in zip(parts, EventLog.read(file, **COLUMNS).parts(), strict=True))


def test_other_formats_hold_the_same(file: Path, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    log = EventLog.read(file, **COLUMNS)
    names = dict(zip(HEADER, zip(*rows(), strict=True), strict=True))
    parquet.write_table(arrow.table({k: list(v) for k, v in names.items()}), tmp_path / "shop.parquet")
    assert EventLog.read(tmp_path / "shop.parquet", **COLUMNS).equals(log)
    records = [
        {"time_since_start": times[:n], "type_event": marks[:n], "dim_process": 3}
        for times, marks, n in zip(
            log.events.times.tolist(), log.events.marks.tolist(), log.events.lengths.tolist(), strict=True
        )
    ]
    (tmp_path / "shop.json").write_text(json.dumps(records))
    (tmp_path / "shop.jsonl").write_text("\n".join(map(json.dumps, records)))
    parquet.write_table(arrow.Table.from_pylist(records), tmp_path / "easy.parquet")
    for name in ("shop.json", "shop.jsonl", "easy.parquet"):
        assert same(EventLog.read(tmp_path / name).events, log.events)


def test_a_pack_keeps_its_own_parts_and_unit(tmp_path: Path) -> None:
    split = np.array([2, 0, 1, 0], np.int8)
    np.savez(
        tmp_path / "pack.npz", times=np.arange(12.0), marks=np.zeros(12, np.int32),
        offsets=np.arange(0, 13, 3), split=split, unit=np.array("day"), num_marks=np.array(2),
    )  # fmt: skip
    log = EventLog.read(tmp_path / "pack.npz")
    assert [part.t_start.tolist() for part in log.parts()] == [[3.0, 9.0], [6.0], [0.0]]
    assert (log.events.unit, log.events.num_marks) == ("day", 2)
    with pytest.raises(ValueError, match="its unit is 'day', not 'hour'"):
        EventLog.read(tmp_path / "pack.npz", unit="hour")


def test_a_log_survives_its_file(file: Path, tmp_path: Path) -> None:
    write(file, HEADER, rows(count=40))
    for by in ("sequence", "time"):
        log = EventLog.read(file, **COLUMNS, end="1000", by=by)
        log.save(tmp_path / "log.safetensors")
        loaded = EventLog.load(tmp_path / "log.safetensors")
        assert loaded.equals(log)
        assert (loaded.labels, loaded.name, loaded.statement) == (log.labels, "shop.csv", log.statement)
    assert not log.equals(EventLog.read(file, **COLUMNS))


# Bad input


@pytest.mark.parametrize(
    ("line", "cells", "message"),
    [
        (3, ["c1", "look", "", ""], "line 3 of .* has a time that is empty: a number or an ISO date"),
        (3, ["c1", "look", "soon", ""], "line 3 of .* has a time that is 'soon'"),
        (3, ["c1", "look", "nan", ""], "line 3 of .* is nan: every time must be finite"),
        (3, ["c1", "look"], "line 3 of .* has 2 cells, its header 4"),
        (20, ["c1", "look", "0", ""], "line 20 of .*: 'c1' has .* at 0, earlier than its row before: sort"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: int, cells: list[str], message: str) -> None:
    content: list[list[Any]] = rows()
    content[line - 2] = cells
    with pytest.raises(ValueError, match=message):
        EventLog.read(write(tmp_path / "shop.csv", HEADER, content), **COLUMNS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (COLUMNS | {"mark": "wat"}, "there is no column 'wat': did you mean 'what'"),
        ({"user": "customer", "time": "when"}, "no column of the mark .* --mark NAME, or --mark - if"),
        ({"user": "customer", "mark": "what"}, r"no column of the time .* --time NAME$"),
        (COLUMNS | {"user": "-"}, "earlier than the row before it"),
        (COLUMNS | {"end": "3"}, "--end of .* is 3, but there are events up to"),
        (COLUMNS | {"by": "tiem"}, "no way to split events 'tiem': did you mean 'time'"),
    ],
)
def test_what_does_not_fit_a_file_is_told(file: Path, options: dict[str, str], message: str) -> None:
    if options.get("user") == "-":
        write(file, HEADER, [["", "look", 5, ""], ["", "look", 4, ""]])
    with pytest.raises(ValueError, match=message):
        EventLog.read(file, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"mark": "-"}, {"user": "user", "mark": "-"}])
def test_two_columns_of_one_name_are_not_guessed_between(tmp_path: Path, options: dict[str, Any]) -> None:
    content = [["a", "b", i] for i in range(20)]
    path = write(tmp_path / "shop.csv", ["user", "user", "time"], content)
    with pytest.raises(ValueError, match=r"has 2 columns 'user': give each a name of its own"):
        EventLog.read(path, by="time", **options)


def test_too_few_or_too_short_sequences_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "shop.csv", HEADER, rows(users=4))
    with pytest.raises(ValueError, match=r"has 4 sequences, but 5 are the fewest.*--split time"):
        EventLog.read(path, **COLUMNS)
    path = write(tmp_path / "shop.csv", HEADER, rows(count=1))
    with pytest.raises(ValueError, match="leaves no sequence of two events for train"):
        EventLog.read(path, **COLUMNS)
    path = write(tmp_path / "shop.csv", HEADER, [])
    with pytest.raises(ValueError, match="has a header but no events"):
        EventLog.read(path, **COLUMNS)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no file"):
        EventLog.read(tmp_path / "none.csv")
    (tmp_path / "log.txt").write_text("")
    with pytest.raises(ValueError, match=r"no format of event files '\.txt'"):
        EventLog.read(tmp_path / "log.txt")
    (tmp_path / "log.json").write_text("[]")
    with pytest.raises(ValueError, match="--mark: columns are those of CSV and Parquet"):
        EventLog.read(tmp_path / "log.json", mark="kind")
    (tmp_path / "log.csv").write_bytes(b"user_id,item_id,timestamp\n\xff\xfe\n")
    with pytest.raises(ValueError, match="not a CSV file of UTF-8"):
        EventLog.read(tmp_path / "log.csv")
    (tmp_path / "log.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="not a readable Parquet file"):
        EventLog.read(tmp_path / "log.parquet")


# Training


def test_a_run_on_a_file_is_trained_scored_drawn_and_needs_the_file_no_more(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    events = {"--user": "customer", "--mark": "what", "--time": "when", "--end": "80", "--unit": None}
    rows_of = dict.fromkeys(("--x", "--y", "--group"))
    fit_file(file, "cmhp", rows_of, events, out=tmp_path / "run", steps=8, change=TINY)
    file.unlink()
    row = evaluate_run(tmp_path / "run", data_dir=None, device="cpu")
    assert (row.dataset, row.recipe) == ("shop.csv", "own data")
    assert row.scores["test"].events == 5
    assert row.scores["test"].survival_nll > 0
    print_runs([row])
    shown = capsys.readouterr().out
    assert "shop.csv" in shown
    assert f"{row.scores['test'].survival_nll:.3f}" in shown
    names: list[Any] = []
    draw = pictures.confusion_picture
    monkeypatch.setattr(
        pictures, "confusion_picture", lambda *a, **k: names.append(k["names"]) or draw(*a, **k)
    )
    assert [path.suffix for path in plot_runs([tmp_path / "run"])] == [".png"] * 5
    assert names == [["buy", "cart", "look"]]
    about = json.loads((tmp_path / "run" / "run.json").read_text())["run"]
    assert about["columns"] == {**COLUMNS, "file": str(file), "end": "80", "split": "sequence"}


def test_the_model_knows_the_scale_of_time_of_the_training_part(file: Path, tmp_path: Path) -> None:
    log = EventLog.read(file, **COLUMNS, unit="hour")
    model = fit_events(log, out=tmp_path / "run", steps=4, change=TINY)
    training = log.parts()[0]
    gaps = training.gaps[training.scored]
    assert isinstance(model, CMHP)
    assert float(model.log_gap_mean) == pytest.approx(float(gaps.log().mean()), rel=1e-6)
    assert model.unit == "hour"
    other = EventLog.of(log.events.select(slice(0, 10)), labels=log.labels, name="shop.csv")
    with pytest.raises(ValueError, match=r"run on other events than shop\.csv has now"):
        fit_events(other, out=tmp_path / "run", steps=4, change=TINY, resume=True)
    fit_events(log, out=tmp_path / "run", steps=4, change=TINY, resume=True)


def test_the_command_takes_a_file(file: Path, tmp_path: Path) -> None:
    sizes = [f"--set={item}" for item in TINY]
    columns = ["--user", "customer", "--mark", "what", "--time", "when"]
    words = ["train", file.name, "cmhp", "--steps", "2"]
    done = command(*words, *columns, *sizes, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "shop-cmhp-0" / "events.safetensors").exists()
    done = command(*words, "--x", "when", cwd=tmp_path)
    assert done.returncode == 2
    assert "use --user, --mark, --time" in done.stderr


def test_options_and_models_that_do_not_fit_are_told_before_a_file_is_read(tmp_path: Path) -> None:
    none: dict[str, str | None] = dict.fromkeys(("--x", "--y", "--group"))
    path = tmp_path / "log.parquet"
    with pytest.raises(ValueError, match="--x: for models of points, but 'cmhp' is one of events"):
        fit_file(path, "cmhp", none | {"--x": "a"}, {})
    with pytest.raises(ValueError, match="--user, --end: for models of events, but 'cnp'"):
        fit_file(path, "cnp", none, {"--user": "a", "--mark": None, "--end": "last"})
    with pytest.raises(ValueError, match=r"'cnp' is a model of points, .* from \.csv, \.tsv, \.parquet"):
        fit_file(tmp_path / "log.json", "cnp", none, {})
    with pytest.raises(ValueError, match="no model 'cmph': did you mean 'cmhp'"):
        fit_file(path, "cmph", none, {})
    with pytest.raises(ValueError, match="'cnp' is no model of events"):
        event_recipe("cnp", num_marks=3)


def test_baselines_can_predict_the_mark_from_the_gap_too() -> None:
    for model in ("thp", "gru", "trivial"):
        assert event_recipe(f"{model}-gap", num_marks=3).model == {"num_marks": 3, "mark_given_gap": True}
    with pytest.raises(ValueError, match="no variant of cmhp 'gap'"):
        event_recipe("cmhp-gap", num_marks=3)
