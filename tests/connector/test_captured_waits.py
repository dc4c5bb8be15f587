"""Waits inside captured graphs, as the worker decides on them: what is gated, what a replay may rely on, what fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from engine_driver import ENGINE_MISSING, WAIT_S, SmallCache, retrieve, small_engine
from lamella.connector.captured_waits import CapturedWaits
from lamella.connector.connector_metrics import Metrics
from lamella.connector.step_orders import StepOrders
from lamella.cuda_ext.transfer import TransferState
from lamella.reference.plan import Direction
from rank_loads import LAYERS, READS_IT, TABLE, Moving, Rank


def test_every_layer_of_every_graph_waits_for_its_own_word_on_the_stream_being_captured() -> None:
    rank = Rank(captured=lambda layer: 3)
    assert sorted(rank.words.captured) == sorted([(layer, 7) for layer in range(LAYERS)] * 3)
    assert rank.captured.why_useless == ""


def test_a_replay_is_gated_once_for_a_load_and_relies_on_it() -> None:
    rank = Rank()
    moving = rank.load()
    assert rank.step(READS_IT, replays=True, hooked=False) == set()
    assert moving.gates == 1
    assert not rank.loads.hooks_bypassed
    assert rank.metrics.total("gated_loads") == 1


def test_a_load_whose_write_is_lost_fails_within_the_bound_and_is_cancelled_so_that_the_graph_goes_on() -> None:
    rank = Rank()
    moving = rank.load(Moving(ends=TransferState.RUNNING))
    assert rank.step(READS_IT, replays=True, hooked=False) == set(TABLE)
    assert moving.cancelled
    assert rank.metrics.total("wait_timeouts") == 1


def test_a_copy_that_fails_behind_a_replay_is_reported_in_the_step_that_read_it() -> None:
    rank = Rank()
    rank.load(Moving(ends=TransferState.FAILED))
    assert rank.step(READS_IT, replays=True, hooked=False) == set(TABLE)


def test_a_batch_that_no_graph_was_captured_for_is_not_gated_but_waits_in_its_hooks() -> None:
    rank = Rank()
    moving = rank.load(Moving(ends=TransferState.LANDED))
    prefill = StepOrders(num_tokens=52, num_decoding=0, held_blocks=frozenset(TABLE))
    assert rank.step(prefill, replays=False, hooked=True) == set()
    assert moving.gates == 0
    assert rank.metrics.total("layer_waits") == LAYERS


def test_where_graphs_take_any_batch_every_batch_is_gated() -> None:
    rank = Rank(any_batch=True)
    moving = rank.load()
    prefill = StepOrders(num_tokens=52, num_decoding=0, held_blocks=frozenset(TABLE))
    assert rank.step(prefill, replays=True, hooked=False) == set()
    assert moving.gates == 1


def test_a_replay_that_nobody_expected_fails_the_load_it_read() -> None:
    rank = Rank()
    moving = rank.load()
    prefill = StepOrders(num_tokens=52, num_decoding=0, held_blocks=frozenset(TABLE))
    assert rank.step(prefill, replays=True, hooked=False) == set(TABLE)
    assert moving.gates == 0
    assert rank.loads.hooks_bypassed


def test_a_step_that_is_no_replay_and_calls_no_hook_fails_its_loads_although_they_are_gated() -> None:
    rank = Rank()
    rank.load()
    assert rank.step(READS_IT, replays=False, hooked=False) == set(TABLE)
    assert rank.loads.hooks_bypassed


@pytest.mark.parametrize("captured", [lambda layer: 0, lambda layer: int(layer != 2)], ids=["no layer", "one missing"])
def test_graphs_without_a_wait_in_every_layer_are_not_relied_on(captured: Callable[[int], int]) -> None:
    rank = Rank(captured=captured)
    moving = rank.load()
    assert rank.step(READS_IT, replays=True, hooked=False) == set(TABLE)
    assert moving.gates == 0
    assert "captured into graphs without their wait" in rank.captured.why_useless


def test_a_step_that_computes_nothing_waits_for_nothing() -> None:
    rank = Rank()
    rank.load(Moving(ends=TransferState.RUNNING))
    rank.step(StepOrders(num_tokens=1, num_decoding=1), replays=False, hooked=False)
    before = rank.metrics.total("wait_timeouts")
    assert rank.step(StepOrders(), replays=True, hooked=False) == set()
    assert rank.metrics.total("wait_timeouts") == before


@pytest.mark.skipif(ENGINE_MISSING is not None, reason=str(ENGINE_MISSING))
@pytest.mark.known_fault(17)
def test_a_gated_replay_reads_no_layer_before_its_bytes_are_there() -> None:
    """The real engine on the CPU: a thread plays the graph, which meets the captured waits and looks at each layer."""
    small = SmallCache()
    with small_engine(small, paced=True, in_flight_bytes=1) as (engine, cache):
        captured = CapturedWaits(engine, small.num_layers, lambda: 0, lambda: False, False, Metrics())
        transfer = retrieve(engine, cache, small, width=1)
        gating = threading.Thread(target=captured.gate, args=(transfer, 0))
        gating.start()
        for _window in range(small.num_layers):  # what is in flight when the gate closes has to land; more is to come
            engine.grant(Direction.RETRIEVE, 1)
            gating.join(0.1)
            if not gating.is_alive():
                break
        assert not gating.is_alive()
        seen: list[bool] = []

        def replay() -> None:
            for layer in range(small.num_layers):
                captured.capture(layer)  # outside a capture the wait happens at once
                seen.append(small.layer_holds(layer, 64))

        replaying = threading.Thread(target=replay)
        replaying.start()
        replaying.join(0.05)
        assert replaying.is_alive()
        assert len(seen) < small.num_layers
        engine.grant(Direction.RETRIEVE, 1 << 20)
        replaying.join(WAIT_S)
        assert seen == [True] * small.num_layers
        transfer.wait(WAIT_S)
        assert captured.gate(transfer, 0)  # one that has landed holds nobody back


def test_a_load_that_could_not_begin_is_not_gated() -> None:
    rank = Rank()
    assert not rank.captured.gate(None, 7)
    stopped: Any = Moving()
    stopped.gates = 1
    assert not rank.captured.gate(stopped, 7)
