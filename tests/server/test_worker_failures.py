"""What goes wrong with a rank's loads: waits that reach their bound, aborts, and servers that are dead or not there."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from engine_driver import ENGINE_MISSING
from lamella.reference.plan import Direction
from lamella.server.connection import ServerLostError
from lamella.server.protocol import TransferSide
from lamella.server.rank import RankOfEngine
from lamella.server.worker import Worker
from rank_driver import (
    HERE,
    PACED,
    THERE,
    RankMemory,
    ServerProcess,
    both_sides,
    caught,
    join,
    keys_of,
    load,
    released,
    serving,
    settled,
    store,
    transfer_of,
    until,
)
from waiting import wait_until

pytestmark = pytest.mark.skipif(ENGINE_MISSING is not None, reason=str(ENGINE_MISSING))


# ---- bounds and aborts


@pytest.mark.known_fault(43)
def test_a_wait_that_reaches_its_bound_fails_that_load_in_the_same_step_by_block(
    server: ServerProcess, memory: RankMemory
) -> None:
    """SAFE-3, SAFE-5: and in every later step whose batch holds one of the blocks, until they are computed anew."""
    with join(server.folder, memory, wait_timeout_s=0.1, **PACED) as worker:
        engine, _keys, number, _locked = released(worker, memory)
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
        wait_until(lambda: worker.arrivals.num_free == 2, "both arrival slots are free")
        settled(worker, "locked", "moving")


@pytest.mark.known_fault(32)
def test_an_abort_in_the_middle_leaves_the_blocks_alone_once_it_has_ended(
    server: ServerProcess, memory: RankMemory
) -> None:
    """SAFE-1: until the end is reported the blocks may still be written; from then on never."""
    with join(server.folder, memory, **PACED) as worker:
        engine, keys, number, _locked = released(worker, memory, windows=6)
        end = time.monotonic() + 10
        while transfer_of(worker, number).query().landed < 3 or not engine.lane(Direction.RETRIEVE).in_flight_bytes:
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


# ---- the server dies


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
        number, _transfer, _landed = caught(worker, server, memory, keys, there)
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
        engine, keys, number, locked = released(worker, memory)
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
        Worker(tmp_path / "s", RankOfEngine("engine", memory.space), memory.caches, call_timeout_s=0.2)
