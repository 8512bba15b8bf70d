"""A table like the paper's: models against test sets, ours beside the published, seeds together."""

from constmem.comparison.events import EventEntry
from constmem.comparison.points import Entry
from constmem.comparison.reading import read_rows
from constmem.comparison.rows import NAMES, Figure, model_name
from constmem.comparison.runs import over_seeds, print_runs
from constmem.comparison.tables import as_json, compare, json_text, markdown, show, tabulate

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
