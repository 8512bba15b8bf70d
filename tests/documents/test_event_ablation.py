"""The ablation of CMHP's options: which variants there are, that it goes on, and the table made of it."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import event_ablation
import event_ablation_picture as picture
import event_tables
import numpy as np
import pytest
import record
from event_ablation import OPTIONS, ablate, jobs_of, variants
from matplotlib.image import imread

from constmem.core import PLAIN_CMHP
from constmem.point_processes import CMHP
from constmem.training.recipes import complete, recipe

TINY = ["steps=4", "batch=4", "warmup=1", "validate_every=2", "model.dim=8", "model.hidden=8"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny pack, and an empty folder for results."""
    random = np.random.default_rng(0)
    np.savez(
        tmp_path / "events_taxi.npz", times=random.exponential(size=(12, 5)).cumsum(1).ravel(),
        marks=random.integers(0, 10, 60).astype(np.int32), offsets=np.arange(0, 61, 5),
        split=np.repeat([0, 1, 2], 4).astype(np.int8), unit=np.array("hour"), num_marks=np.array(10),
    )  # fmt: skip
    monkeypatch.setattr(record, "RESULTS", tmp_path / "benchmarks" / "results")
    return tmp_path


def tiny(folder: Path, *names: str, seeds: tuple[int, ...] = (0,)) -> list[event_ablation.Job]:
    return jobs_of(
        "taxi", names, seeds, TINY, runs=folder / "runs", data_dir=folder, device="cpu"
    )  # fmt: skip


def test_every_variant_is_one_option_away_from_the_papers_or_from_all() -> None:
    found = {name: settings for name, (model, settings) in variants().items() if model == "cmhp"}
    defaults = CMHP(num_marks=2).config
    assert set(PLAIN_CMHP) == {key for key, _ in OPTIONS.values()}
    assert found["all"] == {key: defaults[key] for key in PLAIN_CMHP}
    assert found["faithful"] == PLAIN_CMHP
    assert len(found) == 2 + 2 * len(OPTIONS)
    for name, settings in found.items():
        base = found[name.split()[0]]
        different = [key for key in base if settings[key] != base[key]]
        assert different == ([OPTIONS[name.split()[-1]][0]] if " " in name else [])
    for model in ("thp", "gru"):
        assert variants()[f"{model}-gap"][0] == f"{model}-gap"


def test_settings_reach_the_models(folder: Path) -> None:
    jobs = {job.variant: job for job in tiny(folder)}
    assert jobs["all - mass"].recipe.model["mass"] is False
    assert jobs["all - token_mlp"].recipe.model["embed_depth"] == 0
    assert jobs["faithful + recency"].recipe.model["recency"] is True
    assert jobs["gru-gap"].recipe.model["mark_given_gap"] is True
    assert "mark_given_gap" not in jobs["gru"].recipe.model
    with pytest.raises(ValueError, match="no variant 'al': did you mean"):
        tiny(folder, "al")


def test_rows_are_written_by_validation_and_never_computed_twice(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ablate(tiny(folder, "gru", "faithful + mass"), at_once=1, command="python x")
    path = folder / "benchmarks" / "results" / "ablation-taxi.json"
    content = json.loads(path.read_text())
    assert [row["variant"] for row in content["rows"]] == ["faithful + mass", "gru"]
    for row in content["rows"]:
        (path_of,) = (folder / "runs" / "taxi").glob(f"{row['variant'].replace(' ', '')}-0-*/metrics.jsonl")
        found = [json.loads(line).get("validation") for line in path_of.read_text().splitlines()]
        assert row["validation_nll"] == -max(value for value in found if value is not None)
        assert row["settings"]["steps"] == 4
        assert row["scores"]["test"]["sequences"] == 4

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("trained again")

    with monkeypatch.context() as patch:
        patch.setattr(event_ablation, "train", refuse)
        ablate(tiny(folder, "gru"), at_once=1, command="python x")
        with pytest.raises(AssertionError, match="trained again"):
            ablate(tiny(folder, "gru", seeds=(1,)), at_once=1, command="python x")
    assert json.loads(path.read_text()) == content


def test_seeds_of_a_variant_stand_together_in_the_table(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = f"taxi --only gru --seeds 0 1 --data-dir {folder} --runs {folder / 'runs'} --steps 4 --set"
    monkeypatch.setattr(sys, "argv", ["event_ablation.py", *options.split(), *TINY[1:]])
    event_ablation.main()
    text = event_tables.ablation("taxi")
    (line,) = [line for line in text.splitlines() if line.startswith("| gru")]
    assert line.endswith("| 2 |")
    assert "±" in line
    assert "4 x 4" in line
    assert "`python benchmarks/event_ablation.py taxi --seeds 0 1 --set batch=4" in text
    assert "--only gru`" in text
    assert event_tables.ablation("mooc") == ""


def test_the_picture_shows_what_an_option_saves_and_what_seeds_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nll = {"faithful": [3.0, 5.0], "all": [1.0]}
    nll |= {f"faithful + {option}": [4.0 - i] for i, option in enumerate(OPTIONS)}
    nll |= {f"all - {option}": [1.0 + i / 8] for i, option in enumerate(OPTIONS)}
    rows = [{"variant": name, "validation_nll": value} for name, found in nll.items() for value in found]
    assert picture.gains(rows) == {option: (i, i / 8) for i, option in enumerate(OPTIONS)}
    seeds = [
        {"model": model, "scores": {"test": {"nll": x}}}
        for model, x in (("cmhp", 1), ("cmhp", 3), ("gru", 9))
    ]
    assert picture.noise(seeds) == pytest.approx(2)
    for dataset in ("taxi", "mooc"):
        (tmp_path / f"ablation-{dataset}.json").write_text(json.dumps({"rows": rows}))
        (tmp_path / f"{dataset}.json").write_text(json.dumps({"rows": seeds}))
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    drawn = imread(picture.picture(("taxi", "mooc"), tmp_path / "a.png"))
    assert min(drawn.shape[:2]) > 300
    assert float(drawn[..., :3].std()) > 0.01


@pytest.mark.parametrize("dataset", ["taxi", "mooc"])
def test_committed_rows_are_of_the_variants_of_today(dataset: str) -> None:
    rows = json.loads((record.RESULTS / f"ablation-{dataset}.json").read_text())["rows"]
    named = {name: settings for name, (model, settings) in variants().items() if model == "cmhp"}
    assert [row["variant"] for row in rows] == list(named)
    made = recipe(dataset, "cmhp")
    for row in rows:
        assert complete(row["settings"]) == asdict(made) | {"model": made.model | named[row["variant"]]}


@pytest.mark.slow
def test_several_runs_at_once_give_the_same_rows(folder: Path) -> None:
    def nlls(at_once: int, runs: str) -> list[float]:
        (record.RESULTS / "ablation-taxi.json").unlink(missing_ok=True)
        jobs = jobs_of("taxi", ["gru", "thp"], [0], TINY, runs=folder / runs, data_dir=folder, device="cpu")
        return sorted(row["validation_nll"] for row in ablate(jobs, at_once=at_once, command="python x"))

    assert nlls(2, "two") == pytest.approx(nlls(1, "one"), rel=1e-5)
