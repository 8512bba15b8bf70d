"""A dataset's states and estimators by two real workers, against one pass over all rows."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow  # starting workers takes its time: make slow-test
ROOT = Path(__file__).parents[2]
WORK = """
import json
import logging
import os
import time

import numpy as np
import pandas as pd
import ray
import torch

from constmem import CMANP, CMHP, StreamingClassifier, StreamingRegressor
from constmem.integrations.ray import (
    condition_dataset, condition_groups_dataset, fit_dataset, states_aggregate
)
from constmem.neural_processes import LBANP

ray.init(num_cpus=2, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False,
         runtime_env={"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}})
ray.data.DataContext.get_current().enable_progress_bars = False
random = np.random.default_rng(0)
rows = pd.DataFrame({"a": random.uniform(-1, 1, 6000), "b": random.uniform(-1, 1, 6000)})
rows["sensor"] = random.choice(["n", "s", "w"], 6000)
rows["y"] = np.sin(3 * rows.a) * rows.b
rows["high"] = np.where(rows.y > 0, "up", "down")
rows.to_parquet("rows.parquet")
dataset = ray.data.read_parquet("rows.parquet").repartition(5)
torch.manual_seed(0)
model = CMANP(dim_x=2, dim_y=1, dim=16, depth=2, num_slots=8, num_latents=8).eval()
columns = {"x": ["a", "b"], "y": ["y"], "batch_size": 900}


def at_once(part):
    x, y = (torch.tensor(part[names].to_numpy())[None].float() for names in (["a", "b"], ["y"]))
    with torch.no_grad():
        return model.condition(x, y)


def apart(one, other):
    assert torch.equal(one.count.cpu(), other.count.cpu()), (one.count, other.count)
    return float((one.value - other.value).abs().max())


found = {"whole": apart(condition_dataset(model, dataset, **columns), at_once(rows))}
pool = condition_groups_dataset(model, dataset, key="sensor", **columns)
for name in "nsw":
    found[name] = apart(pool.state([name]), at_once(rows[rows.sensor == name]))
counted = states_aggregate(model, x=["a", "b"], y=["y"]), ray.data.aggregate.Max("a")
for row in dataset.groupby("sensor").aggregate(*counted).take_all():
    own = rows[rows.sensor == row["sensor"]]
    found["grouped " + row["sensor"]] = apart(model.state_type.unpacked(row["state"]), at_once(own))
    assert row["max(a)"] == own.a.max()
for part in range(4):
    rows[1500 * part : 1500 * part + 1500].to_parquet(f"rows-{part}.parquet")
files = [f"rows-{part}.parquet" for part in range(4)]
ray.data.DataContext.get_current().use_datasource_v2 = False
blocks = ray.data.read_parquet(files, concurrency=2, override_num_blocks=4)
columns["batch_size"] = None
found["blocks"] = apart(condition_dataset(model, blocks, **columns), at_once(rows))
pool = condition_groups_dataset(model, blocks, key="sensor", **columns)
found["blocks by key"] = max(apart(pool.state([name]), at_once(rows[rows.sensor == name])) for name in "nsw")
high = blocks.filter(lambda row: row["y"] > 0.9)
found["some blocks empty"] = apart(condition_dataset(model, high, **columns), at_once(rows[rows.y > 0.9]))
pool = condition_groups_dataset(model, high, key="sensor", **columns)
found["some by key"] = sum(pool.count(pool.keys).tolist()) - int((rows.y > 0.9).sum())
columns["batch_size"] = 900
one = dataset.aggregate(counted[0])["state"]
found["aggregate"] = apart(model.state_type.unpacked(one), at_once(rows))
rows.to_csv("rows.csv", index=False)
found["csv"] = apart(condition_dataset(model, ray.data.read_csv("rows.csv"), **columns), at_once(rows))
inputs = ["a", "b", "sensor"]
for kind, target in ((StreamingRegressor, "y"), (StreamingClassifier, "high")):
    table = dataset.select_columns([*inputs, target])
    made = fit_dataset(kind(size=48), table, target=target, warmup=500, batch_size=1500)
    start = kind(size=48).fit(table.limit(500).to_pandas()[inputs], table.limit(500).to_pandas()[target])
    one = start.spawn().partial_fit(rows[inputs], rows[target])
    ask = made.predict_proba if target == "high" else made.predict
    answer = one.predict_proba if target == "high" else one.predict
    found[target] = float(np.abs(ask(rows[inputs][:50]) - answer(rows[inputs][:50])).max())
    found[f"{target} rows"] = made.learner_.seen
def late(batch):
    time.sleep(3 if rows.a[0] in batch["a"] else 0)  # the first file comes last
    return batch


ray.data.DataContext.get_current().use_datasource_v2 = True
table = ray.data.read_parquet(files, concurrency=2, override_num_blocks=4)
table = table.map_batches(late, compute=ray.data.TaskPoolStrategy(size=2))
made = fit_dataset(
    StreamingClassifier(size=48), table.select_columns([*inputs, "high"]), target="high", warmup=500
)
one = StreamingClassifier(size=48).fit(rows[inputs][:500], rows.high[:500]).spawn()
answer = one.partial_fit(rows[inputs], rows.high).predict_proba(rows[inputs][:50])
found["first rows"] = float(np.abs(made.predict_proba(rows[inputs][:50]) - answer).max())
whole = rows.assign(b=np.arange(6000) % 3)
pool = condition_groups_dataset(model, ray.data.from_pandas(whole), key="b", **columns)
found["key among inputs"] = max(apart(pool.state([i]), at_once(whole[whole.b == i])) for i in range(3))
refused = []
bad = rows.assign(b=np.where(np.arange(6000) == 4321, np.inf, rows.b))
empty = dataset.filter(lambda row: False)
for call in (
    lambda: condition_dataset(model, dataset, x=["a", "c"], y=["y"]),
    lambda: condition_dataset(model, dataset, x="ab", y=["y"]),
    lambda: condition_dataset(LBANP(dim_x=2, dim_y=1, dim=16, depth=1), dataset, x=["a", "b"], y=["y"]),
    lambda: fit_dataset(StreamingRegressor(), dataset, target="price"),
    lambda: condition_dataset(model, ray.data.from_pandas(bad), **columns),
    lambda: condition_dataset(model, dataset, x=["a", "sensor"], y=["y"]),
    lambda: condition_dataset(CMHP(num_marks=2), dataset, x=["a", "b"], y=["y"]),
    lambda: condition_dataset(model, rows, **columns),
):
    try:
        call()
        refused.append("accepted")
    except Exception as error:
        refused.append(f"{type(error).__name__}: {error}")
found["empty"] = int(condition_dataset(model, empty, **columns).count)
print("RESULT " + json.dumps({"found": found, "refused": refused}))
"""


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ray")
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    command = [sys.executable, "-W", "ignore", "-c", WORK]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | own, capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, f"no result: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    found: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return found


def test_two_workers_give_the_state_of_one_pass(result: dict[str, Any]) -> None:
    assert result["found"]["whole"] < 1e-5


def test_groups_that_stand_in_many_blocks_come_together(result: dict[str, Any]) -> None:
    assert max(result["found"][name] for name in "nsw") < 1e-5


def test_states_are_an_aggregation_of_ray_s_beside_its_own(result: dict[str, Any]) -> None:
    assert max(result["found"][name] for name in ("aggregate", "grouped n", "grouped s", "grouped w")) < 1e-5


def test_blocks_observed_where_they_are_read_give_the_state_of_one_pass(result: dict[str, Any]) -> None:
    assert max(result["found"][name] for name in ("blocks", "blocks by key", "some blocks empty")) < 1e-5
    assert result["found"]["some by key"] == 0


def test_csv_files_give_the_same_state(result: dict[str, Any]) -> None:
    assert result["found"]["csv"] < 1e-5


def test_estimators_fitted_by_workers_are_those_of_one_pass(result: dict[str, Any]) -> None:
    assert result["found"]["y"] < 1e-6
    assert result["found"]["high"] < 1e-6
    assert result["found"]["y rows"] == result["found"]["high rows"] == 6000


def test_features_are_frozen_by_the_first_rows_whichever_come_first(result: dict[str, Any]) -> None:
    assert result["found"]["first rows"] < 1e-6


def test_a_key_may_be_an_input_too(result: dict[str, Any]) -> None:
    assert result["found"]["key among inputs"] < 1e-5


def test_what_cannot_be_done_is_said_before_or_with_the_column(result: dict[str, Any]) -> None:
    missing, text, stored, target, infinite, words, events, frame = result["refused"]
    assert "no column 'c'" in missing
    assert "a list of 2 column(s) is needed" in text
    assert "those of LBANP grow with what they are shown" in stored
    assert "no column 'price'" in target
    assert "column 'b' holds inf" in infinite
    assert "column 'sensor' holds what is no number" in words
    assert "a neural process is needed, not a CMHP" in events
    assert "a dataset of ray.data is needed, not a DataFrame" in frame


def test_a_dataset_of_no_rows_is_the_empty_state(result: dict[str, Any]) -> None:
    assert result["found"]["empty"] == 0


READINGS = """
import os

import numpy as np
import pandas as pd
import ray
from constmem import CMANP

ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False,
         runtime_env={"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}})
random = np.random.default_rng(0)
os.mkdir("readings")
for name in "ab":
    table = pd.DataFrame({"hour": random.uniform(-2, 2, 300), "sensor": random.choice(["n", "s"], 300)})
    table.assign(heat=np.sin(table.hour)).to_parquet(f"readings/{name}.parquet")
model = CMANP.from_pretrained("gp").eval()
"""
CHECKED = """
assert state.count.tolist() == [600]
assert int(pool.count(["n", "s"]).sum()) == 600
assert states.count() == 2
assert regressor.learner_.seen == 600
"""


def test_what_the_documents_do_with_ray_runs(tmp_path: Path) -> None:
    blocks = re.findall(
        r"^```py\n(.*?)^```", (ROOT / "docs/streams.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert len(blocks) == 2
    code = (
        "\n".join([READINGS, *blocks, CHECKED]).replace("s3://bucket/", "").replace("workers=8", "workers=2")
    )
    command, paths = [sys.executable, "-c", code], os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=paths, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
