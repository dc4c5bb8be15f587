"""Free slots as runs: fewest runs, all or nothing, neighbours always merged."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella.cuda_ext.extents import Run, SlotExtents


def _extents(*runs: tuple[int, int]) -> SlotExtents:
    extents = SlotExtents()
    for first, count in runs:
        extents.release(first, count)
    return extents


def test_an_empty_pool_gives_consecutive_slots() -> None:
    assert _extents((0, 100)).take(32) == (Run(0, 32),)


def test_the_smallest_run_that_suffices_is_taken_so_that_long_ones_stay_long() -> None:
    extents = _extents((0, 10), (20, 4), (30, 6))
    assert extents.take(5) == (Run(30, 5),)
    assert extents.runs() == (Run(0, 10), Run(20, 4), Run(35, 1))


def test_where_no_run_suffices_the_longest_come_first_and_the_rest_fits_best() -> None:
    extents = _extents((0, 5), (10, 4), (20, 2), (30, 1))
    assert extents.take(7) == (Run(0, 5), Run(20, 2))


@pytest.mark.known_fault(41)
def test_too_few_free_slots_give_none_and_take_none() -> None:
    extents = _extents((0, 3), (10, 3))
    assert extents.take(7) is None
    assert extents.runs() == (Run(0, 3), Run(10, 3))


def test_a_growing_prefix_continues_behind_its_last_slot_where_that_is_free() -> None:
    extents = _extents((0, 2), (10, 20))
    assert extents.take(2, after=14) == (Run(0, 2),), "slot 15 is inside a run, not its start"
    extents = _extents((0, 2), (15, 20))
    assert extents.take(2, after=14) == (Run(15, 2),), "best fit would have torn the prefix"


def test_freed_neighbours_become_one_run() -> None:
    extents = _extents((0, 3), (6, 3))
    extents.release(3, 3)
    assert extents.runs() == (Run(0, 9),)


@pytest.mark.parametrize("again", [(0, 1), (2, 1), (1, 5), (4, 2), (5, 5)])
def test_a_slot_released_twice_is_an_error(again: tuple[int, int]) -> None:
    extents = _extents((0, 3), (5, 3))
    before = extents.runs()
    with pytest.raises(RuntimeError, match="released twice"):
        extents.release(*again)
    assert extents.runs() == before


def test_bad_sizes_are_refused_with_their_value() -> None:
    with pytest.raises(ValueError, match="count must be at least 1, got 0"):
        _extents((0, 3)).take(0)
    with pytest.raises(ValueError, match="first -1, count 2"):
        _extents((-1, 2))


def _fewest_runs(lengths: list[int], wanted: int) -> int:
    """By exhaustion over how many: the longest n runs hold `wanted` for no smaller n."""
    return next(n for n in range(1, len(lengths) + 1) if sum(sorted(lengths)[-n:]) >= wanted)


@given(
    slots=st.sets(st.integers(0, 60), min_size=1),
    wanted=st.integers(1, 61),
    order=st.randoms(use_true_random=False),
)
def test_any_set_of_free_slots_is_taken_in_the_fewest_runs(slots: set[int], wanted: int, order: object) -> None:
    extents = SlotExtents()
    arrival = sorted(slots)
    order.shuffle(arrival)  # type: ignore[attr-defined]
    for slot in arrival:
        extents.release(slot)
    lengths = [run.num_slots for run in extents.runs()]
    assert {slot for run in extents.runs() for slot in range(run.first, run.first + run.num_slots)} == slots
    taken = extents.take(wanted)
    if wanted > len(slots):
        assert taken is None
        return
    assert taken is not None
    got = [slot for run in taken for slot in range(run.first, run.first + run.num_slots)]
    assert len(got) == len(set(got)) == wanted
    assert set(got) <= slots
    assert len(taken) == _fewest_runs(lengths, wanted)
    left = extents.runs()
    assert sum(run.num_slots for run in left) == len(extents) == len(slots) - wanted
    assert all(a.first + a.num_slots < b.first for a, b in itertools.pairwise(left)), "POOL-5"
