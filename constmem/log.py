"""What happened in a run: losses and validations, one line each, and the best of them."""

import contextlib
import json
import time
from math import inf
from pathlib import Path
from typing import Any

from constmem.files import write_text


class Log:
    """metrics.jsonl, one line an entry; TensorBoard beside it where that is installed."""

    def __init__(self, out: Path, done: int, statement: str) -> None:
        self.path = out / "metrics.jsonl"
        self.start = time.monotonic()
        kept = self.path.read_text().splitlines() if self.path.exists() else []
        kept = [line for line in kept if json.loads(line).get("step", 0) <= done]
        entries = [json.loads(line) for line in kept]
        self.before = max((entry.get("seconds", 0.0) for entry in entries), default=0.0)
        self.best: float | None = max((e["validation"] for e in entries if "validation" in e), default=None)
        if not kept:
            kept = [json.dumps({"data": statement})]
        write_text(self.path, "\n".join(kept) + "\n")
        self.board: Any = None
        with contextlib.suppress(ImportError):
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(out / "tensorboard"), purge_step=done)

    def _write(self, entry: dict[str, float], step: int) -> None:
        seconds = round(self.before + time.monotonic() - self.start, 2)
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **entry, "seconds": seconds}) + "\n")
        if self.board is not None:
            for name, value in entry.items():
                self.board.add_scalar(name, value, step)

    def step(self, step: int, loss: float, rate: float) -> None:
        """The loss of one step."""
        self._write({"loss": loss, "lr": rate}, step)

    def peak(self, step: int, size: int | None) -> None:
        """The most bytes that training has taken so far, where they are counted."""
        if size is not None:
            self._write({"peak_memory": size}, step)

    def validation(self, step: int, log_likelihood: float) -> bool:
        """The validation's log-likelihood of a point or event; True if it is the best so far."""
        self._write({"validation": log_likelihood}, step)
        if not log_likelihood >= (-inf if self.best is None else self.best):  # so NaN is never the best
            return False
        self.best = log_likelihood
        return True
