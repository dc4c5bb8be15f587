"""What the engine promises beyond the bytes: order, cancel, fences, failures, bounds. On the CPU device, paced."""

import ctypes
import itertools
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_driver import ENGINE_MISSING, WAIT_S, SmallCache, retrieve, small_engine
from lamella.cuda_ext._engine_library import (
    SUBMISSION,
    EngineOptionsStruct,
    LaneStatusStruct,
    ProgressStruct,
    RatesStruct,
    SubmissionStruct,
    TransferStopped,
)
from lamella.cuda_ext._library import HostObjectsStruct
from lamella.cuda_ext.arrival import AfterEvent, AfterStream, Carrier, HostFence
from lamella.cuda_ext.engine import TransferEngine
from lamella.cuda_ext.rates import H200_RATES, EngineRates
from lamella.cuda_ext.transfer import CopyMethod, TransferState
from lamella.reference.ordering import Deadline, RoundRobin, ShortestRemaining
from lamella.reference.plan import Direction
from native_build import COMPILER, ROOT

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
        blocker.wait_recorded(1, WAIT_S)  # one byte may be in flight, so nothing else is issued before it has landed
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


# ---- the C ABI


def test_a_submission_is_packed_as_its_structure_lies_in_memory() -> None:
    assert SUBMISSION.size == ctypes.sizeof(SubmissionStruct)
    flat = [(name, kind) for name, kind in SubmissionStruct._fields_ if name != "objects"]
    at = next(index for index, (name, _) in enumerate(SubmissionStruct._fields_) if name == "objects")
    order = [name for name, _ in flat[:at]]
    order += [f"objects.{name}" for name, _ in HostObjectsStruct._fields_]
    order += [name for name, _ in flat[at:]]
    values = list(range(1, len(order) + 1))
    read = SubmissionStruct.from_buffer_copy(SUBMISSION.pack(*values))

    def value_of(path: str) -> int:
        found = read
        for name in path.split("."):
            found = getattr(found, name)
        return ctypes.cast(found, ctypes.c_void_p).value or 0 if not isinstance(found, int) else found

    assert [value_of(path) for path in order] == values


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_python_declares_the_structures_that_the_header_declares(tmp_path: Path) -> None:
    structures = {
        "lm_rates": RatesStruct,
        "lm_engine_options": EngineOptionsStruct,
        "lm_submission": SubmissionStruct,
        "lm_progress": ProgressStruct,
        "lm_lane_status": LaneStatusStruct,
    }
    lines = ["#include <cstddef>", "#include <cstdio>", '#include "lamella/engine.h"', "int main() {"]
    expected = []
    for name, structure in structures.items():
        lines.append(f'std::printf("%zu\\n", sizeof({name}));')
        expected.append(ctypes.sizeof(structure))
        for field, *_ in structure._fields_:
            lines.append(f'std::printf("%zu\\n", offsetof({name}, {field}));')
            expected.append(getattr(structure, field).offset)
    (tmp_path / "sizes.cpp").write_text("\n".join([*lines, "}"]))
    command = [str(COMPILER), f"-I{ROOT / 'cuda_ext' / 'csrc' / 'include'}", str(tmp_path / "sizes.cpp")]
    subprocess.run([*command, "-o", str(tmp_path / "sizes")], check=True)
    said = subprocess.run([str(tmp_path / "sizes")], check=True, capture_output=True, text=True).stdout
    assert [int(word) for word in said.split()] == expected


# ---- the chooser


def test_rates_come_from_a_profile_or_are_refused() -> None:
    with pytest.raises(ValueError, match="run_bytes must ascend"):
        EngineRates(1.0, 1.0, (4, 2), (1.0, 1.0), (1.0, 1.0))
    with pytest.raises(ValueError, match="rates must be positive"):
        EngineRates(1.0, 0.0, (4,), (1.0,), (1.0,))
    with pytest.raises(ValueError, match="strided_bytes_per_s needs 1 rates, got 0"):
        EngineRates(1.0, 1.0, (4,), (1.0,), ())
    assert H200_RATES.wire_bytes_per_s > H200_RATES.batch_bytes_per_s[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "gpu"}, 'a device is "cpu" or "cuda:N", got \'gpu\''),
        ({"window_bytes": 1 << 20, "staging_bytes": 1 << 20}, "staging_bytes must hold 4 windows"),
        ({"in_flight_bytes": 0}, "in_flight_bytes must be at least 1, got 0"),
        ({"deadline_s": 0}, "deadline_s must be positive, got 0"),
    ],
)
def test_impossible_engines_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TransferEngine(**options)  # type: ignore[arg-type]


def test_a_cache_that_does_not_fit_is_refused() -> None:
    small = SmallCache()
    with TransferEngine("cpu", num_layers=5) as engine, pytest.raises(ValueError, match="made for 5 layers"):
        engine.register_cache(small.layout, small.engines)
    with (
        TransferEngine("cpu", num_layers=6, window_bytes=64, staging_bytes=256) as engine,
        pytest.raises(ValueError, match="window_bytes must be at least 256"),
    ):
        engine.register_cache(small.layout, small.engines)
