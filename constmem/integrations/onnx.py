"""Models as ONNX graphs, for any number of streams and points, and a runner without PyTorch beside them."""

import contextlib
import copy
import hashlib
import io
import json
import logging
import os
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor
from torch.export import Dim

from constmem.core.algebra import EMPTY
from constmem.core.checks import extra, largest
from constmem.core.files import write_bytes, write_text
from constmem.core.moments import Moments
from constmem.integrations import onnx_verbs as verbs
from constmem.neural_processes import CMANP
from constmem.neural_processes.regression import Posterior
from constmem.point_processes import CMHP
from constmem.streams import load_model
from constmem.tabular.base import StreamingEstimator
from constmem.tabular.commands import load_estimator
from constmem.tabular.forgetting import TRUST, Forgetting
from constmem.tabular.learner import Learner
from constmem.tabular.residuals import shipped

FORMAT, VERSION = "constmem.onnx", 4
RUNNER = Path(__file__).with_name("onnx_runner.py")
PARTS = (
    "integrations/onnx_table_runner",
    "integrations/onnx_runner",
    "tabular/answers",
    "tabular/columns",
    "tabular/frames",
    "tabular/inputs",
    "tabular/precisions",
)  # of the runner of tables
Model = CMANP | CMHP | StreamingEstimator
FEW = 64  # numbers that are not worth halving
# Of a verb: examples of its arguments, their axes of any length, and the names of what goes in and out.
Work = tuple[tuple[Any, ...], tuple[Any, ...], list[str], list[str]]
Works = tuple[verbs.Verbs, dict[str, Work], dict[str, Any]]  # by name; and what a runner must know


def export(model: Model, folder: str | os.PathLike[str], *, half: bool = False) -> Path:
    """Write a model as graphs that onnxruntime runs without PyTorch, and a runner beside them.

    States are float64 and those of the library: both read each other's files. Points may be float64.

    Args:
        model: of points, of events, or an estimator of a table whose warm-up is over, which takes along
            what it has learned.
        folder: gets the graphs (observe, update, merge, read and predict; of events, whose predict reads,
            marks instead of read), model.json, and constmem_runner, which needs onnxruntime and numpy
            alone.
        half: store weights as float16, rounded, which halves the files. Rounded weights are others: their
            states have another fingerprint.
    """
    _require(model)
    out = Path(folder)
    if isinstance(model, StreamingEstimator):
        return _export_table(model, out, half=half)
    model = copy.deepcopy(model).float().cpu().eval()
    if half:
        for name, tensor in model.state_dict().items():
            if tensor.dtype == torch.float32 and not name.startswith(("scales.", "regression.")):
                tensor.copy_(tensor.half())
    own, work, about = _of_points(model) if isinstance(model, CMANP) else _of_events(model)
    about |= {"model": model.name, "config": model.config, "fingerprint": model.fingerprint()}
    _write(out, own, work, about, half=half)
    if (out / "constmem_runner" / "onnx_table_runner.py").exists():
        shutil.rmtree(out / "constmem_runner")  # of a table exported here before: it would come first
    write_bytes(out / "constmem_runner.py", RUNNER.read_bytes())
    return out


def _export_table(model: StreamingEstimator, out: Path, *, half: bool) -> Path:
    """Graphs of an estimator, what it has learned, and a runner, some of whose files are the library's."""
    if half:
        raise ValueError("an estimator's own numbers are float64, and stay so: export it without half")
    own, work, about = _of_table(model.learner_)
    _write(out, own, work, about | {"model": type(model).__name__}, half=False)
    model.save(out / "learned.safetensors")
    for part in PARTS:
        path = RUNNER.parents[1] / f"{part}.py"
        text = re.sub(r"from constmem\.\w+\.?", "from .", path.read_text(encoding="utf-8"))
        write_text(out / "constmem_runner" / path.name, text)
    names = "from .onnx_table_runner import TableRunner as TableRunner\n"
    write_text(out / "constmem_runner" / "__init__.py", names)
    return out


def _write(out: Path, own: verbs.Verbs, work: dict[str, Work], about: dict[str, Any], *, half: bool) -> None:
    import onnx

    from constmem.integrations.onnx_runner import checksum_of

    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # the exporter's notes to its own developers
    try:
        with warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(io.StringIO()):
            made = {name: verbs.graph(own, name, *parts) for name, parts in work.items()}
    finally:
        logging.disable(before)
    sums = {}
    for name, graph in made.items():
        if half:
            _halve(graph)
        onnx.checker.check_model(graph)
        content = graph.SerializeToString(deterministic=True)
        sums[name] = hashlib.sha256(content).hexdigest()
        write_bytes(out / f"{name}.onnx", content)
    about = json.loads(json.dumps(about | {"format": FORMAT, "version": VERSION, "graphs": sums}))
    about["checksum"] = checksum_of(about)
    write_text(out / "model.json", json.dumps(about, indent=1) + "\n")


def export_named(source: str, folder: Path, *, half: bool) -> Path:
    """`export` of a folder or a name that `from_pretrained` takes, or of a file that an estimator saved."""
    found: Any = load_estimator(Path(source)) if Path(source).is_file() else load_model(source)
    return export(found, folder, half=half)


def _require(model: Any) -> None:
    if not isinstance(model, CMANP | CMHP | StreamingEstimator):
        raise ValueError(
            "only CMANP, CMHP and estimators of tables can be exported to ONNX so far, not "
            f"{type(model).__name__}"
        )
    if isinstance(model, StreamingEstimator):
        check_is_fitted(model, "learner_")
        if not model.learner_.frozen or model.learner_.forgetting != Forgetting():
            raise ValueError(
                "an estimator can be exported to ONNX once its warm-up is over, and only with forget=None: "
                f"this one has seen {model.learner_.seen} rows and has forget={model.forget!r}"
            )
    with extra("onnx", "exporting needs more packages"):
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401


def _of_points(model: CMANP) -> Works:
    """Every verb of a model of points."""
    own, b, n, m = verbs.Points(model), Dim("batch"), Dim("points"), Dim("targets")
    x, y, xt = (torch.zeros(3, k, dim, dtype=torch.float64) for k, dim in (
        (5, model.dim_x), (5, model.dim_y), (7, model.dim_x)
    ))  # fmt: skip
    with torch.no_grad():
        empty = model.empty(3)
        memory = model.read(empty)
    names, state, out = _held(blank := empty.tensors())
    memory = list(memory) if model.regression else [memory]
    held: list[Any] = [{0: b} for _ in state]
    points, given = ({0: b, 1: n},) * 2, ["latents", *Posterior._fields][: len(memory)]
    target = [{0: b} for _ in memory], {0: b, 1: m}
    work: dict[str, Work] = {
        "observe": ((x, y), points, ["x", "y"], names),
        "update": ((state, x, y), (held, *points), [*names, "x", "y"], out),
        "merge": _merging(blank, held),
        "read": ((state[:1],), (held[:1],), names[:1], given),
        "predict": ((memory, xt), target, [*given, "xt"], ["mean", "std"]),
    }
    if model.regression is not None:
        matrix = model.regression.matrix(state[2]).detach()
        solved, asked = [matrix, matrix.clone(), matrix[..., 0, 0].clone()], ["matrix", "inverse", "log_det"]
        work["matrix"] = ((state[2],), ({0: b},), names[2:3], ["matrix"])
        read = [name for name in names if name not in ("slots.lse", "count")]
        parts = [blank[name].clone() for name in read]
        work["read"] = ((parts, *solved), (held[2:], *({0: b} for _ in solved)), [*read, *asked], given)
    return own, work, _about("points", empty) | {"dim_y": model.dim_y, "reach": _reach(model)}


def _reach(model: CMANP) -> dict[str, list[list[float]]]:
    """The least and the largest number of each channel that the library takes: float32 holds its square."""
    most, made = largest(torch.float32), {}
    for side, dim in (("x", model.dim_x), ("y", model.dim_y)):
        mean, std = torch.zeros(dim).double(), torch.ones(dim).double()
        if model.scales is not None:
            mean, std = (getattr(model.scales, f"{side}_{part}") for part in ("mean", "std"))
        made[side] = [(mean - most * std).tolist(), (mean + most * std).tolist()]
    return made


def _of_events(model: CMHP) -> Works:
    """Every verb of a model of events."""
    own, b, n = verbs.Events(model), Dim("batch"), Dim("events")
    empty = model.empty(torch.zeros(3, dtype=torch.float64))
    names, state, out = _held(blank := empty.tensors())
    held, chunk, row = [{0: b} for _ in state], {0: b, 1: n}, {0: b}
    times, marks = torch.ones(3, 5, dtype=torch.float64).cumsum(1), torch.zeros(3, 5, dtype=torch.int64)
    features, gap, starts = torch.zeros(3, model.config["dim"]), *torch.ones(2, 3, dtype=torch.float64)
    seen, predicted = ["times", "marks"], ["features", "log_weights", "loc", "scale"]
    begun = starts, starts.clone(), times, marks
    return (
        own,
        {
            "observe": (begun, (row, row, chunk, chunk), ["start", "last_time", *seen], out),
            "update": ((state, times, marks), (held, chunk, chunk), [*names, *seen], out),
            "merge": _merging(blank, held),
            "predict": ((state,), (held,), names, predicted),
            "marks": ((features, gap), (row, row), ["features", "gap"], ["log_prob"]),
        },
        _about("events", empty) | {"num_marks": model.num_marks},
    )


def _of_table(learner: Learner) -> Works:
    """Every verb of a tables' learner."""
    memory, columns = learner.memory, learner.columns
    assert memory is not None
    assert columns is not None
    p, count = memory.features.width, max(memory.targets, 3) if learner.discrete else memory.targets
    n, k = Dim("rows"), Dim("classes", min=1) if learner.discrete else Dim.STATIC
    moments, law = Moments.empty(p, count), None
    state = {name: getattr(moments, name) for name in Moments.NAMES}
    axes: list[Any] = [None, {1: k}, {0: k}, None]
    more: dict[str, Tensor] = {}
    answers, work = ["mean", "variance"], {}
    if memory.residuals is not None:
        model = shipped()
        law = verbs.Points(model)
        slots = model.empty(count)
        state = {f"residuals.{name}": t for name, t in slots.tensors().items()} | state
        axes, answers = [None] * 3 + axes, [*answers, "means", "stds", "log_weight"]
        with torch.no_grad():
            more = {"latents": model.read(slots), "residuals.count": slots.count + 1}
        work["read"] = (([slots.value],), ([None],), ["residuals.value"], ["latents"])
    names, held, out = _held(state)
    rows, asked = ({0: n}, {0: n}, {0: n, 1: k}), ["x", "fold", "y"]
    x, fold, y = torch.zeros(5, columns.width).double(), torch.zeros(5).long(), torch.zeros(5, count).double()
    read = {
        "weights": torch.zeros(p, count), "root": torch.eye(p), "noise": torch.ones(count),
        "missed": torch.zeros(()), "usual": torch.zeros(()),
    }  # fmt: skip
    given = x, *(t.double() for t in read.values()), list(more.values())
    given_axes = {0: n}, {1: k}, None, {0: k}, None, None, [None] * len(more)
    groups = {name: [group.start, group.stop] for name, group in memory.features.groups.items()}
    return verbs.Table(learner, law), work | {
        "observe": ((x, fold, y), rows, asked, names),
        "update": ((held, x, fold, y), (axes, *rows), [*names, *asked], out),
        "merge": _merging(state, axes),
        "predict": (given, given_axes, ["x", *read, *more], answers),
    }, {
        "kind": "tables", "groups": groups, "fitted": None if learner.discrete else memory.features.fitted,
        "discrete": learner.discrete, "names": names, "constants": {"TRUST": TRUST, "EMPTY": EMPTY},
    }  # fmt: skip


def _held(tensors: dict[str, Tensor]) -> tuple[list[str], list[Tensor], list[str]]:
    """Names of a state's parts, copies of them, and the names of what they become."""
    return list(tensors), [t.clone() for t in tensors.values()], [f"{name}_out" for name in tensors]


def _merging(tensors: dict[str, Tensor], axes: list[Any]) -> Work:
    (names, mine, out), (_, theirs, _) = _held(tensors), _held(tensors)
    return (mine, theirs), (axes, axes), [*names, *(f"other_{name}" for name in names)], out


def _about(kind: str, empty: Any) -> dict[str, Any]:
    """What a runner must know of states, and make an empty one of."""
    blank = {
        name: {
            "shape": list(t.shape[1:]), "fill": t.flatten()[0].item(),
            "dtype": "F64" if t.is_floating_point() else "I64",
        }
        for name, t in empty.tensors().items()
    }  # fmt: skip
    return {"kind": kind, "state": empty.KIND, "blank": blank}


def _halve(made: Any) -> None:
    """Store weights that float16 holds exactly so, each with a cast back, which is done once at load."""
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    casts = []
    for tensor in made.graph.initializer:
        if tensor.data_type != TensorProto.FLOAT:
            continue
        numbers = numpy_helper.to_array(tensor)
        with np.errstate(over="ignore"):
            small = numbers.astype(np.float16)
        if numbers.size < FEW or not np.array_equal(small.astype(np.float32), numbers):
            continue
        name = tensor.name
        tensor.CopyFrom(numpy_helper.from_array(small, f"{name}.half"))
        casts.append(helper.make_node("Cast", [tensor.name], [name], to=TensorProto.FLOAT))
    nodes = [*casts, *made.graph.node]
    del made.graph.node[:]
    made.graph.node.extend(nodes)
