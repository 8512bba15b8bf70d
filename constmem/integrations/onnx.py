"""Models as ONNX graphs: observe, update, merge, read and predict, for any number of streams and points."""

import contextlib
import copy
import hashlib
import io
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from constmem.core.files import write_bytes, write_text
from constmem.neural_processes import CMANP

FORMAT, VERSION = "constmem.onnx", 1
RUNNER = Path(__file__).with_name("onnx_runner.py")
OPTIONS = {"moments": "moments", "levels": "grey levels", "rank": "joint predictions"}
FEW = 64  # numbers that are not worth halving


def export(model: CMANP, folder: str | os.PathLike[str], *, half: bool = False) -> Path:
    """Write a model as graphs that onnxruntime runs without PyTorch, and a runner of one file beside them.

    States are float64 and those of the library: both read each other's files. Points may be float64.

    Args:
        folder: gets observe.onnx, update.onnx, merge.onnx, read.onnx, predict.onnx, model.json and
            constmem_runner.py, which needs onnxruntime and numpy alone.
        half: store weights as float16, rounded, which halves the files. Rounded weights are others: their
            states have another fingerprint.
    """
    _require(model)
    model = copy.deepcopy(model).float().cpu().eval()
    if half:
        for name, tensor in model.state_dict().items():
            if tensor.dtype == torch.float32 and not name.startswith("scales."):
                tensor.copy_(tensor.half())
    out = Path(folder)
    graphs = {name: _graph(*work, half=half) for name, work in _work(model).items()}
    for name, content in graphs.items():
        write_bytes(out / f"{name}.onnx", content)
    write_bytes(out / "constmem_runner.py", RUNNER.read_bytes())
    about = {
        "format": FORMAT, "version": VERSION, "model": model.name, "config": model.config,
        "dim_x": model.dim_x, "dim_y": model.dim_y, "layout": list(model.layout),
        "fingerprint": model.fingerprint(),
        "graphs": {name: hashlib.sha256(content).hexdigest() for name, content in graphs.items()},
    }  # fmt: skip
    write_text(out / "model.json", json.dumps(about, indent=1) + "\n")
    return out


def export_named(source: str, folder: Path, *, half: bool) -> Path:
    """`export` of a folder or a name that `from_pretrained` takes."""
    from constmem.neural_processes import NeuralProcess

    return export(NeuralProcess.from_pretrained(source), folder, half=half)  # type: ignore[arg-type]


def _require(model: nn.Module) -> None:
    if not isinstance(model, CMANP):
        raise ValueError(f"only CMANP can be exported to ONNX so far, not {type(model).__name__}")
    for option, what in OPTIONS.items():
        if model.config.get(option):
            raise ValueError(
                f"a CMANP with {what} ({option}={model.config[option]}) cannot be exported to ONNX so far: "
                "export one without"
            )
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError(f"exporting needs more packages ({error}): pip install 'constmem[onnx]'") from error


class _Verb(nn.Module):
    """One verb of a model on plain tensors."""

    def __init__(self, model: CMANP) -> None:
        super().__init__()
        self.model = model


class _Observe(_Verb):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        state = self.model.observe(x, y)
        return state.value, state.lse


class _Merge(_Verb):
    """log(exp a + exp b) and the share of b, from exp(-|a - b|), which never overflows."""

    def forward(
        self, value: Tensor, lse: Tensor, other_value: Tensor, other_lse: Tensor
    ) -> tuple[Tensor, Tensor]:
        gap = other_lse - lse
        less = (-gap.abs()).exp()
        share = torch.where(gap > 0, 1.0, less) / (1.0 + less)
        return (
            value + (other_value - value) * share[..., None],
            torch.maximum(lse, other_lse) + (1.0 + less).log(),
        )


class _Update(_Merge):
    def forward(self, value: Tensor, lse: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        state = self.model.observe(x, y)
        return super().forward(value, lse, state.value, state.lse)


class _Read(_Verb):
    def forward(self, value: Tensor) -> Tensor:
        return self.model._read(value)


class _Predict(_Verb):
    def forward(self, memory: Tensor, xt: Tensor) -> tuple[Tensor, Tensor]:
        found = self.model.predict(memory, xt)
        return found.mean, found.stddev


Work = tuple[_Verb, tuple[Tensor, ...], tuple[dict[int, Any], ...], list[str], list[str]]


def _work(model: CMANP) -> dict[str, Work]:
    """Every verb with examples of its arguments, which of their axes are free, and names."""
    b, n, m = Dim("batch"), Dim("points"), Dim("targets")
    x, y, xt = (torch.zeros(3, k, dim, dtype=torch.float64) for k, dim in (
        (5, model.dim_x), (5, model.dim_y), (7, model.dim_x)
    ))  # fmt: skip
    with torch.no_grad():
        state = model.observe(x, y)
        memory = model.read(state)
    held, points, slots = (state.value, state.lse), ({0: b, 1: n},) * 2, ({0: b},) * 2
    out = ["value_out", "lse_out"]
    others = ["value", "lse", "other_value", "other_lse"]
    return {
        "observe": (_Observe(model), (x, y), points, ["x", "y"], ["value", "lse"]),
        "update": (_Update(model), (*held, x, y), (*slots, *points), ["value", "lse", "x", "y"], out),
        "merge": (_Merge(model), (*held, *(t.clone() for t in held)), slots * 2, others, out),
        "read": (_Read(model), held[:1], slots[:1], ["value"], ["memory"]),
        "predict": (_Predict(model), (memory, xt), ({0: b}, {0: b, 1: m}), ["memory", "xt"], ["mean", "std"]),
    }


def _graph(
    verb: _Verb, given: tuple[Tensor, ...], axes: tuple[dict[int, Any], ...], inputs: list[str],
    outputs: list[str], *, half: bool,
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
