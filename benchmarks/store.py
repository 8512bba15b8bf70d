"""The store with a million small streams: read-modify-writes a second, and rows a second from Redis.

python benchmarks/store.py [--streams 1000000] [--rows 100000] [--seconds 300] [--folder .]

States are of 9 kB. First all streams are made, each with one row. Then rows of random streams are taken, in
calls of 512: nearly each needs a state from disk and sends another one back (a read-modify-write). Then as
many come from a real redis-server, which must be installed, by the code of `constmem consume`. Rows are on
disk when they are counted. A part ends after --seconds at the latest, and says how far it came. Rows go to
results/store.json.
"""

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import Row, provenance, save
from service import SMALL, resident

from constmem import CMANP, Store
from constmem.streams.sources import Consumer, consume_redis

TOGETHER = 512
LARGE = 1_000  # streams at the paper's size


def fill(store: Store, streams: int, seconds: float, together: int = 4096) -> Row:
    """Make all streams, each with one row."""
    random, start = np.random.default_rng(0), time.perf_counter()
    made = 0
    while made < streams and time.perf_counter() - start < seconds:
        number = min(together, streams - made)
        names = [f"k{i}" for i in range(made, made + number)]
        store.observe(names, random.random((number, 1)), random.random((number, 1)))
        made += number
    store.flush()
    spent = time.perf_counter() - start
    return {"part": "fill", "streams": made, "streams_a_second": round(made / spent)}


def change(store: Store, rows: int, seconds: float, together: int = TOGETHER) -> Row:
    """Rows of random streams."""
    random, start, taken = np.random.default_rng(1), time.perf_counter(), 0
    slowest = 0.0
    while taken < rows and time.perf_counter() - start < seconds:
        names = [f"k{i}" for i in random.integers(0, len(store), together)]
        began = time.perf_counter()
        store.observe(names, random.random((together, 1)), random.random((together, 1)))
        slowest = max(slowest, time.perf_counter() - began)
        taken += together
    store.flush()
    spent = time.perf_counter() - start
    return {
        "part": "read-modify-write",
        "rows_a_call": together,
        "rows": taken,
        "rows_a_second": round(taken / spent),
        "slowest_call_ms": round(1e3 * slowest),
    }


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """A server of its own, reached by a file."""
    server = shutil.which("redis-server")
    if server is None:
        raise SystemExit("there is no redis-server here: apt-get install redis-server")
    path = folder / "redis.sock"
    options = ["--port", "0", "--unixsocket", path, "--dir", folder, "--save", "", "--appendonly", "no"]
    process = subprocess.Popen([server, *map(str, options)], stdout=subprocess.DEVNULL)
    try:
        while not path.exists():
            time.sleep(0.05)
        yield f"unix://{path}"
    finally:
        process.terminate()
        process.wait()


def from_redis(store: Store, folder: Path, rows: int, seconds: float) -> Row:
    """Rows of random streams, from Redis."""
    import redis

    random = np.random.default_rng(2)
    with redis_server(folder) as url, redis.Redis.from_url(url) as client:
        names, x, y = random.integers(0, len(store), rows), random.random(rows), random.random(rows)
        for first in range(0, rows, 4096):
            pipe = client.pipeline(transaction=False)
            for i in range(first, min(first + 4096, rows)):
                pipe.xadd("rows", {"row": json.dumps({"key": f"k{names[i]}", "x": x[i], "y": y[i]})})
            pipe.execute()
        consumer = Consumer(store, "redis:rows")
        some = np.unique(names)[:TOGETHER]
        keys = [f"k{i}" for i in some]
        before = store.count(keys).numpy()
        start = time.perf_counter()

        def stop() -> bool:
            return consumer.taken >= rows or time.perf_counter() - start > seconds

        consume_redis(consumer, url, "rows", batch=TOGETHER, stop=stop)
        store.flush()
        spent = time.perf_counter() - start
        if consumer.taken == rows:
            came = np.bincount(names)[some]
            assert (store.count(keys).numpy() - before == came).all(), "a row was lost, or taken twice"
    return {"part": "redis", "rows": consumer.taken, "rows_a_second": round(consumer.taken / spent)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=1_000_000)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=300.0, help="of each part, at most")
    parser.add_argument("--folder", default=None, help="where to put the store: about 13 kB a stream")
    parser.add_argument("--memory", type=int, default=256, help="MB for states in memory")
    parser.add_argument("--dry", action="store_true", help="print, and write nothing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = CMANP(**SMALL).eval()
    rows: list[Row] = []

    def keep(row: Row, **more: Any) -> None:
        row |= {"held": len(store), "state_bytes": model.empty(1).nbytes, "memory_mb": given.memory, **more}
        print(json.dumps(row), flush=True)
        rows.append(row | provenance(0, "random rows"))

    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        path = Path(folder) / "store"
        with Store(path, model, memory=given.memory << 20) as store:
            keep(fill(store, given.streams, given.seconds))
            keep(change(store, given.rows, given.seconds))
            keep(
                from_redis(store, Path(folder), given.rows, given.seconds), file_mb=path.stat().st_size >> 20
            )
            print("resident", resident(os.getpid()), "MB")
        model = CMANP(dim_x=1, dim_y=1).eval()
        given.memory = LARGE * model.empty(1).nbytes // 10 >> 20
        for single in (False, True):
            path = Path(folder) / f"large-{single}"
            with Store(path, model, memory=given.memory << 20, single=single) as store:
                fill(store, LARGE, given.seconds, together=32)
                row = change(store, 2 * LARGE, given.seconds, together=32) | {"part": "paper's size"}
                keep(row, single=single, file_mb=path.stat().st_size >> 20)
    if not given.dry:
        save("store", rows)


if __name__ == "__main__":
    main()
