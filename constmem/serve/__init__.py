"""Streams by key behind an address: who may ask for what, and how each verb is checked and done."""

import hashlib
import hmac
import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from constmem import __version__
from constmem.serve.batches import Batches, Failure, Limits, Observe, Predict, Work
from constmem.streams.sources import Rows, numbers
from constmem.streams.store import LONGEST

SCOPES = ("read", "write")
OWN = ("localhost", "127.0.0.1", "::1")  # names of this machine
SHORTEST = 16  # letters of a token
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


@dataclass(frozen=True)
class Token:
    """What the holder of a token may do: with streams whose keys begin with the prefix."""

    prefix: str = ""
    scopes: frozenset[str] = frozenset(SCOPES)

    def require(self, scope: str, keys: Iterable[str]) -> None:
        """Refuse what it does not allow."""
        if scope not in self.scopes:
            raise Failure(
                403, "forbidden", f"this token may not {scope}: it has {', '.join(sorted(self.scopes))}"
            )
        if self.prefix:
            for key in keys:
                if not key.startswith(self.prefix):
                    raise Failure(403, "forbidden", f"this token is for keys that begin with {self.prefix!r}")


class Tokens:
    """The tokens that are known, by digests; without any, every client may do everything.

    A file of them is JSON: [{"token": "...", "prefix": "ann/", "scopes": ["read", "write"]}]. Instead of a
    token its digest may stand there, "sha256": "...".
    """

    def __init__(self, known: dict[bytes, Token] | None = None) -> None:
        self._known = known

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "Tokens":
        """Read a file of tokens; ValueError says what is wrong with it."""
        if Path(path).stat().st_mode & 0o004:
            raise ValueError(f"everybody may read the tokens in {path}: chmod o-r {path}")
        try:
            found = [_entry(entry) for entry in json.loads(Path(path).read_text(encoding="utf-8"))]
            known = dict(found)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{path} is no list of tokens ({error}): write "
                '[{"token": "...", "prefix": "", "scopes": ["read", "write"]}]'
            ) from error
        if len(known) < len(found):
            raise ValueError(f"a token stands in {path} twice: give each prefix a token of its own")
        if not known:
            raise ValueError(f"there is no token in {path}: nobody could use the service")
        return Tokens(known)

    def holder(self, header: str | None, origin: str = "") -> Token:
        """Who sends this Authorization header; the time it takes does not depend on how wrong it is.

        Without tokens, a page of another site (`origin`) that a browser here shows is nobody.
        """
        if self._known is None:
            if origin and urlsplit(origin).hostname not in OWN:
                raise Failure(403, "forbidden", "pages of other sites may not use a service without tokens")
            return Token()
        scheme, _, given = (header or "").partition(" ")
        digest = hashlib.sha256(given.strip().encode()).digest()
        found: Token | None = None
        for known, token in self._known.items():
            if hmac.compare_digest(known, digest):
                found = token
        if found is None or scheme.lower() != "bearer":
            raise Failure(401, "unauthorized", "send a token that is known here: Authorization: Bearer TOKEN")
        return found


def _entry(entry: Any) -> tuple[bytes, Token]:
    if unknown := entry.keys() - {"token", "sha256", "prefix", "scopes"}:
        raise ValueError(f"unknown field {sorted(unknown)[0]!r}")
    scopes, prefix = entry.get("scopes", list(SCOPES)), entry.get("prefix", "")
    if not isinstance(scopes, list) or not scopes or not set(scopes) <= set(SCOPES):
        raise ValueError(f"scopes are {SCOPES}, not {scopes!r}")
    if not isinstance(prefix, str):
        raise ValueError(f"a prefix is a text, not {prefix!r}")
    if "sha256" in entry:
        if not re.fullmatch(r"[0-9a-f]{64}", entry["sha256"]):
            raise ValueError("a digest has 64 digits, 0 to f")
        return bytes.fromhex(entry["sha256"]), Token(prefix, frozenset(scopes))
    if len(entry["token"]) < SHORTEST:
        raise ValueError(f"a token has at least {SHORTEST} letters, so that nobody guesses it")
    return hashlib.sha256(entry["token"].encode()).digest(), Token(prefix, frozenset(scopes))


class Verb(NamedTuple):
    """What a verb does, what its object may hold, and must, and how it is done."""

    what: str
    properties: dict[str, Any]
    needed: list[str]
    call: Callable[[Token, Body], Any]


class Verbs:
    """The verbs of one store, by name: each checks a JSON object, and is done with others that wait."""

    def __init__(self, batches: Batches, limits: Limits) -> None:
        self.batches, self.limits = batches, limits
        self.rows = Rows(batches.store.model)
        self.known = self._known()

    def __call__(self, verb: str, token: Token, body: Body) -> Any:
        """Run a verb, or refuse unknown fields: they may be typing errors."""
        _, names, _, call = self.known[verb]
        if unknown := body.keys() - names.keys():
            word = sorted(unknown)[0][:40]
            raise ValueError(f"unknown field {word!r}: there are {', '.join(names)}")
        return call(token, body)

    def _known(self) -> dict[str, Verb]:
        number: dict[str, Any] = {"type": "number"}
        x, y = (
            number if width == 1 else {"type": "array", "items": number, "minItems": width, "maxItems": width}
            for width in self.rows.widths
        )
        first, second = self.rows.names[1:]
        y = {"type": "integer", "minimum": -1, "maximum": self.rows.marks - 1} if self.rows.events else y
        row = [first] if self.rows.events else [first, second]
        targets = {} if self.rows.events else {"x": _listed(x)}
        start = {"start": number} if self.rows.events else {}
        key, keys = {"key": KEY}, {"keys": _listed(KEY)}
        columns = {first: _listed(x), second: _listed(y)}
        listing = {"prefix": TEXT, "after": TEXT, "most": {"type": "integer", "minimum": 1}}
        added, asked = "Add rows of any streams, as columns.", "Predict from any streams."
        forked = "A new stream that has seen what another has."
        return {
            "observe": Verb("Add a row.", key | {first: x, second: y} | SOURCE, ["key", *row], self._observe),
            "predict": Verb("Predict from a stream.", key | targets, ["key", *targets], self._predict),
            "bulk/observe": Verb(added, keys | columns | SOURCE, ["keys", *row], self._bulk_observe),
            "bulk/predict": Verb(asked, keys | targets, ["keys", *targets], self._bulk_predict),
            "create": Verb("A new stream.", key | start, ["key"], self._create),
            "count": Verb("How many rows a stream has seen.", key, ["key"], self._count),
            "keys": Verb("Keys in order.", listing, [], self._keys),
            "merge": Verb("Add what another has seen.", key | {"other": KEY}, ["key", "other"], self._merge),
            "fork": Verb(forked, key | {"to": KEY}, ["key", "to"], self._fork),
            "delete": Verb("Delete a stream.", key, ["key"], self._delete),
        }

    def openapi(self) -> dict[str, Any]:
        """What the service takes and gives, as OpenAPI has it."""
        error = {"description": "what is wrong, why, and what to do", "content": {JSON: {"schema": ERROR}}}
        codes = (400, 401, 403, 404, 408, 409, 413, 422, 429, 503, 507)
        ok = {"description": "done", "content": {JSON: {"schema": {"type": "object"}}}}
        answers = {"200": ok} | dict.fromkeys(map(str, codes), error)
        token: dict[str, Any] = {"security": [{"token": []}]}
        paths: dict[str, Any] = {}
        for name, verb in self.known.items():
            taken = {
                "type": "object",
                "properties": verb.properties,
                "required": verb.needed,
                "additionalProperties": False,
                "dependentRequired": {"source": ["position"], "position": ["source"]},
            }
            body = {"requestBody": {"required": True, "content": {JSON: {"schema": taken}}}}
            paths[f"/v1/{name}"] = {"post": {"summary": verb.what, "responses": answers} | token | body}
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
        unknown = [-1] * len(keys) if self.rows.events else None
        columns: Any = body.get(first), body.get(second, unknown)
        for name, column in zip((first, second), columns, strict=True):
            if not isinstance(column, list) or len(column) != len(keys):
                raise ValueError(f"{name} must be a list with one entry for each of the keys")
        return self.batches.submit(Observe(keys, *self.rows.columns(*columns), *self._place(token, body)))

    def _place(self, token: Token, body: Body) -> tuple[str | None, int | None]:
        """Where rows come from; sources of a token are its own."""
        source, position = body.get("source"), body.get("position")
        if source is None and position is None:
            return None, None
        if not isinstance(source, str) or not 0 < len(source) <= 256 or type(position) is not int:
            raise ValueError(
                "a source has 1 to 256 letters, a position is a whole number; give both or neither"
            )
        prefix = token.prefix.replace("%", "%25").replace(":", "%3A")  # else one could name another's source
        return f"http:{prefix}:{source}", position

    async def _predict(self, token: Token, body: Body) -> Any:
        key = self._key(token, "read", body)
        targets = None if self.rows.events else [self._targets(body.get("x"))]
        found = await self.batches.submit(Predict([key], targets))
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
            raise ValueError(f"x is a list of 1 to {self.limits.rows:,} targets")
        return [numbers("x", each, self.rows.widths[0]) for each in given]

    def _create(self, token: Token, body: Body) -> Any:
        key = self._key(token, "write", body)
        start = numbers("start", body.get("start", 0.0), 1)[0]
        create = Work(lambda store: store.create([key], start=start), {"created": 1}, [key])
        return self.batches.submit(create)

    def _count(self, token: Token, body: Body) -> Any:
        key = self._key(token, "read", body)
        return self.batches.submit(Work(lambda store: {"count": store.count([key]).item()}))

    def _keys(self, token: Token, body: Body) -> Any:
        prefix, after, most = body.get("prefix", token.prefix), body.get("after", ""), body.get("most", 1000)
        if not isinstance(prefix, str) or not isinstance(after, str) or type(most) is not int:
            raise ValueError("prefix and after are texts, most a whole number")
        token.require("read", [prefix])
        most = min(most, self.limits.rows)
        return self.batches.submit(Work(lambda store: {"keys": store.keys(prefix, after=after, most=most)}))

    def _merge(self, token: Token, body: Body) -> Any:
        key, other = self._key(token, "write", body), self._key(token, "read", body, "other")
        return self.batches.submit(Work(lambda store: store.merge(key, other), {"merged": 1}))

    def _fork(self, token: Token, body: Body) -> Any:
        key, to = self._key(token, "read", body), self._key(token, "write", body, "to")
        return self.batches.submit(Work(lambda store: store.fork(key, to), {"created": 1}, [to]))

    def _delete(self, token: Token, body: Body) -> Any:
        key = self._key(token, "write", body)
        return self.batches.submit(Work(lambda store: {"deleted": store.delete([key])}))

    def _key(self, token: Token, scope: str, body: Body, name: str = "key") -> str:
        """The key of a stream that the holder of a token may use so."""
        key = body.get(name)
        if not isinstance(key, str) or not 0 < len(key) <= LONGEST:
            raise ValueError(f"{name} is a text of 1 to {LONGEST:,} letters that names a stream")
        token.require(scope, [key])
        return key

    def _many(self, token: Token, scope: str, body: Body) -> list[str]:
        keys: list[str] = body.get("keys", [])
        texts = isinstance(keys, list) and set(map(type, keys)) == {str}
        if not texts or not 0 < min(map(len, keys)) <= max(map(len, keys)) <= LONGEST:
            raise ValueError(f"keys is a list of texts of 1 to {LONGEST:,} letters, one for each row")
        if len(keys) > self.limits.rows:
            raise Failure(413, "too_large", f"at most {self.limits.rows:,} rows at a time, not {len(keys):,}")
        token.require(scope, keys)
        return keys


def _listed(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}
