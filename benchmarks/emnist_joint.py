"""How much is gained by predicting the pixels of an image together, one after another; and how that looks.

python benchmarks/emnist_joint.py                        # some minutes on one core; results/emnist_joint.json
python benchmarks/emnist_joint.py --run FOLDER           # with a run's weights beside those of the package
python benchmarks/emnist_joint.py --picture [--run ...]  # draws docs/emnist-joint.png with the last of them

Log-likelihood of a pixel of handwritten characters that were held out, in nats: given the context alone
(independent of other targets), given the targets before it, too (predict one, observe it, go on), and, of a
model with a low-rank head, all targets at once.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from record import provenance, save

from constmem import NeuralProcess
from constmem.data import image_points, load_images
from constmem.neural_processes.joint import JointNormal, joint_log_prob, sample_jointly
from constmem.plots import DPI, pyplot, save_figure

IMAGES, TARGETS, CONTEXTS = 40, 100, (10, 30, 100)
CLASSES = {"seen": range(10), "unseen": range(10, 47)}
SHOWN, KNOWN, DRAWN = 6, 30, 150  # images; pixels that are known; pixels drawn one after another
PICTURE = Path(__file__).parents[1] / "docs" / "emnist-joint.png"
Model = NeuralProcess[Any, Any]


def points(test: str, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All pixels of some test images, each image's in a random order of its own."""
    images = load_images("emnist", split="test", classes=CLASSES[test])
    random = torch.Generator().manual_seed(0)
    chosen = torch.randperm(len(images), generator=random)[:count]
    x, y = image_points(images.take(chosen).pixels)
    order = torch.rand(x.shape[:2], generator=random).argsort(1)[..., None]
    return x.gather(1, order.expand_as(x)), y.gather(1, order.expand_as(y))


@torch.no_grad()
def measured(name: str, model: Model) -> list[dict[str, Any]]:
    """Means over all targets."""
    rows = []
    for test in CLASSES:
        x, y = points(test, IMAGES)
        for n in CONTEXTS:
            state, targets = model.condition(x[:, :n], y[:, :n]), slice(n, n + TARGETS)
            xt, yt = x[:, targets], y[:, targets]
            alone: Any = model.query(state, xt)
            count = IMAGES * TARGETS
            measure = "grey level" if model.config.get("levels") else "density"
            row = {"model": name, "test": test, "context": n, "points": count, "measure": measure}
            row["independent"] = float(alone.log_prob(yt).sum()) / count
            row["one_after_another"] = float(joint_log_prob(model, state, xt, yt).sum()) / count
            if isinstance(alone, JointNormal):
                row["low_rank"] = float(alone.joint_log_prob(yt).sum()) / count
            rows.append(row)
            print(row)
    return rows


@torch.no_grad()
def picture(model: Model, path: Path) -> Path:
    """Completions of the same few pixels, drawn without regard to each other, and one after another."""
    x, y = points("seen", SHOWN)
    state, random = model.condition(x[:, :KNOWN], y[:, :KNOWN]), torch.Generator().manual_seed(1)
    rest, later = x[:, KNOWN : KNOWN + DRAWN], x[:, KNOWN + DRAWN :]
    lines = {
        "the image": y,
        "what is known": torch.cat([y[:, :KNOWN], torch.full_like(y[:, KNOWN:], 0.1)], 1),
    }
    alone = sample_jointly(model, state, x[:, KNOWN:], block=x.shape[1], generator=random)[0]
    lines["pixels drawn independently"] = torch.cat([y[:, :KNOWN], alone], 1)
    for number in (1, 2):
        drawn = sample_jointly(model, state, rest, generator=random)[0]
        mean = model.query(model.update(state, rest, drawn), later).mean
        lines[f"one after another, {number}"] = torch.cat([y[:, :KNOWN], drawn, mean], 1)
    plt = pyplot()
    figure, axes = plt.subplots(len(lines), SHOWN, figsize=(6.8, 1.15 * len(lines)), dpi=DPI)
    place = ((x + 1) * 13.5).round().long()
    for line, (title, values) in zip(axes, lines.items(), strict=True):
        line[0].set_title(title, loc="left", fontsize=8)
        for axis, at, grey in zip(line, place, values, strict=True):
            pixels = torch.zeros(28, 28)
            pixels[at[:, 0], at[:, 1]] = grey[:, 0].clamp(-0.5, 0.5)
            axis.imshow(pixels, cmap="gray", vmin=-0.5, vmax=0.5)
            axis.set_axis_off()
    figure.tight_layout()
    return save_figure(figure, path)


def summary(rows: list[dict[str, Any]]) -> str:
    """What the rows say, for the documents."""
    low = any("low_rank" in row for row in rows)
    head = ["EMNIST, nats a pixel", "classes", "context", "given the context", "and the targets before it"]
    head += ["all at once, low rank"] if low else []
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        cells = [f"{row['model']}, {row.get('measure', 'density')}", row["test"], str(row["context"])]
        cells += [f"{row[key]:.2f}" for key in ("independent", "one_after_another")]
        cells += [f"{row['low_rank']:.2f}" if "low_rank" in row else ""] if low else []
        lines.append(f"| {' | '.join(cells)} |")
    where = f"`python benchmarks/emnist_joint.py`, {TARGETS} targets of each of {IMAGES} images"
    return "\n".join([*lines, "", f"{where}, in a random order."])


def main() -> None:
    parser = argparse.ArgumentParser(description="Pixels predicted together, and independently.")
    parser.add_argument("--run", type=Path, nargs="+", default=[])
    parser.add_argument("--picture", action="store_true")
    asked = parser.parse_args()
    models: dict[str, Model] = {"`emnist`": NeuralProcess.from_pretrained("emnist")}
    models |= {f"`{folder.name}`": NeuralProcess.from_pretrained(folder) for folder in asked.run}
    if asked.picture:
        print(f"drew {picture(list(models.values())[-1].eval(), PICTURE)}")
        return
    rows = [row for name, model in models.items() for row in measured(name, model.eval())]
    save("emnist_joint", rows, **provenance(0, "EMNIST, test images"))


if __name__ == "__main__":
    main()
