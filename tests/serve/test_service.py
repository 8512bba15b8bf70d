"""The service: what it answers, what it refuses, and that others' streams are never harmed."""

import asyncio
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from constmem import Store
from tests.command import command
from tests.laws import models as small_models
from tests.streams.made import built
from tests.streams.test_store import alone, require_same, rows

pytest.importorskip("fastapi")
uvicorn = pytest.importorskip("uvicorn")
from constmem.serve import Tokens  # noqa: E402
from constmem.serve.batches import Batches, Failure, Limits, Observe, Predict  # noqa: E402
from constmem.serve.service import HEAD, Service, settings  # noqa: E402

MODEL = built()
WRITER, READER, ANN = "writer-0123456789", "reader-0123456789", "ann-0123456789abc"
TOKENS = [
    {"token": WRITER},
    {"token": READER, "scopes": ["read"]},
    {"token": ANN, "prefix": "ann/", "scopes": ["read", "write"]},
]


class Client:
    """Asks a service at a port, as one who holds a token."""

    def __init__(self, port: int, token: str | None = None) -> None:
        self.port, self.token = port, token

    def __call__(self, verb: str, body: Any = None, **fields: Any) -> tuple[int, Any]:
        content = body if isinstance(body, bytes) else json.dumps(fields if body is None else body)
        headers = {} if self.token is None else {"authorization": f"Bearer {self.token}"}
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)) as link:
            link.request("POST", f"/v1/{verb}", content, headers)
            answer = link.getresponse()
            self.wait = answer.getheader("retry-after")
            return answer.status, json.loads(answer.read())

    def get(self, path: str) -> tuple[int, str]:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)) as link:
            link.request("GET", path)
            answer = link.getresponse()
            return answer.status, answer.read().decode()


@contextmanager
def served(path: Path, model: Any = MODEL, **options: Any) -> Iterator[tuple[int, Service]]:
    service = Service(Store(path, model, power=False), **options)
    config = uvicorn.Config(service, log_level="critical", **settings(service))
    server = uvicorn.Server(config)
    listening = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield listening.getsockname()[1], service
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Service]]:
    folder = tmp_path_factory.mktemp("service")
    (folder / "tokens.json").write_text(json.dumps(TOKENS))
    (folder / "tokens.json").chmod(0o600)
    limits = Limits(body=50_000, rows=100, seconds=1.0)
    with served(folder / "s", tokens=Tokens.load(folder / "tokens.json"), limits=limits) as found:
        yield found


@pytest.fixture
def ask(place: tuple[int, Service]) -> Client:
    return Client(place[0], WRITER)


def test_a_stream_is_made_observed_asked_merged_forked_and_deleted(tmp_path: Path) -> None:
    names, x, y = rows(30, 3)
    with served(tmp_path / "s") as (port, _):
        ask = Client(port)
        assert ask("create", key="new") == (200, {"created": 1})
        assert ask("create", key="new")[0] == 409
        for key, a, b in zip(names[:10], x[:10].tolist(), y[:10].tolist(), strict=True):
            assert ask("observe", key=key, x=a[0], y=b) == (200, {"taken": 1})
        body = {"keys": names[10:], "x": x[10:].tolist(), "y": y[10:, 0].tolist()}
        assert ask("bulk/observe", body) == (200, {"taken": 20})
        status, found = ask("predict", key=names[0], x=[0.0, [0.5]])
        expected = alone(MODEL, names, x, y)
        with torch.no_grad():
            told = MODEL.query(expected[names[0]], torch.tensor([[[0.0], [0.5]]]))
        assert status == 200, found
        np.testing.assert_allclose(found["mean"], told.mean[0].numpy(), atol=1e-5)
        np.testing.assert_allclose(found["stddev"], told.stddev[0].numpy(), atol=1e-5)
        status, several = ask("bulk/predict", keys=[names[0], "new"], x=[0.0, 0.5])
        np.testing.assert_allclose(several["mean"][0], found["mean"], atol=1e-6)
        assert ask("fork", key=names[0], to="fork") == (200, {"created": 1})
        assert ask("merge", key="fork", other=names[0]) == (200, {"merged": 1})
        assert ask("count", key="fork")[1]["count"] == 2 * names.count(names[0])
        assert ask("keys") == (200, {"keys": sorted({*names, "fork", "new"})})
        assert ask("delete", key="fork") == (200, {"deleted": 1})
        assert ask("count", key="fork")[0] == 404
    with Store(tmp_path / "s", MODEL) as store:  # it was closed: another process may have it
        require_same(store, expected)


def test_event_models_are_served_too(tmp_path: Path) -> None:
    with served(tmp_path / "s", small_models.small("cmhp")) as (port, _):
        ask = Client(port)
        assert ask("create", key="a", start=1.0)[0] == 200
        assert ask("observe", key="a", time=2.0, mark=1) == (200, {"taken": 1})
        assert ask("bulk/observe", keys=["a", "b"], time=[3.0, 3.0], mark=[0, -1]) == (200, {"taken": 2})
        status, refused = ask("observe", key="a", time=2.5)
        assert status == 422
        assert "the one before it" in refused["error"]["message"]
        assert ask("observe", key="a", time=5.0, mark=7)[0] == 422
        status, found = ask("predict", key="a")
        assert found["last_time"] == 3.0
        assert found["quantiles"] == sorted(found["quantiles"])
        assert sum(found["marks"]) == pytest.approx(1.0)
        assert len(ask("bulk/predict", keys=["a", "b"])[1]["mean"]) == 2


def test_rows_that_are_sent_again_are_taken_once(ask: Client) -> None:
    row = {"key": "once", "x": 1.0, "y": 1.0, "source": "me"}
    assert ask("observe", row | {"position": 1}) == (200, {"taken": 1})
    assert ask("observe", row | {"position": 1}) == (200, {"taken": 0})
    assert ask("observe", row | {"position": 2}) == (200, {"taken": 1})
    other = Client(ask.port, ANN)  # whose sources are its own
    assert other("observe", row | {"key": "ann/x", "position": 1}) == (200, {"taken": 1})
    assert ask("count", key="once")[1] == {"count": 2}
    assert ask("observe", row)[0] == 422
    assert ask("observe", row | {"position": 1, "key": ""})[0] == 422  # bad, though it was taken


def test_tokens_open_what_they_are_for(place: tuple[int, Service]) -> None:
    port = place[0]
    row = {"key": "ann/1", "x": 0.0, "y": 0.0}
    for token in (None, "", "wrong", WRITER[:-1], WRITER + "x", "\xe9"):
        assert Client(port, token)("observe", row)[0] == 401, token
    assert Client(port, ANN)("observe", row) == (200, {"taken": 1})
    assert Client(port, READER)("observe", row)[0] == 403
    assert Client(port, READER)("count", key="ann/1")[0] == 200
    ann = Client(port, ANN)
    assert ann("observe", row | {"key": "bob/1"})[0] == 403
    assert ann("bulk/predict", keys=["ann/1", "bob/1"], x=[0.0])[0] == 403
    assert ann("merge", key="ann/1", other="bob/1")[0] == 403
    assert ann("fork", key="ann/1", to="bob/2")[0] == 403
    assert ann("keys", prefix="")[0] == 403
    assert ann("keys") == (200, {"keys": ["ann/1"]}) or "ann/x" in ann("keys")[1]["keys"]
    with closing(http.client.HTTPConnection("127.0.0.1", port)) as link:
        link.request("POST", "/v1/count", '{"key": "ann/1"}', {"authorization": f"Basic {WRITER}"})
        assert link.getresponse().status == 401


def test_files_of_tokens_that_are_wrong_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    for text, message in (
        ("nothing", "no list"),
        ("[]", "no token"),
        ('[{"token": "short"}]', "guesses"),
        ('[{"token": "long enough 01234", "scopes": ["all"]}]', "scopes"),
        ('[{"token": "long enough 01234", "perfix": "a"}]', "perfix"),
        ('[{"sha256": "12"}]', "digest"),
        ('[{"token": "long enough 01234", "prefix": "a"}, {"token": "long enough 01234"}]', "twice"),
    ):
        path.write_text(text)
        path.chmod(0o600)
        with pytest.raises(ValueError, match=message):
            Tokens.load(path)
    path.write_text(json.dumps(TOKENS))
    path.chmod(0o644)
    with pytest.raises(ValueError, match="everybody"):
        Tokens.load(path)


BAD: list[tuple[str, Any, int]] = [
    ("observe", b"", 400),
    ("observe", b"{", 400),
    ("observe", b"[" * 40_000, 400),
    ("observe", b'{"key": "a", "x": NaN, "y": 1}', 400),
    ("observe", b'{"key": "\xff", "x": 1, "y": 1}', 400),
    ("observe", b'{"key": "\\ud800", "x": 1, "y": 1}', 400),
    ("observe", [], 422),
    ("observe", {"key": "a", "x": 1}, 422),
    ("observe", {"key": "a", "x": "1", "y": 1}, 422),
    ("observe", {"key": "a", "x": True, "y": 1}, 422),
    ("observe", {"key": "a", "x": 1e301, "y": 1}, 422),
    ("observe", {"key": "a", "x": [1, 2], "y": 1}, 422),
    ("observe", {"key": "a", "x": 1, "y": 1, "z": 1}, 422),
    ("observe", {"key": 1, "x": 1, "y": 1}, 422),
    ("observe", {"key": "", "x": 1, "y": 1}, 422),
    ("observe", {"key": "k" * 2000, "x": 1, "y": 1}, 422),
    ("observe", {"key": "k" * 60_000, "x": 1, "y": 1}, 413),
    ("observe", {"key": "a", "x": 1e30, "y": 1}, 422),
    ("observe", {"key": "a", "x": 1, "y": 1, "source": "s", "position": 2**70}, 422),
    ("observe", {"key": "a", "x": 1, "y": 1, "source": "s", "position": True}, 422),
    ("observe", {"key": "a", "x": 1, "y": 1, "source": "s" * 300, "position": 1}, 422),
    ("bulk/observe", {"keys": "ab", "x": [1, 2], "y": [1, 2]}, 422),
    ("bulk/observe", {"keys": ["a", "b"], "x": [1], "y": [1, 2]}, 422),
    ("bulk/observe", {"keys": ["a", "b"], "x": [1, None], "y": [1, 2]}, 422),
    ("bulk/observe", {"keys": ["a", "b"], "x": [1, True], "y": [1, 2]}, 422),
    ("bulk/observe", {"keys": ["a", "b"], "x": [1, 10**400], "y": [1, 2]}, 422),
    ("bulk/observe", {"keys": [], "x": [], "y": []}, 422),
    ("bulk/observe", {"keys": ["a"] * 101, "x": [1] * 101, "y": [1] * 101}, 413),
    ("predict", {"key": "nobody", "x": [1]}, 404),
    ("predict", {"key": "fine", "x": []}, 422),
    ("predict", {"key": "fine", "x": 5}, 422),
    ("predict", {"key": "fine", "x": [0] * 101}, 422),
    ("predict", {"key": "fine", "x": [[[[0]]]]}, 422),
    ("bulk/predict", {"keys": ["fine"] * 60, "x": [0, 1]}, 413),
    ("keys", {"most": 0}, 422),
    ("keys", {"most": "x"}, 422),
    ("merge", {"key": "fine", "other": "nobody"}, 404),
    ("fork", {"key": "fine", "to": "fine"}, 409),
    ("fork", {"key": "is damaged", "to": "is damaged"}, 409),
]


@pytest.mark.parametrize(("verb", "body", "expected"), BAD)
def test_bad_requests_get_a_clear_answer_and_change_nothing(
    verb: str, body: Any, expected: int, ask: Client
) -> None:
    if ask("count", key="fine")[0] == 404:
        ask("observe", key="fine", x=0.5, y=0.5)
        ask("create", key="is damaged")
    before = ask("predict", key="fine", x=[0.0])
    number = len(ask("keys")[1]["keys"])
    status, answer = ask(verb, body)
    if status == 400 and expected == 422:
        expected = 400  # numbers that JSON cannot hold
    assert status == expected, answer
    assert set(answer) == {"error"}
    assert len(answer["error"]["message"]) > 10
    assert "Traceback" not in answer["error"]["message"]
    assert ask("predict", key="fine", x=[0.0]) == before
    assert len(ask("keys")[1]["keys"]) == number


def test_rows_that_are_refused_in_bulk_are_named(ask: Client) -> None:
    keys = [f"bulk {i}" for i in range(9)]
    for y, message in (
        ([0.0] * 6 + ["1"] + [0.0] * 2, "row 6: y holds"),
        ([0.0] * 4 + [1e30] * 5, "row 4: y["),
    ):
        status, found = ask("bulk/observe", keys=keys, x=[0.0] * 9, y=y)
        assert status == 422
        assert found["error"]["message"].startswith(message)
    assert ask("observe", key="one", x=0.0, y="1")[1]["error"]["message"].startswith("y holds")


def test_odd_keys_are_keys(ask: Client) -> None:
    for key in ("a/b", "a\0b", "../x", "?&#%00", "é\n", "🎈", "k" * 1024):
        assert ask("observe", key=key, x=1.0, y=1.0) == (200, {"taken": 1})
        assert ask("count", key=key) == (200, {"count": 1})
        assert ask("delete", key=key) == (200, {"deleted": 1})


def raw(port: int, text: bytes, *, wait: float = 5.0) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=wait) as link:
        link.sendall(text)
        return link.recv(4096)


def to_the_end(port: int, *texts: bytes) -> bytes:
    """All that is answered, until the service closes the connection; a text every 0.2 seconds."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as link:
        for text in texts:
            try:
                link.sendall(text)
            except OSError:  # it was closed before
                break
            time.sleep(0.2)
        found = b""
        while True:
            try:
                block = link.recv(4096)
            except ConnectionResetError:
                return found
            if not block:
                return found
            found += block


def test_connections_that_send_no_whole_request_are_closed(place: tuple[int, Service]) -> None:
    port, _ = place
    head = f"POST /v1/count HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {WRITER}\r\n".encode()
    assert to_the_end(port) == b""
    assert b" 408 " in to_the_end(port, b"\r\n")
    late = to_the_end(port, head[:30])
    assert late.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert json.loads(late.split(b"\r\n\r\n")[1])["error"]["kind"] == "slow"
    assert b" 408 " in to_the_end(port, *(head[i : i + 1] for i in range(9)))  # a letter now and then
    body = b'{"key": "nobody"}'
    whole = head + b"content-length: %d\r\n\r\n" % len(body) + body
    second = to_the_end(port, whole + head[:30])
    assert b" 404 " in second
    assert b" 408 " in second
    slow = to_the_end(port, head + b"content-length: 900\r\n\r\n", *[b" "] * 20)
    assert slow.count(b"HTTP/1.1") == 1
    assert b" 408 " in slow
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as link:
        for _ in range(8):  # one that works may be slow for longer than one request may
            link.request("POST", "/v1/count", body, {"authorization": f"Bearer {WRITER}"})
            assert link.getresponse().read().startswith(b'{"error":{"kind":"not_found"')
            time.sleep(0.3)


def test_a_head_without_end_is_refused(place: tuple[int, Service]) -> None:
    port, _ = place
    head = b"POST /v1/count HTTP/1.1\r\nhost: a\r\nx: " + b"a" * 2 * HEAD
    assert b" 431 " in to_the_end(port, head)
    fine = (
        b"POST /v1/count HTTP/1.1\r\nhost: a\r\nconnection: close\r\nx: " + b"a" * (HEAD // 2) + b"\r\n\r\n"
    )
    assert b" 401 " in to_the_end(port, fine)
    nonsense = to_the_end(port, b"nonsense\r\n\r\n")
    assert json.loads(nonsense.split(b"\r\n\r\n")[1])["error"]["kind"] == "not_http"


def test_what_is_no_verb_is_an_error_like_others(ask: Client) -> None:
    status, found = ask("observ", key="a")
    assert (status, found["error"]["kind"]) == (404, "not_found")
    assert "bulk/observe" in found["error"]["message"]
    for path, code, kind in (("/nothing", 404, "not_found"), ("/v1/observe/", 404, "not_found")):
        status, text = ask.get(path)
        assert (status, json.loads(text)["error"]["kind"]) == (code, kind)
    assert ask("../health")[0] == 404
    with closing(http.client.HTTPConnection("127.0.0.1", ask.port, timeout=30)) as link:
        link.request("POST", "/health", "{}")
        answer = link.getresponse()
        assert answer.status == 405
        assert "GET" in (answer.getheader("allow") or "")
        assert json.loads(answer.read())["error"]["kind"] == "method"


def test_pages_of_other_sites_may_not_use_a_service_without_tokens(tmp_path: Path) -> None:
    with served(tmp_path / "s") as (port, service):
        for origin, expected in (
            (f"http://127.0.0.1:{port}", 200), (f"http://localhost:{port}", 200), ("http://[::1]", 200),
            ("http://evil.example", 403), ("http://localhost.evil.example", 403), ("null", 403), ("[", 403),
        ):  # fmt: skip
            with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as link:
                body = json.dumps({"key": origin, "x": 1, "y": 1})
                link.request("POST", "/v1/observe", body, {"origin": origin, "content-type": "text/plain"})
                answer = link.getresponse()
                assert answer.status == expected, answer.read()
        assert len(service.store) == 3


def test_what_is_late_says_how_to_find_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(tmp_path / "s", limits=Limits(seconds=0.5)) as (port, service):
        ask, go = Client(port), threading.Event()
        monkeypatch.setattr(service.store, "delete", lambda _: go.wait(20))
        monkeypatch.setattr(service.store, "observe_all", lambda *_: go.wait(20))
        for verb, rest, word in (("delete", {}, "look"), ("observe", {"x": 1, "y": 1}, "send it again")):
            status, answer = ask(verb, key="a", **rest)
            assert (status, answer["error"]["kind"]) == (503, "late")
            assert word in answer["error"]["message"]
            go.set()
            go.clear()


def test_no_token_moves_on_the_source_of_another(tmp_path: Path) -> None:
    known = [
        {"token": f"token-{i}-0123456789", "prefix": prefix} for i, prefix in enumerate(["a", "a:b", "a%3Ab"])
    ]
    (tmp_path / "tokens").write_text(json.dumps(known))
    (tmp_path / "tokens").chmod(0o600)
    with served(tmp_path / "s", tokens=Tokens.load(tmp_path / "tokens")) as (port, _):
        askers = [Client(port, each["token"]) for each in known]
        for ask, key, source in zip(askers, ("a", "a:b", "a%3Ab"), ("b:s", "s", "s"), strict=True):
            row = {"key": key, "x": 1.0, "y": 1.0, "source": source, "position": 9}
            assert ask("observe", row) == (200, {"taken": 1})
            assert ask("observe", row) == (200, {"taken": 0})


def test_sources_are_not_without_number(tmp_path: Path) -> None:
    with served(tmp_path / "s", limits=Limits(streams=3)) as (port, service):
        ask = Client(port)
        for i in range(3):
            assert ask("observe", key="a", x=1, y=1, source=f"s{i}", position=1)[0] == 200
        status, found = ask("observe", key="a", x=1, y=1, source="s3", position=1)
        assert (status, found["error"]["kind"]) == (507, "full")
        assert ask("observe", key="a", x=1, y=1, source="s2", position=2) == (200, {"taken": 1})
        assert ask("observe", key="a", x=1, y=1) == (200, {"taken": 1})
        assert service.store.sources() == 3


def test_a_token_may_have_letters_of_any_language(tmp_path: Path) -> None:
    token = "Schlüssel-für-Änne-1"
    (tmp_path / "tokens").write_text(json.dumps([{"token": token}]))
    (tmp_path / "tokens").chmod(0o600)
    with served(tmp_path / "s", tokens=Tokens.load(tmp_path / "tokens")) as (port, _):
        head = f"GET /v1/count HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {token}\r\n"
        body = b'{"key": "a"}'
        text = head.replace("GET", "POST").encode() + b"content-length: %d\r\n\r\n" % len(body) + body
        assert b" 404 " in raw(port, text)
        assert b" 401 " in raw(port, text.replace("ä".encode(), b"a").replace("ü".encode(), b"u"))


def test_bodies_that_lie_or_never_end_are_answered(place: tuple[int, Service]) -> None:
    port, _ = place
    head = f"POST /v1/observe HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {WRITER}\r\n".encode()
    body = b'{"key": "lie", "x": 1, "y": 1}'
    assert b" 408 " in raw(port, head + b"content-length: 500\r\n\r\n" + body)
    assert b" 413 " in raw(port, head + b"content-length: 99999999\r\n\r\n" + body)
    assert b" 400 " in raw(port, head + b"content-length: -5\r\n\r\n" + body)
    assert b" 400 " in raw(port, head + b"content-length: 5\r\n\r\n" + body)  # cut: no JSON
    chunk = b"c350\r\n" + b" " * 50_000 + b"\r\n"
    assert b" 413 " in raw(port, head + b"transfer-encoding: chunked\r\n\r\n" + 2 * chunk)
    with socket.create_connection(("127.0.0.1", port)) as link:
        link.sendall(head + b"content-length: 500\r\n\r\n" + body)  # and gone
    assert b" 4" in raw(port, b"nonsense\r\n\r\n")
    ask = Client(port, WRITER)
    assert ask("count", key="lie")[0] == 404
    assert ask("observe", key="after", x=1.0, y=1.0)[0] == 200


def test_health_metrics_and_openapi_say_how_it_is(ask: Client) -> None:
    ask("observe", key="m", x=1.0, y=1.0)
    status, health = ask.get("/health")
    assert status == 200
    assert json.loads(health)["status"] == "ok"
    status, text = ask.get("/metrics")
    assert 'constmem_requests_total{verb="observe",status="200"}' in text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values["constmem_rows_total"]) >= 1
    assert values['constmem_request_seconds_bucket{le="+Inf"}'] == values["constmem_request_seconds_count"]
    status, schema = ask.get("/openapi.json")
    assert {"/v1/observe", "/v1/bulk/predict", "/health"} <= json.loads(schema)["paths"].keys()
    assert ask.get("/docs")[0] == 200
    assert ask.get("/nothing")[0] == 404


def test_the_page_stands_at_the_root_beside_the_verbs(tmp_path: Path) -> None:
    page = tmp_path / "page"
    page.mkdir()
    (page / "index.html").write_text("<title>a page</title>")
    (page / "kernels.wasm").write_bytes(b"0asm")
    with served(tmp_path / "store", page=page) as (port, _):
        ask = Client(port)
        assert ask.get("/") == (200, "<title>a page</title>")
        assert ask.get("/kernels.wasm") == (200, "0asm")
        assert ask.get("/health")[0] == 200
        assert ask.get("/../store")[0] == 404
        assert ask("observe", key="ann", x=[0.5], y=[1.0])[0] == 200


def test_too_many_streams_or_requests_are_sent_away(tmp_path: Path) -> None:
    with served(tmp_path / "s", limits=Limits(streams=3, waiting=2)) as (port, service):
        ask = Client(port)
        assert ask("bulk/observe", keys=["a", "b", "c"], x=[1, 2, 3], y=[1, 2, 3])[0] == 200
        assert ask("observe", key="d", x=1, y=1)[0] == 507
        assert ask("create", key="d")[0] == 507
        assert ask("fork", key="a", to="d")[0] == 507
        assert ask("observe", key="a", x=1, y=1)[0] == 200
        held, go = threading.Event(), threading.Event()
        real = service.store.count

        def slow(keys: Any) -> Any:
            held.set()
            go.wait(20)
            return real(keys)

        service.store.count = slow  # type: ignore[method-assign]
        threads = [threading.Thread(target=lambda: Client(port)("count", key="a")) for _ in range(3)]
        threads[0].start()
        held.wait(20)
        for thread in threads[1:]:
            thread.start()
        while service.batches.waiting < 2:
            time.sleep(0.01)
        assert ask("count", key="a")[0] == 429
        assert ask.wait == "1"
        go.set()
        for thread in threads:
            thread.join()


def test_a_second_service_on_one_store_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    MODEL.save_pretrained(tmp_path / "model")
    threads = torch.get_num_threads()
    with served(tmp_path / "s") as (port, _):
        ask = Client(port)
        assert ask("observe", key="a", x=1, y=1) == (200, {"taken": 1})
        done = command("serve", str(tmp_path / "model"), "--store", str(tmp_path / "s"))
        assert done.returncode == 2
        assert "another process holds this store" in done.stderr
        assert "Traceback" not in done.stderr
        assert ask("observe", key="a", x=1, y=1) == (200, {"taken": 1})
        assert ask("count", key="a") == (200, {"count": 2})
    torch.set_num_threads(threads)


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGINT, signal.SIGINT]])
def test_a_signal_ends_the_command_and_leaves_nothing_behind(signals: list[int], tmp_path: Path) -> None:
    MODEL.save_pretrained(tmp_path / "model")
    run = [sys.executable, "-c", "from constmem.cli import main; main()", "serve", tmp_path / "model"]
    (tmp_path / "temporary").mkdir()
    with subprocess.Popen(
        [*map(str, run), "--store", str(tmp_path / "s"), "--port", "0"],
        stdout=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(tmp_path / "temporary")},
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            found = re.search(r"listening at http://127.0.0.1:(\d+),", process.stdout.readline())
            assert found is not None
            port = int(found[1])  # it does listen when it says so
            assert Client(port)("observe", key="a", x=1, y=1) == (200, {"taken": 1})
            with socket.create_connection(("127.0.0.1", port)) as half:
                if len(signals) > 1:  # with one, it waits for what is half sent
                    half.sendall(b"POST /v1/count HTTP/1.1\r\nhost: a\r\ncontent-length: 10\r\n\r\n{")
                for number in signals:
                    time.sleep(0.5)
                    process.send_signal(number)
                assert process.wait(20) == 0
        finally:
            process.kill()
    assert not [*(tmp_path / "temporary").glob("constmem-page-*")]
    with Store(tmp_path / "s", MODEL) as store:
        assert store.count(["a"]).item() == 1


def test_a_clock_that_jumps_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ages = cycle([4e9, 1.0, 1.7e9, 3e9, 2e9])  # seconds since 1970: forth and back by decades
    monkeypatch.setattr(time, "time", lambda: next(ages))
    monkeypatch.setattr(time, "time_ns", lambda: int(1e9 * next(ages)))
    names, x, y = rows(30, 3)
    with served(tmp_path / "s", limits=Limits(seconds=20.0)) as (port, service):
        ask = Client(port)
        for i, (name, a, b) in enumerate(zip(names, x.tolist(), y.tolist(), strict=True)):
            for taken in (1, 0):  # sent twice
                sent = {"key": name, "x": a, "y": b, "source": "s", "position": i}
                assert ask("observe", **sent) == (200, {"taken": taken})
        assert ask("predict", key=names[0], x=[0.0])[0] == 200
        assert ask.get("/health")[0] == 200
        assert 0 <= service.spent < 1e6
    with Store(tmp_path / "s", MODEL) as store:
        require_same(store, alone(MODEL, names, x, y))


def test_a_disk_that_is_full_is_an_answer_and_the_service_goes_on(tmp_path: Path) -> None:
    with served(tmp_path / "s") as (port, service):
        ask = Client(port)
        assert ask("observe", key="a", x=1, y=1)[0] == 200
        run = service.store._database._sqlite.execute
        (pages,) = run("pragma page_count").fetchone()
        run(f"pragma max_page_count = {pages}")
        many = {"keys": [f"{'k' * 900}{i}" for i in range(200)], "x": [1] * 200, "y": [1] * 200}
        status, answer = ask("bulk/observe", many)
        assert (status, answer["error"]["kind"]) == (507, "storage")
        assert ask("predict", key="a", x=[0.0])[0] == 200
        run("pragma max_page_count = 1000000")
        assert ask("bulk/observe", many) == (200, {"taken": 200})


def test_a_service_stops_in_one_line_where_its_disk_is_full_and_loses_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with served(tmp_path / "s") as (port, service):
        ask = Client(port)
        keys = [f"{'k' * 900}{i}" for i in range(200)]
        assert ask("bulk/observe", keys=keys, x=[1] * 200, y=[1] * 200) == (200, {"taken": 200})
        run = service.store._database._sqlite.execute
        (pages,) = run("pragma page_count").fetchone()
        run(f"pragma max_page_count = {pages}")
    assert [record.name for record in caplog.records] == ["constmem.serve"]
    assert "all that was taken before it is kept" in caplog.text
    assert "Traceback" not in caplog.text
    with Store(tmp_path / "s", MODEL) as store:
        assert store.count(keys).tolist() == [1] * 200


def test_connections_beyond_their_number_are_sent_away_in_words(tmp_path: Path) -> None:
    with served(tmp_path / "s", limits=Limits(waiting=2, seconds=5.0)) as (port, _):
        ask = Client(port)
        links = [socket.create_connection(("127.0.0.1", port)) for _ in range(9)]
        try:
            for link in links:
                link.sendall(b"POST /v1/count HTTP/1.1\r\n")
            time.sleep(0.5)
            status, answer = ask("count", key="a")
            assert (status, answer["error"]["kind"], ask.wait) == (503, "busy", "5")
            assert "connections" in answer["error"]["message"]
            assert ask.get("/health")[0] == 200
        finally:
            for link in links:
                link.close()
        time.sleep(0.5)
        assert ask("count", key="a")[0] == 404


def test_many_at_once_are_each_answered_for_themselves(tmp_path: Path) -> None:
    """Good and bad requests in one batch: the bad ones alone are refused, and bits are as if alone."""
    names, x, y = rows(120, 8)

    async def ask_all(batches: Batches) -> list[Any]:
        asked: list[Any] = []
        for i, (key, a, b) in enumerate(zip(names, x.tolist(), y.tolist(), strict=True)):
            asked.append(batches.submit(Observe([key], [a], [b], "me", i)))
            if i % 10 == 0:
                asked.append(batches.submit(Observe([key], [[float("nan")]], [b])))
                asked.append(batches.submit(Predict([f"nobody {i}"], [[[0.0]]])))
        return await asyncio.gather(*asked, return_exceptions=True)

    batches = Batches(Store(tmp_path / "s", MODEL), Limits())
    found = asyncio.run(ask_all(batches))
    batches.close()
    failures = [each for each in found if isinstance(each, Failure)]
    assert sorted({failure.status for failure in failures}) == [404, 422]
    assert len(failures) == 24
    assert found.count({"taken": 1}) == 120
    with Store(tmp_path / "s", MODEL) as store:
        require_same(store, alone(MODEL, names, x, y))


def test_large_requests_are_not_answered_all_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("constmem.serve.batches.ROWS", 100)
    store = Store(tmp_path / "s", MODEL)
    sizes: list[int] = []
    predict, observe = store.predict, store.observe_all

    def predicted(keys: Any, xt: Any) -> Any:
        sizes.append(xt.size)
        return predict(keys, xt)

    def observed(keys: Any, *given: Any) -> Any:
        sizes.append(len(keys))
        return observe(keys, *given)

    monkeypatch.setattr(store, "predict", predicted)
    monkeypatch.setattr(store, "observe_all", observed)

    async def ask_all(batches: Batches) -> list[Any]:
        column = [[0.5]] * 60
        asked = [batches.submit(Observe(["a"] * 60, column, column)) for _ in range(5)]
        asked += [batches.submit(Predict(["a"], [column])) for _ in range(5)]
        asked += [batches.submit(Predict(["a"], [column * 3])), batches.submit(Observe(["a"], [[0]], [[0]]))]
        return await asyncio.gather(*asked)

    batches = Batches(store, Limits())
    found = asyncio.run(ask_all(batches))
    batches.close()
    assert [len(each.get("mean", [[]])[0]) for each in found] == [0] * 5 + [60] * 5 + [180, 0]
    assert sorted(sizes) == [1] + [60] * 10 + [180]


def kill_often(path: Path, times: int, seed: int, clients: int = 3) -> int:
    """A service that is killed while clients send rows, again and again until each is acknowledged."""
    names, x, y = rows(700, 40, seed)
    mine = [list(range(c, 700, clients)) for c in range(clients)]
    names = [f"{c}-{names[i]}" for i in range(700) for c in [i % clients]]
    sent, draw, at_work = [0] * clients, random.Random(seed), 0
    for turn in range(times + 1):
        listening = socket.create_server(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        pid = os.fork()
        if pid == 0:
            try:
                service = Service(Store(path, MODEL, memory=1, journal=60, power=False))
                server = uvicorn.Server(uvicorn.Config(service, log_level="critical", access_log=False))
                server.run(sockets=[listening])
            finally:
                os._exit(0)
        listening.close()
        last, begun = turn == times, threading.Event()

        def send(c: int, port: int = port, begun: threading.Event = begun) -> None:
            ask = Client(port)
            while sent[c] < len(mine[c]):
                i = mine[c][sent[c]]
                row = {"key": names[i], "x": x[i].item(), "y": y[i].item()}
                try:
                    status, _ = ask("observe", row | {"source": str(c), "position": sent[c]})
                except (OSError, http.client.HTTPException):
                    return
                if status == 200:
                    sent[c] += 1
                    begun.set()

        threads = [threading.Thread(target=send, args=(c,)) for c in range(clients)]
        for thread in threads:
            thread.start()
        if last:
            for thread in threads:
                thread.join()
        elif draw.random() < 0.8:  # at work, or while it starts
            begun.wait(20)
        time.sleep(0 if last else draw.random() * 0.2)
        os.kill(pid, signal.SIGTERM if last else signal.SIGKILL)
        os.waitpid(pid, 0)
        for thread in threads:
            thread.join()
        at_work += 0 < sum(sent) < 700
        done = sorted(i for c in range(clients) for i in mine[c][: sent[c]])
        with Store(path, MODEL) as store:
            total = int(store.count(store.keys()).sum()) if len(store) else 0
            assert len(done) <= total <= len(done) + clients  # acknowledged, or sent and not answered
            if last:
                line = torch.tensor(done)
                require_same(store, alone(MODEL, [names[i] for i in done], x[line], y[line]))
                assert total == len(done)
    return at_work


def test_a_service_that_is_killed_has_all_it_acknowledged_once_bit_for_bit(tmp_path: Path) -> None:
    assert kill_often(tmp_path / "s", 4, seed=1) >= 2
