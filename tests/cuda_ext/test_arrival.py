"""Arrival on the CPU device: the words that graphs wait on, the count's generations, and the board."""

import contextlib
import ctypes
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_driver import ENGINE_MISSING, WAIT_S, SmallCache, retrieve, small_engine
from lamella.cuda_ext._engine_library import TransferStopped
from lamella.cuda_ext.arrival import Carrier, GraphWaits, HostFence
from lamella.cuda_ext.engine import TransferEngine
from lamella.cuda_ext.transfer import Transfer, TransferState
from lamella.reference.plan import Direction
from waiting import wait_until

pytestmark = pytest.mark.skipif(ENGINE_MISSING is not None, reason=str(ENGINE_MISSING))

MANY = 1000


def _pending(engine: TransferEngine, num_layers: int = 6) -> list[int]:
    return [ctypes.c_uint64.from_address(engine.pending_word(layer)).value for layer in range(num_layers)]


def _gate(engine: TransferEngine, transfer: Transfer) -> None:
    """The transfer is gated; windows are granted until the marks, which are queued behind some, have been made."""
    gating = threading.Thread(target=GraphWaits(engine).gate, args=(transfer, 0, WAIT_S))
    gating.start()
    wait_until(lambda: _pending(engine)[5] == 1 or engine.grant(Direction.RETRIEVE, 1), "the marks are made")
    gating.join(WAIT_S)
    assert not gating.is_alive()


def test_gated_layers_are_pending_until_they_land_and_no_reader_comes_early() -> None:
    small = SmallCache()
    with small_engine(small, carrier=Carrier.VALUE, paced=True, in_flight_bytes=1) as (engine, cache):
        waits = GraphWaits(engine)
        assert _pending(engine) == [0] * 6
        transfer = retrieve(engine, cache, small)  # four windows a layer, one of them in flight
        engine.grant(Direction.RETRIEVE, 4)
        transfer.wait_layer(0, timeout_s=WAIT_S)
        _gate(engine, transfer)
        early: list[int] = []

        def read() -> None:
            for layer in range(6):
                waits.wait(layer, 0)
                if not small.layer_holds(layer, 64):
                    early.append(layer)

        reader = threading.Thread(target=read)
        reader.start()
        for _ in range(40):
            engine.grant(Direction.RETRIEVE, 1)
            time.sleep(0.0005)
        reader.join(WAIT_S)
        assert not reader.is_alive()
        assert early == []
        transfer.wait(WAIT_S)
        wait_until(lambda: _pending(engine) == [0] * 6, "no word is pending")


def test_without_the_gate_a_reader_comes_early() -> None:
    """The control of the test above."""
    small = SmallCache()
    with small_engine(small, carrier=Carrier.VALUE, paced=True) as (engine, cache):
        transfer = retrieve(engine, cache, small)
        GraphWaits(engine).wait(5, 0)
        assert not small.layer_holds(5, 64)
        engine.grant(Direction.RETRIEVE, MANY)
        transfer.wait(WAIT_S)


def test_a_layer_stays_pending_until_the_last_gated_transfer_has_it() -> None:
    small = SmallCache()
    tables = np.arange(16), np.arange(16, 32)
    # One window a slice and one in flight, so that grants say which slice lands next.
    one_window = {"window_bytes": 1 << 14, "in_flight_bytes": 1}
    with small_engine(small, carrier=Carrier.VALUE, paced=True, **one_window) as (engine, cache):
        waits = GraphWaits(engine)
        fence = HostFence()
        blocker = retrieve(engine, cache, small, 4, table=np.array([9]), width=6, keys=(-1,), fence=fence)
        blocker.wait_recorded(1, WAIT_S)
        first = retrieve(engine, cache, small, table=tables[0], keys=(0, 2, 4, 6, 8, 10))
        second = retrieve(engine, cache, small, table=tables[1], keys=(1, 3, 5, 7, 9, 11))
        gates = [threading.Thread(target=waits.gate, args=(t, 0, WAIT_S)) for t in (first, second)]
        for gate in gates:
            gate.start()
        time.sleep(0.05)  # both are in the lane's hands; only the blocker's window is in flight
        fence.open()
        engine.grant(Direction.RETRIEVE, 1)
        for gate in gates:
            gate.join(WAIT_S)
            assert not gate.is_alive()
        engine.grant(Direction.RETRIEVE, 1)
        first.wait_layer(0, timeout_s=WAIT_S)
        assert _pending(engine) == [1] * 6, "the second transfer still owes layer 0"
        engine.grant(Direction.RETRIEVE, 1)
        second.wait_layer(0, timeout_s=WAIT_S)
        wait_until(lambda: _pending(engine) == [0, 1, 1, 1, 1, 1], "layer 0 is not pending")
        engine.grant(Direction.RETRIEVE, MANY)
        first.wait(WAIT_S)
        second.wait(WAIT_S)
        wait_until(lambda: _pending(engine) == [0] * 6, "no word is pending")


@pytest.mark.parametrize("how", ["cancel", "failure", "deadline", "close"])
def test_a_gated_transfer_that_ends_early_holds_nobody_back(how: str) -> None:
    small = SmallCache()
    with small_engine(small, carrier=Carrier.VALUE, paced=True, in_flight_bytes=1) as (engine, cache):
        words = [engine.pending_word(layer) for layer in range(6)]
        if how == "failure":
            engine.plant_fault(Direction.RETRIEVE, 20)
        transfer = retrieve(engine, cache, small, deadline_s=0.3 if how == "deadline" else 30)
        _gate(engine, transfer)
        if how == "cancel":
            transfer.cancel()
        if how == "close":
            engine.close(WAIT_S)
        elif how != "deadline":
            engine.grant(Direction.RETRIEVE, MANY)
        wait_until(
            lambda: all(ctypes.c_uint64.from_address(word).value == 0 for word in words),
            f"no word is pending after {how}",
        )
        if how == "deadline":  # let go though its window is still in flight
            assert transfer.state is TransferState.RUNNING
            engine.grant(Direction.RETRIEVE, MANY)
            assert transfer.wait_final(WAIT_S) is TransferState.FAILED
            assert _pending(engine) == [0] * 6
            with pytest.raises(TransferStopped, match="failed or was cancelled"):
                GraphWaits(engine).gate(transfer, 0, WAIT_S)


def test_gating_what_has_landed_marks_nothing() -> None:
    small = SmallCache()
    with small_engine(small, carrier=Carrier.VALUE) as (engine, cache):
        transfer = retrieve(engine, cache, small)
        transfer.wait(WAIT_S)
        GraphWaits(engine).gate(transfer, 0)
        assert _pending(engine) == [0] * 6


@settings(max_examples=20)
@given(
    actions=st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(("gate", "grant", "cancel"))), min_size=1, max_size=24
    ),
    width=st.integers(1, 6),
)
def test_whatever_is_gated_and_cancelled_no_word_stays_pending(actions: list[tuple[int, str]], width: int) -> None:
    small = SmallCache()
    with small_engine(small, carrier=Carrier.VALUE, paced=True, in_flight_bytes=2048) as (engine, cache):
        waits = GraphWaits(engine)
        transfers = [
            retrieve(engine, cache, small, 32, table=np.arange(8 * i, 8 * i + 8), width=width) for i in range(4)
        ]
        threads = []
        for which, action in actions:
            if action == "gate":

                def gate(transfer: object = transfers[which]) -> None:
                    with contextlib.suppress(TransferStopped):
                        waits.gate(transfer, 0, WAIT_S)  # type: ignore[arg-type]

                threads.append(threading.Thread(target=gate))
                threads[-1].start()
            elif action == "grant":
                engine.grant(Direction.RETRIEVE, 1 + which)
            else:
                transfers[which].cancel()
        engine.grant(Direction.RETRIEVE, MANY)
        for transfer in transfers:
            assert transfer.wait_final(WAIT_S).is_final
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        wait_until(lambda: _pending(engine) == [0] * 6, "no word is pending")


def test_graphs_wait_only_for_an_engine_whose_words_cannot_be_queued_behind_them() -> None:
    with small_engine(SmallCache()) as (engine, _), pytest.raises(ValueError, match="carrier is event: make it with"):
        GraphWaits(engine)


# ---- the count


@pytest.mark.known_fault(22)
def test_a_count_that_is_used_again_has_a_new_generation_and_lets_no_old_waiter_hang() -> None:
    small = SmallCache()
    with small_engine(small, carrier=Carrier.VALUE) as (engine, cache):
        seen = set()
        for _ in range(5):
            transfer = retrieve(engine, cache, small)
            transfer.wait(WAIT_S)
            seen.add(transfer.generation)
            assert transfer.wait_layer(5) == 0
        assert len(seen) == 5


def test_the_board_counts_recorded_slices_under_its_generation() -> None:
    small = SmallCache()
    board = ctypes.c_uint64(0)
    with small_engine(small, paced=True, window_bytes=1 << 14, in_flight_bytes=1) as (engine, cache):
        transfer = retrieve(engine, cache, small, board=ctypes.addressof(board), generation=41)
        counts = []
        for slices in range(1, 7):
            transfer.wait_recorded(slices, WAIT_S)
            counts.append((board.value >> 32, board.value & 0xFFFFFFFF))
            engine.grant(Direction.RETRIEVE, 1)
        transfer.wait(WAIT_S)
    assert counts == [(41, slices) for slices in range(1, 7)]


def test_the_value_carrier_never_waits_on_the_host_to_be_recorded() -> None:
    small = SmallCache()
    with small_engine(small, paced=True, in_flight_bytes=1, carrier=Carrier.VALUE) as (engine, cache):
        transfer = retrieve(engine, cache, small)
        ended: list[int] = []
        waiter = threading.Thread(target=lambda: ended.append(transfer.wait_layer(5)))
        waiter.start()
        waiter.join(0.05)
        assert waiter.is_alive()  # it waits for the layer itself
        engine.grant(Direction.RETRIEVE, MANY)
        waiter.join(WAIT_S)
        assert ended == [0]
        assert small.layer_holds(5, 64)
