"""Mixtures, bounds, bootstraps and attention of the family, each against a slow, plain version."""

from math import log, pi, sqrt
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from constmem.core.layers import CrossAttention, FeedForward, SelfAttention
from constmem.neural_processes import ANP, BNP, CNP, MODELS, NP, TNPD
from constmem.neural_processes.encoders import PostNormAttention, drawn, ordered
from constmem.neural_processes.joint import SampleMixture
from tests.conftest import Refuses
from tests.laws.models import MIXTURES, assert_same, data, ragged, small

# Mixtures


def numpy_normal(y: Any, mean: Any, std: Any) -> Any:
    return -0.5 * ((y - mean) / std) ** 2 - np.log(std) - 0.5 * log(2 * pi)


@pytest.mark.parametrize("even", [True, False])
def test_the_log_probability_of_a_mixture_is_the_slow_one(even: bool) -> None:
    means, y = 3 * torch.randn(2, 3, 4, 2).double(), torch.randn(2, 3, 2).double()
    stds = torch.rand(2, 3, 4, 2).double() + 0.01
    weight = torch.full((2, 4), 0.25).double() if even else torch.rand(2, 4).double().softmax(-1)
    mixture = SampleMixture(means, stds, None if even else weight.log()[:, None].expand(2, 3, 4))
    found = mixture.log_prob(y)
    assert found.shape == (2, 3, 1)
    whole = mixture.joint_log_prob(y)
    for i in range(2):
        slow = [
            numpy_normal(*(t[i].numpy() for t in (y[:, :, None], means, stds)))[:, k].sum() for k in range(4)
        ]
        assert float(whole[i]) == pytest.approx(np.logaddexp.reduce(np.array(slow) + weight[i].log().numpy()))
    for i, j in np.ndindex(2, 3):
        arguments = (t[i, j].numpy() for t in (y[:, :, None], means, stds))
        terms = numpy_normal(*arguments).sum(-1)
        slow = terms.max() + log((weight[i].numpy() * np.exp(terms - terms.max())).sum())
        assert abs(float(found[i, j, 0]) - slow) < 1e-9 * (1 + abs(slow))
    mean, second = (torch.einsum("bk,bmky->bmy", weight, t) for t in (means, stds**2 + means**2))
    torch.testing.assert_close(mixture.mean, mean)
    torch.testing.assert_close(mixture.variance, second - mean**2)


@pytest.mark.parametrize("weight", [(0.5, 0.5), (0.2, 0.8), (1.0, 0.0)])
def test_samples_of_a_mixture_follow_it_and_belong_together(weight: tuple[float, float]) -> None:
    means = torch.tensor([-5.0, 5.0])[None, None, :, None].expand(1, 3, 2, 2)
    log_weight = None if weight == (0.5, 0.5) else torch.tensor(weight).log().expand(1, 3, 2)
    mixture = SampleMixture(means, torch.full((1, 3, 2, 2), 0.5), log_weight)
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
    if name in ("np", "anp"):
        assert model.noise.dtype == torch.float64  # it follows the model
        assert "noise" not in model.state_dict()  # but a seed is enough to know it
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
    noise = torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(5))
    total = 0.0
    for i in range(2):
        xi, yi = x[i : i + 1], y[i : i + 1]
        all_x, all_y = torch.cat([xi, xt[i : i + 1]], 1), torch.cat([yi, yt[i : i + 1]], 1)
        state = model.condition(xi, yi)
        prior, posterior = model.latent(state), model.latent(model.condition(all_x, all_y))
        seen = model.encoder.attend(model._context(state), all_x).expand(1, 17, -1)[0]
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
    scattered = [False, True, False, True, True, False, False, True]
    mask = torch.tensor([[True] * 5 + [False] * 3, [False] * 8, [True] * 8, scattered])
    draws = drawn(torch.rand(2, 4, 6000, 8), torch.zeros(4, 8, 1), mask)
    for row in (0, 2, 3):
        share = torch.bincount(draws[:, row].flatten(), minlength=8) / draws[:, row].numel()
        torch.testing.assert_close(share, mask[row] / mask[row].sum(), atol=0.01, rtol=0)
    assert draws[:, 1].max() < 8  # of nothing anything may be drawn, but what is there
    for without in (None, torch.ones(3, 0, dtype=torch.bool)):
        assert drawn(torch.rand(2, 3, 4, 0), torch.zeros(3, 0, 1), without).shape == (2, 3, 4, 0)


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
    k, count, kin = 3, 6, conditional_kin(model)
    uniforms = torch.rand(2, 2, k, 11, dtype=torch.float64)
    rebuilt = model.bootstrap((x, y, kept), uniforms)
    assert rebuilt.shape == (2, k, 11, 2)
    for v in range(k):  # the second task, whose last points are not real
        points, residuals = ((u * count).long()[:count] for u in uniforms[:, 1, v])
        given = kin.query(kin.condition(x[1:, points], y[1:, points]), x[1:, :count])
        standard = ((y[1:, :count] - given.mean) / given.stddev)[0, residuals]
        expected = given.mean[0] + given.stddev[0] * (standard - standard.mean(0))
        torch.testing.assert_close(rebuilt[1, v, :count], expected, atol=1e-9, rtol=0)


def conditional_kin(model: BNP) -> CNP:
    """The CNP with the weights of a BNP."""
    kin = CNP(dim_x=2, dim_y=2, dim=16, pre_depth=3, post_depth=2, decoder_depth=2).double().eval()
    kin.load_state_dict({n: t for n, t in model.state_dict().items() if not n.startswith("adapt")})
    return kin.requires_grad_(False)


def test_bootstrap_models_are_trained_on_the_data_alone_and_on_their_versions() -> None:
    model = small("bnp").requires_grad_(False)
    kin = conditional_kin(model)
    x, y, xt, yt = data()
    all_x, all_y = torch.cat([x, xt], 1), torch.cat([y, yt], 1)
    uniforms = torch.rand(2, 2, 4, 11, generator=torch.Generator().manual_seed(3))
    versions = SampleMixture(*model.decode(model._versions((x, y, None), uniforms), all_x))
    expected = kin.loss(x, y, xt, yt) - versions.log_prob(all_y).mean()
    found = model.loss(x, y, xt, yt, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)


def test_versions_matter_only_through_a_layer_of_their_own() -> None:
    model = small("bnp").requires_grad_(False)
    kin = conditional_kin(model)
    x, y, xt, yt = data()
    model.adapt.weight.zero_()
    mixture = model.query(model.condition(x, y), xt)
    as_one = torch.distributions.Normal(mixture.mean, mixture.stddev)
    assert_same(kin.query(kin.condition(x, y), xt), as_one, yt)


# Attention


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float) -> Tensor:
    parts = []
    width = q.shape[-1] // heads
    for low in range(0, heads * width, width):
        high = low + width
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
    x, y, xt, _ = data()
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
    names = {
        "self_attn.in_proj_": "query_key_value.",
        "self_attn.out_proj.": "out.",
        "norm1.": "norm.",
        "linear1.": "expand.",
        "linear2.": "contract.",
        "norm2.": "norm_feed.",
    }
    for layer in model.layers:
        theirs = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True).double()
        weights = layer.state_dict()
        theirs.load_state_dict({a + p: weights[b + p] for a, b in names.items() for p in ("weight", "bias")})
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


def test_settings_that_cannot_work_are_refused(refuses: Refuses) -> None:
    for settings, message in (
        ({"decoder_depth": 1}, "decoder_depth must be at least 2"),
        ({"std": "softplus"}, "std must be 'bounded', 'exp' or 'coarse'"),
        ({"num_samples": 0}, "num_samples must be a whole number"),
    ):
        with refuses(ValueError, message):
            BNP(dim_x=1, dim_y=1, **settings)
    with pytest.raises(ValueError, match="pre_depth=2 is below 3"):
        ANP(dim_x=1, dim_y=1, pre_depth=2)
    assert NP(dim_x=1, dim_y=1, dim=8, std="exp").decoder.std == "exp"
