"""What an attempt may come to: the right answer or a documented refusal; anything else is a finding."""

import dis
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch

import constmem
from constmem.neural_processes import ConditioningError
from constmem.training.folder import StoppedError

DOCUMENTED = (
    ValueError, TypeError, KeyError, NotImplementedError, OSError, MemoryError, ImportError,
    ConditioningError, StoppedError,
)  # fmt: skip
HOME = str(Path(constmem.__file__).parent)
RAISES = dis.opmap["RAISE_VARARGS"]
LONGEST = 4000  # letters of a message that somebody reads
RIGHT, REFUSED = "right", "refused"


class Finding(Exception):  # noqa: N818
    """Something that must not happen has happened; the message says what."""


class Refused(NamedTuple):
    """A documented error, with a message."""

    error: Exception


def attempt(work: Callable[[], Any]) -> Any:
    """What `work` returns, or `Refused`; a `Finding` where it fails in another way."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning is an answer, too
        try:
            return work()
        except Finding:
            raise
        except Exception as error:
            if why := undocumented(error):
                lines = traceback.format_tb(error.__traceback__)[-3:]
                raise Finding(f"{why}: {error!r}"[:600] + "\n" + "".join(lines)) from error
            return Refused(error)


def undocumented(error: Exception) -> str | None:
    """Why an error is none that users are promised: of another kind, not raised on purpose, or mute."""
    if not isinstance(error, DOCUMENTED):
        return f"{type(error).__name__} is no documented error"
    if not str(error).strip() or len(str(error)) > LONGEST:
        return f"a message of {len(str(error))} letters"
    if isinstance(error, OSError) and error.errno is not None:
        return None  # the system's own words
    return None if _on_purpose(error.__traceback__) else "not raised on purpose"


def _on_purpose(tb: TracebackType | None) -> bool:
    """Whether the innermost frame is a `raise` of this library, or of scikit-learn's checks."""
    assert tb is not None
    while tb.tb_next is not None:
        tb = tb.tb_next
    code = tb.tb_frame.f_code
    ours = code.co_filename.startswith(HOME) or "/sklearn/" in code.co_filename
    return ours and code.co_code[tb.tb_lasti] == RAISES


def require(holds: bool, what: str) -> None:
    """A finding unless it holds."""
    if not holds:
        raise Finding(what)


def same(found: Any, expected: Any) -> bool:
    """Whether two answers are the same to the last bit."""
    if isinstance(expected, Mapping):
        return (
            isinstance(found, Mapping)
            and found.keys() == expected.keys()
            and all(same(found[key], expected[key]) for key in expected)
        )
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(expected, torch.Tensor):
        expected, found = expected.detach().numpy(), found.detach().numpy()
    if isinstance(expected, np.ndarray):
        alike = found.dtype == expected.dtype and found.shape == expected.shape
        return alike and (
            found.tolist() == expected.tolist()
            if expected.dtype.hasobject
            else found.tobytes() == expected.tobytes()
        )
    return bool(found == expected)


def close(found: Any, expected: Any, tolerance: float = 1e-6) -> bool:
    """Whether two arrays agree but for rounding."""
    found, expected = (
        np.asarray(t.detach() if isinstance(t, torch.Tensor) else t, np.float64) for t in (found, expected)
    )
    scale = 1.0 + float(np.abs(expected).max(initial=0.0))
    return found.shape == expected.shape and bool((np.abs(found - expected) <= tolerance * scale).all())
