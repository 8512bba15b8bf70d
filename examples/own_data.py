"""From a CSV file of your own to a trained model that streams: sensors, some never seen before.

python examples/own_data.py [--steps 1000] [--model cnp] [--out own-data]

It writes a file as sensors might leave behind, trains on it what `constmem train sensors.csv cnp --x time
--y heat --group sensor` would, and then shows the model twenty new sensors, one reading at a time.
"""

import argparse
import csv
import math
import random
from pathlib import Path

import torch

from constmem import Stream
from constmem.data import Table
from constmem.training import fit_table

DAY, START = 86_400.0, 1_700_000_000.0  # seconds


def readings(number: int, count: int = 40) -> list[tuple[float, float]]:
    """Time and temperature of one sensor over a day: a mean, a swing and a phase of its own, and noise."""
    chance = random.Random(number)
    mean, swing, phase = chance.gauss(15, 5), chance.uniform(1, 4), chance.uniform(0, 2 * math.pi)
    times = sorted(START + chance.uniform(0, DAY) for _ in range(count))
    return [
        (t, mean + swing * math.sin(2 * math.pi * (t - START) / DAY + phase) + chance.gauss(0, 0.2))
        for t in times
    ]


def write_sensors(path: Path, sensors: int = 500) -> Path:
    """A CSV file with the readings of many sensors."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["sensor", "time", "heat"])
        for number in range(sensors):
            writer.writerows((f"s{number}", f"{t:.0f}", f"{y:.2f}") for t, y in readings(number))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--model", default="cnp")
    parser.add_argument("--out", type=Path, default=Path("own-data"))
    options = parser.parse_args()

    table = Table.read(write_sensors(options.out / "sensors.csv"), x=["time"], y=["heat"], group="sensor")
    print(table.statement)
    folder = options.out / "model"
    model = fit_table(
        table,
        options.model,
        out=folder,
        steps=options.steps,
        change=["lr=0.002", "batch=32", "num_targets=20"],
    )

    new = [readings(1000 + i, 50) for i in range(20)]  # sensors that were not in the file
    for points in new:
        random.Random(0).shuffle(points)
    x, y = torch.tensor(new, dtype=torch.float64).split(1, -1)
    stream = Stream(model, batch=len(new))  # in seconds and degrees: the model keeps the units
    print("readings shown   RMSE of 20 others   predicted deviation   bytes remembered a sensor")
    for seen in range(31):
        if seen in (0, 1, 3, 10, 30):
            forecast = stream.predict(x[:, 30:])
            error = (forecast.mean - y[:, 30:]).square().mean().sqrt().item()
            held = stream.nbytes // len(new)
            print(f"{seen:14}   {error:17.2f}   {forecast.stddev.mean().item():19.2f}   {held:25,}")
        if seen < 30:
            stream.observe(x[:, seen : seen + 1], y[:, seen : seen + 1])
    stream.save(options.out / "stream.safetensors")
    print(f"score it with `constmem eval {folder}`, draw it with `constmem plot {folder}`")


if __name__ == "__main__":
    main()
