"""The service under load: requests a second over 64 connections, latency at half load, bulk, memory.

python benchmarks/service.py [--seconds 10] [--part observe,predict,half,bulk,soak] [--requests 1000000]

Server and client are processes of one machine and share its cores. The model is small (a state of 9 kB), the
streams are 1,000, every observe is one row, and on disk before it is answered; a predict is of one target.
Half load is 2,000 observes or 600 predicts a second, at an even pace. The soak mixes observes and predicts,
as many of each, with one request in twenty of everything else (bulk, count, keys, merge, fork, delete), until
so many --requests were answered; its service has memory for half of the streams.
Rows go to results/service.json as they come, of the soak after each hundredth of it; those of the same part
are replaced.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from record import RESULTS, Row, provenance, save

from constmem import CMANP

CONNECTIONS, KEYS, FORKS = 64, 1000, 400
SMALL: dict[str, Any] = {"dim_x": 1, "dim_y": 1, "dim": 32, "depth": 2, "num_slots": 16, "num_latents": 16}
HALF = {"observe": 2000, "predict": 600}
PARTS = ("observe", "predict", "half", "bulk", "soak")
FEW = "5"  # MB, for half of the streams
Request = bytes | Callable[[], bytes]


class Connection(asyncio.Protocol):
    """One connection that sends a request at a time; `bytes` in, the status and the seconds out."""

    def connection_made(self, transport: Any) -> None:
        self.transport, self.text = transport, b""

    def data_received(self, data: bytes) -> None:
        self.text += data
        head, found, rest = self.text.partition(b"\r\n\r\n")
        if found:
            length = int(head.lower().rpartition(b"content-length: ")[2].split(b"\r\n")[0])
            if len(rest) >= length:
                self.text = b""
                self.done.set_result(int(head[9:12]))

    async def ask(self, request: bytes) -> int:
        self.done = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        status: int = await self.done
        return status


def request(verb: str, body: Any) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST /v1/{verb} HTTP/1.1\r\nhost: a\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode() + content


def observe(draw: random.Random) -> bytes:
    return request("observe", {"key": f"k{draw.randrange(KEYS)}", "x": draw.random(), "y": draw.random()})


def predict(draw: random.Random) -> bytes:
    return request("predict", {"key": f"k{draw.randrange(KEYS)}", "x": [draw.random()]})


def bulk(draw: random.Random) -> bytes:
    keys = [f"k{draw.randrange(KEYS)}" for _ in range(2000)]
    body = {"keys": keys, "x": [draw.random() for _ in keys], "y": [draw.random() for _ in keys]}
    return request("bulk/observe", body)


forks: deque[str] = deque()  # that are there, the oldest first
names = itertools.count()


def fork(draw: random.Random) -> Request:
    """A new stream; once there are some hundred, the oldest of them is deleted in turns."""
    key = f"k{draw.randrange(KEYS)}"

    def chosen() -> bytes:
        if len(forks) > FORKS:
            return request("delete", {"key": forks.popleft()})
        forks.append(f"fork{next(names)}")
        return request("fork", {"key": key, "to": forks[-1]})

    return chosen


def other(draw: random.Random) -> Request:
    """Any of the rarer verbs."""
    one, two = (f"k{i}" for i in draw.sample(range(KEYS), 2))
    some = [f"k{draw.randrange(KEYS)}" for _ in range(20)]
    numbers = [draw.random() for _ in some]
    made = [
        request("bulk/observe", {"keys": some, "x": numbers, "y": numbers}),
        request("bulk/predict", {"keys": some, "x": [[x] for x in numbers]}),
        request("count", {"key": one}),
        request("merge", {"key": one, "other": two}),
        request("keys", {"prefix": "k1", "most": 20}),
        fork(draw),
        fork(draw),
    ]
    return draw.choice(made)


def mixed(draw: random.Random) -> Request:
    return other(draw) if draw.random() < 0.05 else (observe if draw.random() < 0.5 else predict)(draw)


VERBS: dict[str, Callable[[random.Random], Request]] = {
    "observe": observe, "predict": predict, "bulk": bulk, "mixed": mixed,
}  # fmt: skip


async def load(
    port: int, verb: str, seconds: float, *, rate: float | None = None, most: int = CONNECTIONS,
    requests: float = float("inf"),
) -> Row:  # fmt: skip
    """Requests of one kind by as many connections, as fast as they are answered, or at an even pace.

    It ends after so many seconds, or requests.
    """
    loop, draw = asyncio.get_running_loop(), random.Random(0)
    ready = [VERBS[verb](draw) for _ in range(20 if verb == "bulk" else 2000)]
    links = [(await loop.create_connection(Connection, "127.0.0.1", port))[1] for _ in range(most)]
    spent: list[float] = []
    bad = 0
    start = time.perf_counter()

    async def one(link: Any, number: int) -> None:
        nonlocal bad
        step = 0
        while (now := time.perf_counter()) < start + seconds and step * most + number < requests:
            due = now
            if rate is not None:
                due = start + (step * most + number) / rate
                if due > now:
                    await asyncio.sleep(due - now)
            asked = ready[(step * most + number) % len(ready)]
            status = await link.ask(asked() if callable(asked) else asked)
            spent.append(time.perf_counter() - due)  # waiting for its turn included
            bad += status != 200
            step += 1

    await asyncio.gather(*(one(link, number) for number, link in enumerate(links)))
    wall = time.perf_counter() - start
    for link in links:
        link.transport.close()
    spent.sort()
    return {
        "requests": len(spent),
        "failed": bad,
        "requests_a_second": round(len(spent) / wall),
        "p50_ms": round(1e3 * spent[len(spent) // 2], 2),
        "p99_ms": round(1e3 * spent[int(0.99 * len(spent))], 2),
    }


@contextmanager
def served(folder: Path, *words: str) -> Iterator[tuple[int, int]]:
    """A service of a small model, which knows all keys; its port and process."""
    torch.manual_seed(0)
    CMANP(**SMALL).save_pretrained(folder / "model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run = [sys.executable, "-c", "from constmem.cli import main; main()"]
    command = [*run, "serve", folder / "model", "--store", folder / "store", *words]
    process = subprocess.Popen(
        [*map(str, command), "--port", str(port)], env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                if process.poll() is not None:
                    raise SystemExit("the service did not start") from None
                time.sleep(0.1)
        draw = random.Random(1)
        for start in range(0, KEYS, 200):
            keys = [f"k{i}" for i in range(start, start + 200)]
            body = {"keys": keys, "x": [draw.random() for _ in keys], "y": [draw.random() for _ in keys]}
            asyncio.run(first(port, request("bulk/observe", body)))
        yield port, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


async def first(port: int, content: bytes) -> None:
    _, link = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", port)
    assert await link.ask(content) == 200
    link.transport.close()


def used(pid: int) -> float:
    """Seconds of the processor that a process has used."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def resident(pid: int) -> float:
    """MB that a process holds."""
    text = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", text)
    assert found is not None
    return round(int(found[1]) / 1024, 1)


def soak(port: int, pid: int, requests: int) -> Iterator[Row]:
    """Mixed load for long: what the process holds after each hundredth; the row so far each time."""
    start, total, failed = time.perf_counter(), 0, 0
    held = [resident(pid)]
    slowest = 0.0
    while total < requests:
        each = min(max(requests // 100, 1), requests - total)
        row = asyncio.run(load(port, "mixed", float("inf"), requests=each))
        total, failed = total + row["requests"], failed + row["failed"]
        held.append(resident(pid))
        slowest = max(slowest, row["p99_ms"])
        yield {
            "requests": total, "of": requests, "failed": failed,
            "requests_a_second": round(total / (time.perf_counter() - start)), "worst_p99_ms": slowest,
            "resident_mb": held,
        }  # fmt: skip


def measured(part: str, port: int, pid: int, seconds: float) -> Iterator[Row]:
    """The rows of one part."""
    before = used(pid)
    for row in _measured(part, port, seconds):
        now = used(pid)
        yield row | {"server_cpu_us_a_request": round(1e6 * (now - before) / row["requests"])}
        before = now


def _measured(part: str, port: int, seconds: float) -> Iterator[Row]:
    if part == "half":
        for verb, rate in HALF.items():
            yield {"verb": verb, "rate": rate} | asyncio.run(load(port, verb, seconds, rate=rate))
    elif part == "bulk":
        row = asyncio.run(load(port, "bulk", seconds, most=4))
        yield row | {"points_a_second": 2000 * row["requests_a_second"], "rows_a_request": 2000}
    else:
        yield asyncio.run(load(port, part, seconds))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="of each part but soak")
    parser.add_argument("--requests", type=int, default=1_000_000, help="of soak")
    parser.add_argument("--part", default=",".join(PARTS), help=", ".join(PARTS))
    parser.add_argument("--dry", action="store_true", help="print, and write nothing")
    given = parser.parse_args()
    path = RESULTS / "service.json"
    for part in given.part.split(","):
        words = ("--memory", FEW) if part == "soak" else ()
        with tempfile.TemporaryDirectory() as folder, served(Path(folder), *words) as (port, pid):
            rows = json.loads(path.read_text())["rows"] if path.exists() else []
            rows = [row for row in rows if row["part"] != part]
            soaked = part == "soak"
            found = soak(port, pid, given.requests) if soaked else measured(part, port, pid, given.seconds)
            for row in found:
                print(part, json.dumps(row | ({"resident_mb": row["resident_mb"][-1]} if soaked else {})))
                rows = [each for each in rows if not (soaked and each["part"] == part)]  # the row so far
                rows.append({"part": part, **row, "connections": CONNECTIONS, **provenance(0, "random rows")})
                if not given.dry:
                    save("service", rows)


if __name__ == "__main__":
    main()
