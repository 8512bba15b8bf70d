"""One table, read once: error falls, intervals hold, memory stays flat; then shards, removal and a file.

python examples/table.py

The 1,797 digits of scikit-learn come as a stream of rows; patients with diabetes as a table with names,
learned by two machines whose states are merged.
"""

import tempfile
from pathlib import Path

import numpy as np
from sklearn.datasets import load_diabetes, load_digits

from constmem import StreamingClassifier, StreamingRegressor


def stream() -> None:
    """Digits, forty at a time: predict, then learn."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    x, y = x[order], y[order]
    classifier, right = StreamingClassifier(warmup=256), 0
    print("rows seen   right, of all so far   bytes remembered")
    for start in range(0, 1760, 40):
        rows = slice(start, start + 40)
        if start:
            right += int((classifier.predict(x[rows]) == y[rows]).sum())
        classifier.partial_fit(x[rows], y[rows])
        if start in (40, 160, 400, 800, 1720):
            print(f"{start + 40:9}   {right / start:20.3f}   {classifier.nbytes_:16,}")


def table() -> None:
    """Patients: shards merged, rows removed, and the estimator in a file."""
    x, y = load_diabetes(return_X_y=True, as_frame=True, scaled=False)
    train, test = slice(0, 350), slice(350, None)
    base = StreamingRegressor().fit(x[train], y[train])
    mean, deviation = base.predict(x[test], return_std=True)
    low, high = base.predict_interval(x[test]).T
    held = float(((y[test] >= low) & (y[test] <= high)).mean())
    error = float(np.sqrt(((mean - y[test]) ** 2).mean()))
    print(f"\nRMSE {error:.1f}, predicted deviation {deviation.mean():.1f}; 90 % intervals hold {held:.0%}")

    one, two = base.spawn(), base.spawn()  # empty, with the same frozen columns: for two machines
    one.partial_fit(x[:200], y[:200])
    two.partial_fit(x[200:350], y[200:350])
    apart = np.abs(one.merge(two).predict(x) - base.predict(x)).max()
    print(f"two shards merged differ from one pass by {apart:.0e}")

    one.partial_fit(x[test], y[test]).remove(x[test], y[test])
    print(f"learned and removed again: {np.abs(one.predict(x) - base.predict(x)).max():.0e}")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "patients.model"
        one.save(path)
        again = StreamingRegressor.load(path)
        print(f"{path.stat().st_size:,} bytes in a file; {again.learner_.seen} patients learned")


def main() -> None:
    stream()
    table()


if __name__ == "__main__":
    main()
