"""The rows of CSV and Parquet files: names of columns, and cells of text."""

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from constmem.data.packs import RATIO, ROOM

Lines = Iterator[tuple[str, list[str]]]  # where a row is, and its cells
MOST_HEADER = 2**20  # letters of a CSV file's first line
OPEN_ENDED = "comma_separated_list_of_features"  # JODIE's last column: rows may have any number of these


@contextmanager
def opened(path: Path) -> Iterator[tuple[list[str], Lines]]:
    """The names of a file's columns, and the rows below them: where each is, and its cells as text.

    In a CSV file, of ;, tab and comma, what the first line holds most of separates the columns.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path} to read rows from")
    if path.suffix == ".parquet":
        table = parquet_table(path)
        yield list(table.column_names), _parquet_rows(table)
        return
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            header = file.readline(MOST_HEADER)
            if len(header) == MOST_HEADER:
                raise ValueError(
                    f"the first line of {path} has {MOST_HEADER:,} letters or more: not a CSV file"
                )
            delimiter = max(",;\t", key=header.count)
            names = [name.strip() for name in next(csv.reader([header], delimiter=delimiter), [])]
            yield names, _lines(csv.reader(file, delimiter=delimiter), path, names)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not a CSV file of UTF-8 text ({error})") from error


def _lines(reader: Any, path: Path, names: list[str]) -> Lines:
    for cells in reader:
        line = reader.line_num + 1  # where the row ends: quoted cells may hold line breaks
        if not any(cell.strip() for cell in cells):
            continue
        if len(cells) != len(names) and names[-1] != OPEN_ENDED:
            raise ValueError(f"line {line} of {path} has {len(cells)} cells, its header {len(names)}")
        yield f"line {line}", cells


def _parquet_rows(table: Any) -> Lines:
    columns = [[_text(cell) for cell in column.to_pylist()] for column in table.columns]
    for i, cells in enumerate(zip(*columns, strict=True)):
        yield f"row {i}", list(cells)


def parquet_table(path: Path) -> Any:
    """The table of a Parquet file, unless it has far more values than bytes."""
    with parquet_errors(path):
        file, size = parquet_file(path), path.stat().st_size
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        values = sum(group.column(k).num_values for group in groups for k in range(group.num_columns))
        if max(values, file.metadata.num_rows) > ROOM // 8 + RATIO * size:
            raise ValueError(
                f"{path} of {size:,} bytes announces {values:,} values: it is damaged, or no data"
            )
        return file.read()


def parquet_file(path: Path) -> Any:
    """A Parquet file, opened."""
    with parquet_errors(path):
        from pyarrow import parquet

        return parquet.ParquetFile(path)


@contextmanager
def parquet_errors(path: Path) -> Iterator[None]:
    """Errors of pyarrow in words: what is damaged, or which extra it comes with."""
    try:
        from pyarrow import ArrowException
    except ImportError as error:
        raise ImportError("Parquet files need pyarrow: pip install 'constmem[data]'") from error
    try:
        yield
    except FileNotFoundError:
        raise
    except (ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a readable Parquet file ({error})") from error


def _text(cell: Any) -> str:
    if cell is None:
        return ""
    return cell.isoformat() if isinstance(cell, datetime) else str(cell).strip()
