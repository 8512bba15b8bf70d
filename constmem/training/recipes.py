"""The hyper-parameters of every run as data: (data set, model, recipe) to settings, in one place.

`faithful` is the paper's protocol: Adam at 5e-4 with a cosine to zero, batches of 100 (50 and 25 for
larger faces, 16 for Gaussian processes), one context size a batch. `improved` is ours: Muon instead of
Adam, larger batches, a warm-up, clipping, a context size drawn for every task, and images seen mirrored
and turned; the same for every model, but that the CNP family, which has not the capacity for it, sees
no turned characters, and takes fewer steps on EMNIST and on faces of 32x32.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf
from typing import Any, Literal, get_args, get_origin, get_type_hints

from constmem.core.checks import known
from constmem.training.variants import PAPER_CMHP, settings_of

Precision = Literal["float32", "tf32", "bf16"]
Sampling = Literal["reference", "static", "ragged"]
Optimiser = Literal["muon", "adam"]
Augment = Literal["none", "mirror", "turn"]


@dataclass(frozen=True)
class Recipe:
    """How a model is built and trained.

    Attributes:
        steps, batch: how many steps of how many tasks (or event sequences).
        optimiser: "muon" (orthogonalised momentum for matrices, Adam for the rest) or "adam".
        lr, warmup, weight_decay, clip: its rate after a linear warm-up, before a cosine to zero; weight
            decay (Adam's: an L2 penalty); largest gradient norm (0: no clipping).
        precision: arithmetic on a GPU; a CPU always computes in float32.
        validate_every: steps between validations; the best weights by validation are those kept.
        sampling: "reference" (one context size a batch) or "static" (one for each task, by masks) for
            points, "ragged" (sequences of similar lengths) for events.
        reads: share of the events of a batch that the loss is taken over, drawn at random.
        max_points: context and target points of a task together, by the reference protocol.
        num_targets: targets of a task under static sampling.
        skew: how strongly static sampling prefers small contexts (1: uniform; 2: as often as the
            evaluation asks for targets there).
        augment: what is done to training images: "mirror" (left and right) or "turn" (any of the eight
            symmetries of the square), each to half of them.
        jitter: of a table of one's own, noise on its inputs in training, in standard deviations.
        start: weights to begin with: the folder of a run of such a model, or a name that comes with the
            package; random ones if it is empty.
        model: keywords of the model's constructor.
    """

    steps: int = 12_000
    batch: int = 192
    optimiser: Optimiser = "muon"
    lr: float = 2e-3
    warmup: int = 500
    weight_decay: float = 0.0
    clip: float = 1.0
    precision: Precision = "bf16"
    validate_every: int = 2000
    sampling: Sampling = "static"
    reads: float = 1.0
    max_points: int = 200
    num_targets: int = 200
    skew: float = 1.0
    augment: Augment = "none"
    jitter: float = 0.0
    start: str = ""
    model: dict[str, Any] = field(default_factory=dict)


NAMES = ("improved", "faithful")
_KINDS = {int: "a whole number", float: "a number", str: "text"}

# data set -> (dim_x, dim_y, points a task has at most, steps of 200 epochs at the paper's batch, that batch)
DATASETS: dict[str, tuple[int, int, int, int, int]] = {
    "digits": (2, 1, 64, 20_000, 16),
    "emnist": (2, 1, 200, 48_000, 100),
    "celeba32": (2, 3, 200, 52_000, 100),
    "celeba64": (2, 3, 800, 40_000, 50),
    "celeba128": (2, 3, 1600, 80_000, 25),
    "gp": (1, 1, 50, 100_000, 16),
}

# data set of events -> (marks, (steps, sequences a batch), and those of CMHP, which soon learns by heart)
EVENTS: dict[str, tuple[int, tuple[int, int], tuple[int, int]]] = {
    "taxi": (10, (1000, 64), (400, 32)),
    "mooc": (97, (2500, 64), (1000, 32)),
    "reddit": (50, (1500, 64), (600, 32)),
    "wiki": (8227, (1000, 16), (400, 16)),
    "taobao": (17, (1000, 64), (400, 32)),
    "hawkes1": (1, (2000, 64), (600, 32)),
    "hawkes2": (1, (2000, 64), (600, 32)),
}
EVENT_MODELS = ("cmhp", "thp", "gru", "trivial")

_DEPTHS = {"gp": (4, 2, 3), "celeba": (6, 3, 5), "": (5, 3, 4)}  # of the CNP family: pre, post, decoder
_CNP_FAMILY = ("cnp", "canp", "np", "anp", "bnp", "banp")
FAMILIES = dict.fromkeys((*_CNP_FAMILY, "tnpd", "eqtnp", "lbanp", "cmanp"), False)
FAMILIES |= dict.fromkeys(EVENT_MODELS, True)  # every model: is it one of events?
TOLD_BY_DATA = ("model.dim_x", "model.dim_y", "model.num_marks")
UNUSED = {  # settings that a kind of data has no use for
    "images": ("jitter", "reads"),
    "gp": ("augment", "jitter", "max_points", "num_targets", "reads", "skew"),
    "table": ("augment", "reads"),
    "events": ("augment", "jitter", "max_points", "num_targets", "skew"),
}


def recipe(dataset: str, model: str, name: str = "improved") -> Recipe:
    """The settings of a run.

    Example:
        >>> recipe("emnist", "cmanp", "faithful").lr
        0.0005
    """
    known("data set", dataset, [*DATASETS, *EVENTS])
    known("recipe", name, NAMES)
    base_model = model.partition("-")[0]
    known("model", base_model, FAMILIES)
    if (dataset in EVENTS) != (base_model in EVENT_MODELS):
        fitting = [name for name, events in FAMILIES.items() if events == (dataset in EVENTS)]
        raise ValueError(
            f"{dataset!r} is a data set of {'events' if dataset in EVENTS else 'points'}: "
            f"{base_model!r} is no model of those, but {', '.join(fitting)} are"
        )
    if dataset in EVENTS:
        return _events(dataset, model, name)
    dim_x, dim_y, max_points, steps, batch = DATASETS[dataset]
    settings: dict[str, Any] = {"dim_x": dim_x, "dim_y": dim_y}
    settings |= _architecture(dataset, base_model)
    settings |= settings_of(model)
    if name == "faithful":
        return Recipe(
            steps=steps, batch=batch, optimiser="adam", lr=5e-4, warmup=0, clip=0.0, precision="tf32",
            sampling="reference", max_points=max_points, model=settings,
        )  # fmt: skip
    shape = {
        "emnist": {"steps": 8000} if base_model in _CNP_FAMILY else {},
        "celeba32": {"steps": 6000} if base_model in _CNP_FAMILY else {},
        "digits": {"steps": 2600, "batch": 32, "lr": 3e-3, "num_targets": 20, "warmup": 100},
        "celeba64": {"steps": 12_000, "batch": 64, "num_targets": 400},
        "celeba128": {"steps": 10_000, "batch": 32, "num_targets": 800},
        "gp": {"steps": 16_000, "batch": 128},
    }.get(dataset, {})
    return replace(
        Recipe(max_points=max_points, model=settings, augment=_augment(dataset, base_model)),
        **shape,  # type: ignore[arg-type]
    )


def _augment(dataset: str, model: str) -> Augment:
    """Faces are mirrored, characters turned, unless the model is too small even for upright ones."""
    if dataset.startswith("celeba"):
        return "mirror"
    return "turn" if dataset == "emnist" and model not in _CNP_FAMILY else "none"


def table_recipe(model: str, *, dim_x: int, dim_y: int, rows: int, grouped: bool) -> Recipe:
    """Settings to start from with rows of one's own: made for a few thousand rows and a small machine.

    Where all rows are one task, noise on the inputs keeps them from being learned by heart, the more
    the fewer and wider they are: 2 rows^(-2 / (dim_x + 4)) standard deviations, at most one.
    """
    like_gp = recipe("gp", model).model | {"dim_x": dim_x, "dim_y": dim_y}
    jitter = 0.0 if grouped else round(min(2 * rows ** (-2 / (dim_x + 4)), 1.0), 3)
    return Recipe(
        steps=2000, batch=16, warmup=100, num_targets=64, skew=1.0, jitter=jitter, model=like_gp
    )  # fmt: skip


def of_events(model: str) -> bool:
    """Whether a model, or a variant of one, is a model of events."""
    return FAMILIES[known("model", model.partition("-")[0], FAMILIES)]


def event_recipe(model: str, *, num_marks: int) -> Recipe:
    """Settings to start from with events of one's own."""
    if not of_events(model):
        fitting = ", ".join(EVENT_MODELS)
        raise ValueError(f"{model!r} is no model of events, but {fitting} are")
    steps = 600 if _is_cmhp(model) else 1000
    return replace(_event_recipe(model, num_marks, "improved"), steps=steps, batch=32)


def _events(dataset: str, model: str, name: str) -> Recipe:
    """A model of events on a data set."""
    num_marks, most, own = EVENTS[dataset]
    steps, batch = own if _is_cmhp(model) and name == "improved" else most
    return replace(_event_recipe(model, num_marks, name), steps=steps, batch=batch)


def _is_cmhp(model: str) -> bool:
    return model.partition("-")[0] == "cmhp"


def _event_recipe(model: str, num_marks: int, name: str) -> Recipe:
    """A model of events, or a variant of one; by the paper's recipe CMHP is the paper's, and so is Adam."""
    chosen = PAPER_CMHP if model == "cmhp" and name == "faithful" else settings_of(model)
    common = Recipe(
        warmup=100, precision="tf32", validate_every=100, sampling="ragged",
        model={"num_marks": num_marks} | chosen,
    )  # fmt: skip
    return replace(common, optimiser="adam", lr=5e-4, warmup=0, clip=0.0) if name == "faithful" else common


def _architecture(dataset: str, model: str) -> dict[str, Any]:
    """What the paper sets apart for a data set: depths of the CNP family, the kind of deviation.

    Runs of CANP, ANP and BANP say that they have no ReLU too many: those that do not say it had one, and are
    neither resumed without it nor taken for seeds of those without.
    """
    if model in _CNP_FAMILY:
        family = next(key for key in _DEPTHS if dataset.startswith(key))
        depths = dict(zip(("pre_depth", "post_depth", "decoder_depth"), _DEPTHS[family], strict=True))
        return depths | ({"value_relu": False} if model in ("canp", "anp", "banp") else {})
    return {"std": "bounded" if dataset in ("emnist", "digits") else "exp"}


def complete(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A run's settings, with those that the version it was written by did not know yet at their defaults.

    >>> complete({"lr": 1.0})["start"]
    ''
    """
    return asdict(Recipe()) | dict(settings)


def unused(dataset: str) -> tuple[str, ...]:
    """The settings that a data set is never asked about."""
    return UNUSED["events" if dataset in EVENTS else "gp" if dataset == "gp" else "images"]


def changed(
    recipe: Recipe, overrides: Sequence[str], *, steps: int | None = None, unused: Sequence[str] = ()
) -> Recipe:
    """The recipe with `key=value` (or `model.key=value`) changes; an unknown or unused key is an error.

    Given a number of steps, the warm-up is no more than a tenth of them, unless it is told too.
    """
    content: dict[str, Any] = asdict(recipe)
    if steps is not None:
        content |= {"steps": steps, "warmup": min(recipe.warmup, max(steps // 10, 1))}
    for item in overrides:
        key, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"{item!r} is not of the form key=value")
        if key in TOLD_BY_DATA:
            raise ValueError(f"{key} cannot be set: the data say it")
        if key in unused:
            raise ValueError(f"{key} means nothing for these data: leave --set {item} out")
        if key.startswith("model."):
            content["model"][key.removeprefix("model.")] = _literal(value)
        else:
            content[known("setting", key, [k for k in content if k != "model"])] = _literal(value)
    hints = get_type_hints(Recipe)
    return _sound(Recipe(**{key: _fitting(key, value, hints[key]) for key, value in content.items()}))


def _sound(recipe: Recipe) -> Recipe:
    """The recipe, unless one of its numbers makes no sense."""
    numbers = {key: value for key, value in asdict(recipe).items() if isinstance(value, int | float)}
    for key, value in numbers.items():
        if key in ("steps", "batch", "validate_every", "max_points", "num_targets"):
            good, wanted = value >= 1, "1 or more"
        elif key == "reads":
            good, wanted = 0 < value <= 1, "above 0 and at most 1"
        elif key in ("lr", "skew"):
            good, wanted = 0 < value < inf, "above 0, and finite"
        else:
            good, wanted = 0 <= value < inf, "0 or more, and finite"
        if not good:
            raise ValueError(f"{key} is {value}, but must be {wanted}")
    return recipe


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
    import yaml

    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str):  # YAML 1.1 reads 1e-3 as text
        try:
            return float(value)
        except ValueError:
            return value
    return value
