"""Streams by key over HTTP: what was acknowledged is on disk, and rows of many clients are taken together."""

import asyncio
import gc
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from math import ceil
from pathlib import Path
from typing import Any

import orjson
import uvicorn
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from constmem import __version__
from constmem.serve import JSON, Tokens, Verbs
from constmem.serve.batches import Batches, Failure, Limits
from constmem.streams.store import Store

log = logging.getLogger("constmem.serve")
BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)  # seconds, of the histogram in /metrics
HEAD = 2**18  # bytes of a request before its body
Answer = tuple[int, bytes, list[tuple[bytes, bytes]]]  # status, content, headers


class Service:
    """The routes of one store, each a JSON object in and out; see `Verbs.openapi` for what they take.

    Args:
        page: a folder whose files are handed out at `/` to anybody, such as `write_page` writes.
    """

    def __init__(
        self,
        store: Store,
        *,
        tokens: Tokens | None = None,
        limits: Limits | None = None,
        page: Path | None = None,
    ) -> None:
        self.limits, self.tokens = limits or Limits(), tokens or Tokens()
        self.store, self.batches = store, Batches(store, self.limits)
        self.verbs = Verbs(self.batches, self.limits)
        self.rest = self._rest(page)
        self.answered: Counter[tuple[str, int]] = Counter()
        self.seconds: Counter[float] = Counter()
        self.spent = 0.0

    def _rest(self, page: Path | None) -> FastAPI:
        """All but the verbs; it closes the store when it stops."""

        @asynccontextmanager
        async def life(_: FastAPI) -> AsyncIterator[None]:
            yield
            await asyncio.to_thread(self.batches.close)

        app = FastAPI(title="constmem", version=__version__, lifespan=life)
        app.add_route("/health", self._health, methods=["GET"], include_in_schema=False)
        app.add_route("/metrics", self._metrics, methods=["GET"], include_in_schema=False)
        app.add_exception_handler(HTTPException, _refused)
        schema = self.verbs.openapi()
        app.openapi = lambda: schema  # type: ignore[method-assign]
        if page is not None:
            app.mount("/", StaticFiles(directory=page, html=True))
        return app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application, for any ASGI server: verbs are answered here, in a third of FastAPI's time."""
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self.rest(scope, receive, send)
            return
        verb, began = scope["path"].removeprefix("/v1/"), time.perf_counter()
        status, content, headers = await self._answered(verb, scope, receive)
        if verb in self.verbs.known:
            seconds = time.perf_counter() - began
            self.answered[verb, status] += 1
            self.spent += seconds
            self.seconds[next((bound for bound in BOUNDS if seconds <= bound), float("inf"))] += 1
        headers += [(b"content-type", JSON.encode()), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def _answered(self, verb: str, scope: Scope, receive: Receive) -> Answer:
        """What a verb answers, or what is wrong."""
        content: bytes | None = None
        try:
            async with asyncio.timeout(self.limits.seconds) as limit:
                if verb not in self.verbs.known:
                    there = f"there is no such verb: there are {', '.join(self.verbs.known)}"
                    raise Failure(404, "not_found", there)
                if scope["method"] != "POST":
                    raise Failure(405, "method", f"POST a JSON object to /v1/{verb}")
                given = dict(scope["headers"])
                if scope.get("crowded"):
                    raise Failure(503, "busy", "there are too many connections: try again later", wait=5)
                sent = (given.get(name, b"") for name in (b"authorization", b"origin"))
                token = self.tokens.holder(*(text.decode(errors="replace") for text in sent))
                content = await self._body(given.get(b"content-length", b"0"), receive)
                body = orjson.loads(content)
                if not isinstance(body, dict):
                    raise ValueError("the body is a JSON object")
                limit.reschedule(asyncio.get_running_loop().time() + self.limits.seconds)
                return 200, orjson.dumps(await self.verbs(verb, token, body)), []
        except Failure as failure:
            return failed(failure)
        except orjson.JSONDecodeError as error:
            return failed(Failure(400, "not_json", f"the body is not JSON: {error}"))
        except (ValueError, TypeError) as error:
            return failed(Failure(422, "refused", str(error)))
        except TimeoutError:
            if content is None:
                return failed(Failure(408, "slow", "the body did not arrive in time"))
            again = (
                "look what is there" if "observe" not in verb else "send it again with source and position"
            )
            return failed(Failure(503, "late", f"no answer in time, it may be done or not: {again}", wait=1))
        except Exception as error:
            log.error("a request failed", exc_info=error)
            return failed(Failure(500, "internal", "the service failed to answer; its log says why"))

    async def _body(self, length: bytes, receive: Receive) -> bytes:
        """All of it, within the limits."""
        large = Failure(
            413, "too_large", f"a body has at most {self.limits.body:,} bytes: send fewer rows at a time"
        )
        if not length.isdigit() or len(length) > 15 or int(length) > self.limits.body:
            raise large
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] != "http.request":
                raise Failure(400, "gone", "the body ended too early")
            body += message.get("body", b"")
            if len(body) > self.limits.body:
                raise large
            if not message.get("more_body", False):
                return bytes(body)

    async def _health(self, _: Request) -> Response:
        fine = self.batches.alive
        return Response(
            orjson.dumps({"status": "ok" if fine else "stopped", "streams": len(self.store)}),
            200 if fine else 503, media_type=JSON,
        )  # fmt: skip

    async def _metrics(self, _: Request) -> Response:
        """Counts for Prometheus; no key is in them."""
        gauges = {
            "streams": len(self.store), "state_bytes": self.store.nbytes, "waiting": self.batches.waiting,
        }  # fmt: skip
        totals = {name: getattr(self.batches, name) for name in ("batches", "rows", "predictions")}
        lines = [f"# TYPE constmem_{name} gauge\nconstmem_{name} {value}" for name, value in gauges.items()]
        lines += [
            f"# TYPE constmem_{name}_total counter\nconstmem_{name}_total {value}"
            for name, value in totals.items()
        ]
        lines.append("# TYPE constmem_requests_total counter")
        lines += [
            f'constmem_requests_total{{verb="{verb}",status="{status}"}} {number}'
            for (verb, status), number in sorted(self.answered.items())
        ]
        lines.append("# TYPE constmem_request_seconds histogram")
        below = 0
        for bound in (*BOUNDS, float("inf")):
            below += self.seconds[bound]
            name = "+Inf" if bound == float("inf") else f"{bound:g}"
            lines.append(f'constmem_request_seconds_bucket{{le="{name}"}} {below}')
        lines += [f"constmem_request_seconds_sum {self.spent:.6f}", f"constmem_request_seconds_count {below}"]
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")


def failed(failure: Failure) -> Answer:
    """An answer that says what is wrong."""
    headers = [] if failure.wait is None else [(b"retry-after", str(failure.wait).encode())]
    more = {
        401: (b"www-authenticate", b"Bearer"), 405: (b"allow", b"POST"), 503: (b"connection", b"close"),
    }  # fmt: skip
    headers += [more[failure.status]] if failure.status in more else []
    message = failure.message[:1000].encode(errors="replace").decode()  # what UTF-8 can hold
    content = orjson.dumps({"error": {"kind": failure.kind, "message": message}})
    return failure.status, content, headers


async def _refused(_: Request, error: Any) -> Response:
    """What is no verb, in the words of verbs."""
    kind = {404: "not_found", 405: "method"}.get(error.status_code, "refused")
    status, content, _headers = failed(Failure(error.status_code, kind, f"{error.detail}; see /docs"))
    return Response(content, status, error.headers, JSON)


class Connection(HttpToolsProtocol):
    """A connection of a service, closed where a request does not arrive in time, or its head has no end."""

    _head: int | None = 0  # bytes of a head that has not ended
    _timer: asyncio.TimerHandle | None = None  # while a request has not arrived

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait(1)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._arrived()

    def data_received(self, data: bytes) -> None:
        if self._timer is None:
            self._wait(1)
        super().data_received(data)
        if self._head is not None and not self.transport.is_closing():
            self._head += len(data)
            if self._head > HEAD:
                self._refuse(Failure(431, "too_large", f"the head of a request has at most {HEAD:,} bytes"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head = 0
        self._wait(1)

    def on_headers_complete(self) -> None:
        most = 4 * self.config.app.limits.waiting  # type: ignore[union-attr]
        self.scope["crowded"] = len(self.connections) > most  # type: ignore[typeddict-unknown-key]
        super().on_headers_complete()
        self._head = None
        self._wait(2)  # the service itself waits for the body once as long, and says so

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._arrived()

    def send_400_response(self, msg: str) -> None:
        self._refuse(Failure(400, "not_http", msg))

    def _wait(self, times: int) -> None:
        self._arrived()
        self._timer = self.loop.call_later(times * self.config.app.limits.seconds, self._late)  # type: ignore[union-attr]

    def _arrived(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        if self._head:
            self._refuse(Failure(408, "slow", "the request did not arrive in time"))
        else:
            self.transport.close()

    def _refuse(self, failure: Failure) -> None:
        status, content, _ = failed(failure)
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: {JSON}\r\n"
        head += f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + content)
        self.transport.close()


def settings(service: Service) -> dict[str, Any]:
    """How uvicorn is to run a service."""
    return {
        "http": Connection, "access_log": False, "timeout_keep_alive": 30, "server_header": False,
        "proxy_headers": False, "ws": "none",
        "timeout_graceful_shutdown": ceil(service.limits.seconds),
    }  # fmt: skip


class Server(uvicorn.Server):
    """A server that says so once it listens, and at which port."""

    ready: Callable[[int], None]

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self.ready(self.servers[0].sockets[0].getsockname()[1])


def run(service: Service, host: str, port: int, ready: Callable[[int], None]) -> None:
    """Answer at an address until a signal says stop; then what waits is answered, and the store closed."""
    gc.collect()
    gc.freeze()  # what stays need not be visited by each collection
    server = Server(uvicorn.Config(service, host, port, log_level="warning", **settings(service)))
    server.ready = ready
    try:
        server.run()
    except KeyboardInterrupt:  # as uvicorn ends when it has stopped
        pass
    finally:
        service.batches.close()  # after a second Ctrl-C nobody else does
