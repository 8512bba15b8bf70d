"""Laws of answers are those of scipy: distribution functions, quantiles and densities, alone and mixed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from constmem.tabular.answers import (
    TAILS,
    Answer,
    Numbers,
    Shape,
    concatenated,
    mixed_log_density,
    mixed_quantiles,
    student_quantile,
)  # fmt: skip

ONE = np.ones((1, 1))


@pytest.mark.parametrize("freedom", [0.6, 1.5, 3.0, 7.9, TAILS, 30.0])
def test_student_s_t_is_scipy_s(freedom: float) -> None:
    law = Answer(0 * ONE, ONE, freedom)
    y = np.concatenate([np.linspace(-40, 40, 401), np.logspace(-9, 300, 40), -np.logspace(-9, 9, 40)])[
        :, None
    ]
    np.testing.assert_allclose(law.cdf(y), stats.t.cdf(y, freedom), rtol=1e-9, atol=1e-14)
    np.testing.assert_allclose(law.log_densities(y[:401]), stats.t.logpdf(y[:401], freedom), rtol=1e-12)
    assert np.isfinite(law.log_densities(np.array([[1e300]]))).all()
    for level in (1e-9, 0.001, 0.3, 0.5, 0.95, 1 - 1e-6):
        found = student_quantile(level, freedom)
        np.testing.assert_allclose(found, stats.t.ppf(level, freedom), rtol=1e-9, atol=1e-12)


@given(seed=st.integers(0, 2**31), level=st.floats(1e-5, 1 - 1e-5), sharp=st.floats(1e-4, 1.0))
def test_quantiles_of_any_mixture_are_where_its_distribution_function_has_their_level(
    seed: int, level: float, sharp: float
) -> None:
    random = np.random.default_rng(seed)
    n, k, c = 9, 2, 5
    mean, variance = random.normal(size=(n, k)), random.gamma(1.0, size=(n, k)) + 1e-6
    weight = random.dirichlet(np.ones(c), (n, k))
    normals = Shape(mean, 5 * random.normal(size=(n, k, c)), sharp * random.gamma(1.0, size=(n, k, c)) + 1e-9,
                    np.log(np.maximum(weight, 1e-300)))  # fmt: skip
    answers, shares = [Answer(mean, variance, TAILS), normals], np.array([0.2, 0.8])
    (found,) = mixed_quantiles(answers, shares, [level])
    spread = 1e-9 * (1 + np.abs(found))
    below, above = (shares @ [a.cdf(at).ravel() for a in answers] for at in (found - spread, found + spread))
    assert (below <= level + 1e-12).all()
    assert (above >= level - 1e-12).all()


def test_answers_to_pieces_are_answers_to_all_rows() -> None:
    random = np.random.default_rng(0)
    whole = Answer(random.normal(size=(7, 2)), random.gamma(1.0, size=(7, 2)), 5.0)
    pieces = [Answer(whole.mean[rows], whole.variance[rows], 5.0) for rows in (slice(0, 3), slice(3, 7))]
    y, one = random.normal(size=(7, 2)), np.ones(1)
    np.testing.assert_array_equal(
        mixed_log_density([concatenated(pieces)], one, y), mixed_log_density([whole], one, y)
    )


def test_targets_that_do_not_fit_the_answers_are_refused() -> None:
    class Fixed(Numbers):
        _flat = True

        def _answers(self, X: object) -> tuple[list[Answer], np.ndarray]:  # noqa: N803, ARG002
            return [Answer(np.zeros((3, 1)), np.ones((3, 1)), 5.0)], np.ones(1)

    assert Fixed().log_density(None, [0.0, 1.0, 2.0]).shape == (3,)
    with pytest.raises(ValueError, match="y has 2 targets, but 1 were learned"):
        Fixed().log_density(None, np.zeros((3, 2)))
    with pytest.raises(ValueError, match="numbers between 0 and 1"):
        Fixed().predict_quantiles(None, [0.5, 1.0])
    with pytest.raises(ValueError, match="a number between 0 and 1"):
        Fixed().predict_interval(None, 1.5)
