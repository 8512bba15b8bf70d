"""The commands that show models to others, or keep their streams, `constmem consume | serve | page`."""

import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

Model = Annotated[str, typer.Argument(help="A folder of a run or model of constant memory, or gp, emnist.")]
StorePath = Annotated[Path, typer.Option("--store", help="The store: an SQLite file, made if missing.")]
Memory = Annotated[int, typer.Option(min=1, help="MB for states in memory.")]
Single = Annotated[bool, typer.Option("--single", help="Keep values in float32 on disk: half the size.")]
Power = Annotated[
    bool, typer.Option("--power/--no-power", help="Outlive a loss of power, too; kills are outlived anyway.")
]


def register(app: typer.Typer) -> None:
    """Add the commands to an application."""
    for command in (consume, serve, page):
        app.command()(command)


def consume(
    model: Model,
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
    import torch

    from constmem.streams import sources
    from constmem.streams.store import Store

    torch.set_num_threads(1)
    stopped: list[Any] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.append(1))
    loaded = sources.load_model(model)
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
    model: Model,
    store: StorePath,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8080,
    token_file: Annotated[
        Path | None, typer.Option(help='JSON: [{"token": ..., "prefix": "ann/", "scopes": ["read"]}].')
    ] = None,
    body: Annotated[int, typer.Option(min=1, help="MB a request may have.")] = 1,
    rows: Annotated[int, typer.Option(min=1, help="Rows, targets or keys of a request.")] = 10_000,
    waiting: Annotated[int, typer.Option(min=1, help="Requests that may wait; more are sent away.")] = 1024,
    streams: Annotated[int, typer.Option(min=1, help="Streams the store may hold.")] = 10_000_000,
    seconds: Annotated[float, typer.Option(min=0.1, help="For a body to arrive, and for an answer.")] = 30.0,
    memory: Memory = 256,
    single: Single = False,
    power: Power = True,
) -> None:
    """Serve streams by key over HTTP; what was acknowledged is on disk.

    constmem serve gp --store db.sqlite --port 8080 --token-file tokens.json
    """
    if token_file is None and host not in ("127.0.0.1", "localhost", "::1"):
        raise ValueError(f"anybody who reaches {host} could change the streams: give --token-file")
    import torch

    try:
        from constmem.serve import Limits, Tokens
        from constmem.serve.service import Service, run
    except ImportError as error:
        raise ImportError(f'{error}: pip install "constmem[serve]"') from error
    from constmem.serve.page import write_page
    from constmem.streams.sources import load_model
    from constmem.streams.store import Store

    torch.set_num_threads(1)
    tokens = None if token_file is None else Tokens.load(token_file)
    limits = Limits(body=body << 20, rows=rows, waiting=waiting, streams=streams, seconds=seconds)
    kept = Store(store, load_model(model), memory=memory << 20, single=single, power=power)
    print(f"{len(kept):,} streams in {store}; listening at http://{host}:{port}, see /docs", flush=True)
    with TemporaryDirectory(prefix="constmem-page-") as folder:
        shown = write_page(Path(folder))
        run(Service(kept, tokens=tokens, limits=limits, page=shown), host, port)


def page(
    out: Annotated[Path | None, typer.Option(help="Write it to this folder, for any web server.")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Else show it there; 0: any free one.")] = 8000,
) -> None:
    """A page that learns in the browser: a digit's pixels, a curve's points; nothing leaves it."""
    from constmem.serve.page import show_page, write_page

    if out is None:
        show_page(port)
    else:
        print(f"wrote {write_page(out)}: hand out this folder by any web server")
