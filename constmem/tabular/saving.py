"""Learners in files: one safetensors file, with JSON in its header; nothing is ever unpickled."""

import json
import os
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from constmem.core import checks
from constmem.core.files import read_tensors, write_tensors
from constmem.tabular.columns import Columns
from constmem.tabular.features import Features
from constmem.tabular.forgetting import Forgetting
from constmem.tabular.frames import MOMENT, Frame, Kind
from constmem.tabular.learner import Learner

KIND = "constmem.tabular"
VERSION = 1
DAMAGE = (ValueError, KeyError, TypeError, IndexError, AttributeError, RuntimeError, ArithmeticError)


def save(learner: Learner, path: str | os.PathLike[str], about: dict[str, Any]) -> None:
    """Write a learner, atomically, and what else `load` shall give back."""
    memory, columns, rows = learner.memory, learner.columns, learner.warm_up_rows
    given = {
        "discrete": learner.discrete,
        "warmup": learner.warmup,
        "size": learner.size,
        "seed": learner.seed,
    }
    header: dict[str, Any] = {"about": about, "learner": given, "columns": None, "rows": None}
    tensors: dict[str, Tensor] = {}
    if columns is not None and memory is not None:
        header["columns"] = columns.text()
        tensors |= {f"features.{name}": tensor for name, tensor in memory.features.tensors().items()}
        tensors |= {f"memory.{name}": tensor for name, tensor in memory.tensors().items()}
        tensors |= {"center": torch.from_numpy(learner.center), "scale": torch.from_numpy(learner.scale)}
    elif rows is not None:
        frame, y = rows
        others = {i: column.astype(np.int64).tolist() if column.dtype.kind == "M" else column.tolist()
                  for i, column in frame.others.items()}  # fmt: skip
        header["rows"] = {"names": frame.names, "kinds": frame.kinds, "others": others}
        tensors |= {"rows.values": torch.from_numpy(frame.values), "rows.y": torch.from_numpy(y)}
    words = {"format": KIND, "version": str(VERSION), "content": json.dumps(header)}
    write_tensors(path, tensors, words)


def load(path: str | os.PathLike[str]) -> tuple[Learner, dict[str, Any]]:
    """Read what `save` wrote: the learner, and what was given beside it."""
    tensors, words = read_tensors(path, kind=KIND, version=VERSION)
    try:
        header = json.loads(words["content"])
        learner = _learner(header, tensors)
    except DAMAGE as error:
        raise damaged(path, error) from error
    return learner, header["about"]


def damaged(path: str | os.PathLike[str], error: Exception) -> ValueError:
    """The error of a file whose content does not fit together."""
    return ValueError(f"{path} is damaged ({error!r}): fit the estimator and save it again")


def _learner(header: dict[str, Any], tensors: dict[str, Tensor]) -> Learner:
    if (bad := checks.first_not_finite(tensors)) is not None and not bad.startswith("rows."):
        raise ValueError(f"holds a {bad} with NaN or infinity in it")
    learner = Learner(**header["learner"], forgetting=Forgetting.of(header["about"]["forget"]))
    if header["columns"] is not None:
        features = Features.of(_part(tensors, "features."))
        center, scale = (tensors[name].numpy().copy() for name in ("center", "scale"))
        learner.start(Columns.of(header["columns"]), features, center, scale)
        assert learner.memory is not None
        learner.memory.restore(_part(tensors, "memory."))
    elif header["rows"] is not None:
        about = header["rows"]
        others = {int(i): np.array([*column, None], object)[:-1] for i, column in about["others"].items()}
        for i, column in others.items():
            if about["kinds"][i] == "date":
                others[i] = column.astype(np.int64).astype(MOMENT)
        names = None if about["names"] is None else tuple(about["names"])
        values, y = (tensors[name].numpy().copy() for name in ("rows.values", "rows.y"))
        wide = {len(about["kinds"]), values.shape[1], len(names or about["kinds"])}
        if len({len(values), len(y), *map(len, others.values())}) > 1 or len(wide) > 1:
            raise ValueError("holds rows and columns that do not fit each other")
        if not set(about["kinds"]) <= set(get_args(Kind)):
            raise ValueError(f"holds columns of kinds {about['kinds']}")
        words = {type(v) for i, column in others.items() for v in column if about["kinds"][i] == "text"}
        if not words <= {str, type(None)}:
            raise ValueError("holds a column of text with something else in it")
        learner.learn(Frame(names, tuple(about["kinds"]), values, others), y)
    return learner


def _part(tensors: dict[str, Tensor], start: str) -> dict[str, Tensor]:
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
