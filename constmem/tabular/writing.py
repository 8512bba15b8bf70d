"""Tables written to CSV and Parquet files, a chunk at a time."""

import csv
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from numpy.typing import NDArray

from constmem.tabular.files import Chunk, pyarrow


class Writer(Protocol):
    """Writes the rows of a chunk, with more columns beside them."""

    def __call__(self, chunk: Chunk, more: Mapping[str, NDArray[Any]]) -> None: ...


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

        def write(chunk: Chunk, more: Mapping[str, NDArray[Any]]) -> None:
            nonlocal began
            if not began:
                writer.writerow([*names, *more])
                began = True
            rows = chunk.rows
            if not isinstance(rows, list):
                rows = [["" if v is None else v for v in row.values()] for row in rows.to_pylist()]
            columns = (column.tolist() for column in more.values())
            writer.writerows(
                [*row, *added] for row, added in zip(rows, zip(*columns, strict=True), strict=True)
            )

        yield write


@contextmanager
def _parquet_writer(path: Path, names: list[str], _: str) -> Iterator[Writer]:
    arrow = pyarrow()
    writer: Any = None

    def write(chunk: Chunk, more: Mapping[str, NDArray[Any]]) -> None:
        nonlocal writer
        if isinstance(chunk.rows, list):
            columns = [list(column) for column in zip(*chunk.rows, strict=True)]
            table = arrow.table(dict(zip(names, columns, strict=True)))
        else:
            table = arrow.Table.from_batches([chunk.rows])
        for name, column in more.items():
            table = table.append_column(name, arrow.array(column.tolist()))
        writer = writer or arrow.parquet.ParquetWriter(path, table.schema)
        writer.write_table(table)

    try:
        yield write
    finally:
        if writer is not None:
            writer.close()
