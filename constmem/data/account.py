"""What a prepared pack holds, and how that compares with the official data set, in words for a terminal."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from constmem.data.catalogue import EVENT_KEYS
from constmem.data.packs import listed, read_pack
from constmem.data.prepare import DIFFERS


@dataclass(frozen=True)
class Account:
    """What was found, and what of it is not as one might expect; subsets are fine, but should be known.

    Attributes:
        found: lines on what the pack holds.
        warnings: lines on what differs from the official data set.
    """

    found: tuple[str, ...]
    warnings: tuple[str, ...] = ()


def account(path: Path) -> Account:
    """Counts and origin of a pack that was just written, against the official ones where they are known."""
    listing = listed(path.stem, path.parent)
    counts = ", ".join(f"{count:,} {split}" for split, count in listing.counts.items())
    told = listing.known.completeness(listing.counts)
    source = str(read_pack(path, ["source"])["source"])
    found = f"found: {counts} {_kinds(path, listing.known.keys)}{f' ({told})' if told else ''}"
    warnings = [source] if DIFFERS in source else []
    official = listing.known.official
    if official and listing.counts != official:
        expected = ", ".join(f"{count:,} {split}" for split, count in official.items())
        warnings.append(f"expected were {expected} images, officially, but found were {counts}: {told}")
    return Account((found, *([] if DIFFERS in source else [source])), tuple(warnings))


def _kinds(path: Path, keys: tuple[str, ...]) -> str:
    """What a pack is made of, and of how many kinds of it."""
    if keys == EVENT_KEYS:
        pack = read_pack(path, ["offsets", "num_marks"])
        return f"sequences, {int(pack['offsets'][-1]):,} events of {int(pack['num_marks']):,} marks"
    if "train_labels" not in keys:
        return "images"
    labels = read_pack(path, ["train_labels", "test_labels"])
    return f"images of {len(np.unique(np.concatenate(list(labels.values()))))} classes"
