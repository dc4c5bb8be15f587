"""Loads on one rank: what a step's end must know, and readers that do not wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from lamella.connector.step_orders import LoadOrder, StepOrders
from lamella.cuda_ext.transfer import TransferState
from rank_loads import LAYERS, READS_IT, TABLE, Moving, Rank


def test_a_copy_that_fails_behind_enqueued_waits_is_reported_in_the_step_that_read_it() -> None:
    """Hooks enqueue their waits on a GPU, and return before the layer is there."""
    rank = Rank()
    rank.load(Moving(ends=TransferState.FAILED))
    assert rank.step(READS_IT, replays=False, hooked=True) == set(TABLE)


def test_without_a_look_at_the_end_the_failure_is_reported_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank()
    monkeypatch.setattr(rank.loads, "settle", lambda: None)
    rank.load(Moving(ends=TransferState.FAILED))
    assert rank.step(READS_IT, replays=False, hooked=True) == set()


@pytest.mark.parametrize("hooked", [(0, 1, 2), (0, 2, 3), (1, 2, 3), ()], ids=str)
@pytest.mark.known_fault(19, 20)
def test_one_layer_whose_reader_does_not_wait_fails_the_load_and_later_releases_are_whole(
    hooked: Sequence[int],
) -> None:
    """A pool beside attention, as an indexer's, is a layer of the cache that no attention's hook guards."""
    rank = Rank()
    rank.load()
    assert rank.step(READS_IT, hooked=hooked) == set(TABLE)
    assert rank.loads.hooks_bypassed
    later = rank.load_of(Moving())
    assert rank.loads.poll().received == set()  # three of four layers to come: not released any more
    assert not later.reported


def test_where_a_reader_does_not_wait_a_step_with_a_load_of_its_own_begins_when_all_has_landed() -> None:
    rank = Rank()
    rank.load()
    rank.step(READS_IT, hooked=())
    load = rank.load_of(Moving(), joins_step=True)
    rank.loads.wait_whole()
    assert load.waited_whole
    rank.loads.settle()
    rank.loads.poll()
    assert rank.loads.errors() == set()


def test_every_layer_hooked_is_nothing_to_report() -> None:
    rank = Rank()
    rank.load()
    assert rank.step(READS_IT, hooked=range(LAYERS)) == set()
    assert not rank.loads.hooks_bypassed


@pytest.mark.parametrize(
    ("orders", "waits"),
    [
        (StepOrders(num_tokens=1, held_is_known=True), False),
        (StepOrders(num_tokens=1, held_blocks=frozenset({9}), held_is_known=True), False),
        (StepOrders(num_tokens=1, held_blocks=frozenset({TABLE[1], 9}), held_is_known=True), True),
        (StepOrders(num_tokens=1), True),
    ],
    ids=["a batch without its blocks", "another load's reader", "a sharer of one block", "an engine that does not say"],
)
def test_a_released_load_holds_back_the_steps_that_may_read_it_and_no_others(orders: StepOrders, waits: bool) -> None:
    rank = Rank()
    load = rank.load_of(Moving())
    assert rank.loads.poll().received
    rank.loads.begin_step(orders)
    assert rank.loads.gated == ([load] if waits else [])


# ---------------------------------------------------------------- let run by the scheduler side


LETS_RUN = StepOrders(num_tokens=1, num_decoding=1, held_blocks=frozenset(TABLE), held_is_known=True, released=(0,))


def test_who_is_let_run_is_waited_for_from_that_step_on_and_reported_once_all_the_same() -> None:
    rank = Rank()
    load = rank.load_of(Moving(landed=0))
    assert rank.loads.poll().received == set()
    rank.loads.begin_step(replace(LETS_RUN, released=()))
    assert rank.loads.gated == []
    rank.loads.begin_step(LETS_RUN)
    assert rank.loads.gated == [load]
    rank.loads.wait_whole()
    assert [rank.loads.poll().received for _ in range(3)] == [{"r0"}, set(), set()]
    rank.loads.begin_step(replace(LETS_RUN, released=()))
    assert rank.loads.gated == [load]
    assert (rank.metrics.total("released_early"), rank.metrics.total("errors_reported")) == (1, 0)


def test_a_load_that_comes_with_its_own_release_is_waited_for() -> None:
    rank = Rank()
    rank.moving.append(Moving(landed=0))
    order = LoadOrder(0, "r0", (0, 1), 0, (TABLE,), 32, 0, False)
    rank.loads.begin_step(replace(LETS_RUN, loads=(order,)))
    assert [load.order for load in rank.loads.gated] == [order]
    assert rank.loads.poll().received == {"r0"}


@pytest.mark.parametrize("ends", [False, True], ids=["still landing", "all landed"])
def test_a_release_of_what_a_look_has_reported_changes_nothing(ends: bool) -> None:
    rank = Rank()
    moving = rank.load(Moving())
    if ends:
        moving.land(LAYERS)
        assert rank.loads.poll().ended
    rank.loads.begin_step(LETS_RUN)
    assert len(rank.loads.gated) == int(not ends)
    assert rank.loads.poll().received == set()
    assert rank.metrics.total("released_early") == 1


def test_a_load_that_has_landed_unseen_is_let_run_without_counting_as_early_and_ends() -> None:
    rank = Rank()
    rank.load_of(Moving(landed=0)).transfer.land(LAYERS)  # type: ignore[union-attr]
    rank.loads.begin_step(LETS_RUN)
    assert rank.loads.gated == []
    found = rank.loads.poll()
    assert (found.received, [*found.ended]) == ({"r0"}, [0])
    assert rank.metrics.total("released_early") == 0


def test_a_load_that_failed_before_its_rank_knew_of_the_release_is_reported_in_every_step_that_holds_it() -> None:
    rank = Rank()
    moving = Moving(landed=0, ends=TransferState.FAILED)
    rank.load_of(moving)
    moving.fail()
    found = rank.loads.poll()
    assert (found.received, found.ended[0].ok) == ({"r0"}, False)
    assert rank.loads.errors() == set(TABLE)  # of a parked request, as far as this rank knows
    rank.loads.begin_step(LETS_RUN)
    assert rank.loads.errors() == set(TABLE)
    assert rank.loads.poll().received == set()
    rank.loads.begin_step(StepOrders(held_is_known=True))
    assert rank.loads.errors() == set()


def test_a_failed_load_that_has_not_drained_is_reported_once_it_was_let_run() -> None:
    """Else the ranks' reports of this name would never be even."""
    rank = Rank()
    load = rank.load_of(Moving(landed=0, ends=TransferState.RUNNING))
    load.failed = "the copy was lost"
    assert rank.loads.poll().received == set()
    rank.loads.begin_step(LETS_RUN)
    found = rank.loads.poll()
    assert (found.received, found.ended) == ({"r0"}, {})
    assert rank.metrics.total("released_early") == 0
    assert "release_ns" not in rank.metrics.take()  # nobody waited until it was right


def test_loads_that_join_a_step_may_begin_ahead_of_it_and_begin_once_and_the_step_waits_for_them() -> None:
    rank = Rank()
    rank.moving += [Moving(), Moving()]
    joins, parks = (
        LoadOrder(number, f"r{number}", (0, 1), 0, (TABLE,), 32, 0, joins_step)
        for number, joins_step in ((0, True), (1, False))
    )
    orders = replace(READS_IT, loads=(parks, joins))
    rank.loads.begin(joins, 0)
    begun = rank.loads.find(0)
    assert begun is not None
    rank.loads.begin_step(orders)
    assert rank.loads.find(0) is begun
    assert rank.loads.find(1) is not None
    assert rank.loads.gated == [begun]


def test_a_load_that_began_ahead_of_its_step_and_failed_there_is_reported_in_it() -> None:
    rank = Rank()
    rank.moving.append(Moving(ends=TransferState.FAILED))
    order = LoadOrder(0, "r0", (0, 1), 0, (TABLE,), 32, 0, joins_step=True)
    rank.loads.begin(order, 0)
    rank.moving[0].fail()
    assert rank.step(replace(READS_IT, loads=(order,)), hooked=True) == set(TABLE)
