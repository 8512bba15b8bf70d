"""A few hundred rows of many columns: a model trained on them beside ordinary least squares.

python benchmarks/diabetes.py           # a minute on one core; writes results/diabetes.json

The 442 patients with diabetes that come with scikit-learn, ten columns and one number a year later. Both
see the same rows: least squares with Gaussian residuals is fitted to those that are trained and those that
are validated on; the model, trained as `constmem train FILE.csv` would, predicts the others given all rows
it was trained on (the test set `full` of `constmem eval`).
"""

import argparse
import tempfile
from math import log, pi
from pathlib import Path
from typing import Any

import numpy as np
from record import provenance, save

from constmem.data import Table
from constmem.evaluation.runs import evaluate_run
from constmem.training import fit_table

STEPS = 500  # a quarter of the recipe's, for a minute's work


def patients() -> Table:
    from sklearn.datasets import load_diabetes

    x, y = load_diabetes(return_X_y=True, scaled=False)
    return Table.of(x, y, name="diabetes")


def least_squares(table: Table) -> dict[str, float]:
    """RMSE and log-likelihood of ordinary least squares on the test rows."""
    train, validation, test = table.parts()
    x, y = (np.concatenate([getattr(part, of).numpy() for part in (train, validation)]) for of in "xy")

    def design(rows: Any) -> Any:
        return np.concatenate([rows, np.ones((len(rows), 1))], 1)

    weights, *_ = np.linalg.lstsq(design(x), y, rcond=None)
    variance = float(((y - design(x) @ weights) ** 2).sum() / (len(x) - x.shape[1] - 1))
    squared = (test.y.numpy() - design(test.x.numpy()) @ weights) ** 2
    likelihood = -0.5 * (log(2 * pi * variance) + squared / variance)
    return {"rmse": float(np.sqrt(squared.mean())), "log_likelihood": float(likelihood.mean())}


def learned(table: Table, steps: int) -> dict[str, Any]:
    """The same scores of a model trained with the settings of one's own data."""
    with tempfile.TemporaryDirectory() as folder:
        fit_table(table, "cmanp-small", out=folder, steps=steps)
        row = evaluate_run(Path(folder), data_dir=None, device="cpu")
    scores = row.scores["full"]
    return {"steps": row.steps, "rmse": scores.rmse, "log_likelihood": scores.log_likelihood}


def main() -> None:
    parser = argparse.ArgumentParser(description="A few hundred rows: a model beside least squares.")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of training; {STEPS} if not given")
    steps = parser.parse_args().steps
    table = patients()
    rows = [
        {"what": "least squares", **least_squares(table)},
        {"what": "cmanp-small", **learned(table, steps)},
    ]
    for row in rows:
        print(row)
    save("diabetes", rows, **provenance(0, table.statement))


if __name__ == "__main__":
    main()
