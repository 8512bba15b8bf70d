"""A table like the paper's: models against test sets, ours beside the published, seeds together."""

from constmem.evaluation.comparison.events import EventEntry
from constmem.evaluation.comparison.points import Entry
from constmem.evaluation.comparison.reading import read_rows
from constmem.evaluation.comparison.rows import NAMES, Figure, model_name
from constmem.evaluation.comparison.runs import over_seeds, print_runs
from constmem.evaluation.comparison.tables import as_json, compare, json_text, markdown, show, tabulate

__all__ = [
    "NAMES",
    "Entry",
    "EventEntry",
    "Figure",
    "as_json",
    "compare",
    "json_text",
    "markdown",
    "model_name",
    "over_seeds",
    "print_runs",
    "read_rows",
    "show",
    "tabulate",
]
