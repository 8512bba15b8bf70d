"""The losses, sizes and folders of every neural process, and what its states can do."""

from math import log
from pathlib import Path
from typing import Any

import pytest
import torch

from constmem import Decay, NeuralProcess, Stream
from constmem.core import checks
from constmem.core.state import AttentionState
from constmem.neural_processes import LBANP, MODELS, StoredPoints
from tests.conftest import Refuses
from tests.laws.models import (
    CNP_FAMILY,
    MIXTURES,
    POINT_MODELS,
    POOLED,
    STORED,
    assert_same,
    data,
    ragged,
    small,
)

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


@pytest.fixture(params=POINT_MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return small(request.param)


def shallow(name: str) -> Any:
    """A model as shallow as it comes: a compiler takes seconds for every layer."""
    kind = name.partition("-")[0]
    if kind not in CNP_FAMILY:
        return small(name, depth=1, embed_depth=1)
    return small(name, post_depth=1, **({"num_samples": 2} if kind in MIXTURES else {}))


TRACED = ("cmanp",)  # in gradients and other sizes too; the others if slow
SLOWLY = [pytest.param(name, marks=pytest.mark.slow) for name in POINT_MODELS if name not in TRACED]


@pytest.fixture(params=STORED)
def stored(request: pytest.FixtureRequest) -> Any:
    return small(request.param)


# Laws


@pytest.mark.parametrize("size", range(3), ids=["gp", "emnist", "celeba"])
@pytest.mark.parametrize("name", MODELS)
def test_models_have_as_many_parameters_as_the_published_ones(name: str, size: int) -> None:
    channels, depths = SIZES[size]
    settings = {**channels, **(depths if name in CNP_FAMILY else {})}
    model = MODELS[name](**settings)
    assert sum(p.numel() for p in model.parameters()) == COUNTS[name][size]


def test_tasks_without_a_context_can_be_learned_from(model: NeuralProcess) -> None:
    x, y, xt, yt = data()
    loss = model.loss(x, y, xt, yt, mask_c=torch.tensor([[True] * 11, [False] * 11]))
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_the_gradient_of_a_task_without_a_context_is_the_same_in_chunks(model: NeuralProcess) -> None:
    x, y, xt, yt = data()
    mask = ragged(11, [0, 7])

    def gradients(chunk: int) -> list[torch.Tensor]:
        model.zero_grad()
        model(x, y, xt, mask=mask, chunk=chunk).log_prob(yt).sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    torch.testing.assert_close(gradients(3), gradients(100), rtol=1e-8, atol=1e-8)


def test_a_batch_of_no_tasks_is_no_error(model: NeuralProcess) -> None:
    x, y, xt, _ = (t[:0] for t in data())
    assert model.query(model.condition(x, y), xt).mean.shape == (0, 6, 2)


def test_a_folder_says_which_model_it_holds(model: NeuralProcess, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    assert type(NeuralProcess.from_pretrained(tmp_path)) is type(model)


def test_states_of_ragged_batches_survive_a_file(model: NeuralProcess, tmp_path: Path) -> None:
    x, y, xt, yt = data()
    with torch.no_grad():
        state = model.condition(x, y, mask=ragged(11, [5, 9]))
        state.save(tmp_path / "state")
        again = model.state_type.load(tmp_path / "state")
        assert again.count.tolist() == [5, 9]
        assert again.nbytes == state.nbytes
        assert_same(model.query(again, xt), model.query(state, xt), yt)


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
    loss.backward()
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


@pytest.mark.once
def test_a_few_steps_make_the_loss_smaller(model: NeuralProcess) -> None:
    x = torch.linspace(-1, 1, 8, dtype=torch.float64)[None, :, None].expand(1, 8, 2)
    y = (3 * x).sin()
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    losses: list[float] = []
    for _ in range(25):
        loss = model.loss(x[:, ::2], y[:, ::2], x[:, 1::2], y[:, 1::2], generator=generator)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) / 5 < losses[0] - 0.3


@pytest.mark.compiles
@pytest.mark.parametrize("name", [name for name in POINT_MODELS if name not in TRACED])
@torch.no_grad()
def test_the_loss_compiles_to_one_graph_and_stays_the_same(name: str) -> None:
    model, (x, y, xt, yt) = shallow(name), data()
    mask, noise = ragged(11, [5, 11]), model.loss_noise(x, generator=torch.Generator().manual_seed(4))
    torch.compiler.reset()
    found = torch.compile(model.loss, backend="eager", fullgraph=True)(x, y, xt, yt, mask_c=mask, noise=noise)
    expected = model.loss(x, y, xt, yt, mask_c=mask, generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


@pytest.mark.compiles
@pytest.mark.parametrize("name", [*TRACED, *SLOWLY])
def test_the_loss_and_its_gradient_compile_to_one_graph_and_stay_the_same(name: str) -> None:
    model, (x, y, xt, yt) = shallow(name), data()
    mask = ragged(11, [5, 11])
    noise = model.loss_noise(x, generator=torch.Generator().manual_seed(4))
    expected = model.loss(x, y, xt, yt, mask_c=mask, generator=torch.Generator().manual_seed(4))
    expected.backward()
    wanted = [p.grad for p in model.parameters()]
    model.zero_grad()
    torch.compiler.reset()
    compiled = torch.compile(model.loss, backend="aot_eager", fullgraph=True)
    found = compiled(x, y, xt, yt, mask_c=mask, noise=noise)
    found.backward()
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
    for p, want in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, want, atol=1e-10, rtol=1e-9)


@pytest.mark.compiles
@pytest.mark.parametrize("name", [*TRACED, *SLOWLY])
@torch.no_grad()
def test_a_compiled_loss_takes_tasks_of_other_sizes_and_draws_its_own_noise(name: str) -> None:
    model = shallow(name)
    torch.compiler.reset()
    compiled = torch.compile(model.loss, backend="eager")
    for b, n in ((2, 11), (3, 8)):  # sizes become symbols at the second
        points = data(n, b=b)
        torch.manual_seed(4)
        found = compiled(*points)
        torch.manual_seed(4)
        torch.testing.assert_close(found, model.loss(*points), atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", MIXTURES)
def test_models_that_draw_samples_are_told_what_to_draw_by_a_generator(name: str) -> None:
    model, points = small(name).requires_grad_(False), data()
    one, same, other = (model.loss(*points, generator=torch.Generator().manual_seed(s)) for s in (4, 4, 5))
    assert one == same != other
    torch.manual_seed(4)
    assert model.loss(*points) == one  # PyTorch's own where none is given


@torch.no_grad()
def test_fill_values_are_refused_and_what_is_not_gives_finite_answers(
    model: NeuralProcess,
) -> None:
    model, (x, y, xt, _) = model.float(), (t.float() for t in data())
    stream = Stream(model, batch=2)
    stream.observe(x, y)
    for point in (x, y):
        for size, fits in ((1e20, False), (-9.97e36, False), (checks.largest(torch.float32), True)):
            kept, point[1, 3, 0] = point[1, 3, 0].item(), size
            if fits:
                assert bool(model.query(model.condition(x, y), xt).mean.isfinite().all())
            else:
                with pytest.raises(ValueError, match=r"\[1, 3, 0\] is .*, and at most 1.8e\+16 in size"):
                    stream.observe(x, y)
            point[1, 3, 0] = kept
    assert bool(stream.predict(xt).mean.isfinite().all())


def test_bad_tasks_are_refused(model: NeuralProcess, refuses: Refuses) -> None:
    x, y, xt, yt = data()
    with refuses(ValueError, "context is a batch of 2, the targets one of 1"):
        model.loss(x, y, xt[:1], yt[:1])
    with refuses(TypeError, "mask must be a boolean tensor .True = real., not list: use torch.as_tensor"):
        model.condition(x, y, mask=[[True] * 11] * 2)  # type: ignore[arg-type]
    with refuses(TypeError, r"x must be a floating-point tensor, not list: torch.as_tensor\(x, dtype"):
        model.condition(x.tolist(), y)  # type: ignore[arg-type]
    with refuses(TypeError, "cannot merge a NoneType and a"):
        model.condition(x, y).merge(None)


# States


@pytest.mark.parametrize("name", POOLED)
def test_running_means_have_constant_size_can_be_undone_and_decay(name: str) -> None:
    model = small(name).requires_grad_(False)
    x, y, xt, yt = data()
    some, whole = model.condition(x[:, :4], y[:, :4]), model.condition(x, y)
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


def test_what_stored_states_cannot_do_is_said_clearly(stored: NeuralProcess, refuses: Refuses) -> None:
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
    with refuses(TypeError, "expected a state of"):
        stored.query(AttentionState.empty((2, 1, 1, 1), 4), x)
    with pytest.raises(ValueError, match=r"another model: it has \(dim_x, dim_y\) \(2, 1\)"):
        stored.query(StoredPoints(x, y[..., :1]), x)


def test_stored_points_may_be_read_by_any_model_that_stores(tmp_path: Path) -> None:
    x, y, xt, yt = data()
    state = small("lbanp").condition(x, y)
    tnpd = small("tnpd")
    assert_same(tnpd.query(state, xt), tnpd.query(tnpd.condition(x, y), xt), yt)
    state.save(tmp_path / "state")
    with pytest.raises(ValueError, match=r"holds 'constmem\.points' where 'constmem\.state' was expected"):
        AttentionState.load(tmp_path / "state")
