"""What the engine does at a fence, past a deadline and after a failure: every wait ends. On the CPU device, paced."""

import threading
import time

import numpy as np
import pytest

from engine_driver import ENGINE_MISSING, WAIT_S, SmallCache, retrieve, small_engine
from footprint import resident_bytes
from lamella.cuda_ext._engine_library import (
    TransferStopped,
)
from lamella.cuda_ext.arrival import Carrier, HostFence
from lamella.cuda_ext.engine import Fault
from lamella.cuda_ext.executors import HostObjects
from lamella.cuda_ext.transfer import CopyMethod, Transfer, TransferState
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
        stuck.wait_recorded(6, WAIT_S)  # all of it is enqueued, behind the fence
        stuck.cancel()
        assert stuck.wait_final(WAIT_S) is TransferState.CANCELLED
        assert stuck.landed() == 0
        assert small.untouched()
        after = retrieve(engine, cache, small)
        after.wait(WAIT_S)
    assert small.layer_holds(0, 64)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("carrier", Carrier)
def test_what_never_got_past_its_fence_has_not_landed_when_the_engine_closes(
    carrier: Carrier, direction: Direction
) -> None:
    """A store that says it landed is an object that others may read."""
    small = SmallCache()
    objects = small.objects.copy()
    with small_engine(small, carrier=carrier) as (engine, cache):
        stuck = retrieve(engine, cache, small, fence=HostFence(), direction=direction)
        stuck.wait_recorded(6, WAIT_S)
        engine.close(timeout_s=WAIT_S)
        assert (stuck.state, stuck.landed()) == (TransferState.CANCELLED, 0)
        assert "the engine was closed" in stuck.error
    assert small.untouched()
    assert (small.objects == objects).all()


@pytest.mark.parametrize("method", [CopyMethod.AUTO, CopyMethod.DIRECT_BATCH])
def test_a_fence_comes_before_the_first_window_that_moves_anything(method: CopyMethod) -> None:
    """A group whose blocks are all null makes empty slices; behind one, AUTO has yet to choose how to move."""
    small = SmallCache()
    layout, engines = small.split_after(2)
    null = int(small.table[-1])
    with small_engine(small) as (engine, _):
        fence = HostFence()
        transfer = engine.submit(
            engine.register_cache(layout, engines),
            Direction.RETRIEVE,
            HostObjects(small.addresses),
            [[null] * 16, small.table[:16]],
            64,
            null_block=null,
            method=method,
            fence=fence,
        )
        transfer.wait_landed(2, WAIT_S)  # they touch no block
        time.sleep(0.02)
        assert (transfer.landed(), small.untouched()) == (2, True)
        fence.open()
        transfer.wait(WAIT_S)
        assert transfer.num_bytes == small.cache[2:, :, :16].nbytes
        assert transfer.query().method is (CopyMethod.GATHER if method is CopyMethod.AUTO else method)
    assert not small.cache[:2].any()
    assert np.count_nonzero(small.cache[2:]) == small.cache[2:, :, :16].size


# ---- failures and bounds (SAFE-5)


@pytest.mark.parametrize("fault", [Fault.ISSUED, Fault.COMPLETED])
@pytest.mark.parametrize("carrier", Carrier)
@pytest.mark.parametrize("window", [0, 3, 11])
def test_a_window_that_fails_fails_its_transfer_and_not_the_lane(window: int, carrier: Carrier, fault: Fault) -> None:
    small = SmallCache()
    drained = threading.Event()
    with small_engine(small, carrier=carrier) as (engine, cache):
        engine.plant_fault(Direction.RETRIEVE, window, fault)
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


@pytest.mark.parametrize("carrier", Carrier)
@pytest.mark.parametrize("window", [0, 3])
def test_a_lost_device_fails_what_was_submitted_and_refuses_the_rest(window: int, carrier: Carrier) -> None:
    """Nothing wakes a lane whose device was lost at its only window."""
    small = SmallCache()
    drained = threading.Event()
    with small_engine(small, carrier=carrier) as (engine, cache):
        engine.plant_fault(Direction.RETRIEVE, window, Fault.LOST)
        transfer = retrieve(engine, cache, small, on_drained=drained.set)
        assert transfer.wait_final(WAIT_S) is TransferState.FAILED
        assert transfer.error == "the device is lost: planted: with the window"
        assert drained.wait(WAIT_S)
        with pytest.raises(TransferStopped, match="the device is lost: planted"):
            retrieve(engine, cache, small)
        retrieve(engine, cache, small, direction=Direction.STORE).wait(WAIT_S)  # the other lane's own device is there


def test_every_transfer_ends_that_was_accepted_while_the_device_got_lost() -> None:
    small = SmallCache()
    for attempt in range(40):
        with small_engine(small) as (engine, cache):
            engine.plant_fault(Direction.RETRIEVE, 3 + attempt, Fault.LOST)
            accepted: list[Transfer] = []
            with pytest.raises(TransferStopped, match="the device is lost"):
                while True:
                    accepted.append(retrieve(engine, cache, small, 4))
            ended = {transfer.wait_final(WAIT_S) for transfer in accepted}
            assert TransferState.FAILED in ended


def test_a_deadline_far_away_keeps_nothing_of_a_transfer_that_has_landed() -> None:
    small = SmallCache()
    with small_engine(small, deadline_s=1e8) as (engine, cache):

        def resident_after(transfers: int) -> int:
            for _ in range(transfers):
                retrieve(engine, cache, small, 4).wait(WAIT_S)
            return resident_bytes()

        before = resident_after(2000)
        assert resident_after(6000) - before < 2 << 20


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


def test_the_deadline_lets_go_of_streams_that_wait_for_a_transfer_that_was_cancelled() -> None:
    """What is in flight of it may be stuck behind the very stream that waits for it."""
    small = SmallCache()
    with small_engine(small, paced=True, carrier=Carrier.VALUE) as (engine, cache):
        transfer = retrieve(engine, cache, small, deadline_s=0.3)
        waiter = threading.Thread(target=transfer.wait_layer, args=(5,), daemon=True)
        waiter.start()
        transfer.wait_recorded(1, WAIT_S)
        time.sleep(0.05)  # it waits for the word by now
        transfer.cancel()
        waiter.join(5)
        let_go = not waiter.is_alive()
        assert transfer.state is TransferState.RUNNING  # something is in flight still (SAFE-1)
        engine.grant(Direction.RETRIEVE, 1000)
        waiter.join(WAIT_S)
        assert transfer.wait_final(WAIT_S) is not TransferState.FAILED
    assert let_go


def test_the_deadline_lets_go_of_streams_though_their_engine_was_closed_and_did_not_drain() -> None:
    """The engine stays, because its device may use it still, and so does its watchdog."""
    small = SmallCache()
    with small_engine(small, carrier=Carrier.VALUE, in_flight_bytes=1) as (engine, cache):
        engine.plant_fault(Direction.RETRIEVE, 1, Fault.STUCK)
        transfer = retrieve(engine, cache, small, method=CopyMethod.GATHER, deadline_s=0.5)
        waiter = threading.Thread(target=transfer.wait_layer, args=(5,), daemon=True)
        waiter.start()
        time.sleep(0.05)  # it waits for the word by now
        with pytest.raises(TimeoutError, match="did not drain"):
            engine.close(timeout_s=0.1)
        assert waiter.is_alive()
        waiter.join(WAIT_S)
        assert not waiter.is_alive()
        assert not transfer.state.is_final


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
