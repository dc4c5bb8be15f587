"""A rank's leases: a lock that ran out, a transfer that outlives its lease, and one lease retrieved twice."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from engine_driver import ENGINE_MISSING
from lamella.reference.plan import Direction
from lamella.server.protocol import TransferSide
from rank_driver import (
    HERE,
    PACED,
    THERE,
    RankMemory,
    ServerProcess,
    both_sides,
    join,
    keys_of,
    load,
    released,
    serving,
    settled,
    store,
    until,
)

pytestmark = pytest.mark.skipif(ENGINE_MISSING is not None, reason=str(ENGINE_MISSING))


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
        engine, keys, number, _locked = released(worker, memory)
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
        settled(worker, "locked", "moving")
        again = worker.retrieve("again", locked, (THERE,), 64)
        report = until(worker, lambda report: again in report.loads)[-1]
        assert not report.loads[again].ok
