"""Scales: models that take and give data in its own units, and change nothing else."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Distribution

from constmem import CMANP, NeuralProcess, Scales, Stream
from constmem.neural_processes import MODELS
from tests.laws.models import MIXTURES, STORED, assert_same, data, ragged, small

SCALES: dict[str, list[float]] = {
    "x_mean": [1e6, -3.0],
    "x_std": [2e3, 0.01],
    "y_mean": [50.0, -7.0],
    "y_std": [5.0, 0.5],
}
NUMBERS = {name: torch.tensor(numbers, dtype=torch.float64) for name, numbers in SCALES.items()}


def in_units(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Points of the models' own units as a user would have them."""
    return x * NUMBERS["x_std"] + NUMBERS["x_mean"], y * NUMBERS["y_std"] + NUMBERS["y_mean"]


def scaled(name: str) -> Any:
    model = small(name)
    model.set_scales(Scales(**SCALES))
    return model


def per_point(dist: Distribution, y: Tensor) -> Tensor:
    return dist.log_prob(y).sum(-1)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_model_with_scales_predicts_the_units_of_the_data(name: str) -> None:
    x, y, xt, yt = data()
    plain = small(name).query(small(name).condition(x, y), xt)
    model, (x_data, y_data), (xt_data, yt_data) = scaled(name), in_units(x, y), in_units(xt, yt)
    found = model.query(model.condition(x_data, y_data, chunk=4), xt_data)
    torch.testing.assert_close(
        found.mean, plain.mean * NUMBERS["y_std"] + NUMBERS["y_mean"], atol=1e-6, rtol=0
    )
    torch.testing.assert_close(found.stddev, plain.stddev * NUMBERS["y_std"], atol=1e-6, rtol=0)
    jacobian = NUMBERS["y_std"].log().sum()
    torch.testing.assert_close(per_point(found, yt_data), per_point(plain, yt) - jacobian, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_with_scales_updating_merging_masks_and_streams_are_what_they_were(name: str) -> None:
    x, y, xt, yt = data()
    model, (x, y), (xt, yt) = scaled(name), in_units(x, y), in_units(xt, yt)
    mask = ragged(11, [7, 11])
    y_holes = y.masked_fill(~mask[..., None], float("nan"))
    expected = model.query(model.condition(x, y), xt)
    updated = model.update(model.condition(x[:, :4], y[:, :4]), x[:, 4:], y[:, 4:])
    merged = model.observe(x[:, :4], y[:, :4]).merge(model.observe(x[:, 4:], y[:, 4:]))
    pieces = model.condition_chunks([(x[:, :4], y[:, :4]), (x[:, 4:], y[:, 4:])])
    for state in (updated, merged, pieces):
        assert_same(model.query(state, xt), expected, yt)
    masked = model.query(model.condition(x, y_holes, mask=mask), xt)
    alone = model.query(model.condition(x[:1, mask[0]], y[:1, mask[0]]), xt[:1])
    torch.testing.assert_close(masked.mean[:1], alone.mean, atol=1e-6, rtol=0)
    assert_same(model(x, y, xt), expected, yt)


def test_a_stream_with_scales_forgets_and_remembers_in_the_units_of_the_data() -> None:
    x, y, xt, yt = data()
    model, (x, y), (xt, yt) = scaled("cmanp"), in_units(x, y), in_units(xt, yt)
    stream = Stream(model, batch=2)
    for i in range(x.shape[1]):
        stream.observe(x[:, i : i + 1], y[:, i : i + 1])
    with torch.no_grad():
        assert_same(stream.predict(xt), model.query(model.condition(x, y), xt), yt)


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_learns_the_same_with_scales_as_on_standardised_data(name: str) -> None:
    x, y, xt, yt = data()
    plain, model = small(name), scaled(name)
    seeds = [torch.Generator().manual_seed(3) for _ in range(2)]
    mask = ragged(11, [7, 11])
    expected = plain.loss(x, y, xt, yt, mask_c=mask, generator=seeds[0])
    (x, y), (xt, yt) = in_units(x, y), in_units(xt, yt)
    found = model.loss(x, y, xt, yt, mask_c=mask, generator=seeds[1])
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=0)
    expected.backward()
    found.backward()
    for (key, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-6, rtol=1e-6, msg=key)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_scales_are_saved_with_the_model_and_count_as_no_parameters(name: str, tmp_path: Path) -> None:
    x, y, xt, yt = data()
    model, (x, y), (xt, yt) = scaled(name), in_units(x, y), in_units(xt, yt)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in small(name).parameters())
    model.save_pretrained(tmp_path)
    again = NeuralProcess.from_pretrained(tmp_path)
    assert again.dtype == torch.float64
    assert_same(again.query(again.condition(x, y), xt), model.query(model.condition(x, y), xt), yt)
    assert again.fingerprint() == model.fingerprint()


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_state_of_other_scales_is_refused(name: str) -> None:
    x, y, xt, _ = data()
    model, other = scaled(name), small(name)
    other.set_scales(Scales(**{**SCALES, "y_std": [5.0, 0.6]}))
    plain = small(name)
    states = {"theirs": other.condition(x, y), "none": plain.condition(x, y)}
    for state in states.values():
        with pytest.raises(ValueError, match=r"other weights|not on the scales"):
            model.query(state, xt)
    with pytest.raises(ValueError, match="other weights"):
        plain.query(model.condition(x, y), xt)
    with pytest.raises(ValueError, match="different"):
        model.condition(x, y).merge(other.condition(x, y))


@pytest.mark.parametrize("name", [STORED[0], MIXTURES[1]])
@torch.no_grad()
def test_a_stored_state_on_scales_keeps_its_name_in_a_file(name: str, tmp_path: Path) -> None:
    x, y, *_ = data()
    state = scaled(name).condition(x, y)
    state.save(tmp_path / "state")
    assert type(state).load(tmp_path / "state").fingerprint == state.fingerprint is not None
    assert small(name).condition(x, y).fingerprint is None  # without scales, anyone may read it


def test_scales_can_be_changed_and_taken_away() -> None:
    model = small("cmanp")
    before = model.fingerprint()
    model.set_scales(Scales(**SCALES))
    assert model.fingerprint() != before
    model.scales.y_mean.add_(1.0)  # in place
    assert model.fingerprint() != scaled("cmanp").fingerprint()
    model.set_scales(None)
    assert model.fingerprint() == before
    assert not [key for key in model.state_dict() if key.startswith("scales")]


def test_the_shipped_weights_have_no_scales_and_still_load() -> None:
    assert CMANP.from_pretrained("emnist").scales is None


def test_scales_keep_all_their_digits_in_a_model_of_less_precision() -> None:
    stamps = torch.arange(100.0, dtype=torch.float64)[None, :, None] + 1_700_000_000  # seconds: 31 bits
    model = CMANP(dim_x=1, dim_y=1, dim=8, depth=1, num_slots=4, num_latents=4, num_heads=2).eval()
    model.set_scales(Scales.of(stamps[0], torch.randn(100, 1)))
    model = model.to(torch.float32)
    assert model.scales is not None
    inside = model.scales.inputs(stamps)
    assert abs(inside.mean().item()) < 1e-9
    assert inside.unique().numel() == 100
    assert inside.float().std().item() == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y_std": [1.0, 0.0]}, "y_std .* above 0"),
        ({"x_mean": [float("nan"), 0.0]}, "x_mean must be one finite number"),
        ({"x_mean": [0.0]}, "x_mean has 1 channels and x_std 2"),
    ],
)
def test_scales_that_cannot_be_are_refused(change: dict[str, list[float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Scales(**{**SCALES, **change})


def test_scales_of_another_number_of_channels_and_of_constant_columns_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(1, 1\) input and output channels, the model has \(2, 2\)"):
        small("cmanp").set_scales(Scales(x_mean=[0], x_std=[1], y_mean=[0], y_std=[1]))
    with pytest.raises(ValueError, match="column 1 of x is constant"):
        Scales.of(torch.tensor([[1.0, 5.0], [2.0, 5.0]]), torch.randn(2, 1))
