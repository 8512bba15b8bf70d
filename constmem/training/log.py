"""What happens in a run: losses and validations in metrics.jsonl."""

import contextlib
import json
import logging
import time
from math import inf, isfinite
from pathlib import Path
from typing import Any

from constmem.core.files import write_text

FILE, BOARD = "metrics.jsonl", "tensorboard"
_log = logging.getLogger("constmem")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The entries of a run's metrics.jsonl, none where there is none yet; a last line cut short is left out.

    Lines are added one by one, so a run that was killed, or had no room, may have left half of one.
    """
    path = folder / FILE
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    entries: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        if isinstance(entry, dict):
            _require_numbers(entry, f"line {number} of {path} is damaged")
            entries.append(entry)
        elif number < len(lines):
            raise ValueError(f"line {number} of {path} is damaged: mend it, or delete that line")
    return entries


def _require_numbers(entry: dict[str, Any], what: str) -> None:
    """Refuse an entry that has something else where a number belongs."""
    for key, value in entry.items():
        whole = type(value) is int and abs(value) < 2**63
        if key != "data" and not (whole or (type(value) is float and key != "step")):
            raise ValueError(
                f"{what}: {key} is {str(value)[:60]!r}, not a number; mend it, or delete that line"
            )


def _finite(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry without its numbers that are not finite: JSON has no word for them."""
    return {key: value for key, value in entry.items() if not isinstance(value, float) or isfinite(value)}


class Log:
    """metrics.jsonl, one line an entry; TensorBoard beside it where that is installed."""

    def __init__(self, out: Path, done: int, statement: str) -> None:
        self.path = out / FILE
        self.start = time.monotonic()
        entries = [_finite(entry) for entry in read_metrics(out) if entry.get("step", 0) <= done]
        if done and not any("step" in entry for entry in entries):
            _log.warning(f"{self.path} is lost: the best validation is sought again from step {done}")
        self.before = max((entry.get("seconds", 0.0) for entry in entries), default=0.0)
        self.best: float | None = max((e["validation"] for e in entries if "validation" in e), default=None)
        entries = entries or [{"data": statement}]
        write_text(self.path, "".join(json.dumps(entry) + "\n" for entry in entries))
        self.board: Any = None
        with contextlib.suppress(ImportError):
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(out / BOARD), purge_step=done)

    def close(self) -> None:
        """Close TensorBoard's file."""
        if self.board is not None:
            self.board.close()

    def _write(self, entry: dict[str, float], step: int) -> None:
        entry = _finite(entry)
        seconds = round(self.before + time.monotonic() - self.start, 2)
        try:
            with self.path.open("a") as file:
                file.write(json.dumps({"step": step, **entry, "seconds": seconds}) + "\n")
        except OSError as error:
            error.filename = str(self.path)
            raise
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
