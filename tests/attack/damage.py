"""Damage to bytes, to headers, to JSON and to text, drawn at random."""

import copy
import hashlib
import json
import random
import re
from typing import Any

DEEP = 20_000  # lists in lists
CHECKSUM = re.compile(rb'"checksum":"([0-9a-f]{64})"')
ODD: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 7, 2**31, 2**40, 2**63, 2**64, -(2**63), 10**30, 0.5, -0.0, 1e-320,
    1e308, -1e308,
    float("nan"), float("inf"), "", "-1", "x", "x" * 999, "\x00", "é", [], {}, [[]], [1, 2, 3], {"a": 1}, "0",
)  # fmt: skip
WORDS = (
    "", "-1", "0", "1e999", "-1e999", "nan", "inf", "NA", "true", "x", '"', '""', "'", "1,5", "9" * 400,
    "0x10", "1_0",
    "2024-01-01", "2024-13-45", "\x00", "é", " 7 ", "1e-320", "9007199254740993", "=1+1", "\u2028",
    "\ufeff", "٣",
)  # fmt: skip


def in_bytes(draw: random.Random, content: bytes, others: list[bytes]) -> bytes:
    """A file with bits flipped, bytes overwritten, cut, extended, moved, or parts of another in it."""
    made, size = bytearray(content), len(content)
    at = draw.randrange(size)
    length = draw.choice((1, 2, 4, 8, 64, 512))
    what = draw.choice(("bit", "bit", "bit", "bit", "bits", "zeros", "ones", "noise", "cut", "cut front",
                        "more", "gap", "twice", "other", "start of other", "end of other", "empty",
                        "deep"))  # fmt: skip
    match what:
        case "bit":
            made[at] ^= 1 << draw.randrange(8)
        case "bits":
            for _ in range(draw.randint(2, 20)):
                made[draw.randrange(size)] ^= 1 << draw.randrange(8)
        case "zeros" | "ones" | "noise":
            new = {"zeros": bytes(length), "ones": b"\xff" * length, "noise": draw.randbytes(length)}[what]
            made[at : at + length] = new
        case "cut":
            del made[at:]
        case "cut front":
            del made[:at]
        case "more":
            made += draw.randbytes(length)
        case "gap":
            del made[at : at + length]
        case "twice":
            made[at:at] = made[at : at + length]
        case "other":
            made = bytearray(draw.choice(others))
        case "start of other":
            made[:at] = draw.choice(others)[:at]
        case "end of other":
            made[at:] = draw.choice(others)[at:]
        case "empty":
            made.clear()
        case _:
            made = bytearray(b"[" * DEEP if at % 2 else b'{"a":' * DEEP)
    return bytes(made)


def in_json(draw: random.Random, value: Any) -> Any:
    """JSON with one thing in it replaced, dropped, renamed or repeated."""
    made = copy.deepcopy(value)
    places: list[tuple[Any, Any]] = []
    _places(made, places)
    if not places:
        return draw.choice(ODD)
    owner, key = draw.choice(places)
    match draw.randrange(5):
        case 0:
            del owner[key]
        case 1 if isinstance(owner, dict):
            owner[draw.choice(("x", key + "x", key[:-1]))] = owner.pop(key)
        case 2 if isinstance(owner[key], int | float):
            owner[key] = draw.choice((-owner[key], owner[key] + 1, owner[key] * 2, str(owner[key]), 2**62))
        case 3:
            other, name = draw.choice(places)
            owner[key] = copy.deepcopy(other.get(name) if isinstance(other, dict) else name)
        case _:
            owner[key] = draw.choice(ODD)
    return made


def _places(value: Any, found: list[tuple[Any, Any]]) -> None:
    keys = (
        list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    )
    for key in keys:
        found.append((value, key))
        _places(value[key], found)


def in_header(draw: random.Random, content: bytes, *, sealed: bool) -> bytes:
    """A safetensors file with something else in its header; sealed: and a checksum that fits it."""
    size = int.from_bytes(content[:8], "little")
    header, payload = json.loads(content[8 : 8 + size]), content[8 + size :]
    words: dict[str, str] = header.get("__metadata__", {})
    inner = [key for key, text in words.items() if text.startswith(("{", "["))]
    if inner and draw.random() < 0.5:
        key = draw.choice(inner)
        words[key] = json.dumps(in_json(draw, json.loads(words[key])))
        if draw.random() < 0.05:
            words[key] = "[" * DEEP
    elif words and draw.random() < 0.3:
        words[draw.choice(list(words))] = str(draw.choice(ODD))
    else:
        header = in_json(draw, header)
    return assembled(header, payload, sealed=sealed)


def in_numbers(draw: random.Random, content: bytes) -> bytes:
    """A safetensors file with other numbers in its tensors, and a checksum that fits them."""
    size = int.from_bytes(content[:8], "little")
    made = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        if len(made) >= 8 + size + 8:
            at = 8 + size + draw.randrange((len(made) - 8 - size) // 8) * 8
            made[at : at + 8] = draw.choice(
                (b"\x00" * 8, b"\xff" * 8, b"\x00" * 6 + b"\xf0\x7f", draw.randbytes(8))
            )
    return seal(made)


def assembled(header: Any, payload: bytes, *, sealed: bool) -> bytes:
    """A safetensors file of these."""
    text = json.dumps(header, separators=(",", ":")).encode()
    content = bytearray(len(text).to_bytes(8, "little") + text + payload)
    return seal(content) if sealed else bytes(content)


def seal(content: bytearray) -> bytes:
    """The same file with a checksum of what it holds now."""
    place = CHECKSUM.search(content, 8)
    if place is not None:
        content[place.start(1) : place.end(1)] = b"0" * 64
        content[place.start(1) : place.end(1)] = hashlib.sha256(content).hexdigest().encode()
    return bytes(content)


def in_text(draw: random.Random, text: str, delimiter: str = ",") -> str:
    """Lines of cells with cells replaced, rows cut, repeated, moved, or other separators."""
    rows = [line.split(delimiter) for line in text.splitlines()]
    for _ in range(draw.randint(1, 3)):
        row = draw.choice(rows) if draw.random() < 0.8 else rows[0]
        at = draw.randrange(len(row)) if row else 0
        match draw.randrange(7):
            case 0 | 1 | 2 if row:
                row[at] = draw.choice(WORDS)
            case 3:
                row.insert(at, draw.choice(WORDS))
            case 4 if row:
                del row[at]
            case 5:
                rows.insert(draw.randrange(len(rows)), list(row))
            case _:
                del rows[draw.randrange(len(rows)) :]
                rows = rows or [[]]
    end = draw.choice(("\n", "\n", "\n", "\r\n", "\r"))
    return end.join(
        draw.choice((delimiter,) * 9 + (";", "\t", "|")).join(row) for row in rows
    ) + end * draw.randrange(3)
