"""Scores of event models, on one whose answers are known: a log-normal renewal process with drawn marks."""

from dataclasses import dataclass
from math import exp, log, pi, sqrt

import numpy as np
import pytest
import torch
from torch.distributions import LogNormal

from constmem.data import EventLogProb, Events, Hawkes
from constmem.evaluation.events import (
    EventScores,
    evaluate_events,
    ks_p_value,
    ks_statistic,
    mark_confusion,
    rescaled_times,
)
from tests.evaluation.renewal import Renewal

stats = pytest.importorskip("scipy.stats")
MARKS = (0.5, 0.3, 0.1, 0.05, 0.03, 0.02)


class Gap(LogNormal):
    """A log-normal distribution with what the scores ask of one."""

    median = property(lambda self: self.loc.exp())

    def log_survival(self, value):
        return torch.special.log_ndtr((self.loc - value.log()) / self.scale)


@dataclass
class Prediction:
    gap: Gap
    marks: torch.Tensor

    def mark_logits(self, gap=None):
        if gap is None:
            return self.marks
        return torch.where(gap[..., None] > 1, self.marks.flip(-1), self.marks)  # late ones are the rare ones


class LogNormalRenewal:
    """log gap ~ N(loc, scale²); marks by `MARKS`, or by their reverse after gaps above 1."""

    def __init__(self, loc=-0.5, scale=0.8, given_gap=False):
        self.process, self.given_gap = Renewal(loc, scale), given_gap
        self.training, self.seen, self.longest = True, 0, 0

    def eval(self):
        self.training = False

    def condition(self, events, *, initial=None):
        return (initial or 0) + events.num_events

    def forecast(self, events, *, initial=None):  # noqa: ARG002
        shape = events.times.shape
        self.longest = max(self.longest, events.times.numel())
        loc, scale = (torch.full(shape, x, dtype=torch.float64) for x in (self.process.a, self.process.b))
        gap = Gap(loc, scale, validate_args=False)
        return Prediction(gap, torch.tensor(MARKS).log().expand(*shape, -1))

    def log_prob(self, events, *, initial=None):
        assert not self.training
        unmarked = Events(
            events.times, events.marks.clamp_max(0), events.mask, events.t_start, events.t_end, events.unit, 1
        )
        known = self.process.log_prob(unmarked)
        logits = self.forecast(events).mark_logits(events.gaps if self.given_gap else None)
        mark = logits.gather(-1, events.marks.clamp_min(0)[..., None]).squeeze(-1)
        mark = torch.where(events.marks >= 0, mark, 0.0)
        scored = events.scored | (events.mask & bool(initial))
        return EventLogProb(known.time, mark, known.survival, scored)


def marked(count=30, length=40, seed=0, t_end=None):
    """Sequences of uneven lengths that the renewal process is true for."""
    generator = torch.Generator().manual_seed(seed)
    process = Renewal(-0.5, 0.8)
    lengths = torch.randint(2, length, (count,), generator=generator).tolist()
    plain = process.sample(count, num_events=length, generator=generator)
    marks = torch.multinomial(torch.tensor(MARKS), count * length, True, generator=generator)
    times = [plain.times[k, :n] for k, n in enumerate(lengths)]
    kinds = [marks.reshape(count, length)[k, :n] for k, n in enumerate(lengths)]
    return Events.from_arrival_times(times, marks=kinds, t_end=t_end, unit="hour", num_marks=6)


def tiny():
    return Events.from_gaps(
        [[9.0, 0.5, 2.0], [9.0, 1.0]], marks=[[0, 0, 5], [1, 2]], t_end=[12.5, 10.0], unit="hour", num_marks=6
    )


def test_scores_are_what_a_pencil_gives():
    scores = evaluate_events(LogNormalRenewal(0.0, 1.0), tiny())
    gaps = [0.5, 2.0, 1.0]
    nll = sum(log(g) ** 2 / 2 + log(g * sqrt(2 * pi)) for g in gaps) / 3
    assert scores.time_nll == pytest.approx(nll)
    assert scores.mark_nll == pytest.approx(-(log(0.5) + log(0.02) + log(0.1)) / 3)
    assert scores.nll == pytest.approx(scores.time_nll + scores.mark_nll)
    assert scores.rmse == pytest.approx(sqrt(sum((g - exp(0.5)) ** 2 for g in gaps) / 3))
    assert scores.mae == pytest.approx(sum(abs(g - exp(0.5)) for g in gaps) / 3)
    assert scores.rmse_median == pytest.approx(sqrt(sum((g - 1) ** 2 for g in gaps) / 3))
    assert scores.mae_median == pytest.approx(sum(abs(g - 1) for g in gaps) / 3)
    assert (scores.accuracy, scores.error) == pytest.approx((1 / 3, 2 / 3))
    assert scores.top5 == pytest.approx(2 / 3)
    assert scores.accuracy_given_gap == pytest.approx(2 / 3), "after a gap of 2 the likeliest mark is 5"
    assert scores.top5_given_gap == 1
    silence = -(stats.lognorm.logsf(1.0, 1.0) + stats.lognorm.logsf(0.0, 1.0)) / 2
    assert scores.survival_nll == pytest.approx(silence)
    assert (scores.events, scores.sequences, scores.unit) == (3, 2, "hour")
    assert scores.coverage == {"0.5": 1 / 3, "0.8": 1.0, "0.9": 1.0, "0.95": 1.0}
    without = evaluate_events(LogNormalRenewal(0.0, 1.0), marked(2))
    assert without.survival_nll is None


def test_how_many_positions_are_handled_at_once_changes_no_score_and_bounds_the_work():
    events = marked(30, 60, t_end=1e3)
    whole = LogNormalRenewal()
    wanted = evaluate_events(whole, events)
    assert whole.longest > 500
    for positions in (100, 64, 17, 5):  # the last ones are shorter than most sequences
        model = LogNormalRenewal()
        found = evaluate_events(model, events, positions=positions)
        assert model.longest <= positions
        for name, value in vars(wanted).items():
            if name == "coverage":
                assert vars(found)[name] == value
            else:
                assert vars(found)[name] == (value if isinstance(value, str) else pytest.approx(value)), name
    torch.testing.assert_close(
        rescaled_times(whole, events).sort().values,
        rescaled_times(whole, events, positions=7).sort().values,
    )


def test_padding_and_first_events_do_not_count():
    events = marked(20)
    single = [evaluate_events(LogNormalRenewal(), events.select([k]).trim()) for k in range(20)]
    whole = evaluate_events(LogNormalRenewal(), events)
    assert whole.events == sum(s.events for s in single) == int(events.lengths.sum()) - 20
    for name in ("nll", "mae", "accuracy", "top5"):
        mean = sum(getattr(s, name) * s.events for s in single) / whole.events
        assert getattr(whole, name) == pytest.approx(mean), name


def test_unknown_marks_add_nothing_to_the_nll_and_are_left_out_of_the_accuracy():
    events = tiny()
    marks = events.marks.clone()
    marks[0, 2] = -1
    some = Events(events.times, marks, events.mask, events.t_start, events.t_end, "hour", 6)
    scores = evaluate_events(LogNormalRenewal(0.0, 1.0), some)
    assert scores.mark_nll == pytest.approx(-(log(0.5) + log(0.1)) / 3)
    assert (scores.accuracy, scores.events) == (0.5, 3)
    none = Events.from_gaps([[1.0, 2.0]], unit="hour", num_marks=6)
    assert np.isnan(evaluate_events(LogNormalRenewal(), none).accuracy)


def test_nothing_to_score_is_an_error():
    alone = Events.from_arrival_times([[1.0], [2.0]], unit="hour", num_marks=6)
    with pytest.raises(ValueError, match="no sequence has a second event"):
        evaluate_events(LogNormalRenewal(), alone)
    with pytest.raises(ValueError, match="positions must be"):
        evaluate_events(LogNormalRenewal(), tiny(), positions=0)


def test_no_graph_is_kept_while_scoring():
    class Watched(LogNormalRenewal):
        def forecast(self, events, **more):
            assert not torch.is_grad_enabled()
            return super().forecast(events, **more)

    evaluate_events(Watched(), tiny())
    rescaled_times(Watched(), tiny())


# Goodness of fit


def test_the_true_model_is_not_rejected_and_covers_what_it_says():
    events = marked(200, 60, seed=1)
    scores = evaluate_events(LogNormalRenewal(), events)
    assert scores.events > 5000
    assert scores.ks_p_value > 0.01
    for level, share in scores.coverage.items():
        assert share == pytest.approx(float(level), abs=0.02)


@pytest.mark.parametrize("wrong", [LogNormalRenewal(-0.4, 0.8), LogNormalRenewal(-0.5, 0.9)])
def test_a_model_that_is_a_little_off_is_rejected(wrong):
    scores = evaluate_events(wrong, marked(200, 60, seed=1))
    assert scores.ks_p_value < 1e-3
    assert scores.time_nll > evaluate_events(LogNormalRenewal(), marked(200, 60, seed=1)).time_nll


def test_rescaled_times_are_those_of_the_true_process():
    events = marked(10)
    found = rescaled_times(LogNormalRenewal(), events).sort().values
    unmarked = Events(events.times, events.marks.clamp_max(0), events.mask, events.t_start, None, "hour", 1)
    spent = Renewal(-0.5, 0.8).compensator(unmarked)
    torch.testing.assert_close(found, spent[events.scored].sort().values)


@pytest.mark.parametrize("n", [5, 80, 4000])
def test_the_ks_statistic_and_its_p_value_are_those_of_scipy(n):
    for seed in range(4):
        sample = torch.empty(n, dtype=torch.float64).exponential_(
            generator=torch.Generator().manual_seed(seed)
        )
        wanted = stats.kstest((sample * (1 + 0.02 * seed)).numpy(), "expon")
        found = ks_statistic(sample * (1 + 0.02 * seed))
        assert found == pytest.approx(wanted.statistic, abs=1e-12)
        assert ks_p_value(found, n) == pytest.approx(wanted.pvalue, abs=0.15 / sqrt(n))


def test_the_two_series_of_kolmogorov_meet():
    n = 10**6
    stretch = sqrt(n) + 0.12 + 0.11 / sqrt(n)
    for x in (0.1, 0.19, 0.21, 0.5, 1.19, 1.2, 1.21, 2.0):
        assert ks_p_value(x / stretch, n) == pytest.approx(stats.kstwobign.sf(x), abs=1e-9)
    assert np.isnan(ks_p_value(ks_statistic(torch.zeros(0, dtype=torch.float64)), 0))


# Marks


def test_confusion_counts_the_commonest_true_marks_against_the_likeliest():
    events = marked(50, 60)
    true = events.marks[events.scored]
    shown, counts = mark_confusion(LogNormalRenewal(), events, commonest=3)
    assert shown.tolist() == [0, 1, 2]
    assert counts.shape == (3, 4)
    assert counts[:, 0].tolist() == [int((true == mark).sum()) for mark in range(3)], "0 is always predicted"
    assert counts[:, 1:].sum() == 0
    shown, counts = mark_confusion(LogNormalRenewal(), events, commonest=99, positions=10)
    assert len(shown) == 6
    assert counts.sum() == len(true)


def test_scores_are_plain_numbers_that_json_can_hold():
    import json

    scores = evaluate_events(LogNormalRenewal(), tiny())
    assert json.loads(json.dumps(vars(scores))) == vars(scores)
    assert isinstance(scores, EventScores)


def test_a_hawkes_process_is_rejected_by_the_renewal_model():
    plain = Hawkes.univariate(0.2, (0.8,), (1.0,)).sample(
        20, num_events=100, generator=torch.Generator().manual_seed(0)
    )
    events = Events(plain.times, plain.marks, plain.mask, plain.t_start, None, "unit", 6)
    assert evaluate_events(LogNormalRenewal(), events).ks_p_value < 1e-6


# Long horizons
