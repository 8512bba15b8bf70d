"""The comparison with least squares on a few hundred rows, and what is said of it."""

import json

import diabetes
import pytest
from record import RESULTS
from sklearn.linear_model import LinearRegression

ROWS = {row["what"]: row for row in json.loads((RESULTS / "diabetes.json").read_text())["rows"]}


def test_least_squares_is_scikit_learns_on_the_rows_that_no_model_saw() -> None:
    table = diabetes.patients()
    train, validation, test = table.parts()
    x, y = ([*getattr(train, of).tolist(), *getattr(validation, of).tolist()] for of in "xy")
    off = LinearRegression().fit(x, y).predict(test.x.numpy()) - test.y.numpy()
    found = diabetes.least_squares(table)
    assert found["rmse"] == pytest.approx(float((off**2).mean() ** 0.5), rel=1e-6)
    assert found == pytest.approx({key: ROWS["least squares"][key] for key in found}, rel=1e-6)


def test_the_page_says_what_the_rows_say() -> None:
    page = (RESULTS.parents[1] / "docs" / "own-data.md").read_text()
    told = (
        f"is {ROWS['cmanp-small']['rmse']:.0f} and that of least squares {ROWS['least squares']['rmse']:.0f}"
    )
    assert told in " ".join(page.split())
    assert ROWS["cmanp-small"]["steps"] == diabetes.STEPS
