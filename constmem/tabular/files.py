"""Tables in CSV and Parquet files, read a chunk at a time."""

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from constmem.data.rows import MOST_HEADER, parquet_errors, parquet_file
from constmem.tabular.frames import MOMENT, Kind

ROWS = 4096  # of one chunk
ABSENT = frozenset(("", "na", "n/a", "nan", "null", "?"))
TRUTH = {"true": 1.0, "false": 0.0}
DATE = re.compile(r"\d{4}-\d\d-\d\d([ T]\d\d:\d\d(:\d\d([.]\d{1,9})?)?(Z|[+-]\d\d:?\d\d)?)?")


@dataclass(frozen=True)
class Chunk:
    """Some rows of a file.

    Attributes:
        columns: values by name: float64, moments, or text as objects.
        first: the number of rows before these.
        done: how much of the file is behind us, in bytes or rows.
        rows: the same rows as the file has them: lists of text, or a batch of pyarrow.
    """

    columns: dict[str, NDArray[Any]]
    first: int
    done: int
    rows: Any

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))


class TableFile(Protocol):
    """A table in a file: its columns' names and kinds, how long it is, and its rows in chunks."""

    path: Path
    names: list[str]
    total: int

    def kinds(self) -> dict[str, Kind]:
        """Kinds of the columns, by all of the file."""
        ...

    def chunks(self, kinds: Mapping[str, Kind]) -> Iterator[Chunk]:
        """The rows, with columns read as these kinds."""
        ...


def table_file(path: Path) -> TableFile:
    """Open a CSV, TSV or Parquet file."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    match path.suffix.lower():
        case ".csv" | ".tsv":
            return CsvFile(path)
        case ".parquet":
            return ParquetFile(path)
    raise ValueError(f"{path}: tables are read from .csv, .tsv and .parquet files")


class CsvFile:
    """A text file with a line of names, then one line a row; missing values are empty, or NA."""

    def __init__(self, path: Path) -> None:
        self.path, self.total = path, path.stat().st_size
        with path.open(newline="", encoding="utf-8-sig") as file:
            try:
                line = file.readline(MOST_HEADER)
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}: no CSV file of UTF-8 text ({error.reason})") from error
            found = max(",;\t", key=line.count) if path.suffix.lower() == ".csv" else "\t"
            self.delimiter = found if line.count(found) else ","
            self.names = next(csv.reader([line], delimiter=self.delimiter), [])
        twice = {name for name in self.names if self.names.count(name) > 1}
        if not any(self.names) or twice:
            what = f"{sorted(twice)} stand twice in" if twice else "there are none in"
            raise ValueError(f"{path}: names of columns are needed, and {what} the first line")

    def _raw(self) -> Iterator[tuple[list[list[str]], int, int]]:
        """Chunks of rows as lists of text, the number of rows before, and of bytes behind us."""
        with self.path.open("rb") as raw, TextIOWrapper(raw, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, delimiter=self.delimiter)
            rows: list[list[str]] = []
            first = 0
            try:
                if next(reader) != self.names:
                    raise ValueError(f"{self.path}: the names of columns go on in its second line")
                for row in reader:
                    if not row:
                        continue
                    if len(row) != len(self.names):
                        raise ValueError(
                            f"{self.path}, line {reader.line_num}: {len(row)} values in "
                            f"{len(self.names)} columns"
                        )
                    rows.append(row)
                    if len(rows) == ROWS:
                        yield rows, first, raw.tell()
                        first, rows = first + len(rows), []
            except (csv.Error, UnicodeDecodeError) as error:
                raise ValueError(
                    f"{self.path}, near line {reader.line_num}: no CSV text ({error})"
                ) from error
            if rows:
                yield rows, first, self.total

    def kinds(self) -> dict[str, Kind]:
        found: dict[str, set[Kind]] = {name: set() for name in self.names}
        for rows, *_ in self._raw():
            for name, column in zip(self.names, zip(*rows, strict=True), strict=True):
                if "text" not in found[name]:
                    found[name] |= {_kind(value) for value in column}
        return {name: _only(kinds - {"empty"}) for name, kinds in found.items()}

    def chunks(self, kinds: Mapping[str, Kind]) -> Iterator[Chunk]:
        for rows, first, done in self._raw():
            columns = {
                name: _parsed(column, kinds[name], f"{self.path}, column {name!r}, row ", first)
                for name, column in zip(self.names, zip(*rows, strict=True), strict=True)
                if name in kinds
            }
            yield Chunk(columns, first, done, rows)


def _only(kinds: set[Kind]) -> Kind:
    return kinds.pop() if len(kinds) == 1 else "text" if kinds else "empty"


def _kind(value: str) -> Kind:
    word = value.strip().lower()
    if word in ABSENT:
        return "empty"
    if word in TRUTH or _is_number(word):
        return "number"
    return "date" if DATE.fullmatch(value.strip()) else "text"


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return "_" not in word


def _parsed(column: Sequence[str], kind: Kind, where: str, first: int) -> NDArray[Any]:
    """Text as values of one kind; what is none of it is named."""
    words = [value.strip() for value in column]
    gone = [word.lower() in ABSENT for word in words]
    made: list[Any] = []
    if kind == "text":
        return np.array([*(None if g else w for w, g in zip(words, gone, strict=True)), None], object)[:-1]
    for i, (word, absent) in enumerate(zip(words, gone, strict=True)):
        if absent:
            made.append(np.nan if kind == "number" else np.datetime64("NaT"))
            continue
        found = _kind(word)
        if found != kind and kind != "empty":
            wanted = {"number": "a number", "date": "a date"}[kind]
            raise ValueError(f"{where}{first + i + 1}: {word!r} is not {wanted}, as all others there are")
        if kind == "number":
            made.append(TRUTH[word.lower()] if word.lower() in TRUTH else float(word))
        elif kind == "date":
            made.append(_moment(word))
        else:
            made.append(np.datetime64("NaT"))
    return np.array(made, np.float64 if kind == "number" else MOMENT)


def _moment(word: str) -> np.datetime64:
    try:
        when = datetime.fromisoformat(word)
    except ValueError as error:
        raise ValueError(f"{word!r} looks like a date, but is none: {error}") from error
    return np.datetime64(when.astimezone(UTC).replace(tzinfo=None) if when.tzinfo else when, "us")


class ParquetFile:
    """A Parquet file, read by pyarrow."""

    def __init__(self, path: Path) -> None:
        self.file = parquet_file(path)
        self.path, self.names, self.total = path, self.file.schema_arrow.names, self.file.metadata.num_rows

    def kinds(self) -> dict[str, Kind]:
        types = pyarrow().types
        made: dict[str, Kind] = {}
        for field in self.file.schema_arrow:
            number = types.is_integer, types.is_floating, types.is_boolean, types.is_decimal
            text = types.is_string, types.is_large_string, types.is_dictionary
            date = types.is_timestamp, types.is_date
            named: tuple[tuple[Kind, Any], ...] = (("number", number), ("text", text), ("date", date))
            kinds = [kind for kind, tests in named if any(test(field.type) for test in tests)]
            made[field.name] = kinds[0] if kinds else "empty"
        return made

    def chunks(self, kinds: Mapping[str, Kind]) -> Iterator[Chunk]:
        own, first = self.kinds(), 0
        for name in self.names:
            if name in kinds and "empty" not in (own[name], kinds[name]) and own[name] != kinds[name]:
                raise ValueError(f"{self.path}, column {name!r}: holds {own[name]}s, not {kinds[name]}s")
        batches = self.file.iter_batches(ROWS, use_threads=False)
        while True:
            with parquet_errors(self.path):
                if (batch := next(batches, None)) is None:
                    return
                batch.validate(full=True)
                columns = {
                    name: _arrow_column(batch.column(name), own[name]) for name in self.names if name in kinds
                }
            yield Chunk(columns, first, first + len(batch), batch)
            first += len(batch)


def _arrow_column(column: Any, kind: Kind) -> NDArray[Any]:
    arrow = pyarrow()
    if kind == "number":
        return np.asarray(column.cast(arrow.float64()).to_numpy(zero_copy_only=False))
    if kind == "date":
        moments = column.cast(arrow.timestamp("us", tz=getattr(column.type, "tz", None)))
        return np.asarray(moments.cast(arrow.timestamp("us")).to_numpy(zero_copy_only=False), MOMENT)
    if kind == "empty" and not arrow.types.is_null(column.type):
        raise ValueError(f"a column of type {column.type} can be no input: leave it out by --ignore")
    values = [None if v is None else str(v) for v in column.to_pylist()]
    return np.array([*values, None], object)[:-1]


def pyarrow() -> Any:
    """The library that reads Parquet, which is an extra."""
    try:
        import pyarrow as arrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("Parquet files need pyarrow: pip install 'constmem[data]'") from error
    return arrow
