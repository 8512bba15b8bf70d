"""From original public files to packs, by name: events here (JODIE, EasyTPP), images in `prepare_images`."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from constmem.core.checks import known
from constmem.data.catalogue import EVENT_SPLITS, PREPARED
from constmem.data.event_files import Columns, Sequences, easytpp_sequences, numbered_sequences
from constmem.data.images import Progress
from constmem.data.packs import Array, Folder, data_folder, free_for, in_words, listed, read_pack, write_pack
from constmem.data.prepare_images import DIFFERS, Source, prepare_celeba, prepare_emnist


@dataclass(frozen=True)
class Jodie:
    """What is done with a file of the JODIE collection.

    Attributes:
        file: its public name.
        pack: what is written.
        columns: whose sequences they are, and what the marks are.
        commonest: how many marks are kept (None: all).
        rebase: count each sequence's times from its first event.
    """

    file: str
    pack: str
    columns: Columns = field(default_factory=dict)
    commonest: int | None = None
    rebase: bool = False


PAGES = {"user": "item_id", "mark": "user_id"}  # a page's edits, marked by editor
JODIE = {
    "mooc": Jodie("mooc.csv", "events_mooc", rebase=True),
    "reddit": Jodie("reddit.csv", "events_reddit50", commonest=50),
    "wiki": Jodie("wikipedia.csv", "events_wiki", PAGES),
}
UNITS = {"taxi": "hour"}  # of EasyTPP's sets, where it is known
FILES = {"train": ("train",), "validation": ("dev", "validation", "valid", "val"), "test": ("test",)}


@dataclass(frozen=True)
class Prepared:
    """A pack that was just written: where, what it holds, and what differs from the official data."""

    path: Path
    found: list[str]
    warnings: list[str]


def prepare_pack(
    what: str,
    source: Source,
    data_dir: Folder,
    *,
    partition: Source | None = None,
    name: str | None = None,
    unit: str | None = None,
    replace: bool = False,
    progress: Progress | None = None,
) -> Prepared:
    """Write the pack of a data set from its original public files, by the name that the registry gives it.

    Args:
        what: one of `catalogue.PREPARED`.
        source: folder, archive or file of the original data.
        data_dir: folder to write to.
        partition: of celeba, the list of its splits.
        name, unit: of easytpp, what the data set is called and the unit of its times.
        replace: write over a pack that holds more, too.
        progress: called with (done, all) while images are read.
    """
    preparers: dict[str, Callable[..., Path]] = {
        "emnist": partial(prepare_emnist, progress=progress),
        "celeba": partial(prepare_celeba, partition=partition, progress=progress),
        **{jodie: partial(prepare_jodie, jodie) for jodie in JODIE},
        "easytpp": partial(prepare_easytpp, name=name, unit=unit),
    }
    known("data set to prepare", what, PREPARED)
    if data_dir is None:
        raise ValueError("say where to write: --data-dir FOLDER, or set CONSTMEM_DATA")
    if what != "easytpp" and (name or unit):
        raise ValueError(f"--name and --unit are for easytpp: those of {what} are known")
    if what != "celeba" and partition:
        raise ValueError(f"--partition is for celeba: {what} has no such list")
    folder = data_folder(data_dir)
    before = {path: listed(path.stem, folder) for path in folder.glob("*.npz")}
    path = preparers[what](source, data_dir, replace=replace)
    found, warnings = listed(path.stem, folder).prepared(str(read_pack(path, ["source"])["source"]), DIFFERS)
    if path in before:
        old = before[path]
        held = "that could not be read" if old.problem else f"of {in_words(old.counts)}"
        found = [f"replaced: a pack {held}", *found]
    return Prepared(path, found, warnings)


def prepare_jodie(name: str, source: Source, data_dir: Folder = None, *, replace: bool = False) -> Path:
    """Write the pack of mooc, reddit or wiki from its file of the JODIE collection.

    Of the events of a sequence at the same second the first is kept: a density over gaps has no
    room for the others. Sequences left with fewer than two events, and events outside the
    commonest marks where only those are kept, are left out. The pack's `source` counts it all. The
    first 60 % of the sequences by first appearance are for training, 20 % for validation, 20 % for testing.

    Args:
        name: "mooc", "reddit" or "wiki".
        source: the CSV file, or the folder it is in.
        data_dir: folder to write to; else CONSTMEM_DATA, else ~/.local/share/constmem.
        replace: write over a pack of more sequences, too.
    """
    plan = JODIE[known("data set of JODIE", name, JODIE)]
    path = Path(source) / plan.file if Path(source).is_dir() else Path(source)
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}: give {plan.file} of the JODIE collection or its folder")
    kept, account = _cleaned(numbered_sequences(path, plan.columns), plan)
    count = len(kept.times)
    split = np.repeat((0, 1, 2), np.diff((0, 3 * count // 5, 4 * count // 5, count)))
    sentence = f"prepared from {path.name} of the JODIE collection: {account}; split 60/20/20 by file order"
    pack = data_folder(data_dir) / f"{plan.pack}.npz"
    return _write(kept, split, "second", pack, sentence, [path], replace=replace)


def prepare_easytpp(
    source: Source,
    data_dir: Folder = None,
    *,
    name: str | None = None,
    unit: str | None = None,
    replace: bool = False,
) -> Path:
    """Write `events_NAME.npz` from a folder with the train, dev and test files of an EasyTPP data set.

    They are JSON, JSON Lines or Parquet. Everything is kept, in its own splits.

    Args:
        source: the folder.
        data_dir: folder to write to; else CONSTMEM_DATA, else ~/.local/share/constmem.
        name: of the data set; by default that of the folder.
        unit: of its times; known for taxi.
        replace: write over a pack of more sequences, too.
    """
    folder = Path(source)
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}: give the one with train, dev and test files")
    name = name or folder.resolve().name
    if not name.replace("_", "").replace("-", "").isalnum():
        raise ValueError(f"{name!r} cannot be a part of a file name: name the data set by letters and digits")
    unit = unit or UNITS.get(name)
    if unit is None:
        raise ValueError(f"EasyTPP does not state the unit of {name}: give it, such as --unit hour")
    paths = [_split_file(folder, split) for split in EVENT_SPLITS]
    parts = [easytpp_sequences(path) for path in paths]
    if len({part.num_marks for part in parts}) > 1:
        each = ", ".join(f"{path.name}: {part.num_marks}" for path, part in zip(paths, parts, strict=True))
        raise ValueError(f"the files in {folder} differ in dim_process ({each}): they do not belong together")
    times, marks = ([row for part in parts for row in getattr(part, key)] for key in ("times", "marks"))
    split = np.repeat((0, 1, 2), [len(part.times) for part in parts])
    sentence = f"prepared from EasyTPP's files of {name}, all events, its own splits"
    joined = Sequences(times, marks, parts[0].num_marks)
    pack = data_folder(data_dir) / f"events_{name}.npz"
    return _write(joined, split, unit, pack, sentence, paths, replace=replace)


def _split_file(folder: Path, split: str) -> Path:
    endings = (".json", ".jsonl", ".parquet")
    places = [folder / f"{stem}{ending}" for stem in FILES[split] for ending in endings]
    places += sorted(place for stem in FILES[split] for place in folder.glob(f"**/{stem}-*.parquet"))
    found = [place for place in places if place.is_file()]
    if len(found) != 1:
        names = ", ".join(place.name for place in found) or "none"
        raise FileNotFoundError(
            f"{folder} has {len(found)} files for {split} ({names}), but one is needed: "
            f"{' or '.join(FILES[split])} as .json, .jsonl or .parquet"
        )
    return found[0]


def _cleaned(read: Sequences, plan: Jodie) -> tuple[Sequences, str]:
    """What is kept of a file, and an account of what is not."""
    if unmarked := [str(k) for k, mark in enumerate(read.marks) if (mark < 0).any()]:
        raise ValueError(
            f"sequence {unmarked[0]} has an event without a mark: this is not a file of the JODIE collection"
        )
    events = sum(len(t) for t in read.times)
    account = [f"{events:,} events"]
    number = np.arange(read.num_marks)  # of each mark that is kept; -1 of others
    if plan.commonest is not None:
        counts = np.bincount(np.concatenate(read.marks), minlength=read.num_marks)
        chosen = np.sort(np.argsort(-counts, kind="stable")[: plan.commonest])
        number = np.full(read.num_marks, -1)
        number[chosen] = np.arange(len(chosen))
        lost = events - int(counts[chosen].sum())
        account.append(
            f"{lost:,} outside the {len(chosen)} commonest of {(counts > 0).sum():,} marks left out"
        )
    times, marks, simultaneous, short = [], [], 0, 0
    for time, given in zip(read.times, read.marks, strict=True):
        mark = number[given]
        time, mark = time[mark >= 0], mark[mark >= 0]
        new = np.diff(time, prepend=-np.inf) > 0
        simultaneous += int((~new).sum())
        time, mark = time[new], mark[new]
        if len(time) < 2:
            short += 1
            continue
        times.append(time - time[0] if plan.rebase else time)
        marks.append(mark)
    account.append(f"{simultaneous:,} simultaneous with the one before left out")
    account.append(f"{short:,} sequences of fewer than two events left out")
    if not times:
        raise ValueError(f"no sequence of two events is left ({'; '.join(account)}): this is another file")
    return Sequences(times, marks, int(number.max()) + 1), "; ".join(account)


def _write(
    sequences: Sequences,
    split: Array,
    unit: str,
    path: Path,
    sentence: str,
    sources: list[Path],
    *,
    replace: bool,
) -> Path:
    free_for(path, {name: int((split == i).sum()) for i, name in enumerate(EVENT_SPLITS)}, replace=replace)
    sequences.events(unit)  # checks all of it before anything is written
    digests: dict[str, str] = {}
    for source in sources:
        with source.open("rb") as file:
            digests[source.name] = hashlib.file_digest(file, "sha256").hexdigest()
    arrays: dict[str, Array] = {
        "times": np.concatenate(sequences.times),
        "marks": np.concatenate(sequences.marks).astype(np.int32),
        "offsets": np.cumsum([0, *(len(t) for t in sequences.times)], dtype=np.int64),
        "split": split.astype(np.int8),
        "unit": np.array(unit),
        "num_marks": np.array(sequences.num_marks),
        "source": np.array(sentence),
        "sources": np.array(json.dumps(digests, sort_keys=True)),
    }
    return write_pack(path, arrays, compress=True)
