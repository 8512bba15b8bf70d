"""Pictures of runs: that all are drawn, of the right things, with the truth where it is known."""

import itertools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from constmem.cli import plot
from constmem.data import Events, Table, load_events, load_images, simulated
from constmem.evaluation import LEVELS, evaluate, pictures, pit_values
from constmem.evaluation.events import rescaled_times
from constmem.evaluation.pictures import completions, gp_fits, hazards, plot_runs, run_title, timeline
from constmem.evaluation.runs import evaluate_run, open_run
from constmem.neural_processes import MODELS
from constmem.plots.curves import reliability
from constmem.training.folder import TABLE
from constmem.training.loop import Run, build
from constmem.training.recipes import changed, recipe, table_recipe
from constmem.training.sources import open_source

CPU = torch.device("cpu")
SMALL = ["model.dim=8", "model.depth=1", "model.num_slots=4", "model.num_latents=4", "model.hidden=8",
         "model.num_heads=2"]  # fmt: skip
SIZES = {
    "cmanp": SMALL,
    "cnp": ["model.dim=8"],
    "gru": ["model.dim=8", "model.hidden=8", "model.components=2"],
    "cmhp": [*SMALL, "model.components=2"],
    "trivial": ["model.components=2"],
}
METRICS = [
    {"data": "something"},
    *({"step": s, "loss": 1 / s, "lr": 1e-3, "seconds": s} for s in range(50, 500, 50)),
    {"step": 450, "validation": -0.4, "seconds": 460.0},
]
OF_EVENTS = ["learning", "sequence", "hazard", "fit", "marks"]


@pytest.fixture(autouse=True)
def few_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "BATCHES", 2)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pack in the prepared format: sequences of 3 to 8 events, one of each split longer."""
    folder = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    lengths = random.integers(3, 9, 30)
    lengths[[0, 20, 27]] = 12
    marks = np.concatenate([np.arange(n) % 3 for n in lengths])
    offsets = np.concatenate([[0], lengths.cumsum()])
    gaps = random.lognormal(0, 1, len(marks))
    times = np.concatenate([gaps[a:b].cumsum() for a, b in itertools.pairwise(offsets)])
    np.savez(
        folder / "events_taxi.npz", times=times, marks=marks.astype(np.int32), offsets=offsets,
        split=np.repeat([0, 1, 2], [18, 6, 6]).astype(np.int8), unit=np.array("hour"), num_marks=np.array(10),
    )  # fmt: skip
    return folder


def run_folder(
    folder: Path, dataset: str, model: str, *, table: Table | None = None, data: Path | None = None
) -> Path:
    """A run's folder as training leaves it, with weights that have learned nothing but scales."""
    if table is None:
        settings = recipe(dataset, model)
    else:
        (rows, dim_x), grouped = table.x.shape, table.groups is not None
        settings = table_recipe(model, dim_x=dim_x, dim_y=1, rows=rows, grouped=grouped)
        table.save(folder / TABLE)
    run = Run(dataset, model, "improved", changed(settings, SIZES[model]))
    network = build(run)
    open_source(dataset, run.recipe, data_dir=data, device=CPU, own=table).prepare(network)
    network.save_pretrained(folder)
    (folder / "run.json").write_text(json.dumps({"run": asdict(run)}))
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, METRICS)))
    return folder


def assert_drawn(path: Path) -> None:
    """A picture that is there, whole, and not of one colour."""
    from matplotlib.image import imread

    picture = imread(path)
    assert min(picture.shape[:2]) > 300
    assert float(picture[..., :3].std()) > 0.01
    assert not [other for other in path.parent.iterdir() if other.name.startswith(".")]


def test_every_kind_of_run_gets_its_pictures(tmp_path: Path, data: Path) -> None:
    x = torch.linspace(0, 9, 120, dtype=torch.float64)[:, None]
    tables = {
        "one.csv": Table.of(x, x.sin(), torch.arange(120) % 12),
        "more.csv": Table.of(torch.cat([x, x.cos()], 1), x.sin()),
    }
    points = ["learning", "calibration"]
    cases = {
        ("digits", "cmanp"): [*points, "completions"],
        ("gp", "cmanp"): [*points, "fits"],
        ("one.csv", "cmanp"): [*points, "fits"],
        ("more.csv", "cmanp"): [*points, "predictions"],
        ("taxi", "cmhp"): OF_EVENTS,
        ("hawkes1", "trivial"): OF_EVENTS[:-1],  # one mark: nothing to confuse
    }
    for (dataset, model), expected in cases.items():
        folder = run_folder(tmp_path / dataset, dataset, model, table=tables.get(dataset), data=data)
        made = plot_runs([folder], data_dir=data)
        assert [path.stem for path in made] == expected
        for path in made:
            assert path.parent == folder / "pictures"
            assert_drawn(path)


def test_runs_on_the_same_data_share_one_picture_and_none_writes_over_another(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fits: list[dict[str, torch.Tensor]] = []
    original = pictures.fit_picture
    monkeypatch.setattr(pictures, "fit_picture", lambda *a, **k: fits.append(a[0]) or original(*a, **k))
    pairs = [("digits", "cmanp"), ("digits", "cnp"), ("taxi", "gru"), ("taxi", "trivial")]
    folders = [run_folder(tmp_path / f"{d}-{m}", d, m, data=data) for d, m in pairs]
    plot(folders, out=tmp_path / "out", data_dir=data)
    shown = [Path(line) for line in capsys.readouterr().out.split()]
    assert shown[-2:] == [tmp_path / "out" / "digits-models.png", tmp_path / "out" / "taxi-fits.png"]
    assert len(shown) == len(set(shown)) == 2 * 3 + 2 * len(OF_EVENTS) + 2
    for path in shown:
        assert_drawn(path)
    gru, trivial, both = fits
    assert list(both) == ["GRU", "no history"]
    assert both["GRU"] is gru["GRU"]
    assert both["no history"] is trivial["no history"]
    model = open_run(folders[2], data_dir=data, device=CPU).model
    expected = rescaled_times(model, load_events("taxi", data_dir=data, split="test"))
    assert sorted(both["GRU"].tolist()) == pytest.approx(sorted(expected.tolist()), rel=1e-4)


def test_a_model_that_is_there_twice_is_named_by_its_folder(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[list[str]] = []
    monkeypatch.setattr(pictures, "fit_picture", lambda *a, **_: names.append(list(a[0])) or a[1])
    folders = [run_folder(tmp_path / name, "taxi", "trivial", data=data) for name in ("one", "two")]
    plot_runs(folders, data_dir=data)
    assert names == [["no history"], ["no history"], ["one", "two"]]


def test_completions_of_all_models_are_from_the_same_pixels() -> None:
    pixels = load_images("digits", split="test").pixels[:2]
    sizes = {"dim": 8, "depth": 1, "num_slots": 4, "num_latents": 4, "hidden": 8, "num_heads": 2}
    models = MODELS["cmanp"](dim_x=2, dim_y=1, **sizes).eval(), MODELS["cnp"](dim_x=2, dim_y=1, dim=8).eval()
    one, two = (completions(model, pixels, (4, 9)) for model in models)
    for size, mine, theirs in zip((4, 9), one, two, strict=True):
        torch.testing.assert_close(mine.context, theirs.context, equal_nan=True)
        inside = ~mine.context.isnan()
        assert int(inside.sum()) == 2 * size
        torch.testing.assert_close(mine.context[inside], pixels[inside].float() / 255)
    x, y = pictures.image_points(pixels)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))[:9]
    with torch.no_grad():
        plain = models[1].query(models[1].condition(x[:, order], y[:, order]), x)
    torch.testing.assert_close(two[1].mean.reshape(2, 64, 1), (plain.mean + 0.5).clamp(0, 1))


def test_a_gaussian_process_is_shown_with_its_exact_posterior() -> None:
    rows = gp_fits(MODELS["cnp"](dim_x=1, dim_y=1, dim=8).eval())
    assert [name for name, _ in rows] == ["rbf", "matern", "periodic"]
    for _, fits in rows:
        assert [len(fit.context[0]) for fit in fits] == list(pictures.GP_SIZES)
        fit = fits[-1]
        assert fit.exact is not None
        mean, std = fit.exact
        for x, y in zip(*fit.context, strict=True):  # it goes through the points it was shown
            nearest = (fit.x - x).abs().argmin()
            assert abs(float(mean[nearest] - y)) < 0.3
        assert float(std.min()) < 0.1


def test_the_calibration_drawn_is_the_one_that_is_scored(tmp_path: Path) -> None:
    _, _, model, source, _ = open_run(run_folder(tmp_path, "digits", "cmanp"), data_dir=None, device=CPU)
    tasks = list(source.tests["test"]())[:3]
    scores = evaluate(model, tasks)
    found = reliability(pit_values(model, tasks), torch.tensor(LEVELS, dtype=torch.float64))
    assert found.tolist() == pytest.approx(list(scores.coverage.values()), abs=1e-6)


def test_masked_targets_are_left_out_of_the_calibration() -> None:
    x = torch.linspace(0, 9, 120)[:, None]
    table = Table.of(x, x.sin(), torch.arange(120) % 12)
    settings = changed(table_recipe("cmanp", dim_x=1, dim_y=1, rows=120, grouped=True), SMALL)
    source = open_source("x", settings, data_dir=None, device=CPU, own=table)
    tasks = list(source.tests["test"]())
    model = build(Run("x", "cmanp", "improved", settings))
    assert len(pit_values(model, tasks)) == sum(int(task.num_targets.sum()) for task in tasks)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no run in"):
        plot_runs([tmp_path])


def test_pictures_of_a_table_name_its_columns() -> None:
    run = {"dataset": "air.csv", "model": "cnp", "recipe_name": "own data", "seed": 0}
    columns = {"x": ["day", "place"], "y": ["heat"]}
    assert run_title(run) == "CNP on air.csv (own data, seed 0)"
    assert run_title(run | {"columns": columns}) == "CNP on air.csv (own data, seed 0): heat given day, place"


# Events


def test_the_hazard_drawn_is_that_of_the_predicted_gaps() -> None:
    process = simulated("hawkes1")
    events = process.sample(1, num_events=20, generator=torch.Generator().manual_seed(0))

    class Exponential:
        """A constant hazard of 0.7."""

        def log_prob(self, value: torch.Tensor) -> torch.Tensor:
            return np.log(0.7) - 0.7 * value

        def log_survival(self, value: torch.Tensor) -> torch.Tensor:
            return -0.7 * value

    times, hazard = hazards(Exponential(), events)
    assert times.shape == hazard.shape == (20, 60)
    torch.testing.assert_close(hazard, torch.full_like(hazard, 0.7))
    torch.testing.assert_close(times[:, -1], events.times[0])
    assert bool((times.diff(dim=1) >= 0).all())
    assert bool((times[1:, 0] >= events.times[0, :-1]).all())


def test_simulated_events_are_drawn_with_the_true_hazard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: list[Any] = []
    monkeypatch.setattr(pictures, "hazard_picture", lambda *a, **k: known.append((*a, k["true"])) or a[3])
    plot_runs([run_folder(tmp_path / "run", "hawkes1", "trivial")])
    ((line, times, _, _, true),) = known
    events = Events.from_arrival_times([line.times], unit=line.unit, num_marks=1, t_start=[0.0])
    expected = simulated("hawkes1").hazard(events, times[5])
    torch.testing.assert_close(true[5], expected)


def test_a_true_process_scores_lower_than_a_model_that_learned_nothing(tmp_path: Path) -> None:
    row = evaluate_run(run_folder(tmp_path / "run", "hawkes2", "trivial"), data_dir=None, device="cpu")
    process = simulated("hawkes2")
    events = process.sample(1000, num_events=100, generator=torch.Generator().manual_seed(3))
    found = process.log_prob(events)
    assert row.true == {"test": pytest.approx(-float((found.time)[found.scored].mean()))}
    assert row.true["test"] < row.scores["test"].nll  # type: ignore[union-attr]


def test_the_sequence_shown_is_the_one_of_typical_length(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(pictures, "sequence_picture", lambda *a, **_: shown.append(a[0]) or a[2])
    plot_runs([run_folder(tmp_path / "run", "taxi", "trivial", data=data)], data_dir=data)
    assert len(shown[0].times) == 12


def test_of_a_large_test_set_some_sequences_are_drawn_spread_over_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(
        pictures, "fit_picture", lambda *a, **_: sizes.append(len(a[0]["no history"])) or a[1]
    )
    monkeypatch.setattr(pictures, "SCORED", 9_900)
    plot_runs([run_folder(tmp_path / "run", "hawkes1", "trivial")])  # 1,000 sequences of 100 events
    assert sizes == [9_900]


def test_a_picture_of_several_sequences_is_refused() -> None:
    several = Events.from_gaps([[1.0, 2.0], [1.0]], unit="hour")
    for events in (several, Events.from_arrival_times([[1.0]], unit="hour")):
        with pytest.raises(ValueError, match="select one of two events or more"):
            timeline(events)
