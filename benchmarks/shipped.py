"""Scores of the weights that come with the package, on a fixed part of EMNIST's test sets.

python benchmarks/shipped.py            # half a minute on one core; writes results/shipped.json

The part is every 20th batch of the seen classes and every 74th of the unseen ones, 200 images of each in
contexts of all sizes, so that a test can score it again in seconds and hold it against the committed figures.
"""

import argparse
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from record import provenance, save

from constmem import CMANP
from constmem.evaluation import evaluate
from constmem.training.recipes import recipe
from constmem.training.sources import open_source

EVERY = {"seen": 20, "unseen": 74}  # of 200 and of 740 batches


def scored(data_dir: Path | None) -> tuple[list[dict[str, Any]], str]:
    """A row for each test set, and what the data are."""
    where = torch.device("cpu")
    source = open_source("emnist", recipe("emnist", "cmanp"), data_dir=data_dir, device=where)
    model = CMANP.from_pretrained("emnist")
    rows = []
    for test, step in EVERY.items():
        batches = list(islice(source.tests[test](), step // 2, None, step))
        scores = {key: value for key, value in asdict(evaluate(model, batches)).items() if value is not None}
        rows.append({"weights": "emnist", "test": test, "batches": len(batches), **scores})
    return rows, source.statement


def main() -> None:
    parser = argparse.ArgumentParser(description="Scores of the weights that come with the package.")
    parser.add_argument("--data-dir", type=Path, help="folder of prepared data sets; else CONSTMEM_DATA")
    rows, statement = scored(parser.parse_args().data_dir)
    for row in rows:
        print(row)
    save("shipped", rows, **provenance(0, statement))


if __name__ == "__main__":
    main()
