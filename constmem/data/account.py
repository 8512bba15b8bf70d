"""What a prepared pack holds, and how that compares with the official data set, in words for a terminal."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from constmem.data.catalogue import EVENT_KEYS
from constmem.data.packs import Listing, listed, read_pack, told
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
    counts = told(listing.counts)
    complete = listing.known.completeness(listing.counts)
    source = str(read_pack(path, ["source"])["source"])
    found = f"found: {counts} {_kinds(path, listing.known.keys)}{f' ({complete})' if complete else ''}"
    warnings = [source] if DIFFERS in source else []
    official = listing.known.official
    if official and listing.counts != official:
        expected = told(official)
        warnings.append(f"expected were {expected} images, officially, but found were {counts}: {complete}")
    return Account((found, *([] if DIFFERS in source else [source])), tuple(warnings))


def replaced(path: Path, before: Iterable[Listing]) -> str | None:
    """What a pack that was just written has taken the place of, if anything, by a listing from before."""
    for old in before:
        if old.path == path:
            return f"replaced: a pack {'that could not be read' if old.problem else f'of {told(old.counts)}'}"
    return None


def _kinds(path: Path, keys: tuple[str, ...]) -> str:
    """What a pack is made of, and of how many kinds of it."""
    if keys == EVENT_KEYS:
        pack = read_pack(path, ["offsets", "num_marks"])
        return f"sequences, {int(pack['offsets'][-1]):,} events of {int(pack['num_marks']):,} marks"
    if "train_labels" not in keys:
        return "images"
    labels = read_pack(path, ["train_labels", "test_labels"])
    return f"images of {len(np.unique(np.concatenate(list(labels.values()))))} classes"
