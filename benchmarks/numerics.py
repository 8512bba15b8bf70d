"""What a million and more single-point updates do to a state: ours, and the paper's rule in float32.

python benchmarks/numerics.py          # about ten minutes; writes results/numerics.json
"""

import argparse

import numpy as np
import torch
from literal import Literal, literal_rule
from record import provenance, save

from constmem import CMANP, AttentionState

SLOTS, CHANNELS = 32, 8


def relative(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest error over the largest entry."""
    return float((found.double() - truth.double()).abs().max() / truth.double().abs().max())


def truth_of(scores: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The softmax of everything at once, in float64."""
    s = scores.astype(np.float64)
    top = s.max(0)
    weights = np.exp(s - top)
    total = weights.sum(0)
    return weights.T @ values.astype(np.float64) / total[:, None], top + np.log(total)


def rule(dtype: type, n: int, seed: int, stops: tuple[int, ...]) -> list[dict[str, object]]:
    """log C' = log C + softplus(T), one point at a time in NumPy, compared with the truth at `stops`."""
    generator = np.random.default_rng(seed)
    total = np.full(SLOTS, -np.inf)
    exact = np.zeros((SLOTS, CHANNELS))
    log_c = embedding = None
    rows, seen = [], 0
    while seen < n:
        block = min(100_000, n - seen)
        scores = generator.standard_normal((block, SLOTS)).astype(np.float32)
        values = generator.standard_normal((block, CHANNELS)).astype(np.float32) + np.float32(1)
        for s, v in zip(scores.astype(dtype), values.astype(dtype), strict=True):
            if log_c is None:
                log_c, embedding = s.copy(), np.repeat(v[None], SLOTS, 0)
                continue
            new = log_c + np.logaddexp(dtype(0), s - log_c)
            embedding = np.exp(log_c - new)[:, None] * embedding + np.exp(s - new)[:, None] * v
            log_c = new
        part, part_lse = truth_of(scores, values)
        new_total = np.logaddexp(total, part_lse)
        exact = exact * np.exp(total - new_total)[:, None] + part * np.exp(part_lse - new_total)[:, None]
        total, seen = new_total, seen + block
        if seen in stops:
            rows.append({
                "what": f"the paper's rule, {np.dtype(dtype).name}", "updates": seen,
                "log_c_error": float(np.abs(log_c - total).max()),
                "embedding_error": float(np.abs(embedding - exact).max() / np.abs(exact).max()),
            })  # fmt: skip
            print(rows[-1], flush=True)
    return rows


def bfloat16(updates: int, seed: int) -> dict[str, object]:
    """The paper's rule in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(updates, SLOTS, generator=generator).bfloat16()
    values = torch.randn(updates, CHANNELS, generator=generator).bfloat16() + 1
    embedding, log_c = values[0].expand(SLOTS, -1), scores[0]
    for s, v in zip(scores[1:], values[1:], strict=True):
        embedding, log_c = literal_rule(embedding, log_c, s[:, None], v[None])
    exact, lse = truth_of(scores.double().numpy(), values.double().numpy())
    return {
        "what": "the paper's rule, bfloat16", "updates": updates,
        "log_c_error": float(np.abs(log_c.double().numpy() - lse).max()),
        "embedding_error": relative(embedding, torch.from_numpy(exact)),
    }  # fmt: skip


def library(updates: int, seed: int, *, compensated: bool) -> dict[str, object]:
    """`AttentionState.merge`, one point at a time."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.eye(SLOTS)[None]
    scores = torch.randn(updates, SLOTS, generator=generator)
    values = torch.randn(updates, SLOTS, generator=generator) + 1
    state = AttentionState.empty((1, 1, SLOTS), SLOTS)
    state = state.to(dtype=torch.float32) if compensated else state
    for s, v in zip(scores, values, strict=True):
        part = AttentionState.observe(q, s[None, None, None], v[None, None, None])
        state = state.merge(part.to(dtype=torch.float32) if compensated else part)
    exact, lse = truth_of(scores.numpy(), values.numpy())
    found = state.to(dtype=torch.float64)
    return {
        "what": "constmem, " + ("pairs of float32" if compensated else "float64"), "updates": updates,
        "log_c_error": float((found.lse[0, 0] - torch.from_numpy(lse)).abs().max()),
        "embedding_error": relative(found.value[0, 0], torch.from_numpy(exact)),
    }  # fmt: skip


def model_updates(updates: int, seed: int) -> list[dict[str, object]]:
    """A whole CMANP, float32, updated point by point, against a float64 model conditioned at once."""
    torch.manual_seed(seed)
    model = CMANP(dim_x=2, dim_y=1, dim=32, depth=2, num_slots=16, num_latents=16).eval()
    double = CMANP(**model.config).double().eval()
    double.load_state_dict(model.state_dict())
    x, y = torch.rand(1, updates, 2), torch.rand(1, updates, 1)
    xt = torch.rand(1, 100, 2)
    literal, state = Literal(model), model.empty()
    literal_state = literal.condition(x[:, :1], y[:, :1])
    for i in range(updates):
        here = slice(i, i + 1)
        state = model.update(state, x[:, here], y[:, here])
        if i:
            advance_only(literal, literal_state, x[:, here], y[:, here])
    truth = double.condition(x.double(), y.double())
    answer = double.query(truth, xt.double())
    read_exactly = double.query(AttentionState(state.value, state.lse, state.count), xt.double())
    literal_value = torch.stack(literal_state.embedding, 1)
    literal_lse = torch.stack(literal_state.log_c, 1)
    of_literal = AttentionState(literal_value.double(), literal_lse.double(), state.count)
    rows = []
    for what, found, dist in (
        ("constmem", state, read_exactly),
        ("the paper's rule, float32", of_literal, double.query(of_literal, xt.double())),
    ):
        rows.append({
            "what": f"whole model, {what}", "updates": updates,
            "value_error": relative(found.value, truth.value),
            "lse_error": relative(found.lse, truth.lse),
            "mean_error": relative(dist.mean, answer.mean),
            "stddev_error": relative(dist.stddev, answer.stddev),
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def advance_only(literal: Literal, state: object, x: torch.Tensor, y: torch.Tensor) -> None:
    """The literal update without its read, which does not touch what is carried on."""
    tokens = literal.model.embed(torch.cat([x, y], -1))
    for block in range(len(state.embedding)):
        state.embedding[block], state.log_c[block] = literal._advance(
            block, tokens, state.embedding[block], state.log_c[block]
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=10**6)
    parser.add_argument("--rule-updates", type=int, default=10**7)
    arguments = parser.parse_args()
    stops = (10**5, 10**6, 10**7, 3 * 10**7)
    rows = []
    with torch.no_grad():
        rows += model_updates(arguments.updates, 0)
        rows.append(bfloat16(5000, 0))
        print(rows[-1], flush=True)
        for compensated in (False, True):
            rows.append(library(min(arguments.updates, 300_000), 0, compensated=compensated))
            print(rows[-1], flush=True)
        rows += rule(np.float32, arguments.rule_updates, 0, stops)
    save("numerics", rows, **provenance(0, "standard normal scores; uniform random points for whole models"))


if __name__ == "__main__":
    main()
