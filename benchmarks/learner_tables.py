"""The tables of the learner of tables: errors on nine of them, accuracies on streams, what it costs."""

from collections.abc import Callable
from math import isnan, nan
from statistics import geometric_mean
from typing import Any

from event_tables import content

DROPOUT = {  # NLL of MC-dropout on the same splits, as published (Mukhoti, Stenetorp and Gal 2018)
    "boston": 2.40, "concrete": 2.93, "energy": 1.21, "kin8nm": -1.14, "naval": -4.45, "power": 2.80,
    "protein": 2.87, "wine": 0.93, "yacht": 1.25,
}  # fmt: skip
OTHERS = "random forest", "boosted trees", "ridge", "Fourier moments", "Gaussian process"


class Runs:
    """The rows of nine tables: means over splits, by table and method."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for row in content("tables_uci")["rows"]:
            self.found.setdefault((row["table"], row["method"]), []).append(row)

    def mean(self, table: str, method: str, key: str) -> float:
        numbers = [row[key] for row in self.found.get((table, method), ())]
        return sum(numbers) / len(numbers) if numbers else nan


def seconds() -> str:
    """CPU seconds of learning one split, and bytes of the learner, means over splits."""
    mean = Runs().mean
    lines = [["table", "streaming regressor", *OTHERS, "state", "saved"], ["---"] * (len(OTHERS) + 4)]
    for table in DROPOUT:
        spent = [mean(table, "closed form", "seconds_learn")]
        spent += [mean(table, method, "seconds") for method in OTHERS]
        sizes = [mean(table, "closed form", key) / 1e6 for key in ("bytes", "bytes_saved")]
        shown = ["-" if isnan(number) else f"{number:.2g} s" for number in spent]
        lines.append([table, *shown, *(f"{size:.1f} MB" for size in sizes)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def uci() -> str:
    """The learner beside others on nine tables, means over splits; a dash where one was not run."""
    runs = Runs()
    found, mean = runs.found, runs.mean
    others = [method for method in OTHERS if any(method == run for _, run in found)]

    heads = (
        "table",
        "RMSE",
        *others,
        "over the forest's",
        "NLL",
        "with Student's t alone",
        "MC-dropout's",
        "in 50 % (by share)",
        "in 90 % (by share)",
        "splits",
    )
    lines, ratios = [list(heads), ["---"] * len(heads)], {}
    for table, published in DROPOUT.items():
        rmse = [mean(table, method, "rmse") for method in ("closed form", *others)]
        ratios[table] = rmse[0] / rmse[1]
        counted = ("cover50", "cover50_share"), ("cover90", "cover90_share")
        held = [[100 * mean(table, "closed form", key) for key in keys] for keys in counted]
        inside = [f"{usual:.1f} % ({shared:.1f})" for usual, shared in held]
        lines.append([
            table, *("-" if isnan(number) else f"{number:.3g}" for number in rmse), f"{ratios[table]:.2f}",
            *(f"{mean(table, 'closed form', key):.2f}" for key in ("nll", "nll_student")), f"{published:.2f}",
            *inside,
            str(len(found[table, "closed form"])),
        ])  # fmt: skip
    every = geometric_mean(ratios.values())
    most = geometric_mean([ratio for table, ratio in ratios.items() if table != "naval"])
    gains = [
        mean(table, "closed form", "nll_student") - mean(table, "closed form", "nll") for table in DROPOUT
    ]
    closing = (
        f"Geometric mean of the RMSE over the forest's: {every:.2f}; without naval {most:.2f}. "
        f"The pretrained law gains {sum(gains) / len(gains):.2f} nats on average, "
        f"{sorted(gains)[len(gains) // 2]:.2f} in the middle, and {min(gains):.2f} where it gains least."
    )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n{closing}"


def streams() -> str:
    """Prequential accuracy on river's streams, ours beside river's own learners."""
    scores: dict[str, dict[str, float]] = {}
    for row in content("streams")["rows"]:
        if "accuracy" in row:
            scores.setdefault(row["part"], {})[row["model"]] = row["accuracy"]
    models = list(dict.fromkeys(model for found in scores.values() for model in found))
    lines = [["stream", *models], ["---"] * (len(models) + 1)]
    lines += [[part, *(f"{found[model]:.3f}" for model in models)] for part, found in scores.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def costs() -> str:
    """What a row, an answer and a state cost; shards against one pass; memory against rows."""
    lines = ["| what | measured |", "| --- | --- |"]
    for row in content("tables_scale")["rows"]:
        if "cpu_ms" in row:
            lines.append(f"| {row['what']} | {row['cpu_ms']:.3g} ms |")
        elif "rows_a_second" in row:
            other = f"{row['ratio']:.0f} times the adaptive random forest's rate"
            lines.append(f"| {row['what']} | {row['rows_a_second']:,.0f}, {other} |")
        elif "flop_a_second" in row:
            lines.append(f"| {row['what']} | {row['flop_a_second'] / 1e9:.0f} GFLOP a second |")
        elif "bytes_saved" in row:
            sizes = f"{row['bytes_in_memory'] / 1e6:.1f} MB, {row['bytes_saved'] / 1e6:.1f} MB saved"
            lines.append(f"| {row['what']} | {sizes} |")
        elif "shards" in row:
            what = f"{row['what']}, {row['shards']} shards merged against one pass over {row['rows']:,} rows"
            gaps = max(row["largest_gap_of_means"], row["largest_gap_of_deviations"])
            lines.append(f"| {what} | within {gaps:.0e} deviations |")
        else:
            more = f"{row['process_bytes'] / 1e6:.0f} MB, {row['more_than_at_first'] / 1e6:.0f} MB more"
            lines.append(f"| most memory of the process up to {row['rows']:,} rows | {more} |")
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {"uci": uci, "seconds": seconds, "streams": streams, "costs": costs}
