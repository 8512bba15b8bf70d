"""The estimators as scikit-learn's users know them, and as states that merge."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import joblib
import numpy as np
import pandas as pd
import pytest
from record import peak
from safetensors import safe_open
from scipy import stats
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from constmem.tabular.estimators import StreamingClassifier, StreamingRegressor
from tests.tabular.rows import KINDS, SMALL, answers_of, classes, table


@parametrize_with_checks([StreamingRegressor(), StreamingClassifier()])
def test_estimators_pass_every_check_of_scikit_learn(estimator, check) -> None:
    if "array_api" in str(check):
        pytest.skip("in a process of its own, below")
    check(estimator)


def test_the_checks_of_the_array_api_pass_in_a_process_that_allows_them() -> None:
    code = """if True:
        from sklearn.utils import estimator_checks
        from constmem.tabular.estimators import StreamingClassifier, StreamingRegressor
        for estimator in (StreamingRegressor(size=128), StreamingClassifier(size=128)):
            estimator_checks.check_array_api_input("x", estimator, "numpy", expect_only_array_outputs=False)
        print("passed")
    """
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "SCIPY_ARRAY_API": "1", "PYTHONPATH": root}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert done.stdout.strip() == "passed", done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_sixteen_shards_merged_answer_as_one_that_saw_all(kind: str) -> None:
    make, rows = KINDS[kind]
    x, y = rows(3000)
    base = make(**SMALL).partial_fit(x[:300], y[:300])
    merged = base.spawn()
    parts = np.array_split(np.random.default_rng(0).permutation(3000), 16)
    for part in parts:
        merged.merge(base.spawn().partial_fit(x[part], y[part]))
    whole = base.spawn().partial_fit(x, y)
    assert merged.learner_.seen == 3000
    np.testing.assert_allclose(answers_of(merged, x), answers_of(whole, x), rtol=2e-6, atol=1e-6)
    with pytest.raises(AssertionError):  # and it is the shards that matter
        np.testing.assert_allclose(answers_of(base, x), answers_of(whole, x), rtol=0, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(40, 50), (40, 600), (600, 40)])
def test_estimators_in_their_warm_up_merge_too(kind: str, sizes: tuple[int, int]) -> None:
    make, rows = KINDS[kind]
    x, y = rows(sum(sizes))
    first, second = (slice(0, sizes[0]), slice(sizes[0], None))
    a, b = (make(**(SMALL | {"warmup": 200})).partial_fit(x[part], y[part]) for part in (first, second))
    a.merge(b)
    assert a.learner_.seen == sum(sizes)
    order = np.arange(sum(sizes))
    if sizes[1] > 200:  # the one that was frozen came first
        order = np.roll(order, sizes[1])
    whole = make(**(SMALL | {"warmup": 200})).partial_fit(x[order], y[order])
    unit = np.std(y) if kind == "regressor" else 1.0  # the pretrained law of residuals computes in float32
    np.testing.assert_allclose(answers_of(a, x) / unit, answers_of(whole, x) / unit, rtol=0, atol=1e-6)


def test_classes_that_shards_have_met_in_another_order_are_merged() -> None:
    x, y = classes(1200)
    base = StreamingClassifier(**SMALL).fit(x[:300], np.full(300, "low"))
    merged, other = base.spawn(), base.spawn()
    merged.partial_fit(x[y == "middle"], y[y == "middle"])
    for label in ("high", "low"):
        other.partial_fit(x[y == label], y[y == label])
    merged.merge(other)
    whole = base.spawn().partial_fit(x, y)
    assert merged.classes_.tolist() == ["high", "low", "middle"]
    np.testing.assert_allclose(merged.predict_proba(x), whole.predict_proba(x), rtol=0, atol=1e-6)
    again = base.spawn().partial_fit(x[y == "high"], y[y == "high"])
    again.merge(
        base.spawn().partial_fit(x[y != "high"], y[y != "high"])
    )  # middle is second there, third here
    np.testing.assert_allclose(again.predict_proba(x), whole.predict_proba(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_one_at_a_time_in_chunks_or_at_once_give_the_same_answers(kind: str) -> None:
    make, rows = KINDS[kind]
    x, y = rows(500)
    whole = make(**(SMALL | {"warmup": 100})).partial_fit(x, y)
    for size in (1, 33, 250):
        cut = make(**(SMALL | {"warmup": 100}))
        for start in range(0, 500, size):
            cut.partial_fit(x[start : start + size], y[start : start + size])
        np.testing.assert_allclose(answers_of(cut, x), answers_of(whole, x), rtol=0, atol=1e-6)


def test_answers_are_sensible_from_the_first_row_on() -> None:
    x, y = table(400)
    estimator, errors = StreamingRegressor(**SMALL), []
    for i in range(400):
        estimator.partial_fit(x[i : i + 1], y[i : i + 1])
        if i in (0, 1, 2, 5, 20, 100, 255, 256, 399):
            mean, deviation = estimator.predict(x, return_std=True)
            assert np.isfinite(mean).all()
            assert (deviation > 0).all()
            assert y.min() - 60 < mean.min() <= mean.max() < y.max() + 60
            errors.append(np.sqrt(np.mean((mean - y) ** 2)))
    assert errors[0] < 2.5 * y.std()
    assert errors[-1] < 0.5 * y.std()
    classifier = StreamingClassifier(**SMALL).partial_fit([[0.0], [1.0]], ["a", "b"])
    assert classifier.predict([[0.0], [1.0]]).tolist() == ["a", "b"]


@pytest.mark.parametrize("kind", KINDS)
def test_removing_rows_is_never_having_seen_them(kind: str) -> None:
    make, rows = KINDS[kind]
    x, y = rows(900)
    base = make(**SMALL).fit(x[:300], y[:300])
    estimator = base.spawn().partial_fit(x, y).remove(x[200:500], y[200:500])
    keep = np.r_[0:200, 500:900]
    never = base.spawn().partial_fit(x[keep], y[keep])
    assert estimator.learner_.seen == 600
    np.testing.assert_allclose(answers_of(estimator, x), answers_of(never, x), rtol=0, atol=1e-6)


def test_intervals_and_quantiles_hold_what_they_say() -> None:
    x, y = table(3000)
    estimator = StreamingRegressor(pretrained=False).fit(x[:2000], y[:2000])
    for coverage in (0.5, 0.9):
        low, high = estimator.predict_interval(x[2000:], coverage).T
        held = np.mean((y[2000:] >= low) & (y[2000:] <= high))
        assert held == pytest.approx(coverage, abs=0.06)
    levels = [0.05, 0.3, 0.5, 0.7, 0.95]
    made = estimator.predict_quantiles(x[2000:], levels)
    assert made.shape == (1000, 5)
    assert (np.diff(made, axis=1) > 0).all()
    (answer,), _ = estimator.learner_.answers(_frame(x[2000:2005]))
    scale = np.sqrt(answer.variance)
    t = stats.t(answer.freedom, answer.mean, scale)
    np.testing.assert_allclose(made[:5], t.ppf(levels), rtol=1e-9)
    mean, deviation = estimator.predict(x[2000:2005], return_std=True)
    np.testing.assert_allclose(deviation[:, None], t.std(), rtol=1e-9)
    np.testing.assert_allclose(mean[:, None], t.mean(), rtol=1e-9)
    np.testing.assert_allclose(estimator.predict(x[2000:2005]), mean, rtol=1e-9)


def test_quantiles_of_mixed_horizons_are_those_of_the_mixture() -> None:
    x, y = table(600)
    estimator = StreamingRegressor(**SMALL, forget="auto")
    for start in range(0, 600, 50):
        estimator.partial_fit(x[start : start + 50], y[start : start + 50])
    answers, weights = estimator.learner_.answers(_frame(x[:7]))
    assert len(weights) == 5
    np.testing.assert_allclose(estimator.predict(x), estimator.predict(x, return_std=True)[0], rtol=1e-9)
    made = estimator.predict_quantiles(x[:7], [0.1, 0.8])
    for i, level in enumerate((0.1, 0.8)):
        parts = [stats.t(a.freedom, a.mean[:, 0], np.sqrt(a.variance[:, 0])).cdf(made[:, i]) for a in answers]
        np.testing.assert_allclose(weights @ np.stack(parts), level, atol=1e-9)


def _frame(x: np.ndarray):
    from constmem.tabular.inputs import frame_of

    return frame_of(x)


def test_several_targets_are_learned_together() -> None:
    x, y = table(800)
    both = np.stack([y, -3 * x[:, 3]], 1)
    estimator = StreamingRegressor(**SMALL).partial_fit(x[:400], both[:400]).partial_fit(x[400:], both[400:])
    mean, deviation = estimator.predict(x, return_std=True)
    assert mean.shape == deviation.shape == (800, 2)
    assert estimator.score(x, both) > 0.9
    assert estimator.predict_interval(x[:5]).shape == (5, 2, 2)
    with pytest.raises(ValueError, match="y has 1 targets, but 2"):
        estimator.partial_fit(x, y)


def test_a_constant_target_and_constant_columns_are_fine() -> None:
    x, _ = table(100)
    x[:, 2] = 4.0
    for value in (0.0, -7.5, 1e6):
        mean, deviation = (
            StreamingRegressor(**SMALL).fit(x, np.full(100, value)).predict(x + 0.1, return_std=True)
        )
        np.testing.assert_allclose(mean, value, rtol=1e-3, atol=1e-3)
        assert (deviation < 0.1 * max(abs(value), 1)).all()


def test_many_classes_one_class_and_classes_that_turn_up_late() -> None:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 25, 2500)
    angle = y * 2 * np.pi / 25
    x = np.stack([np.cos(angle), np.sin(angle)], 1) + 0.02 * rng.normal(size=(2500, 2))
    estimator = StreamingClassifier().fit(x[:2000], y[:2000])
    assert estimator.score(x[2000:], y[2000:]) > 0.9
    np.testing.assert_allclose(estimator.predict_proba(x[:9]).sum(1), 1)

    late = StreamingClassifier(**SMALL).partial_fit(x[:300], np.zeros(300, int))
    assert late.predict(x[:3]).tolist() == [0, 0, 0]
    assert late.predict_proba(x[:3]).tolist() == [[1.0]] * 3
    for start in range(300, 2000, 100):
        late.partial_fit(x[start : start + 100], y[start : start + 100])
    assert late.classes_.tolist() == list(range(25))
    assert late.predict_proba(x[:1]).shape == (1, 25)
    assert late.score(x[2000:], y[2000:]) > 0.5


def test_declared_classes_are_all_there_are() -> None:
    estimator = StreamingClassifier(**SMALL).partial_fit([[0.0], [1.0]], ["b", "b"], classes=["c", "a", "b"])
    assert estimator.classes_.tolist() == ["a", "b", "c"]
    assert estimator.predict_proba([[0.0]]).shape == (1, 3)
    with pytest.raises(ValueError, match="'d', which is none of the classes given at first"):
        estimator.partial_fit([[0.0]], ["d"])
    assert estimator.partial_fit([[0.0]], ["a"]).learner_.seen == 3
    for given in (np.array(["b", "a"], object), pd.Series(["a", "b"]), ("a", "b")):
        estimator = StreamingClassifier(**SMALL).partial_fit([[0.0], [1.0]], ["b", "b"], classes=given)
        estimator.partial_fit([[0.0]], ["a"], classes=given)
        assert estimator.classes_.tolist() == ["a", "b"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("count", "forget"), [(350, None), (50, 300.0), (350, "window:200"), (50, "auto")])
def test_a_saved_estimator_comes_back_and_goes_on(tmp_path, kind: str, forget: object, count: int) -> None:
    make, rows = KINDS[kind]
    x, y = rows(450)
    table = pd.DataFrame(x, columns=list("abcd")).assign(town=np.where(x[:, 0] > 0, "Ulm", None))
    table["day"] = pd.Timestamp("2024-01-01") + pd.to_timedelta(np.arange(450), "D")
    asked = table[::10]
    estimator = make(size=64, warmup=128, forget=forget).partial_fit(table[:count], y[:count])
    answers_of(estimator, table[:5])
    estimator.save(tmp_path / "model")
    again = make.load(tmp_path / "model")
    assert again.get_params() == estimator.get_params()
    np.testing.assert_allclose(answers_of(again, asked), answers_of(estimator, asked), rtol=0, atol=1e-7)
    for each in (estimator, again):
        each.partial_fit(table[count:], y[count:])
    np.testing.assert_allclose(answers_of(again, asked), answers_of(estimator, asked), rtol=0, atol=1e-5)


def test_a_saved_estimator_is_small_plain_and_refused_where_damaged(tmp_path) -> None:
    x, y = table(600)
    estimator = StreamingRegressor().fit(x, y)
    path = tmp_path / "model"
    estimator.save(path)
    assert estimator.nbytes_ < 5e6
    assert path.stat().st_size < 2.5e6
    with safe_open(path, framework="np") as file:
        content = json.loads(file.metadata()["content"])
    assert content["about"]["class"] == "StreamingRegressor"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="cut short"):
        StreamingRegressor.load(path)
    path.write_bytes(whole.replace(b'"version":"1s"', b'"version":"9s"'))
    with pytest.raises(ValueError, match="format version 9"):
        StreamingRegressor.load(path)
    path.write_bytes(whole.replace(b"number", b"nvmber"))
    with pytest.raises(ValueError, match="is damaged"):
        StreamingRegressor.load(path)
    path.write_bytes(whole)
    with pytest.raises(ValueError, match="not a StreamingClassifier"):
        StreamingClassifier.load(path)
    with pytest.raises(FileNotFoundError):
        StreamingRegressor.load(tmp_path / "none")
    np.testing.assert_array_equal(StreamingRegressor.load(path).predict(x), estimator.predict(x))


def test_settings_and_classes_that_are_numpys_are_saved(tmp_path) -> None:
    x, y = classes(300)
    size, warmup = np.array([64, 128])
    numbers = np.array([*np.unique(y, return_inverse=True)[1]], object)  # each of them numpy's
    estimator = StreamingClassifier(size=size, warmup=warmup).fit(x, numbers)
    estimator.save(tmp_path / "model")
    again = StreamingClassifier.load(tmp_path / "model")
    assert again.get_params() == estimator.get_params()
    np.testing.assert_array_equal(again.predict(x), estimator.predict(x))


def test_pipelines_searches_clones_and_joblib_work() -> None:
    x, y = table(400)
    model = make_pipeline(StandardScaler(), StreamingRegressor(**SMALL))
    assert cross_val_score(model, x, y, cv=3).min() > 0.8
    search = GridSearchCV(StreamingClassifier(), {"size": [64, 128]}, cv=2).fit(*classes(300))
    assert search.best_score_ > 0.6
    estimator = StreamingRegressor(**SMALL, forget=500).fit(x, y)
    assert clone(estimator).get_params() == estimator.get_params()
    with pytest.raises(NotFittedError):
        clone(estimator).predict(x)
    file = io.BytesIO()
    joblib.dump(estimator, file)
    file.seek(0)
    np.testing.assert_array_equal(joblib.load(file).predict(x), estimator.predict(x))


def test_peak_memory_does_not_depend_on_the_number_of_rows() -> None:
    rng = np.random.default_rng(0)

    def work(chunks: int):
        def learn() -> None:
            estimator = StreamingRegressor(**SMALL)
            for _ in range(chunks):
                x = rng.normal(size=(2000, 4))
                estimator.partial_fit(x, x[:, 0])
            estimator.predict(x[:10])

        return learn

    work(2)()  # what is imported and kept by the first call is not counted
    few, many = peak(work(4)), peak(work(40))
    assert few is not None
    assert many is not None
    assert many < 1.1 * few + 100_000
    sizes = []
    estimator = StreamingRegressor(**SMALL)
    for _ in range(5):
        x = rng.normal(size=(1000, 4))
        sizes.append(estimator.partial_fit(x, x[:, 0]).nbytes_)
    assert len(set(sizes)) == 1


@pytest.mark.parametrize("forget", [None, "auto"])
def test_means_deviations_and_quantiles_are_those_of_the_density(forget: object) -> None:
    x, y = table(400)
    model = StreamingRegressor(forget=forget, pretrained=False, **SMALL).partial_fit(x, y)
    (mean,), (deviation,) = model.predict(x[:1], return_std=True)
    grid = mean + deviation * np.linspace(-60, 60, 60_001)
    mass = np.exp(model.log_density(np.repeat(x[:1], len(grid), 0), grid)) * (grid[1] - grid[0])
    assert mass.sum() == pytest.approx(1, abs=1e-6)
    assert mass @ grid == pytest.approx(mean, abs=1e-4 * deviation)
    assert np.sqrt(mass @ (grid - mean) ** 2) == pytest.approx(deviation, rel=1e-3)
    levels = (0.05, 0.5, 0.9, 0.999)
    np.testing.assert_allclose(
        np.interp(model.predict_quantiles(x[:1], levels)[0], grid, mass.cumsum()), levels, atol=2e-3
    )


def test_intervals_hold_what_they_promise_from_ten_rows_on() -> None:
    rng = np.random.default_rng(3)
    held = []
    for noise in (0.02, 0.3, 1.0):
        for _ in range(12):
            x = rng.normal(size=(210, 5))
            y = x @ rng.normal(size=5) + np.sin(2 * x[:, 0]) + noise * rng.normal(size=210)
            ends = StreamingRegressor().partial_fit(x[:10], y[:10]).predict_interval(x[10:])
            held.append(np.mean((ends[:, 0] <= y[10:]) & (y[10:] <= ends[:, 1])))
    assert np.mean(held) > 0.82
    assert np.mean(np.array(held) < 0.6) < 0.1  # few tables are misjudged badly


@pytest.mark.parametrize("y", [0.0, 0.4, -500.0])
def test_one_row_says_nothing_of_the_spread(y: float) -> None:
    model = StreamingRegressor().partial_fit([[1.0, 2.0]], [y])
    mean, deviation = model.predict([[1.0, 2.0], [3.0, 0.0]], return_std=True)
    np.testing.assert_allclose(mean, y, atol=1e-9)
    assert (deviation > max(abs(y), 1.0)).all()
