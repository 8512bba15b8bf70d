"""Files of rows that tests write."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write(path: Path, header: Sequence[str], rows: Sequence[Sequence[Any]], delimiter: str = ",") -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(header)
        writer.writerows(rows)
    return path
