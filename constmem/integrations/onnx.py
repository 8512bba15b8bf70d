"""Models as ONNX graphs, for any number of streams and points, and a runner without PyTorch beside them."""

import contextlib
import copy
import hashlib
import io
import json
import logging
import os
import re
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from sklearn.utils.validation import check_is_fitted
from torch import nn

from constmem.core.files import write_bytes, write_text
from constmem.core.registry import EVENTS
from constmem.integrations.onnx_tables import of_table
from constmem.integrations.onnx_verbs import of_events, of_points
from constmem.neural_processes import CMANP, NeuralProcess
from constmem.point_processes import CMHP, PointProcess
from constmem.tabular.base import StreamingEstimator
from constmem.tabular.commands import load_estimator
from constmem.tabular.forgetting import Forgetting

FORMAT, VERSION = "constmem.onnx", 2
RUNNER = Path(__file__).with_name("onnx_runner.py")
PARTS = (
    "integrations/onnx_table_runner",
    "integrations/onnx_runner",
    "integrations/onnx_evidence",
    "tabular/answers",
    "tabular/columns",
    "tabular/frames",
    "tabular/inputs",
)  # of the runner of tables
Model = CMANP | CMHP | StreamingEstimator
FEW = 64  # numbers that are not worth halving


def export(model: Model, folder: str | os.PathLike[str], *, half: bool = False) -> Path:
    """Write a model as graphs that onnxruntime runs without PyTorch, and a runner beside them.

    States are float64 and those of the library: both read each other's files. Points may be float64.

    Args:
        model: of points, of events, or an estimator of a table whose warm-up is over, which takes along
            what it has learned.
        folder: gets the graphs (of points and tables observe, update, merge, read and predict; of events
            update, predict and marks), model.json, and constmem_runner, which needs onnxruntime and numpy
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
    work, about = of_points(model) if isinstance(model, CMANP) else of_events(model)
    about |= {"model": model.name, "config": model.config, "fingerprint": model.fingerprint()}
    _write(out, work, about, half=half)
    write_bytes(out / "constmem_runner.py", RUNNER.read_bytes())
    return out


def _export_table(model: StreamingEstimator, out: Path, *, half: bool) -> Path:
    """Graphs of an estimator, what it has learned, and a runner, some of whose files are the library's."""
    if half:
        raise ValueError("an estimator's own numbers are float64, and stay so: export it without half")
    work, about = of_table(model.learner_)
    _write(out, work, about | {"model": type(model).__name__}, half=False)
    model.save(out / "learned.safetensors")
    for part in PARTS:
        path = RUNNER.parents[1] / f"{part}.py"
        text = re.sub(r"from constmem\.\w+\.?", "from .", path.read_text(encoding="utf-8"))
        write_text(out / "constmem_runner" / path.name, text)
    names = "from .onnx_table_runner import TableRunner as TableRunner\n"
    write_text(out / "constmem_runner" / "__init__.py", names)
    return out


def _write(out: Path, work: dict[str, Any], about: dict[str, Any], *, half: bool) -> None:
    graphs = {name: _graph(*parts, half=half) for name, parts in work.items()}
    for name, content in graphs.items():
        write_bytes(out / f"{name}.onnx", content)
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in graphs.items()}
    about = about | {"format": FORMAT, "version": VERSION, "graphs": sums}
    write_text(out / "model.json", json.dumps(about, indent=1) + "\n")


def export_named(source: str, folder: Path, *, half: bool) -> Path:
    """`export` of a folder or a name that `from_pretrained` takes, or of a file that an estimator saved."""
    if Path(source).is_file():
        return export(load_estimator(Path(source)), folder, half=half)
    path = Path(source) / "config.json"
    named = json.loads(path.read_text(encoding="utf-8")).get("model", "") if path.is_file() else ""
    kind: Any = PointProcess if named in EVENTS else NeuralProcess
    return export(kind.from_pretrained(source), folder, half=half)


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
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError(f"exporting needs more packages ({error}): pip install 'constmem[onnx]'") from error


def _graph(
    verb: nn.Module, given: tuple[Any, ...], axes: tuple[Any, ...], inputs: list[str], outputs: list[str],
    *, half: bool,
) -> bytes:  # fmt: skip
    """A verb as the bytes of an ONNX file."""
    import onnx

    with tempfile.TemporaryDirectory() as folder, torch.no_grad(), _quiet():
        path = str(Path(folder) / "graph.onnx")
        torch.onnx.export(
            verb.eval(), given, path, dynamic_shapes=axes, input_names=inputs, output_names=outputs,
            dynamo=True, external_data=False, verbose=False,
        )  # fmt: skip
        made = onnx.load(path)
    if half:
        _halve(made)
    del made.metadata_props[:]
    made.doc_string = ""
    for node in made.graph.node:
        del node.metadata_props[:]  # where each line of this package was when it was exported
        node.doc_string = ""
    onnx.checker.check_model(made)
    content: bytes = made.SerializeToString(deterministic=True)
    return content


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


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's notes to its own developers."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
