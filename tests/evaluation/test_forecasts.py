"""Forecasts of a file's sequences: the model's own answers, in the file's names and dates."""

import csv
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from constmem import PointProcess, cli
from constmem.data import EventLog, Events, Table
from constmem.evaluation.runs import next_events
from constmem.point_processes import Trivial
from constmem.training import fit_events, fit_table

START = datetime(2024, 3, 1, 12, tzinfo=UTC)
COLUMNS = {"user": "customer", "mark": "page", "time": "when"}
KINDS = "home", "cart", "pay"
TINY = ["model.dim=8", "model.hidden=8", "model.components=2", "batch=4", "warmup=1"]


def visits(users: int = 12, count: int = 6) -> list[list[str]]:
    rng = np.random.default_rng(0)
    rows = []
    for user in range(users):
        hours = rng.lognormal(0, 0.5, count).cumsum()
        when = [(START + timedelta(hours=float(hour))).isoformat() for hour in hours]
        rows += [[f"c{user}", KINDS[(user + i) % 3], at] for i, at in enumerate(when)]
    return rows


def write(path: Path, rows: list[list[str]], header: tuple[str, ...] = ("customer", "page", "when")) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a file of dates, counted in hours."""
    folder = tmp_path_factory.mktemp("forecasts")
    log = EventLog.read(write(folder / "visits.csv", visits()), **COLUMNS, unit="hour")
    fit_events(
        log, "gru", out=folder / "run", steps=3, change=TINY, columns={"file": "visits.csv", **COLUMNS}
    )
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def command(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["constmem", "forecast", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            cli.main()
        return left.value.code or 0, *capsys.readouterr()

    return command


@torch.no_grad()
def test_dates_and_names_go_in_and_out_and_each_sequence_is_forecast_by_its_own_events(
    trained: Path, tmp_path: Path, run: Any
) -> None:
    new = [row for row in visits(5) if row[0] in ("c1", "c3")]
    code, said, _ = run(trained / "run", write(tmp_path / "new.csv", new), "--out", tmp_path / "next.csv")
    assert code == 0
    assert "1 event of each of 2 sequences" in said
    found = read(tmp_path / "next.csv")
    assert [(row["customer"], row["event"]) for row in found] == [("c1", "1"), ("c3", "1")]
    assert list(found[0]) == ["customer", "event", "when", "when_q5", "when_q95", "page", "page_probability"]
    model, labels = PointProcess.from_pretrained(trained / "run"), sorted(KINDS)
    for row in found:
        own = [r for r in new if r[0] == row["customer"]]
        hours = [datetime.fromisoformat(r[2]).timestamp() / 3600 for r in own]
        events = Events.from_arrival_times(
            [hours], marks=[[labels.index(r[1]) for r in own]], unit="hour", num_marks=3
        )
        following = model.query(model.condition(events))
        last = datetime.fromisoformat(own[-1][2])
        for name, level in (("when_q5", 0.05), ("when", 0.5), ("when_q95", 0.95)):
            expected = last + timedelta(hours=float(following.quantiles([level])))
            assert abs((datetime.fromisoformat(row[name]) - expected).total_seconds()) <= 1
        chances = following.mark_logits().exp()[0]
        assert row["page"] == labels[int(chances.argmax())]
        assert float(row["page_probability"]) == pytest.approx(float(chances.max()), abs=1e-4)


def test_parquet_and_csv_say_the_same(trained: Path, tmp_path: Path, run: Any) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    new = visits(3)
    columns = dict(zip(("customer", "page", "when"), map(list, zip(*new, strict=True)), strict=True))
    columns["when"] = [datetime.fromisoformat(when) for when in columns["when"]]
    parquet.write_table(arrow.table(columns), tmp_path / "new.parquet")
    run(trained / "run", tmp_path / "new.parquet", "--out", tmp_path / "a.parquet", "--ahead", "2")
    run(trained / "run", write(tmp_path / "new.csv", new), "--out", tmp_path / "b.csv", "--ahead", "2")
    table = parquet.read_table(tmp_path / "a.parquet")
    for name in ("customer", "when", "page"):
        assert table[name].to_pylist() == [row[name] for row in read(tmp_path / "b.csv")]


@torch.no_grad()
def test_events_after_the_next_are_as_independent_gaps_add_up() -> None:
    """A model without memory, against gaps drawn by numpy from its own mixture."""
    torch.manual_seed(0)
    model = Trivial(num_marks=2, hidden=8, components=3).eval()
    events = Events.from_arrival_times([[0.0, 7.0]], marks=[[0, 1]], unit="hour", num_marks=2)
    generator = torch.Generator().manual_seed(0)
    found = next_events(model, events, ahead=3, samples=4000, generator=generator)
    gap = model.query(model.condition(events)).gap
    weights, rng = gap.log_weights[0].exp().double().numpy(), np.random.default_rng(0)
    loc, scale = (t[0].double().numpy() for t in (gap.loc, gap.scale))
    which = rng.choice(len(loc), (100_000, 3), p=weights / weights.sum())
    times = 7 + np.exp(loc[which] + scale[which] * rng.standard_normal(which.shape)).cumsum(1)
    expected = np.quantile(times, (0.05, 0.5, 0.95), axis=0).T
    np.testing.assert_allclose(found.times[0, 0], expected[0], rtol=0.03)  # exact, against draws
    np.testing.assert_allclose(found.times[0, 1:], expected[1:], rtol=0.12)
    assert found.marks.shape == found.chances.shape == (1, 3)
    assert (found.times.diff(dim=1) > 0).all()


def test_numbers_stay_numbers_and_one_sequence_needs_no_name(tmp_path: Path, run: Any) -> None:
    rng = np.random.default_rng(1)
    rows = [[f"{t:.3f}"] for t in rng.exponential(5.0, 80).cumsum()]
    path = write(tmp_path / "beats.csv", rows, ("t",))
    log = EventLog.read(path, user="-", mark="-", by="time")
    columns = {"file": str(path), "user": "-", "mark": "-"}
    fit_events(log, "gru", out=tmp_path / "run", steps=2, change=TINY, columns=columns)
    assert run(tmp_path / "run", path, "--out", tmp_path / "next.csv")[0] == 0
    (row,) = read(tmp_path / "next.csv")
    assert list(row) == ["event", "time", "time_q5", "time_q95"]
    assert float(rows[-1][0]) < float(row["time_q5"]) < float(row["time"]) < float(row["time_q95"])


def test_a_kind_that_was_never_seen_is_unknown_and_reported(trained: Path, tmp_path: Path, run: Any) -> None:
    new = write(tmp_path / "new.csv", [*visits(1), ["c0", "search", "2024-03-09T00:00:00+00:00"]])
    code, _, warned = run(trained / "run", new, "--out", tmp_path / "next.csv")
    assert code == 0
    assert "1 events are of kinds that the run has not seen" in warned
    for mark in ("", *KINDS):  # as unknown as an empty one, and none of those that it knows
        other = write(tmp_path / "other.csv", [*visits(1), ["c0", mark, "2024-03-09T00:00:00+00:00"]])
        said = run(trained / "run", other, "--out", tmp_path / "same.csv", "--replace")[2]
        assert "warning" not in said
        assert (read(tmp_path / "next.csv") == read(tmp_path / "same.csv")) == (mark == "")


def test_errors_are_one_clear_line_and_leave_no_file(
    trained: Path, tmp_path: Path, run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    new = write(tmp_path / "new.csv", visits(2))
    table = tmp_path / "points"
    fit_table(Table.of(range(60), range(60)), "cnp", out=table, steps=1, change=["batch=2"])
    capsys.readouterr()
    (tmp_path / "taken.csv").write_text("")
    other = write(tmp_path / "other.csv", visits(2), ("who", "page", "when"))
    unsorted = write(tmp_path / "unsorted.csv", visits(1)[::-1])
    out = tmp_path / "next.csv"
    for words, message in (
        ((tmp_path / "none", new, "--out", out), "there is no run in"),
        ((table, new, "--out", out), "a model of points, which forecasts no events"),
        ((trained / "run", tmp_path / "gone.csv", "--out", out), "there is no file"),
        ((trained / "run", tmp_path / "new.json", "--out", out), "are read from .csv, .tsv, .parquet"),
        ((trained / "run", other, "--out", out), "there is no column 'customer'"),
        ((trained / "run", unsorted, "--out", out), "sort the rows by time"),
        ((trained / "run", new, "--out", tmp_path / "taken.csv"), "exists already"),
        ((trained / "run", new, "--out", tmp_path / "next.txt"), "are written to .csv, .tsv and .parquet"),
    ):
        code, _, said = run(*words)
        assert code == 2, said
        assert message in said
        assert len(said.strip().splitlines()) == 1
        assert not out.exists()
