"""A thousand kills of the store, its consumers and the service: nothing acknowledged lost, nothing twice."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from constmem.serve import Tokens
from tests.serve import test_service
from tests.streams import test_sources, test_store

pytestmark = pytest.mark.attack


def test_three_hundred_kills_of_a_store(tmp_path: Path) -> None:
    assert test_store.kill_often(tmp_path / "s", 300, seed=2) > 200


def test_three_hundred_kills_of_a_consumer_of_lines(tmp_path: Path) -> None:
    assert test_sources.kill_lines(tmp_path, 300, seed=3) > 150


@test_sources.needs_redis
def test_two_hundred_kills_of_a_consumer_of_redis(tmp_path: Path) -> None:
    with test_sources.redis_server(tmp_path) as url:
        assert test_sources.kill_redis(tmp_path, url, 200, seed=4) > 100


def test_two_hundred_kills_of_a_service(tmp_path: Path) -> None:
    at_work = 0
    for turn in range(20):
        at_work += test_service.kill_often(tmp_path / f"s{turn}", 10, seed=turn)
    assert at_work > 80


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
