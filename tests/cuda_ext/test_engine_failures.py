"""What the engine does at a fence, past a deadline and after a failure: every wait ends. On the CPU device, paced."""

import threading
import time

import pytest

from engine_driver import ENGINE_MISSING, WAIT_S, SmallCache, retrieve, small_engine
from lamella.cuda_ext._engine_library import (
    TransferStopped,
)
from lamella.cuda_ext.arrival import Carrier, HostFence
from lamella.cuda_ext.transfer import CopyMethod, TransferState
from lamella.reference.plan import Direction

pytestmark = pytest.mark.skipif(ENGINE_MISSING is not None, reason=str(ENGINE_MISSING))


HALF = 32
"""Tokens of half of a SmallCache's objects."""


# ---- fences (XFER-3)


@pytest.mark.known_fault(26, 29)
@pytest.mark.parametrize("method", [CopyMethod.STAGED_BATCH, CopyMethod.DIRECT_BATCH, CopyMethod.GATHER])
@pytest.mark.parametrize("direction", Direction)
def test_blocks_are_not_touched_before_the_fence_opens(method: CopyMethod, direction: Direction) -> None:
    small = SmallCache()
    small.cache[:] = 9
    with small_engine(small) as (engine, cache):
        fence = HostFence()
        transfer = retrieve(engine, cache, small, method=method, fence=fence, direction=direction)
        transfer.wait_recorded(1, WAIT_S)
        time.sleep(0.02)
        assert transfer.landed() == 0
        assert (small.cache == 9).all()
        small.cache[:] = 11  # the engine's earlier work on the blocks
        fence.open()
        transfer.wait(WAIT_S)
    if direction is Direction.STORE:
        assert (small.objects == 11).all()
    else:
        assert all(small.layer_holds(layer, 64) for layer in range(6))


def test_without_its_fence_the_earlier_work_is_lost() -> None:
    """The control of the test above: the same order of events, no fence, other bytes."""
    small = SmallCache()
    small.cache[:] = 9
    with small_engine(small) as (engine, cache):
        transfer = retrieve(engine, cache, small, direction=Direction.STORE)
        transfer.wait(WAIT_S)
        small.cache[:] = 11
    assert (small.objects == 9).all()


def test_a_transfer_behind_a_fence_that_never_opens_can_be_cancelled() -> None:
    small = SmallCache()
    with small_engine(small) as (engine, cache):
        stuck = retrieve(engine, cache, small, fence=HostFence())
        stuck.wait_recorded(1, WAIT_S)
        stuck.cancel()
        assert stuck.wait_final(WAIT_S) is not TransferState.RUNNING
        assert small.untouched()
        after = retrieve(engine, cache, small)
        after.wait(WAIT_S)
    assert small.layer_holds(0, 64)


# ---- failures and bounds (SAFE-5)


@pytest.mark.parametrize("on_completion", [False, True])
@pytest.mark.parametrize("carrier", Carrier)
@pytest.mark.parametrize("window", [0, 3, 11])
def test_a_window_that_fails_fails_its_transfer_and_not_the_lane(
    window: int, carrier: Carrier, on_completion: bool
) -> None:
    small = SmallCache()
    drained = threading.Event()
    with small_engine(small, carrier=carrier) as (engine, cache):
        engine.plant_fault(Direction.RETRIEVE, window, on_completion=on_completion)
        transfer = retrieve(engine, cache, small, on_drained=drained.set)
        with pytest.raises(TransferStopped, match="planted: the window failed when it"):
            transfer.wait(WAIT_S)
        assert transfer.state is TransferState.FAILED
        assert transfer.error.startswith("planted")
        assert drained.wait(WAIT_S)
        with pytest.raises(TransferStopped, match="planted"):
            [transfer.wait_layer(layer) for layer in range(6)]
        retrieve(engine, cache, small).wait(WAIT_S)
    assert all(small.layer_holds(layer, 64) for layer in range(6))


@pytest.mark.known_fault(23)
@pytest.mark.parametrize("carrier", Carrier)
def test_a_transfer_past_its_deadline_fails_and_lets_every_wait_go(carrier: Carrier) -> None:
    small = SmallCache()
    with small_engine(small, paced=True, carrier=carrier) as (engine, cache):
        started = time.monotonic()
        transfer = retrieve(engine, cache, small, deadline_s=0.1)
        ended: list[BaseException | int] = []

        def wait() -> None:
            try:
                ended.append(transfer.wait_layer(5, timeout_s=WAIT_S))
            except BaseException as error:
                ended.append(error)

        waiter = threading.Thread(target=wait)
        waiter.start()
        waiter.join(WAIT_S)
        assert not waiter.is_alive()
        assert 0.09 < time.monotonic() - started < 5
        if carrier is Carrier.EVENT:  # the value carrier's stream was let go; the transfer says that it was in vain
            assert isinstance(ended[0], TransferStopped)
        assert "the deadline has passed: 0 of 6 slices landed" in transfer.error
        assert transfer.state is TransferState.RUNNING  # something is in flight still (SAFE-1)
        engine.grant(Direction.RETRIEVE, 1000)
        assert transfer.wait_final(WAIT_S) is TransferState.FAILED
        retrieve(engine, cache, small).wait(WAIT_S)


def test_waits_are_bounded_and_change_nothing() -> None:
    small = SmallCache()
    with small_engine(small, paced=True, in_flight_bytes=1) as (engine, cache):
        transfer = retrieve(engine, cache, small)
        with pytest.raises(TimeoutError, match="the transfer is not final: 0 of 6 slices landed"):
            transfer.wait(0.01)
        with pytest.raises(TimeoutError, match="slice 5 is not recorded"):
            transfer.wait_layer(5, timeout_s=0.01)
        with pytest.raises(ValueError, match="layer must be between 0 and 5, got 6"):
            transfer.wait_layer(6)
        engine.grant(Direction.RETRIEVE, 1000)
        transfer.wait(WAIT_S)


def test_an_engine_closes_with_work_in_flight_and_reports_every_transfer() -> None:
    small = SmallCache()
    drained: list[int] = []
    with small_engine(small, paced=True) as (engine, cache):
        transfers = [
            retrieve(engine, cache, small, 8, table=small.table[2 * i :], on_drained=lambda i=i: drained.append(i))
            for i in range(5)
        ]
        stuck = retrieve(engine, cache, small, 8, fence=HostFence(), on_drained=lambda: drained.append(5))
        engine.close(timeout_s=WAIT_S)
        assert sorted(drained) == [0, 1, 2, 3, 4, 5]
        assert {transfer.state.is_final for transfer in (*transfers, stuck)} == {True}
        with pytest.raises(TransferStopped, match="the engine is closed"):
            retrieve(engine, cache, small)
        engine.close()


@pytest.mark.known_fault(38)
def test_a_dropped_handle_keeps_its_objects_until_the_last_byte() -> None:
    small = SmallCache()
    drained = threading.Event()
    with small_engine(small, paced=True) as (engine, cache):
        retrieve(engine, cache, small, on_drained=drained.set)
        assert not drained.wait(0.05)
        engine.grant(Direction.RETRIEVE, 1000)
        assert drained.wait(WAIT_S)
    assert all(small.layer_holds(layer, 64) for layer in range(6))
