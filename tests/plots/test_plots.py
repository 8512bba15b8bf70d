"""Pictures: that they are drawn, of the right things, and that the numbers in them are true."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributions import Normal

from constmem import plots
from constmem.cli import plot
from constmem.data import Table, load_images
from constmem.evaluation import pictures
from constmem.evaluation.pictures import Trained, _told, plot_runs
from constmem.evaluation.points import LEVELS, evaluate, pit_values
from constmem.neural_processes import MODELS
from constmem.plots.curves import reliability
from constmem.training.folder import TABLE
from constmem.training.loop import Run, build
from constmem.training.recipes import changed, recipe, table_recipe
from constmem.training.sources import open_source

SIZES = {"dim": 8, "depth": 1, "num_slots": 4, "num_latents": 4, "hidden": 8, "num_heads": 2}
TINY = [f"model.{key}={value}" for key, value in SIZES.items()]
METRICS = [
    {"data": "something"},
    *({"step": s, "loss": 1 / s, "lr": 1e-3, "seconds": s} for s in range(50, 500, 50)),
    {"step": 400, "validation": -0.5, "seconds": 401.0},
    {"step": 450, "validation": -0.4, "seconds": 460.0},
]


def run_folder(folder: Path, dataset: str, model: str = "cmanp", table: Table | None = None) -> Path:
    """A run's folder as training leaves it, with weights that have learned nothing."""
    if table is None:
        settings = recipe(dataset, model)
    else:
        (rows, dim_x), grouped = table.x.shape, table.groups is not None
        settings = table_recipe(model, dim_x=dim_x, dim_y=1, rows=rows, grouped=grouped)
    sizes = TINY if model == "cmanp" else ["model.dim=8"]
    run = Run(dataset, model, "improved", changed(settings, sizes))
    network = build(run)
    if table is not None:
        table.save(folder / TABLE)
        source = open_source(dataset, run.recipe, data_dir=None, device=torch.device("cpu"), own=table)
        source.prepare(network)
    network.save_pretrained(folder)
    (folder / "run.json").write_text(json.dumps({"run": asdict(run)}))
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, METRICS)))
    return folder


@pytest.fixture(autouse=True)
def few_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "BATCHES", 2)


def assert_drawn(path: Path) -> None:
    """A picture that is there, whole, and not of one colour."""
    from matplotlib.image import imread

    picture = imread(path)
    assert min(picture.shape[:2]) > 300
    assert float(picture[..., :3].std()) > 0.01
    assert not [other for other in path.parent.iterdir() if other.name.startswith(".")]


def test_a_run_whose_loss_was_lost_can_still_be_looked_at(tmp_path: Path) -> None:
    nan = float("nan")
    lost = [{"step": 500, "loss": nan, "lr": 1e-3}, {"step": 500, "validation": nan}]
    for entries in (METRICS + lost, lost):
        assert_drawn(plots.learning_curve(entries, tmp_path / "learning.png", title="lost"))


def test_the_colours_of_uncertainty_are_told_in_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(plots.images, "save_figure", lambda figure, path: drawn.append(figure) or path)
    model = MODELS["cmanp"](dim_x=2, dim_y=1, **SIZES).eval()
    pixels = load_images("digits", split="test").pixels[:2]
    plots.completion_grid(model, pixels, (4,), tmp_path / "a.png", title="")
    plots.model_grid({"CMANP": model}, pixels, (4,), tmp_path / "b.png", title="")
    brightest = max(float(found["std"].max()) for found in plots.images.completions(model, pixels, (4,)))
    for figure, count in zip(drawn, (2, 1), strict=True):
        bars = [bar for axis in figure.axes for bar in axis.child_axes]
        assert [bar.get_ylabel() for bar in bars] == ["deviation"] * count
        assert {text.get_text() for bar in bars for text in bar.get_yticklabels()} == {
            "0",
            f"{brightest:.2g}",
        }


def test_every_kind_of_run_gets_its_pictures(tmp_path: Path) -> None:
    x = torch.linspace(0, 9, 120, dtype=torch.float64)[:, None]
    groups = torch.arange(120) % 12
    cases = {
        "digits": ("completions", None),
        "gp": ("fits", None),
        "one.csv": ("fits", Table.of(x, x.sin(), groups)),
        "more.csv": ("predictions", Table.of(torch.cat([x, x.cos()], 1), x.sin())),
    }
    for dataset, (last, table) in cases.items():
        folder = run_folder(tmp_path / dataset, dataset, table=table)
        made = plot_runs([folder])
        assert [path.stem for path in made] == ["learning", "calibration", last]
        for path in made:
            assert path.parent == folder / "pictures"
            assert_drawn(path)


def test_runs_on_the_same_images_share_one_grid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [run_folder(tmp_path / model, "digits", model) for model in ("cmanp", "cnp")]
    plot(folders, out=tmp_path / "out")
    shown = capsys.readouterr().out.split()
    assert shown[-1] == str(tmp_path / "out" / "digits-models.png")
    assert len(shown) == 7
    for name in shown:
        assert_drawn(Path(name))


def test_a_grid_shows_all_models_the_same_pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [run_folder(tmp_path / model, "digits", model) for model in ("cmanp", "cnp")]
    models = [pictures.open_run(folder, data_dir=None, device="cpu").model for folder in folders]
    pixels = load_images("digits", split="test").pixels[:2]
    seen: list[torch.Tensor] = []
    original = plots.images.completions

    def watched(*arguments: Any, **more: Any) -> Any:
        found = original(*arguments, **more)
        seen.extend(result["context"] for result in found)
        return found

    monkeypatch.setattr(plots.images, "completions", watched)
    named = dict(zip(("one", "two"), models, strict=True))
    plots.model_grid(named, pixels, (4, 9), tmp_path / "grid.png", title="both")
    known = [(~context.isnan()).sum().item() for context in seen]
    assert known == [2 * 4, 2 * 9] * 2  # two images each
    for mine, theirs in zip(seen[:2], seen[2:], strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True)
    inside = ~seen[1].isnan()
    assert torch.allclose(seen[1][inside], pixels[inside].float() / 255, atol=1e-6)


def test_a_gaussian_process_is_shown_with_its_exact_posterior(tmp_path: Path) -> None:
    model = pictures.open_run(run_folder(tmp_path, "gp"), data_dir=None, device="cpu").model
    rows = pictures._gp_rows(model)
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


def test_f_of_y_is_uniform_where_predictions_are_true() -> None:
    """Against a slow reference: the share of draws inside the interval between two quantiles."""
    y, truth = torch.randn(20_000), Normal(0.0, 1.0)
    levels = torch.tensor([0.1, 0.5, 0.9])
    for spread, direction in ((1.0, 0), (2.0, 1), (0.5, -1)):
        pit = Normal(0.0, spread).cdf(y)
        found = reliability(pit, levels)
        for level, share in zip(levels, found, strict=True):
            edge = spread * truth.icdf(0.5 + level / 2)
            assert float(share) == pytest.approx(float((y.abs() <= edge).float().mean()), abs=1e-3)
            assert (float(share - level) > 0.03) == (direction == 1)
            assert (float(share - level) < -0.03) == (direction == -1)


def test_the_calibration_drawn_is_the_one_that_is_scored(tmp_path: Path) -> None:
    run = pictures.open_run(run_folder(tmp_path, "digits"), data_dir=None, device="cpu")
    tasks = list(run.source.tests["test"]())[:3]
    scores = evaluate(run.model, tasks)
    found = reliability(pit_values(run.model, tasks), torch.tensor(LEVELS, dtype=torch.float64))
    assert found.tolist() == pytest.approx(list(scores.coverage.values()), abs=1e-6)


def test_masked_targets_are_left_out_of_the_calibration() -> None:
    x = torch.linspace(0, 9, 120)[:, None]
    table = Table.of(x, x.sin(), torch.arange(120) % 12)
    settings = changed(table_recipe("cmanp", dim_x=1, dim_y=1, rows=120, grouped=True), TINY)
    source = open_source("x", settings, data_dir=None, device=torch.device("cpu"), own=table)
    tasks = list(source.tests["test"]())
    model = build(Run("x", "cmanp", "improved", settings))
    assert len(pit_values(model, tasks)) == sum(int(task.num_targets.sum()) for task in tasks)


def test_a_run_without_a_logged_loss_has_no_curve(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="logged no loss"):
        plots.learning_curve(METRICS[:1], tmp_path / "none.png", title="")


def test_a_single_logged_step_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr("constmem.plots.curves.save_figure", lambda figure, _: drawn.append(figure))
    for count in (1, 2):
        entries = [{"step": 20 * s, "loss": 1.0, "lr": 1e-3} for s in range(1, count + 1)]
        plots.learning_curve(entries, tmp_path / "short.png", title="")
    one, two = ([axis.lines[-1].get_marker() for axis in (f.axes[0], f.axes[2])] for f in drawn)
    assert one == ["o", "o"]  # a line through one point is invisible
    assert two == ["", ""]


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no run in"):
        plot_runs([tmp_path])


def test_pictures_of_a_table_name_its_columns() -> None:
    run = {"dataset": "air.csv", "model": "cnp", "recipe_name": "own data", "seed": 0}
    columns = {"x": ["day", "place"], "y": ["heat"]}
    model = MODELS["cnp"](dim_x=2, dim_y=1, dim=8)
    source: Any = None
    assert _told(Trained(Path(), run, model, source)) == "CNP on air.csv (own data, seed 0)"
    told = _told(Trained(Path(), run | {"columns": columns}, model, source))
    assert told == "CNP on air.csv (own data, seed 0): heat given day, place"
