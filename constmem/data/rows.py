"""The rows of CSV and Parquet files, read and written."""

import csv
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from io import TextIOWrapper
from math import isfinite
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

from numpy.typing import NDArray

from constmem.core.checks import extra, known
from constmem.data.catalogue import SECONDS
from constmem.data.packs import RATIO, ROOM

Lines = Iterator[tuple[str, list[str]]]  # where a row is, and its cells
MOST_HEADER = 2**20  # letters of a CSV file's first line
OPEN_ENDED = "comma_separated_list_of_features"  # JODIE's last column: rows may have any number of these
FINER = re.compile(r"[.,]\d{6}0*[1-9]")  # than the microseconds that a date is read to
EXACT = 2**53  # whole numbers up to here are float64 numbers, all of them


class CsvFile:
    """A text file of a line of names, then one line a row; the constructor reads the first line alone.

    Of ;, tab and comma, what the first line holds most of separates the columns; tabs do in a .tsv file.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.total = path, path.stat().st_size
        with self._refused(), path.open(newline="", encoding="utf-8-sig") as file:
            header = file.readline(MOST_HEADER)
            if len(header) == MOST_HEADER:
                raise ValueError(
                    f"the first line of {path} has {MOST_HEADER:,} letters or more: not a CSV file"
                )
            tabs = path.suffix.lower() == ".tsv" and "\t" in header
            self.delimiter = "\t" if tabs else max(",;\t", key=header.count)
            self.names = next(csv.reader([header], delimiter=self.delimiter), [])

    def lines(self, raw: BinaryIO) -> Iterator[tuple[int, list[str]]]:
        """The cells of each row of the opened file, and the number of the line on which it ends."""
        with self._refused(), TextIOWrapper(raw, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, delimiter=self.delimiter)
            if next(reader, []) != self.names:
                raise ValueError(f"{self.path}: the names of columns go on in its second line")
            for cells in reader:
                if len(cells) == len(self.names) or self.names[-1].strip() == OPEN_ENDED:
                    yield reader.line_num, cells
                elif any(cell.strip() for cell in cells):
                    where, count = f"line {reader.line_num} of {self.path}", len(self.names)
                    raise ValueError(f"{where} has {len(cells)} cells, its header {count}")

    @contextmanager
    def _refused(self) -> Iterator[None]:
        try:
            yield
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError(f"{self.path} is not a CSV file of UTF-8 text ({error})") from error


def read_text(path: Path) -> tuple[list[str], Lines]:
    """The names of a file's columns, and the rows below them: where each is, and its cells as text."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path} to read rows from")
    if path.suffix.lower() == ".parquet":
        table = parquet_table(path)
        return list(table.column_names), _parquet_rows(table)
    file = CsvFile(path)
    return [name.strip() for name in file.names], _text_rows(file)


def place_of(name: str, names: list[str], path: Path) -> int:
    """Which column of a file is called so; refused where none or several are."""
    if not any(names):
        raise ValueError(f"{path} is empty, or its first line is: that line names the columns")
    try:
        place = names.index(known("column", name, names))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if names.count(name) > 1:
        raise ValueError(f"{path} has {names.count(name)} columns {name!r}: give each a name of its own")
    return place


def _text_rows(file: CsvFile) -> Lines:
    with file.path.open("rb") as raw:
        for number, cells in file.lines(raw):
            if any(cell.strip() for cell in cells):
                yield f"line {number}", cells


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
    with extra("data", "Parquet files need pyarrow"):
        from pyarrow import ArrowException
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


# Writing


# of rows (lists of text, or a batch of pyarrow), with more columns beside them
Writer = Callable[[Any, Mapping[str, NDArray[Any]]], None]


def free(path: Path, *, replace: bool) -> None:
    """Refuse to write over a file."""
    if path.exists() and not replace:
        raise FileExistsError(f"{path} exists already: take another --out, or give --replace")


@contextmanager
def writing(path: Path, names: Iterable[str]) -> Iterator[Writer]:
    """Write a CSV or Parquet file under a temporary name, which is its own only when all went well."""
    if path.suffix.lower() not in (".csv", ".tsv", ".parquet"):
        raise ValueError(f"{path}: tables are written to .csv, .tsv and .parquet files")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")
    kind = _parquet_writer if path.suffix.lower() == ".parquet" else _csv_writer
    try:
        with kind(temporary, list(names), "\t" if path.suffix.lower() == ".tsv" else ",") as write:
            yield write
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _csv_writer(path: Path, names: list[str], delimiter: str) -> Iterator[Writer]:
    with path.open("x", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=delimiter)
        began = False

        def write(rows: Any, more: Mapping[str, NDArray[Any]]) -> None:
            nonlocal began
            if not began:
                writer.writerow([*names, *more])
                began = True
            if not isinstance(rows, list):
                rows = [["" if v is None else v for v in row.values()] for row in rows.to_pylist()]
            columns = (column.tolist() for column in more.values())
            writer.writerows(
                [*row, *added] for row, added in zip(rows, zip(*columns, strict=True), strict=True)
            )

        yield write


@contextmanager
def _parquet_writer(path: Path, names: list[str], _: str) -> Iterator[Writer]:
    with parquet_errors(path):
        import pyarrow
        from pyarrow import parquet
    writer: Any = None

    def write(rows: Any, more: Mapping[str, NDArray[Any]]) -> None:
        nonlocal writer
        if isinstance(rows, list):
            columns = [list(column) for column in zip(*rows, strict=True)]
            table = pyarrow.table(dict(zip(names, columns, strict=True)))
        else:
            table = pyarrow.Table.from_batches([rows])
        for name, column in more.items():
            table = table.append_column(name, pyarrow.array(column.tolist()))
        writer = writer or parquet.ParquetWriter(path, table.schema)
        writer.write_table(table)

    try:
        yield write
    finally:
        if writer is not None:
            writer.close()


def moment(text: str, unit: str, where: str) -> float:
    """A number as it is, or a date (ISO 8601; without an offset: UTC) counted in `unit` from 1970 on."""
    try:
        number = float(text)
    except ValueError:
        try:
            date = datetime.fromisoformat(text)
        except ValueError:
            shown = repr(text[:40]) if text else "empty"
            raise ValueError(
                f"{where} has a time that is {shown}: a number or an ISO date is needed"
            ) from None
        if FINER.search(text):
            what = "finer than the microseconds that dates are read to: give numbers instead"
            raise ValueError(f"{where} has a time that is {text}, {what}") from None
        date = date if date.tzinfo else date.replace(tzinfo=UTC)
        return date.timestamp() / SECONDS[known("unit to count dates in", unit, SECONDS)]
    if not isfinite(number):
        raise ValueError(f"{where} has a time that is {text}: every time must be finite; leave the row out")
    if abs(number) > EXACT and text.lstrip("+-").isdigit() and int(text) != number:
        raise ValueError(
            f"{where} has a time that is {text}, which float64 would round: count from a later start, or in "
            "a larger unit"
        )
    return number


def is_number(text: str) -> bool:
    """Whether a text is one number, as people write them."""
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text
