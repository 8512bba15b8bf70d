"""Rows that tests of the estimators learn, and all that an estimator answers to them."""

import numpy as np

from constmem.tabular.estimators import StreamingClassifier, StreamingRegressor

SMALL = {"size": 128, "warmup": 256}


def table(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 4))
    return x, 50 + 7 * (np.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.1 * rng.normal(size=count))


def classes(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    x, y = table(count, seed)
    return x, np.array(["low", "middle", "high"])[np.digitize(y, [45, 55])]


KINDS = {"regressor": (StreamingRegressor, table), "classifier": (StreamingClassifier, classes)}


def answers_of(estimator, x: object) -> np.ndarray:
    if isinstance(estimator, StreamingClassifier):
        return estimator.predict_proba(x)
    return np.stack(estimator.predict(x, return_std=True), -1)
