"""SRV-2: what a process held that is dead, or was not heard for too long; on a clock of the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from lamella.server.handlers import Peer
from lamella.server.protocol import Role
from lamella.server.wire import Code
from server_driver import Bench, keys_of, refused, registration


@pytest.mark.known_fault(46)
def test_what_a_killed_process_was_reading_is_free_at_the_next_look(tmp_path: Path) -> None:
    with Bench(tmp_path) as bench:
        engine = bench.rank()
        engine.store(keys_of(1, 2))
        engine.retrieve(engine.lookup(keys_of(1)).lease)
        engine.lookup(keys_of(1, 2))
        engine.die()
        bench.pass_s(0.25)
        assert bench.occupancy() == (2, 0, 2, 0)
        with refused(Code.UNKNOWN_SESSION, "register again"):
            engine.lookup(keys_of(1))
        assert not engine.ping().known
        assert bench.rank().lookup(keys_of(1, 2)).num_chunks == 2, "and its successor finds what it stored"


@pytest.mark.known_fault(44)
def test_what_a_killed_process_was_writing_is_left_alone_until_its_device_has_let_go(tmp_path: Path) -> None:
    with Bench(tmp_path, num_slots=2, grace_s=2.0) as bench:
        engine, other = bench.rank(engine="dies"), bench.rank(engine="lives")
        lease = engine.allocate(keys_of(1, 2)).lease
        engine.die()
        bench.pass_s(0.25)
        assert other.allocate(keys_of(3)).no_room, "its copies may still write there"
        assert not other.abort(lease), "nobody else can end it"
        bench.pass_s(2.0)
        assert other.allocate(keys_of(1, 2)).lease != 0, "and the chunks can be stored by another"


def test_a_process_that_lives_keeps_what_it_moves_however_silent_it_is(tmp_path: Path) -> None:
    with Bench(tmp_path, silent_s=5.0) as bench:
        engine = bench.rank()
        engine.store(keys_of(1))
        engine.retrieve(engine.lookup(keys_of(1)).lease)
        bench.pass_s(1e5)
        assert engine.ping().known
        assert bench.occupancy()[3] == 1


def test_a_peer_of_another_host_lives_while_it_is_heard(tmp_path: Path) -> None:
    with Bench(tmp_path, silent_s=5.0) as bench:
        remote = Peer(is_local=False)
        session = bench.ask(registration(role=Role.SCHEDULER), remote).session
        for _ in range(3):
            bench.pass_s(4.0)
            assert bench.service.sessions.heard(session) is not None
        bench.pass_s(5.1)
        assert bench.service.sessions.heard(session) is None
        with refused(Code.REFUSED, "a peer over TCP has none"):
            bench.ask(registration(role=Role.SCHEDULER, alive="alive-0"), remote)
        with refused(Code.REFUSED, "is not that of a live process"):
            bench.ask(registration(role=Role.SCHEDULER, alive="alive-9"))


def test_a_scheduler_s_death_frees_its_locks_and_leaves_its_ranks_transfers(tmp_path: Path) -> None:
    with Bench(tmp_path) as bench:
        scheduler, rank = bench.scheduler(), bench.rank()
        rank.store(keys_of(1, 2))
        moved, waiting = scheduler.lookup(keys_of(1)).lease, scheduler.lookup(keys_of(2)).lease
        writing = scheduler.allocate(keys_of(3)).lease
        rank.retrieve(moved)
        assert waiting == 0, "chunk 2 is none of its own prefix"
        locked = scheduler.lookup(keys_of(1, 2)).lease
        scheduler.die()
        bench.pass_s(0.25)
        with refused(Code.UNKNOWN_LEASE, "has no part of rank 0"):
            rank.retrieve(locked)
        assert rank.release(moved)
        rank.commit(writing)
        assert rank.lookup(keys_of(3)).num_chunks == 1, "a rank's copies go on, and what it wrote counts"


def test_a_new_process_of_a_rank_takes_its_place(tmp_path: Path) -> None:
    with Bench(tmp_path) as bench:
        old = bench.rank()
        old.store(keys_of(1))
        new = bench.rank()
        assert new.lookup(keys_of(1)).num_chunks == 1
        old.die()
        bench.pass_s(0.25)
        assert new.lookup(keys_of(1)).num_chunks == 1, "the old one's end is not the new one's"
