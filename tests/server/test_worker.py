"""One rank on a real server process, the same tests for both transfer sides: bytes, early release, waits, failures."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine_driver import ENGINE_MISSING
from lamella.connector.safety_rules import ALL_RULES
from lamella.cuda_ext.engine import TransferEngine
from lamella.cuda_ext.transfer import Arriving
from lamella.reference.geometry import ObjectForm
from lamella.reference.plan import Direction
from lamella.server.connection import ServerLostError
from lamella.server.protocol import TransferSide
from lamella.server.rank import RankOfEngine
from lamella.server.worker import Worker
from rank_driver import (
    HERE,
    THERE,
    RankMemory,
    ServerProcess,
    both_sides,
    engine_of,
    join,
    keys_of,
    load,
    serving,
    store,
    until,
)

pytestmark = pytest.mark.skipif(ENGINE_MISSING is not None, reason=str(ENGINE_MISSING))

PACED: dict[str, Any] = {
    "engine_options": {"paced": True, "window_bytes": 2048, "staging_bytes": 8192, "in_flight_bytes": 4096}
}


@pytest.mark.parametrize("width", [1, 2, 3, 8, 32, (1, 1, 2, 4), 0], ids=str)
@both_sides
def test_every_width_leaves_the_stored_bytes_in_its_own_blocks(
    server: ServerProcess, memory: RankMemory, side: TransferSide, width: int | tuple[int, ...]
) -> None:
    """XFER-1 across processes."""
    with join(server.folder, memory, transfer_side=side, layers_per_slice=width) as worker:
        assert worker.transfer_side is side, "the side asked for is the one that runs"
        keys = keys_of(memory, range(64))
        store(worker, memory, keys, HERE)
        memory.poison()
        number, _locked = load(worker, keys, THERE)
        reports = until(worker, lambda report: number in report.loads)
        assert reports[-1].loads[number].ok
        assert memory.right_layers(keys, THERE) == list(range(32))
        assert memory.is_poisoned_outside(THERE)
        assert sum("r" in report.received for report in reports) == 1, "REL-1"
        assert worker.metrics.total("loads_layerwise" if width not in (0, 32) else "loads_whole") == 1


@both_sides
def test_objects_in_block_form_move_as_well(server: ServerProcess, side: TransferSide) -> None:
    memory = RankMemory(form=ObjectForm.BLOCK)
    with join(server.folder, memory, transfer_side=side) as worker:
        keys = keys_of(memory, range(64))
        store(worker, memory, keys, HERE)
        memory.poison()
        number, _locked = load(worker, keys, THERE)
        until(worker, lambda report: number in report.loads)
        assert worker.transfer_side is side
        assert memory.right_layers(keys, THERE) == list(range(32))
    memory.close()


@pytest.mark.known_fault(52, 53)
@both_sides
def test_a_load_behind_a_prefix_that_the_engine_has_leaves_that_prefix_alone(
    server: ServerProcess, memory: RankMemory, side: TransferSide
) -> None:
    with join(server.folder, memory, transfer_side=side) as worker:
        keys = keys_of(memory, range(64))
        store(worker, memory, keys, HERE)
        memory.poison()
        number, _locked = load(worker, keys, THERE, skip_chunks=3)
        until(worker, lambda report: number in report.loads)
        assert memory.right_layers(keys, THERE, skip_chunks=3) == list(range(32))
        assert memory.is_poisoned_outside(THERE[6:])


# ---- early release


def test_a_released_request_drains_with_its_future_unresolved(server: ServerProcess, memory: RankMemory) -> None:
    """B7, B12: what chunk-major cannot reach."""
    with join(server.folder, memory, **PACED) as worker:
        engine = engine_of(worker)
        keys = _stored(worker, memory, engine)
        number, _locked = load(worker, keys, THERE)
        for _ in range(20):
            worker.begin_step()
            assert worker.poll().received == set()
        engine.grant(Direction.RETRIEVE, 2)  # a layer is two windows
        report = until(worker, lambda report: "r" in report.received)[-1]
        assert report.loads == {}
        assert worker.num_open == 1
        assert memory.right_layers(keys, THERE) == [0]
        assert _transfer(worker, number).state.is_final is False
        engine.grant(Direction.RETRIEVE, 1000)
        assert until(worker, lambda report: number in report.loads)[-1].loads[number].ok
        assert memory.right_layers(keys, THERE) == list(range(32))
        assert worker.metrics.total("released_early") == 1


def test_the_servers_own_move_drains_too(tmp_path: Path) -> None:
    """As above; the server is stopped in the middle of its copy, so that nothing can land meanwhile."""
    memory = RankMemory(num_blocks=512, heads=64)
    with (
        serving(tmp_path / "s", "--memory", "64MiB") as server,
        join(server.folder, memory, transfer_side=TransferSide.SERVER, wait_timeout_s=0.2) as worker,
    ):
        keys = keys_of(memory, range(8 * 64))
        store(worker, memory, keys, range(128))
        memory.poison()
        there = range(200, 328)
        for _attempt in range(20):
            number, _locked = load(worker, keys, there)
            until(worker, lambda report: "r" in report.received)
            os.kill(server.process.pid, signal.SIGSTOP)
            transfer = _transfer(worker, number)
            landed = transfer.query().landed
            if landed < 32:
                break
            os.kill(server.process.pid, signal.SIGCONT)
            until(worker, lambda report, wanted=number: wanted in report.loads)
        assert 1 <= landed < 32, "the server was never caught in the middle"
        assert not transfer.state.is_final
        assert worker.poll().loads == {}
        assert set(range(landed)) <= set(memory.right_layers(keys, there))
        assert len(memory.right_layers(keys, there)) < 32
        with pytest.raises(TimeoutError):
            transfer.wait_layer(31, timeout_s=0.05)
        os.kill(server.process.pid, signal.SIGCONT)
        transfer.wait_layer(31, timeout_s=20)
        assert memory.right_layers(keys, there) == list(range(32))
        assert until(worker, lambda report: number in report.loads)[-1].loads[number].ok
    memory.close()


def test_each_layer_of_a_step_waits_for_what_was_released_whoever_is_in_the_batch(
    server: ServerProcess, memory: RankMemory
) -> None:
    """REL-2. The step's own batch holds none of the load's blocks."""
    with join(server.folder, memory, **PACED) as worker:
        engine = engine_of(worker)
        keys = _stored(worker, memory, engine)
        load(worker, keys, THERE)
        engine.grant(Direction.RETRIEVE, 2)
        until(worker, lambda report: "r" in report.received)
        worker.begin_step(num_tokens=1)
        for layer in range(32):
            engine.grant(Direction.RETRIEVE, 2 if layer else 0)
            worker.wait_layer(layer)
            assert memory.right_layers(keys, THERE) == list(range(layer + 1))
        worker.step_computed()
        assert worker.errors() == set()


def test_without_the_wait_the_same_step_reads_what_has_not_landed(server: ServerProcess, memory: RankMemory) -> None:
    """The control of the test above."""
    rules = replace(ALL_RULES, wait_for_released=False)
    with join(server.folder, memory, rules=rules, **PACED) as worker:
        engine = engine_of(worker)
        keys = _stored(worker, memory, engine)
        load(worker, keys, THERE)
        engine.grant(Direction.RETRIEVE, 2)
        until(worker, lambda report: "r" in report.received)
        worker.begin_step(num_tokens=1)
        for layer in range(32):
            worker.wait_layer(layer)
        assert memory.right_layers(keys, THERE) == [0]
        engine.grant(Direction.RETRIEVE, 1000)


def test_a_load_that_was_not_released_holds_nobody_back(server: ServerProcess, memory: RankMemory) -> None:
    with join(server.folder, memory, **PACED) as worker:
        engine = engine_of(worker)
        keys = _stored(worker, memory, engine)
        load(worker, keys, THERE)
        began = time.monotonic()
        worker.begin_step(num_tokens=1)
        for layer in range(32):
            worker.wait_layer(layer)
        assert time.monotonic() - began < 5
        assert worker.metrics.total("wait_timeouts") == 0
        engine.grant(Direction.RETRIEVE, 1000)


# ---- what goes wrong


@pytest.mark.known_fault(43)
def test_a_wait_that_reaches_its_bound_fails_that_load_in_the_same_step_by_block(
    server: ServerProcess, memory: RankMemory
) -> None:
    """SAFE-3, SAFE-5: and in every later step whose batch holds one of the blocks, until they are computed anew."""
    with join(server.folder, memory, wait_timeout_s=0.1, **PACED) as worker:
        engine = engine_of(worker)
        keys = _stored(worker, memory, engine)
        number, _locked = load(worker, keys, THERE)
        engine.grant(Direction.RETRIEVE, 2)
        until(worker, lambda report: "r" in report.received)
        held = frozenset(THERE[:3])
        worker.begin_step(num_tokens=1, held_blocks=held)
        worker.wait_layer(0)
        assert worker.errors() == set()
        worker.wait_layer(1)
        assert worker.errors() == held, "the owner's blocks that the batch takes for computed"
        worker.begin_step(num_tokens=1, held_blocks=frozenset(THERE[5:6]))
        assert worker.errors() == set(THERE[5:6]), "a sharer of one block, a step later"
        worker.begin_step(num_tokens=1, held_blocks=frozenset({1}))
        assert worker.errors() == set()
        assert worker.poll().loads == {}, "windows of it are still on their way"
        engine.grant(Direction.RETRIEVE, 1000)
        report = until(worker, lambda report: number in report.loads)[-1]
        assert not report.loads[number].ok
        worker.begin_step(num_tokens=1, held_blocks=held, rewritten_blocks=frozenset(THERE))
        assert worker.errors() == set()


@both_sides
def test_an_aborted_load_ends_once_and_gives_back_slot_and_locks(
    server: ServerProcess, memory: RankMemory, side: TransferSide
) -> None:
    with join(server.folder, memory, transfer_side=side, num_arrival_slots=2) as worker:
        keys = keys_of(memory, range(64))
        store(worker, memory, keys, HERE)
        for _ in range(6):
            number, _locked = load(worker, keys, THERE)
            worker.abort(number)
            reports = until(worker, lambda report, wanted=number: wanted in report.loads)
            assert sum("r" in report.received for report in reports) == 1
        assert worker.arrivals.num_free == 2
        _settled(worker, "locked", "moving")


@pytest.mark.known_fault(32)
def test_an_abort_in_the_middle_leaves_the_blocks_alone_once_it_has_ended(
    server: ServerProcess, memory: RankMemory
) -> None:
    """SAFE-1: until the end is reported the blocks may still be written; from then on never."""
    with join(server.folder, memory, **PACED) as worker:
        engine = engine_of(worker)
        keys = _stored(worker, memory, engine)
        number, _locked = load(worker, keys, THERE)
        engine.grant(Direction.RETRIEVE, 6)
        until(worker, lambda report: "r" in report.received)
        end = time.monotonic() + 10
        while _transfer(worker, number).query().landed < 3 or not engine.lane(Direction.RETRIEVE).in_flight_bytes:
            assert time.monotonic() < end, "the next windows are not issued"
            time.sleep(0.001)
        worker.abort(number)
        worker.begin_step()
        assert worker.poll().loads == {}, "windows of it are still on their way"
        engine.grant(Direction.RETRIEVE, 1000)
        until(worker, lambda report: number in report.loads)
        assert len(memory.right_layers(keys, THERE)) < 32, "what was not issued never is"
        memory.poison()
        time.sleep(0.1)
        assert memory.is_poisoned_outside(())


@both_sides
def test_a_retrieve_without_an_arrival_slot_runs_chunk_major_and_says_so_once(
    server: ServerProcess, memory: RankMemory, side: TransferSide, caplog: pytest.LogCaptureFixture
) -> None:
    """B6, B11."""
    with join(server.folder, memory, transfer_side=side, num_arrival_slots=1) as worker:
        keys = keys_of(memory, range(64))
        store(worker, memory, keys, HERE)
        memory.poison()
        numbers = set()
        tables = [range(16 * part, 16 * part + 16) for part in range(4)]
        taken = worker.arrivals.take()  # another retrieve's, as long as the test lasts
        for table in tables:
            numbers.add(load(worker, keys, table, request=f"r{table.start}")[0])
        done: set[int] = set()
        until(worker, lambda report: bool(done.update(report.loads)) or numbers <= done)
        for table in tables:
            assert memory.right_layers(keys, table) == list(range(32))
        assert worker.metrics.total("loads_whole") == 4
        assert [record.message for record in caplog.records].count(
            "retrieves run chunk-major: all 1 arrival slots are in use: raise the number of slots"
        ) == 1
        assert taken is not None
        worker.arrivals.give(taken)


def test_caches_that_the_server_cannot_open_are_moved_by_the_worker_and_the_reason_is_said(
    server: ServerProcess, memory: RankMemory, caplog: pytest.LogCaptureFixture
) -> None:
    """B11: never a failure to start."""
    caches = replace(memory.caches, shared=())
    with _worker_with(server, memory, caches) as worker:
        assert worker.transfer_side is TransferSide.WORKER
        keys = keys_of(memory, range(64))
        store(worker, memory, keys, HERE)
        memory.poison()
        number, _locked = load(worker, keys, THERE)
        until(worker, lambda report: number in report.loads)
        assert memory.right_layers(keys, THERE) == list(range(32))
    assert "must lie in shared memory" in caplog.text


# ---- leases


@pytest.mark.known_fault(37)
@both_sides
def test_a_lock_that_ran_out_before_the_retrieve_fails_it_clean(
    tmp_path: Path, memory: RankMemory, side: TransferSide
) -> None:
    with (
        serving(tmp_path / "s", "--memory", "4MiB", "--lease", "1s") as server,
        join(server.folder, memory, transfer_side=side) as worker,
    ):
        keys = keys_of(memory, range(64))
        store(worker, memory, keys, HERE)
        memory.poison()
        locked = worker.lookup(keys)
        time.sleep(1.5)
        number = worker.retrieve("late", locked, (THERE,), 64)
        report = until(worker, lambda report: number in report.loads)[-1]
        assert not report.loads[number].ok
        assert "late" in report.failed
        worker.begin_step(num_tokens=1, held_blocks=frozenset(THERE))
        assert worker.errors() == set(THERE)


@pytest.mark.known_fault(38)
def test_a_transfer_that_outlives_the_lease_keeps_its_objects(tmp_path: Path, memory: RankMemory) -> None:
    """SRV-1: another engine fills the pool meanwhile, many times over."""
    with (
        serving(tmp_path / "s", "--memory", "1MiB", "--lease", "2s") as server,
        join(server.folder, memory, **PACED) as worker,
    ):
        engine = engine_of(worker)
        keys = _stored(worker, memory, engine)
        number, _locked = load(worker, keys, THERE)
        engine.grant(Direction.RETRIEVE, 2)
        until(worker, lambda report: "r" in report.received)
        other_memory = RankMemory()
        with join(server.folder, other_memory, engine="other") as other:
            ended = time.monotonic() + 3
            while time.monotonic() < ended:
                start = 1000 + int(time.monotonic() * 1e6) % 10**6
                store(other, other_memory, keys_of(other_memory, range(start, start + 128)), range(32))
        engine.grant(Direction.RETRIEVE, 1000)
        assert until(worker, lambda report: number in report.loads)[-1].loads[number].ok
        assert memory.right_layers(keys, THERE) == list(range(32))
        other_memory.close()


@both_sides
def test_one_lease_is_retrieved_once(server: ServerProcess, memory: RankMemory, side: TransferSide) -> None:
    """SRV-6."""
    with join(server.folder, memory, transfer_side=side) as worker:
        keys = keys_of(memory, range(64))
        store(worker, memory, keys, HERE)
        number, locked = load(worker, keys, THERE)
        until(worker, lambda report: number in report.loads)
        _settled(worker, "locked", "moving")
        again = worker.retrieve("again", locked, (THERE,), 64)
        report = until(worker, lambda report: again in report.loads)[-1]
        assert not report.loads[again].ok


# ---- the other process dies


@pytest.mark.known_fault(23)
def test_a_server_killed_in_the_middle_costs_a_failed_load_within_its_bound(tmp_path: Path) -> None:
    """SAFE-5, the server's own move: blocks stay bad until the server is dead for certain."""
    memory = RankMemory(num_blocks=512, heads=64)
    with (
        serving(tmp_path / "s", "--memory", "64MiB") as server,
        join(
            server.folder, memory, transfer_side=TransferSide.SERVER, wait_timeout_s=0.3, call_timeout_s=0.5
        ) as worker,
    ):
        keys = keys_of(memory, range(8 * 64))
        store(worker, memory, keys, range(128))
        there = range(200, 328)
        for _attempt in range(20):
            number, _locked = load(worker, keys, there)
            until(worker, lambda report: "r" in report.received)
            os.kill(server.process.pid, signal.SIGSTOP)
            if _transfer(worker, number).query().landed < 32:
                break
            os.kill(server.process.pid, signal.SIGCONT)
            until(worker, lambda report, wanted=number: wanted in report.loads)
        began = time.monotonic()
        worker.begin_step(num_tokens=1, held_blocks=frozenset(there))
        worker.wait_layer(31)
        assert worker.errors() == set(there)
        assert worker.poll().loads == {}, "the server is only slow, for all one knows: it may still write"
        server.kill()
        assert worker.lookup(keys).num_chunks == 0, "everything is a miss now"
        server.start()  # the worker may have registered anew before it finds out about the old server
        report = until(worker, lambda report: number in report.loads)[-1]
        assert not report.loads[number].ok
        assert time.monotonic() - began < 15
        until(worker, lambda report: worker.is_connected)
        store(worker, memory, keys[:8], range(16))
        memory.poison()
        number, _locked = load(worker, keys[:8], THERE)
        until(worker, lambda report: number in report.loads)
        assert memory.right_layers(keys[:8], THERE) == list(range(32))
    memory.close()


def test_a_copy_of_the_workers_own_survives_the_server(server: ServerProcess, memory: RankMemory) -> None:
    with join(server.folder, memory, **(PACED | {"call_timeout_s": 0.5})) as worker:
        engine = engine_of(worker)
        keys = _stored(worker, memory, engine)
        number, locked = load(worker, keys, THERE)
        engine.grant(Direction.RETRIEVE, 2)
        until(worker, lambda report: "r" in report.received)
        server.kill()
        engine.grant(Direction.RETRIEVE, 1000)
        assert until(worker, lambda report: number in report.loads)[-1].loads[number].ok
        assert memory.right_layers(keys, THERE) == list(range(32))
        server.start()
        until(worker, lambda report: worker.is_connected)
        stale = worker.retrieve("stale", locked, (THERE,), 64)
        report = until(worker, lambda report: stale in report.loads)[-1]
        assert not report.loads[stale].ok, "SRV-6: a lease of the server before"


def test_without_a_server_a_worker_says_so_at_once(tmp_path: Path, memory: RankMemory) -> None:
    (tmp_path / "s").mkdir(mode=0o700)
    with pytest.raises(ServerLostError):
        Worker(tmp_path / "s", _rank(memory), memory.caches, call_timeout_s=0.2)


# ---- pieces


def _transfer(worker: Worker, number: int) -> Arriving:
    load = worker.loads.find(number)
    assert load is not None
    assert load.transfer is not None
    return load.transfer


def _rank(memory: RankMemory) -> RankOfEngine:
    return RankOfEngine("engine", memory.space)


def _worker_with(server: ServerProcess, memory: RankMemory, caches: Any) -> Worker:
    end = time.monotonic() + 20
    while not (server.folder / "server.sock").exists() and time.monotonic() < end:
        time.sleep(0.01)
    return Worker(server.folder, _rank(memory), caches, transfer_side=TransferSide.SERVER)


def _stored(worker: Worker, memory: RankMemory, engine: TransferEngine) -> Any:
    keys = keys_of(memory, range(64))
    engine.grant(Direction.STORE, 10**6)
    store(worker, memory, keys, HERE)
    memory.poison()
    return keys


def _settled(worker: Worker, *states: str) -> None:
    """Nothing is held at the server in these states, soon."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        worker.poll()
        figures = worker.session.stats().figures
        held = {name: value for name, value in figures.items() if any(state in name for state in states) and value}
        if not held:
            return
        time.sleep(0.02)
    raise AssertionError(held)
