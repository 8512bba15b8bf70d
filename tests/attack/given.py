"""Files that users give, damaged: tables and events, read beside an independent reader."""

import csv
import io
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from constmem.data import EventLog, Table
from constmem.tabular.files import table_file

from . import damage
from .pool import Case
from .samples import rows
from .verdict import REFUSED, RIGHT, Refused, attempt, require, same

LINES = 60


@cache
def numbers_csv() -> str:
    """A table of numbers, with groups."""
    draw = random.Random(1)
    lines = [
        f"{draw.gauss(0, 1)!r},{draw.gauss(0, 1):.3g},{draw.gauss(0, 9):g},g{i % 7}" for i in range(LINES)
    ]
    return "\n".join(["a,b,c,group", *lines]) + "\n"


@cache
def mixed_csv() -> str:
    """A table of numbers, words and dates, some of them missing."""
    columns, y, labels = rows(LINES)
    lines = [f"{a:.9g},{'' if b != b else b},{w},2024-0{i % 9 + 1}-01,{t:.17g},{c}" for i, (a, b, w, t, c) in
             enumerate(zip(*columns.values(), y, labels, strict=True))]  # fmt: skip
    return "\n".join(["a,b,word,day,y,class", *lines]) + "\n"


@cache
def parquet() -> bytes:
    """The same as Parquet."""
    import pyarrow
    from pyarrow import parquet as writer

    columns, y, labels = rows(LINES)
    content = io.BytesIO()
    writer.write_table(pyarrow.table({**columns, "y": y, "class": labels, "n": np.arange(LINES)}), content)
    return content.getvalue()


def changed(draw: random.Random, text: str) -> bytes:
    """A text with damage to its cells or its bytes."""
    if draw.random() < 0.7:
        return damage.in_text(draw, text).encode("utf-8", draw.choice(("replace", "surrogatepass")))
    return damage.in_bytes(draw, text.encode(), [numbers_csv().encode(), mixed_csv().encode()])


def cells(content: bytes, delimiter: str) -> list[list[str]]:
    """The rows of a CSV file, by Python's reader of the whole text."""
    text = content.decode("utf-8-sig")
    return list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter))


def delimiter_of(content: bytes) -> str:
    """What separates columns: of comma, semicolon and tab the most frequent in the first line."""
    line = io.TextIOWrapper(io.BytesIO(content), "utf-8-sig", newline="").readline()
    return max(",;\t", key=line.count)


def table(draw: random.Random, folder: Path) -> str:
    """`Table.read` of a CSV file."""
    content = changed(draw, numbers_csv())
    path = folder / draw.choice(("t.csv", "t.tsv"))
    path.write_bytes(content)
    found = attempt(lambda: Table.read(path, x=["a", "b"], y="c", group=draw.choice((None, "group"))))
    if isinstance(found, Refused):
        return REFUSED
    head, *body = cells(content, delimiter_of(content))
    places = [[name.strip() for name in head].index(name) for name in ("a", "b", "c")]
    body = [row for row in body if any(cell.strip() for cell in row)]
    expected = np.array([[float(row[i]) for i in places] for row in body])
    made = np.concatenate([found.x.numpy(), found.y.numpy()], 1)
    require(same(made, expected), "the rows are not those of the file")
    return RIGHT


def frame(draw: random.Random, folder: Path) -> str:
    """The table files of the estimators' commands."""
    if draw.random() < 0.3:
        return _parquet(draw, folder)
    content = changed(draw, draw.choice((numbers_csv(), mixed_csv())))
    path = folder / "t.csv"
    path.write_bytes(content)

    def read() -> Any:
        file = table_file(path)
        kinds = file.kinds()
        return file.names, kinds, list(file.chunks(kinds))

    found = attempt(read)
    if isinstance(found, Refused):
        return REFUSED
    names, kinds, chunks = found
    line = io.TextIOWrapper(io.BytesIO(content), "utf-8-sig", newline="").readline()
    delimiter = delimiter_of(content)
    head, *body = cells(content, delimiter if line.count(delimiter) else ",")
    body = [row for row in body if row]
    require(names == head, "the names are not those of the file")
    for i, name in enumerate(names):
        words = [row[i].strip() for row in body]
        made = np.concatenate([chunk.columns[name] for chunk in chunks]) if chunks else np.zeros(0)
        require(len(made) == len(words), f"column {name!r} has {len(made)} rows of {len(words)}")
        if kinds[name] == "number":
            truth = {"true": 1.0, "false": 0.0}
            gone = ("", "na", "n/a", "nan", "null", "?")
            expected = [np.nan if w.lower() in gone else truth.get(w.lower()) for w in words]
            expected = [float(w) if e is None else e for w, e in zip(words, expected, strict=True)]
            require(same(made, np.array(expected)), f"column {name!r} holds other numbers than the file")
        elif kinds[name] == "text":
            kept = [w for w in words if w.lower() not in ("", "na", "n/a", "nan", "null", "?")]
            require([m for m in made if m is not None] == kept, f"column {name!r} holds other words")
    return RIGHT


def _parquet(draw: random.Random, folder: Path) -> str:
    import pyarrow
    from pyarrow import parquet as reader

    content = damage.in_bytes(draw, parquet(), [b"PAR1" * 9, mixed_csv().encode()])
    path = folder / "t.parquet"
    path.write_bytes(content)

    def read() -> Any:
        file = table_file(path)
        kinds = {name: kind for name, kind in file.kinds().items() if kind != "empty"}
        return kinds, list(file.chunks(kinds))

    found = attempt(read)
    if isinstance(found, Refused):
        return REFUSED
    kinds, chunks = found
    try:
        whole = reader.read_table(path, use_threads=False)
    except (pyarrow.ArrowException, OSError):
        return REFUSED  # which only reading all of it at once finds out
    for name, kind in kinds.items():
        if kind == "number":
            made = np.concatenate([chunk.columns[name] for chunk in chunks]) if chunks else np.zeros(0)
            expected = whole.column(name).cast(pyarrow.float64(), safe=False).to_numpy(zero_copy_only=False)
            require(same(made, np.asarray(expected)), f"column {name!r} holds other numbers than the file")
    return RIGHT


# Events


@cache
def event_texts() -> dict[str, str]:
    """Events in every text format: sequences of users, as rows and as records."""
    draw = random.Random(2)
    sequences = []
    for _ in range(8):
        at, times = 0.0, []
        for _ in range(6):
            at += draw.expovariate(1.0)
            times.append(at)
        sequences.append((times, [draw.randrange(3) for _ in times]))
    lines = sorted(
        (t, u, m) for u, (times, marks) in enumerate(sequences) for t, m in zip(times, marks, strict=True)
    )
    records = [
        {"time_since_start": t, "type_event": m, "dim_process": 3, "seq_len": len(t)} for t, m in sequences
    ]
    return {
        "e.csv": "user_id,item_id,timestamp\n" + "".join(f"u{u},{m},{t!r}\n" for t, u, m in lines),
        "e.json": json.dumps(records),
        "e.jsonl": "".join(json.dumps(record) + "\n" for record in records),
    }


def event_file(draw: random.Random, folder: Path) -> str:
    """`EventLog.read` of rows and of records."""
    name = draw.choice(list(event_texts()))
    text = event_texts()[name]
    if name == "e.csv":
        content = changed(draw, text)
    elif draw.random() < 0.5:
        content = damage.in_bytes(
            draw, text.encode(), [numbers_csv().encode(), event_texts()["e.csv"].encode()]
        )
    elif name == "e.json":
        content = json.dumps(damage.in_json(draw, json.loads(text))).encode()
    else:
        records = [json.loads(line) for line in text.splitlines()]
        content = "".join(json.dumps(r) + "\n" for r in damage.in_json(draw, records)).encode()
    path = folder / name
    path.write_bytes(content)
    found = attempt(lambda: EventLog.read(path))
    if isinstance(found, Refused):
        return REFUSED
    times: dict[str, list[float]] = {}
    if name == "e.csv":
        head, *body = cells(content, delimiter_of(content))
        names = [word.strip().lower() for word in head]
        user, time = (names.index(word) for word in ("user_id", "timestamp"))
        for row in body:
            if any(cell.strip() for cell in row) and "-" not in row[time].lstrip("-")[1:5]:
                times.setdefault(row[user].strip(), []).append(float(row[time]))
    else:
        decoded = content.decode()
        records = json.loads(decoded) if decoded.lstrip().startswith("[") else [
            json.loads(line) for line in decoded.splitlines() if line.strip()
        ]  # fmt: skip
        times = {str(i): [float(t) for t in record["time_since_start"]] for i, record in enumerate(records)}
    made = [found.events.times[k, :n].tolist() for k, n in enumerate(found.events.lengths.tolist())]
    require(made == list(times.values()), "the times are not those of the file")
    return RIGHT


def kinds() -> dict[str, Case]:
    """The attacks on files that users give."""
    _ = numbers_csv(), mixed_csv(), parquet(), event_texts()  # before workers are forked
    return {"tables": table, "table files": frame, "event files": event_file}
