"""What the page costs in a real browser: bytes fetched, time until ready, of an update and of a completion.

python benchmarks/page.py              # two minutes; needs Chromium, playwright and the prepared EMNIST

Its weights are rounded: what that does to the log-likelihood is measured on a part of the test sets.
"""

import shutil
import statistics
import tempfile
import threading
from itertools import islice
from pathlib import Path
from typing import Any

import record
import torch
from playwright.sync_api import sync_playwright

from constmem import CMANP
from constmem.evaluation import evaluate
from constmem.serve.page import hosted, round_weights, write_page
from constmem.training.recipes import recipe
from constmem.training.sources import open_source

ROUNDS = 5
READY = '#panel-{}[data-ready="true"]'
TIMES = """async (name) => {
    const tab = await constmem.open(name), stream = tab.stream, model = stream.model;
    const points = [...Array(500).keys()].map((i) => (name === "digit"
        ? [Math.sin(i), Math.cos(3 * i), 0.5 * Math.sin(7 * i)] : [2 * Math.sin(i), Math.cos(3 * i)]));
    const timed = (count, work) => {
        const start = performance.now();
        for (let i = 0; i < count; i++) work(i);
        return (performance.now() - start) / count;
    };
    const update = timed(500, (i) => model.update(stream.state, points[i]));
    const complete = timed(5, () => tab.show());
    return { update_ms: update, complete_ms: complete, state_bytes: model.bytes };
}"""
FETCHED = "performance.getEntriesByType('resource').reduce((sum, e) => sum + e.transferSize, 0)"


def visit(browser: Any, address: str) -> dict[str, dict[str, float]]:
    page = browser.new_page()
    page.goto(address)
    found: dict[str, dict[str, float]] = {}
    for tab in ("digit", "curve"):
        before = page.evaluate(FETCHED) if found else 0
        page.click(f"#tab-{tab}")
        page.wait_for_selector(READY.format(tab))
        ready = {"ready_ms": page.evaluate("performance.getEntriesByName('ready-digit')[0].startTime")}
        found[tab] = {
            **(ready if tab == "digit" else {}),
            "bytes_fetched": page.evaluate(FETCHED) - before,
            **page.evaluate(TIMES, tab),
        }
    page.close()
    return found


SCORED = {"digit": ("emnist", "seen", 20), "curve": ("gp", "rbf", 100)}  # one in so many batches


def likelihoods(tab: str) -> tuple[dict[str, float], str]:
    """The log-likelihood of the shipped weights and of the rounded ones, and of which data."""
    name, test, step = SCORED[tab]
    source = open_source(name, recipe(name, "cmanp"), data_dir=None, device=torch.device("cpu"))
    batches = list(islice(source.tests[test](), step // 2, None, step))
    shipped, rounded = CMANP.from_pretrained(name), CMANP.from_pretrained(name)
    round_weights(rounded)
    shipped_score, rounded_score = (
        evaluate(model, batches).log_likelihood for model in (shipped, rounded.float())
    )
    return {"log_likelihood": shipped_score, "log_likelihood_rounded": rounded_score}, source.statement


def main() -> None:
    torch.set_num_threads(1)
    path = shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as folder, hosted(write_page(Path(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/"
        with sync_playwright() as play:
            browser = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
            version = browser.version
            visits = [visit(browser, address) for _ in range(ROUNDS)]
            browser.close()
        server.shutdown()
    rows = []
    for tab in ("digit", "curve"):
        middle = {key: statistics.median(v[tab][key] for v in visits) for key in visits[0][tab]}
        scores, data = likelihoods(tab)
        row = {"tab": tab, **{key: round(value, 3) for key, value in middle.items()}}
        row |= {key: round(value, 4) for key, value in scores.items()}
        rows.append(row | {"browser": f"Chromium {version}, headless", **record.provenance(0, data)})
        print(row)
    record.save("page", rows, command="python benchmarks/page.py", rounds=ROUNDS)


if __name__ == "__main__":
    main()
