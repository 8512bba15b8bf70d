"""Streams by key over HTTP: what was acknowledged is on disk, and rows of many clients are taken together."""

import asyncio
import gc
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from constmem import __version__
from constmem.serve import Failure, Limits, Tokens
from constmem.serve.batches import Batches
from constmem.serve.verbs import Verbs
from constmem.streams.store import Store

log = logging.getLogger("constmem.serve")
BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)  # seconds, of the histogram in /metrics
JSON = "application/json"
Answer = tuple[int, bytes, list[tuple[bytes, bytes]]]  # status, content, headers
TEXT = {"type": "string"}
ERROR = {
    "type": "object",
    "properties": {"error": {"type": "object", "properties": {"kind": TEXT, "message": TEXT}}},
}


class Service:
    """The routes of one store, each a JSON object in and out; see `openapi` for what they take.

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
        self.routes = {f"/v1/{verb}": verb for verb in self.verbs.schemas}
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
        schema = self.openapi()
        app.openapi = lambda: schema  # type: ignore[method-assign]
        if page is not None:
            app.mount("/", StaticFiles(directory=page, html=True))
        return app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application, for any ASGI server: verbs are answered here, in a third of FastAPI's time."""
        verb = self.routes.get(scope["path"]) if scope["type"] == "http" else None
        if verb is None:
            await self.rest(scope, receive, send)
            return
        began = time.perf_counter()
        status, content, headers = await self._answered(verb, scope, receive)
        self._count_answer(verb, status, time.perf_counter() - began)
        headers += [(b"content-type", JSON.encode()), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def _answered(self, verb: str, scope: Scope, receive: Receive) -> Answer:
        """What a verb answers, or what is wrong."""
        content: bytes | None = None
        try:
            async with asyncio.timeout(self.limits.seconds) as limit:
                if scope["method"] != "POST":
                    raise Failure(405, "method", f"POST a JSON object to /v1/{verb}")
                given = dict(scope["headers"])
                token = self.tokens.holder(given.get(b"authorization", b"").decode("latin-1"))
                content = await self._body(given.get(b"content-length", b"0"), receive)
                body = orjson.loads(content)
                if not isinstance(body, dict):
                    raise Failure(422, "refused", "the body is a JSON object")
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
            again = "no answer in time, so it may be taken or not: send it again with its source and position"
            return failed(Failure(503, "late", again, wait=1))
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

    def _count_answer(self, verb: str, status: int, seconds: float) -> None:
        self.answered[verb, status] += 1
        self.spent += seconds
        self.seconds[next((bound for bound in BOUNDS if seconds <= bound), float("inf"))] += 1

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

    def openapi(self) -> dict[str, Any]:
        """What the service takes and gives, as OpenAPI has it."""
        error = {"description": "what is wrong, why, and what to do", "content": {JSON: {"schema": ERROR}}}
        codes = (400, 401, 403, 404, 408, 409, 413, 422, 429, 503, 507)
        answers = dict.fromkeys(map(str, codes), error)
        paths: dict[str, Any] = {}
        for verb, (what, properties, needed) in self.verbs.schemas.items():
            taken = {
                "type": "object",
                "properties": properties,
                "required": needed,
                "additionalProperties": False,
                "dependentRequired": {"source": ["position"], "position": ["source"]},
            }
            ok = {"description": "done", "content": {JSON: {"schema": {"type": "object"}}}}
            body = {"required": True, "content": {JSON: {"schema": taken}}}
            paths[f"/v1/{verb}"] = {
                "post": {
                    "summary": what,
                    "requestBody": body,
                    "responses": {"200": ok} | answers,
                    "security": [{"token": []}],
                }
            }
        plain = {"200": {"description": "fine"}}
        paths["/health"] = {"get": {"summary": "Whether it works.", "responses": plain | {"503": error}}}
        paths["/metrics"] = {"get": {"summary": "Counts for Prometheus.", "responses": plain}}
        return {
            "openapi": "3.1.0",
            "info": {"title": "constmem", "version": __version__},
            "paths": paths,
            "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        }


def failed(failure: Failure) -> Answer:
    """An answer that says what is wrong."""
    headers = [] if failure.wait is None else [(b"retry-after", str(failure.wait).encode())]
    more = {401: (b"www-authenticate", b"Bearer"), 405: (b"allow", b"POST")}
    headers += [more[failure.status]] if failure.status in more else []
    content = orjson.dumps({"error": {"kind": failure.kind, "message": _clean(failure.message)}})
    return failure.status, content, headers


def _clean(message: str) -> str:
    """What UTF-8 can hold, cut to a sensible length."""
    return message[:1000].encode(errors="replace").decode()


def run(service: Service, host: str, port: int, *, log_level: str = "warning") -> None:
    """Answer at an address until a signal says stop; then what waits is answered, and the store closed."""
    import uvicorn

    gc.collect()
    gc.freeze()  # what stays need not be visited by each collection
    uvicorn.run(
        service, host=host, port=port, log_level=log_level, access_log=False, timeout_keep_alive=30,
        limit_concurrency=4 * service.limits.waiting, timeout_graceful_shutdown=int(service.limits.seconds),
        server_header=False, proxy_headers=False, h11_max_incomplete_event_size=2**16,
    )  # fmt: skip
