"""From a CSV file of (user, mark, timestamp) to a trained CMHP that follows new users event by event.

python examples/events.py [--steps 150] [--out events]

It writes a file as a shop might leave behind (0: looks, 1: puts into the cart, 2: buys), trains a small CMHP
on it, scores it on users it has not seen beside a model without any memory, and then takes the events of one
more user as they come, foretelling each.
"""

import argparse
import csv
import random
from pathlib import Path

import torch

from constmem.data import Events, bucketed, read_event_csv
from constmem.evaluation.events import evaluate_events
from constmem.point_processes import CMHP, PointProcess, Trivial

KINDS = ("looks", "puts into the cart", "buys")
CHANCES = ((0.3, 0.7, 0.0), (0.3, 0.1, 0.6), (1.0, 0.0, 0.0))  # of what comes after each
MINUTES = ((2.0, 1.0, 0.0), (3.0, 1.0, 0.5), (600.0, 0.0, 0.0))  # the median gap between the two


def visits(number: int, count: int = 24) -> list[tuple[int, float]]:
    """Mark and time, in minutes, of the events of one user, who is quicker or slower than others."""
    chance = random.Random(number)
    pace, time, mark = chance.lognormvariate(0, 0.5), chance.uniform(0, 1000), 0
    events = [(mark, time)]
    while len(events) < count:
        after = chance.choices(range(3), CHANCES[mark])[0]
        time += MINUTES[mark][after] * pace * chance.lognormvariate(0, 0.4)
        mark = after
        events.append((mark, time))
    return events


def write_visits(path: Path, users: int = 300) -> Path:
    """A CSV file with the events of many users, sorted by time."""
    rows = [(time, user, mark) for user in range(users) for mark, time in visits(user)]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["user", "mark", "timestamp"])
        writer.writerows((f"u{user}", mark, f"{time:.3f}") for time, user, mark in sorted(rows))
    return path


def fit(model: PointProcess, events: Events, steps: int) -> PointProcess:
    """Adam on batches of users, all prefixes of their events at once."""
    model.set_scales(events)
    generator = torch.Generator().manual_seed(0)
    optimiser = torch.optim.Adam(model.parameters(), lr=5e-3)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    batches: list[Events] = []
    for _ in range(steps):
        batches = batches or list(bucketed(events, 32, generator))
        loss = model.loss(batches.pop(), generator=generator)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        rate.step()
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--out", type=Path, default=Path("events"))
    options = parser.parse_args()

    events = read_event_csv(write_visits(options.out / "visits.csv"), unit="minute", num_marks=3)
    training, test = events.select(slice(0, 250)), events.select(slice(250, 300))
    torch.manual_seed(0)
    small = {"num_marks": 3, "dim": 16, "hidden": 16, "components": 4, "dropout": 0.0}
    cmhp = fit(CMHP(**small, depth=1, num_slots=4, num_latents=4, num_heads=2), training, options.steps)
    print("on users it has not seen     NLL   accuracy   error of the median, minutes")
    for name, model in (("CMHP", cmhp), ("no history", fit(Trivial(**small), training, options.steps))):
        found = evaluate_events(model, test)
        print(f"{name:23}{found.nll:9.3f}{100 * found.accuracy:9.1f} %{found.mae_median:18.1f}")
    cmhp.save_pretrained(options.out / "model")

    follow(cmhp, visits(1000, 12))


@torch.no_grad()
def follow(model: PointProcess, events: list[tuple[int, float]]) -> None:
    """Take the events of one more user as they come; the state stays as large as it was."""
    state = model.empty(torch.tensor([events[0][1]], dtype=torch.float64))
    print("\nwhat happened           what was predicted: when (90 %), and what    bytes remembered")
    for mark, time in events:
        nxt = model.query(state)
        low, high = nxt.quantiles([0.05, 0.95])[0].tolist()
        likely = KINDS[int(nxt.mark_logits().argmax())]
        state = model.update(state, torch.tensor([time], dtype=torch.float64), torch.tensor([mark]))
        passed = f"{KINDS[mark]} after {float(state.last_gap):.1f}"
        print(f"{passed:30}{low:7.1f} to {high:7.1f}   {likely:20}{state.nbytes:10,}")


if __name__ == "__main__":
    main()
