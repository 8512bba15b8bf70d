"""The registry: its parts agree with each other, with the loaders and with help, and it imports no torch."""

import subprocess
import sys

import pytest

from constmem.data import load_events, load_images, simulated
from constmem.data.catalogue import DATASETS, EVENTS, PACKS, POINTS, title_of
from constmem.data.images import LOADERS


def test_every_data_set_is_of_points_or_of_events_and_has_what_its_kind_needs() -> None:
    assert {*POINTS, *EVENTS} == set(DATASETS)
    for name, entry in DATASETS.items():
        assert entry.name == name
        assert (entry.num_marks > 0) == entry.of_events == (name in EVENTS)
        assert (entry.dim_x > 0) == (entry.dim_y > 0) == (entry.max_points > 0) == (name in POINTS)
        assert (entry.process is not None) == (entry.kind == "simulated")
        assert (entry.pack is None) == (entry.kind in ("gp", "tables", "simulated"))
        assert entry.pack is None or entry.pack in PACKS


def test_every_name_can_be_loaded_or_says_how_to_get_it(tmp_path) -> None:
    assert set(LOADERS) == {name for name, entry in DATASETS.items() if entry.kind == "images"}
    for name, entry in DATASETS.items():
        if entry.kind == "simulated":
            assert simulated(name).num_marks == entry.num_marks
        elif entry.kind in ("images", "events") and name != "digits":
            load = load_images if entry.kind == "images" else load_events
            with pytest.raises(FileNotFoundError, match=f"no {entry.pack}.npz .*To get it, "):
                load(name, data_dir=tmp_path)


def test_titles_are_for_people_and_a_file_keeps_its_name() -> None:
    assert title_of("celeba32") == "CelebA 32x32"
    assert title_of("my.csv") == "my.csv"


def test_the_registry_can_be_read_without_torch() -> None:
    code = "import sys, constmem.data.catalogue; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_completeness_compares_with_the_official_counts() -> None:
    emnist = PACKS["emnist"]
    assert emnist.completeness({"train": 112_800, "test": 18_800}) == "the official counts"
    more = emnist.completeness({"train": 112_801, "test": 47})
    assert more == "not the official counts: 112,800 train, 18,800 test"
    assert PACKS["events_taxi"].completeness({"train": 3}) == ""
