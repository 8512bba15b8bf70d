"""Simulated processes against theory, quadrature and slow references."""

from math import exp, log, sqrt

import numpy as np
import pytest
import torch

from constmem.data import Events, Hawkes, Poisson

stats = pytest.importorskip("scipy.stats")

PROCESSES = {
    "poisson": Poisson((0.4, 1.1)),
    "poisson of one": Poisson((0.8,)),
    "hawkes": Hawkes.univariate(0.2, (0.8,), (1.0,)),
    "hawkes of two": Hawkes.univariate(0.2, (0.4, 0.4), (1.0, 20.0)),
    "multivariate": Hawkes(
        (0.2, 0.4, 0.1),
        (
            ((0.3, 0.0, 0.2), (0.1, 0.2, 0.1), (0.0, 0.3, 0.0)),
            ((0.1, 0.2, 0.0), (0.1, 0.0, 0.3), (0.2, 0.0, 0.1)),
        ),
        (0.7, 4.0),
    ),
}
every_process = pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES.keys())


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def continued(process, gaps, mark, *, t_end=None):
    """A history of five events, followed after each of the gaps by one event, or by none until t_end."""
    history = process.sample(1, num_events=5, generator=generator(3))
    times = history.times.expand(len(gaps), -1)
    marks = history.marks.expand(len(gaps), -1)
    if t_end is None:
        times = torch.cat([times, times[:, -1:] + gaps[:, None]], 1)
        marks = torch.cat([marks, torch.full((len(gaps), 1), mark)], 1)
    ends = None if t_end is None else times[:, -1] + gaps
    mask = torch.ones_like(marks, dtype=torch.bool)
    start = torch.zeros(len(gaps), dtype=torch.float64)
    return Events(times.contiguous(), marks, mask, start, ends, "unit", process.num_marks)


# Likelihood


@every_process
def test_densities_of_the_next_event_integrate_to_one_and_to_the_survival(process):
    u = torch.linspace(-34, 12, 30_001, dtype=torch.float64)  # log gaps: fine where densities are steep
    gaps = u.exp()
    joint = torch.zeros_like(gaps)
    for mark in range(process.num_marks):
        lp = process.log_prob(continued(process, gaps, mark))
        joint += (lp.time + lp.mark)[:, -1].exp()
    mass = torch.cumulative_trapezoid(joint * gaps, u)
    assert mass[-1].item() == pytest.approx(1, abs=1e-6)
    some = torch.arange(14_000, 24_000, 1000)  # gaps of 1e-5 to 10
    silent = process.log_prob(continued(process, gaps[some + 1], 0, t_end=True)).survival.exp()
    torch.testing.assert_close(1 - mass[some], silent, atol=1e-6, rtol=0)


@every_process
def test_log_densities_are_log_hazards_less_compensators(process):
    """The hazard by finite differences of the compensator, so that neither is taken for granted."""
    gaps = torch.tensor([0.01, 0.3, 1.0, 2.0], dtype=torch.float64)
    step = 1e-6
    middle, low, high = (
        process.compensator(continued(process, g, 0))[:, -1] for g in (gaps, gaps - step, gaps + step)
    )
    hazard = (high - low) / (2 * step)
    time = process.log_prob(continued(process, gaps, 0)).time[:, -1]
    torch.testing.assert_close(time, hazard.log() - middle, atol=1e-6, rtol=1e-6)


def slow_hawkes(process, times, marks, t_end):
    """λ and Λ of a Hawkes process by loops over all pairs of events, in plain numbers."""

    def hazard(i, t, n):
        return process.base[i] + sum(
            process.branching[j][i][marks[k]] * beta * exp(-beta * (t - times[k]))
            for k in range(n)
            for j, beta in enumerate(process.decay)
        )

    def integral(i, start, stop, n):
        return process.base[i] * (stop - start) + sum(
            process.branching[j][i][marks[k]]
            * (exp(-beta * (start - times[k])) - exp(-beta * (stop - times[k])))
            for k in range(n)
            for j, beta in enumerate(process.decay)
        )

    kinds, rows = range(len(process.base)), []
    for n, (t, mark) in enumerate(zip(times, marks, strict=True)):
        before = times[n - 1] if n else 0.0
        each = [hazard(i, t, n) for i in kinds]
        spent = sum(integral(i, before, t, n) for i in kinds)
        rows.append((log(sum(each)) - spent, log(each[mark] / sum(each)), spent))
    tail = sum(integral(i, times[-1] if times else 0.0, t_end, len(times)) for i in kinds)
    return np.array(rows).reshape(-1, 3), tail


@pytest.mark.parametrize("name", ["hawkes", "hawkes of two", "multivariate"])
def test_hawkes_recursions_equal_sums_over_all_pairs(name):
    process = PROCESSES[name]
    events = process.sample(6, t_end=12.0, generator=generator(1))
    assert events.lengths.max() > 15
    lp, spent = process.log_prob(events), process.compensator(events)
    for k, n in enumerate(events.lengths.tolist()):
        rows, tail = slow_hawkes(process, events.times[k, :n].tolist(), events.marks[k, :n].tolist(), 12.0)
        np.testing.assert_allclose(lp.time[k, :n], rows[:, 0], atol=1e-10)
        np.testing.assert_allclose(lp.mark[k, :n], rows[:, 1], atol=1e-10)
        np.testing.assert_allclose(spent[k, :n], rows[:, 2], atol=1e-10)
        assert lp.survival[k].item() == pytest.approx(-tail, abs=1e-10)
        assert (lp.time[k, n:] == 0).all()
        assert (lp.mark[k, n:] == 0).all()


@every_process
def test_padding_changes_nothing(process):
    events = process.sample(5, t_end=6.0, generator=generator(2))
    lp = process.log_prob(events)
    for k, n in enumerate(events.lengths.tolist()):
        alone = process.log_prob(events.select([k]).trim())
        torch.testing.assert_close(alone.time[0], lp.time[k, :n])
        torch.testing.assert_close(alone.mark[0], lp.mark[k, :n])
        torch.testing.assert_close(alone.survival[0], lp.survival[k])
        assert torch.equal(lp.scored[k], events.scored[k])


@every_process
def test_hazards_between_events_integrate_to_the_compensators(process):
    events = process.sample(3, num_events=6, generator=generator(2)).select([1])
    wanted = process.compensator(events)[0]
    for i, (gap, stop) in enumerate(zip(events.gaps[0], events.times[0], strict=True)):
        u = torch.linspace(-30, -1e-9, 2001, dtype=torch.float64)
        offsets = gap * u.exp()
        found = torch.trapezoid(process.hazard(events, stop - gap + offsets) * offsets, u)
        assert found.item() == pytest.approx(wanted[i].item(), rel=1e-3)
    with pytest.raises(ValueError, match="there are 2 sequences: select"):
        process.hazard(process.sample(2, num_events=2, generator=generator()), torch.ones(1).double())


# Sampling


@every_process
def test_rescaled_times_of_samples_are_exponential_and_independent(process):
    events = process.sample(40, num_events=250, generator=generator())
    assert events.lengths.eq(250).all()
    assert events.t_end is None
    rescaled = process.compensator(events)
    assert stats.kstest(rescaled.flatten().numpy(), "expon").pvalue > 0.01
    ranks = torch.exp(-rescaled)
    neighbours = torch.corrcoef(torch.stack([ranks[:, :-1].flatten(), ranks[:, 1:].flatten()]))[0, 1]
    assert abs(neighbours) < 0.03


def test_the_rescaled_times_of_another_process_are_not_exponential():
    events = PROCESSES["hawkes"].sample(40, num_events=250, generator=generator())
    for other in (Poisson((1.0,)), Hawkes.univariate(0.2, (0.7,), (1.5,))):
        assert stats.kstest(other.compensator(events).flatten().numpy(), "expon").pvalue < 1e-4


def test_no_other_process_scores_higher_on_its_samples_than_the_one_they_came_from():
    unmarked = {name: p for name, p in PROCESSES.items() if p.num_marks == 1}
    for name, process in unmarked.items():
        events = process.sample(50, num_events=200, generator=generator(5))
        scores = {other: p.log_prob(events).mean.item() for other, p in unmarked.items()}
        assert max(scores, key=scores.get) == name


def mean_rates(hawkes):
    """Events of each mark in a unit of time, in the long run: (1 - Σ_j branching_j)⁻¹ base."""
    children = np.array(hawkes.branching).sum(0)
    return np.linalg.solve(np.eye(len(children)) - children, np.array(hawkes.base))


@pytest.mark.parametrize("name", ["poisson", "hawkes", "hawkes of two", "multivariate"])
def test_events_come_as_often_as_theory_says(name):
    process = PROCESSES[name]
    rates = torch.tensor(process.rates) if name == "poisson" else torch.tensor(mean_rates(process))
    events = process.sample(200, t_end=400.0, generator=generator())
    late = events.mask & (events.times > 100)  # when the empty beginning is forgotten
    for mark, rate in enumerate(rates.tolist()):
        counts = (late & (events.marks == mark)).sum(-1).double()
        assert counts.mean().item() / 300 == pytest.approx(
            rate, abs=4 * counts.std().item() / 300 / sqrt(200)
        )


def test_poisson_counts_have_a_variance_as_large_as_their_mean():
    counts = Poisson((1.5,)).sample(3000, t_end=8.0, generator=generator()).lengths.double()
    assert counts.mean().item() == pytest.approx(12, abs=0.3)
    assert counts.var().item() == pytest.approx(12, rel=0.1)


def test_marks_follow_their_probabilities():
    process = PROCESSES["multivariate"]
    events = process.sample(40, num_events=250, generator=generator(4))
    shares = []
    for mark in range(3):  # the probability that the process gave to this mark at every event
        told = Events(
            events.times, torch.where(torch.arange(250) == 249, mark, events.marks), events.mask,
            events.t_start, None, "unit", 3,
        )  # fmt: skip
        shares.append(process.log_prob(told).mark[:, -1].exp())
    torch.testing.assert_close(sum(shares), torch.ones(40, dtype=torch.float64))
    likely = process.log_prob(events).mark.exp()
    expected = sum(share**2 for share in shares)  # the mean of a mark's own probability, if it is true
    assert likely[:, -1].mean().item() == pytest.approx(expected.mean().item(), abs=0.1)


def test_sequences_end_where_the_watch_ends_and_may_be_empty():
    events = Poisson((0.5,)).sample(200, t_end=1.0, generator=generator())
    assert events.times.max() <= 1
    assert (events.t_end == 1).all()
    assert (events.lengths == 0).any()
    assert torch.isfinite(Poisson((0.5,)).log_prob(events).survival).all()
    none = Poisson((1e-6,)).sample(3, t_end=1.0, generator=generator())
    assert none.times.shape == (3, 0)
    hawkes = Hawkes.univariate(0.2, (0.8,), (1.0,))
    assert hawkes.log_prob(none).survival.tolist() == pytest.approx([-0.2] * 3)


@every_process
def test_the_same_seed_gives_the_same_events(process):
    first, second, other = (process.sample(3, num_events=10, generator=generator(s)) for s in (1, 1, 2))
    assert torch.equal(first.times, second.times)
    assert torch.equal(first.marks, second.marks)
    assert not torch.equal(first.times, other.times)


# What is refused


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Poisson(()), "rates is empty"),
        (lambda: Poisson((0.0,)), "every rate must be .* above 0, not 0.0"),
        (lambda: Hawkes.univariate(0.2, (0.6, 0.5), (1.0, 2.0)), "spectral radius of the branching is 1.100"),
        (lambda: Hawkes.univariate(0.2, (0.6,), (1.0, 2.0)), r"shape \(1, 1, 1\).* need \(2, 1, 1\)"),
        (lambda: Hawkes.univariate(0.2, (-0.6,), (1.0,)), "excite, not inhibit"),
        (lambda: Poisson((1.0,)).sample(1, generator=generator()), "t_end or num_events"),
        (lambda: Poisson((1.0,)).sample(1, t_end=1.0, num_events=2, generator=generator()), "not both"),
        (lambda: Poisson((1.0,)).sample(1, t_end=float("inf"), generator=generator()), "finite time after 0"),
        (lambda: Poisson((1.0,)).sample(0, num_events=2, generator=generator()), "num_sequences must be"),
    ],
)
def test_what_makes_no_process_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_events_that_do_not_fit_the_process_are_refused():
    with pytest.raises(ValueError, match="events have 1 marks, but this process has 3"):
        PROCESSES["multivariate"].log_prob(Events.from_gaps([[1.0]], unit="s"))
    unknown = Events.from_gaps([[1.0]], unit="s", num_marks=3)
    with pytest.raises(ValueError, match="some marks are unknown"):
        PROCESSES["multivariate"].log_prob(unknown)
    two = Events.from_gaps([[1.0]], unit="s", num_marks=2)
    assert PROCESSES["poisson"].log_prob(two).mark.tolist() == [[0.0]], "an unknown mark says nothing"
