"""Streams by key over HTTP: what was acknowledged is on disk, and rows of many clients are taken together."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response

from constmem import __version__
from constmem.serve.access import Failure, Limits, Tokens
from constmem.serve.batches import Batches
from constmem.serve.verbs import Verbs
from constmem.streams.store import Store

log = logging.getLogger("constmem.serve")
BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)  # seconds, of the histogram in /metrics
JSON = "application/json"
TEXT = {"type": "string"}
ERROR = {
    "type": "object",
    "properties": {"error": {"type": "object", "properties": {"kind": TEXT, "message": TEXT}}},
}


class Service:
    """The routes of one store, each a JSON object in and out; see `openapi` for what they take."""

    def __init__(self, store: Store, *, tokens: Tokens | None = None, limits: Limits | None = None) -> None:
        self.limits, self.tokens = limits or Limits(), tokens or Tokens()
        self.store, self.batches = store, Batches(store, self.limits)
        self.verbs = Verbs(self.batches, self.limits)
        self.answered: Counter[tuple[str, int]] = Counter()
        self.seconds: Counter[float] = Counter()
        self.spent = 0.0

    def app(self) -> FastAPI:
        """The application, for any ASGI server; it closes the store when it stops."""

        @asynccontextmanager
        async def life(_: FastAPI) -> AsyncIterator[None]:
            yield
            await asyncio.to_thread(self.batches.close)

        app = FastAPI(title="constmem", version=__version__, lifespan=life)
        for verb in self.verbs.calls:
            app.add_route(f"/v1/{verb}", self._route(verb), methods=["POST"], include_in_schema=False)
        app.add_route("/health", self._health, methods=["GET"], include_in_schema=False)
        app.add_route("/metrics", self._metrics, methods=["GET"], include_in_schema=False)
        schema = self.openapi()
        app.openapi = lambda: schema  # type: ignore[method-assign]
        return app

    def _route(self, verb: str) -> Callable[[Request], Any]:
        call = self.verbs.calls[verb]

        async def answer(request: Request) -> Response:
            began = time.perf_counter()
            try:
                token = self.tokens.holder(request.headers.get("authorization"))
                body = orjson.loads(await self._body(request))
                if not isinstance(body, dict):
                    raise Failure(422, "refused", "the body is a JSON object")
                pending = call(token, body)
                found = await asyncio.wait_for(pending, self.limits.seconds)
                made = Response(orjson.dumps(found), media_type=JSON)
            except Failure as failure:
                made = failed(failure)
            except orjson.JSONDecodeError as error:
                made = failed(Failure(400, "not_json", f"the body is not JSON: {error}"))
            except (ValueError, TypeError) as error:
                made = failed(Failure(422, "refused", str(error)))
            except TimeoutError:
                made = failed(
                    Failure(503, "late", "no answer in time, and nobody knows if it was taken: send it again "
                            "with the same source and position", wait=1)
                )  # fmt: skip
            except ClientDisconnect:
                made = failed(Failure(400, "gone", "the body ended too early"))
            except Exception as error:
                log.error("a request failed", exc_info=error)
                made = failed(Failure(500, "internal", "the service failed to answer; its log says why"))
            self._count_answer(verb, made.status_code, time.perf_counter() - began)
            return made

        return answer

    async def _body(self, request: Request) -> bytes:
        """All of it, within the limits."""
        most = self.limits.body
        said = request.headers.get("content-length", "0")
        if not said.isdecimal() or len(said) > 15 or int(said) > most:
            raise Failure(413, "too_large", f"a body has at most {most:,} bytes: send fewer rows at a time")
        body = bytearray()
        try:
            async with asyncio.timeout(self.limits.seconds):
                async for part in request.stream():
                    body += part
                    if len(body) > most:
                        raise Failure(413, "too_large", f"a body has at most {most:,} bytes")
        except TimeoutError as error:
            raise Failure(408, "slow", "the body did not arrive in time") from error
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
        for verb, (what, properties, needed) in self.verbs.schemas().items():
            taken = {
                "type": "object",
                "properties": properties,
                "required": needed,
                "additionalProperties": False,
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


def failed(failure: Failure) -> Response:
    """An answer that says what is wrong."""
    headers = {} if failure.wait is None else {"retry-after": str(failure.wait)}
    if failure.status == 401:
        headers["www-authenticate"] = "Bearer"
    content = orjson.dumps({"error": {"kind": failure.kind, "message": _clean(failure.message)}})
    return Response(content, failure.status, headers, media_type=JSON)


def _clean(message: str) -> str:
    """What UTF-8 can hold, of a bearable length."""
    return message[:1000].encode(errors="replace").decode()


def run(service: Service, host: str, port: int, *, log_level: str = "warning") -> None:
    """Answer at an address until a signal says stop; then what waits is answered, and the store closed."""
    import uvicorn

    uvicorn.run(
        service.app(), host=host, port=port, log_level=log_level, access_log=False, timeout_keep_alive=30,
        limit_concurrency=4 * service.limits.waiting, timeout_graceful_shutdown=int(service.limits.seconds),
        server_header=False, h11_max_incomplete_event_size=2**16,
    )  # fmt: skip
