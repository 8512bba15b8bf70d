"""Tables in CSV and Parquet files, read a chunk at a time."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from constmem.data.rows import CsvFile, is_number, parquet_errors, parquet_file
from constmem.tabular.frames import MOMENT, Kind
from constmem.tabular.inputs import moment

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


def table_file(path: Path) -> "TextTable | ParquetTable":
    """Open a CSV, TSV or Parquet file: its columns' names and kinds, how long it is, its rows in chunks."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    match path.suffix.lower():
        case ".csv" | ".tsv":
            return TextTable(path)
        case ".parquet":
            return ParquetTable(path)
    raise ValueError(f"{path}: tables are read from .csv, .tsv and .parquet files")


class TextTable(CsvFile):
    """A table as text; missing values are empty, or NA."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        twice = {name for name in self.names if self.names.count(name) > 1}
        if not any(self.names) or twice:
            what = f"{sorted(twice)} stand twice in" if twice else "there are none in"
            raise ValueError(f"{path}: names of columns are needed, and {what} the first line")

    def _raw(self) -> Iterator[tuple[list[list[str]], int, int]]:
        """Chunks of rows as lists of text, the number of rows before, and of bytes behind us."""
        rows: list[list[str]] = []
        first = 0
        with self.path.open("rb") as raw:
            for _, cells in self.lines(raw):
                rows.append(cells)
                if len(rows) == ROWS:
                    yield rows, first, raw.tell()
                    first, rows = first + len(rows), []
        if rows:
            yield rows, first, self.total

    def kinds(self) -> dict[str, Kind]:
        """Kinds of the columns, by all of the file."""
        found: dict[str, set[Kind]] = {name: set() for name in self.names}
        for rows, *_ in self._raw():
            for name, column in zip(self.names, zip(*rows, strict=True), strict=True):
                if "text" not in found[name]:
                    found[name] |= {_kind(value) for value in column}
        return {name: _only(kinds - {"empty"}) for name, kinds in found.items()}

    def chunks(self, kinds: Mapping[str, Kind]) -> Iterator[Chunk]:
        """The rows, with columns read as these kinds."""
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
    if word in TRUTH or is_number(word):
        return "number"
    return "date" if DATE.fullmatch(value.strip()) else "text"


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
            raise ValueError(f"{where}{first + i + 1}: {word!r} is not {wanted}, but other values there are")
        if kind == "number":
            made.append(TRUTH[word.lower()] if word.lower() in TRUTH else float(word))
            if np.isinf(made[-1]):
                raise ValueError(
                    f"{where}{first + i + 1}: {word!r} is infinite: leave the row out, or the cell empty"
                )
        elif kind == "date":
            made.append(_moment(word, f"{where}{first + i + 1}: "))
        else:
            made.append(np.datetime64("NaT"))
    return np.array(made, np.float64 if kind == "number" else MOMENT)


def _moment(word: str, where: str) -> Any:
    try:
        return moment(datetime.fromisoformat(word))
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{where}{word!r} looks like a date, but is none: {error}") from error


class ParquetTable:
    """A Parquet file, read by pyarrow."""

    def __init__(self, path: Path) -> None:
        self.file = parquet_file(path)
        self.path, self.names, self.total = path, self.file.schema_arrow.names, self.file.metadata.num_rows

    def kinds(self) -> dict[str, Kind]:
        """Kinds of the columns, by the file's own types."""
        import pyarrow

        types = pyarrow.types
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
        """The rows; columns must be of these kinds."""
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
    import pyarrow as arrow

    if kind == "number":
        return np.asarray(column.cast(arrow.float64(), safe=False).to_numpy(zero_copy_only=False))
    if kind == "date":
        moments = column.cast(arrow.timestamp("us", tz=getattr(column.type, "tz", None)), safe=False)
        return np.asarray(moments.cast(arrow.timestamp("us")).to_numpy(zero_copy_only=False), MOMENT)
    if kind == "empty" and not arrow.types.is_null(column.type):
        raise ValueError(f"a column of type {column.type} can be no input: leave it out by --ignore")
    values = [None if v is None else str(v) for v in column.to_pylist()]
    return np.array([*values, None], object)[:-1]


TableFile = TextTable | ParquetTable
