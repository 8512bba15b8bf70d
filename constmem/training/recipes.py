"""The hyper-parameters of every run as data: (data set, model, recipe) to settings, in one place.

`faithful` is the paper's protocol: Adam at 5e-4 with a cosine to zero, batches of 100 (50 and 25 for
larger faces, 16 for Gaussian processes), one context size a batch. `improved` is ours: Muon instead of
Adam, larger batches, a warm-up, clipping, a context size drawn for every task, and images seen mirrored
and turned; the same for every model, but that the CNP family, which has not the capacity for it, sees
no turned characters, and takes fewer steps on EMNIST and on faces of 32x32.
"""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from math import inf
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from constmem.core import CNP_FAMILY, EVENTS, PAPER_CMHP, POINTS, entry_of, of_events, settings_of
from constmem.core.checks import known
from constmem.data.catalogue import DATASETS

NAMES = ("improved", "faithful")
FROM_DATA = ("model.dim_x", "model.dim_y", "model.num_marks")
_KINDS = {int: "a whole number", float: "a number", str: "text"}


@dataclass(frozen=True)
class Recipe:
    """How a model is built and trained: what recipes of points and of events share.

    Attributes:
        steps, batch: how many steps of how many tasks (or event sequences).
        optimiser: "muon" (orthogonalised momentum for matrices, Adam for the rest) or "adam".
        lr, warmup, weight_decay, clip: its rate after a linear warm-up, before a cosine to zero; weight
            decay (Adam's: an L2 penalty); largest gradient norm (0: no clipping).
        precision: arithmetic on a GPU; a CPU always computes in float32.
        validate_every: steps between validations; the best weights by validation are those kept.
        start: weights to begin with: the folder of a run of such a model, or a name that comes with the
            package; random ones if it is empty.
        model: keywords of the model's constructor.
    """

    steps: int = 12_000
    batch: int = 192
    optimiser: Literal["muon", "adam"] = "muon"
    lr: float = 2e-3
    warmup: int = 500
    weight_decay: float = 0.0
    clip: float = 1.0
    precision: Literal["float32", "tf32", "bf16"] = "bf16"
    validate_every: int = 2000
    start: str = ""
    model: dict[str, Any] = field(default_factory=dict)


def _of(*kinds: str, default: Any) -> Any:
    """A setting that these kinds of data have."""
    return field(default=default, metadata={"of": kinds})


@dataclass(frozen=True)
class PointRecipe(Recipe):
    """How a neural process is trained on tasks of points.

    Attributes:
        sampling: "reference" (one context size a batch) or "static" (one for each task, by masks).
        max_points: context and target points of a task together, by the reference protocol.
        num_targets: targets of a task under static sampling.
        skew: how static sampling prefers small contexts (1: uniform; 2: as often as in the evaluation).
        augment: half of training images: "mirror" (left and right) or "turn" (any symmetry of the square).
        matern: share of Gaussian-process tasks whose kernel is Matern 5/2; the protocol's are all RBF.
        jitter: of a table of one's own, noise on its inputs in training, in standard deviations.
    """

    sampling: Literal["reference", "static"] = _of("images", "gp", default="static")
    max_points: int = _of("images", "table", "tables", default=200)
    num_targets: int = _of("images", "table", "tables", default=200)
    skew: float = _of("images", "table", default=1.0)
    augment: Literal["none", "mirror", "turn"] = _of("images", default="none")
    matern: float = _of("gp", default=0.0)
    jitter: float = _of("table", default=0.0)


@dataclass(frozen=True)
class EventRecipe(Recipe):
    """How a point process is trained on event sequences.

    Attributes:
        reads: share of the events of a batch that the loss is taken over, drawn at random.
    """

    warmup: int = 100
    precision: Literal["float32", "tf32", "bf16"] = "tf32"
    validate_every: int = 100
    reads: float = 1.0


R = TypeVar("R", bound=Recipe)

# data set of events -> (steps, sequences a batch), and those of CMHP, which soon memorises
EVENT_STEPS: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "taxi": ((1000, 64), (400, 32)),
    "mooc": ((2500, 64), (1000, 32)),
    "reddit": ((1500, 64), (600, 32)),
    "wiki": ((1000, 16), (400, 16)),
    "taobao": ((1000, 64), (400, 32)),
    "hawkes1": ((2000, 64), (600, 32)),
    "hawkes2": ((2000, 64), (600, 32)),
}
_DEPTHS = {"gp": (4, 2, 3), "celeba": (6, 3, 5), "": (5, 3, 4)}  # of the CNP family: pre, post, decoder
_FAITHFUL: dict[str, Any] = {"optimiser": "adam", "lr": 5e-4, "warmup": 0, "clip": 0.0}


def recipe(dataset: str, model: str, name: str = "improved") -> PointRecipe | EventRecipe:
    """The settings of a run.

    Example:
        >>> recipe("emnist", "cmanp", "faithful").lr
        0.0005
    """
    data = DATASETS[known("data set", dataset, DATASETS)]
    known("recipe", name, NAMES)
    if data.of_events != of_events(model):
        raise ValueError(
            f"{dataset!r} is a data set of {'events' if data.of_events else 'points'}: "
            f"{model.partition('-')[0]!r} is no model of those, but "
            f"{', '.join(EVENTS if data.of_events else POINTS)} are"
        )
    return _events(dataset, model, name) if data.of_events else _points(dataset, model, name)


def _points(dataset: str, model: str, name: str) -> PointRecipe:
    data, small = DATASETS[dataset], model in CNP_FAMILY
    settings = {"dim_x": data.dim_x, "dim_y": data.dim_y, **_architecture(dataset, model)}
    settings |= settings_of(model)
    if name == "faithful":
        return PointRecipe(
            steps=data.steps, batch=data.batch, precision="tf32", sampling="reference",
            max_points=data.max_points, model=settings, **_FAITHFUL,
        )  # fmt: skip
    shape: dict[str, Any] = {
        "emnist": {"steps": 8000} if small else {"augment": "turn"},
        "celeba32": {"augment": "mirror", **({"steps": 6000} if small else {})},
        "digits": {"steps": 2600, "batch": 32, "lr": 3e-3, "num_targets": 20, "warmup": 100},
        "celeba64": {"augment": "mirror", "batch": 64, "num_targets": 400},
        "celeba128": {"augment": "mirror", "steps": 10_000, "batch": 32, "num_targets": 800},
        "gp": {"steps": 16_000, "batch": 128},
        "tables": {"steps": 12_000, "batch": 64, "num_targets": 128},
    }
    return PointRecipe(max_points=data.max_points, model=settings, **shape[dataset])


def _architecture(dataset: str, model: str) -> dict[str, Any]:
    """What the paper sets apart for a data set: depths of the CNP family, the kind of deviation.

    Runs of CANP, ANP and BANP say that they have no ReLU too many: the others are not resumed without it.
    """
    if model in CNP_FAMILY:
        family = next(key for key in _DEPTHS if dataset.startswith(key))
        depths = dict(zip(("pre_depth", "post_depth", "decoder_depth"), _DEPTHS[family], strict=True))
        return depths | ({"value_relu": False} if model in ("canp", "anp", "banp") else {})
    return {"std": "bounded" if dataset in ("emnist", "digits") else "exp"}


def _events(dataset: str, model: str, name: str) -> EventRecipe:
    most, own = EVENT_STEPS[dataset]
    steps, batch = own if entry_of(model).name == "cmhp" and name == "improved" else most
    return replace(_event_model(model, DATASETS[dataset].num_marks, name), steps=steps, batch=batch)


def _event_model(model: str, num_marks: int, name: str) -> EventRecipe:
    """A model of events, or a variant of one; by the paper's recipe CMHP is the paper's, and so is Adam."""
    chosen = PAPER_CMHP if model == "cmhp" and name == "faithful" else settings_of(model)
    own = EventRecipe(model={"num_marks": num_marks, **chosen})
    return replace(own, **_FAITHFUL) if name == "faithful" else own


def table_recipe(model: str, *, dim_x: int, dim_y: int, rows: int, grouped: bool) -> PointRecipe:
    """Settings to start from with rows of one's own: made for a few thousand rows and a small machine.

    Where all rows are one task, noise on the inputs keeps them from being memorised, the more the fewer
    and wider they are: 2 rows^(-2 / (dim_x + 4)) standard deviations, at most one.
    """
    like_gp = recipe("gp", model).model | {"dim_x": dim_x, "dim_y": dim_y}
    jitter = 0.0 if grouped else round(min(2 * rows ** (-2 / (dim_x + 4)), 1.0), 3)
    return PointRecipe(steps=2000, batch=16, warmup=100, num_targets=64, jitter=jitter, model=like_gp)


def event_recipe(model: str, *, num_marks: int) -> EventRecipe:
    """Settings to start from with events of one's own."""
    if not of_events(model):
        raise ValueError(f"{model!r} is no model of events, but {', '.join(EVENTS)} are")
    steps = 600 if entry_of(model).name == "cmhp" else 1000
    return replace(_event_model(model, num_marks, "improved"), steps=steps, batch=32)


def complete(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A run's settings as this version writes them, whichever version wrote them.

    Those that were not known yet are at their defaults. One type of recipe once served points and events:
    what its runs say of the other kind is left out.

    >>> complete({"lr": 1.0})["start"]
    ''
    >>> "skew" in complete({"sampling": "ragged", "reads": 1.0, "skew": 1.0})
    False
    """
    events = settings["sampling"] == "ragged" if "sampling" in settings else "reads" in settings
    kind, other = (EventRecipe, PointRecipe) if events else (PointRecipe, EventRecipe)
    own, foreign = ({item.name for item in fields(each)} for each in (kind, other))
    return asdict(kind()) | {key: settings[key] for key in settings if key in own or key not in foreign}


def read_recipe(settings: Mapping[str, Any]) -> PointRecipe | EventRecipe:
    """The recipe that a run was trained by, from what its folder says."""
    content = complete(settings)
    kind = EventRecipe if "reads" in content else PointRecipe
    try:
        return kind(**content)
    except TypeError as error:
        raise ValueError(f"this run was written by another version of constmem: {error}") from error


def changed(recipe: R, overrides: Sequence[str], *, steps: int | None = None, kind: str | None = None) -> R:
    """The recipe with `key=value` (or `model.key=value`) changes; an unknown or unused key is an error.

    Args:
        steps: given a number of steps, the warm-up is no more than a tenth of them, unless it is set too.
        kind: of the data: "images", "gp", "tables", "table"; settings that these have no use for are refused.
    """
    content: dict[str, Any] = asdict(recipe)
    used = [item.name for item in fields(recipe) if kind in item.metadata.get("of", (kind,)) or kind is None]
    if steps is not None:
        content |= {"steps": steps, "warmup": min(recipe.warmup, max(steps // 10, 1))}
    for item in overrides:
        key, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"{item!r} is not of the form key=value")
        if key in FROM_DATA:
            raise ValueError(f"{key} cannot be set: it follows from the data")
        if key.startswith("model."):
            content["model"][key.removeprefix("model.")] = _literal(value)
        else:
            allowed = [name for name in used if name != "model"]
            content[known("setting", key, allowed, " for these data")] = _literal(value)
    hints = get_type_hints(type(recipe))
    found = type(recipe)(**{key: _fitting(key, value, hints[key]) for key, value in content.items()})
    _require_sound(found)
    return found


def _require_sound(recipe: Recipe) -> None:
    """Refuse a number that makes no sense."""
    numbers = {key: value for key, value in asdict(recipe).items() if isinstance(value, int | float)}
    for key, value in numbers.items():
        if key in ("steps", "batch", "validate_every", "max_points", "num_targets"):
            good, wanted = value >= 1, "1 or more"
        elif key == "matern":
            good, wanted = 0 <= value <= 1, "from 0 to 1"
        elif key == "reads":
            good, wanted = 0 < value <= 1, "above 0 and at most 1"
        elif key in ("lr", "skew"):
            good, wanted = 0 < value < inf, "above 0, and finite"
        else:
            good, wanted = 0 <= value < inf, "0 or more, and finite"
        if not good:
            raise ValueError(f"{key} is {value}, but must be {wanted}")


def _fitting(key: str, value: Any, hint: Any) -> Any:
    """The value in the type that a setting has, or an error."""
    if get_origin(hint) is Literal:
        return known(f"value of {key}", str(value), get_args(hint))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, get_origin(hint) or hint) and not isinstance(value, bool):
        return value
    raise ValueError(f"{key} must be {_KINDS.get(hint, hint)}, not {value!r}")


def _literal(text: str) -> Any:
    """The value that a text stands for: a number, true, false, none, a list; else the text.

    >>> [_literal(text) for text in ("1e-3", "12", "true", "none", "runs/one", "inf")]
    [0.001, 12, True, None, 'runs/one', inf]
    """
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    for read in (ast.literal_eval, float):
        try:
            return read(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return text
