"""The commands on one table, from the command line's words to files and exit codes."""

import csv
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from constmem import cli
from constmem.tabular.commands import load_model
from constmem.tabular.estimators import StreamingRegressor


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a command; its exit code, and what it printed."""

    def command(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["constmem", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            cli.main()
        said = capsys.readouterr()
        return left.value.code or 0, said.out, said.err

    return command


def _houses(count: int, seed: int = 0) -> list[dict[str, object]]:
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        size, town, when = rng.uniform(20, 200), rng.choice(["Ulm", "Bern", "Rom"]), int(rng.integers(1, 28))
        price = 3 * size + {"Ulm": 0, "Bern": 200, "Rom": -50}[town] + rng.normal()
        row = {
            "id": i,
            "size": round(size, 2),
            "town": town,
            "sold": f"2024-03-{when:02}",
            "price": round(price, 2),
        }
        if i % 11 == 0:
            row["size"] = ""
        rows.append(row)
    return rows


def _write(path: Path, rows: list[dict[str, object]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def fitted(tmp_path_factory) -> Path:
    """A folder with a table and a model of it, fitted once."""
    folder = tmp_path_factory.mktemp("fitted")
    table = _write(folder / "houses.csv", _houses(900))
    words = ("fit", table, "--target", "price", "--ignore", "id", "--out", folder / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["constmem", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            cli.main()
    assert not left.value.code
    return folder


@pytest.fixture
def model(tmp_path, fitted) -> Path:
    """A model of one's own, beside the table that it was fitted to."""
    shutil.copytree(fitted, tmp_path, dirs_exist_ok=True)
    return tmp_path / "model"


def test_a_fitted_file_predicts_scores_and_updates(tmp_path, run, model) -> None:
    new = _write(tmp_path / "new.csv", _houses(300, seed=1))
    code, said, _ = run("score", model, new, "--json")
    before = json.loads(said)
    assert (code, before["rows"]) == (0, 300)
    assert before["rmse"] < 60  # a size that is missing costs up to 270
    assert 0.8 < before["held_by_90_percent_intervals"] <= 1

    code, said, _ = run("predict", model, new, "--out", tmp_path / "out.csv")
    assert code == 0
    rows, given = _read(tmp_path / "out.csv"), _read(new)
    assert [{k: row[k] for k in given[0]} for row in rows] == given  # the input's columns, as they were
    mean, price = (np.array([float(row[k]) for row in rows]) for k in ("price_mean", "price"))
    assert np.sqrt(np.mean((mean - price) ** 2)) == pytest.approx(before["rmse"], rel=1e-6)
    assert all(float(r["price_q5"]) < float(r["price_q50"]) < float(r["price_q95"]) for r in rows)
    assert all(float(r["price_deviation"]) > 0 for r in rows)

    code, said, _ = run("update", model, new)
    assert code == 0
    assert "300 rows" in said
    assert load_model(model).learner_.seen == 1200
    after = json.loads(run("score", model, new, "--json")[1])
    assert after["rmse"] < before["rmse"]


def test_a_file_is_learned_as_the_estimator_learns_its_rows(model) -> None:
    loaded = load_model(model)
    rows = _houses(900)
    columns = {
        "size": [None if r["size"] == "" else float(r["size"]) for r in rows],
        "town": [r["town"] for r in rows],
        "sold": np.array([r["sold"] for r in rows], "datetime64[us]"),
    }
    own = StreamingRegressor().fit(columns, [r["price"] for r in rows])  # fewer rows than a sample holds
    np.testing.assert_allclose(loaded.predict(columns), own.predict(columns), rtol=0, atol=1e-6)


def test_classes_get_probabilities(tmp_path, run) -> None:
    table = _write(tmp_path / "houses.csv", _houses(600))
    assert run("fit", table, "--target", "town", "--out", tmp_path / "m", "--ignore", "id")[0] == 0
    assert run("predict", tmp_path / "m", table, "--out", tmp_path / "out.csv")[0] == 0
    rows = _read(tmp_path / "out.csv")
    chances = np.array([[float(row[f"town_p_{c}"]) for c in ("Bern", "Rom", "Ulm")] for row in rows])
    np.testing.assert_allclose(chances.sum(1), 1, atol=1e-9)
    assert np.mean([row["town"] == row["town_predicted"] for row in rows]) > 0.8
    scores = json.loads(run("score", tmp_path / "m", table, "--json")[1])
    assert scores["accuracy"] == pytest.approx(np.mean([r["town"] == r["town_predicted"] for r in rows]))
    own = [chances[i, ["Bern", "Rom", "Ulm"].index(r["town"])] for i, r in enumerate(rows)]
    assert scores["log_loss"] == pytest.approx(-np.log(own).mean())


def test_numbers_can_be_classes_and_several_targets_are_learned_together(tmp_path, run) -> None:
    rows = [{"x": i % 10, "digit": i % 5, "half": i % 10 / 2} for i in range(400)]
    table = _write(tmp_path / "t.csv", rows)
    run(
        "fit",
        table,
        "--target",
        "digit",
        "--task",
        "classification",
        "--ignore",
        "half",
        "--out",
        tmp_path / "c",
    )
    assert load_model(tmp_path / "c").classes_.tolist() == [0, 1, 2, 3, 4]
    assert json.loads(run("score", tmp_path / "c", table, "--json")[1])["accuracy"] == 1.0
    run("fit", table, "--target", "digit,half", "--out", tmp_path / "two")
    assert json.loads(run("score", tmp_path / "two", table, "--json")[1])["rmse"] < 0.3
    run("predict", tmp_path / "two", table, "--out", tmp_path / "out.csv", "--quantiles", "0.1,0.9")
    assert {"digit_mean", "half_q10", "half_q90"} < set(_read(tmp_path / "out.csv")[0])


def test_parquet_in_and_out_says_the_same_as_csv(tmp_path, run, model) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = _houses(200, seed=2)
    table = pa.table(
        {
            "size": [None if r["size"] == "" else r["size"] for r in rows],
            "town": pa.array([r["town"] for r in rows]).dictionary_encode(),
            "sold": pa.array(np.array([r["sold"] for r in rows], "datetime64[us]")),
        }
    )
    pq.write_table(table, tmp_path / "new.parquet")
    new = _write(tmp_path / "new.csv", rows)
    assert run("predict", model, tmp_path / "new.parquet", "--out", tmp_path / "a.parquet")[0] == 0
    assert run("predict", model, tmp_path / "new.parquet", "--out", tmp_path / "a.csv")[0] == 0
    assert run("predict", model, new, "--out", tmp_path / "b.csv")[0] == 0
    assert run("predict", model, new, "--out", tmp_path / "b.parquet")[0] == 0
    means = [pq.read_table(tmp_path / f"{n}.parquet")["price_mean"].to_pylist() for n in "ab"]
    means += [[float(r["price_mean"]) for r in _read(tmp_path / f"{n}.csv")] for n in "ab"]
    for other in means[1:]:
        np.testing.assert_allclose(other, means[0], rtol=1e-12)
    fit = run("fit", tmp_path / "new.parquet", "--target", "size", "--out", tmp_path / "again")
    assert fit[0] == 0
    assert "left out" in fit[2]  # rows without a size


def test_rows_without_a_target_are_left_out_and_counted(tmp_path, run) -> None:
    rows = _houses(200)
    for row in rows[:30]:
        row["price"] = "NA"
    table = _write(tmp_path / "t.csv", rows)
    code, said, warned = run("fit", table, "--target", "price", "--out", tmp_path / "m")
    assert (code, "170 rows" in said) == (0, True)
    assert "30 rows without a target" in warned


def test_the_score_of_several_targets_is_scikit_learns_whatever_their_size(tmp_path, run) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 2))
    y = np.stack([x[:, 0] + rng.normal(size=400), 1e9 + x[:, 1] + 0.1 * rng.normal(size=400)], 1)
    names = ["a", "b", "small", "large"]
    table = _write(
        tmp_path / "t.csv", [dict(zip(names, map(repr, r), strict=True)) for r in np.c_[x, y].tolist()]
    )
    assert run("fit", table, "--target", "small,large", "--out", tmp_path / "m", "--size", "64")[0] == 0
    said = json.loads(run("score", tmp_path / "m", table, "--json")[1])
    model = load_model(tmp_path / "m")
    frame = dict(zip(names, x.T, strict=False))
    assert said["r2"] == pytest.approx(model.score(frame, y), rel=1e-6)
    assert said["rmse"] == pytest.approx(np.sqrt(np.mean((model.predict(frame) - y) ** 2)), rel=1e-6)


def test_large_whole_numbers_and_nanoseconds_are_read_from_parquet(tmp_path, run) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    ids, moments = np.arange(200) + 2**60 + 1, np.arange(200) * 10**9 + 1
    columns = {"id": ids, "when": pa.array(moments.astype("M8[ns]")), "price": np.arange(200) / 7}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    assert run("fit", tmp_path / "t.parquet", "--target", "price", "--out", tmp_path / "m")[0] == 0
    assert run("score", tmp_path / "m", tmp_path / "t.parquet")[0] == 0


BAD = {
    "no such file": (["fit", "none.csv", "--target", "price", "--out", "m2"], "there is no file"),
    "no such target": (["fit", "houses.csv", "--target", "prize", "--out", "m2"], "no column 'prize'"),
    "no such task": (["fit", "houses.csv", "--target", "price", "--out", "m2", "--task", "x"], "--task x"),
    "overwriting": (["fit", "houses.csv", "--target", "price", "--out", "model"], "exists already"),
    "text as numbers": (
        ["fit", "houses.csv", "--target", "town", "--task", "regression", "--out", "m2"],
        "holds text, not numbers",
    ),
    "no targets": (["fit", "blank.csv", "--target", "price", "--out", "m2"], "no rows that can be used"),
    "nothing to learn from": (["fit", "one.csv", "--target", "a", "--out", "m2"], "no columns are left"),
    "ragged": (
        ["fit", "ragged.csv", "--target", "a", "--out", "m2"],
        "line 3 of ragged.csv has 1 cells, its header 2",
    ),
    "no rows": (["fit", "head.csv", "--target", "a", "--out", "m2"], "no rows that can be used"),
    "no table": (["fit", "empty.csv", "--target", "a", "--out", "m2"], "names of columns"),
    "nothing to predict": (
        ["predict", "model", "header.csv", "--out", "p.csv"],
        "header.csv has no rows: give",
    ),
    "another format": (["predict", "model", "notes.txt", "--out", "p.csv"], "read from .csv, .tsv"),
    "no model": (
        ["predict", "houses.csv", "houses.csv", "--out", "p.csv"],
        "houses.csv is no model: give a file that `constmem fit` wrote, and then the table",
    ),
    "a missing model": (
        ["predict", "none", "houses.csv", "--out", "p.csv"],
        "there is no file none: give a file that `constmem fit` wrote",
    ),
    "a column is missing": (["predict", "model", "one.csv", "--out", "p.csv"], "no column 'size'"),
    "text where numbers were": (
        ["update", "model", "text.csv"],
        "column 'size', row 2: 'large' is not a number, but other values there are",
    ),
    "infinite": (["update", "model", "inf.csv"], "inf.csv, column 'size', row 2: 'inf' is infinite"),
    "no such day": (["update", "model", "day.csv"], "day.csv, column 'sold', row 1: '2024-02-30' looks like"),
    "no such moment": (
        ["update", "model", "end.csv"],
        "column 'sold', row 1: '9999-12-31 23:59-05:00' looks",
    ),
    "a target left out": (
        ["fit", "houses.csv", "--target", "price", "--ignore", "price", "--out", "m2"],
        "'price' is also in --ignore",
    ),
    "a target twice": (["fit", "houses.csv", "--target", "price,price", "--out", "m2"], "or stands twice"),
    "a target without a name": (["fit", "houses.csv", "--target", ",", "--out", "m2"], "name a column"),
    "dates for classes": (
        ["fit", "houses.csv", "--target", "sold", "--task", "classification", "--out", "m2"],
        "y holds dates",
    ),
    "a huge target": (["update", "model", "huge.csv"], "y holds 1e+200 in row 0"),
    "quantiles": (
        ["predict", "model", "houses.csv", "--out", "p.csv", "--quantiles", "2"],
        "between 0 and 1",
    ),
    "forget": (
        ["fit", "houses.csv", "--target", "price", "--out", "m2", "--forget", "soon"],
        "forget='soon'",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_are_one_clear_line_with_exit_code_two_and_change_nothing(
    tmp_path, run, model, monkeypatch, case
) -> None:
    monkeypatch.chdir(tmp_path)
    head = "size,town,sold,price\n"
    Path("blank.csv").write_text("x,price\n1,\n2,NA\n")
    Path("one.csv").write_text("a\n1\n2\n")
    Path("ragged.csv").write_text("a,b\n1,2\n3\n")
    Path("head.csv").write_text("a,b\n")
    Path("header.csv").write_text(head)
    Path("empty.csv").write_text("")
    Path("notes.txt").write_text("hello")
    Path("text.csv").write_text(f"{head}20,Ulm,2024-03-01,3\nlarge,Ulm,2024-03-01,3\n")
    Path("day.csv").write_text(f"{head}20,Ulm,2024-02-30,3\n")
    Path("end.csv").write_text(f"{head}20,Ulm,9999-12-31 23:59-05:00,3\n")
    Path("huge.csv").write_text(f"{head}20,Ulm,2024-03-01,1e200\n")
    Path("inf.csv").write_text(f"{head}20,Ulm,2024-03-01,NA\ninf,Ulm,2024-03-01,3\n")
    before = model.read_bytes()
    words, message = BAD[case]
    code, _, said = run(*words)
    assert code == 2
    assert message in said
    assert len(said.strip().splitlines()) == 1
    assert model.read_bytes() == before
    assert not Path("m2").exists()
    assert not Path("p.csv").exists()
    assert not list(tmp_path.glob(".*"))  # no half-written file stays


def test_progress_through_a_table_says_what_it_counts(fitted, run):
    table = fitted / "houses.csv"
    said = run("score", fitted / "model", table)[2]
    size = table.stat().st_size
    assert f"scoring {table}, bytes {size}/{size}" in said
