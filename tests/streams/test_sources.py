"""Rows from lines and from Redis: each is taken once, however often the consumer is killed."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from constmem import Store
from constmem.cli.commands import consume
from constmem.streams import load_model, sources
from constmem.streams.sources import BadRowError, Consumer, consume_lines, consume_redis
from tests.laws import models as small_models
from tests.streams.made import built
from tests.streams.test_store import MODEL, alone, killed, require_same, rows

SERVER = shutil.which("redis-server")
needs_redis = pytest.mark.skipif(SERVER is None, reason="there is no redis-server here")


def lines_of(names: list[str], x: Any, y: Any) -> bytes:
    made = ({"key": k, "x": a.item(), "y": b.item()} for k, a, b in zip(names, x, y, strict=True))
    return b"".join(json.dumps(row).encode() + b"\n" for row in made)


def take(store: Store, text: bytes, tmp_path: Path, **options: Any) -> Consumer:
    path = tmp_path / "lines"
    path.write_bytes(text)
    reports: list[str] = []
    consumer = Consumer(store, "lines", report=reports.append, **options)
    handle = os.open(path, os.O_RDONLY)
    try:
        consume_lines(consumer, handle, batch=7)
    finally:
        os.close(handle)
        consumer.reports = reports  # type: ignore[attr-defined]
    return consumer


def test_lines_are_taken_once_and_more_of_them_go_on(tmp_path: Path) -> None:
    names, x, y = rows(60, 9)
    text = lines_of(names, x, y)
    cut = text.index(b"\n", len(text) // 2) + 1
    with Store(tmp_path / "s", MODEL) as store:
        assert take(store, text[:cut], tmp_path).taken < 60
        assert take(store, text[:cut], tmp_path).taken == 0
        take(store, text[:-1] + b"\n\n", tmp_path)
        require_same(store, alone(MODEL, names, x, y))
        with pytest.raises(ValueError, match="not the lines"):
            take(store, text.replace(b"k1", b"k2", 1), tmp_path)
        with pytest.raises(ValueError, match="only"):
            take(store, text[:99], tmp_path)
        require_same(store, alone(MODEL, names, x, y))


BAD = [
    b"no json",
    b"[1, 2]",
    b'{"key": "a", "x": 1}',
    b'{"key": "a", "x": 1, "y": "2"}',
    b'{"key": "a", "x": 1, "y": NaN}',
    b'{"key": "a", "x": 1, "y": 1e999}',
    b'{"key": "a", "x": [1, 2], "y": 1}',
    b'{"key": true, "x": 1, "y": 1}',
    b'{"key": "a", "x": 1, "y": 1, "z": 1}',
    b'{"key": "' + b"k" * 2000 + b'", "x": 1, "y": 1}',
    b"[" * 100_000,
    b"\xff\xfe",
    b'{"key": "a", "x": 1' + b"0" * 400 + b', "y": 1}',  # more than a float holds
]


@pytest.mark.parametrize("bad", BAD, ids=range(len(BAD)))
def test_a_bad_line_ends_it_with_its_number_or_is_left_out(bad: bytes, tmp_path: Path) -> None:
    names, x, y = rows(20, 5)
    lines = lines_of(names, x, y).splitlines()
    text = b"\n".join([*lines[:10], bad, *lines[10:]]) + b"\n"
    with Store(tmp_path / "s", MODEL) as store:
        with pytest.raises(BadRowError, match=r"lines at 11: "):
            take(store, text, tmp_path)
        require_same(store, alone(MODEL, names[:10], x[:10], y[:10]))
        consumer = take(store, text, tmp_path, skip=True)
        assert (consumer.taken, consumer.skipped) == (10, 1)
        require_same(store, alone(MODEL, names, x, y))


def test_a_line_that_is_no_json_is_called_so(tmp_path: Path) -> None:
    with (
        Store(tmp_path / "s", MODEL) as store,
        pytest.raises(BadRowError, match=r"^lines at 1: this is not JSON: Expecting value"),
    ):
        take(store, b"key,x,y\n", tmp_path)


def test_a_damaged_store_ends_it_where_bad_rows_are_left_out_too(tmp_path: Path) -> None:
    names, x, y = rows(20, 5)
    with Store(tmp_path / "s", MODEL) as store:
        store._database._sqlite.execute("drop table sources")
        with pytest.raises(ValueError, match="is damaged: no such table: sources"):
            take(store, lines_of(names, x, y), tmp_path, skip=True)


def test_an_event_out_of_order_is_found_among_others(tmp_path: Path) -> None:
    model = small_models.small("cmhp")
    times = [1.0, 2.0, 3.0, 2.5, 4.0, 5.0]
    text = b"".join(json.dumps({"key": "a", "time": t, "mark": 1}).encode() + b"\n" for t in times)
    with Store(tmp_path / "s", model) as store:
        with pytest.raises(BadRowError, match=r"lines at 4: event 0 .*before"):
            take(store, text, tmp_path)
        assert store.count(["a"]).item() == 3
        assert take(store, text, tmp_path, skip=True).skipped == 1
        assert store.count(["a"]).item() == 5


def kill_lines(folder: Path, times: int, seed: int) -> int:
    """A consumer of lines is killed again and again; how often before it was done."""
    names, x, y = rows(1200, 60, seed)
    draw, at_work, path = random.Random(seed), 0, folder / "s"
    (folder / "lines").write_bytes(lines_of(names, x, y))

    def work(_: Any) -> None:
        with Store(path, MODEL, memory=1, journal=50, power=False) as store:
            handle = os.open(folder / "lines", os.O_RDONLY)
            consume_lines(Consumer(store, "lines", report=str), handle, batch=draw.randint(1, 20))

    for _ in range(times):
        killed(work, draw.random() * 0.1)
        draw.random()
        with Store(path, MODEL) as store:
            done = int(str(store.position("lines") or "0").split()[0])
            at_work += done < 1200
            require_same(store, alone(MODEL, names[:done], x[:done], y[:done]))
        if done == 1200:
            path.unlink()
    with Store(path, MODEL) as store:
        take(store, lines_of(names, x, y), folder)
        require_same(store, alone(MODEL, names, x, y))
    return at_work


def test_a_consumer_of_lines_that_is_killed_goes_on_bit_for_bit(tmp_path: Path) -> None:
    assert kill_lines(tmp_path, 8, seed=0) > 3


def test_the_command_takes_lines_of_a_pipe(tmp_path: Path) -> None:
    built().save_pretrained(tmp_path / "model")
    names, x, y = rows(30, 4)
    run = [sys.executable, "-c", "from constmem.cli import main; main()"]
    command = [*run, "consume", tmp_path / "model", "--store", tmp_path / "s"]
    done = subprocess.run(command, input=lines_of(names, x, y), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert b"30 rows taken" in done.stdout
    with Store(tmp_path / "s", MODEL) as store:
        require_same(store, alone(MODEL, names, x, y))


def test_a_value_of_lists_in_lists_is_shown_in_short() -> None:
    deep: Any = []
    for _ in range(sys.getrecursionlimit() + 100):
        deep = [deep]
    with pytest.raises(ValueError, match=r"^x holds \[+\.\.\.\]+, which is no number$"):
        sources.numbers("x", deep, 1)


def test_a_source_of_another_kind_is_named_as_such(tmp_path: Path) -> None:
    with Store(tmp_path / "s", MODEL) as store:
        store.observe(["a"], [0.0], [0.0], source="lines", position="1526919030474-55")
        with pytest.raises(ValueError, match=r"'lines' is something else.*another --source"):
            take(store, b"", tmp_path)
        store.observe(["a"], [0.0], [0.0], source="redis", position="3 aa12")
        with pytest.raises(ValueError, match=r"'redis' is something else.*another --source"):
            consume_redis(Consumer(store, "redis"), "redis://localhost:1", "s", idle=0.0)


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    assert SERVER is not None
    socket = folder / "redis.sock"
    options = ["--port", "0", "--unixsocket", socket, "--dir", folder, "--appendonly", "yes", "--save", ""]
    process = subprocess.Popen([SERVER, *map(str, options)], stdout=subprocess.DEVNULL)
    import redis

    with redis.Redis(unix_socket_path=str(socket)) as client:
        while True:  # it loads first what it had
            try:
                client.ping()
                break
            except redis.ConnectionError:
                time.sleep(0.02)
    yield f"unix://{socket}"
    process.terminate()
    process.wait()


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    with redis_server(tmp_path) as url:
        yield url


def fill(url: str, names: list[str], x: Any, y: Any) -> None:
    import redis

    with redis.Redis.from_url(url) as client:
        for i, (key, a, b) in enumerate(zip(names, x, y, strict=True)):
            row = {"key": key, "x": a.item(), "y": b.item()}
            fields: dict[Any, Any] = {"key": key, "x": json.dumps(row["x"]), "y": json.dumps(row["y"])}
            client.xadd("s", fields if i % 2 else {"row": json.dumps(row)})


def kill_redis(folder: Path, url: str, times: int, seed: int) -> int:
    """A consumer of Redis is killed again and again; how often before it was done."""
    names, x, y = rows(800, 60, seed)
    fill(url, names, x, y)
    draw, at_work, path = random.Random(seed), 0, folder / "s"

    def work(_: Any) -> None:
        with Store(path, MODEL, memory=1, journal=50, power=False) as store:
            consume_redis(Consumer(store, "redis", report=str), url, "s", batch=draw.randint(1, 20), idle=60)

    for _ in range(times):
        killed(work, draw.random() * 0.1)
        draw.random()
        with Store(path, MODEL) as store:
            done = int(store.count(store.keys()).sum()) if len(store) else 0
            at_work += done < 800
            require_same(store, alone(MODEL, names[:done], x[:done], y[:done]))
        if done == 800:
            path.unlink()
    with Store(path, MODEL) as store:
        consume_redis(Consumer(store, "redis"), url, "s", idle=0.0)
        require_same(store, alone(MODEL, names, x, y))
    return at_work


@needs_redis
def test_a_consumer_of_redis_that_is_killed_goes_on_bit_for_bit(tmp_path: Path, redis_url: str) -> None:
    assert kill_redis(tmp_path, redis_url, 6, seed=1) > 2


@needs_redis
def test_redis_may_be_gone_and_come_back_but_not_begin_anew(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import redis

    names, x, y = rows(20, 3)
    fill(redis_url, names[:10], x[:10], y[:10])
    real, calls = redis.Redis.xread, []

    def sometimes(self: Any, *given: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) in (1, 3, 4):
            raise redis.ConnectionError("gone")
        if len(calls) == 5:
            fill(redis_url, names[10:], x[10:], y[10:])
        return real(self, *given, **options)

    monkeypatch.setattr(redis.Redis, "xread", sometimes)
    monkeypatch.setattr(sources.time, "sleep", lambda _: None)
    reports: list[str] = []
    with Store(tmp_path / "s", MODEL) as store:
        consumer = Consumer(store, "redis", report=reports.append)
        consume_redis(consumer, redis_url, "s", batch=10, stop=lambda: consumer.taken >= 20)
        require_same(store, alone(MODEL, names, x, y))
        assert len(reports) == 3
        assert "gone" in reports[0]
        with redis.Redis.from_url(redis_url) as client:
            client.delete("s")
            client.xadd("s", {"row": "{}"}, id="5-5")
        with pytest.raises(ValueError, match="created again"):
            consume_redis(Consumer(store, "redis"), redis_url, "s", idle=0.0)
        with pytest.raises(BadRowError, match="other at 5-5"):
            consume_redis(Consumer(store, "other"), redis_url, "s", idle=0.0)


@needs_redis
def test_entries_that_redis_trimmed_before_they_were_taken_are_reported(
    tmp_path: Path, redis_url: str
) -> None:
    import redis

    names, x, y = rows(20, 3)
    fill(redis_url, names[:10], x[:10], y[:10])
    reports: list[str] = []
    with Store(tmp_path / "s", MODEL) as store, redis.Redis.from_url(redis_url) as client:
        consumer = Consumer(store, "redis", report=reports.append)
        consume_redis(consumer, redis_url, "s", idle=0.0)
        client.xtrim("s", 3, approximate=False)  # entries that were taken
        fill(redis_url, names[10:], x[10:], y[10:])
        consume_redis(consumer, redis_url, "s", idle=0.0)
        assert (consumer.taken, reports) == (20, [])
        fill(redis_url, names[:10], x[:10], y[:10])
        client.xtrim("s", 4, approximate=False)
        consume_redis(consumer, redis_url, "s", idle=0.0)
        assert consumer.taken == 24
        assert "may have been deleted, and not taken" in reports[0]


@needs_redis
def test_a_wrong_password_ends_it_and_stands_in_no_message(tmp_path: Path, redis_url: str) -> None:
    import redis

    with Store(tmp_path / "s", MODEL) as store, redis.Redis.from_url(redis_url) as client:
        client.config_set("requirepass", "right")
        for url in (redis_url, redis_url.replace("unix://", "unix://:wrong@")):
            with pytest.raises(ValueError, match="refuses to read 's'"):
                consume_redis(Consumer(store, "redis"), url, "s", idle=0.0)
        reports: list[str] = []
        with pytest.raises(OSError, match="does not answer") as caught:
            consume_redis(
                Consumer(store, "redis", report=reports.append), "redis://:wrong@localhost:1", "s", idle=0.0
            )
        assert "wrong" not in f"{caught.value}{reports}"


def test_a_stop_is_heard_while_redis_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[str] = []
    slept: list[float] = []
    monkeypatch.setattr(sources.time, "sleep", slept.append)
    with Store(tmp_path / "s", MODEL) as store:
        consumer = Consumer(store, "redis", report=reports.append)
        consume_redis(consumer, "redis://localhost:1", "s", stop=lambda: len(slept) >= 7)
    assert len(reports) == 2
    assert len(slept) == 7
    assert max(slept) < 1


@needs_redis
def test_a_redis_that_was_stopped_and_started_again_is_read_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, x, y = rows(20, 3)
    reports: list[str] = []
    wait = time.sleep
    monkeypatch.setattr(sources.time, "sleep", lambda _: wait(0.01))
    with Store(tmp_path / "s", MODEL) as store:
        consumer = Consumer(store, "redis", report=reports.append)
        with redis_server(tmp_path) as url:
            fill(url, names[:10], x[:10], y[:10])
            work = Thread(target=consume_redis, args=(consumer, url, "s"),
                          kwargs={"batch": 4, "stop": lambda: consumer.taken >= 20})  # fmt: skip
            work.start()
            while consumer.taken < 10:
                wait(0.01)
        while not reports:
            wait(0.01)
        with redis_server(tmp_path) as url:
            fill(url, names[10:], x[10:], y[10:])
            work.join(60)
        assert not work.is_alive()
        assert "does not answer" in reports[0]
        require_same(store, alone(MODEL, names, x, y))


def test_models_of_both_kinds_load_by_folder(tmp_path: Path) -> None:
    for kind in ("cmanp", "cmhp"):
        small_models.small(kind).save_pretrained(tmp_path / kind)
        assert load_model(tmp_path / kind).name == kind
    assert load_model("gp").name == "cmanp"
    with pytest.raises(FileNotFoundError):
        load_model(tmp_path)


def test_a_closed_standard_input_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ValueError, match="standard input is closed"):
        consume("gp", tmp_path / "store")
    assert not (tmp_path / "store").exists()
