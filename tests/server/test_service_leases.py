"""SRV-1: what is locked, moved or written, for whom, and what ends it; on a clock of the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from lamella.server.wire import Code
from server_driver import MISS, Bench, keys_of, refused


@pytest.mark.known_fault(38)
def test_eviction_never_takes_what_is_locked_or_moved(tmp_path: Path) -> None:
    """SRV-1: a pool full of locked objects refuses, and no clock frees what is being moved."""
    with Bench(tmp_path, num_slots=2) as bench:
        engine = bench.rank()
        engine.store(keys_of(1, 2))
        found = engine.lookup(keys_of(1, 2))
        engine.retrieve(found.lease)
        bench.pass_s(1e6)
        assert engine.allocate(keys_of(8, 9)).no_room
        assert engine.lookup(keys_of(1, 2)).slots == found.slots
        engine.release(found.lease)


@pytest.mark.known_fault(37)
def test_a_lock_whose_retrieve_comes_too_late_is_gone_and_the_retrieve_is_told(tmp_path: Path) -> None:
    with Bench(tmp_path, lease_s=30.0) as bench:
        engine = bench.rank()
        engine.store(keys_of(1))
        found = engine.lookup(keys_of(1))
        bench.pass_s(29.9)
        assert bench.occupancy()[3] == 1
        bench.pass_s(0.2)
        assert bench.occupancy()[3] == 0
        with refused(Code.UNKNOWN_LEASE, "look it up again"):
            engine.retrieve(found.lease)


@pytest.mark.known_fault(40)
def test_two_requests_hold_a_chunk_twice(tmp_path: Path) -> None:
    with Bench(tmp_path, num_slots=1) as bench:
        engine = bench.rank()
        engine.store(keys_of(1))
        first, second = engine.lookup(keys_of(1)), engine.lookup(keys_of(1))
        assert engine.release(first.lease)
        assert not engine.release(first.lease)
        assert engine.allocate(keys_of(2)).no_room, "the second still holds it"
        assert engine.release(second.lease)
        assert not engine.allocate(keys_of(2)).no_room


def test_a_part_is_one_transfer_and_ends_once(tmp_path: Path) -> None:
    with Bench(tmp_path) as bench:
        engine = bench.rank()
        engine.store(keys_of(1))
        lease = engine.lookup(keys_of(1)).lease
        engine.retrieve(lease)
        with refused(Code.REFUSED, "the part of rank 0 is moving, not locked"):
            engine.retrieve(lease)
        with refused(Code.REFUSED, "there is nothing to commit"):
            engine.commit(lease)
        assert engine.abort(lease)
        with refused(Code.UNKNOWN_LEASE, "no part of rank 0"):
            engine.retrieve(lease)


def test_what_is_being_written_ends_by_commit_or_abort(tmp_path: Path) -> None:
    with Bench(tmp_path) as bench:
        engine = bench.rank()
        lease = engine.allocate(keys_of(1)).lease
        with refused(Code.REFUSED, "ends by COMMIT or ABORT"):
            engine.release(lease)
        with refused(Code.REFUSED, "is writing, not locked"):
            engine.retrieve(lease)
        assert engine.abort(lease)
        assert engine.lookup(keys_of(1)) == MISS
        assert bench.occupancy() == (4, 0, 0, 0)
        with refused(Code.UNKNOWN_LEASE, "has no part of rank 0"):
            engine.commit(lease)


def test_another_engine_s_leases_are_unknown(tmp_path: Path) -> None:
    """SRV-6."""
    with Bench(tmp_path) as bench:
        ours, other = bench.rank(engine="a"), bench.rank(engine="b")
        ours.store(keys_of(1))
        lease = ours.lookup(keys_of(1)).lease
        assert not other.release(lease)
        assert not other.abort(lease)
        with refused(Code.UNKNOWN_LEASE, "has no part of rank 0"):
            other.retrieve(lease)
        assert bench.occupancy()[3] == 1
