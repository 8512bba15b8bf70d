"""The store: what it has acknowledged is there, once, bit for bit, whatever happens to the process."""

import contextlib
import errno
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from constmem import CMANP, Store, Stream, StreamingRegressor, StreamPool
from constmem.kernels import paths
from constmem.streams import _rounds, journal, one_by_one
from tests.laws import models as small_models
from tests.streams.made import assert_identical, built

MODEL = built()


def rows(n: int, keys: int, seed: int = 0) -> tuple[list[str], Tensor, Tensor]:
    """Rows of some keys, few of which have most of them."""
    draw = np.random.default_rng(seed)
    names = [f"k{int(i)}" for i in np.minimum(draw.zipf(1.3, n), keys)]
    x, y = (torch.from_numpy(draw.standard_normal((n, 1))) for _ in range(2))
    return names, x, y


def alone(model: Any, names: list[str], x: Tensor, y: Tensor) -> dict[str, Any]:
    """The state of each key's rows, from nothing, in one call for that key alone."""
    found = {}
    for name in dict.fromkeys(names):
        mine = torch.tensor([i for i, other in enumerate(names) if other == name])
        places = np.zeros(len(mine), np.int64)
        found[name] = one_by_one(model, model.empty(1), places, x[mine], y[mine])
    return found


def require_same(store: Store, expected: dict[str, Any]) -> None:
    for name, state in expected.items():
        assert_identical(store.state([name]), state)


@pytest.mark.parametrize("machine_code", [True, False])
@pytest.mark.parametrize("kind", [*small_models.CONSTANT, "cmhp", "gru", "float32"])
def test_bits_depend_on_the_rows_of_a_stream_alone(
    kind: str, machine_code: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not machine_code:
        monkeypatch.setattr(paths, "library", lambda: None)
    model = CMANP(dim_x=2, dim_y=2, dim=32, depth=2).eval() if kind == "float32" else small_models.small(kind)
    draw = np.random.default_rng(0)
    places = np.minimum(draw.zipf(1.5, 90), 8).astype(np.int64) - 1
    events = kind in ("cmhp", "gru")
    x = torch.from_numpy(draw.exponential(1.0, 90).cumsum() if events else draw.standard_normal((90, 2)))
    y: Any = torch.from_numpy(draw.integers(0, 3, 90) if events else draw.standard_normal((90, 2)))
    blank = model.empty(torch.zeros(8)) if events else model.empty(8)
    whole = one_by_one(model, blank, places, x, y)
    parts = blank
    for start in range(0, 90, 7):
        here = slice(start, start + 7)
        parts = one_by_one(model, parts, places[here], x[here], y[here])
    assert_identical(parts, whole)
    for place in range(8):
        mine = torch.from_numpy(np.flatnonzero(places == place))
        if len(mine):
            single = one_by_one(
                model, blank.select(slice(0, 1)), np.zeros(len(mine), np.int64), x[mine], y[mine]
            )
            assert_identical(single, whole.select(slice(place, place + 1)))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_rounds_hold_each_row_once_in_the_order_of_its_stream(places: list[int]) -> None:
    given_places = np.array(places)
    found = list(_rounds(given_places))
    assert sorted(np.concatenate(found).tolist()) == list(range(len(places)))
    for each in found:
        assert len(set(given_places[each])) == len(each)
    for place in set(places):
        mine = [i for each in found for i in each if places[i] == place]
        assert mine == sorted(mine)


def test_a_stream_of_the_store_is_what_it_would_be_as_a_stream(tmp_path: Path) -> None:
    names, x, y = rows(50, 6)
    with Store(tmp_path / "s", MODEL) as store:
        store.observe(names, x, y)
        for name in set(names):
            mine = torch.tensor([i for i, other in enumerate(names) if other == name])
            stream = Stream(MODEL)
            stream.observe(x[mine].float(), y[mine].float())
            expected = stream.predict(torch.linspace(-1, 1, 5)[None, :, None])
            found = store.predict([name], torch.linspace(-1, 1, 5)[None, :, None])
            torch.testing.assert_close(found.mean, expected.mean, atol=1e-5, rtol=0)
            assert store.count([name]).item() == len(mine)


@pytest.mark.parametrize("seed", range(4))
def test_closing_forgetting_and_evicting_change_no_bit(seed: int, tmp_path: Path) -> None:
    """Any calls, with more streams than memory holds, opened anew now and then; never closed, sometimes."""
    path, draw = tmp_path / "s", random.Random(seed)
    names, x, y = rows(300, 150, seed=seed)
    shown: list[int] = []
    where = 0
    store = Store(path, MODEL, memory=1, journal=40)  # room for few
    deleted = 0
    while where < 300:
        step = draw.randint(1, 60)
        here = slice(where, where + step)
        store.observe(names[here], x[here], y[here], source="test", position=where)
        shown += range(where, min(where + step, 300))
        where += step
        action = draw.choice(["go on", "go on", "close", "leave", "delete"])
        if action == "delete":
            name = draw.choice(names)
            deleted += store.delete([name])
            shown = [i for i in shown if names[i] != name]
        elif action != "go on":
            if action == "close":
                store.close()
            else:
                store._database.close()  # as if the process had ended here
            store = Store(path, MODEL, memory=1, journal=40)
    line = torch.tensor(shown)
    expected = alone(MODEL, [names[i] for i in shown], x[line], y[line])
    assert len(store) == len(expected)
    assert store.position("test") is not None
    require_same(store, expected)
    assert store.keys(most=1000) == sorted(expected)
    store.check()
    store.close()


def killed(work: Callable[[Callable[[int], None]], None], after: float) -> int:
    """Do `work` in a process that is killed; returns the last number it has acknowledged."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            work(lambda number: os.write(write, number.to_bytes(4, "little")) and None)
        os._exit(0)
    os.close(write)
    time.sleep(after)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    text = b""
    while block := os.read(read, 2**16):
        text += block
    os.close(read)
    return int.from_bytes(text[-len(text) % 4 - 4 :][:4], "little") if len(text) >= 4 else 0


def kill_often(path: Path, times: int, seed: int) -> int:
    """Rows in steps of any size into a store whose process is killed again and again; how often at work."""
    names, x, y = rows(2000, 120)
    draw, acknowledged, at_work = random.Random(seed), 0, 0

    def work(report: Callable[[int], None]) -> None:
        with Store(path, MODEL, memory=1, journal=60) as store:
            where = int(store.position("test") or 0)
            while where < 2000:
                stop = min(where + draw.randint(1, 40), 2000)
                here = slice(where, stop)
                store.observe(names[here], x[here], y[here], source="test", position=stop)
                report(stop)
                where = stop

    for _ in range(times):
        acknowledged = max(acknowledged, killed(work, draw.random() * 0.25))
        draw.random()
        with Store(path, MODEL, memory=1, journal=60) as store:
            found = int(store.position("test") or 0)
            assert found >= acknowledged  # what was acknowledged is there
            at_work += found < 2000
            require_same(store, alone(MODEL, names[:found], x[:found], y[:found]))
        if found == 2000:
            path.unlink()
            acknowledged = 0
    return at_work


def test_nothing_acknowledged_is_lost_or_taken_twice_when_the_process_is_killed(tmp_path: Path) -> None:
    assert kill_often(tmp_path / "s", 8, seed=1) > 3


def test_rows_are_all_there_where_a_store_is_opened_with_less_memory_than_before(tmp_path: Path) -> None:
    names = [f"k{i}" for i in range(200)]
    x, y = (torch.from_numpy(np.random.default_rng(i).standard_normal((400, 1))) for i in range(2))
    store = Store(tmp_path / "s", MODEL)
    store.observe(names, x[:200], y[:200])
    store.flush()
    store.observe(names, x[200:], y[200:])  # of more streams than there is room for afterwards
    store._database.close()  # as if the process had ended here
    with Store(tmp_path / "s", MODEL, memory=1) as again:
        assert again._held.most < 100
        assert len(again) == 200
        require_same(again, alone(MODEL, names * 2, x, y))


def test_a_deleted_stream_stays_deleted_where_memory_is_short_after_a_crash(tmp_path: Path) -> None:
    names = [f"k{i}" for i in range(200)]
    store = Store(tmp_path / "s", MODEL)
    store.observe(names, torch.ones(200, 1), torch.ones(200, 1))
    store.delete(names[::2])
    store._database.close()  # as if the process had ended here
    for _ in range(2):
        with Store(tmp_path / "s", MODEL, memory=1) as again:
            assert len(again) == 100
            assert not any(name in again for name in names[::2])
            assert again.keys() == sorted(names[1::2])


def test_weights_that_changed_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    model = built()
    with Store(tmp_path / "s", model) as store:
        store.observe(["a"], [1.0], [1.0])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        for call in (
            lambda: store.observe(["b"], [1.0], [1.0], source="s", position=1),
            lambda: store.put(["b"], model.condition(torch.ones(1, 1, 1), torch.ones(1, 1, 1))),
        ):
            with pytest.raises(ValueError, match="weights have changed"):
                call()
        assert (len(store), store.position("s")) == (1, None)
    with Store(tmp_path / "s", MODEL) as store:
        assert store.known(["a", "b"]) == ["a"]
        assert store.position("s") is None
        store.put(["c"], store.state(["a"]).signed(None))  # made by nobody knows which weights
        assert store.observe(["a", "c"], [1.0, 1.0], [1.0, 1.0])


def test_where_memory_runs_out_nothing_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Any, number: int) -> None:
        if number:
            raise MemoryError("there is no more")

    with Store(tmp_path / "s", MODEL) as store:
        store.observe(["a"], [1.0], [1.0])
        with monkeypatch.context() as patched:
            patched.setattr(StreamPool, "_reserve", full)
            for call in (
                lambda: store.observe(["b"], [1.0], [1.0], source="s", position=1),
                lambda: store.create(["c"]),
            ):
                with pytest.raises(MemoryError):
                    call()
        assert (len(store), store.position("s"), store.known(["b", "c"])) == (1, None, [])
    with Store(tmp_path / "s", MODEL) as store:
        assert (len(store), store.position("s"), store.known(["b", "c"])) == (1, None, [])


def test_float32_at_rest_is_half_the_size_and_nearly_the_same(tmp_path: Path) -> None:
    names, x, y = rows(200, 20)
    sizes = {}
    for single in (False, True):
        with Store(tmp_path / str(single), MODEL, single=single) as store:
            store.observe(names, x, y)
            states = store.state(sorted(set(names)))
        with Store(tmp_path / str(single), MODEL, single=single) as store:
            again = store.state(sorted(set(names)))
            torch.testing.assert_close(again.value, states.value, atol=1e-6, rtol=1e-6)
            assert torch.equal(again.value, states.value) is not single
            assert torch.equal(again.count, states.count)
            sizes[single] = len(journal.Layout(MODEL, MODEL.empty(1), single).rows(again)[0])
    assert sizes[True] < 0.51 * sizes[False]


def test_events_begin_with_the_first_and_are_refused_out_of_order(tmp_path: Path) -> None:
    model = small_models.small("cmhp")
    with Store(tmp_path / "s", model) as store:
        store.create(["late"], start=5.0)
        store.observe(["a", "b", "a", "late"], [1.0, 2.0, 3.0, 7.0], [0, 1, 2, 0])
        with pytest.raises(ValueError, match="before"):
            store.observe(["b", "a"], [9.0, 2.0], [0, 0])
        assert store.count(["a", "b", "late"]).tolist() == [2, 1, 1]
        assert store.state(["a", "late"]).start.tolist() == [1.0, 5.0]
    with Store(tmp_path / "s", model) as store:
        assert store.predict(["a", "late"]).median.shape == (2,)


def test_merge_fork_put_and_delete_are_on_disk_at_once(tmp_path: Path) -> None:
    names, x, y = rows(30, 3)
    store = Store(tmp_path / "s", MODEL)
    store.observe(names, x, y)
    first, other = sorted(set(names))[:2]
    both = store.state([first]).merge(store.state([other]))
    store.merge(first, other)
    store.fork(first, "fork")
    store.create(["new"])
    store.delete([other])
    store._database.close()
    with Store(tmp_path / "s", MODEL) as again:
        assert_identical(again.state([first]), both)
        assert_identical(again.state(["fork"]), both)
        assert again.count(["new"]).item() == 0
        assert again.known([other, "fork"]) == ["fork"]
        with pytest.raises(ValueError, match="already"):
            again.fork(first, "new")
        again.observe(["new"], [1.0], [1.0])
        assert again.count(["new"]).item() == 1


def test_keys_are_listed_without_writing_anything(tmp_path: Path) -> None:
    names = [f"{'ab'[i % 2]}/{i:03}" for i in range(200)]
    with Store(tmp_path / "s", MODEL, memory=1) as store:  # room for few: some are in the file, some are not
        for start in range(0, 200, 50):
            store.observe([*names[start : start + 50], 7], torch.ones(51, 1), torch.ones(51, 1))
        store.delete(names[10:20])
        left = sorted({*names} - {*names[10:20]})
        store._database._sqlite.execute("pragma query_only = on")  # as on a disk that is full
        assert store.keys() == left
        assert store.keys("b/") == [name for name in left if name.startswith("b/")]
        pages, after = [], ""
        while page := store.keys("a/", after=after, most=7):
            pages.append(page)
            after = page[-1]
        assert [name for page in pages for name in page] == [name for name in left if name.startswith("a/")]
        assert {len(page) for page in pages[:-1]} == {7}
        store._database._sqlite.execute("pragma query_only = off")


def test_an_estimator_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(60, 2))
    estimator = StreamingRegressor(size=16, pretrained=False).fit(rows, rows[:, 0])
    for model in (estimator, "gp"):
        with pytest.raises(TypeError, match=r"a store is of a neural or a point process.*StreamPool"):
            Store(tmp_path / "s", model)  # type: ignore[arg-type]
    assert not (tmp_path / "s").exists()


def test_a_store_that_another_process_holds_is_refused(tmp_path: Path) -> None:
    program = (
        "import sys; from constmem.streams.database import Database\n"
        "try:\n    Database(sys.argv[1], {})\nexcept BlockingIOError as error:\n    print(error)"
    )
    with Store(tmp_path / "s", MODEL) as store:
        with pytest.raises(BlockingIOError, match="another process"):
            Store(tmp_path / "s", store.model)
        done = subprocess.run(
            [sys.executable, "-c", program, tmp_path / "s"], capture_output=True, text=True, check=True
        )
        assert "another process holds this store" in done.stdout
        store.observe(["a"], [1.0], [1.0])


def test_a_full_disk_takes_nothing_and_harms_nothing(tmp_path: Path) -> None:
    names, x, y = rows(200, 100)
    with Store(tmp_path / "s", MODEL) as store:
        store.observe(names[:100], x[:100], y[:100], source="test", position=100)
        run = store._database._sqlite.execute
        (pages,) = run("pragma page_count").fetchone()
        run(f"pragma max_page_count = {pages}")
        with pytest.raises(OSError, match="nothing of this call was taken") as caught:
            store.observe(names[100:], x[100:], y[100:], source="test", position=200)
        assert caught.value.errno == errno.ENOSPC
        require_same(store, alone(MODEL, names[:100], x[:100], y[:100]))
        run("pragma max_page_count = 1000000")
        assert store.observe(names[100:], x[100:], y[100:], source="test", position=200)
        require_same(store, alone(MODEL, names, x, y))


def test_damage_is_noticed_and_named(tmp_path: Path) -> None:
    names, x, y = rows(100, 50)
    path = tmp_path / "s"
    with Store(path, MODEL) as store:
        store.observe(names, x, y)
    whole = path.read_bytes()
    draw = random.Random(0)
    noticed = 0
    for _ in range(60):
        content = bytearray(whole)
        at = draw.randrange(len(content))
        content[at] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
        try:
            with Store(path, MODEL) as store:
                store.check()
                states = {name: store.state([name]) for name in set(names)}
        except (ValueError, OSError) as error:
            assert str(path) in str(error)  # noqa: PT017
            noticed += 1
            continue
        for name, state in alone(MODEL, names, x, y).items():  # a bit of what nobody reads
            assert_identical(states[name], state)
    assert noticed > 15  # the rest is space that nobody uses
    path.write_text("not a database, but long enough to be one " * 100)
    with pytest.raises(ValueError, match="damaged"):
        Store(path, MODEL)
    path.unlink()
    with sqlite3.connect(path) as other:
        other.execute("create table mine (a)")
    other.close()
    with pytest.raises(ValueError, match="no store"):
        Store(path, MODEL)


def test_a_damaged_state_harms_no_other_stream_and_can_be_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "s"
    with Store(path, MODEL) as store:
        store.observe(["ann", "bob"], [1.0, 2.0], [1.0, 2.0])
    store = Store(path, MODEL)
    store.observe(["ann", "bob", "ann"], [3.0, 4.0, 5.0], [3.0, 4.0, 5.0])
    shutil.copy(path, tmp_path / "t")  # as if it had been killed here: these rows are in its journal alone
    shutil.copy(f"{path}-wal", tmp_path / "t-wal")
    whole = store.state(["bob"])
    store.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "t")) as other:
        other.execute("update states set content = zeroblob(length(content)) where key = 'ann'")
        other.commit()
    with Store(tmp_path / "t", MODEL) as again:
        assert "the state of 'ann' is not what was written" in caplog.text
        assert len(again) == 2
        assert_identical(again.state(["bob"]), whole)
        for call in (lambda: again.count(["ann"]), lambda: again.observe(["ann"], [1.0], [1.0])):
            with pytest.raises(ValueError, match="delete that stream and begin again"):
                call()
        assert again.delete(["ann", "zoe"]) == 1
        assert len(again) == 1
        again.observe(["ann"], [1.0], [1.0])
        assert again.count(["ann", "bob"]).tolist() == [1, 2]
    with Store(tmp_path / "t", MODEL) as again:
        assert again.count(["ann", "bob"]).tolist() == [1, 2]


@pytest.mark.parametrize("change", ["position = position || x'00'", "name = 'a'", "position = 7"])
def test_a_damaged_position_is_noticed_and_other_sources_go_on(tmp_path: Path, change: str) -> None:
    path, row = tmp_path / "s", (["ann"], [1.0], [1.0])
    with Store(path, MODEL) as store:
        for source in ("one", "two"):
            store.observe(*row, source=source, position=5)
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute(f"update sources set {change} where name = 'one'")
        other.commit()
    with Store(path, MODEL) as store:
        assert store.observe(*row, source="two", position=6)
        for call in (lambda: store.position("one"), lambda: store.observe(*row, source="one", position=6)):
            with pytest.raises(ValueError, match="rows of a source could be taken twice"):
                call()
        with pytest.raises(ValueError, match="damaged"):
            store.check()
        assert store.count(["ann"]).tolist() == [3]
        store.move("one", 5)
        assert not store.observe(*row, source="one", position=5)
    with Store(path, MODEL) as store:
        assert store.observe(*row, source="one", position=6)
        assert store.count(["ann"]).tolist() == [4]


def test_a_position_is_remembered_with_no_rows_too(tmp_path: Path) -> None:
    with Store(tmp_path / "s", MODEL) as store:
        assert store.observe([], np.zeros((0, 1)), np.zeros((0, 1)), source="one", position=5)
        assert store.position("one") == 5
        assert not store.observe(["ann"], [1.0], [1.0], source="one", position=5)


def test_a_stream_is_not_merged_into_itself(tmp_path: Path) -> None:
    with Store(tmp_path / "s", MODEL) as store:
        store.observe(["ann"], [1.0], [1.0])
        with pytest.raises(ValueError, match="into itself"):
            store.merge("ann", "ann")
        assert store.count(["ann"]).tolist() == [1]


def test_what_a_store_does_not_take_is_said(tmp_path: Path) -> None:
    with Store(tmp_path / "s", MODEL) as store:
        store.observe(["a", 7], [1.0, 2.0], [1.0, 2.0], source="t", position=5)
        for keys, x, y, message in (
            (["a", "b"], [1.0], [1.0], "2 keys, but 1 rows"),
            (["a"], [float("nan")], [1.0], "finite"),
            (["x" * 2000], [1.0], [1.0], "letters"),
            ([""], [1.0], [1.0], "letters"),
            (["\ud800"], [1.0], [1.0], "UTF-8"),
            ([2**70], [1.0], [1.0], "64 bits"),
        ):
            with pytest.raises(ValueError, match=message):
                store.observe(keys, x, y)
        with pytest.raises(ValueError, match="neither"):
            store.observe(["a"], [1.0], [1.0], source="t")
        with pytest.raises(KeyError, match="no stream 'zoe'"):
            store.predict(["zoe"], [[0.0]])
        assert not store.observe(["a"], [1.0], [1.0], source="t", position=5)
        assert store.observe(["a\0b", "a/b"], [1.0, 2.0], [1.0, 2.0], source="t", position=6)
        assert store.keys("a") == ["a", "a\0b", "a/b"]
        assert store.keys("a", after="a", most=1) == ["a\0b"]
        assert store.count(["a", 7, "a\0b"]).tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="closed"):
        store.observe(["a"], [1.0], [1.0])
    with pytest.raises(ValueError, match="fingerprint"):
        Store(tmp_path / "s", built(seed=2))
    with pytest.raises(ValueError, match="layout"):
        Store(tmp_path / "s", MODEL, single=True)
    with pytest.raises(OSError, match="folder"):
        Store(tmp_path, MODEL)


@pytest.mark.parametrize("bad", [0, 3, 40])
def test_an_error_names_the_row_that_is_refused(bad: int, tmp_path: Path) -> None:
    names = ["a", "b", "c", "d", "a", "a", *(f"k{i}" for i in range(35))]
    with Store(tmp_path / "s", MODEL) as store:
        x = [1e30 if i == bad else 0.0 for i in range(41)]
        with pytest.raises(ValueError, match=rf"^row {bad}: x\[0, 0, 0\] is 1e\+30"):
            store.observe(names, x, [0.0] * 41)
        assert len(store) == 0
    with Store(tmp_path / "e", small_models.small("cmhp")) as store:
        times = [1.0 if i == bad else 5.0 + i for i in range(41)]
        store.observe(names, [2.0] * 41, [0] * 41)
        with pytest.raises(ValueError, match=rf"^row {bad}: event 0 of stream 0 is at 1.0"):
            store.observe(names, times, [0] * 41)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_process_is_told_that_the_store_is_not_its_own(tmp_path: Path) -> None:
    store = Store(tmp_path / "s", MODEL)
    store.observe(["a"], [0.1], [1.0])
    reading, writing = os.pipe()
    if not (child := os.fork()):
        try:
            store.observe(["b"], [0.1], [1.0])
            said = "taken"
        except ValueError as error:
            said = str(error)
        store.close()
        os.write(writing, said.encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert "forked" in os.read(reading, 1000).decode()
    store.observe(["a"], [0.1], [1.0])
    store.close()
    with Store(tmp_path / "s", MODEL) as again:
        assert again.count(["a"]).tolist() == [2]
        assert again.known(["b"]) == []


def test_a_state_in_another_precision_never_reaches_the_file(tmp_path: Path) -> None:
    state = MODEL.condition(torch.randn(1, 4, 1), torch.randn(1, 4, 1))
    with Store(tmp_path / "s", MODEL) as store:
        with pytest.raises(ValueError, match="not in the precision"):
            store.put(["a"], state.to(dtype=torch.float32))
        assert store.known(["a"]) == []
    with Store(tmp_path / "s", MODEL) as again:
        assert again.known(["a"]) == []
