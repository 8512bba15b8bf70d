"""The watchdog itself: a crash, a hang and a wrong answer are findings, and the other cases go on."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from constmem.core.checks import positive
from tests.attack.verdict import Finding, Refused, attempt

CASES = """
import json, os, random, signal, time
import tests.attack.pool as pool
from tests.attack.verdict import Finding

def case(draw, folder):
    number = int(folder.name.rpartition("-")[2])
    open("left", "w").close()
    if number == 3:
        os.kill(os.getpid(), signal.SIGSEGV)
    if number == 5:
        while True:
            pass
    if number == 7:
        raise Finding("wrong")
    if number == 9:
        bytearray(2**40)
    return "right" if number % 2 else "refused"

pool.HANG = 1.0
tally = pool.run({"some": (case, 20)}, seed=0)["some"]
print(json.dumps([tally.tried, tally.right, tally.refused, sorted(tally.findings)]))
"""
KILL = """
import json, random, time
from tests.attack.kills import killed

draw = random.Random(0)
draw.random = lambda: 1.0
print(json.dumps(killed(draw, lambda report: (report(7), time.sleep(600), report(8)), 2.0)))
"""


def printed(code: str, folder: Path) -> Any:
    """What a program prints, run in a process of its own: it forks."""
    paths = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, env=paths, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_a_crash_a_hang_and_a_wrong_answer_are_observations_and_the_rest_goes_on(tmp_path: Path) -> None:
    tried, right, refused, findings = printed(CASES, tmp_path)
    assert (tried, right, refused) == (20, 6, 10)
    assert [words.split(":")[0] for words in findings] == ["some 3", "some 5", "some 7", "some 9"]
    for words, sign in zip(findings, ("status 11", "still busy", "wrong", "MemoryError"), strict=True):
        assert sign in words
    assert not list(tmp_path.iterdir()), "a case has left a file in the working folder"


def test_a_process_is_killed_and_what_it_acknowledged_before_is_known(tmp_path: Path) -> None:
    assert printed(KILL, tmp_path) == [7]


def test_errors_that_users_are_promised_are_known_from_others() -> None:
    assert isinstance(attempt(lambda: positive("chunk", 0)), Refused)
    for wrong in (lambda: [][1], lambda: int("x"), lambda: {}["a"], lambda: 1 / 0):
        with pytest.raises(Finding):
            attempt(wrong)
