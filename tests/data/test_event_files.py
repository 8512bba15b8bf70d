"""Event files in their public formats, made here, and the packs prepared from them."""

import hashlib
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from constmem.cli import app
from constmem.data import (
    Events,
    listing,
    load_events,
    prepare_easytpp,
    prepare_jodie,
    read_easytpp,
    read_event_csv,
    read_event_parquet,
)
from tests.laws.processes import same_events as same


@pytest.fixture(autouse=True)
def own_folder(request, tmp_path, monkeypatch):
    """Keep every test away from the packs of whoever runs it."""
    if request.node.get_closest_marker("data") is None:
        monkeypatch.setenv("CONSTMEM_DATA", str(tmp_path / "packs"))


HEADER = "user_id,item_id,timestamp,state_label,comma_separated_list_of_features\n"
ROWS = "7,0,0.0,0,0.1,0.2\n3,2,1.5,0,0.1,0.2\n7,1,2.0,0,0.1,0.2\n7,,2.0,0,0.1,0.2\n3,2,9.0,1,0.1,0.2\n"
READ = {"times": [[0.0, 2.0, 2.0], [1.5, 9.0]], "marks": [[0, 1, -1], [2, 2]]}


def expected(**changes):
    told = {"marks": READ["marks"], "unit": "second", "num_marks": 3} | changes
    return Events.from_arrival_times(READ["times"], **told)


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def record(**changes):
    whole = {
        "dim_process": 3, "seq_len": 3, "seq_idx": 0, "time_since_start": [0, 2.0, 2.5],
        "time_since_last_event": [0, 2.0, 0.5], "type_event": [0, 1, 2],
    }  # fmt: skip
    return {key: value for key, value in (whole | changes).items() if value is not None}


def easytpp_folder(folder, ending="json"):
    folder.mkdir()
    for k, name in enumerate(("train", "dev", "test")):
        records = [record(seq_idx=i, type_event=[k, 1, 2]) for i in range(3 - k)]
        text = json.dumps(records) if ending == "json" else "\n".join(map(json.dumps, records))
        (folder / f"{name}.{ending}").write_text(text)
    return folder


def test_a_csv_in_the_jodie_layout_is_read_whole(tmp_path):
    path = written(tmp_path / "a.csv", HEADER + ROWS)
    same(read_event_csv(path, unit="second"), expected())
    same(read_event_csv(path, unit="second", num_marks=9), expected(num_marks=9))
    reordered = "timestamp,User,mark\n" + "\n".join(
        ",".join((row.split(",")[2], row.split(",")[0], row.split(",")[1])) for row in ROWS.split()
    )
    same(read_event_csv(written(tmp_path / "b.csv", reordered), unit="second"), expected())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEADER + ROWS + "7,1,1.0,0\n", r"line 7 of .*: '7' has an event at 1.0 after one at 2.0; sort"),
        (HEADER + ROWS + "7,1\n", "line 7 of .* has 2 fields, but 3 or more"),
        (HEADER + "7,x,0.0\n", "line 2 of .* has mark 'x'"),
        (HEADER + "7,1.5,0.0\n", "line 2 of .* has mark '1.5'"),
        (HEADER + "7,1,noon\n", "line 2 .* time 'noon'"),
        (HEADER + "7,1,nan\n", r"times\[0\]\[0\] is nan"),
        (HEADER + "7,1,0.0\n7,1,nan\n", "line 3 .* event at nan after one at 0.0"),
        (HEADER, "a header but no events"),
        ("", "names no user"),
        (ROWS, "names no user .*'7, 0, 0.0"),
        ("user_id,colour,timestamp\n", "names no mark"),
    ],
)
def test_a_csv_that_is_not_sound_is_refused_with_its_line(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        read_event_csv(written(tmp_path / "a.csv", text), unit="second")


def test_bytes_are_no_csv(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"PK\xff\xfe\x00")
    with pytest.raises(ValueError, match="not a CSV file of UTF-8"):
        read_event_csv(tmp_path / "a.csv", unit="second")


@pytest.mark.parametrize("lines", [False, True])
def test_easytpp_json_and_json_lines_are_read_alike(tmp_path, lines):
    records = [record(), record(seq_len=2, time_since_start=[1.0, 4.0], type_event=[2, 2])]
    text = "\n".join(map(json.dumps, records)) + "\n" if lines else json.dumps(records, indent=1)
    events = read_easytpp(written(tmp_path / "train.json", text), unit="hour")
    same(
        events,
        Events.from_arrival_times(
            [[0, 2.0, 2.5], [1.0, 4.0]], marks=[[0, 1, 2], [2, 2]], unit="hour", num_marks=3
        ),
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (record(type_event=None), "record 1 of .* lacks type_event: it holds dim_process"),
        (record(dim_process=None), "record 1 of .* lacks dim_process"),
        (record(seq_len=4), "3 times, 3 marks and a seq_len of 4"),
        (record(type_event=[1, 2]), "3 times, 2 marks"),
        (record(dim_process=5), "differ in dim_process"),
        (record(time_since_start=[0, "a", 1]), "time_since_start in record 1 .* not a list of numbers"),
        (record(time_since_start=[[0], [1], [2]]), "not a flat list"),
        (record(time_since_start=[0, 2, 1]), "sequence 1 decrease at index 2"),
        (record(type_event=[0, 1, 3]), "marks go from 0"),
        ([1, 2], "record 1 of .* is not an object"),
    ],
)
def test_easytpp_records_that_are_not_sound_are_refused(tmp_path, content, message):
    path = written(tmp_path / "train.json", json.dumps([record(), content]))
    with pytest.raises(ValueError, match=message):
        read_easytpp(path, unit="hour")


def test_other_files_are_no_easytpp(tmp_path):
    with pytest.raises(ValueError, match="neither a JSON list of records nor JSON Lines"):
        read_easytpp(written(tmp_path / "a.json", '[{"dim_process": 3, '), unit="hour")
    with pytest.raises(ValueError, match="has no records"):
        read_easytpp(written(tmp_path / "b.json", "[]"), unit="hour")
    with pytest.raises(ValueError, match="pickle, which can run code"):
        read_easytpp(written(tmp_path / "train.pkl", ""), unit="hour")
    with pytest.raises(FileNotFoundError):
        read_easytpp(tmp_path / "nowhere.json", unit="hour")


def test_parquet_is_read_in_both_layouts(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [row.split(",") for row in ROWS.split()]
    flat = {
        "user_id": [int(row[0]) for row in rows],
        "item_id": [int(row[1]) if row[1] else None for row in rows],
        "timestamp": [float(row[2]) for row in rows],
    }
    parquet.write_table(pyarrow.table(flat), tmp_path / "flat.parquet")
    same(read_event_parquet(tmp_path / "flat.parquet", unit="second"), expected())
    nested = pyarrow.table({key: [value] for key, value in record().items()})
    parquet.write_table(nested, tmp_path / "nested.parquet")
    path = written(tmp_path / "a.json", json.dumps([record()]))
    same(read_event_parquet(tmp_path / "nested.parquet", unit="hour"), read_easytpp(path, unit="hour"))
    with pytest.raises(ValueError, match="not a readable Parquet"):
        read_event_parquet(path, unit="hour")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"pip install 'constmem\[data\]'"):
        read_event_parquet(tmp_path / "flat.parquet", unit="second")


# Preparing


def test_mooc_is_rebased_without_simultaneous_events_and_split_by_file_order(tmp_path):
    rows = [f"{user},{user % 3},{10 * user}.0,0,1\n" for user in range(10)]
    rows += [f"{user},1,{100 + user}.0,0,1\n{user},2,{100 + user}.0,0,1\n" for user in range(10)]
    source = written(tmp_path / "mooc.csv", HEADER + "".join(rows) + "99,0,500.0,0,1\n")
    path = prepare_jodie("mooc", source)
    with np.load(path, allow_pickle=False) as pack:
        sentence, sources = str(pack["source"]), json.loads(str(pack["sources"]))
    for part in ("31 events", "10 simultaneous", "1 sequences of fewer than two"):
        assert part in sentence
    assert sources == {"mooc.csv": hashlib.sha256(source.read_bytes()).hexdigest()}
    events = {split: load_events("mooc", split=split) for split in ("train", "validation", "test")}
    assert [len(part) for part in events.values()] == [6, 2, 2]
    assert events["train"].times.tolist() == [[0.0, 100.0 - 9 * user] for user in range(6)]
    assert events["test"].marks.tolist() == [[2, 1], [0, 1]]
    assert events["test"].unit == "second"
    assert events["test"].num_marks == 3


def test_reddit_keeps_the_fifty_commonest_marks_and_says_what_it_leaves_out(tmp_path):
    rows, time = [], 0
    for mark in range(52):
        for user in range(2 if mark in (4, 20) else 3):
            time += 1
            rows.append(f"{user},{mark},{time},0,1\n")
    source = tmp_path / "source"
    source.mkdir()
    written(source / "reddit.csv", HEADER + "".join(rows))
    with np.load(prepare_jodie("reddit", source), allow_pickle=False) as pack:
        assert "4 outside the 50 commonest of 52 marks left out" in str(pack["source"])
        assert pack["marks"][:5].tolist() == [0, 1, 2, 3, 4], "mark 5 is now number 4"
        assert pack["times"][3:5].tolist() == [10, 15]
        assert int(pack["num_marks"]) == 50
    assert listing()[7].counts == {"train": 1, "validation": 1, "test": 1}


def test_wiki_makes_pages_the_sequences_and_editors_the_marks(tmp_path):
    rows = "0,5,0\n1,5,1\n0,6,2\n2,6,3\n0,5,4\n"
    events = [
        load_events("wiki", split=split)
        for _ in [prepare_jodie("wiki", written(tmp_path / "wikipedia.csv", HEADER + rows))]
        for split in ("train", "validation", "test")
    ]
    assert [len(part) for part in events] == [1, 0, 1]
    assert events[0].times.tolist() == [[0, 1, 4]]
    assert events[0].marks.tolist() == [[0, 1, 0]]
    assert events[2].marks.tolist() == [[0, 2]]


@pytest.mark.parametrize("ending", ["json", "jsonl"])
def test_easytpp_keeps_everything_and_its_own_splits(tmp_path, ending):
    path = prepare_easytpp(easytpp_folder(tmp_path / "taxi", ending))
    assert path.name == "events_taxi.npz"
    for k, split in enumerate(("train", "validation", "test")):
        events = load_events("taxi", split=split)
        assert (len(events), events.unit, events.num_marks) == (3 - k, "hour", 3)
        assert events.marks.tolist() == [[k, 1, 2]] * (3 - k)


def test_a_set_of_ones_own_is_prepared_listed_and_loaded_by_its_name(tmp_path, capsys):
    source = easytpp_folder(tmp_path / "files")
    arguments = ["data", "prepare", "easytpp", "--source", str(source), "--name", "visits", "--unit", "day"]
    app(arguments, standalone_mode=False)
    assert "events_visits.npz" in capsys.readouterr().out
    assert load_events("visits", split="test").unit == "day"
    app(["data", "list"], standalone_mode=False)
    shown = capsys.readouterr().out
    assert "events_visits: 3 train, 2 validation, 1 test" in shown
    assert "events_taxi: missing. EasyTPP Taxi" in shown
    assert "constmem data prepare wiki --source wikipedia.csv" in shown


def test_every_command_that_the_listing_gives_says_where_to_write_and_in_which_unit(tmp_path, capsys):
    app(["data", "list", "--data-dir", str(tmp_path / "none")], standalone_mode=False)
    shown = capsys.readouterr().out
    commands = re.findall("`(constmem data prepare [^`]* --source [^`]*)`", shown)
    assert len(commands) == 8
    assert all("--data-dir FOLDER" in command for command in commands)
    easytpp = [command for command in commands if "easytpp" in command and "--name taxi" not in command]
    assert len(easytpp) == 2
    assert all("--unit" in command for command in easytpp)  # that of taxi alone is known
    assert f"Looked in {tmp_path / 'none'}, which does not exist: --data-dir FOLDER" in shown
    assert "CONSTMEM_DATA" in shown
    own = re.search("`(constmem train [^`]*)`", shown)
    assert own is not None
    assert "--unit" in own[1]


def test_what_cannot_be_prepared_is_told(tmp_path):
    with pytest.raises(ValueError, match="did you mean 'mooc'"):
        prepare_jodie("mook", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"there is no .*mooc.csv"):
        prepare_jodie("mooc", tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        prepare_easytpp(tmp_path / "nowhere", name="taxi")
    source = easytpp_folder(tmp_path / "files")
    with pytest.raises(ValueError, match="does not tell the unit of files"):
        prepare_easytpp(source)
    (source / "dev.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"0 files for validation \(none\).*dev or validation"):
        prepare_easytpp(source, name="taxi")
    written(source / "valid.json", json.dumps([record(dim_process=4)]))
    with pytest.raises(ValueError, match=r"differ in dim_process \(train.json: 3, valid.json: 4"):
        prepare_easytpp(source, name="taxi")
    with pytest.raises(ValueError, match="cannot be a part of a file name"):
        prepare_easytpp(source, name="../taxi")
    one = written(tmp_path / "mooc.csv", HEADER + "1,0,1\n")
    with pytest.raises(ValueError, match="no sequence of two events is left"):
        prepare_jodie("mooc", one)
    with pytest.raises(ValueError, match="without a mark"):
        prepare_jodie("mooc", written(one, HEADER + "1,,1\n1,0,2\n"))
    assert not (tmp_path / "packs").exists(), "nothing half-made stays behind"


def test_a_pack_that_is_missing_unknown_or_unsound_is_told(tmp_path, refuses):
    with pytest.raises(FileNotFoundError, match=r"events_taxi.npz .*prepare easytpp"):
        load_events("taxi")
    with pytest.raises(ValueError, match="did you mean 'taxi'"):
        load_events("taxis")
    with refuses(ValueError, "there is no split 'dev'"):
        load_events("taxi", split="dev")
    path = prepare_easytpp(easytpp_folder(tmp_path / "taxi"))
    with np.load(path, allow_pickle=False) as pack:
        whole = dict(pack)
    for key, value, message in (
        ("offsets", whole["offsets"][:-1], "do not fit"),
        ("times", whole["times"][::-1], "train split of .* not sound: the times of sequence 0 decrease"),
        ("marks", whole["marks"] + 1, "train split of .* not sound: .*marks go from"),
    ):
        np.savez(path, **(whole | {key: value}))
        with pytest.raises(ValueError, match=message):
            load_events("taxi")


# The real packs


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "counts", "unit", "num_marks"),
    [
        ("taxi", (1400, 200, 400), "hour", 10),
        ("mooc", (4228, 1409, 1410), "second", 97),
        ("wiki", (600, 200, 200), "second", 8227),
    ],
)
def test_the_real_packs_are_sound_and_have_their_counts(name, counts, unit, num_marks):
    if not os.environ.get("CONSTMEM_DATA"):
        pytest.skip("CONSTMEM_DATA is not set")
    parts = [load_events(name, split=split) for split in ("train", "validation", "test")]
    assert tuple(map(len, parts)) == counts
    assert {(part.unit, part.num_marks) for part in parts} == {(unit, num_marks)}
