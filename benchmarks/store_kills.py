"""A thousand kills (-9) of a store, its consumers and the service: nothing acknowledged lost, nothing twice.

python benchmarks/store_kills.py            # twelve minutes; writes results/store_kills.json

Each is killed at a random moment and started again until its work is done, then begins anew. After every kill
the states are compared, bit for bit, with those of a process that nobody killed; the first difference ends
this program with an error. A real redis-server must be installed.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from record import Row, provenance, save

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.serve import test_service
from tests.streams import test_sources, test_store


def store(folder: Path) -> tuple[int, int]:
    """A process that adds rows to a store."""
    return 300, test_store.kill_often(folder / "s", 300, seed=2)


def lines(folder: Path) -> tuple[int, int]:
    """A consumer of JSON lines."""
    return 300, test_sources.kill_lines(folder, 300, seed=3)


def redis(folder: Path) -> tuple[int, int]:
    """A consumer of a Redis stream."""
    with test_sources.redis_server(folder) as url:
        return 200, test_sources.kill_redis(folder, url, 200, seed=4)


def service(folder: Path) -> tuple[int, int]:
    """The service under requests."""
    return 200, sum(test_service.kill_often(folder / f"s{turn}", 10, seed=turn) for turn in range(20))


KILLED: tuple[Callable[[Path], tuple[int, int]], ...] = store, lines, redis, service


def main() -> None:
    rows: list[Row] = []
    about = provenance(0, "made at random")
    for kill in KILLED:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            kills, at_work = kill(Path(folder))
        spent = round(time.perf_counter() - start)
        rows.append({"what": kill.__name__, "kills": kills, "at_work": at_work, "seconds": spent})
        print(rows[-1], flush=True)
        save("store_kills", rows, **about)


if __name__ == "__main__":
    main()
