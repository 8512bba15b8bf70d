"""Tables of scored runs: like the paper's, models against test sets, in every form; and run by run."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import Any

from constmem.core.files import write_text
from constmem.data.catalogue import title_of
from constmem.evaluation import ELSEWHERE, Figure
from constmem.evaluation.rows import OF_EVENTS, PHASES, Entry, Row, compare, json_text, read_rows

MORE = ("RMSE", "CRPS", "50 %", "90 %", "grey level")  # columns of points that are shown if asked for
OF_MARKS = ("mark_nll", "accuracy", "accuracy_given_gap", "top5")
WORDS = ("model", "recipe", "device", "test set", "run")  # columns of text
Table = tuple[str, list[str], list[list[str]]]  # its name, the heads of the columns, the cells
RUN_POINTS = ("run", "test set", "log-likelihood", "exact", "by batch", "published", *MORE, "minutes")
RUN_EVENTS = (
    "run", "test set", "NLL", "of time", "of mark", "published", "survival", "gap RMSE", "mark error",
    "mark error, gap known", "KS", "minutes",
)  # fmt: skip
ABOUT_POINTS = (
    "log-likelihood: nats a point, higher is better; by batch: the paper's mean over batches. RMSE, CRPS: in "
    "the units of y (of images, white - black = 1). 50 %, 90 %: how many values lie in central intervals."
    "\ngrey level: log-probability of a pixel's levels, by which densities and models of levels compare."
)
ABOUT_EVENTS = (
    "NLL: nats an event, of its time plus of its mark given the time. gap RMSE: of the predicted mean gap.\n"
    "mark error: how often the likeliest mark is wrong, predicted before the event, or given its time."
)


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
    print(text if out is None else f"wrote {write_text(out, text + chr(10))}")


def tabulate(entries: Sequence[Entry], *, scores: bool = False) -> list[Table]:
    """For each data set its name, the heads of the columns, and the cells: what every form of table shows.

    Args:
        scores: RMSE, CRPS and coverage of neural processes too; event models show all they have.
    """
    groups: dict[tuple[str, bool], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry.first.dataset, entry.first.of_events), []).append(entry)
    return [
        _event_table(own) if events else _point_table(own, scores=scores)
        for (_, events), own in groups.items()
    ]


def _point_table(entries: list[Entry], *, scores: bool) -> Table:
    """Entries of one data set: a column for each test set, the published beside, and `MORE` if asked for."""
    tests = list(dict.fromkeys(test for entry in entries for test in entry.tests))
    lines = []
    for entry in entries:
        line = [("model", entry.name(entries)), ("recipe", entry.first.recipe)]
        for test in tests:
            line += [
                (f"{test}, by batch", _text(entry.figure(test, "log_likelihood_by_batch"), 2)),
                ("published", _published(entry, test, ".2f")),
                ("exact", _known(entry.known(test, "exact_by_batch"), ".2f")),
                ("by point", _text(entry.figure(test, "log_likelihood"), 2)),
                *(zip(MORE, _more(entry, test), strict=True) if scores else ()),
            ]
        lines.append([*line, *_trained(entry, phases=PHASES)])
    return _table(entries, lines)


def _event_table(entries: list[Entry]) -> Table:
    """Entries of one data set: a column for each score, the published beside; others' figures below."""
    marked = any(entry.first.settings.get("model", {}).get("num_marks", 2) > 1 for entry in entries)
    several = len({test for entry in entries for test in entry.tests}) > 1
    units = dict.fromkeys(("rmse", "mae_median"), f" ({entries[0].unit})")
    heads = {key: f"{head}{units.get(key, '')}" for key, head in OF_EVENTS.items()}
    lines = []
    for entry, test in [(own, test) for own in entries for test in own.tests]:
        line = [("model", entry.name(entries)), *([("test set", test)] if several else [])]
        line.append(("recipe", entry.first.recipe))
        for key in (key for key in heads if marked or key not in OF_MARKS):
            line.append((heads[key], _event_cell(key, entry.figure(test, key))))
            line += [("published", _published(entry, test, ".3f"))] if key == "nll" else []
        lines.append([*line, *_trained(entry)])
    name, head, cells = _table(entries, lines)
    true = [value for entry in entries for value in (entry.first.true or {}).values()]
    others = [("the true process", "known", {"nll": true[0], "time_nll": true[0]})] if true else []
    for who, where, known in (*others, *ELSEWHERE.get(entries[0].first.dataset, ())):
        found = {heads[key]: _event_cell(key, Figure(value, None)) for key, value in known.items()}
        cells.append([(found | {"model": who, "recipe": where}).get(column, "") for column in head])
    return name, head, cells


def _table(entries: list[Entry], lines: list[list[tuple[str, str]]]) -> Table:
    """Lines of heads and cells as a table; a column that is empty is left out, unless it was asked for."""
    columns = [c for c in zip(*lines, strict=True) if c[0][0] in MORE or any(cell for _, cell in c)]
    cells = [[cell for _, cell in line] for line in zip(*columns, strict=True)]
    return title_of(entries[0].first.dataset), [column[0][0] for column in columns], cells


def _trained(entry: Entry, *, phases: Sequence[str] = ()) -> list[tuple[str, str]]:
    """The last columns: how large, how long, the most memory of some phases, where and how often."""
    of, peak = entry.about, entry.peak
    return [
        ("parameters", f"{of['parameters']:,}"),
        ("steps x batch", f"{of['steps']:,} x {of['batch']}"),
        ("minutes", f"{of['minutes']:.1f}"),
        *((f"{phase}, GB", f"{peak[phase] / 1e9:.1f}" if phase in peak else "") for phase in phases),
        ("device", of["device"]),
        ("seeds", str(len(entry.rows))),
    ]


def markdown(entries: Sequence[Entry], *, scores: bool = False) -> str:
    """The tables in Markdown."""
    parts = []
    for name, head, rows in tabulate(entries, scores=scores):
        lines = [[name, *head[1:]], ["---"] * len(head), *rows]
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join(parts)


def as_json(entries: Iterable[Entry]) -> str:
    """The entries in JSON."""
    return json_text([content(entry) for entry in entries])


def content(entry: Entry) -> dict[str, Any]:
    """An entry as JSON has it, with the mean and the spread of each score on each test set.

    Of points, `by_batch` is the log-likelihood to compare with the published, the unweighted mean over
    batches; `by_point` that over points; `exact` and `exact_by_point` those of the process that the data came
    from; `level` that of grey levels; `peak` the most bytes on a GPU. Of events, `true` is the NLL of the
    process that they were simulated from.
    """

    row, tests = entry.first, entry.tests

    def known(found: Mapping[str, Figure | None]) -> dict[str, Any]:
        return {key: vars(figure) for key, figure in found.items() if figure is not None}

    def figures(key: str) -> dict[str, Any]:
        return known({test: entry.figure(test, key) for test in tests})

    def exact(key: str) -> dict[str, float]:
        return {test: entry.known(test, key) for test in tests if entry.known(test, key) is not None}

    if row.of_events:
        scores = {test: known({key: entry.figure(test, key) for key in OF_EVENTS}) for test in tests}
        return entry.about | {"scores": scores, "true": row.true or {}, "unit": entry.unit}
    coverage = {
        test: known({level: entry.figure(test, "coverage", level) for level in row.scores[test].coverage})
        for test in tests
    }
    return entry.about | {
        "by_batch": figures("log_likelihood_by_batch"), "by_point": figures("log_likelihood"),
        "rmse": figures("rmse"), "crps": figures("crps"), "coverage": coverage,
        "level": figures("level_log_likelihood"),
        "exact": exact("exact_by_batch"), "exact_by_point": exact("exact"), "peak": entry.peak,
    }  # fmt: skip


def show(entries: Sequence[Entry], *, scores: bool = False) -> None:
    """The tables on a terminal."""
    for name, head, rows in tabulate(entries, scores=scores):
        wide = scores or "NLL" in head
        title = f"{name}: {'nats an event' if 'NLL' in head else 'log-likelihood of a point'}"
        how: dict[str, Any] = {"title_justify": "left", "padding": (0, 0 if wide else 1)}
        _print(head, [rows], 240 if wide else 160, title=title, overflow="ellipsis", **how)


def over_seeds(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows, and in each of several that differ by seed alone their mean and spread, as "over_seeds"."""
    several = {entry.first.kind: content(entry) for entry in compare(rows) if len(entry.rows) > 1}
    more = {kind: {"over_seeds": found} for kind, found in several.items()}
    return [row.content() | more.get(row.kind, {}) for row in rows]


def print_runs(rows: Sequence[Row], folders: Sequence[Path] | None = None) -> None:
    """Tables of runs, of points and of events: ours beside the published, without empty columns.

    Args:
        folders: where the runs are; shown where nothing else distinguishes two of them.
    """
    single = [Entry([row]) for row in rows]
    several = [entry for entry in compare(rows) if len(entry.rows) > 1]
    names = [_name(entry, single) for entry in single]
    if folders is not None:
        both = zip(names, folders, strict=True)
        names = [f"{name}, {folder}" if names.count(name) > 1 else name for name, folder in both]
    named = list(zip(single, names, strict=True)), [(entry, _name(entry, single)) for entry in several]
    kinds = (RUN_POINTS, ABOUT_POINTS, _point_cells), (RUN_EVENTS, ABOUT_EVENTS, _event_cells)
    for events, (columns, about, cells) in enumerate(kinds):
        own, pooled = (
            [
                [name, test, *cells(entry, test), f"{entry.about['minutes']:.1f}"]
                for entry, name in part
                if entry.first.of_events == events
                for test in entry.tests
            ]
            for part in named
        )
        about = about if any(line[-2] for line in own) else about.partition("\ngrey level")[0]
        note = f"{about}\n±: the standard deviation over seeds, beside their mean." if pooled else about
        if own:
            _print(columns, [own, pooled], 200, padding=(0, 0), caption=note, caption_justify="left")


def _name(entry: Entry, entries: Sequence[Entry]) -> str:
    """Data, model and recipe, what distinguishes it from the others, and its seed or how many."""
    row, note = entry.first, entry.difference(entries, elsewhere=())
    seeds = f" #{row.seed}" if len(entry.rows) == 1 else f", mean of {len(entry.rows)} seeds"
    return f"{row.dataset} {row.model} {row.recipe}{f' ({note})' if note else ''}{seeds}"


def _print(columns: Sequence[str], sections: list[list[list[str]]], width: int, **how: Any) -> None:
    """A table on the terminal, or of a width elsewhere; without empty columns, a rule between sections."""
    from rich.console import Console
    from rich.table import Table as Grid

    overflow = how.pop("overflow", "fold")
    table = Grid(**how)
    contents: list[Any] = list(zip(*(line for lines in sections for line in lines), strict=True))
    filled = [any(content) for content in contents]
    for column, content in compress(zip(columns, contents, strict=True), filled):
        words = column in WORDS
        # a narrow terminal may break heads, and cells before units and after a ±, but no number
        pieces = [piece for cell in content for piece in cell.replace("± ", "±\n").split("\n")]
        folds = overflow == "fold" and not words and column != "gap RMSE"
        least = max(map(len, pieces)) if folds else None
        table.add_column(column, justify="left" if words else "right", min_width=least, overflow=overflow)
    for lines in sections:
        for line in lines:
            table.add_row(*compress(line, filled))
        table.add_section()
    Console(width=None if sys.stdout.isatty() else width).print(table)


def _known(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def _published(entry: Entry, test: str, form: str) -> str:
    return _known((entry.first.published or {}).get(test), form)


def _text(figure: Figure | None, digits: int, *, percent: bool = False) -> str:
    return "" if figure is None else figure.text(digits, percent=percent)


def _more(entry: Entry, test: str) -> list[str]:
    """The cells of `MORE` on a test set."""
    errors = [_text(entry.figure(test, key), 4) for key in ("rmse", "crps")]
    inside = [_text(entry.figure(test, "coverage", level), 1, percent=True) for level in ("0.5", "0.9")]
    return [*errors, *inside, _text(entry.figure(test, "level_log_likelihood"), 3)]


def _point_cells(entry: Entry, test: str) -> list[str]:
    by_point, by_batch = (_text(entry.figure(test, f"log_likelihood{of}"), 3) for of in ("", "_by_batch"))
    exact, published = _known(entry.known(test, "exact"), ".3f"), _published(entry, test, ".3g")
    return [by_point, exact, by_batch, published, *_more(entry, test)]


def _event_cell(key: str, figure: Figure | None) -> str:
    if figure is not None and key in ("rmse", "mae_median"):
        return figure.short()
    shares = key.startswith(("accuracy", "top"))
    return _text(figure, 1 if shares else 3, percent=shares)


def _event_cells(entry: Entry, test: str) -> list[str]:
    keys = ("nll", "time_nll", "mark_nll", "survival_nll", "rmse", "ks")
    nll, time, mark, survival, gap, ks = (_event_cell(key, entry.figure(test, key)) for key in keys)
    hits = [entry.figure(test, key) for key in ("accuracy", "accuracy_given_gap")]
    wrong = [_text(hit and Figure(1 - hit.mean, hit.spread), 1, percent=True) for hit in hits]
    published = _published(entry, test, ".3g")
    return [nll, time, mark, published, survival, f"{gap} {entry.unit}s", *wrong, ks]
