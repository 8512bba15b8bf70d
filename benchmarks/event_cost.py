"""What event models cost against how many events they have seen: bytes, extra peak, seconds an event.

python benchmarks/event_cost.py            # a minute or two; writes results/event_cost.json and the figure
python benchmarks/event_cost.py --draw     # only draws the committed rows again

A state is built by `condition` in chunks; then it is updated by one event, and queried, many times, histories
of all lengths in turns. A THP recomputed keeps the events and runs over all of them for every query, so it is
taken to 10^4 events. A THP with a KV cache is taken to 10^5; beyond 10^4 its cache is that of 10^4 events
repeated: the cost is the same, and building it event by event would take longer than all the rest.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from record import RESULTS, peak, provenance, ratio, save, seconds, side_by_side

from constmem.data import Events, Hawkes
from constmem.plots import BLUE, GREY, RED, pyplot, save_figure
from constmem.point_processes import CMHP, GRU, THP, EventState, PointProcess

SIZES = tuple(10**k for k in range(1, 7))
LARGEST = {"CMHP": 10**6, "GRU": 10**6, "THP, KV cache": 10**5, "THP, recomputed": 10**4}
CHUNK = 4096
ROUNDS = 30
SECONDS = 10.0  # at most about as long for the slowest history of a model


@dataclass
class Subject:
    """A model with a history: what is held, and the two things done with it."""

    model: PointProcess[Any]
    kept: Any  # a state, or the events themselves
    after: tuple[torch.Tensor, torch.Tensor]  # the event to come

    @property
    def remembered(self) -> int:
        if isinstance(self.kept, Events):
            return self.kept.times.nbytes + self.kept.marks.nbytes
        return int(self.kept.nbytes)

    def update(self) -> Any:
        if isinstance(self.kept, Events):
            time, mark = self.after
            return torch.cat([self.kept.times, time[:, None]], 1), torch.cat(
                [self.kept.marks, mark[:, None]], 1
            )
        return self.model.update(self.kept, *self.after)

    def query(self) -> Any:
        state = self.kept
        if isinstance(state, Events):
            state = self.model.condition(state, chunk=state.times.shape[1])
        nxt = self.model.query(state)
        return nxt.mean, nxt.mark_logits()


def simulated(n: int) -> Events:
    """One stream of a Hawkes process of two marks, as long as the largest history and an event more.

    Histories of a million are a thousand streams one after another, which spares a loop over a million.
    """
    process = Hawkes(base=(0.1, 0.1), branching=(((0.5, 0.2), (0.2, 0.5)),), decay=(1.0,))
    parts = max(1, n // 1000)
    drawn = process.sample(parts, num_events=-(-n // parts), generator=torch.Generator().manual_seed(0))
    gaps, marks = drawn.gaps.reshape(1, -1)[:, :n], drawn.marks.reshape(1, -1)[:, :n]
    return Events.from_gaps(gaps, marks=marks, num_marks=2, unit="unit")


def subjects(name: str, model: PointProcess[Any], events: Events) -> dict[int, Subject]:
    """A model that has seen 10 events, 100, and so on: each history goes on from the one before."""
    found: dict[int, Subject] = {}
    state, seen = None, 0
    for n in (n for n in SIZES if n <= LARGEST[name]):
        after = events.times[:, n], events.marks[:, n]
        if name == "THP, recomputed":
            found[n] = Subject(model, events.window(0, n), after)
            continue
        if name == "THP, KV cache" and n > 10**4:
            state = repeated(found[10**4].kept, n // 10**4, events.times[:, n - 1])
        else:
            chunk = 512 if isinstance(model, THP) else CHUNK
            state = model.condition(events.window(seen, n), initial=state, chunk=chunk)
        seen, found[n] = n, Subject(model, state, after)
    return found


def repeated(state: EventState, times: int, last_time: torch.Tensor) -> EventState:
    """A state with its KV cache several times over."""
    memory = dict(state.memory)
    memory |= {name: torch.cat([memory[name]] * times, 1) for name in memory if name != "known"}
    return replace(state, memory=memory, count=state.count * times, last_time=last_time)


def in_turns(works: dict[int, Callable[[], Any]]) -> dict[int, float]:
    """The median time of each, taken in turns: a noisy minute falls on all; fewer where one takes long.

    Before each that is timed comes one that is not, since the turn of a long history leaves cold caches.
    """
    rounds = max(3, min(ROUNDS, int(SECONDS / max(seconds(work) for work in works.values()))))
    times: dict[int, list[float]] = {n: [] for n in works}
    for _ in range(rounds):
        for n, work in works.items():
            work()
            times[n].append(seconds(work))
    return {n: statistics.median(found) for n, found in times.items()}


def measured(histories: dict[str, dict[int, Subject]]) -> Iterator[dict[str, Any]]:
    for name, by_size in histories.items():
        updates = in_turns({n: built.update for n, built in by_size.items()})
        queries = in_turns({n: built.query for n, built in by_size.items()})
        for n, built in by_size.items():
            yield {
                "what": "cost", "model": name, "events": n, "remembered": built.remembered,
                "peak": peak(built.update), "peak_query": peak(built.query),
                "update": updates[n], "query": queries[n],
            }  # fmt: skip


def ratios(histories: dict[str, dict[int, Subject]]) -> Iterator[dict[str, Any]]:
    """Updates taken in turns, so that a noisy machine is noisy for both."""
    for name in ("CMHP", "GRU", "THP, KV cache"):
        many = max(histories[name])
        few, full = histories[name][10], histories[name][many]
        times = side_by_side({"few": few.update, "full": full.update}, rounds=60)
        of = f"{name}: after {many:,} events over after 10"
        yield {"what": "ratio", "of": of} | ratio(times, "full", "few")
    cmhp, cached = (histories[name][10**5].update for name in ("CMHP", "THP, KV cache"))
    found = ratio(side_by_side({"cmhp": cmhp, "thp": cached}, rounds=30), "thp", "cmhp")
    yield {"what": "ratio", "of": "after 100,000 events: THP with KV cache over CMHP"} | found


def side(histories: dict[str, dict[int, Subject]], events: int = 10**4) -> Iterator[dict[str, Any]]:
    """Updates and queries of all models after as many events, in turns: the fastest round of each."""
    alike = {name: by_size[events] for name, by_size in histories.items() if name != "THP, recomputed"}
    for verb in ("update", "query"):
        found = side_by_side({name: getattr(one, verb) for name, one in alike.items()}, rounds=300)
        for name, times in found.items():
            milliseconds = round(1e3 * min(times), 3)
            yield {"what": verb, "model": name, "events": events, "milliseconds": milliseconds} | ratio(
                found, name, "CMHP"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="only draw the committed rows again")
    if parser.parse_args().draw:
        figure(json.loads((RESULTS / "event_cost.json").read_text())["rows"])
        return
    torch.manual_seed(0)
    torch.set_num_threads(1)
    events = simulated(10**6 + 1)
    thp = THP(num_marks=2)
    models: dict[str, PointProcess[Any]] = {
        "CMHP": CMHP(num_marks=2), "THP, recomputed": thp, "THP, KV cache": thp, "GRU": GRU(num_marks=2),
    }  # fmt: skip
    for model in models.values():
        model.set_scales(events.window(0, 1000))
        model.eval().requires_grad_(False)
    rows = []
    with torch.no_grad():
        histories = {name: subjects(name, model, events) for name, model in models.items()}
        for row in chain(measured(histories), ratios(histories), side(histories)):
            rows.append(row)
            print(row, flush=True)
    save("event_cost", rows, **provenance(0, "a simulated Hawkes process of two marks, one stream, float32"))
    figure(rows)


LINES = {"CMHP": BLUE, "GRU": GREY, "THP, KV cache": RED, "THP, recomputed": "#e07a00"}


def figure(rows: list[dict[str, Any]]) -> None:
    """Bytes remembered, seconds of an update and of a query against events seen."""
    plt = pyplot()
    panels = (
        ("remembered", "remembered, kilobytes", 1e-3),
        ("update", "an update by one event, ms", 1e3),
        ("query", "a query of the next event, ms", 1e3),
    )
    fig, axes = plt.subplots(1, len(panels), figsize=(10.5, 3.7), dpi=150)
    for axis, (key, label, scale) in zip(axes, panels, strict=True):
        for name, colour in LINES.items():
            own = [r for r in rows if r["what"] == "cost" and r["model"] == name]
            ys = [r[key] * scale for r in own]
            axis.plot([r["events"] for r in own], ys, marker="o", markersize=3.5, color=colour, label=name)
        axis.set(xscale="log", yscale="log", xlabel="events seen", xlim=(7, 1.5e6))
        axis.set_title(label, loc="left", fontsize=9)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=8)
    fig.tight_layout()
    print("wrote", save_figure(fig, RESULTS.parents[1] / "docs" / "event-cost.png"))


if __name__ == "__main__":
    main()
