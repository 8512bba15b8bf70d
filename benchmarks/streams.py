"""Streams, row after row: predict, then learn; and how the error on real tables falls with the rows seen.

python benchmarks/streams.py bananas phishing segments elec2     # prequential accuracy
python benchmarks/streams.py protein power kin8nm                # error against rows

Elec2 and the tables need CONSTMEM_DATA. Rows are added to results/streams.json as they come; those of the
same part are replaced. Streams are those that come with river, and Elec2 in the version without date and
weekday, with the label before as one more column. Beside the learner stand: no change (always the label
before), river's Hoeffding adaptive tree and its adaptive random forest, on the same rows in the same run.
Seconds are of the CPU, on one thread.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import RESULTS, provenance, save
from river import base, datasets, forest, tree
from sklearn.ensemble import RandomForestRegressor

from constmem.evaluation.demo import forest_bytes
from constmem.integrations.river import StreamingRiverClassifier
from constmem.tabular.estimators import StreamingRegressor

Row = dict[str, Any]
Stream = Iterable[tuple[dict[str, Any], Any]]
STREAMS = {"bananas": datasets.Bananas, "phishing": datasets.Phishing, "segments": datasets.ImageSegments}
TABLES = ("protein", "power", "kin8nm")
SEEN = (10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000)
CHUNK = 4096
SPLITS = 5


def packed(name: str) -> Any:
    """A prepared data set."""
    folder = os.environ.get("CONSTMEM_DATA")
    if not folder:
        raise SystemExit("set CONSTMEM_DATA to the folder of prepared data sets")
    return np.load(Path(folder) / name, allow_pickle=False)


def elec2() -> Iterator[tuple[dict[str, Any], Any]]:
    """Half-hours of the electricity market, and whether the price rises; the last label is a column."""
    data = packed("stream_elec2.npz")
    names, x, y = [str(c) for c in data["columns"]], data["x"].astype(float).tolist(), data["y"].tolist()
    for i, (row, label) in enumerate(zip(x, y, strict=True)):
        yield {**dict(zip(names, row, strict=True)), "before": y[i - 1] if i else 0}, bool(label)


class NoChange(base.Classifier):
    """Always the label before."""

    def __init__(self) -> None:
        self.last: Any = None

    def learn_one(self, x: dict[Any, Any], y: Any) -> None:  # noqa: ARG002
        self.last = y

    def predict_one(self, x: dict[Any, Any], **kwargs: Any) -> Any:  # noqa: ARG002
        return self.last


MODELS: dict[str, Callable[[], base.Classifier]] = {
    "no change": NoChange,
    "streaming classifier": lambda: StreamingRiverClassifier(forget="auto"),
    "hoeffding adaptive tree": lambda: tree.HoeffdingAdaptiveTreeClassifier(seed=0),
    "adaptive random forest": lambda: forest.ARFClassifier(seed=0),
}


def prequential(stream: Stream, model: base.Classifier) -> Row:
    """Accuracy of predicting each row before learning it."""
    right = rows = 0
    start = time.process_time()
    for x, y in stream:
        rows += 1
        right += model.predict_one(x) == y
        model.learn_one(x, y)
    spent = time.process_time() - start
    row: Row = {
        "rows": rows,
        "accuracy": round(right / rows, 4),
        "cpu_ms_a_row": round(1e3 * spent / rows, 3),
    }
    if isinstance(model, StreamingRiverClassifier):
        row["state_bytes"] = model.estimator.nbytes_
    return row


def curve(name: str) -> Iterator[Row]:
    """Errors on the test rows of published splits, after more and more rows of a shuffled pass: their means.

    Beside it a forest that is retrained on all rows so far, and the bytes of these rows.
    """
    data = packed("tables_uci.npz")
    x, y = data[f"{name}/x"], data[f"{name}/y"]
    passes = [one_pass(x, y, test, i) for i, test in enumerate(data[f"{name}/test"][:SPLITS])]
    for rows in zip(*passes, strict=True):
        means = {key: round(float(np.mean([row[key] for row in rows])), 4) for key in rows[0]}
        exact = {key: value for key, value in rows[0].items() if isinstance(value, int)}
        yield {**means, **exact, "splits": len(rows)}


def one_pass(x: Any, y: Any, test: Any, split: int) -> Iterator[Row]:
    """What `curve` tells, of one split."""
    train = np.random.default_rng(split).permutation(np.setdiff1d(np.arange(len(y)), test))
    estimator, seen = StreamingRegressor(), 0
    for stop in (*(n for n in SEEN if n < len(train)), len(train)):
        for start in range(seen, stop, CHUNK):
            rows = train[start : min(start + CHUNK, stop)]
            estimator.partial_fit(x[rows], y[rows])
        seen = stop
        error = estimator.predict(x[test]) - y[test]
        trees = RandomForestRegressor(random_state=0).fit(x[train[:seen]], y[train[:seen]])
        other = trees.predict(x[test]) - y[test]
        density = estimator.log_density(x[test], y[test])
        low, high = estimator.predict_interval(x[test]).T
        yield {
            "seen": seen,
            "rmse_in_deviations": float(np.sqrt(np.mean(error**2)) / y.std()),
            "nll_in_deviations": float(-density.mean() - np.log(y.std())),
            "held_by_90_percent_intervals": float(np.mean((y[test] >= low) & (y[test] <= high))),
            "state_bytes": estimator.nbytes_,
            "forest_rmse_in_deviations": float(np.sqrt(np.mean(other**2)) / y.std()),
            "forest_bytes": forest_bytes(trees),
            "rows_bytes": 8 * seen * (x.shape[1] + 1),
        }


def measured(part: str) -> Iterator[Row]:
    """The rows of one part, as they come."""
    if part in TABLES:
        yield from curve(part)
    else:
        make = STREAMS.get(part, elec2)
        for name, model in MODELS.items():
            yield {"model": name, **prequential(make(), model())}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = (*STREAMS, "elec2", *TABLES)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(parts))
    chosen = parser.parse_args().parts or list(parts)
    unknown = set(chosen) - set(parts)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(parts)}")
    torch.set_num_threads(1)
    path = RESULTS / "streams.json"
    for part in chosen:
        rows = json.loads(path.read_text())["rows"] if path.exists() else []
        rows = [row for row in rows if row["part"] != part]
        for row in measured(part):
            print(part, json.dumps(row), flush=True)
            rows.append({"part": part, **row, **provenance(0, part)})
            save("streams", rows)


if __name__ == "__main__":
    main()
