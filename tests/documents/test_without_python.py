"""The figures of the page are those of its committed rows."""

import json
from pathlib import Path

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
    )
    for line in lines:
        assert line in text
