"""The server's rules, on a clock of the test's own: what is locked, for whom, and what ends it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

import lamella
from lamella.reference.keys import chunk_keys
from lamella.server.frames import RefusedError
from lamella.server.handlers import Peer
from lamella.server.leases import PartState
from lamella.server.protocol import Found, Role, Stats, TransferSide
from lamella.server.settings import ServerSettings
from lamella.server.wire import Code
from server_driver import Bench, Client, keys_of, layout_of, registration, space_of, tokens

MISS = Found(0, 0, (), False)


@contextmanager
def refused(code: Code, says: str) -> Iterator[None]:
    with pytest.raises(RefusedError, match=says) as found:
        yield
    assert found.value.code is code


def two_ranks(bench: Bench, **others: object) -> tuple[Client, Client, Client]:
    """A tensor-parallel engine: its scheduler and two ranks, each with a process of its own."""
    ranks = [bench.rank(rank=rank, num_ranks=2, space=space_of(rank=rank, ranks=2), **others) for rank in range(2)]
    return bench.scheduler(num_ranks=2), ranks[0], ranks[1]


# ---- a first look


def test_what_one_engine_stores_is_found_and_locked_and_let_go(tmp_path: Path) -> None:
    with Bench(tmp_path) as bench:
        engine = bench.rank()
        stored = engine.allocate(keys_of(1, 2))
        assert [(place.rank, place.chunks, place.slots) for place in stored.places] == [(0, (0, 1), (0, 1))]
        assert engine.lookup(keys_of(1, 2)) == MISS, "nobody sees what is being written"
        engine.commit(stored.lease)
        found = engine.lookup(keys_of(1, 2, 3))
        assert (found.num_chunks, found.slots) == (2, ((0, 1),))
        assert engine.retrieve(found.lease).slots == (0, 1)
        assert engine.release(found.lease)
        assert not engine.release(found.lease), "saying it twice does no harm"
        assert bench.occupancy() == (2, 0, 2, 0)


def test_chunks_that_the_engine_has_already_count_and_are_not_locked(tmp_path: Path) -> None:
    with Bench(tmp_path) as bench:
        engine = bench.rank()
        engine.store(keys_of(1, 2, 3))
        found = engine.lookup(keys_of(1, 2, 3), first_wanted=2)
        assert (found.num_chunks, found.slots) == (3, ((2,),))
        assert engine.retrieve(found.lease).first_chunk == 2
        with refused(Code.REFUSED, "first_wanted must be at most 1"):
            engine.lookup(keys_of(1), first_wanted=2)


def test_a_lookup_of_nothing_locks_nothing(tmp_path: Path) -> None:
    with Bench(tmp_path) as bench:
        engine = bench.rank()
        assert engine.lookup(()) == MISS
        assert engine.lookup(keys_of(9)) == MISS
        assert engine.allocate(()).lease == 0


def test_what_is_there_or_being_written_is_not_given_to_another(tmp_path: Path) -> None:
    with Bench(tmp_path) as bench:
        one, other = bench.rank(engine="one"), bench.rank(engine="other")
        writing = one.allocate(keys_of(1, 2))
        assert other.allocate(keys_of(1, 2)).lease == 0
        one.commit(writing.lease)
        again = other.allocate(keys_of(1, 2, 3))
        assert [(place.chunks, place.slots) for place in again.places] == [((2,), (2,))], (
            "and the prefix stays in a row"
        )
        other.commit(again.lease)
        assert other.lookup(keys_of(1, 2, 3)).num_chunks == 3, "engines of one model share what they store"


@pytest.mark.known_fault(41)
def test_a_store_gets_every_slot_or_none_and_is_told_to_come_again(tmp_path: Path) -> None:
    with Bench(tmp_path, num_slots=4) as bench:
        engine = bench.rank()
        engine.store(keys_of(1, 2, 3))
        found = engine.lookup(keys_of(1, 2, 3))
        refusal = engine.allocate(keys_of(7, 8))
        assert (refusal.lease, refusal.no_room) == (0, True)
        assert bench.occupancy() == (1, 0, 3, 3), "nothing was evicted for it"
        engine.release(found.lease)
        assert engine.allocate(keys_of(7, 8)).lease != 0
        assert engine.allocate(keys_of(*range(20, 25))).no_room, "more than there are slots"


# ---- SRV-1


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


# ---- SRV-2


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


# ---- SRV-3: ranks


def test_a_lookup_answers_the_minimum_over_the_ranks_and_locks_it_on_each(tmp_path: Path) -> None:
    with Bench(tmp_path, num_slots=4, chunk_bytes=2 * layout_of().object_bytes) as bench:
        scheduler, first, second = two_ranks(bench)
        lease = scheduler.allocate(keys_of(1, 2, 3)).lease
        first.commit(lease)
        assert scheduler.lookup(keys_of(1, 2, 3)) == MISS, "rank 1 has not written yet"
        second.commit(lease)
        found = scheduler.lookup(keys_of(1, 2, 3))
        assert (found.num_chunks, [len(slots) for slots in found.slots]) == (3, [3, 3])
        second.release(found.lease)
        first.release(found.lease)
        bench.pools[1].discard([key._replace(space=space_of(rank=1, ranks=2).digest()) for key in keys_of(1, 2, 3)[2:]])
        found = scheduler.lookup(keys_of(1, 2, 3))
        assert (found.num_chunks, [len(slots) for slots in found.slots]) == (2, [2, 2])
        assert bench.occupancy()[3] == 4, "nothing more is locked than what was answered"
        one_rank = scheduler.lookup(keys_of(1, 2, 3), rank=0)
        assert (one_rank.num_chunks, len(one_rank.slots)) == (3, 1)


def test_an_engine_of_which_a_rank_is_missing_finds_and_stores_nothing(tmp_path: Path) -> None:
    with Bench(tmp_path, chunk_bytes=2 * layout_of().object_bytes) as bench:
        scheduler, first, second = two_ranks(bench)
        lease = scheduler.allocate(keys_of(1)).lease
        first.commit(lease)
        second.commit(lease)
        second.die()
        bench.pass_s(3.0)
        assert scheduler.lookup(keys_of(1)) == MISS
        assert scheduler.allocate(keys_of(2)).lease == 0


def test_each_rank_ends_its_own_part(tmp_path: Path) -> None:
    with Bench(tmp_path, num_slots=2, chunk_bytes=2 * layout_of().object_bytes) as bench:
        scheduler, first, second = two_ranks(bench)
        lease = scheduler.allocate(keys_of(1)).lease
        with refused(Code.REFUSED, "a rank moves its own part: this session is rank 0, the part rank 1"):
            first.commit(lease, rank=1)
        with refused(Code.REFUSED, "this session is scheduler 0"):
            scheduler.commit(lease, rank=0)
        first.commit(lease)
        second.abort(lease)
        assert scheduler.lookup(keys_of(1)) == MISS, "one rank alone has nothing an engine could use"
        again = scheduler.allocate(keys_of(1))
        assert [place.rank for place in again.places] == [1], "and only the other writes again"


def test_no_room_on_one_rank_is_no_room_on_any(tmp_path: Path) -> None:
    with Bench(tmp_path, num_slots=1, chunk_bytes=2 * layout_of().object_bytes) as bench:
        scheduler, _first, second = two_ranks(bench)
        second.allocate(keys_of(9), rank=1)
        assert scheduler.allocate(keys_of(1)).no_room
        assert bench.occupancy() == (1, 1, 0, 0), "rank 0 kept nothing for it"


@pytest.mark.known_fault(13, 14, 16)
def test_uneven_pipeline_stages_have_as_many_chunks_each_and_objects_of_their_own(tmp_path: Path) -> None:
    stages = [(0, 21), (21, 44)]
    sizes = [layout_of(end - first).object_bytes for first, end in stages]
    with Bench(tmp_path, num_slots=5, chunk_bytes=sum(sizes)) as bench:
        ranks = [
            bench.rank(rank=rank, num_ranks=2, space=space_of(stage), chunk_bytes=sum(sizes))
            for rank, stage in enumerate(stages)
        ]
        pools = [rank.registered.pool for rank in ranks]
        assert [(pool.object_bytes, pool.num_slots) for pool in pools if pool] == [(size, 5) for size in sizes]
        assert len({pool.path for pool in pools if pool}) == 2, "a worker maps its own stage's memory alone"
        scheduler = bench.scheduler(num_ranks=2)
        lease = scheduler.allocate(keys_of(1, 2)).lease
        for rank in ranks:
            rank.commit(lease)
        assert scheduler.lookup(keys_of(1, 2)).num_chunks == 2
        with refused(Code.REFUSED, r"the key space says \(chunk tokens, layers\) \(4, 23\), the objects have \(4, 2\)"):
            bench.rank(rank=1, num_ranks=2, space=space_of((21, 44)), groups=registration().groups)


@pytest.mark.known_fault(74)
def test_another_number_of_ranks_finds_nothing_of_what_was_stored(tmp_path: Path) -> None:
    with Bench(tmp_path, chunk_bytes=2 * layout_of().object_bytes, models=2) as bench:
        scheduler, first, second = two_ranks(bench)
        lease = scheduler.allocate(keys_of(1)).lease
        first.commit(lease)
        second.commit(lease)
        alone = bench.rank(engine="alone", chunk_bytes=layout_of().object_bytes)
        assert alone.lookup(keys_of(1)) == MISS


def test_ranks_that_disagree_on_a_chunk_s_bytes_are_refused(tmp_path: Path) -> None:
    with Bench(tmp_path, num_slots=8) as bench:
        bench.rank(rank=0, num_ranks=2, space=space_of(rank=0, ranks=2))
        with refused(Code.REFUSED, "another rank said that a chunk of this model has 256 bytes"):
            bench.rank(rank=1, num_ranks=2, space=space_of(rank=1, ranks=2), chunk_bytes=500)
        with refused(Code.REFUSED, "at least this rank's 128, got 5"):
            bench.rank(chunk_bytes=5)


# ---- SRV-5: tenants


@pytest.mark.known_fault(31)
def test_tenants_share_the_memory_and_nothing_in_it(tmp_path: Path) -> None:
    """SRV-5: neither another salt in the tokens' chain nor another in the rank's space can hit, and locks come back."""
    mine, theirs = space_of(salt=b"mine"), space_of(salt=b"theirs")
    with Bench(tmp_path) as bench:
        ours = bench.rank(engine="a", space=mine)
        other = bench.rank(engine="b", space=theirs)
        assert ours.registered.pool == other.registered.pool
        ours.store(keys_of(1, space=mine))
        assert other.lookup(keys_of(1, space=theirs)) == MISS
        assert other.lookup(keys_of(1, space=mine)) == MISS, "not even with the other's prefixes in hand"
        request = space_of(salt=b"4:mine" + b"request salt")
        ours.store(keys_of(2, space=request))
        assert ours.lookup(keys_of(2, space=mine)) == MISS, "a request's own salt is a tenant of its own"
        lease = ours.lookup(keys_of(2, space=request)).lease
        assert ours.release(lease)
        assert bench.occupancy()[3] == 0


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


# ---- who may register


def test_another_version_is_refused_with_both_named(tmp_path: Path) -> None:
    with (
        Bench(tmp_path) as bench,
        refused(Code.VERSION, f"server is lamella {lamella.__version__}, the client lamella 9.9"),
    ):
        bench.rank(lamella_version="9.9")


def test_what_a_registration_says_is_checked(tmp_path: Path) -> None:
    with Bench(tmp_path, num_slots=2, max_sessions=3) as bench:
        with refused(Code.REFUSED, "rank must be between 0 and 0, got 1"):
            bench.rank(rank=1)
        with refused(Code.REFUSED, "a rank registers with its key space"):
            bench.ask(msgspec.structs.replace(registration(alive=bench.rank().mark), space=None))
        with refused(Code.REFUSED, "this server moves no bytes: start it with --device"):
            bench.rank(transfer_side=TransferSide.SERVER)
        with refused(Code.REFUSED, "give the server more, or make chunks smaller"):
            bench.rank(chunk_bytes=10_000)
        bench.rank(engine="a")
        bench.rank(engine="b")
        with refused(Code.REFUSED, "3 peers are registered, which is the limit"):
            bench.rank(engine="c")


def test_memory_is_divided_among_models_and_one_more_waits_for_another_to_leave(tmp_path: Path) -> None:
    with Bench(tmp_path, num_slots=4, models=2) as bench:
        one = bench.rank(engine="a", space=space_of(model="a"))
        bench.rank(engine="b", space=space_of(model="b"))
        assert one.registered.pool is not None
        assert one.registered.pool.num_slots == 2
        with refused(Code.REFUSED, "start it with --models 3"):
            bench.rank(engine="c", space=space_of(model="c"))
        one.die()
        bench.pass_s(1.0)
        bench.rank(engine="c", space=space_of(model="c"))
        assert len(bench.pools) == 2


def test_a_new_process_of_a_rank_takes_its_place(tmp_path: Path) -> None:
    with Bench(tmp_path) as bench:
        old = bench.rank()
        old.store(keys_of(1))
        new = bench.rank()
        assert new.lookup(keys_of(1)).num_chunks == 1
        old.die()
        bench.pass_s(0.25)
        assert new.lookup(keys_of(1)).num_chunks == 1, "the old one's end is not the new one's"


def test_slots_that_a_worker_s_device_does_not_reach_yet_are_not_given_to_it(tmp_path: Path) -> None:
    with Bench(tmp_path, num_slots=4) as bench:
        ready, pinning = bench.rank(engine="a"), bench.rank(engine="b", ready=0)
        ready.store(keys_of(1, 2, 3))
        assert pinning.lookup(keys_of(1, 2, 3)) == MISS
        pinning.ping(ready=2)
        found = pinning.lookup(keys_of(1, 2, 3))
        assert (found.num_chunks, found.slots) == (2, ((0, 1),))
        assert pinning.allocate(keys_of(9)).no_room
        assert bench.occupancy() == (1, 0, 3, 2)
        pinning.ping(ready=4)
        assert pinning.allocate(keys_of(9)).lease != 0


# ---- the end


def test_a_server_that_drains_takes_nothing_new_and_waits_for_what_moves(tmp_path: Path) -> None:
    with Bench(tmp_path) as bench:
        engine = bench.rank()
        engine.store(keys_of(1))
        locked, moving = engine.lookup(keys_of(1)).lease, engine.lookup(keys_of(1)).lease
        writing = engine.allocate(keys_of(2)).lease
        engine.retrieve(moving)
        bench.service.drain()
        for ask in (lambda: engine.lookup(keys_of(1)), lambda: engine.allocate(keys_of(3)), bench.rank):
            with refused(Code.DRAINING, "the server is stopping"):
                ask()
        assert engine.ping().draining
        assert engine.retrieve(locked).slots == (0,), "what was promised before holds"
        assert not bench.service.lending.is_idle
        engine.release(locked)
        engine.release(moving)
        engine.commit(writing)
        assert bench.service.lending.is_idle


def test_figures_say_what_is_held_and_what_happened(tmp_path: Path) -> None:
    with Bench(tmp_path, num_slots=2, lease_s=5.0) as bench:
        engine = bench.rank()
        engine.store(keys_of(1, 2))
        engine.retrieve(engine.lookup(keys_of(1, 2, 3)).lease)
        figures = bench.ask(Stats()).figures
        assert figures["lamella_server_sessions"] == 1
        assert figures["lamella_server_asked_chunks_total"] == 3
        assert figures["lamella_server_hit_chunks_total"] == 2
        assert figures["lamella_server_stored_objects_total"] == 2
        assert figures["lamella_server_retrieves_total{side=worker}"] == 1
        assert figures["lamella_server_parts{state=moving}"] == 1
        assert figures["lamella_server_slots{place=m rank 0 of 1 layers 0-1,state=pinned}"] == 2
        engine.allocate(keys_of(9))
        engine.die()
        bench.pass_s(1.0)
        figures = bench.ask(Stats()).figures
        assert figures["lamella_server_no_room_total"] == 1
        assert figures["lamella_server_reaped_sessions_total"] == 1
        assert figures["lamella_server_reaped_parts_total"] == 1
        assert figures["lamella_server_sessions"] == 0
        assert 'lamella_server_slots{place="m rank 0 of 1 layers 0-1",state="ready"} 2.0' in bench.service.metrics.text(
            ()
        )


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"pool_bytes": 0}, "pool_bytes must be at least 1, got 0"),
        ({"lease_s": 0.0}, "lease_s must be positive and finite, got 0.0"),
        ({"silent_s": 3.0}, r"silent_s \(3.0\) must be more than two pings of ping_s \(2.0\)"),
        ({"tier_ttl_s": 5.0}, "limit tiers: name one"),
        ({"tiers": ("ftp://x",)}, "begins with one of"),
    ],
)
def test_settings_that_cannot_mean_anything_are_refused(wrong: dict[str, object], says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        ServerSettings(tmp_path, **wrong)  # type: ignore[arg-type]


def test_a_store_of_a_key_twice_is_refused_and_takes_nothing(tmp_path: Path) -> None:
    with Bench(tmp_path) as bench:
        engine = bench.rank()
        key = keys_of(1)[0]
        with refused(Code.REFUSED, "each key can be reserved once"):
            engine.allocate((key, key))
        assert bench.occupancy() == (4, 0, 0, 0)
        assert bench.service.leases.count(PartState.WRITING) == 0


def test_a_partial_last_chunk_is_an_object_of_its_own(tmp_path: Path) -> None:
    with Bench(tmp_path) as bench:
        engine = bench.rank()
        partial = chunk_keys(space_of(), [*tokens(1), 2, 2], partial=True)
        engine.store(partial)
        assert engine.lookup(partial).num_chunks == 2
        assert engine.lookup(keys_of(1, 2)).num_chunks == 1
