"""Nine UCI tables, published splits: the closed-form learner beside forests, boosted trees and ridge.

CONSTMEM_DATA=FOLDER python benchmarks/tables_uci.py --splits 5     # writes results/tables_uci.json

`FOLDER/tables_uci.npz` holds `NAME/x`, `NAME/y` and `NAME/test`, the test rows of each split (those of
Hernandez-Lobato and Adams, 2015; 20 each, protein 5). Every method sees the same rows, and each result names
the commit it was measured at; scikit-learn's methods are used with their defaults; a Gaussian process takes
tables of at most 1,500 rows. Errors are in the table's own units. Rows are written as they come; `--methods`
measures some anew, and `--summary` only prints the table of what was written.
"""

import argparse
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import sklearn
import torch
from record import RESULTS, provenance, save
from sklearn.ensemble import HistGradientBoostingRegressor, RandomForestRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.kernel_approximation import RBFSampler
from sklearn.linear_model import BayesianRidge, RidgeCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from constmem import StreamingRegressor
from constmem.evaluation import inside
from constmem.tabular.answers import mixed_log_density, mixed_quantiles
from constmem.tabular.inputs import frame_of

MOST_ROWS = 1500  # that a Gaussian process is given
FOURIER, LENGTHS = 512, (0.3, 1.0, 3.0)  # features, and length scales in roots of the number of columns
# RMSE and NLL of MC-dropout with a grid search on these splits: Mukhoti, Stenetorp and Gal, 2018
DROPOUT = {
    "boston": (2.90, 2.40), "concrete": (4.82, 2.93), "energy": (0.54, 1.21), "kin8nm": (0.08, -1.14),
    "naval": (0.00, -4.45), "power": (4.01, 2.80), "protein": (4.27, 2.87), "wine": (0.62, 0.93),
    "yacht": (0.67, 1.25),
}  # fmt: skip

Data = tuple[Any, Any, Any, Any]
Row = dict[str, Any]


def closed_form(data: Data, seed: int) -> Row:
    """The streaming regressor, reading the rows once, in chunks, after columns and features were frozen."""
    x, y, x_test, y_test = data
    start = time.process_time()
    made = StreamingRegressor(random_state=seed).fit(x, y)
    learned = time.process_time()
    row = _error(made.predict(x_test), y_test)
    answered = time.process_time()
    held = {
        f"cover{p}": float(np.mean((ends[:, 0] <= y_test) & (y_test <= ends[:, 1])))
        for p in (50, 90)
        for ends in (made.predict_interval(x_test, p / 100),)
    }
    with tempfile.TemporaryDirectory() as folder:
        made.save(Path(folder) / "model")
        saved = (Path(folder) / "model").stat().st_size
    return {
        **row,
        "nll": -float(made.log_density(x_test, y_test).mean()),
        **held,
        **_by_share(made, x_test, y_test, rounding(y) / 2),
        **_without_shape(made, x_test, y_test),
        "seconds": answered - start,
        "seconds_learn": learned - start,
        "bytes": made.nbytes_,
        "bytes_saved": saved,
    }


def rounding(y: Any) -> float:
    """The smallest step between two targets: 1 of whole grades, next to nothing of a measurement."""
    return float(np.diff(np.unique(y)).min())


def _by_share(made: StreamingRegressor, x: Any, y: Any, half: float) -> Row:
    """What intervals hold, where a target stands for all numbers that are rounded to it.

    No interval can hold a part of a grade that has a third of the probability. So a target counts by the part
    of its probability, from half a step below to half a step above, that lies inside the interval's levels.
    """
    answers, weights = made.learner_.answers(frame_of(x))
    below, upto = (
        torch.from_numpy(np.tensordot(weights, [a.cdf(y[:, None] + side) for a in answers], 1)[:, 0])
        for side in (-half, half)
    )
    return {f"cover{p}_share": float(inside(below, upto, p / 100).mean()) for p in (50, 90)}


def _without_shape(made: StreamingRegressor, x: Any, y: Any) -> Row:
    """Scores of the same fit's Student's t, without the pretrained model that corrects it."""
    answers, _ = made.learner_.answers(frame_of(x))
    t, one = [answers[0]], np.ones(1)
    low, high = mixed_quantiles(t, one, (0.05, 0.95))[:, :, 0]
    return {
        "nll_student": -float(mixed_log_density(t, one, y[:, None]).mean()),
        "cover90_student": float(np.mean((low <= y) & (y <= high))),
    }


def of_sklearn(make: Callable[[int], Any], data: Data, seed: int) -> Row:
    """A regressor of scikit-learn, which sees all rows at once."""
    x, y, x_test, y_test = data
    start = time.process_time()
    made = make(seed).fit(x, y)
    seconds = time.process_time() - start
    return {**_error(made.predict(x_test), y_test), "seconds": seconds}


def gaussian_process(data: Data, seed: int) -> Row | None:
    """A Gaussian process with one length scale a column, by marginal likelihood; None of too many rows."""
    x, y, x_test, y_test = data
    if len(x) > MOST_ROWS:
        return None
    start = time.process_time()
    scaler, (centre, scale) = StandardScaler().fit(x), (y.mean(), y.std())
    kernel = ConstantKernel() * RBF(np.ones(x.shape[1]), (1e-2, 1e4)) + WhiteKernel(0.1, (1e-8, 10.0))
    made = GaussianProcessRegressor(kernel, random_state=seed)
    with warnings.catch_warnings():  # length scales of columns that say nothing end at their bounds
        warnings.simplefilter("ignore", ConvergenceWarning)
        made.fit(scaler.transform(x), (y - centre) / scale)
    mean, deviation = made.predict(scaler.transform(x_test), return_std=True)
    return _normal(centre + scale * mean, scale * deviation, y_test, start)


def fourier_moments(data: Data, seed: int) -> Row:
    """Bayesian regression on random Fourier features; precision, noise and length scale by evidence."""
    x, y, x_test, y_test = data
    start = time.process_time()
    scaler, (centre, scale) = StandardScaler().fit(x), (y.mean(), y.std())
    inputs, targets = scaler.transform(x), (y - centre) / scale
    best: Any = None
    for length in LENGTHS:
        gamma = 0.5 / (length**2 * x.shape[1])
        features = RBFSampler(gamma=gamma, n_components=FOURIER, random_state=seed).fit(inputs)
        model = BayesianRidge(compute_score=True).fit(features.transform(inputs), targets)
        if best is None or model.scores_[-1] > best[1].scores_[-1]:
            best = features, model
    features, model = best
    mean, deviation = model.predict(features.transform(scaler.transform(x_test)), return_std=True)
    return _normal(centre + scale * mean, scale * deviation, y_test, start)


def _normal(mean: Any, deviation: Any, y: Any, start: float) -> Row:
    """Scores of normal predictions that were begun at `start`."""
    seconds, far = time.process_time() - start, np.abs(y - mean) / deviation
    nll = float(np.mean(0.5 * far**2 + np.log(deviation) + 0.5 * np.log(2 * np.pi)))
    held = {"cover50": float(np.mean(far < 0.67449)), "cover90": float(np.mean(far < 1.64485))}
    return {**_error(mean, y), "nll": nll, **held, "seconds": seconds}


def _error(predicted: Any, y: Any) -> Row:
    return {"rmse": float(np.sqrt(np.mean((predicted - y) ** 2)))}


METHODS: dict[str, Callable[[Data, int], Row | None]] = {
    "closed form": closed_form,
    "random forest": partial(of_sklearn, lambda seed: RandomForestRegressor(random_state=seed)),
    "boosted trees": partial(of_sklearn, lambda seed: HistGradientBoostingRegressor(random_state=seed)),
    "ridge": partial(
        of_sklearn, lambda _: make_pipeline(StandardScaler(), RidgeCV(alphas=np.logspace(-3, 3, 13)))
    ),
    "Fourier moments": fourier_moments,
    "Gaussian process": gaussian_process,
}


def split(tables: Any, name: str, number: int) -> Data:
    """Training and test rows of one published split."""
    x, y = tables[f"{name}/x"], tables[f"{name}/y"]
    test = np.zeros(len(x), bool)
    test[tables[f"{name}/test"][number]] = True
    return x[~test], y[~test], x[test], y[test]


def summary(rows: list[Row]) -> str:
    """One line a table, and the geometric means."""
    lines = [
        f"{'':9}{'splits':>7}{'rmse':>10}{'forest':>10}{'boosted':>10}{'ridge':>10}{'Fourier':>10}"
        f"{'GP':>10}{'ratio':>7}{'nll':>8}"
        f"{'dropout':>8}{'50 %':>6}{'90 %':>6}{'cpu s':>7}"
    ]
    ratios = {}
    for name in sorted({row["table"] for row in rows}):
        mean: dict[tuple[str, str], float] = {}
        for method in METHODS:
            found = [row for row in rows if row["table"] == name and row["method"] == method]
            for score in (found[0].keys() if found else set()) & {
                "rmse",
                "nll",
                "cover50",
                "cover90",
                "seconds",
            }:
                mean[method, score] = float(np.mean([row[score] for row in found]))
        splits = len({row["split"] for row in rows if row["table"] == name})
        errors = [mean.get((method, "rmse"), float("nan")) for method in METHODS]
        ratios[name] = errors[0] / errors[1]
        ours = {score: value for (method, score), value in mean.items() if method == "closed form"}
        lines.append(
            f"{name:9}{splits:7}" + "".join(f"{e:10.4g}" for e in errors) + f"{ratios[name]:7.3f}"
            f"{ours['nll']:8.3f}{DROPOUT[name][1]:8.2f}{100 * ours['cover50']:6.1f}"
            f"{100 * ours['cover90']:6.1f}{ours['seconds']:7.1f}"
        )

    def over(names: list[str]) -> float:
        return float(np.exp(np.mean([np.log(ratios[name]) for name in names])))

    rest = [name for name in ratios if name != "naval"]
    lines.append(f"geometric mean of ratios: {over([*ratios]):.3f}; without naval {over(rest):.3f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Nine UCI tables on their published splits.")
    parser.add_argument("--splits", type=int, default=20, help="how many of each table; all if not given")
    parser.add_argument("--first", type=int, default=0, help="the first split to measure: those before stay")
    parser.add_argument("--sets", nargs="+", default=sorted(DROPOUT), choices=sorted(DROPOUT))
    parser.add_argument("--methods", nargs="+", default=[*METHODS], choices=[*METHODS], metavar="METHOD")
    parser.add_argument("--summary", action="store_true", help="print the table of what was written")
    given = parser.parse_args()
    path = RESULTS / "tables_uci.json"
    if not given.summary:
        measure(given.sets, range(given.first, given.splits), given.methods)
    print(summary(json.loads(path.read_text())["rows"]))


def measure(sets: list[str], splits: range, methods: list[str]) -> None:
    """Measure methods on splits, and write the rows after each split; rows of the same are replaced."""
    tables = np.load(Path(os.environ["CONSTMEM_DATA"]) / "tables_uci.npz", allow_pickle=False)
    about = provenance(0, "nine UCI regression tables with their published splits (tables_uci.npz)")
    about["versions"] |= {"scikit-learn": sklearn.__version__, "numpy": np.__version__}
    path = RESULTS / "tables_uci.json"
    rows: list[Row] = json.loads(path.read_text())["rows"] if path.exists() else []
    for number in splits:
        for name in sets:
            if number >= len(tables[f"{name}/test"]):
                continue
            data = split(tables, name, number)
            for method in methods:
                found = METHODS[method](data, number)
                if found is not None:
                    key = {"table": name, "split": number, "method": method}
                    rows = [row for row in rows if {**row, **key} != row]
                    rows.append({**key, **found, "commit": about["commit"]})
                    print(f"{name} {number} {method} {found['rmse']:.4g}", flush=True)
            save("tables_uci", rows, **about)


if __name__ == "__main__":
    main()
