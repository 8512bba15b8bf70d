"""The attack's short form, and lines broken on purpose, which it must notice."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def attacked(tmp_path: Path, *words: str) -> dict[str, Any]:
    """What came of an attack in a process of its own, by kind; it leaves its working folder as it was."""
    out, work = tmp_path / "rows.json", tmp_path / "work"
    work.mkdir()
    command = [sys.executable, "-m", "tests.attack", *words, "--out", str(out)]
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=work, env=paths, capture_output=True, text=True, check=False)
    assert out.exists(), done.stderr[-3000:]
    assert not list(work.iterdir())
    return {row["kind"]: row for row in json.loads(out.read_text())["rows"]}


def test_all_holds_in_the_short_form(tmp_path: Path) -> None:
    found = attacked(tmp_path)
    assert not [words for row in found.values() for words in row["findings"]]
    assert sum(row["tried"] for row in found.values()) > 1000
    assert all(row["right"] + row["refused"] == row["tried"] > 0 for row in found.values())
    for kind in ("states", "models", "tables", "models of points", "blocks", "commands", "little memory"):
        assert found[kind]["right"], f"nothing of {kind} was ever accepted: nothing was compared"
        assert found[kind]["refused"], f"nothing of {kind} was ever refused"


@pytest.mark.attack
@pytest.mark.parametrize(
    ("broken", "only"),
    [
        ("checksums", "states=300"),
        ("checksums", "streams=300"),
        ("renaming", "killed streams=200"),
        ("locks", "threads on a stream=10"),
        ("locks", "threads on an estimator=60"),
    ],
)
def test_a_line_that_is_broken_on_purpose_is_noticed(tmp_path: Path, broken: str, only: str) -> None:
    (row,) = attacked(tmp_path, "--only", only, "--broken", broken).values()
    assert row["findings"]
