"""`benchmarks/bench.py`: rows that say what they mean, and rivals that compute what they should."""

import json
import subprocess
import sys
from pathlib import Path

import gpu_tables
import numpy as np
import pytest
import torch
from bench import bench, show
from benches import Plan, compared
from cached import CachedTransformer
from literal import Literal

from constmem.neural_processes import CMANP, TNPD

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "bench.py"
SMALL = {"dim": 16, "depth": 2, "hidden": 16, "num_heads": 2}


def test_a_quick_run_from_the_command_line_gives_rows_with_ratios(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    command = [sys.executable, str(SCRIPT), "query", "--quick", "--json", "--out", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == json.loads(path.read_text())
    assert {"commit", "date", "device", "versions", "seed", "data"} <= found.keys()
    assert {row["how"] for row in found["rows"]} == {"constmem", "literal", "LBANP", "TNP-D"}
    for row in found["rows"]:
        assert row["milliseconds"] > 0
        assert ("ratio" in row) == (row["how"] != "literal")


def test_the_table_names_every_candidate(capsys: pytest.CaptureFixture[str]) -> None:
    bench(["train"], quick=True)
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("constmem", "literal", "LBANP", "TNP-D", "20 points"))


def test_one_is_not_called_many_and_what_was_not_measured_has_no_column(
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = {"bench": "update", "axis": "streams", "how": "constmem", "milliseconds": 1.0}
    show([row | {"streams": 1}, row | {"streams": 16, "points": 1, "batch": 4, "targets": 2}])
    shown = capsys.readouterr().out
    for size in ("1 stream ", "16 streams", "1 point,", "2 targets", "batch of 4"):
        assert size in shown
    assert "1 streams" not in shown
    assert "MiB" not in shown
    assert "times as fast" not in shown
    show([row | {"streams": 1, "extra_bytes": 3 * 2**20}, row | {"streams": 1}])
    shown = capsys.readouterr().out
    assert "extra MiB" in shown
    assert "3.0" in shown
    assert shown.count("1 stream ") == 1  # the same size again is not repeated


def test_ratios_say_how_many_times_as_fast_as_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"literal": [1.0, 6.0, 3.0, 8.0, 5.0], "constmem": [0.5, 2.0, 0.5, 1.0, 0.5]}
    monkeypatch.setattr("benches.side_by_side", lambda *_, **__: times)
    literal, constmem = compared(Plan(torch.device("cpu"), quick=False), {}, {})
    assert "ratio" not in literal
    assert (literal["milliseconds"], constmem["milliseconds"]) == (5000.0, 500.0)
    low, middle, high = np.quantile([2, 3, 6, 8, 10], [0.25, 0.5, 0.75], method="weibull")
    assert [constmem[key] for key in ("quartile_low", "ratio", "quartile_high")] == [low, middle, high]


@torch.no_grad()
def test_the_cached_transformer_computes_what_causal_attention_over_all_points_would() -> None:
    torch.manual_seed(0)
    model = TNPD(dim_x=1, dim_y=1, **SMALL).eval()
    x, y, xt = torch.randn(2, 20, 1), torch.randn(2, 20, 1), torch.randn(2, 3, 1)
    cached = CachedTransformer(model)
    cache = cached.empty(2)
    for i in range(20):
        cache = cached.update(cache, x[:, i : i + 1], y[:, i : i + 1])
    mean, std = cached.query(cache, xt)
    tokens = model.embed(torch.cat([x, y], -1))
    targets = model.embed(torch.cat([xt, torch.zeros(2, 3, 1)], -1))
    for layer in model.layers:
        targets = layer(targets, tokens, None)
        tokens = torch.cat([layer(tokens[:, i : i + 1], tokens[:, : i + 1], None) for i in range(20)], 1)
    expected_mean, expected_std = model.head(targets)
    torch.testing.assert_close(mean, expected_mean, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(std, expected_std, atol=1e-5, rtol=1e-5)
    assert cached.filled(20, 2).count == cache.count == 20


@torch.no_grad()
def test_the_literal_read_and_loss_are_those_of_the_model() -> None:
    torch.manual_seed(0)
    model = CMANP(dim_x=1, dim_y=1, num_slots=4, num_latents=4, **SMALL).eval()
    x, y = torch.randn(2, 20, 1), torch.randn(2, 20, 1)
    literal = Literal(model)
    kept = literal.condition(x, y)
    read = torch.stack(literal.read(kept), 1)
    torch.testing.assert_close(read, model.read(model.condition(x, y)), atol=1e-5, rtol=1e-5)
    task = x[:, :9], y[:, :9], x[:, 9:], y[:, 9:]
    torch.testing.assert_close(literal.loss(*task), model.loss(*task), atol=1e-5, rtol=1e-5)


def test_tables_of_what_was_never_measured_are_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_tables, "RESULTS", tmp_path)
    assert {written() for written in gpu_tables.TABLES.values()} == {""}
    condition = {"section": "condition", "points": 10, "how": "half", "milliseconds": 2.0,
                 "extra_bytes": 2**21, "points_a_second": 5e3, "times_the_literal": 7.0}  # fmt: skip
    training = {"what": "captured", "milliseconds": 3.0, "times_faster": 9.0}
    (tmp_path / "gpu.json").write_text(json.dumps({"device": "some GPU", "rows": [condition]}))
    (tmp_path / "training_step.json").write_text(json.dumps({"rows": [training]}))
    assert gpu_tables.condition().splitlines()[-1] == "| 10 | half | 2 | 5e+03 | 7x |  |  |  | 2 |"
    assert gpu_tables.phases().splitlines()[-1] == "| training step of 100 tasks | captured | 3 | 9x |"
    assert gpu_tables.ceilings() == ""
    assert gpu_tables.summary() == []  # there is nothing of a million points
    step = {"section": "steps", "what": "step", "how": "half", "points": 10**6, "milliseconds": 4.0,
            "times_plain_tf32": 9.46, "extra_bytes": 2**21}  # fmt: skip
    error = {"section": "errors", "precision": "half", "worst": 0.002}
    few = step | {"points": 10, "milliseconds": 0.5}
    (tmp_path / "gpu_training.json").write_text(json.dumps({"rows": [few, step, error]}))
    assert gpu_tables.training().splitlines()[-1] == "| step | half | 0.5 | 4 |  | 9.5x | 2 | 2.0e-03 |"
