"""The whole family of neural processes: the same laws for all, and each against a slow, plain version."""

from collections.abc import Iterator
from dataclasses import replace
from math import log, pi, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from constmem import Decay, NeuralProcess, Stream
from constmem.attention import CrossAttention, FeedForward, SelfAttention
from constmem.heads import SampleMixture
from constmem.neural_processes import ANP, BNP, CMANP, CNP, LBANP, MODELS, NP, TNPD, StoredPoints
from constmem.neural_processes.bootstrap import drawn, ordered
from constmem.neural_processes.encoders import PostNormAttention
from constmem.state import AttentionState

CNP_FAMILY = ("cnp", "canp", "np", "anp", "bnp", "banp")
MIXTURES = ("np", "anp", "bnp", "banp")
POOLED = ("cnp", "np")
STORED = [name for name in MODELS if name not in ("cmanp", *POOLED)]
COUNTS = {
    "cnp": (215_682, 298_626, 349_190),
    "canp": (331_906, 414_978, 465_542),
    "np": (232_194, 315_138, 365_702),
    "anp": (348_418, 431_490, 482_054),
    "bnp": (248_450, 331_394, 381_958),
    "banp": (364_674, 447_746, 498_310),
    "tnpd": (222_082, 222_146, 222_790),
    "eqtnp": (492_354, 492_482, 493_126),
    "lbanp": (792_514, 792_642, 793_286),
    "cmanp": (1_341_634, 1_341_762, 1_342_406),
}
SIZES = (  # of Gaussian processes, EMNIST, CelebA: channels, and depths of the CNP family
    ({"dim_x": 1, "dim_y": 1}, {"pre_depth": 4, "post_depth": 2, "decoder_depth": 3}),
    ({"dim_x": 2, "dim_y": 1}, {"pre_depth": 5, "post_depth": 3, "decoder_depth": 4}),
    ({"dim_x": 2, "dim_y": 3}, {"pre_depth": 6, "post_depth": 3, "decoder_depth": 5}),
)


def small(name: str) -> Any:
    """A small model of two input and two output channels, in float64, away from its initial zeros."""
    settings: dict[str, Any] = {"dim": 16}
    if name in CNP_FAMILY:
        settings |= {"pre_depth": 3, "post_depth": 2, "decoder_depth": 2}
    else:
        settings |= {"depth": 2, "hidden": 24, "embed_depth": 2, "num_heads": 2}
    settings |= {"num_samples": 5} if name in MIXTURES else {}
    settings |= {"num_latents": 6} if name in ("lbanp", "cmanp") else {}
    settings |= {"num_slots": 5} if name == "cmanp" else {}
    torch.manual_seed(1)
    model = MODELS[name](dim_x=2, dim_y=2, **settings)  # type: ignore[call-arg]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.double().eval()


@pytest.fixture(params=list(MODELS))
def model(request: pytest.FixtureRequest) -> Any:
    return small(request.param)


@pytest.fixture(params=STORED)
def stored(request: pytest.FixtureRequest) -> Any:
    return small(request.param)


def data(n: int = 11, m: int = 6, b: int = 2, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = (n, n, m, m)
    x, y, xt, yt = (torch.randn(b, k, 2, generator=random, dtype=torch.float64) for k in shapes)
    return x, y, xt, yt


def ragged(n: int, counts: list[int], seed: int = 3) -> Tensor:
    """A mask with as many real points as asked for, in random places."""
    scores = torch.rand(len(counts), n, generator=torch.Generator().manual_seed(seed))
    return scores.argsort(1).argsort(1) < torch.tensor(counts)[:, None]


def assert_same(found: Distribution, expected: Distribution, yt: Tensor) -> None:
    torch.testing.assert_close(found.mean, expected.mean, atol=1e-7, rtol=0)
    torch.testing.assert_close(found.stddev, expected.stddev, atol=1e-7, rtol=0)
    torch.testing.assert_close(found.log_prob(yt), expected.log_prob(yt), atol=1e-6, rtol=0)


def sets(count: int, width: int) -> Iterator[list[int]]:
    return ([i * width, (i + 1) * width] for i in range(count))


# Laws


@pytest.mark.parametrize("size", range(3), ids=["gp", "emnist", "celeba"])
@pytest.mark.parametrize("name", MODELS)
def test_models_have_as_many_parameters_as_the_published_ones(name: str, size: int) -> None:
    channels, depths = SIZES[size]
    settings = {**channels, **(depths if name in CNP_FAMILY else {})}
    model = MODELS[name](**settings)  # type: ignore[arg-type]
    assert sum(p.numel() for p in model.parameters()) == COUNTS[name][size]


def test_updating_is_conditioning_on_the_union(model: NeuralProcess) -> None:
    x, y, xt, yt = data()
    with torch.no_grad():
        whole = model.query(model.condition(x, y), xt)
        state = model.condition(x[:, :4], y[:, :4])
        state = model.update(model.update(state, x[:, 4:5], y[:, 4:5]), x[:, 5:], y[:, 5:], chunk=2)
        assert state.count.tolist() == [11, 11]
        assert_same(model.query(state, xt), whole, yt)
        assert_same(model.query(model.update(model.empty(2), x, y), xt), whole, yt)
        chunks = ((x[:, i:j], y[:, i:j]) for i, j in ((0, 3), (3, 3 + 7), (10, 11)))
        assert_same(model.query(model.condition_chunks(chunks), xt), whole, yt)


def test_merging_states_is_observing_both_in_any_order(model: NeuralProcess) -> None:
    x, y, xt, yt = data()
    with torch.no_grad():
        whole = model.query(model.condition(x, y), xt)
        left, right = model.observe(x[:, :4], y[:, :4]), model.observe(x[:, 4:], y[:, 4:])
        assert_same(model.query(right.merge(left), xt), whole, yt)
        assert_same(model.query(left.merge(model.empty(2)).merge(right), xt), whole, yt)


def test_neither_order_nor_chunks_change_a_prediction(model: NeuralProcess) -> None:
    x, y, xt, yt = data()
    order = torch.randperm(11, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        whole = model.query(model.condition(x, y), xt)
        assert_same(model.query(model.condition(x[:, order], y[:, order]), xt), whole, yt)
        assert_same(model.query(model.condition(x, y, chunk=3), xt, chunk=4), whole, yt)
    assert_same(model.query(model.condition(x, y, chunk=3), xt, chunk=4), whole, yt)  # and with gradients


def test_masking_is_leaving_out(model: NeuralProcess) -> None:
    x, y, xt, yt = data(b=3)
    mask = ragged(11, [11, 4, 1])
    x, y = x.masked_fill(~mask[..., None], float("nan")), y.masked_fill(~mask[..., None], float("inf"))
    with torch.no_grad():
        state = model.condition(x[:, :5], y[:, :5], mask=mask[:, :5])
        state = model.update(state, x[:, 5:], y[:, 5:], mask=mask[:, 5:])
        assert state.count.tolist() == [11, 4, 1]
        together = model.query(state, xt)
        for i in range(3):
            real = mask[i]
            alone = model.query(model.condition(x[i : i + 1, real], y[i : i + 1, real]), xt[i : i + 1])
            torch.testing.assert_close(together.mean[i : i + 1], alone.mean, atol=1e-7, rtol=0)
            torch.testing.assert_close(together.stddev[i : i + 1], alone.stddev, atol=1e-7, rtol=0)


def test_nothing_seen_gives_a_finite_prior(model: NeuralProcess) -> None:
    x, y, xt, yt = data()
    nothing = torch.zeros(2, 11, dtype=torch.bool)
    prior = model.query(model.empty(2), xt)
    assert prior.mean.isfinite().all()
    assert prior.stddev.isfinite().all()
    assert_same(model.query(model.condition(x, y, mask=nothing), xt), prior, yt)
    assert_same(model.query(model.condition(x[:, :0], y[:, :0]), xt), prior, yt) if not isinstance(
        model, CMANP
    ) else None
    loss = model.loss(x, y, xt, yt, mask_c=torch.tensor([[True] * 11, [False] * 11]))
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.isfinite()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_targets_do_not_see_each_other(model: NeuralProcess) -> None:
    x, y, xt, yt = data()
    with torch.no_grad():
        memory = model.read(model.condition(x, y))
        among_others = model.predict(memory, xt)
        alone = model.predict(memory, xt[:, 2:3])
    torch.testing.assert_close(alone.mean, among_others.mean[:, 2:3], atol=1e-9, rtol=0)
    torch.testing.assert_close(alone.stddev, among_others.stddev[:, 2:3], atol=1e-9, rtol=0)


def test_models_and_states_survive_a_file(model: NeuralProcess, tmp_path: Path) -> None:
    x, y, xt, yt = data()
    with torch.no_grad():
        state = model.condition(x, y, mask=ragged(11, [5, 9]))
        model.float().save_pretrained(tmp_path / "model")
        loaded = NeuralProcess.from_pretrained(tmp_path / "model")
        assert type(loaded) is type(model)
        state.save(tmp_path / "state")
        again = model.state_type.load(tmp_path / "state")  # type: ignore[attr-defined]
        assert again.count.tolist() == [5, 9]
        assert again.nbytes == state.nbytes
        found = loaded.query(
            replace(again, fingerprint=None) if "value" in vars(again) else again, xt.float()
        )
        own = model.query(replace(state, fingerprint=None) if "value" in vars(state) else state, xt.float())
        assert torch.equal(found.mean, own.mean)
        assert torch.equal(found.stddev, own.stddev)


def test_a_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    small("cnp").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds a 'cnp', not a 'lbanp'"):
        LBANP.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model": "gru", "config": {}}')
    with pytest.raises(ValueError, match="holds a 'gru', which is none of cnp, canp"):
        NeuralProcess.from_pretrained(tmp_path)


def test_the_loss_is_finite_and_its_gradient_reaches_every_parameter(model: NeuralProcess) -> None:
    x, y, xt, yt = data()
    mask_c, mask_t = ragged(11, [5, 11]), ragged(6, [6, 2])
    x, y = (t.masked_fill(~mask_c[..., None], float("nan")) for t in (x, y))
    xt, yt = (t.masked_fill(~mask_t[..., None], float("nan")) for t in (xt, yt))
    generator = torch.Generator().manual_seed(0)
    loss = model.loss(x, y, xt, yt, mask_c=mask_c, mask_t=mask_t, generator=generator)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.isfinite()
    assert loss.shape == ()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert (parameter.grad != 0).any(), name


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("bnp", "banp")])
def test_masked_points_do_not_count_in_the_loss(name: str) -> None:
    model = small(name)
    x, y, xt, yt = data()
    mask_c, mask_t = torch.arange(11).expand(2, -1) < 7, torch.arange(6).expand(2, -1) < 4
    found, expected = (
        model.loss(*task, **masks, generator=torch.Generator().manual_seed(0))
        for task, masks in (
            ((x, y, xt, yt), {"mask_c": mask_c, "mask_t": mask_t}),
            ((x[:, :7], y[:, :7], xt[:, :4], yt[:, :4]), {}),
        )
    )
    torch.testing.assert_close(found, expected, atol=1e-8, rtol=0)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in MIXTURES])
def test_the_loss_is_minus_the_mean_log_likelihood_of_a_point(name: str) -> None:
    model = small(name)
    x, y, xt, yt = data()
    mask = ragged(6, [6, 2])
    log_prob = model(x, y, xt).log_prob(yt).sum(-1)[mask]
    if name in CNP_FAMILY:  # these are trained on the context too
        log_prob = torch.cat([log_prob, model(x, y, x).log_prob(y).sum(-1).flatten()])
    torch.testing.assert_close(model.loss(x, y, xt, yt, mask_t=mask), -log_prob.mean(), atol=1e-8, rtol=0)


def test_a_few_steps_make_the_loss_smaller(model: NeuralProcess) -> None:
    x = torch.linspace(-1, 1, 8, dtype=torch.float64)[None, :, None].expand(1, 8, 2)
    y = (3 * x).sin()
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    losses: list[float] = []
    for _ in range(25):
        loss = model.loss(x[:, ::2], y[:, ::2], x[:, 1::2], y[:, 1::2], generator=generator)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) / 5 < losses[0] - 0.3


@pytest.mark.compiles
def test_the_loss_is_one_graph_without_looking_at_data(model: NeuralProcess) -> None:
    x, y, xt, yt = data()
    masks = {"mask_c": ragged(11, [5, 11]), "mask_t": ragged(6, [6, 2])}
    compiled = torch.compile(model.loss, backend="eager", fullgraph=True)
    torch.manual_seed(0)
    found = compiled(x, y, xt, yt, **masks)
    torch.manual_seed(0)
    torch.testing.assert_close(found, model.loss(x, y, xt, yt, **masks))


def test_a_stream_runs_on_every_model(model: NeuralProcess) -> None:
    x, y, xt, yt = data()
    stream = Stream(model, batch=2)
    for i in range(11):
        stream.observe(x[:, i : i + 1], y[:, i : i + 1])
    with torch.no_grad():
        assert_same(stream.predict(xt), model.query(model.condition(x, y), xt), yt)


def test_bad_tasks_are_refused(model: NeuralProcess) -> None:
    x, y, xt, yt = data()
    with pytest.raises(ValueError, match="context is a batch of 2, the targets one of 1"):
        model.loss(x, y, xt[:1], yt[:1])
    with pytest.raises(ValueError, match="xt is a batch of 1, but the state one of 2"):
        model.query(model.condition(x, y), xt[:1])


# States


@pytest.mark.parametrize("name", POOLED)
def test_running_means_have_constant_size_can_be_undone_and_decay(name: str) -> None:
    model = small(name).requires_grad_(False)
    x, y, xt, yt = data()
    some, whole = model.condition(x[:, :4], y[:, :4]), model.condition(x, y)
    assert some.nbytes == whole.nbytes == model.empty(2).nbytes
    rest = model.query(model.condition(x[:, 4:], y[:, 4:]), xt)
    assert_same(model.query(whole.remove(some), xt), rest, yt)
    assert_same(
        model.query(model.observe(x, y, log_weight=-80.0 * (torch.arange(11) < 4).expand(2, -1)), xt),
        rest,
        yt,
    )
    stream = Stream(model, batch=2, forget=Decay(half_life=0.02))
    stream.observe(x, y)
    last = model.query(model.condition(x[:, -1:], y[:, -1:]), xt)
    assert_same(stream.predict(xt), last, yt)


def test_a_running_mean_is_the_mean() -> None:
    model = small("cnp").requires_grad_(False)
    x, y, _, _ = data(n=300)
    state = model.condition(x, y, chunk=70)
    for i, pre in enumerate(model.encoder.pre):
        mean = pre(torch.cat([x, y], -1)).mean(1)
        torch.testing.assert_close(state.value[:, i, 0, 0], mean, atol=1e-10, rtol=0)
    torch.testing.assert_close(state.lse, torch.full_like(state.lse, log(300)))


def test_stored_states_grow_by_their_points_and_keep_copies_of_them(stored: NeuralProcess) -> None:
    x, y, xt, yt = data()
    before = stored.query(stored.condition(x, y), xt)
    state = stored.condition(x, y)
    assert state.nbytes == x.nbytes + y.nbytes
    x.fill_(7.0)
    assert_same(stored.query(state, xt), before, yt)
    assert state.to(torch.device("cpu"), torch.float32).nbytes * 2 == state.nbytes


def test_what_stored_states_cannot_do_is_said_clearly(stored: NeuralProcess) -> None:
    x, y, _, _ = data()
    state: Any = stored.condition(x, y)
    with pytest.raises(ValueError, match="cannot weigh points"):
        stored.observe(x, y, log_weight=torch.zeros(2, 11))
    with pytest.raises(NotImplementedError, match="cannot remove"):
        state.remove(state)
    with pytest.raises(NotImplementedError, match="cannot decay"):
        state.decay(-1.0)
    with pytest.raises(ValueError, match="cannot merge states that differ"):
        state.merge(stored.empty(3))
    with pytest.raises(TypeError, match="expected a state of"):
        stored.query(AttentionState.empty((2, 1, 1, 1), 4), x)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"another model: it has \(dim_x, dim_y\) \(2, 1\)"):
        stored.query(StoredPoints(x, y[..., :1]), x)  # type: ignore[arg-type]


def test_stored_points_may_be_read_by_any_model_that_stores(tmp_path: Path) -> None:
    x, y, xt, yt = data()
    state = small("lbanp").condition(x, y)
    tnpd = small("tnpd")
    assert_same(tnpd.query(state, xt), tnpd.query(tnpd.condition(x, y), xt), yt)
    state.save(tmp_path / "state")
    with pytest.raises(ValueError, match=r"holds 'constmem\.points' where 'constmem\.state' was expected"):
        AttentionState.load(tmp_path / "state")


# Mixtures


def numpy_normal(y: Any, mean: Any, std: Any) -> Any:
    return -0.5 * ((y - mean) / std) ** 2 - np.log(std) - 0.5 * log(2 * pi)


def test_the_log_probability_of_a_mixture_is_the_slow_one() -> None:
    means, y = torch.randn(2, 3, 4, 2) * 3, torch.randn(2, 3, 2)
    stds = torch.rand(2, 3, 4, 2) + 0.01
    mixture = SampleMixture(means, stds)
    found = mixture.log_prob(y)
    assert found.shape == (2, 3, 1)
    for i, j in np.ndindex(2, 3):
        terms = [float(numpy_normal(*(t.double().numpy() for t in (y[i, j], means[i, j, k], stds[i, j, k]))).sum())
                 for k in range(4)]  # fmt: skip
        top = max(terms)
        slow = top + log(sum(np.exp(t - top) for t in terms) / 4)
        assert abs(float(found[i, j, 0]) - slow) < 1e-3 * (1 + abs(slow)) * 1e-1
    second = (stds**2 + means**2).mean(2)
    torch.testing.assert_close(mixture.mean, means.mean(2))
    torch.testing.assert_close(mixture.variance, second - means.mean(2) ** 2, atol=1e-4, rtol=1e-4)


def test_samples_of_a_mixture_follow_it_and_belong_together() -> None:
    means = torch.tensor([-5.0, 5.0])[None, None, :, None].expand(1, 3, 2, 2)
    mixture = SampleMixture(means, torch.full((1, 3, 2, 2), 0.5))
    samples = mixture.sample((4000,), generator=torch.Generator().manual_seed(0))
    assert samples.shape == (4000, 1, 3, 2)
    torch.testing.assert_close(samples.mean(0), mixture.mean, atol=0.3, rtol=0)
    torch.testing.assert_close(samples.std(0), mixture.stddev, atol=0.1, rtol=0)
    signs = samples.sign().flatten(1)
    assert (signs == signs[:, :1]).all()  # one component a task
    below = (samples < -4.5).float().mean(0)
    torch.testing.assert_close(mixture.cdf(torch.full((1, 3, 2), -4.5)), below, atol=0.03, rtol=0)


@pytest.mark.parametrize("name", MIXTURES)
def test_samples_are_the_models_own_unless_a_generator_is_given(name: str) -> None:
    model = small(name)
    x, y, xt, _ = data()
    state = model.condition(x, y)
    means = [model.predict(memory, xt).mean for memory in (
        model.read(state), model.read(state),
        model.read(state, generator=torch.Generator().manual_seed(1)),
        model.read(state, generator=torch.Generator().manual_seed(0)),
    )]  # fmt: skip
    assert torch.equal(means[0], means[1])
    assert not torch.allclose(means[0], means[2])
    other = MODELS[name](**{**model.config, "seed": 1}).double().eval()
    other.load_state_dict(model.state_dict())
    assert not torch.allclose(
        other.predict(other.read(state if name != "np" else other.condition(x, y)), xt).mean, means[0]
    )


@pytest.mark.parametrize("name", ["np", "anp"])
def test_the_bound_of_latent_models_is_the_slow_one(name: str) -> None:
    model = small(name).requires_grad_(False)
    x, y, xt, yt = data()
    found = model.loss(x, y, xt, yt, generator=torch.Generator().manual_seed(5))
    noise = torch.randn(2, 4, 128, generator=torch.Generator().manual_seed(5))
    total = 0.0
    for i in range(2):
        xi, yi = x[i : i + 1], y[i : i + 1]
        all_x, all_y = torch.cat([xi, xt[i : i + 1]], 1), torch.cat([yi, yt[i : i + 1]], 1)
        state = model.condition(xi, yi)
        prior, posterior = model.latent(state), model.latent(model.condition(all_x, all_y))
        seen = model._represent(model._context(state), all_x).expand(1, 17, -1)[0]
        terms = []
        for k in range(4):
            z = posterior.mean[0, 0] + posterior.stddev[0, 0] * noise[i, k]
            inputs = torch.cat([all_x[0], seen, z.expand(17, -1)], -1)
            out = model.decoder.rest(model.decoder.first(inputs).relu()).numpy()
            std = 0.1 + 0.9 * np.logaddexp(0, out[:, 2:])
            term = numpy_normal(all_y[0].numpy(), out[:, :2], std).sum()
            term += numpy_normal(*(t.numpy() for t in (z, prior.mean[0, 0], prior.stddev[0, 0]))).sum()
            term -= numpy_normal(
                *(t.numpy() for t in (z, posterior.mean[0, 0], posterior.stddev[0, 0]))
            ).sum()
            terms.append(term)
        total += max(terms) + log(sum(np.exp(t - max(terms)) for t in terms) / 4)
    assert abs(found.item() + total / 34) < 1e-6


# Bootstrap


def test_draws_are_of_real_points_only_and_even() -> None:
    mask = torch.tensor([[True] * 5 + [False] * 3, [False] * 8, [True] * 8])
    draws = drawn(torch.rand(2, 3, 6000, 8), torch.zeros(3, 8, 1), mask)
    assert draws[:, 0].max() == 4
    assert draws[:, 1].max() == 0
    for row, count in ((0, 5), (2, 8)):
        share = torch.bincount(draws[:, row].flatten(), minlength=count) / draws[:, row].numel()
        torch.testing.assert_close(share, torch.full((count,), 1 / count), atol=0.01, rtol=0)


def test_points_are_ordered_by_what_they_are() -> None:
    x, y, _, _ = data()
    mask = ragged(11, [7, 3])
    shuffle = torch.randperm(11)
    found = ordered(x, y, mask)
    again = ordered(x[:, shuffle], y[:, shuffle], mask[:, shuffle])
    assert found[2] is not None
    assert again[2] is not None
    assert found[2].tolist() == [[True] * 7 + [False] * 4, [True] * 3 + [False] * 8]
    for i, count in enumerate((7, 3)):
        assert torch.equal(found[0][i, :count], again[0][i, :count])
        assert torch.equal(found[1][i, :count], again[1][i, :count])


def test_rebuilt_outputs_are_predictions_with_centred_residuals_of_the_data() -> None:
    model = small("bnp").requires_grad_(False)
    mask = ragged(11, [11, 6])
    x, y, kept = ordered(*data()[:2], mask)
    assert kept is not None
    k, count = 3, 6
    uniforms = torch.rand(2, 2, k, 11, dtype=torch.float64)
    rebuilt = model.bootstrap(x, y, kept, uniforms)
    assert rebuilt.shape == (2, k, 11, 2)
    for v in range(k):  # the second task, whose last points are not real
        points, residuals = ((u * count).long()[:count] for u in uniforms[:, 1, v])
        seen = model.condition(x[1:, points], y[1:, points])
        plain = CNP(dim_x=2, dim_y=2, dim=16, pre_depth=3, post_depth=2, decoder_depth=2).double().eval()
        plain.load_state_dict({n: t for n, t in model.state_dict().items() if not n.startswith("adapt")})
        given = plain.query(plain.condition(seen.x, seen.y), x[1:, :count])
        standard = ((y[1:, :count] - given.mean) / given.stddev)[0, residuals]
        expected = given.mean[0] + given.stddev[0] * (standard - standard.mean(0))
        torch.testing.assert_close(rebuilt[1, v, :count], expected, atol=1e-9, rtol=0)


def test_bootstrap_models_predict_the_data_alone_as_their_conditional_kin_does() -> None:
    model = small("bnp").requires_grad_(False)
    x, y, xt, yt = data()
    plain = CNP(dim_x=2, dim_y=2, dim=16, pre_depth=3, post_depth=2, decoder_depth=2).double().eval()
    plain.load_state_dict({n: t for n, t in model.state_dict().items() if not n.startswith("adapt")})
    model.adapt.weight.zero_()
    assert_same(
        plain.query(plain.condition(x, y), xt), _as_normal(model.query(model.condition(x, y), xt)), yt
    )
    twice = 2 * plain.loss(x, y, xt, yt)
    torch.testing.assert_close(model.loss(x, y, xt, yt), twice, atol=1e-8, rtol=0)


def _as_normal(mixture: Distribution) -> Distribution:
    return torch.distributions.Normal(mixture.mean, mixture.stddev)


# Attention


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float) -> Tensor:
    parts = []
    for low, high in sets(heads, q.shape[-1] // heads):
        shares = (q[..., low:high] @ k[..., low:high].mT * scale).softmax(-1)
        parts.append(shares @ v[..., low:high])
    return torch.cat(parts, -1)


def plain(module: nn.Module, x: Tensor, context: Tensor | None = None) -> Tensor:
    """A pre-norm module written out; the residual is the normed x."""
    if isinstance(module, nn.Sequential):
        for part in module:
            x = plain(part, x)
        return x
    assert isinstance(module, CrossAttention | SelfAttention | FeedForward)
    x = module.norm(x)
    if isinstance(module, FeedForward):
        content, gate = module.expand(x).chunk(2, -1)
        return x + module.contract(content * gate * 0.5 * (1 + torch.erf(gate / sqrt(2))))
    a = module.attention
    source = x if isinstance(module, SelfAttention) else module.norm_context(context)
    k, v = (source @ w.T for w in a.key_value.weight.chunk(2))
    attended = softmax_attention(a.query(x), k, v, a.num_heads, 1 / sqrt(x.shape[-1] // a.num_heads))
    return x + a.out(attended)


def test_lbanp_is_its_plain_version() -> None:
    model = small("lbanp").requires_grad_(False)
    x, y, xt, yt = data()
    tokens, latents = model.embed(torch.cat([x, y], -1)), model.latents.expand(2, -1, -1)
    targets = model.embed_target(xt)
    for i in range(2):
        latents = plain(model.think[i], plain(model.look[i], latents, tokens))
        targets = plain(model.feed[i], plain(model.cross[i], targets, latents))
    mean, raw = model.head.predictor(model.head.norm(targets)).chunk(2, -1)
    found = model.query(model.condition(x, y), xt)
    torch.testing.assert_close(found.mean, mean, atol=1e-9, rtol=0)
    torch.testing.assert_close(found.stddev, 0.05 + 0.95 * torch.log1p(raw.exp()), atol=1e-9, rtol=0)


def test_eqtnp_is_its_plain_version() -> None:
    model = small("eqtnp").requires_grad_(False)
    x, y, xt, _ = data()
    tokens, targets = model.embed(torch.cat([x, y], -1)), model.embed_target(xt)
    targets = plain(model.feed[0], plain(model.cross[0], targets, tokens))
    tokens = plain(model.among_feed[0], plain(model.among[0], tokens))
    targets = plain(model.feed[1], plain(model.cross[1], targets, tokens))
    mean, _ = model.head.predictor(model.head.norm(targets)).chunk(2, -1)
    torch.testing.assert_close(model.query(model.condition(x, y), xt).mean, mean, atol=1e-9, rtol=0)


def test_tnpd_is_one_masked_transformer_over_context_and_targets() -> None:
    model: TNPD = small("tnpd").requires_grad_(False)
    x, y, xt, _ = data()
    tokens = model.embed(torch.cat([torch.cat([x, y], -1), torch.cat([xt, torch.zeros_like(xt)], -1)], 1))
    hidden = torch.zeros(17, 17, dtype=torch.bool)
    hidden[:, 11:] = True  # nobody sees targets
    for layer in model.layers:
        theirs = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True).double()
        names = ("self_attn.in_proj_", "query_key_value."), ("self_attn.out_proj.", "out."), ("norm1.", "norm."), (
            "linear1.", "expand."), ("linear2.", "contract."), ("norm2.", "norm_feed.")  # fmt: skip
        weights = layer.state_dict()
        theirs.load_state_dict({a + p: weights[b + p] for a, b in names for p in ("weight", "bias")})
        tokens = theirs(tokens, src_mask=hidden)
    mean, _ = model.head.predictor(tokens[:, 11:]).chunk(2, -1)
    torch.testing.assert_close(model.query(model.condition(x, y), xt).mean, mean, atol=1e-9, rtol=0)


def test_the_attention_of_the_cnp_family_is_its_plain_version() -> None:
    attention = PostNormAttention(dim=16, num_heads=8).double().requires_grad_(False)
    q, k, v = (torch.randn(2, 3, n, 16, dtype=torch.float64) for n in (4, 5, 5))
    projected = attention.query(q)
    h = attention.norm(projected + softmax_attention(projected, k, v, 8, 1 / 4))
    expected = attention.norm_out(h + attention.out(h).relu())
    torch.testing.assert_close(attention(q, k, v, None), expected, atol=1e-9, rtol=0)


def test_settings_that_cannot_work_are_refused() -> None:
    for settings, message in (
        ({"decoder_depth": 1}, "decoder_depth must be at least 2"),
        ({"std": "softplus"}, "std must be 'bounded', 'exp' or 'coarse'"),
        ({"num_samples": 0}, "num_samples must be a whole number"),
    ):
        with pytest.raises(ValueError, match=message):
            BNP(dim_x=1, dim_y=1, **settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pre_depth=2 is below 3"):
        ANP(dim_x=1, dim_y=1, pre_depth=2)
    assert NP(dim_x=1, dim_y=1, dim=8, std="exp").decoder.std == "exp"
