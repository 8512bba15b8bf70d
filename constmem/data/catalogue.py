"""The registry of data sets: what each is, where it comes from, its sizes and how to get it.

Names in help texts, recipes, loaders, tables and tests are taken from here. It imports nothing, so that
help can be printed at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["images", "gp", "tables", "events", "simulated"]
SECONDS = {"second": 1.0, "minute": 60.0, "hour": 3600.0, "day": 86400.0}  # units that dates are counted in
EVENT_SPLITS = ("train", "validation", "test")
EVENT_KEYS = ("times", "marks", "offsets", "split", "unit", "num_marks")


@dataclass(frozen=True)
class Pack:
    """A prepared file, `name.npz`, or a package that brings its data along.

    Args:
        name: of the file, without its ending.
        keys: arrays that it must hold.
        about: what it is, in a few words.
        get: how to get it.
        prepare: what `constmem data prepare` calls it, if it prepares it.
        embedded: the package that brings the data along, where one does.
        official: how many images each split officially has, where that is known.
    """

    name: str
    keys: tuple[str, ...]
    about: str
    get: str
    prepare: str | None = None
    embedded: str | None = None
    official: Mapping[str, int] = field(default_factory=dict)

    @property
    def of_events(self) -> bool:
        """Whether it holds event sequences."""
        return self.keys == EVENT_KEYS

    def completeness(self, counts: Mapping[str, int]) -> str:
        """How these counts of a pack compare with the official ones, in a few words; empty if unknown.

        >>> PACKS["emnist"].completeness({"train": 94, "test": 47})
        'a subset: 141 of 131,600 images'
        """
        if not self.official:
            return ""
        if counts == self.official:
            return "the official counts"
        if all(counts.get(split, 0) <= count for split, count in self.official.items()):
            return f"a subset: {sum(counts.values()):,} of {sum(self.official.values()):,} images"
        return f"not the official counts: {', '.join(f'{n:,} {split}' for split, n in self.official.items())}"


@dataclass(frozen=True)
class DataSet:
    """What a model can be trained on by name.

    Args:
        name: as it is typed.
        title: as tables and figures show it.
        kind: images, Gaussian processes ("gp"), synthetic tables, prepared events or simulated events.
        pack: the name of its pack in `PACKS`; None where it is drawn at random.
        dim_x, dim_y: inputs and outputs of a point; 0 for events.
        num_marks: kinds of events; 0 for points.
        max_points: context and target points of a task together, in the paper.
        steps, batch: of the paper's training (200 epochs of images); 0 where it has none.
        train_classes: the classes that are trained on; None: all.
        tests: names of the test sets, with the classes of each (None: all).
        process: of simulated events, base rate, branching and decay of the Hawkes process.
    """

    name: str
    title: str
    kind: Kind
    pack: str | None = None
    dim_x: int = 0
    dim_y: int = 0
    num_marks: int = 0
    max_points: int = 0
    steps: int = 0
    batch: int = 0
    train_classes: range | None = None
    tests: Mapping[str, range | None] = field(default_factory=lambda: {"test": None})
    process: tuple[float, tuple[float, ...], tuple[float, ...]] | None = None

    @property
    def of_events(self) -> bool:
        """Whether it consists of event sequences; else of points."""
        return self.kind in ("events", "simulated")


_INTO = "--data-dir FOLDER"  # where the pack goes, unless CONSTMEM_DATA is set
OWN_EVENTS = (
    "Events of your own need no preparing: `constmem train FILE cmhp --user COLUMN --mark COLUMN --time "
    "COLUMN --unit hour` (--unit: of the times, or what dates are counted in; second if not given). Those in "
    "EasyTPP's format can be prepared, too: `constmem data prepare easytpp --source FILES --name NAME "
    f"--unit hour {_INTO}`"
)


def _jodie(name: str, pack: str, file: str, about: str) -> Pack:
    get = (
        f"download {file} from the JODIE page of Stanford's SNAP, then run "
        f"`constmem data prepare {name} --source {file} {_INTO}`"
    )
    return Pack(pack, EVENT_KEYS, about, get, prepare=name)


def _easytpp(name: str, about: str, unit: str = "", remark: str = "") -> Pack:
    get = (
        f"download train.json, dev.json and test.json of {name} from EasyTPP's data sets into a folder "
        f"FILES, then run `constmem data prepare easytpp --source FILES --name {name} {_INTO}{unit}`{remark}"
    )
    return Pack(f"events_{name}", EVENT_KEYS, about, get, prepare="easytpp")


PACKS = {
    pack.name: pack
    for pack in (
        Pack(
            "emnist",
            ("train_images", "train_labels", "test_images", "test_labels"),
            "EMNIST 'balanced': 28x28 handwritten digits and letters, 47 classes",
            "download the binary format of EMNIST (gzip.zip) from the EMNIST page of NIST, then run "
            f"`constmem data prepare emnist --source gzip.zip {_INTO}`",
            prepare="emnist",
            official={"train": 112_800, "test": 18_800},
        ),
        Pack(
            "celeba",
            ("jpeg", "offsets", "split"),
            "CelebA: aligned faces, 178x218 JPEG files, for non-commercial research",
            "download img_align_celeba.zip and list_eval_partition.txt from the CelebA page of the "
            "Multimedia Laboratory, The Chinese University of Hong Kong, into one folder, then run "
            f"`constmem data prepare celeba --source img_align_celeba.zip {_INTO}`",
            prepare="celeba",
            official={"train": 182_637, "test": 19_962},  # train: the official train and validation parts
        ),
        Pack(
            "celeba32_more",
            ("images", "image_number"),
            "further CelebA training faces at 32x32, beside a celeba.npz that holds a part of CelebA",
            "prepare all of CelebA instead (`constmem data prepare celeba`), which makes it needless",
        ),
        Pack(
            "digits",
            (),
            "1,797 real handwritten digits of 8x8 pixels, inside scikit-learn",
            "install scikit-learn: `pip install 'constmem[train]'`",
            embedded="sklearn",
            official={"train": 1437, "test": 360},
        ),
        _easytpp("taxi", "EasyTPP Taxi: pick-ups and drop-offs in New York, 10 marks, its own splits"),
        _easytpp(
            "taobao",
            "Taobao clicks, 17 marks, its own splits; versions differ, and figures with them",
            " --unit UNIT",
            ", because its files do not state the unit of their times",
        ),
        _jodie("mooc", "events_mooc", "mooc.csv", "MOOC: what students did in an online course, 97 marks"),
        _jodie(
            "reddit",
            "events_reddit50",
            "reddit.csv",
            "Reddit posts in the 50 commonest subreddits, not comparable with figures on all 984",
        ),
        _jodie(
            "wiki",
            "events_wiki",
            "wikipedia.csv",
            "Wikipedia: the edits of 1,000 pages, each marked by one of 8,227 editors; long sequences",
        ),
    )
}
PREPARED = tuple(dict.fromkeys(pack.prepare for pack in PACKS.values() if pack.prepare is not None))

_DIGITS, _LETTERS = range(10), range(10, 47)  # classes of EMNIST
DATASETS = {
    entry.name: entry
    for entry in (
        DataSet(
            "emnist", "EMNIST", "images", "emnist", dim_x=2, dim_y=1, max_points=200, steps=48_000, batch=100,
            train_classes=_DIGITS, tests={"seen": _DIGITS, "unseen": _LETTERS},
        ),
        DataSet(
            "celeba32", "CelebA 32x32", "images", "celeba",
            dim_x=2, dim_y=3, max_points=200, steps=52_000, batch=100,
        ),
        DataSet(
            "celeba64", "CelebA 64x64", "images", "celeba",
            dim_x=2, dim_y=3, max_points=800, steps=40_000, batch=50,
        ),
        DataSet(
            "celeba128", "CelebA 128x128", "images", "celeba",
            dim_x=2, dim_y=3, max_points=1600, steps=80_000, batch=25,
        ),
        DataSet(
            "digits", "digits 8x8", "images", "digits",
            dim_x=2, dim_y=1, max_points=64, steps=20_000, batch=16,  # ours: the paper has no such set
        ),
        DataSet(
            "gp", "Gaussian processes", "gp", dim_x=1, dim_y=1, max_points=50, steps=100_000, batch=16,
            tests={"rbf": None, "matern": None, "periodic": None},
        ),
        DataSet(
            "tables", "synthetic tables", "tables", dim_x=9, dim_y=1, max_points=512, steps=12_000, batch=64,
        ),
        DataSet("taxi", "Taxi", "events", "events_taxi", num_marks=10),
        DataSet("mooc", "Mooc", "events", "events_mooc", num_marks=97),
        DataSet("reddit", "Reddit", "events", "events_reddit50", num_marks=50),
        DataSet("wiki", "Wikipedia", "events", "events_wiki", num_marks=8227),
        DataSet("taobao", "Taobao", "events", "events_taobao", num_marks=17),
        DataSet(
            "hawkes1", "Hawkes, one exponential", "simulated", num_marks=1, process=(0.2, (0.8,), (1.0,))
        ),
        DataSet(
            "hawkes2", "Hawkes, two exponentials", "simulated", num_marks=1,
            process=(0.2, (0.4, 0.4), (1.0, 20.0)),
        ),
    )
}  # fmt: skip
POINTS = tuple(name for name, entry in DATASETS.items() if not entry.of_events)
EVENTS = tuple(name for name, entry in DATASETS.items() if entry.of_events)


def title_of(name: str) -> str:
    """A data set as tables and figures show it; one's own by its file's name."""
    return DATASETS[name].title if name in DATASETS else name
