"""Complete handwritten digits from a growing stream of pixels, with the weights that come with the package.

python examples/digits.py              # a few seconds; writes digits.png
"""

import argparse
from pathlib import Path

from constmem import CMANP
from constmem.data import load_images
from constmem.evaluation.demo import like_emnist
from constmem.evaluation.pictures import completions
from constmem.plots import completion_grid


def main(out: Path) -> Path:
    model = CMANP.from_pretrained("emnist")  # trained on EMNIST's digits
    digits = like_emnist(load_images("digits", split="test").pixels[3:5])  # scikit-learn's, never seen
    return completion_grid(
        completions(model, digits, (0, 10, 30, 60, 120, 250)), digits, out,
        title="Digits of another data set, completed from a growing stream of pixels",
    )  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("digits.png"))
    print("wrote", main(parser.parse_args().out))
