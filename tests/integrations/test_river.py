"""River's own checks on the adapters, and what a stream of dictionaries may do."""

import numpy as np
import pytest
from river import checks, compose, preprocessing

from constmem.integrations.river import StreamingRiverClassifier, StreamingRiverRegressor
from constmem.tabular.estimators import StreamingRegressor

SMALL = {"size": 32, "warmup": 64}
CHECKS = [
    (model, check)
    for model in (StreamingRiverRegressor(**SMALL), StreamingRiverClassifier(**SMALL))
    for check in checks.yield_checks(model)
]


def _name(value: object) -> str:
    return getattr(value, "__name__", type(value).__name__)


@pytest.mark.parametrize(("model", "check"), CHECKS, ids=_name)
def test_adapters_pass_every_check_of_river(model, check) -> None:
    check(model.clone())


def _rows(count: int) -> list[tuple[dict[str, float], float]]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, 3))
    return [({"a": a, "b": b, "c": c}, 2 * a - b) for a, b, c in x.tolist()]


def test_one_row_at_a_time_is_the_estimator_on_the_whole_table() -> None:
    rows = _rows(200)
    river = StreamingRiverRegressor(**SMALL)
    for x, y in rows:
        river.learn_one(x, y)
    x = np.array([list(row.values()) for row, _ in rows])
    whole = StreamingRegressor(**SMALL).partial_fit(x, [y for _, y in rows])
    np.testing.assert_allclose(
        [river.predict_one(row) for row, _ in rows], whole.predict(x), rtol=0, atol=1e-6
    )


def test_a_feature_that_turns_up_in_the_warm_up_is_used_and_one_that_turns_up_later_is_ignored() -> None:
    river = StreamingRiverRegressor(**SMALL)
    for i, (x, y) in enumerate(_rows(400)):
        row = {name: value for name, value in x.items() if name != "a" or i >= 20}
        river.learn_one({**row, "late": 1.0} if i > 300 else row, y)
    one = river.predict_one({"a": 1.0, "b": 0.0, "c": 0.0})
    assert one == pytest.approx(2.0, abs=0.4)
    assert river.predict_one({"a": 1.0, "b": 0.0, "c": 0.0, "late": 5.0}) == one
    assert np.isfinite(river.predict_one({}))


def test_text_and_missing_values_are_features_too() -> None:
    river = StreamingRiverClassifier(**SMALL)
    for i in range(200):
        row = {"town": ["Ulm", "Bern", None][i % 3], "size": float("nan") if i % 5 == 0 else float(i % 7)}
        river.learn_one(row, ["u", "b", "-"][i % 3])
    assert river.predict_one({"town": "Ulm", "size": 1.0}) == "u"
    assert river.predict_one({"town": "Bern", "size": None}) == "b"
    assert river.predict_one({"size": 3.0}) == "-"


def test_adapters_work_at_the_end_of_a_pipeline() -> None:
    model = compose.Pipeline(preprocessing.StandardScaler(), StreamingRiverRegressor(**SMALL))
    for x, y in _rows(100):
        model.learn_one(x, y)
    assert model.predict_one({"a": 0.5, "b": 0.5, "c": 0.0}) == pytest.approx(0.5, abs=0.3)
