"""Models behind an address: who may do what with which streams, limits, and errors as clients see them."""

import hashlib
import hmac
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

SCOPES = ("read", "write")
OWN = ("localhost", "127.0.0.1", "::1")  # names of this machine
SHORTEST = 16  # letters of a token


class Failure(Exception):  # noqa: N818  # an answer, not a defect
    """An answer that says what is wrong, why, and what to do."""

    def __init__(self, status: int, kind: str, message: str, *, wait: int | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.message, self.wait = status, kind, message, wait


@dataclass(frozen=True)
class Limits:
    """How much one request, and all of them together, may ask for."""

    body: int = 2**20  # bytes
    rows: int = 10_000  # of a request: rows, targets or keys
    waiting: int = 1024  # requests that wait for an answer
    streams: int = 10_000_000  # in the store; and as many sources
    seconds: float = 30.0  # for a body to arrive, and for an answer


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
            entries = json.loads(Path(path).read_text(encoding="utf-8"))
            found = [_entry(entry) for entry in entries]
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
