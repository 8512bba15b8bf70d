"""The commands on one's own data: a table, streams by key, and models taken elsewhere."""

import json
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from constmem.tabular.commands import Outcome

Table = Annotated[Path, typer.Argument(help="A .csv, .tsv or .parquet file.")]
Model = Annotated[Path, typer.Argument(help="A model that `constmem fit` wrote.")]
Replace = Annotated[bool, typer.Option("--replace", help="Write over what is there.")]
Weights = Annotated[str, typer.Argument(help="A folder of a run or model of constant memory, or gp, emnist.")]
StorePath = Annotated[Path, typer.Option("--store", help="The store: an SQLite file, made if missing.")]
Memory = Annotated[int, typer.Option(min=1, help="MB for states in memory.")]
Single = Annotated[bool, typer.Option("--single", help="Keep values in float32 on disk: half the size.")]
Power = Annotated[
    bool, typer.Option("--power/--no-power", help="Outlive a loss of power, too; kills are outlived anyway.")
]


def register(app: typer.Typer) -> None:
    """Add the commands to an application."""
    for command in (fit, update, predict, score, consume, serve, page, export):
        app.command()(command)


def fit(
    table: Table,
    target: Annotated[str, typer.Option(help="The column to predict; several: a,b.")],
    out: Annotated[Path, typer.Option(help="The model's file.")],
    task: Annotated[
        str, typer.Option(help="regression, classification, or auto: classes where the target is text.")
    ] = "auto",
    ignore: Annotated[str, typer.Option(help="Columns to leave out, a,b.")] = "",
    forget: Annotated[
        str | None, typer.Option(help="A half-life in rows, window:ROWS, or auto; nothing if not given.")
    ] = None,
    size: Annotated[int | None, typer.Option(min=16, help="Number of features.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the features.")] = 0,
    replace: Replace = False,
) -> None:
    """Learn to predict a column of a table from the others: closed form, any number of rows.

    constmem fit houses.csv --target price --out houses.model
    """
    from constmem.tabular.commands import fit_file

    with _reading("fitting", table) as report:
        done = fit_file(
            table, out, _listed(target), task=task, ignore=_listed(ignore), replace=replace, report=report,
            forget=_number(forget), size=size, random_state=seed,
        )  # fmt: skip
    _say(done, f"{done.task} of {target} learned from", out)
    if done.task == "regression" and task == "auto":
        print("numbers are predicted; give --task classification if they name classes")
    print(f"next: constmem predict {out} NEW.csv --out predicted.csv; constmem update {out} MORE.csv")


def update(
    model: Model,
    table: Table,
    out: Annotated[Path | None, typer.Option(help="Write here, and leave the model as it is.")] = None,
    replace: Replace = False,
) -> None:
    """Learn more rows: as if the model had seen them with the first."""
    from constmem.data.rows import free
    from constmem.tabular.commands import update_file

    if out is not None:
        free(out, replace=replace)
    with _reading("learning", table) as report:
        done = update_file(model, table, out or model, report=report)
    _say(done, "learned", out or model)


def predict(
    model: Model,
    table: Table,
    out: Annotated[
        Path, typer.Option(help="A .csv, .tsv or .parquet file: the table's columns, and predictions.")
    ],
    quantiles: Annotated[str, typer.Option(help="Of numbers, between 0 and 1.")] = "0.05,0.5,0.95",
    replace: Replace = False,
) -> None:
    """Predict every row: mean, deviation and quantiles, or classes and their probabilities."""
    from constmem.tabular.commands import predict_file

    try:
        levels = [float(level) for level in _listed(quantiles)]
    except ValueError as error:
        raise ValueError(f"--quantiles {quantiles}: give numbers between 0 and 1, such as 0.1,0.9") from error
    with _reading("predicting", table) as report:
        done = predict_file(model, table, out, quantiles=levels, replace=replace, report=report)
    _say(done, "predicted", out)


def score(
    model: Model, table: Table, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """How well the model predicts rows whose target is known."""
    from constmem.tabular.commands import score_file

    with _reading("scoring", table) as report:
        done = score_file(model, table, report=report)
    if as_json:
        print(json.dumps({"rows": done.rows, **done.scores}))
        return
    for name, value in {"rows": done.rows, **done.scores}.items():
        print(f"{name.replace('_', ' '):30} {value:.6g}")
    _left_out(done)


def _reading(doing: str, table: Path) -> AbstractContextManager[Callable[[int, int], None]]:
    """Progress through a table: a file of text is counted in bytes, as nobody knows its rows."""
    from constmem.core.costs import counted

    return counted(f"{doing} {table}, {'rows' if table.suffix.lower() == '.parquet' else 'bytes'}")


def _listed(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def _number(forget: str | None) -> float | str | None:
    try:
        return None if forget is None else float(forget)
    except ValueError:
        return forget


def _say(done: "Outcome", words: str, out: Path) -> None:
    size = out.stat().st_size
    shown = f"{size / 1e6:.2f} MB" if size >= 10_000 else f"{size:,} bytes"
    print(f"{words} {done.rows:,} rows: {out} ({shown})")
    _left_out(done)


def _left_out(done: "Outcome") -> None:
    if done.left_out:
        print(f"warning: {done.left_out:,} rows without a target were left out", file=sys.stderr)


def consume(
    model: Weights,
    store: StorePath,
    redis: Annotated[str | None, typer.Option(help="Address of a Redis, redis://localhost:6379.")] = None,
    stream: Annotated[str | None, typer.Option(help="Of Redis: the name of the stream.")] = None,
    source: Annotated[
        str | None, typer.Option(help="The name its position is remembered by; lines, or redis:STREAM.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, max=65536, help="Rows a transaction.")] = 512,
    skip: Annotated[bool, typer.Option("--skip", help="Leave out bad rows, and go on.")] = False,
    idle: Annotated[float | None, typer.Option(help="Of Redis: end after so many idle seconds.")] = None,
    memory: Memory = 256,
    single: Single = False,
    power: Power = True,
) -> None:
    """Take rows into a store exactly once: JSON lines of standard input, or a Redis stream.

    constmem consume gp --store db.sqlite < rows.jsonl

    A row is {"key": "ann", "x": 0.5, "y": 1.0}, of events {"key": "ann", "time": 12.5, "mark": 0}.
    """
    if (redis is None) is not (stream is None):
        raise ValueError("--redis and --stream go together: give both, or neither for standard input")
    if redis is None and sys.stdin is None:
        raise ValueError("standard input is closed, and no --redis is given: pass rows, as in < rows.jsonl")
    import torch

    from constmem.streams import load_model, sources
    from constmem.streams.store import Store

    torch.set_num_threads(1)
    stopped: list[Any] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.append(1))
    loaded = load_model(model)
    with Store(store, loaded, memory=memory << 20, single=single, power=power) as kept:
        name = source or ("lines" if stream is None else f"redis:{stream}")
        consumer = sources.Consumer(kept, name, skip=skip, report=lambda text: print(text, file=sys.stderr))
        try:
            if redis is None or stream is None:
                sources.consume_lines(consumer, sys.stdin.fileno(), batch=batch, stop=lambda: bool(stopped))
            else:
                options: Any = {"batch": batch, "idle": idle, "stop": lambda: bool(stopped)}
                sources.consume_redis(consumer, redis, stream, **options)
        finally:
            left_out = f", {consumer.skipped:,} left out" if consumer.skipped else ""
            print(f"{consumer.taken:,} rows taken{left_out}; {len(kept):,} streams in {store}")


def serve(
    model: Weights,
    store: StorePath,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8080,
    token_file: Annotated[
        Path | None, typer.Option(help='JSON: [{"token": ..., "prefix": "ann/", "scopes": ["read"]}].')
    ] = None,
    body: Annotated[int, typer.Option(min=1, help="MB a request may have.")] = 1,
    rows: Annotated[int, typer.Option(min=1, help="Rows, targets or keys of a request.")] = 10_000,
    waiting: Annotated[int, typer.Option(min=1, help="Requests that may wait; more are refused.")] = 1024,
    streams: Annotated[int, typer.Option(min=1, help="Streams the store may hold.")] = 10_000_000,
    seconds: Annotated[float, typer.Option(min=0.1, help="For a body to arrive, and for an answer.")] = 30.0,
    memory: Memory = 256,
    single: Single = False,
    power: Power = True,
) -> None:
    """Serve streams by key over HTTP; what was acknowledged is on disk.

    constmem serve gp --store db.sqlite --port 8080 --token-file tokens.json
    """
    from constmem.serve import OWN, Tokens
    from constmem.serve.batches import Limits

    if token_file is None and host not in OWN:
        raise ValueError(f"anybody who reaches {host} could change the streams: give --token-file")
    import torch

    from constmem.core.checks import extra
    from constmem.serve.page import write_page
    from constmem.streams import load_model
    from constmem.streams.store import Store

    with extra("serve", "serving needs more packages"):
        from constmem.serve.service import Service, run
    torch.set_num_threads(1)
    tokens = None if token_file is None else Tokens.load(token_file)
    limits = Limits(body=body << 20, rows=rows, waiting=waiting, streams=streams, seconds=seconds)
    kept = Store(store, load_model(model), memory=memory << 20, single=single, power=power)

    def ready(port: int) -> None:
        where = f"http://{host}:{port}"
        print(f"{len(kept):,} streams in {store}; listening at {where}, see /docs", flush=True)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # when all is answered: so that no folder is left
    with TemporaryDirectory(prefix="constmem-page-") as folder:
        shown = write_page(Path(folder))
        run(Service(kept, tokens=tokens, limits=limits, page=shown), host, port, ready)


def page(
    out: Annotated[Path | None, typer.Option(help="Write it to this folder, for any web server.")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Else show it there; 0: any free one.")] = 8000,
) -> None:
    """A page that learns in the browser: a digit's pixels, a curve's points; nothing leaves it."""
    from constmem.serve.page import show_page, write_page

    if out is None:
        show_page(port)
    else:
        print(f"wrote {write_page(out)}: any web server can serve this folder")


def export(
    model: Annotated[str, typer.Argument(help="A folder of a model, emnist, gp, or an estimator's file.")],
    out: Annotated[Path, typer.Option(help="Folder to write to.")],
    to: Annotated[str, typer.Option(help="onnx.")] = "onnx",
    half: Annotated[bool, typer.Option("--half", help="Weights as float16: half the size.")] = False,
) -> None:
    """Write a model for use without PyTorch: ONNX graphs, and a runner on onnxruntime and numpy.

    Models are CMANP, CMHP, and what `constmem fit` wrote of a table.

    constmem export emnist --to onnx --out digits
    """
    if to != "onnx":
        raise ValueError(f"models are exported to onnx, not to {to!r}: give --to onnx")
    from constmem.integrations.onnx import export_named

    export_named(model, out, half=half)
    print(f"wrote {out}\nnext, in that folder: import constmem_runner, which says how in its first lines")
