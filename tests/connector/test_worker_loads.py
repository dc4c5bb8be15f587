"""Loads on one rank: what a step's end must know, and readers that do not wait."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lamella.connector.step_orders import StepOrders
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
