"""Requests that schemathesis makes of the description of the service."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from constmem.serve import Tokens
from tests.serve import test_service

pytestmark = pytest.mark.attack


def test_schemathesis_finds_no_answer_that_the_service_does_not_describe(tmp_path: Path) -> None:
    pytest.importorskip("schemathesis")
    path = tmp_path / "tokens"
    path.write_text(json.dumps([{"token": test_service.WRITER}]))
    path.chmod(0o600)
    command = ["run", "--max-examples", "100", "--seed", "1", "--phases", "coverage,fuzzing"]
    command += ["--exclude-checks", "positive_data_acceptance"]  # columns of one length: no schema can say so
    with test_service.served(tmp_path / "s", tokens=Tokens.load(path)) as (port, service):
        asked = [*command, "-H", f"Authorization: Bearer {test_service.WRITER}"]
        address = f"http://127.0.0.1:{port}/openapi.json"
        done = subprocess.run(
            [Path(sys.executable).with_name("schemathesis"), *asked, address],
            capture_output=True,
            text=True,
            check=False,
        )
        assert sum(service.answered.values()) > 300
        assert not [status for _, status in service.answered if status == 500]
    assert done.returncode == 0, done.stdout[-9000:]
