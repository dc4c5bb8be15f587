"""One rank on a real server process, the same tests for both transfer sides: which bytes go where, and how."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from engine_driver import ENGINE_MISSING
from lamella.reference.geometry import ObjectForm
from lamella.server.protocol import TransferSide
from lamella.server.rank import RankCaches, RankOfEngine
from lamella.server.worker import Worker
from rank_driver import HERE, THERE, RankMemory, ServerProcess, both_sides, join, keys_of, load, store, until

pytestmark = pytest.mark.skipif(ENGINE_MISSING is not None, reason=str(ENGINE_MISSING))


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


def _worker_with(server: ServerProcess, memory: RankMemory, caches: RankCaches) -> Worker:
    end = time.monotonic() + 20
    while not (server.folder / "server.sock").exists() and time.monotonic() < end:
        time.sleep(0.01)
    of = RankOfEngine("engine", memory.space)
    return Worker(server.folder, of, caches, transfer_side=TransferSide.SERVER)
