"""What is wrong with the input is named, and the old state stays usable."""

import warnings
from copy import deepcopy
from datetime import date
from functools import cache

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

from constmem.tabular.estimators import StreamingClassifier, StreamingRegressor
from tests.tabular.rows import KINDS, SMALL, answers_of


@cache
def _fitted(kind: str):
    make, rows = KINDS[kind]
    x, y = rows(300)
    frame = pd.DataFrame(x, columns=list("abcd"))
    estimator = make(**SMALL).partial_fit(frame, y)
    return estimator, frame, y, answers_of(estimator, frame)


def _good(kind: str):
    """An estimator of its own, its rows, and what it answers."""
    estimator, frame, y, answers = _fitted(kind)
    return deepcopy(estimator), frame.copy(), y.copy(), answers


BAD = {
    "infinite": (
        lambda e, x, y: e.partial_fit(x.replace(x.iloc[7, 1], np.inf), y),
        "row 7 of column 'b' is inf",
    ),
    "text where numbers were": (
        lambda e, x, y: e.partial_fit(x.assign(c="x"), y),
        "'c' held numbers .* text",
    ),
    "a column is missing": (lambda e, x, y: e.partial_fit(x.drop(columns="a"), y), "now missing:\n- a"),
    "a column is new": (lambda e, x, _: e.predict(x.assign(z=1.0)), "unseen at fit time:\n- z"),
    "an empty frame": (lambda e, x, y: e.partial_fit(x[:0], y[:0]), "0 sample"),
    "asked of nothing": (lambda e, x, _: e.predict(x[:0]), "0 sample"),
    "no target": (lambda e, x, _: e.partial_fit(x, None), "target y is None"),
    "too few targets": (lambda e, x, y: e.partial_fit(x, y[:-1]), "300 rows, but y has 299"),
    "three axes": (lambda e, _, y: e.partial_fit(np.zeros((2, 2, 2)), y[:2]), "Expected 2D"),
    "removing what was never there": (
        lambda e, x, y: e.remove(x * 3 + 1, y),
        "never observed|no sums of squares",
    ),
    "removing too much": (
        lambda e, x, y: e.remove(pd.concat([x, x]), np.r_[y, y]),
        "cannot be removed from 300",
    ),
    "another scaler": (lambda e, x, y: e.merge(clone(e).fit(2 * x, y)), "base.spawn()"),
    "other features": (
        lambda e, x, y: e.merge(clone(e).set_params(random_state=1).fit(x, y)),
        "base.spawn()",
    ),
    "itself": (lambda e, *_: e.merge(e), "with itself"),
    "values for columns": (lambda e, *_: e.predict({"a": 1.0}), r"column 'a' is 1.0, no list: give \[1.0\]"),
    "text for columns": (lambda e, *_: e.predict({"a": "ab"}), "column 'a' is 'ab', no list"),
}
BAD_TARGETS = {
    "missing": ("regressor", lambda y: np.where(np.arange(300) == 5, np.nan, y), "y contains NaN: row 5"),
    "all missing": ("regressor", lambda _: np.full(300, np.nan), "in 300 of 300 places"),
    "infinite": (
        "regressor",
        lambda y: np.where(np.arange(300) == 5, np.inf, y),
        "y contains infinity: row 5",
    ),
    "text": ("regressor", lambda _: np.full(300, "x"), "use StreamingClassifier"),
    "huge": ("regressor", lambda y: np.where(np.arange(300) == 5, 1e200, y), r"y holds 1e\+200 in row 5"),
    "none of a row": ("regressor", lambda _: np.zeros((300, 0)), "of no targets"),
    "dates": ("regressor", lambda _: np.full(300, "2024-01-01", "datetime64[D]"), "dates or durations"),
    "NA": ("classifier", lambda y: pd.Series(y, dtype="string").mask(np.arange(300) == 5), "NaN: row 5"),
    "dates for classes": ("classifier", lambda _: np.full(300, "2024-01-01", "M8[D]"), "y.astype"),
    "objects": ("classifier", lambda _: pd.Series([date(2024, 1, 1)] * 300), "date datetime.date"),
    "two kinds": ("classifier", lambda y: np.array([1, *y[1:]], object), "y holds text and numbers"),
    "no class": ("classifier", lambda y: np.where(np.arange(300) == 5, None, y), "y contains NaN: row 5"),
    "not a class": ("classifier", lambda _: np.linspace(0, 1, 300), "Unknown label type"),
    "numbers for names": ("classifier", lambda _: np.arange(300) % 3, "text and numbers do not mix"),
    "two a row": ("classifier", lambda y: np.stack([y, y], 1), "."),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named_and_the_state_stays_usable(kind: str, case: str) -> None:
    estimator, frame, y, before = _good(kind)
    call, message = BAD[case]
    with pytest.raises((ValueError, TypeError), match=f"(?s){message}"):
        call(estimator, frame, y)
    np.testing.assert_allclose(answers_of(estimator, frame), before, rtol=0, atol=1e-9)
    assert estimator.partial_fit(frame, y).learner_.seen == 600


@pytest.mark.parametrize("case", BAD_TARGETS)
def test_bad_targets_are_named_and_the_state_stays_usable(case: str) -> None:
    kind, spoil, message = BAD_TARGETS[case]
    estimator, frame, y, before = _good(kind)
    with pytest.raises(ValueError, match=message):
        estimator.partial_fit(frame, spoil(y))
    np.testing.assert_allclose(answers_of(estimator, frame), before, rtol=0, atol=1e-9)
    assert estimator.learner_.seen == 300
    warm = type(estimator)(**SMALL).partial_fit(frame[:20], y[:20])
    with pytest.raises(ValueError, match=message):
        warm.partial_fit(frame, spoil(y))
    assert warm.learner_.seen == 20


def test_columns_may_come_in_any_order_and_dtypes_may_change_but_for_their_kind() -> None:
    estimator, frame, *_ = _good("regressor")
    expected = estimator.predict(frame)
    np.testing.assert_array_equal(estimator.predict(frame[["d", "b", "a", "c"]]), expected)
    np.testing.assert_allclose(
        estimator.predict(frame.astype("float32")), expected, rtol=0.02
    )  # rounding moves some over thresholds
    whole = frame.round()
    np.testing.assert_array_equal(estimator.predict(whole.astype("Int64")), estimator.predict(whole))


@pytest.mark.parametrize("make", [StreamingRegressor, StreamingClassifier])
def test_an_estimator_that_has_seen_nothing_says_so(make, tmp_path) -> None:
    for call in ("predict", "spawn", "save"):
        with pytest.raises(NotFittedError):
            getattr(make(), call)(*{"predict": [[[0.0]]], "save": [tmp_path / "m"]}.get(call, []))
    fitted = make(**SMALL).fit([[0.0], [1.0]], [0, 1])
    with pytest.raises(NotFittedError):
        fitted.spawn().predict([[0.0]])
    with pytest.raises(ValueError, match="frozen after 256 rows, but 2"):
        make(**SMALL).partial_fit([[0.0], [1.0]], [0, 1]).spawn()


@pytest.mark.parametrize("pretrained", ["no", None, 1])
def test_whether_the_pretrained_law_is_used_is_said_by_true_or_false(pretrained) -> None:
    with pytest.raises(ValueError, match=f"pretrained={pretrained!r}: True or False is needed"):
        StreamingRegressor(pretrained=pretrained).fit([[0.0], [1.0]], [0, 1])


@pytest.mark.parametrize("options", [{"warmup": 0}, {"size": 3}, {"size": 1.5}, {"forget": "often"}])
def test_options_that_make_no_sense_are_refused_when_used(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        StreamingRegressor(**options).fit([[0.0], [1.0]], [0, 1])


@pytest.mark.parametrize("seed", ["x", -1, 1.5])
def test_what_is_no_seed_is_refused(seed: object) -> None:
    with pytest.raises(ValueError, match=r"cannot be used to seed|Seed must be between"):
        StreamingRegressor(random_state=seed).fit([[0.0], [1.0]], [0, 1])


MISMATCHED = {
    "forgetting": {"forget": "auto"},
    "a window": {"forget": "window:50"},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", MISMATCHED)
def test_a_merge_that_is_refused_does_not_end_a_warm_up(kind: str, case: str) -> None:
    make, rows = KINDS[kind]
    x, y = rows(300)
    forget = "window:50" if case == "a window" else None
    warm = make(**SMALL, forget=forget).partial_fit(x[:40], y[:40])
    before = answers_of(warm, x)
    with pytest.raises(ValueError, match=r"base\.spawn\(\)|cannot be merged"):
        warm.merge(make(**SMALL, **MISMATCHED[case]).fit(x, y))
    assert (warm.learner_.seen, warm.learner_.frozen) == (40, False)
    np.testing.assert_array_equal(answers_of(warm, x), before)


def test_a_merge_that_is_refused_leaves_a_classifier_its_classes() -> None:
    x, y = KINDS["classifier"][1](300)
    few = y != "high"
    frozen = StreamingClassifier(**SMALL, forget="window:50").fit(x[few], y[few])
    before = answers_of(frozen, x)
    wider = frozen.spawn().partial_fit(x, y)
    narrow = StreamingClassifier(**SMALL, forget="window:50").partial_fit(x[:50, :2], y[:50])
    for other, message in ((wider, "cannot be merged"), (narrow, "X has 2 features")):
        with pytest.raises(ValueError, match=message):
            frozen.merge(other)
        assert frozen.classes_.tolist() == ["low", "middle"]
        np.testing.assert_array_equal(answers_of(frozen, x), before)


@pytest.mark.parametrize("counts", [(40, 40), (300, 40), (40, 300)])
def test_another_number_of_targets_is_not_merged_and_not_removed(counts: tuple[int, int]) -> None:
    x, y = KINDS["regressor"][1](300)
    one, two = (
        StreamingRegressor(**SMALL).partial_fit(x[:n], t[:n])
        for n, t in zip(counts, (y, np.stack([y, -y], 1)), strict=True)
    )
    before = answers_of(one, x)
    for call in (lambda: one.merge(two), lambda: two.merge(one), lambda: two.remove(x[:5], y[:5])):
        with pytest.raises(ValueError, match=r"learned before: give the same ones|warm-up of 256"):
            call()
    np.testing.assert_array_equal(answers_of(one, x), before)
    assert (one.learner_.seen, two.learner_.seen) == counts


def test_other_classes_than_at_first_are_refused() -> None:
    model = StreamingClassifier(**SMALL).partial_fit([[0.0], [1.0]], ["a", "b"], classes=["a", "b"])
    with pytest.raises(ValueError, match="not the same as on last call"):
        model.partial_fit([[0.0], [1.0]], ["a", "b"], classes=["a", "b", "c"])
    assert model.partial_fit([[0.0]], ["a"], classes=["b", "a"]).learner_.seen == 3


@pytest.mark.parametrize("pretrained", [True, False])
@pytest.mark.parametrize("value", [1e60, -1e100])
def test_one_row_with_a_huge_target_leaves_a_state_that_answers(pretrained: bool, value: float) -> None:
    x, y = KINDS["regressor"][1](300)
    model = StreamingRegressor(**SMALL, pretrained=pretrained).fit(x, y).partial_fit(x[:1], [value])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # predictions there mean little, it says
        assert np.isfinite(answers_of(model, x)).all()
        assert np.isfinite(model.predict_interval(x)).all()


def test_what_a_mask_hides_is_missing_and_a_tensor_may_want_gradients() -> None:
    x, y = np.random.default_rng(0).standard_normal((200, 3)), np.arange(200.0)
    hidden = x > 1.0
    gaps, masked = np.where(hidden, np.nan, x), np.ma.array(x, mask=hidden)
    model = StreamingRegressor(warmup=50).partial_fit(gaps, y)
    other = StreamingRegressor(warmup=50).partial_fit(masked, y)
    assert np.array_equal(model.predict(x), other.predict(x))
    assert np.array_equal(model.predict(gaps), model.predict(masked))
    wanting = [torch.tensor(given, requires_grad=True) for given in (gaps, y)]
    assert np.array_equal(StreamingRegressor(warmup=50).partial_fit(*wanting).predict(x), model.predict(x))
    with pytest.raises(ValueError, match="y is a masked array"):
        model.partial_fit(x, np.ma.array(y, mask=y > 5))
    with pytest.raises(TypeError, match="masked array of <U1"):
        model.predict(np.ma.array(x.astype(str).astype("<U1"), mask=hidden))
