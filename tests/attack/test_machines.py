"""Streams and pools of them, led by hypothesis through steps in any order, beside lists of all points."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from constmem import Stream, StreamPool
from tests.laws import models as made

MODEL = made.small("cmanp")
XT = made.data(b=1)[2]
SEEDS = st.integers(0, 2**31)


def points(count: int, seed: int) -> tuple[Tensor, Tensor]:
    x, y, _, _ = made.data(n=count, b=1, seed=seed)
    return x[0], y[0]


def expected(seen: list[tuple[Tensor, Tensor]]) -> Any:
    """What the model answers, given all points at once."""
    with torch.no_grad():
        if not sum(len(x) for x, _ in seen):
            return MODEL.query(MODEL.empty(1), XT).mean
        x, y = (torch.cat(parts)[None] for parts in zip(*seen, strict=True))
        return MODEL.query(MODEL.condition(x, y), XT).mean


class Pools(RuleBasedStateMachine):
    """A pool of three streams, and what each should know."""

    @initialize()
    def begin(self) -> None:
        self.pool, self.seen = StreamPool(MODEL), {}  # type: dict[str, list[tuple[Tensor, Tensor]]]

    @rule(keys=st.lists(st.sampled_from("abc"), max_size=6), seed=SEEDS)
    def observe(self, keys: list[str], seed: int) -> None:
        x, y = points(len(keys), seed)
        self.pool.observe(keys, x, y)
        self.note(keys, x, y)

    @rule(keys=st.lists(st.sampled_from("abc"), max_size=6), seed=SEEDS)
    def merge(self, keys: list[str], seed: int) -> None:
        other, (x, y) = StreamPool(MODEL), points(len(keys), seed)
        other.observe(keys, x, y)
        self.pool.merge(other)
        self.note(keys, x, y)

    @rule(key=st.sampled_from("abc"), back=st.booleans())
    def pop(self, key: str, back: bool) -> None:
        if key in self.pool:
            state, held = self.pool.pop([key]), self.seen.pop(key)
            if back:
                self.pool.put([key], state)
                self.seen[key] = held

    @rule()
    def save(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.pool.save(Path(folder) / "pool")
            self.pool = StreamPool.load(Path(folder) / "pool", MODEL)

    @rule(seed=SEEDS)
    def refuse(self, seed: int) -> None:
        x, y = points(2, seed)
        y[1, 0] = torch.nan
        try:
            self.pool.observe(["a", "new"], x, y)
        except ValueError:
            return
        raise AssertionError("NaN was observed")

    @invariant()
    def knows_all(self) -> None:
        assert sorted(self.pool.keys) == sorted(self.seen)
        for key, seen in self.seen.items():
            assert int(self.pool.count([key])) == sum(len(x) for x, _ in seen)
            found = self.pool.predict([key], XT).mean
            torch.testing.assert_close(found, expected(seen), atol=1e-6, rtol=0)

    def note(self, keys: list[str], x: Tensor, y: Tensor) -> None:
        for i, key in enumerate(keys):
            self.seen.setdefault(key, []).append((x[i : i + 1], y[i : i + 1]))


class Streams(RuleBasedStateMachine):
    """A stream and its forks, each with the points that it should know."""

    @initialize()
    def begin(self) -> None:
        self.streams: list[tuple[Stream, list[tuple[Tensor, Tensor]]]] = [(Stream(MODEL), [])]

    @rule(which=st.integers(0, 3), count=st.integers(0, 5), chunk=st.integers(1, 7), seed=SEEDS)
    def observe(self, which: int, count: int, chunk: int, seed: int) -> None:
        stream, seen = self.streams[which % len(self.streams)]
        x, y = points(count, seed)
        stream.observe(x, y, chunk=chunk)
        seen.append((x, y))

    @rule(which=st.integers(0, 3))
    def fork(self, which: int) -> None:
        if len(self.streams) < 4:
            stream, seen = self.streams[which % len(self.streams)]
            self.streams.append((stream.fork(), list(seen)))

    @rule(which=st.integers(0, 3))
    def save(self, which: int) -> None:
        at = which % len(self.streams)
        with tempfile.TemporaryDirectory() as folder:
            self.streams[at][0].save(Path(folder) / "stream")
            self.streams[at] = Stream.load(Path(folder) / "stream", MODEL), self.streams[at][1]

    @invariant()
    def know_all(self) -> None:
        for stream, seen in self.streams:
            assert int(stream.count) == sum(len(x) for x, _ in seen)
            torch.testing.assert_close(stream.predict(XT).mean, expected(seen), atol=1e-6, rtol=0)


FEW = settings(max_examples=8, stateful_step_count=10, deadline=None, derandomize=True, database=None)
TestPools, TestStreams = Pools.TestCase, Streams.TestCase
TestPools.settings = TestStreams.settings = FEW
