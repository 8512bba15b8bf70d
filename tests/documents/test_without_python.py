"""The figures of the page and of exported models are those of their committed rows."""

import importlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import constmem
from constmem import CMANP, CMHP, StreamingRegressor

ROOT = Path(__file__).parents[2]


def test_what_the_page_costs_is_what_was_measured() -> None:
    text = (ROOT / "docs" / "without-python.md").read_text()
    rows = json.loads((ROOT / "benchmarks" / "results" / "page.json").read_text())["rows"]
    digit, curve = ({row["tab"]: row for row in rows}[tab] for tab in ("digit", "curve"))
    lines = (
        f"ready | {digit['bytes_fetched'] / 1e6:.1f} MB | {curve['bytes_fetched'] / 1e6:.1f} MB more",
        f"ready after | {digit['ready_ms'] / 1e3:.2f} s",
        f"one update | {digit['update_ms']:.2f} ms | {curve['update_ms']:.2f} ms",
        f"all predictions | {digit['complete_ms']:.0f} ms, of 784 pixels | {curve['complete_ms']:.0f} ms",
        f"the state | {digit['state_bytes'] / 1e3:.0f} kB | {curve['state_bytes'] / 1e3:.0f} kB",
        f"as shipped | {digit['log_likelihood']:.4f} | {curve['log_likelihood']:.4f} |",
        f"rounding | {digit['log_likelihood_rounded']:.4f} | {curve['log_likelihood_rounded']:.4f} |",
    )
    for line in lines:
        assert line in text


def test_what_exported_models_cost_is_what_was_measured() -> None:
    text = (ROOT / "docs" / "without-python.md").read_text()
    for line in lines_of_onnx():
        assert line in text


def lines_of_onnx() -> list[str]:
    every = json.loads((ROOT / "benchmarks" / "results" / "onnx_cost.json").read_text())["rows"]
    rows = [row for row in every if row["model"] == "emnist"]
    others = {row["model"]: row for row in every if row not in rows}
    assert others.keys() == {"gp", "cmhp", "power plant"}
    assert [row["weights"] for row in rows] == ["float32", "float16"]
    assert all(row["mean_off_by"] < 1e-5 and row.get("std_off_by", 0) < 1e-5 for row in every)
    assert all(row["updates"] == 20_000 and row["state_off_by"] < 1e-4 for row in every)

    def line(name: str, show: Callable[[dict[str, Any]], str]) -> str:
        return f"| {name} | {' | '.join(map(show, rows))} |"

    def timed(key: str) -> Callable[[dict[str, Any]], str]:
        return lambda row: f"{row[f'{key}_ms']:.2g} ms ({row[f'{key}_pytorch_ms']:.2g})"

    return [
        line("graphs", lambda row: f"{row['megabytes']:.1f} MB"),
        line("a process that runs them", lambda row: f"{row['resident_megabytes']} MB"),
        line("one update (PyTorch)", timed("update")),
        line("one reading (PyTorch)", timed("read")),
        line("one prediction (PyTorch)", timed("predict_1")),
        line("784 predictions (PyTorch)", timed("predict_784")),
        line("states off by, after 20,000 updates", lambda row: f"{row['state_off_by']:.0e}"),
        line("predictions off by", lambda row: f"{max(row['mean_off_by'], row['std_off_by']):.0e}"),
        *(
            f"| {name} | {timed(first)(others[model])} | {timed(second)(others[model])} |"
            for name, model, first, second in (
                ("`gp`: a point; and 121 predictions after it", "gp", "update", "update_and_query_121"),
                ("CMHP: an event; and the next one's law", "cmhp", "update", "update_and_query"),
                ("a table: a row; 500 predictions", "power plant", "row", "predict_500"),
            )
        ),
    ]


@pytest.mark.slow
@pytest.mark.compiles
def test_the_examples_of_runners_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    from constmem.integrations.onnx import export

    sizes: dict[str, Any] = {
        "dim": 16,
        "depth": 1,
        "num_slots": 4,
        "num_latents": 4,
        "num_heads": 2,
        "hidden": 12,
    }
    x = np.random.default_rng(0).uniform(-1, 1, (300, 2))
    table = {"X": x, "y": x[:, 0]}
    models: dict[str, tuple[Any, dict[str, Any]]] = {
        "digits": (CMANP(dim_x=2, dim_y=1, **sizes), {"x": x, "y": x[:, :1], "xt": x}),
        "visits": (CMHP(num_marks=3, **sizes), {}),
        "prices": (StreamingRegressor(size=100).fit(x, table["y"]), table),
    }
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "without-python.md").read_text()
    for name, (model, given) in models.items():
        monkeypatch.syspath_prepend(export(model, tmp_path / name))
        for known in [known for known in sys.modules if known.startswith("constmem_runner")]:
            monkeypatch.delitem(sys.modules, known)
        (example,) = re.findall(
            rf"^```py\n((?:(?!```).)*\(\"{name}\".*?)^```", text, re.MULTILINE | re.DOTALL
        )
        if name == "digits":
            given["other"] = importlib.import_module("constmem_runner").Runner(name)
        exec(example, given)


def test_the_site_lists_every_page() -> None:
    listed = set((ROOT / "docs" / "index.md").read_text().split())
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    assert pages <= listed, f"add these to docs/index.md: {sorted(pages - listed)}"


def test_the_api_page_has_every_function_and_class_that_documents_import() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    listed = set(re.findall(r"::? constmem\.[\w.]*?(\w+)$", page, re.MULTILINE))
    for package in re.findall(r"automodule:: (\S+)", page):
        listed |= set(importlib.import_module(package).__all__)
    used: set[str] = set()
    for document in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for names in re.findall(
            r"^from constmem[\w.]* import (\([^)]+\)|[^\n(]+)", document.read_text(), re.MULTILINE
        ):
            used |= set(re.findall(r"\w+", names))
    assert len(used) > 30
    missing = {name for name in used - listed if not name.isupper() or name in dir(constmem)}
    assert not missing, f"add these to docs/api.md: {sorted(missing)}"
