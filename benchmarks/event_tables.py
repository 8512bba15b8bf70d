"""The tables of event models that are more than one of `constmem table`: all data sets, options, costs."""

import json
from typing import Any

import record

from constmem.core import title_of as model_name
from constmem.data.catalogue import title_of
from constmem.evaluation import Figure
from constmem.evaluation.rows import Entry, compare, typed_rows

REAL = ("taxi", "mooc", "reddit", "wiki", "taobao")
MB = 1e6


def content(name: str) -> dict[str, Any]:
    """A file of rows with what is said of them; of none, no rows."""
    path = record.RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {"rows": []}


def summary() -> str:
    """NLL and accuracy of every model by each recipe on every data set that was not simulated."""
    found = {
        (entry.place[3:5], entry.first.recipe == "faithful", entry.first.model, dataset): entry
        for dataset in REAL
        for entry in compare(typed_rows(content(dataset)["rows"], dataset))
    }
    lines = [f"| NLL, accuracy | {' | '.join(title_of(dataset) for dataset in REAL)} |"]
    lines.append("|---" * (1 + len(REAL)) + "|")
    for own in sorted({key[:3] for key in found}):
        cells = (_both(found[*own, name]) if (*own, name) in found else "" for name in REAL)
        recipe = ", faithful recipe" if own[1] else ""
        lines.append(f"| {model_name(own[2])}{recipe} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _both(entry: Entry) -> str:
    nll, accuracy = (entry.figure("test", key) for key in ("nll", "accuracy"))
    return f"{nll.text(3)}, {Figure(accuracy.mean, None).text(1, percent=True)}"


def ablation(dataset: str) -> str:
    """What each option of CMHP is worth on a data set; nothing where none was measured yet."""
    found = content(f"ablation-{dataset}")
    if not found["rows"]:
        return ""
    lines = [
        f"### {title_of(dataset)}, one option at a time",
        "",
        "| variant | NLL, validation | NLL, test | time | mark | accuracy | given the gap | parameters | "
        "steps x batch | device | seeds |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in found["rows"]:
        groups.setdefault(json.dumps([row["variant"], row["settings"]]), []).append(row)
    lines += [f"| {own[0]['variant']} | {' | '.join(_cells(own))} |" for own in groups.values()]
    lines += ["", f"`{found['command']}`", *(["", found["note"]] if "note" in found else [])]
    return "\n".join(lines)


def _cells(found: list[dict[str, Any]]) -> list[str]:
    """Of the seeds of one variant."""
    tests = [row["scores"]["test"] for row in found]
    cells = [Figure.of([row["validation_nll"] for row in found]).text(3)]
    cells += [Figure.of([test[k] for test in tests]).text(3) for k in ("nll", "time_nll", "mark_nll")]
    cells += [
        Figure.of([test[k] for test in tests]).text(1, percent=True)
        for k in ("accuracy", "accuracy_given_gap")
    ]
    settings = found[0]["settings"]
    size = f"{settings['steps']:,} x {settings['batch']}"
    return [*cells, f"{found[0]['parameters']:,}", size, found[0]["device"], str(len(found))]


def costs() -> str:
    """Bytes, peak and seconds an event of event models against how many events they have seen."""
    found = content("event_cost")["rows"]
    lines = [
        "| | events seen | remembered | extra peak of an update | update | query |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['model']} | {r['events']:,} | {_size(r['remembered'])} | {_size(r['peak'])} | "
        f"{_time(r['update'])} | {_time(r['query'])} |"
        for r in found
        if r["what"] == "cost"
    ]
    lines += ["", "| time of an update, side by side in one run | |", "|---|---|"]
    for r in found:
        if r["what"] == "ratio":
            spread = f"{r['quartile_low']} to {r['quartile_high']}"
            lines.append(f"| {r['of']} | {r['ratio']} (quartiles {spread}) |")
    return "\n".join(lines)


def claim() -> tuple[str, str, str, str]:
    """The README's line: an update after many events, of CMHP and of a KV cache."""
    found = content("event_cost")["rows"]
    (ratio,) = (r for r in found if r["what"] == "ratio" and r["of"].endswith("THP with KV cache over CMHP"))
    cells = [
        f"{_time(r['update'])}, {_size(r['remembered'])}"
        for model in ("CMHP", "THP, KV cache")
        for r in found
        if r["what"] == "cost" and (r["model"], r["events"]) == (model, 10**5)
    ]
    return ("update by one event after 100,000 (CMHP; THP with a KV cache)", *cells, f"{ratio['ratio']:.3g}x")


def _size(count: int) -> str:
    if count < 1e5:
        return f"{count / 1e3:,.1f} kB"
    return f"{count / MB:,.1f} MB"


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f} ms"
