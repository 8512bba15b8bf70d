"""On the real data sets: the weights that come along score as they did, and models learn and are scored."""

import json
import os
import re
from itertools import islice
from pathlib import Path

import pytest
import shipped
import torch
from record import RESULTS

from constmem.data.images import _source_of
from constmem.evaluation import evaluate
from constmem.evaluation.runs import evaluate_run
from constmem.training import loop as train
from constmem.training.loop import Run
from constmem.training.recipes import changed, recipe
from constmem.training.sources import open_source

SHIPPED = json.loads((RESULTS / "shipped.json").read_text())
ABOUT = Path(train.__file__).parents[1] / "neural_processes" / "pretrained" / "emnist" / "about.json"
TINY = ["batch=16", "warmup=3", "lr=0.01", "model.dim=8", "model.depth=1", "model.num_slots=4",
        "model.num_latents=4", "model.hidden=8", "model.num_heads=2"]  # fmt: skip


@pytest.fixture
def real() -> Path:
    if not os.environ.get("CONSTMEM_DATA"):
        pytest.skip("CONSTMEM_DATA is not set")
    return Path(os.environ["CONSTMEM_DATA"])


def test_the_committed_part_is_much_like_the_whole_test_sets() -> None:
    whole = json.loads(ABOUT.read_text())["scores"]
    assert {row["test"] for row in SHIPPED["rows"]} == set(whole)
    for row in SHIPPED["rows"]:
        for key in ("log_likelihood", "log_likelihood_by_batch"):
            assert row[key] == pytest.approx(whole[row["test"]][key], abs=0.15)  # 200 images of thousands


def test_images_are_named_as_in_the_committed_rows() -> None:
    found = re.search(r"this pack: ([\d,]+) and ([\d,]+)", SHIPPED["data"])
    assert found is not None
    train_, test = (int(number.replace(",", "")) for number in found.groups())
    named = _source_of({}, "train", {"train": train_, "test": test}, "emnist", "EMNIST 'balanced', 28x28")
    assert SHIPPED["data"].startswith(named)  # else scores are compared with nothing


@pytest.mark.data
def test_the_weights_that_come_along_score_as_committed(real: Path) -> None:
    rows, statement = shipped.scored(real)
    if statement != SHIPPED["data"]:
        pytest.skip(f"the committed figures are of other images: {SHIPPED['data']}")
    for row, committed in zip(rows, SHIPPED["rows"], strict=True):
        expected = dict(committed)
        assert row.pop("coverage") == pytest.approx(expected.pop("coverage"), abs=1e-3)
        assert row == pytest.approx(expected, abs=1e-3)  # roundings differ from one processor to the next


@pytest.mark.data
@pytest.mark.parametrize("dataset", [pytest.param("emnist", marks=pytest.mark.slow), "celeba32"])
def test_a_tiny_model_learns_a_little_and_is_scored(
    dataset: str, real: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("constmem.training.sources.HELD_OUT", 100)  # to validate on, which is not looked at
    run = Run(dataset, "cmanp", "improved", changed(recipe(dataset, "cmanp"), TINY, steps=40))
    train.train(run, out=tmp_path / "run", data_dir=real)
    row = evaluate_run(tmp_path / "run", data_dir=real, device="cpu")
    untrained = train.build(run)
    source = open_source(dataset, run.recipe, data_dir=real, device=torch.device("cpu"))
    assert list(row.scores) == list(source.tests)
    for test, scores in row.scores.items():
        begun = evaluate(untrained, islice(source.tests[test](), 50))  # which is much the same for all
        assert scores.log_likelihood > begun.log_likelihood + 0.1
        assert scores.crps < begun.crps
    for committed in json.loads((RESULTS / f"{dataset}.json").read_text())["rows"]:
        if committed["data"] == row.data:  # then the tasks are the same
            for test, scores in committed["scores"].items():
                assert row.scores[test].points == scores["points"]
