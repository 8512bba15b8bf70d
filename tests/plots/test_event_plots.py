"""Pictures of event runs: that all are drawn, of the right events, with the truth where it is known."""

import itertools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from constmem.cli import plot
from constmem.data import Events, load_events
from constmem.evaluation import event_pictures
from constmem.evaluation.event_pictures import open_event_run
from constmem.evaluation.events import rescaled_times
from constmem.evaluation.pictures import plot_runs
from constmem.evaluation.results import evaluate_run
from constmem.plots import events as plots_events
from constmem.training.loop import Run, build
from constmem.training.recipes import changed, recipe
from constmem.training.sources import SIMULATED, open_source

SIZES = {
    "gru": ["model.dim=8", "model.hidden=8", "model.components=2"],
    "cmhp": ["model.dim=8", "model.hidden=8", "model.components=2", "model.num_slots=3",
             "model.num_latents=2", "model.depth=1", "model.num_heads=2"],
    "trivial": ["model.components=2"],
    "cnp": ["model.dim=8"],
}  # fmt: skip
METRICS = [
    *({"step": s, "loss": 1 / s, "lr": 1e-3, "seconds": s} for s in range(50, 500, 50)),
    {"step": 450, "validation": -0.4, "seconds": 460.0},
]
OF_ONE = ["learning", "sequence", "hazard", "fit", "marks"]


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


def run_folder(folder: Path, data: Path, dataset: str = "taxi", model: str = "gru") -> Path:
    """A run's folder as training leaves it, with weights that have learned nothing but the scale of time."""
    run = Run(dataset, model, "improved", changed(recipe(dataset, model), SIZES[model]))
    network = build(run)
    open_source(dataset, run.recipe, data_dir=data, device=torch.device("cpu")).prepare(network)
    network.save_pretrained(folder)
    (folder / "run.json").write_text(json.dumps({"run": asdict(run)}))
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, METRICS)))
    return folder


def assert_drawn(path: Path) -> None:
    from matplotlib.image import imread

    picture = imread(path)
    assert min(picture.shape[:2]) > 300
    assert float(picture[..., :3].std()) > 0.01


def test_a_run_on_events_gets_all_its_pictures(tmp_path: Path, data: Path) -> None:
    folder = run_folder(tmp_path / "run", data, model="cmhp")
    made = plot_runs([folder], data_dir=data)
    assert [path.stem for path in made] == OF_ONE
    for path in made:
        assert path.parent == folder / "pictures"
        assert_drawn(path)


def test_runs_on_the_same_events_share_one_picture_of_their_fits(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn: list[dict[str, torch.Tensor]] = []
    original = plots_events.fit_picture

    def watched(rescaled: Any, *arguments: Any, **more: Any) -> Path:
        drawn.append(rescaled)
        return original(rescaled, *arguments, **more)

    monkeypatch.setattr(plots_events, "fit_picture", watched)
    folders = [run_folder(tmp_path / model, data, model=model) for model in ("gru", "trivial")]
    plot(folders, out=tmp_path / "out", data_dir=data)
    shown = capsys.readouterr().out.split()
    assert shown[-1] == str(tmp_path / "out" / "taxi-fits.png")
    assert_drawn(Path(shown[-1]))
    assert len(shown) == 2 * len(OF_ONE) + 1
    gru, trivial, both = drawn
    assert list(both) == ["GRU", "no history"]
    assert both["GRU"] is gru["GRU"]
    assert both["no history"] is trivial["no history"]
    run = open_event_run(folders[0], data_dir=data, device="cpu")
    assert sorted(both["GRU"].tolist()) == pytest.approx(
        sorted(rescaled_times(run.model, load_events("taxi", data_dir=data, split="test")).tolist()), rel=1e-4
    )


def test_a_model_that_is_there_twice_is_named_by_its_folder(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[list[str]] = []

    def noted(rescaled: Any, path: Path, **_: Any) -> Path:
        names.append(list(rescaled))
        return path

    monkeypatch.setattr(plots_events, "fit_picture", noted)
    plot_runs([run_folder(tmp_path / name, data, model="trivial") for name in ("one", "two")], data_dir=data)
    assert names == [["no history"], ["no history"], ["one", "two"]]


def test_simulated_events_are_drawn_with_the_true_hazard(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: list[Any] = []

    def watched(model: Any, events: Events, path: Path, *, truth: Any, **_: Any) -> Path:  # noqa: ARG001
        times = torch.linspace(1.0, float(events.times[0, -1]), 7, dtype=torch.float64)
        expected = SIMULATED["hawkes1"].hazard(events, times)
        known.append(torch.equal(truth(times), expected))
        return path

    monkeypatch.setattr(plots_events, "hazard_picture", watched)
    made = plot_runs([run_folder(tmp_path / "run", data, "hawkes1", "trivial")])
    assert known == [True]
    assert [path.stem for path in made] == OF_ONE[:-1]  # there is but one mark: nothing to confuse


def test_a_true_process_scores_lower_than_a_model_that_learned_nothing(tmp_path: Path, data: Path) -> None:
    row = evaluate_run(run_folder(tmp_path / "run", data, "hawkes2", "trivial"), data_dir=None, device="cpu")
    events = SIMULATED["hawkes2"].sample(1000, num_events=100, generator=torch.Generator().manual_seed(3))
    found = SIMULATED["hawkes2"].log_prob(events)
    assert row["true"] == {"test": pytest.approx(-float((found.time)[found.scored].mean()))}
    assert row["true"]["test"] < row["scores"]["test"]["nll"]


def test_runs_of_points_and_of_events_do_not_write_over_each_other(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from constmem.evaluation import pictures

    monkeypatch.setattr(pictures, "BATCHES", 1)
    events, points = run_folder(tmp_path / "a", data), run_folder(tmp_path / "b", data, "digits", "cnp")
    made = plot_runs([events, points], out=tmp_path / "out", data_dir=data)
    assert len(made) == len(set(made)) == len(OF_ONE) + 3
    assert {path.parent.name for path in made} == {"a", "b"}


def test_the_sequence_shown_is_the_one_of_typical_length(data: Path) -> None:
    test = load_events("taxi", data_dir=data, split="test")
    shown = event_pictures._typical(test)
    assert len(shown) == 1
    assert shown.times.shape[1] == 12


def test_events_of_a_short_sequence_are_counted_in_whole_numbers(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(plots_events, "save_figure", lambda figure, _: drawn.append(figure))
    network = open_event_run(run_folder(tmp_path, data), data_dir=data, device="cpu").model
    events = Events.from_gaps([[0.0, 1.0, 0.5, 2.0]], num_marks=10, unit="hour")
    plots_events.sequence_picture(network, events, tmp_path / "short.png", title="")
    ticks = drawn[0].axes[0].get_xticks().tolist()
    assert {1.0, 2.0, 3.0} <= set(ticks)
    assert all(tick.is_integer() for tick in ticks)


def test_of_a_large_test_set_some_sequences_are_drawn_spread_over_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events = Events.from_gaps([[1.0] * 5] * 200, unit="s")
    events = Events.cat([events, Events.from_gaps([[2.0] * 5] * 200, unit="s")])
    assert event_pictures._some(events) is events
    monkeypatch.setattr(event_pictures, "SCORED", 160)
    some = event_pictures._some(events)
    assert int(some.scored.sum()) == 160
    assert sorted(set(some.gaps[:, 1].tolist())) == [1.0, 2.0]


def test_other_marks_have_a_column_only_where_they_are_foretold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels: list[list[str]] = []

    def keep(figure: Any, path: Path) -> Path:
        labels.append([label.get_text() for label in figure.axes[0].get_xticklabels()])
        return path

    monkeypatch.setattr(plots_events, "save_figure", keep)
    marks = torch.tensor([4, 7])
    for others in (0, 1):
        counts = torch.tensor([[3, 1, 0], [0, 2, others]])
        plots_events.confusion_picture(marks, counts, tmp_path / "a.png", title="x")
    assert labels == [["4", "7"], ["4", "7", "other"]]


def test_hazards_of_bursts_are_drawn_on_a_logarithmic_axis_down_to_the_longest_silence() -> None:
    gaps = torch.tensor([1.0, 1e4, 1.0], dtype=torch.float64)
    even = plots_events._hazard_axis(torch.tensor([0.5, 1.0, 0.4, 0.9, 0.5, 1.0]).double(), gaps / gaps)
    assert even == {"ylim": (0, None)}
    bursts = torch.tensor([0.5, 1.0, 0.4, 1e-5, 0.5, 1.0]).double()
    assert plots_events._hazard_axis(bursts, gaps) == {"yscale": "log", "ylim": (pytest.approx(5e-6), 2.0)}
