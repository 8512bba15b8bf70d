"""The catalogue of data sets: what each is, what it serves and how to get it."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class DataSet:
    """What is known of a data set: its pack, what it serves, and how to get it.

    Args:
        name: of the data set; its pack is `name.npz`, unless it is embedded in a package.
        serves: names that `load_images` or `load_events` takes.
        keys: arrays that a pack must hold.
        about: what it is, in a few words.
        get: how to get it.
        embedded: the package that brings it along, where one does.
        official: how many images each split officially has, where that is known.
    """

    name: str
    serves: tuple[str, ...]
    keys: tuple[str, ...]
    about: str
    get: str
    embedded: str | None = None
    official: Mapping[str, int] = field(default_factory=dict)

    def completeness(self, counts: Mapping[str, int]) -> str:
        """How these counts of a pack compare with the official ones, in a few words; none if unknown.

        >>> KNOWN["emnist"].completeness({"train": 94, "test": 47})
        'a subset: 141 of 131,600 images'
        """
        if not self.official:
            return ""
        if counts == self.official:
            return "as many as officially"
        if all(counts.get(split, 0) <= count for split, count in self.official.items()):
            return f"a subset: {sum(counts.values()):,} of {sum(self.official.values()):,} images"
        return f"not as officially: {', '.join(f'{n:,} {split}' for split, n in self.official.items())}"


EVENT_SPLITS = ("train", "validation", "test")
EVENT_KEYS = ("times", "marks", "offsets", "split", "unit", "num_marks")
_INTO = "--data-dir FOLDER"  # where the pack goes, unless CONSTMEM_DATA tells it
_JODIE = (
    "download {0} from the JODIE page of Stanford's SNAP, then run "
    f"`constmem data prepare {{1}} --source {{0}} {_INTO}`"
)
_EASYTPP = (
    "download train.json, dev.json and test.json of {0} from EasyTPP's data sets into a folder FILES, then "
    f"run `constmem data prepare easytpp --source FILES --name {{0}} {_INTO}"
)
OWN_EVENTS = (
    "Events of your own need no preparing: `constmem train FILE cmhp --user COLUMN --mark COLUMN --time "
    "COLUMN --unit hour` (--unit: of the times, or what dates are counted in; second if not given). Those in "
    "EasyTPP's format can be prepared, too: `constmem data prepare easytpp --source FILES --name NAME "
    f"--unit hour {_INTO}`"
)

KNOWN = {
    known.name: known
    for known in (
        DataSet(
            "emnist",
            ("emnist",),
            ("train_images", "train_labels", "test_images", "test_labels"),
            "EMNIST 'balanced': 28x28 handwritten digits and letters, 47 classes",
            "download the binary format of EMNIST (gzip.zip) from the EMNIST page of NIST, then run "
            f"`constmem data prepare emnist --source gzip.zip {_INTO}`",
            official={"train": 112_800, "test": 18_800},
        ),
        DataSet(
            "celeba",
            ("celeba32", "celeba64", "celeba128"),
            ("jpeg", "offsets", "split"),
            "CelebA: aligned faces, 178x218 JPEG files, for non-commercial research",
            "download img_align_celeba.zip and list_eval_partition.txt from the CelebA page of the "
            "Multimedia Laboratory, The Chinese University of Hong Kong, into one folder, then run "
            f"`constmem data prepare celeba --source img_align_celeba.zip {_INTO}`",
            official={"train": 182_637, "test": 19_962},  # train: the official train and validation parts
        ),
        DataSet(
            "celeba32_more",
            ("celeba32",),
            ("images", "image_number"),
            "further CelebA training faces at 32x32, beside a celeba.npz that holds a part of CelebA",
            "prepare all of CelebA instead (`constmem data prepare celeba`), which makes it needless",
        ),
        DataSet(
            "digits",
            ("digits",),
            (),
            "1,797 real handwritten digits of 8x8 pixels, inside scikit-learn",
            "install scikit-learn: `pip install 'constmem[train]'`",
            embedded="sklearn",
        ),
        DataSet(
            "events_taxi",
            ("taxi",),
            EVENT_KEYS,
            "EasyTPP Taxi: pick-ups and drop-offs in New York, 10 marks, its own splits",
            _EASYTPP.format("taxi") + "`",
        ),
        DataSet(
            "events_taobao",
            ("taobao",),
            EVENT_KEYS,
            "Taobao clicks, 17 marks, its own splits; versions differ, and figures with them",
            _EASYTPP.format("taobao") + " --unit UNIT`, for it does not tell the unit of its times",
        ),
        DataSet(
            "events_mooc",
            ("mooc",),
            EVENT_KEYS,
            "MOOC: what students did in an online course, 97 marks",
            _JODIE.format("mooc.csv", "mooc"),
        ),
        DataSet(
            "events_reddit50",
            ("reddit",),
            EVENT_KEYS,
            "Reddit posts in the 50 commonest subreddits, not comparable with figures on all 984",
            _JODIE.format("reddit.csv", "reddit"),
        ),
        DataSet(
            "events_wiki",
            ("wiki",),
            EVENT_KEYS,
            "Wikipedia: the edits of 1,000 pages, each marked by one of 8,227 editors; long sequences",
            _JODIE.format("wikipedia.csv", "wiki"),
        ),
    )
}


def known() -> tuple[DataSet, ...]:
    """Every data set that can be loaded, found or not."""
    return tuple(KNOWN.values())
