"""Names that people type: taken if they are known, otherwise refused with the nearest ones."""

import difflib
from typing import Any


def known(what: str, name: str, names: Any) -> str:
    """`name` if it is one of `names`; otherwise an error with the nearest ones."""
    if name in names:
        return name
    near = difflib.get_close_matches(name, list(names), n=3)
    every = ", ".join(filter(None, names))
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {every}"
    raise ValueError(f"there is no {what} {name!r}: {hint}")
