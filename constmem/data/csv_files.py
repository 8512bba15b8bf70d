"""CSV files as rows of cells: of ;, tab and comma, what the first line holds most of parts the columns."""

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

Lines = Iterator[tuple[int, list[str]]]


@contextmanager
def opened(path: Path) -> Iterator[tuple[list[str], Lines]]:
    """The names of a file's columns, and an iterator over the numbers and cells of the lines below them."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            header = file.readline()
            delimiter = max(",;\t", key=header.count)
            names = [name.strip() for name in next(csv.reader([header], delimiter=delimiter), [])]
            yield names, _lines(file, path, len(names), delimiter)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not a CSV file of UTF-8 text ({error})") from error


def _lines(file: TextIO, path: Path, columns: int, delimiter: str) -> Lines:
    reader = csv.reader(file, delimiter=delimiter)
    for cells in reader:
        line = reader.line_num + 1  # where the row ends: quoted cells may hold line breaks
        if not any(cell.strip() for cell in cells):
            continue
        if len(cells) != columns:
            raise ValueError(f"line {line} of {path} has {len(cells)} cells, its header {columns}")
        yield line, cells
