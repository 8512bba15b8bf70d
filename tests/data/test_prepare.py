"""From the public files of events to packs, and every pack by its name."""

import hashlib
import json
import re

import numpy as np
import pytest

from constmem.cli import app
from constmem.data import listing, load_events, prepare_easytpp, prepare_jodie, prepare_pack
from constmem.data.catalogue import PREPARED
from tests.data.test_event_files import HEADER, easytpp_folder, own_folder, record, written

__all__ = ["own_folder"]  # a fixture that every test here uses


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


def test_what_cannot_be_prepared_is_named(tmp_path):
    with pytest.raises(ValueError, match="did you mean 'mooc'"):
        prepare_jodie("mook", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"there is no .*mooc.csv"):
        prepare_jodie("mooc", tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        prepare_easytpp(tmp_path / "nowhere", name="taxi")
    source = easytpp_folder(tmp_path / "files")
    with pytest.raises(ValueError, match="does not state the unit of files"):
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


def test_every_name_that_can_be_prepared_has_its_preparer(tmp_path):
    for what in PREPARED:
        with pytest.raises(FileNotFoundError, match="nowhere"):
            prepare_pack(what, tmp_path / "nowhere", tmp_path, unit="hour" if what == "easytpp" else None)
    with pytest.raises(ValueError, match="did you mean 'emnist'"):
        prepare_pack("emnits", tmp_path, tmp_path)
