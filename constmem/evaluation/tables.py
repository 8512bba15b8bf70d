"""Tables like the paper's: models against test sets, ours beside the published, in every form."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from constmem.core.files import write_text
from constmem.data.catalogue import title_of
from constmem.evaluation.entries import PHASES, SHOWN, Entry, EventEntry, PointEntry, compare, full_name
from constmem.evaluation.rows import Figure, json_text, read_rows

MORE = (
    "RMSE",
    "CRPS",
    "50 %",
    "90 %",
    "grey level",
)  # columns of points that are shown where they are asked for
HEADS = dict(
    zip(
        SHOWN,
        (
            "NLL",
            "time",
            "mark",
            "survival",
            "RMSE",
            "MAE, median",
            "accuracy",
            "given the gap",
            "top 5",
            "KS",
        ),
        strict=True,
    )
)
OF_MARKS = ("mark_nll", "accuracy", "accuracy_given_gap", "top5")
WORDS = ("model", "recipe", "device", "test set")  # columns of text
Table = tuple[str, list[str], list[list[str]]]  # its name, the heads of the columns, the cells

# What others report: data set -> (who, where, {column: figure}). Those of Taxi are under the protocol that we
# follow too. The paper's are not: other splits, other units, and an RMSE of sums of errors.
ELSEWHERE: dict[str, tuple[tuple[str, str, dict[str, float]], ...]] = {
    "taxi": (
        ("RMTPP", "published elsewhere", {"nll": -0.346}),
        ("AttNHP", "published elsewhere", {"nll": -0.493}),
        ("NHP", "published elsewhere", {"nll": -0.514}),
        ("S2P2", "published elsewhere", {"nll": -0.522}),
    ),
    "mooc": (
        ("THP", "the paper's, another protocol", {"nll": 0.267, "rmse": 0.202, "accuracy": 0.336}),
        ("CMHP", "the paper's, another protocol", {"nll": -0.040, "rmse": 0.168, "accuracy": 0.237}),
    ),
    "reddit": (
        ("THP", "the paper's, another protocol", {"nll": 0.268, "rmse": 0.238, "accuracy": 0.610}),
        ("CMHP", "the paper's, another protocol", {"nll": 0.528, "rmse": 0.262, "accuracy": 0.609}),
    ),
}


def table_of(
    results: Sequence[Path] | None,
    *,
    dataset: str | None = None,
    form: str | None = None,
    out: Path | None = None,
    scores: bool = False,
) -> None:
    """Show, print or write the table of scored runs.

    Args:
        results: folders of runs, or JSON files of rows; None: all in runs/.
        form: "json" or "markdown"; None: as `out` is called, or as the terminal shows it best.
    """
    paths = results or sorted(path.parent for path in Path("runs").glob("*/eval.json"))
    if not paths:
        raise ValueError("no scored runs in runs/: name run folders or JSON files, or run `eval` first")
    entries = compare(read_rows(paths), dataset=dataset)
    if form is None and out is None:
        show(entries, scores=scores)
        return
    wants_json = form == "json" or (form is None and out is not None and out.suffix == ".json")
    text = as_json(entries) if wants_json else markdown(entries, scores=scores)
    if out is None:
        print(text)
    else:
        print(f"wrote {write_text(out, text + chr(10))}")


def tabulate(entries: Sequence[Entry], *, scores: bool = False) -> list[Table]:
    """For each data set its name, the heads of the columns, and the cells: what every form of table shows.

    Args:
        scores: RMSE, CRPS and coverage of neural processes too; event models show all they have.
    """
    tables = []
    for dataset in dict.fromkeys(entry.dataset for entry in entries):
        own = [entry for entry in entries if entry.dataset == dataset]
        points = [entry for entry in own if isinstance(entry, PointEntry)]
        events = [entry for entry in own if isinstance(entry, EventEntry)]
        tables += [_point_table(points, scores=scores)] if points else []
        tables += [_event_table(events)] if events else []
    return tables


def other_scores(entry: PointEntry, test: str) -> list[str]:
    """The cells of `MORE` on a test set."""
    inside = [entry.coverage[test].get(level) for level in ("0.5", "0.9")]
    covered = ["" if share is None else share.text(1, percent=True) for share in inside]
    level = entry.level[test].text(3) if test in entry.level else ""
    return [entry.rmse[test].text(4), entry.crps[test].text(4), *covered, level]


def _point_table(entries: list[PointEntry], *, scores: bool) -> Table:
    """Entries of one data set: a column for each test set, the published beside, and `MORE` if asked for."""
    tests = list(dict.fromkeys(test for entry in entries for test in entry.by_batch))
    published = {test: any(test in entry.published for entry in entries) for test in tests}
    exact = {test: any(test in entry.exact for entry in entries) for test in tests}
    phases = [phase for phase in PHASES if any(phase in entry.peak for entry in entries)]
    head = ["model", "recipe"]
    for test in tests:
        head += [f"{test}, by batch", *(["published"] if published[test] else [])]
        head += [*(["exact"] if exact[test] else []), "by point", *(MORE if scores else ())]
    head += ["parameters", "steps x batch", "minutes", *(f"{phase}, GB" for phase in phases)]
    cells = []
    for entry in entries:
        row = [full_name(entry, entries), entry.recipe]
        for test in tests:
            paper = f"{entry.published[test]:.2f}" if test in entry.published else ""
            row += [str(entry.by_batch.get(test, "")), *([paper] if published[test] else [])]
            row += [f"{entry.exact[test]:.2f}" if test in entry.exact else ""] if exact[test] else []
            row.append(str(entry.by_point.get(test, "")))
            more = other_scores(entry, test) if test in entry.rmse else [""] * len(MORE)
            row += more if scores else []
        row += [*entry.size, *(_gigabytes(entry.peak.get(phase)) for phase in phases)]
        cells.append([*row, entry.device, str(len(entry.seeds))])
    return title_of(entries[0].dataset), [*head, "device", "seeds"], cells


def _gigabytes(size: int | None) -> str:
    return "" if size is None else f"{size / 1e9:.1f}"


def _event_table(entries: list[EventEntry]) -> Table:
    """Entries of one data set: a column for each score, the published beside; others' figures below."""
    dataset, tests = entries[0].dataset, list(dict.fromkeys(t for e in entries for t in e.scores))
    marked = any(entry.settings.get("model", {}).get("num_marks", 2) > 1 for entry in entries)
    found = {key for entry in entries for scores in entry.scores.values() for key in scores}
    shown = [key for key in HEADS if key in found and (marked or key not in OF_MARKS)]
    published = any(entry.published for entry in entries)
    several = len(tests) > 1
    head = ["model", *(["test set"] if several else []), "recipe"]
    for key in shown:
        unit = f" ({entries[0].unit})" if key in ("rmse", "mae_median") else ""
        head += [HEADS[key] + unit, *(["published"] if published and key == "nll" else [])]
    head += ["parameters", "steps x batch", "minutes", "device", "seeds"]
    cells = []
    for entry in entries:
        for test, scores in entry.scores.items():
            row = [full_name(entry, entries), *([test] if several else []), entry.recipe]
            for key in shown:
                row.append(_cell(key, scores[key]) if key in scores else "")
                if published and key == "nll":
                    row.append(f"{entry.published[test]:.3f}" if test in entry.published else "")
            cells.append([*row, *entry.size, entry.device, str(len(entry.seeds))])
    true = [value for entry in entries for value in entry.true.values()]
    others = [("the true process", "known", {"nll": true[0], "time_nll": true[0]})] if true else []
    for name, where, known in (*others, *ELSEWHERE.get(dataset, ())):
        line = dict.fromkeys(head, "") | {"model": name, "recipe": where}
        for key in (key for key in shown if key in known):
            line[next(h for h in head if h.startswith(HEADS[key]))] = _cell(key, Figure(known[key], None))
        cells.append(list(line.values()))
    return title_of(dataset), head, cells


def _cell(key: str, figure: Figure) -> str:
    if key in ("rmse", "mae_median"):
        return figure.short()
    return figure.text(1, percent=True) if key.startswith(("accuracy", "top")) else figure.text(3)


def markdown(entries: Sequence[Entry], *, scores: bool = False) -> str:
    """The tables in Markdown."""
    parts = []
    for name, head, rows in tabulate(entries, scores=scores):
        lines = [[name, *head[1:]], ["---"] * len(head), *rows]
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join(parts)


def as_json(entries: Iterable[Entry]) -> str:
    """The entries in JSON."""
    return json_text([asdict(entry) for entry in entries])


def show(entries: Sequence[Entry], *, scores: bool = False) -> None:
    """The tables on a terminal."""
    from rich.console import Console
    from rich.table import Table as Grid

    for name, head, rows in tabulate(entries, scores=scores):
        wide = scores or "NLL" in head
        what = "nats an event" if "NLL" in head else "log-likelihood of a point"
        grid = Grid(title=f"{name}: {what}", title_justify="left", padding=(0, 0) if wide else (0, 1))
        for column in head:
            grid.add_column(column, justify="left" if column in WORDS else "right")
        for row in rows:
            grid.add_row(*row)
        Console(width=None if sys.stdout.isatty() else 240 if wide else 160).print(grid)
