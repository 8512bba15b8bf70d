"""The table of the service and the store under load."""

from collections.abc import Callable
from typing import Any

from event_tables import content


def load() -> str:
    """Requests and rows a second, how long the slowest waited, and what a long run holds."""
    rows = {(r["part"], r.get("verb")): r for name in ("service", "store") for r in content(name)["rows"]}
    soak = rows["soak", None]
    assert not any(row.get("failed", 0) for row in rows.values())
    held: list[float] = soak["resident_mb"]
    lines = ["|  | a second | 99 % answered within |", "|---|---|---|"]
    for verb, name in (("observe", "observe, one row"), ("predict", "predict, one target")):
        full, half = rows[verb, None], rows["half", verb]
        waits = f"{_ms(full)}; at {half['rate']:,} a second {_ms(half)}"
        lines.append(f"| {name} | {full['requests_a_second']:,} | {waits} |")
    bulk, redis = rows["bulk", None], rows["redis", None]
    each = f"bulk, {bulk['rows_a_request']:,} rows a request"
    lines.append(f"| {each} | {bulk['points_a_second']:,} rows | {_ms(bulk)} |")
    mixed = f"{soak['requests']:,} requests of all kinds, memory for half of the streams"
    last = f"{soak['worst_p99_ms']:.0f} ms, of the slowest hundredth"
    lines.append(f"| {mixed} | {soak['requests_a_second']:,} | {last} |")
    made, changed = rows["fill", None]["streams_a_second"], rows["read-modify-write", None]["rows_a_second"]
    lines.append(f"| a store of {redis['held']:,} streams, made | {made:,} | |")
    lines.append(f"| rows of random ones of them | {changed:,} | |")
    lines.append(f"| the same from a Redis stream, exactly once | {redis['rows_a_second']:,} | |")
    large = {row["single"]: row for row in content("store")["rows"] if row["part"] == "paper's size"}
    for single, row in large.items():
        size, kind = row["state_bytes"] / (2e3 if single else 1e3), "float32" if single else "float64"
        what = f"rows of random streams at the paper's size, {size:.0f} kB each on disk ({kind})"
        lines.append(f"| {what} | {row['rows_a_second']:,} | |")
    more = f"{held[len(held) // 2]:.0f} MB after half of them and {held[-1]:.0f} MB at the end"
    closing = f"Of the {soak['requests']:,} requests none failed; the service held {more}."
    kills = content("store_kills")["rows"]
    killed, at_work = (sum(row[key] for row in kills) for key in ("kills", "at_work"))
    times = f"{killed:,} times at random moments, {at_work:,} times with work to do"
    survived = (
        f"Store, consumers and service were killed {times}: nothing acknowledged was lost, nothing was taken "
        "twice, and every bit was that of a process that nobody killed (`benchmarks/store_kills.py`)."
    )
    return "\n".join([*lines, "", closing, "", survived])


def _ms(row: dict[str, Any]) -> str:
    return f"{row['p99_ms']:.0f} ms"


TABLES: dict[str, Callable[[], str]] = {"load": load}
