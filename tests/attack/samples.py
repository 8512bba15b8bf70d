"""One file of every kind that this library writes, how it is read, and the answer that it must give."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from constmem import Decay, Stream, StreamingClassifier, StreamingRegressor, StreamPool, Window
from constmem.core.moments import Moments
from constmem.data import EventLog, Table
from constmem.neural_processes import NeuralProcess
from constmem.point_processes import PointProcess
from tests.laws import models as made


@dataclass(frozen=True)
class Sample:
    """Files of one kind.

    Attributes:
        files: by the names they are read under.
        read: what reads them from a folder.
        answer: what is compared, bit for bit.
    """

    files: dict[str, bytes]
    read: Callable[[Path], Any]
    answer: Callable[[Any], Any]

    def expected(self) -> Any:
        """The answer of the files as they were written."""
        with tempfile.TemporaryDirectory() as folder:
            for name, content in self.files.items():
                (Path(folder) / name).write_bytes(content)
            return self.answer(self.read(Path(folder)))


def _written(save: Callable[[Path], None]) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder))
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}


def _one(write: Callable[[Path], None], read: Callable[[Path], Any], answer: Callable[[Any], Any]) -> Sample:
    """Of a kind that is one file."""
    return Sample(
        _written(lambda folder: write(folder / "file")), lambda folder: read(folder / "file"), answer
    )


def points(name: str, n: int = 6, b: int = 2) -> Any:
    """A small model of points and the state of some."""
    model = made.small(name)
    x, y, _, _ = made.data(n=n, b=b)
    with torch.no_grad():
        return model, model.condition(x, y)


def events(name: str) -> Any:
    """A small model of events and the state of some."""
    model = made.small(name)
    with torch.no_grad():
        return model, model.condition(made.stream(5, 5))


def states() -> dict[str, Sample]:
    """States of every kind."""
    found = {name: points(name)[1] for name in ("cmanp", "cnp", "np", "lbanp")}
    found |= {name: events(name)[1] for name in ("cmhp", "thp", "gru", "trivial")}
    random = np.random.default_rng(0)
    moments = Moments.observe(*(torch.from_numpy(random.normal(size=(9, k))) for k in (4, 2)))
    return {
        **{
            name: _one(state.save, type(state).load, lambda s: (s.tensors(), s.fingerprint))
            for name, state in found.items()
        },
        "moments": _one(moments.save, Moments.load, Moments.tensors),
    }


def streams() -> dict[str, Sample]:
    """Streams of every way to forget, of points and of events."""
    samples = {}
    for name, forget in (("cmanp", None), ("cmanp", Decay(5)), ("cmanp", Window(6, 3)),
                         ("lbanp", Window(6, 3)), ("cmhp", None), ("gru", None)):  # fmt: skip
        model = made.small(name)
        stream = Stream(model, batch=2, forget=forget)
        if name in ("cmhp", "gru"):
            some = made.stream(7, 7)
            stream.observe(some.times, some.marks)
        else:
            x, y, _, _ = made.data(n=10)
            stream.observe(x, y)
        samples[f"{name} {forget}"] = _one(stream.save, lambda path, m=model: Stream.load(path, m), predicted)
    model = made.small("cmanp")
    pool, (x, y, _, _) = StreamPool(model), made.data(n=5, b=1)
    pool.observe(["a", "b", "a", 7, "c"], x[0], y[0])
    samples["pool"] = _one(
        pool.save, lambda path: StreamPool.load(path, model), lambda p: (p.keys, p.state(p.keys).tensors())
    )
    return samples


def predicted(stream: Stream) -> Any:
    """All that a stream answers."""
    held = stream.count, stream.nbytes, repr(stream.forget), stream._held.filled
    if isinstance(stream.model, PointProcess):
        return *held, stream.predict().mean
    given = stream.predict(made.data()[2][: stream.batch])
    return *held, given.mean, given.stddev


def models() -> dict[str, Sample]:
    """Folders of models."""
    samples = {}
    for name in ("cmanp", "cnp", "lbanp", "cmhp"):
        model = made.small(name)
        family: Any = PointProcess if name == "cmhp" else NeuralProcess
        samples[name] = Sample(
            _written(model.save_pretrained),
            family.from_pretrained,
            lambda m: (m.state_dict(), m.config, asked(m)),
        )
    return samples


def asked(model: Any) -> Any:
    """What a model answers to one question."""
    with torch.no_grad():
        if isinstance(model, PointProcess):
            return model.query(model.condition(made.stream(4, 4))).mean
        x, y, xt, _ = made.data()
        return model.query(model.condition(x, y), xt).mean


def rows(n: int, seed: int = 0) -> tuple[dict[str, Any], Any, Any]:
    """A small table of mixed columns, a number and a class for each row."""
    random = np.random.default_rng(seed)
    a, b = random.normal(size=n), random.normal(size=n)
    words = random.choice(["red", "green", "blue"], n).astype(object)
    columns = {"a": a, "b": np.where(random.random(n) < 0.1, np.nan, b), "word": words}
    y = np.sin(a) + (words == "red") + 0.1 * random.normal(size=n)
    return columns, y, np.where(y > 0.5, "high", "low")


def estimators() -> dict[str, Sample]:
    """Estimators: frozen and in their warm-up, of numbers and of classes, with and without forgetting."""
    x, y, labels = rows(60)
    query = rows(7, seed=1)[0]
    small = {"size": 24}
    frozen = {
        "numbers": StreamingRegressor(**small).fit(x, y),
        "two numbers": StreamingRegressor(**small).fit(x, np.stack([y, -y], 1)),
        "classes": StreamingClassifier(**small).fit(x, labels),
        "half-life": StreamingRegressor(**small, forget=20.0).fit(x, y),
        "window": StreamingClassifier(**small, forget="window:32").fit(x, labels),
        "auto": StreamingRegressor(**small, forget="auto").fit(x, y),
        "warm-up": StreamingRegressor(**small).partial_fit(x, y),
        "warm-up of classes": StreamingClassifier(**small).partial_fit(x, labels),
    }

    def answer(estimator: Any) -> Any:
        if isinstance(estimator, StreamingClassifier):
            return estimator.predict_proba(query), estimator.classes_
        return *estimator.predict(query, return_std=True), estimator.get_params()

    return {name: _one(e.save, type(e).load, answer) for name, e in frozen.items()}


def own_data() -> dict[str, Sample]:
    """The rows and events that a run keeps."""
    random = np.random.default_rng(0)
    table = Table.of(random.normal(size=(60, 2)), random.normal(size=60), [f"g{i % 6}" for i in range(60)])
    log = EventLog.of(made.stream(*range(4, 14)))
    return {
        "table": _one(table.save, Table.load, lambda t: (t.x, t.y, t.groups, t.name, t.labels)),
        "events": _one(log.save, EventLog.load, lambda e: (e._tensors(), e.labels, e.name, e.events.unit)),
    }
