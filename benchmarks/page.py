"""What the page costs in a real browser: bytes fetched, time until ready, of an update and of a completion.

python benchmarks/page.py              # a minute; needs Chromium and playwright
"""

import shutil
import statistics
import tempfile
import threading
from pathlib import Path
from typing import Any

import record
from playwright.sync_api import sync_playwright

from constmem.serve.page import hosted, write_page

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


def main() -> None:
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
        row = {"tab": tab, **{key: round(value, 3) for key, value in middle.items()}}
        rows.append(row | {"browser": f"Chromium {version}, headless", **record.provenance(0, "none")})
        print(row)
    record.save("page", rows, command="python benchmarks/page.py", rounds=ROUNDS)


if __name__ == "__main__":
    main()
