"""The command line in this process: what a command writes, where it ends, without starting an interpreter."""

import contextlib
import io
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

from constmem.cli import main


def command(*words: str, cwd: Path | str = ".") -> subprocess.CompletedProcess[str]:
    """Run `constmem` with these words in a folder: its exit code, and what it has written."""
    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    with (
        mock.patch.object(sys, "argv", ["constmem", *words]), contextlib.chdir(cwd),
        contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings(),
    ):  # fmt: skip
        warnings.simplefilter("default")
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
    return subprocess.CompletedProcess(list(words), int(code), out.getvalue(), err.getvalue())
