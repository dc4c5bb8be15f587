"""What a rank measures of steps and of loads."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import count
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_driver import ENGINE_MISSING, WAIT_S, SmallCache, retrieve, small_engine
from lamella.connector.connector_metrics import Metrics
from lamella.connector.observations import HostMarks, Observations, Readers
from lamella.connector.safety_rules import ALL_RULES
from lamella.connector.step_orders import LoadOrder, Observed, StepOrders, StepReport
from lamella.connector.worker_loads import WorkerLoads
from lamella.cuda_ext.arrival import HostFence
from lamella.reference.release import Whole

READS_S = 0.1


def step(expected_ns: int = 100) -> StepOrders:
    return StepOrders(num_tokens=1, num_decoding=1, expected_ns=expected_ns)


class Marks:
    """Marks at instants that the test names; those beyond `come` have not come."""

    def __init__(self) -> None:
        self.now = 0
        self.come = 10**9

    def mark(self) -> int:
        return self.now

    def between_ns(self, begin: int, end: int) -> int | None:
        return end - begin if end <= self.come else None

    def reached(self, mark: int) -> bool:
        return mark <= self.come

    def all_computed(self) -> bool:
        return self.now <= self.come


def test_a_step_is_measured_until_its_layers_are_through() -> None:
    marks = Marks()
    seen = Observations(marks)
    seen.step_begins(step(), waits=False)
    marks.now = 70
    seen.step_computed()
    marks.now = 200  # the host hands a prompt over meanwhile
    seen.step_begins(step(), waits=False)
    marks.now = 260
    seen.step_computed()
    marks.now = 1_000
    seen.step_begins(step(expected_ns=0), waits=False)
    seen.step_computed()
    assert seen.take() == Observed(steps=2, step_expected_ns=200, step_ns=130)


def test_a_step_that_waited_for_a_load_says_nothing_of_computing() -> None:
    seen = Observations(HostMarks())
    for orders, waits in ((step(), True), (step(expected_ns=0), False), (StepOrders(num_tokens=1), False)):
        seen.step_begins(orders, waits=waits)
        seen.step_computed()
    assert seen.take() == Observed()


def test_a_step_that_computed_nothing_leaves_no_mark_for_the_next() -> None:
    marks = Marks()
    seen = Observations(marks)
    seen.step_begins(step(), waits=False)  # and its forward pass never came
    seen.step_begins(step(), waits=True)
    marks.now = 70
    seen.step_computed()
    assert seen.take() == Observed()


def test_what_the_device_has_not_reached_is_told_later() -> None:
    marks = Marks()
    seen = Observations(marks)
    seen.step_begins(step(), waits=False)
    marks.now, marks.come = 50, 10
    seen.step_computed()
    assert seen.take() == Observed()
    marks.come = 50
    assert seen.take().step_ns == 50


def test_a_load_had_the_link_from_its_first_landing_or_from_the_landing_of_the_one_before() -> None:
    seen = Observations(HostMarks())
    seen.load_landed((100, 100, 300), 0, (1_000, 1_100, 1_400), Readers())  # stood behind whoever read its blocks
    assert seen.take() == Observed(loads=1, slices=2, load_bytes=400, load_ns=400)
    seen.load_landed((100, 100), 1_200, (1_300, 1_500), Readers())
    assert seen.take() == Observed(loads=1, slices=1, load_bytes=100, load_ns=100)
    seen.load_landed((100, 100), 1_200, (1_250, 1_450), Readers())  # told late: its time is in the others'
    assert seen.take() == Observed()


def test_a_load_of_one_slice_had_the_link_from_its_begin_if_it_waited_for_no_reader() -> None:
    seen = Observations(HostMarks())
    seen.load_landed((1_000,), 100, (200,), Readers(gone_ns=0))
    seen.load_landed((1_000,), 210, (290,), Readers())  # and nobody says when they were gone
    seen.load_landed((1_000,), 150, (400,), Readers(gone_ns=0))
    assert seen.take() == Observed(loads=2, slices=2, load_bytes=2_000, load_ns=210)


class Looks(NamedTuple):
    """A load in one slice: ordered behind readers, which a look found gone, and landed; instants in ns."""

    started_ns: int
    gone_ns: int | None
    landed_ns: int


def bounds(seen: Observations, load: Looks) -> Observed:
    """What is reported of the load, behind a device that computes."""
    readers = Readers(Marks(), 0, load.gone_ns)
    seen.load_landed((1_000,), load.started_ns, (load.landed_ns,), readers)
    return seen.take()


def test_a_load_of_one_slice_behind_readers_took_no_longer_than_it_was_there_and_no_less_than_without_them() -> None:
    seen = Observations(Marks())
    assert bounds(seen, Looks(100, None, 200)) == Observed(bounded=1, bounded_bytes=1_000, least_ns=0, most_ns=100)
    assert bounds(seen, Looks(300, 350, 400)) == Observed(bounded=1, bounded_bytes=1_000, least_ns=50, most_ns=100)
    assert bounds(seen, Looks(300, 390, 500)) == Observed(bounded=1, bounded_bytes=1_000, least_ns=100, most_ns=100)
    assert bounds(seen, Looks(600, 900, 800)) == Observed(bounded=1, bounded_bytes=1_000, least_ns=0, most_ns=200)
    assert bounds(seen, Looks(900, 850, 950)) == Observed(loads=1, slices=1, load_bytes=1_000, load_ns=50)
    assert bounds(seen, Looks(900, 990, 940)) == Observed()  # told late: its time is in the other's


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300), st.integers(1, 300)), min_size=1, max_size=12),
    st.integers(1, 90),
)
def test_bounds_of_loads_behind_readers_hold_what_the_link_takes(loads: list[tuple[int, int, int]], often: int) -> None:
    """One slice after another on one link, each ordered while a step computes, and a look every so many ns."""
    seen, now = Observations(Marks()), 0
    free_ns = 0
    for after, reads, takes in loads:
        now += after
        free_ns = max(now + reads, free_ns) + takes
        gone_ns = next(look for look in count(now, often) if look >= now + reads)
        observed = bounds(seen, Looks(now, gone_ns if gone_ns <= free_ns else None, free_ns))
        assert observed.loads + observed.bounded == 1
        if observed.loads:
            assert observed.load_ns == takes
        else:
            assert observed.least_ns <= takes <= observed.most_ns
            assert observed.most_ns - observed.least_ns <= reads + often


class Reader:
    """Reads blocks behind a closed fence, or reads none."""

    def __init__(self, *, reads: bool) -> None:
        self.fence = HostFence()
        self.reads = True
        if not reads:
            self.end()

    def end(self) -> None:
        self.fence.open()
        self.reads = False

    def mark(self) -> int:
        return 0

    def between_ns(self, begin: int, end: int) -> int:
        return 0

    def reached(self, mark: int) -> bool:
        return not self.reads

    def all_computed(self) -> bool:
        return not self.reads


def observed_behind(reader: Reader, width: int, *, sees_landings: bool) -> Observed:
    """What a rank observes of one load of six layers that an engine moves behind whoever reads its blocks."""
    small, seen = SmallCache(), Observations(reader, sees_landings=sees_landings)
    with small_engine(small) as (engine, cache):
        loads = WorkerLoads(
            lambda order: lambda: retrieve(engine, cache, small, order.num_tokens, width=width, fence=reader.fence),
            6, Whole(), 4, small.geometry.token_bytes, WAIT_S, lambda: 0, ALL_RULES, Metrics(), observer=seen,
        )  # fmt: skip
        loads.begin_step(StepOrders(loads=(LoadOrder(0, "r", (0,), 0, ((*range(1, 17),),), 64, 0, False),)))
        time.sleep(READS_S)
        reader.end()
        deadline = time.monotonic() + WAIT_S
        while loads.num_open and time.monotonic() < deadline:
            loads.poll()
    return seen.take()


@pytest.mark.skipif(ENGINE_MISSING is not None, reason=str(ENGINE_MISSING))
@pytest.mark.parametrize("width", [1, 4, 6])
@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("sees_landings", [True, False])
def test_what_a_load_waited_for_readers_of_its_blocks_is_no_time_of_the_link(
    width: int, reads: bool, sees_landings: bool
) -> None:
    observed = observed_behind(Reader(reads=reads), width, sees_landings=sees_landings)
    assert observed.load_ns < READS_S * 1e9 / 2
    if width == 6:
        says = sees_landings and not reads
        assert (observed.loads, observed.slices, observed.load_bytes) == ((1, 1, 64 * 384) if says else (0, 0, 0))
        assert (observed.bounded, observed.bounded_bytes) == ((1, 64 * 384) if sees_landings and reads else (0, 0))
        assert observed.least_ns < READS_S * 1e9 / 2
        assert observed.most_ns >= READS_S * 1e9 / 2 * observed.bounded
    else:
        assert observed.load_bytes <= 64 * 384 * (6 - width) // 6


def test_of_several_ranks_the_slowest_counts() -> None:
    fast = Observed().with_load(4, 100, 10).with_bounded_load(100, 5, 20).with_step(50, 40)
    slow = Observed().with_load(4, 100, 30).with_bounded_load(100, 15, 40).with_step(50, 90)
    tighter = replace(slow, least_ns=2)
    assert fast.merged(tighter) == tighter.merged(fast) == replace(slow, least_ns=5)  # each is no less than it says
    assert Observed().merged(slow) == slow
    for merged in (fast.merged(slow), slow.merged(fast)):
        assert merged == slow
    assert StepReport(observed=fast).merged(StepReport(observed=slow)).observed == slow
    assert not StepReport(observed=fast).is_empty
