"""The estimators as scikit-learn's users know them, and as states that merge."""

from sklearn.utils.estimator_checks import parametrize_with_checks

from constmem.tabular.estimators import StreamingClassifier, StreamingRegressor


@parametrize_with_checks([StreamingRegressor(), StreamingClassifier()])
def test_estimators_pass_every_check_of_scikit_learn(estimator, check) -> None:
    check(estimator)
