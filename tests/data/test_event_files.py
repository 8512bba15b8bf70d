"""Event files in their public formats, made here: read whole, or refused by line, within bounds."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from constmem.data import (
    Events,
    load_events,
    prepare_easytpp,
    read_easytpp,
    read_event_csv,
    read_event_parquet,
)
from tests.laws.models import same_events as same


@pytest.fixture(autouse=True)
def own_folder(request, tmp_path, monkeypatch):
    """Keep every test away from the packs of whoever runs it."""
    if request.node.get_closest_marker("data") is None:
        monkeypatch.setenv("CONSTMEM_DATA", str(tmp_path / "packs"))


HEADER = "user_id,item_id,timestamp,state_label,comma_separated_list_of_features\n"
ROWS = "7,0,0.0,0,0.1,0.2\n3,2,1.5,0,0.1,0.2\n7,1,2.0,0,0.1,0.2\n7,,2.0,0,0.1,0.2\n3,2,9.0,1,0.1,0.2\n"
READ = {"times": [[0.0, 2.0, 2.0], [1.5, 9.0]], "marks": [[0, 1, -1], [2, 2]]}


def expected(**changes):
    given = {"marks": READ["marks"], "unit": "second", "num_marks": 3} | changes
    return Events.from_arrival_times(READ["times"], **given)


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
        (
            HEADER + ROWS + "7,1,1.0,0\n",
            r"line 7 of .*: '7' has an event at 1.0, earlier than its row before",
        ),
        (HEADER + ROWS + "7,1\n", "line 7 of .* has 2 cells, but 3 or more"),
        (HEADER + "7,x,0.0\n", "line 2 of .* has mark 'x'"),
        (HEADER + "7,1.5,0.0\n", "line 2 of .* has mark '1.5'"),
        (HEADER + "7,1000000000000,0.0\n", "marks of .* is 1000000000001, but 1 to 10,000,000"),
        (HEADER + "7,1,noon\n", "line 2 .* time that is 'noon'"),
        (HEADER + "7,1,nan\n", "line 2 .* nan: every time must be finite"),
        (HEADER + "7,1,1700000000000000001\n", "line 2 .* which float64 would round"),
        (HEADER, "a header but no events"),
        ("", "a.csv is empty"),
        (ROWS, "names no column of the user .* 7, 0, 0.0"),
        ("user_id,colour,timestamp\n", "names no column of the mark"),
        ("x" * 2**20, "first line of .* letters or more"),
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
        (record(dim_process=1e30), "dim_process in record 1 .* 1 to 10,000,000 marks"),
        (record(dim_process="3"), "dim_process in record 1"),
    ],
)
def test_easytpp_records_that_are_not_sound_are_refused(tmp_path, content, message):
    path = written(tmp_path / "train.json", json.dumps([record(), content]))
    with pytest.raises(ValueError, match=message):
        read_easytpp(path, unit="hour")


def test_other_files_are_no_easytpp(tmp_path):
    with pytest.raises(ValueError, match="neither a JSON list of records nor JSON Lines"):
        read_easytpp(written(tmp_path / "a.json", '[{"dim_process": 3, '), unit="hour")
    with pytest.raises(ValueError, match="neither a JSON list"):
        read_easytpp(written(tmp_path / "a.json", "[" * 100_000), unit="hour")
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


def test_a_pack_that_is_missing_unknown_or_unsound_is_named(tmp_path, refuses):
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


def test_a_parquet_file_of_few_bytes_and_very_many_rows_is_refused_before_they_are_read(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = 20_000_000
    same_number = pyarrow.DictionaryArray.from_arrays(np.zeros(rows, np.int8), pyarrow.array([7]))
    path = tmp_path / "bomb.parquet"
    with parquet.ParquetWriter(path, pyarrow.schema([(n, same_number.type) for n in "uit"])) as writer:
        writer.write_table(pyarrow.table(dict.fromkeys("uit", same_number)))
    assert path.stat().st_size < 500_000
    with pytest.raises(ValueError, match=f"announces {3 * rows:,} values"):
        read_event_parquet(path, unit="second")


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


@pytest.mark.parametrize("unit", ["second", "day"])
def test_dates_finer_than_microseconds_are_refused_not_cut(tmp_path: Path, unit: str) -> None:
    path = tmp_path / "e.csv"
    path.write_text("user_id,item_id,timestamp\n7,0,2024-01-01T00:00:00.000001000Z\n")
    assert read_event_csv(path, unit=unit).num_events == 1
    path.write_text("user_id,item_id,timestamp\n7,0,2024-01-01T00:00:00.000001101Z\n")
    with pytest.raises(ValueError, match=r"line 2 .* finer than the microseconds"):
        read_event_csv(path, unit=unit)


def test_whole_times_of_records_that_float64_would_round_are_refused(tmp_path: Path) -> None:
    path, start = tmp_path / "e.jsonl", 1_700_000_000_000_000_000
    for times, fits in (([start, start + 256], True), ([start, start + 100], False)):
        record = {"time_since_start": times, "type_event": [0, 0], "dim_process": 1, "seq_len": 2}
        path.write_text(json.dumps(record) + "\n")
        if fits:
            assert read_easytpp(path, unit="ns").gaps.tolist() == [[0.0, 256.0]]
        else:
            with pytest.raises(ValueError, match="float64 would round"):
                read_easytpp(path, unit="ns")
