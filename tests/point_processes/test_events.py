"""Event sequences: padding, checks at the border, batches."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from constmem.point_processes.events import EventLogProb, Events, bucketed
from tests.laws.models import same_events as same

SEQUENCES = st.lists(st.lists(st.floats(0, 100), min_size=1, max_size=6), min_size=1, max_size=5)


def small(**changes):
    parts = {
        "times": torch.tensor([[1.0, 2.0, 4.0], [3.0, 3.5, 3.5]], dtype=torch.float64),
        "marks": torch.tensor([[0, 2, -1], [1, 0, -1]]),
        "mask": torch.tensor([[True, True, True], [True, True, False]]),
        "t_start": torch.tensor([0.0, 3.0], dtype=torch.float64),
        "t_end": torch.tensor([5.0, 3.5], dtype=torch.float64),
        "unit": "hour",
        "num_marks": 3,
    }
    return Events(**(parts | changes))


# Padding


@given(SEQUENCES)
def test_padding_repeats_the_last_time_and_hides_behind_the_mask(rows):
    rows = [sorted(row) for row in rows]
    marks = [[i % 3 for i in range(len(row))] for row in rows]
    events = Events.from_arrival_times(rows, marks=marks, unit="s", num_marks=3)
    assert len(events) == len(rows)
    assert events.num_events == sum(map(len, rows))
    for k, row in enumerate(rows):
        n = len(row)
        assert events.times[k].tolist() == row + [row[-1]] * (events.times.shape[1] - n)
        assert events.marks[k].tolist() == marks[k] + [-1] * (events.times.shape[1] - n)
        assert events.mask[k].tolist() == [True] * n + [False] * (events.times.shape[1] - n)
        assert events.t_start[k] == row[0]
    assert events.lengths.tolist() == [len(row) for row in rows]
    assert torch.equal(events.scored.sum(-1), events.lengths - 1)
    assert not events.scored[:, 0].any()


@given(SEQUENCES)
def test_gaps_and_arrival_times_tell_the_same(rows):
    events = Events.from_gaps(rows, t_start=[float(k) for k in range(len(rows))], unit="s")
    for k, row in enumerate(rows):
        np.testing.assert_allclose(events.gaps[k, : len(row)], row, atol=1e-9)
        np.testing.assert_allclose(events.times[k, : len(row)], k + np.cumsum(row))
    again = Events.from_arrival_times(
        [t[m] for t, m in zip(events.times, events.mask, strict=True)], t_start=events.t_start, unit="s"
    )
    same(events, again)
    assert (events.gaps[~events.mask] == 0).all()


def test_gaps_keep_a_tenth_of_a_millisecond_after_fifty_years_of_seconds():
    events = Events.from_arrival_times([[1.7e9, 1.7e9 + 1e-4]], unit="second")
    assert events.gaps[0, 1].item() == pytest.approx(1e-4, rel=1e-2)


NANOSECONDS = 1_700_000_000_000_000_000


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_whole_numbers_are_exact_or_refused(kind):
    """Nanoseconds since 1970 are further apart in float64 than some gaps: 100 would become 0 or 256."""
    row = [NANOSECONDS, NANOSECONDS + 100, NANOSECONDS + 300]
    with pytest.raises(
        ValueError, match=rf"times\[0\]\[1\] is {row[1]}, which float64 would round .* row\[0\]"
    ):
        Events.from_arrival_times([kind(row)], unit="nanosecond")
    kept = Events.from_arrival_times([kind([t - row[0] for t in row])], unit="nanosecond")
    assert kept.gaps.tolist() == [[0, 100, 200]]
    with pytest.raises(ValueError, match="would round"):
        Events.from_gaps([kind([0, 100, 200])], t_start=NANOSECONDS, unit="nanosecond")
    exact = [NANOSECONDS, NANOSECONDS + 256]
    assert Events.from_arrival_times([kind(exact)], unit="nanosecond").gaps.tolist() == [[0, 256]]


def test_whole_numbers_too_large_for_int64_are_refused_too():
    for row in ([2**63 + 1, 2**63 + 5], [2**70, 2**70 + 1]):
        with pytest.raises(ValueError, match="would round"):
            Events.from_arrival_times([row], unit="nanosecond")


@pytest.mark.parametrize(
    ("times", "advice"),
    [
        ([["now"]], "seconds since a start"),
        (["time"], "frame.groupby"),
        ([np.array(["2024-01-01"], dtype="datetime64[ns]")], "timedelta64"),
        ([torch.tensor([True])], "boolean"),
    ],
)
def test_what_are_no_numbers_comes_with_advice(times, advice):
    with pytest.raises(TypeError, match=advice):
        Events.from_arrival_times(times, unit="s")


def test_marks_that_are_not_given_are_the_one_kind_or_unknown():
    assert Events.from_arrival_times([[1.0, 2.0]], unit="s").marks.tolist() == [[0, 0]]
    assert Events.from_arrival_times([[1.0, 2.0]], unit="s", num_marks=4).marks.tolist() == [[-1, -1]]


def test_a_single_sequence_wants_to_be_a_list_of_one():
    with pytest.raises(ValueError, match=r"times\[0\] is one number, not a sequence .* \[\[1.0, 2.0\]\]"):
        Events.from_arrival_times([1.0, 2.0], unit="s")


def test_events_say_in_one_line_what_they_are():
    assert repr(small()) == "Events(2 sequences, 5 events, 3 marks, times in 'hour', on cpu)"


def test_a_window_is_watched_from_the_event_before_it():
    events = small()
    first, second = events.window(0, 2), events.window(2, 3)
    assert torch.equal(torch.cat([first.gaps, second.gaps], 1), events.gaps)
    assert torch.equal(torch.cat([first.mask, second.mask], 1), events.mask)
    assert first.t_end is None
    assert torch.equal(second.t_end, events.t_end)


def test_selecting_and_trimming_leave_the_sequences_as_they_were():
    events = small()
    second = events.select([1])
    assert second.times.shape == (1, 3)
    same(
        second.trim(),
        Events.from_arrival_times([[3.0, 3.5]], marks=[[1, 0]], t_end=3.5, unit="hour", num_marks=3),
    )
    same(events.select(torch.tensor([False, True])), second)
    same(events.select(slice(1, 2)), second)
    same(events.select(torch.tensor([0, 1])).trim(), events)
    same(events.to("cpu"), events)


def test_batches_put_together_hold_all_sequences_and_need_one_unit():
    events = small()
    one, two = events.select([0]).trim(), events.select([1]).trim()
    same(Events.cat([one, two]), events)
    same(Events.cat([two, one]).select([1, 0]), events)
    with pytest.raises(ValueError, match=r"differ in unit .'hour', 'second'.*convert"):
        Events.cat([one, small(unit="second")])
    with pytest.raises(ValueError, match="differ in num_marks"):
        Events.cat([one, small(num_marks=4)])
    with pytest.raises(ValueError, match="some batches have a t_end"):
        Events.cat([one, small(t_end=None)])
    with pytest.raises(ValueError, match="at least one"):
        Events.cat([])


def test_a_watch_in_vain_is_a_sequence_if_one_knows_when_it_began():
    events = Events.from_arrival_times([[], [2.0]], t_start=1.0, t_end=3.0, unit="s")
    assert events.times.tolist() == [[1.0], [2.0]]
    assert events.lengths.tolist() == [0, 1]
    assert events.gaps.tolist() == [[0.0], [1.0]]
    assert not events.scored.any()
    empty = Events.from_arrival_times([[]], t_start=1.0, unit="s")
    assert empty.times.shape == (1, 0)
    assert empty.gaps.shape == (1, 0)
    assert empty.trim().times.shape == (1, 0)
    with pytest.raises(ValueError, match=r"sequence 1 has no events.*give t_start="):
        Events.from_arrival_times([[1.0], []], unit="s")
    assert len(Events.from_arrival_times([], unit="s")) == 0


# What is refused


@pytest.mark.parametrize(
    ("times", "options", "message"),
    [
        ([[1.0, 2.0], [1.0, 3.0, 2.5]], {}, r"times of sequence 1 decrease at index 2: 2.5 comes after 3.0"),
        ([[1.0, 2.0]], {"t_start": 1.5}, r"decrease at index 0: 1.0 comes after its t_start, 1.5"),
        ([[1.0], [2.0, float("nan")]], {}, r"times\[1\]\[1\] is nan"),
        ([[1.0, float("inf")]], {}, r"times\[0\]\[1\] is inf"),
        ([[1.0], [2.0]], {"t_start": [1.0, float("nan")]}, "t_start of sequence 1 is nan"),
        ([[1.0], [2.0]], {"t_end": [1.0, 1.5]}, "t_end of sequence 1 is 1.5, before its last event at 2.0"),
        ([[1.0], [2.0]], {"t_end": [1.0, 2.0, 3.0]}, r"t_end has shape \(3,\).* 2 sequences"),
        ([[1.0]], {"unit": ""}, "unit is ''"),
        ([[[1.0]]], {}, r"times\[0\] has shape \(1, 1\)"),
        (
            [[1.0]],
            {"marks": [[3]], "num_marks": 3},
            r"marks\[0, 0\] is 3: marks go from 0 to num_marks - 1 = 2",
        ),
        ([[1.0]], {"marks": [[-2]], "num_marks": 3}, r"marks\[0, 0\] is -2"),
        ([[1.0]], {"marks": [[0.5]], "num_marks": 3}, r"marks\[0\]\[0\] is 0.5: marks are whole"),
        ([[1.0]], {"marks": [[0, 1]], "num_marks": 3}, "sequence 0 has 1 times but 2 marks"),
        ([[1.0]], {"marks": [], "num_marks": 3}, "marks for 0 sequences, but times for 1"),
        ([[1.0]], {"marks": [[6]]}, "num_marks is needed beside marks.* 7 or more"),
        ([[1.0]], {"num_marks": 0}, "num_marks must be a whole number of at least 1"),
    ],
)
def test_what_is_wrong_is_named_by_sequence_and_index(times, options, message):
    with pytest.raises(ValueError, match=message):
        Events.from_arrival_times(times, **({"unit": "s"} | options))


def test_a_negative_gap_is_named_by_sequence_and_index():
    with pytest.raises(ValueError, match=r"gaps\[1\]\[2\] is -0.5: .*negative"):
        Events.from_gaps([[1.0], [1.0, 2.0, -0.5]], unit="s")


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"times": torch.ones(2, 3)}, TypeError, "times is torch.float32, but torch.float64"),
        ({"marks": torch.ones(2, 2, dtype=torch.long)}, ValueError, r"marks has shape \(2, 2\)"),
        ({"mask": torch.tensor([[True, False, True]] * 2)}, ValueError, "sequence 0 has padding at index 1"),
        ({"marks": torch.tensor([[0, 2, -1], [1, 0, 0]])}, ValueError, r"marks\[1, 2\] is 0, but is padding"),
        (
            {"times": torch.tensor([[1.0, 2.0, 4.0], [3.0, 3.5, 3.6]], dtype=torch.float64), "t_end": None},
            ValueError,
            "padding must repeat the last real time",
        ),
    ],
)
def test_a_batch_that_is_not_as_described_is_refused(refuses, changes, kind, message):
    with refuses(kind, message):
        small(**changes)


# Log-probabilities and batches


def test_the_mean_log_probability_is_over_scored_events_alone():
    scored = torch.tensor([[False, True, True], [False, True, False]])
    time, mark = torch.tensor([[9.0, 1.0, 2.0], [9.0, 3.0, 9.0]]), torch.ones(2, 3)
    assert EventLogProb(time, mark, None, scored).mean.item() == pytest.approx(3.0)
    assert EventLogProb(time, mark, None, torch.zeros_like(scored)).mean.item() == 0


def test_bucketed_batches_hold_every_sequence_once_with_little_padding():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 200, (300,), generator=generator).tolist()
    events = Events.from_arrival_times(
        [[k + i / 1000 for i in range(n)] for k, n in enumerate(lengths)], unit="s"
    )
    seen, cells, widths = [], 0, []
    for batch in bucketed(events, 16, generator):
        assert len(batch) <= 16
        assert batch.times.shape[1] == batch.lengths.max()
        seen += batch.t_start.int().tolist()
        widths.append(batch.times.shape[1])
        cells += batch.times.numel()
        for k, n in zip(batch.t_start.int().tolist(), batch.lengths.tolist(), strict=True):
            assert lengths[k] == n
    assert sorted(seen) == list(range(300))
    assert cells < 1.2 * sum(lengths), "random batches would take twice as many cells"
    assert widths != sorted(widths), "short and long batches come mixed"
    again = [b.t_start.tolist() for b in bucketed(events, 16, torch.Generator().manual_seed(1))]
    assert again == [b.t_start.tolist() for b in bucketed(events, 16, torch.Generator().manual_seed(1))]
    assert again != [b.t_start.tolist() for b in bucketed(events, 16, torch.Generator().manual_seed(2))]


@pytest.mark.parametrize("start", [1_700_000_000_000_000_000, 1.7e18])
def test_gaps_that_a_late_start_would_round_away_are_refused(start: float) -> None:
    with pytest.raises(ValueError, match=r"gaps\[0\]\[2\] is 100.0, but 256.0 at .* t_start nearer to 0"):
        Events.from_gaps([[0.0, 100.5, 100.0]], t_start=start, unit="ns")
    assert Events.from_gaps([[0.0, 100.5]], t_start=1e9, unit="ns").gaps.tolist() == [[0.0, 100.5]]
