"""What a client may ask for: each verb checks a JSON object, and is done together with others that wait."""

from collections.abc import Callable
from typing import Any

from constmem import __version__
from constmem.serve import Failure, Limits, Token
from constmem.serve.batches import Batches, Observe, Predict, Work
from constmem.streams.sources import Rows, numbers
from constmem.streams.store import LONGEST

Body = dict[str, Any]
KEY = {"type": "string", "minLength": 1, "maxLength": LONGEST}
TEXT = {"type": "string"}
ERROR = {
    "type": "object",
    "properties": {"error": {"type": "object", "properties": {"kind": TEXT, "message": TEXT}}},
}
JSON = "application/json"
SOURCE = {
    "source": {"type": "string", "minLength": 1, "maxLength": 256},
    "position": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
}


class Verbs:
    """The verbs of one store, by name; `schemas` has what each does, what its object may hold, and must."""

    def __init__(self, batches: Batches, limits: Limits) -> None:
        self.batches, self.limits = batches, limits
        self.rows = Rows(batches.store.model)
        self.schemas = self._schemas()
        self._calls: dict[str, Callable[[Token, Body], Any]] = {
            "observe": self._observe,
            "predict": self._predict,
            "bulk/observe": self._bulk_observe,
            "bulk/predict": self._bulk_predict,
            "create": self._create,
            "count": self._count,
            "keys": self._keys,
            "merge": self._merge,
            "fork": self._fork,
            "delete": self._delete,
        }

    def __call__(self, verb: str, token: Token, body: Body) -> Any:
        """Run a verb, or refuse unknown fields: they may be typing errors."""
        names = self.schemas[verb][1]
        if unknown := body.keys() - names.keys():
            word = sorted(unknown)[0][:40]
            raise Failure(422, "refused", f"unknown field {word!r}: there are {', '.join(names)}")
        return self._calls[verb](token, body)

    def _schemas(self) -> dict[str, tuple[str, dict[str, Any], list[str]]]:
        number: dict[str, Any] = {"type": "number"}
        x, y = (
            number if width == 1 else {"type": "array", "items": number, "minItems": width, "maxItems": width}
            for width in self.rows.widths
        )
        first, second = self.rows.names[1:]
        y = {"type": "integer", "minimum": -1, "maximum": self.rows.marks - 1} if self.rows.events else y
        needed = [first] if self.rows.events else [first, second]
        targets = {} if self.rows.events else {"x": _listed(x)}
        many = {"keys": _listed(KEY)}
        return {
            "observe": ("Add a row.", {"key": KEY, first: x, second: y} | SOURCE, ["key", *needed]),
            "predict": ("Predict from a stream.", {"key": KEY} | targets, ["key", *targets]),
            "bulk/observe": (
                "Add rows of any streams, as columns.",
                many | {first: _listed(x), second: _listed(y)} | SOURCE,
                ["keys", *needed],
            ),
            "bulk/predict": ("Predict from any streams.", many | targets, ["keys", *targets]),
            "create": (
                "A new stream.", {"key": KEY} | ({"start": number} if self.rows.events else {}), ["key"]
            ),
            "count": ("How many rows a stream has seen.", {"key": KEY}, ["key"]),
            "keys": (
                "Keys in order.",
                {"prefix": TEXT, "after": TEXT, "most": {"type": "integer", "minimum": 1}},
                [],
            ),
            "merge": ("Add what another has seen.", {"key": KEY, "other": KEY}, ["key", "other"]),
            "fork": ("A new stream that has seen what another has.", {"key": KEY, "to": KEY}, ["key", "to"]),
            "delete": ("Delete a stream.", {"key": KEY}, ["key"]),
        }  # fmt: skip

    def openapi(self) -> dict[str, Any]:
        """What the service takes and gives, as OpenAPI has it."""
        error = {"description": "what is wrong, why, and what to do", "content": {JSON: {"schema": ERROR}}}
        codes = (400, 401, 403, 404, 408, 409, 413, 422, 429, 503, 507)
        answers = dict.fromkeys(map(str, codes), error)
        paths: dict[str, Any] = {}
        for verb, (what, properties, needed) in self.schemas.items():
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

    def _observe(self, token: Token, body: Body) -> Any:
        key = self._key(token, "write", body)
        x, y = self.rows.values(body)
        return self.batches.submit(Observe([key], [x], [y], *self._place(token, body)))

    def _bulk_observe(self, token: Token, body: Body) -> Any:
        first, second = self.rows.names[1:]
        keys = self._many(token, "write", body)
        columns: tuple[Any, ...] = (
            body.get(first),
            body.get(second, [-1] * len(keys) if self.rows.events else None),
        )
        for name, column in zip((first, second), columns, strict=True):
            if not isinstance(column, list) or len(column) != len(keys):
                raise Failure(422, "refused", f"{name} must be a list with one entry for each of the keys")
        return self.batches.submit(Observe(keys, *self.rows.columns(*columns), *self._place(token, body)))

    def _place(self, token: Token, body: Body) -> tuple[str | None, int | None]:
        """Where rows come from; sources of a token are its own."""
        source, position = body.get("source"), body.get("position")
        if source is None and position is None:
            return None, None
        if not isinstance(source, str) or not 0 < len(source) <= 256 or type(position) is not int:
            needed = "source is a text of 1 to 256 letters, and position a whole number that counts up"
            raise Failure(422, "refused", f"{needed}: give both")
        prefix = token.prefix.replace("%", "%25").replace(":", "%3A")  # else one could name another's source
        return f"http:{prefix}:{source}", position

    def _predict(self, token: Token, body: Body) -> Any:
        key = self._key(token, "read", body)
        return self._first(Predict([key], None if self.rows.events else [self._targets(body.get("x"))]))

    async def _first(self, request: Predict) -> Any:
        found = await self.batches.submit(request)
        return {name: each[0] for name, each in found.items()}

    def _bulk_predict(self, token: Token, body: Body) -> Any:
        keys = self._many(token, "read", body)
        if self.rows.events:
            return self.batches.submit(Predict(keys, None))
        targets = self._targets(body.get("x"))
        if len(keys) * len(targets) > self.limits.rows:
            raise Failure(413, "too_large", f"at most {self.limits.rows:,} targets of all keys at a time")
        return self.batches.submit(Predict(keys, [targets] * len(keys)))

    def _targets(self, given: Any) -> list[list[float]]:
        if not isinstance(given, list) or not 0 < len(given) <= self.limits.rows:
            raise Failure(422, "refused", f"x is a list of 1 to {self.limits.rows:,} targets")
        return [numbers("x", each, self.rows.widths[0]) for each in given]

    def _create(self, token: Token, body: Body) -> Any:
        key = self._key(token, "write", body)
        start = numbers("start", body.get("start", 0.0), 1)[0]
        create = Work(lambda store: store.create([key], start=start), {"created": 1}, new=[key])
        return self.batches.submit(create)

    def _count(self, token: Token, body: Body) -> Any:
        key = self._key(token, "read", body)
        return self.batches.submit(Work(lambda store: {"count": store.count([key]).item()}))

    def _keys(self, token: Token, body: Body) -> Any:
        prefix, after, most = body.get("prefix", token.prefix), body.get("after", ""), body.get("most", 1000)
        if not isinstance(prefix, str) or not isinstance(after, str) or type(most) is not int:
            raise Failure(422, "refused", "prefix and after are texts, most a whole number")
        token.require("read", [prefix])
        most = min(most, self.limits.rows)
        return self.batches.submit(Work(lambda store: {"keys": store.keys(prefix, after=after, most=most)}))

    def _merge(self, token: Token, body: Body) -> Any:
        key, other = self._key(token, "write", body), self._key(token, "read", body, "other")
        return self.batches.submit(Work(lambda store: store.merge(key, other), {"merged": 1}))

    def _fork(self, token: Token, body: Body) -> Any:
        key, to = self._key(token, "read", body), self._key(token, "write", body, "to")
        return self.batches.submit(Work(lambda store: store.fork(key, to), {"created": 1}, new=[to]))

    def _delete(self, token: Token, body: Body) -> Any:
        key = self._key(token, "write", body)
        return self.batches.submit(Work(lambda store: {"deleted": store.delete([key])}))

    def _key(self, token: Token, scope: str, body: Body, name: str = "key") -> str:
        key = body.get(name)
        if not isinstance(key, str) or not 0 < len(key) <= LONGEST:
            raise Failure(422, "refused", f"{name} is a text of 1 to {LONGEST:,} letters that names a stream")
        token.require(scope, [key])
        return key

    def _many(self, token: Token, scope: str, body: Body) -> list[str]:
        keys = body.get("keys")
        if not isinstance(keys, list) or set(map(type, keys)) != {str}:
            raise Failure(422, "refused", "keys is a list of texts, one for each row")
        if len(keys) > self.limits.rows:
            raise Failure(413, "too_large", f"at most {self.limits.rows:,} rows at a time, not {len(keys):,}")
        if not 0 < min(map(len, keys)) <= max(map(len, keys)) <= LONGEST:
            raise Failure(422, "refused", f"each of the keys has 1 to {LONGEST:,} letters")
        token.require(scope, keys)
        return keys


def _listed(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}
