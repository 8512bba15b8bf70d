"""States merged as they come, without losing those before the one that fails."""

from collections.abc import Iterable
from typing import TypeVar

from constmem.core.monoid import Monoid
from constmem.neural_processes.chunks import nothing

S = TypeVar("S", bound=Monoid)


class ConditioningError(RuntimeError):
    """Conditioning on a stream of chunks broke off; `state` holds all that came before."""

    def __init__(self, message: str, state: Monoid) -> None:
        super().__init__(message)
        self.state = state


def streamed(parts: Iterable[S], initial: S | None) -> S:
    """The merge of `initial` and of all parts, each forgotten once it is merged."""
    state = initial
    try:
        for part in parts:
            state = part if state is None else state.merge(part)
    except Exception as error:
        if state is None:
            raise
        raise ConditioningError(
            f"conditioning broke off after {state.count.tolist()} points: {error}; "
            "what was seen so far is this error's .state, to go on from with initial=",
            state,
        ) from error
    if state is None:
        raise nothing()
    return state
