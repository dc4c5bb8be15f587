"""What the engine promises beyond the bytes: a transfer's life, order, cancel. On the CPU device, paced."""

import itertools
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_driver import ENGINE_MISSING, WAIT_S, SmallCache, retrieve, small_engine
from lamella.cuda_ext._engine_library import (
    TransferStopped,
)
from lamella.cuda_ext.arrival import AfterEvent, AfterStream, Carrier, HostFence
from lamella.cuda_ext.transfer import CopyMethod, TransferState
from lamella.reference.ordering import Deadline, RoundRobin, ShortestRemaining
from lamella.reference.plan import Direction

pytestmark = pytest.mark.skipif(ENGINE_MISSING is not None, reason=str(ENGINE_MISSING))


HALF = 32
"""Tokens of half of a SmallCache's objects."""


# ---- a transfer's life


def test_nothing_moves_before_a_window_is_granted_and_everything_after() -> None:
    small = SmallCache()
    with small_engine(small, paced=True) as (engine, cache):
        transfer = retrieve(engine, cache, small, width=2)
        transfer.wait_recorded(1, WAIT_S)
        assert (transfer.state, transfer.landed(), small.untouched()) == (TransferState.RUNNING, 0, True)
        engine.grant(Direction.RETRIEVE, 1000)
        transfer.wait(WAIT_S)
        assert (transfer.state, transfer.landed(), transfer.error) == (TransferState.LANDED, 3, "")
        assert all(small.layer_holds(layer, 64) for layer in range(6))


def test_slices_land_in_order_and_their_times_rise() -> None:
    small = SmallCache()
    with small_engine(small) as (engine, cache):
        before = time.monotonic_ns()
        transfer = retrieve(engine, cache, small)
        transfer.wait(WAIT_S)
        after = time.monotonic_ns()
        times = transfer.timestamps_ns()
        for moments in times:
            assert list(moments) == sorted(moments)
            assert before < moments[0] <= moments[-1] < after
        assert transfer.query().submitted_ns <= transfer.query().started_ns <= times.recorded_ns[0]


@pytest.mark.known_fault(50)
@pytest.mark.parametrize("tokens", [0, 40])
@pytest.mark.parametrize("carrier", Carrier)
def test_a_transfer_of_nothing_lands_at_once(tokens: int, carrier: Carrier) -> None:
    small = SmallCache()
    drained = threading.Event()
    with small_engine(small, paced=True, carrier=carrier) as (engine, cache):
        transfer = retrieve(engine, cache, small, tokens, skip_tokens=tokens, on_drained=drained.set)
        transfer.wait(WAIT_S)
        assert transfer.wait_layer(5) == 0
        assert (transfer.num_bytes, transfer.landed()) == (0, 6)
        assert drained.wait(WAIT_S)
    assert small.untouched()


@pytest.mark.known_fault(66)
def test_a_table_of_null_blocks_moves_nothing_and_lands() -> None:
    small = SmallCache()
    with small_engine(small, paced=True) as (engine, cache):
        transfer = retrieve(engine, cache, small, 16, table=np.zeros(4, np.int32), null_block=0)
        transfer.wait(WAIT_S)
        assert transfer.num_bytes == 0
        with pytest.raises(ValueError, match="block 7 would be written twice by one retrieve"):
            retrieve(engine, cache, small, 16, table=np.array([0, 0, 7, 7], np.int32), null_block=0)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"table": np.arange(3)}, "64 tokens need 16 blocks of 4, got 3 block ids"),
        ({"table": np.arange(17, 33)}, "block id 32 is outside the cache's 0 .. 31"),
        ({"table": (*range(15), 2**31)}, "block ids must be 32-bit integers, got 2147483648"),
        ({"table": (*range(15), 1.5)}, "block ids must be 32-bit integers, got"),
        ({"skip_tokens": 65}, "skip_tokens must be between 0 and 64, got 65"),
        ({"width": 7}, "layers_per_slice must be between 1 and 6, got 7"),
        ({"keys": (1, 2)}, "keys must have one entry for each of 6 slices, got 2"),
        ({"fence": AfterEvent(1)}, "a AfterEvent is no fence of cpu"),
        ({"fence": AfterStream(0)}, "a AfterStream is no fence of cpu"),
    ],
)
def test_a_mistaken_request_is_one_sentence_and_queues_nothing(asked: dict[str, object], message: str) -> None:
    small = SmallCache()
    with small_engine(small) as (engine, cache):
        with pytest.raises(ValueError, match=message):
            retrieve(engine, cache, small, **asked)
        assert engine.lane(Direction.RETRIEVE).windows == 0
        with pytest.raises(ValueError, match="chunk 3 has no object"):
            engine.retrieve(cache, type(small.host())((*small.addresses[:3], 0)), [small.table], 32)
    assert small.untouched()


@pytest.mark.parametrize(
    "kind", [tuple, list, np.array, lambda ids: np.array(ids, np.int32), lambda ids: [*np.array(ids)]]
)
def test_a_block_table_may_be_any_sequence_of_integers(kind: Callable[[list[int]], Sequence[int]]) -> None:
    small = SmallCache()
    with small_engine(small) as (engine, cache):
        retrieve(engine, cache, small, table=kind(small.table.tolist())).wait(WAIT_S)
    assert all(small.layer_holds(layer, 64) for layer in range(6))


# ---- order


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_two_transfers_move_in_every_order_that_their_keys_name(order: tuple[int, ...]) -> None:
    # Each transfer has two slices; `order` gives their four places, and slices of one transfer leave in order.
    small = SmallCache()
    keys = (sorted(order[:2]), sorted(order[2:]))
    with small_engine(small, paced=True, window_bytes=1 << 14, in_flight_bytes=1) as (engine, cache):
        fence = HostFence()
        blocker = retrieve(engine, cache, small, 8, table=np.arange(2), width=6, keys=(-1,), fence=fence)
        blocker.wait_recorded(1, WAIT_S)  # one byte may be on the wire, so nothing else is issued before it has left it
        first = retrieve(engine, cache, small, HALF, table=np.arange(2, 10), width=3, keys=keys[0])
        second = retrieve(engine, cache, small, HALF, table=np.arange(10, 18), width=3, keys=keys[1])
        fence.open()
        engine.grant(Direction.RETRIEVE, 100)
        first.wait(WAIT_S)
        second.wait(WAIT_S)
    landed = {
        key: when
        for transfer, own in ((first, keys[0]), (second, keys[1]))
        for key, when in zip(own, transfer.timestamps_ns().landed_ns, strict=True)
    }
    assert [key for key, _ in sorted(landed.items(), key=lambda entry: entry[1])] == [0, 1, 2, 3]


def test_equal_keys_go_first_come_first_served() -> None:
    small = SmallCache()
    with small_engine(small, paced=True, in_flight_bytes=1) as (engine, cache):
        blocker = retrieve(engine, cache, small, 8, table=np.arange(2), width=6, keys=(-1,))
        blocker.wait_recorded(1, WAIT_S) if blocker.num_slices > 1 else None
        waiting = [
            retrieve(engine, cache, small, 8, table=np.arange(2 + 2 * i, 4 + 2 * i), width=6, keys=(5,))
            for i in range(5)
        ]
        engine.grant(Direction.RETRIEVE, 1000)
        for transfer in waiting:
            transfer.wait(WAIT_S)
    landed = [transfer.timestamps_ns().landed_ns[-1] for transfer in waiting]
    assert landed == sorted(landed)


def test_order_policies_get_bytes_and_due_times() -> None:
    small = SmallCache()
    table = np.arange(32)
    for order, due, first in (
        (ShortestRemaining(), (None, None), 1),
        (Deadline(), (2_000, 1_000), 1),
        (Deadline(), (1_000, 2_000), 0),
    ):
        with small_engine(small, paced=True, order=order, in_flight_bytes=1) as (engine, cache):
            blocker = retrieve(engine, cache, small, 8, table=table[:2], width=6, keys=(-1,))
            while engine.lane(Direction.RETRIEVE).windows == 0:
                time.sleep(0.001)
            long = retrieve(engine, cache, small, 40, table=table[2:12], width=3, due_ns=due[0])
            short = retrieve(engine, cache, small, 24, table=table[12:18], width=3, due_ns=due[1])
            engine.grant(Direction.RETRIEVE, 1000)
            for transfer in (blocker, long, short):
                transfer.wait(WAIT_S)
        ends = [transfer.timestamps_ns().landed_ns[-1] for transfer in (long, short)]
        assert ends.index(min(ends)) == first


def test_round_robin_gives_each_transfer_a_slice_a_round() -> None:
    small = SmallCache()
    with small_engine(small, paced=True, order=RoundRobin(), window_bytes=1 << 14, in_flight_bytes=1) as (
        engine,
        cache,
    ):
        blocker = retrieve(engine, cache, small, 8, table=np.arange(2), width=6)
        while engine.lane(Direction.RETRIEVE).windows == 0:
            time.sleep(0.001)
        first = retrieve(engine, cache, small, HALF, table=np.arange(2, 10), width=2)
        second = retrieve(engine, cache, small, HALF, table=np.arange(10, 18), width=2)
        engine.grant(Direction.RETRIEVE, 1000)
        for transfer in (blocker, first, second):
            transfer.wait(WAIT_S)
    ours, theirs = first.timestamps_ns().landed_ns, second.timestamps_ns().landed_ns
    assert ours[0] < theirs[0] < ours[1] < theirs[1] < ours[2] < theirs[2]


def test_a_store_overlaps_a_retrieve() -> None:
    small = SmallCache()
    with small_engine(small, paced=True) as (engine, cache):
        loading = retrieve(engine, cache, small, HALF)
        storing = retrieve(
            engine, cache, small, 16, table=small.table[20:24], objects=small.host([6, 7]), direction=Direction.STORE
        )
        engine.grant(Direction.STORE, 1000)
        storing.wait(WAIT_S)  # though no retrieve may move
        assert loading.landed() == 0
        assert not small.objects[6:8].any()  # the blocks were empty
        engine.grant(Direction.RETRIEVE, 1000)
        loading.wait(WAIT_S)
    assert all(small.layer_holds(layer, HALF) for layer in range(6))


@pytest.mark.parametrize("method", [CopyMethod.STAGED_BATCH, CopyMethod.GATHER])
def test_no_more_is_in_flight_than_the_bound(method: CopyMethod) -> None:
    small = SmallCache()
    window = small.layout.groups[0].block_bytes * 4
    with small_engine(small, window_bytes=window, in_flight_bytes=window * 3) as (engine, cache):
        retrieve(engine, cache, small, method=method).wait(WAIT_S)
        status = engine.lane(Direction.RETRIEVE)
    assert (status.in_flight_bytes, status.live_transfers) == (0, 0)
    assert 0 < status.peak_in_flight_bytes <= window * 3


@pytest.mark.parametrize(("method", "issued"), [(CopyMethod.STAGED_BATCH, 2), (CopyMethod.GATHER, 1)])
def test_what_has_left_the_wire_and_waits_for_its_scatter_is_not_in_flight(method: CopyMethod, issued: int) -> None:
    small = SmallCache()
    window = small.layout.groups[0].block_bytes * 4
    with small_engine(small, window_bytes=window, in_flight_bytes=window) as (engine, cache):
        fence = HostFence()
        transfer = retrieve(engine, cache, small, method=method, fence=fence)
        end_s = time.monotonic() + 0.2
        while time.monotonic() < end_s:  # the first window stands at the fence, and behind it what else was issued
            assert engine.lane(Direction.RETRIEVE).windows <= issued
            time.sleep(0.01)
        status = engine.lane(Direction.RETRIEVE)
        assert (status.windows, status.in_flight_bytes, transfer.landed()) == (issued, window, 0)
        fence.open()
        transfer.wait(WAIT_S)
        assert engine.lane(Direction.RETRIEVE).peak_in_flight_bytes == window
    assert all(small.layer_holds(layer, 64) for layer in range(6))


# ---- cancel


@settings(max_examples=25)
@given(windows=st.integers(0, 60), width=st.integers(1, 6), carrier=st.sampled_from(Carrier))
def test_a_cancelled_transfer_moves_what_was_issued_and_nothing_more(
    windows: int, width: int, carrier: Carrier
) -> None:
    small = SmallCache()
    drained = threading.Event()
    with small_engine(small, paced=True, carrier=carrier) as (engine, cache):
        transfer = retrieve(engine, cache, small, width=width, on_drained=drained.set)
        engine.grant(Direction.RETRIEVE, windows)
        while transfer.state is TransferState.QUEUED:
            time.sleep(0.0005)
        transfer.cancel()
        transfer.cancel()
        engine.grant(Direction.RETRIEVE, 1000)
        state = transfer.wait_final(WAIT_S)
        landed = transfer.landed()
        assert state is (TransferState.LANDED if landed == transfer.num_slices else TransferState.CANCELLED)
        assert drained.wait(WAIT_S)
        frozen = small.cache.copy()
        for part in transfer.slices[:landed]:
            assert all(small.layer_holds(layer, 64) for layer in range(part.first_layer, part.end_layer))
            transfer.wait_layer(part.first_layer)  # what has landed stays landed
        if landed < transfer.num_slices:
            with pytest.raises(TransferStopped, match="cancelled"):
                transfer.wait_layer(transfer.slices[landed].first_layer)
        follower = retrieve(engine, cache, small, 8, table=np.array([31, 30]))
        follower.wait(WAIT_S)
        frozen[:, :, [31, 30]] = small.cache[:, :, [31, 30]]
    assert (frozen == small.cache).all()


@pytest.mark.known_fault(32)
def test_a_transfer_cancelled_before_it_started_moves_nothing_and_is_reported_once() -> None:
    small = SmallCache()
    reports: list[int] = []
    with small_engine(small, paced=True, in_flight_bytes=1) as (engine, cache):
        blocker = retrieve(engine, cache, small, 8, table=np.array([0, 1]), width=6, keys=(-1,))
        queued = retrieve(engine, cache, small, 8, table=np.array([2, 3]), on_drained=lambda: reports.append(1))
        queued.cancel()
        assert queued.wait_final(WAIT_S) is TransferState.CANCELLED
        assert (queued.recorded(), queued.query().started_ns) == (0, 0)
        engine.grant(Direction.RETRIEVE, 1000)
        blocker.wait(WAIT_S)
    assert reports == [1]
    assert not small.cache[:, :, 2:4].any()
