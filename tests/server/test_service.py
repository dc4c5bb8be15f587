"""A service's whole course with one engine, on a clock of the test's own: stored, found, let go, drained, counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from lamella.reference.keys import chunk_keys
from lamella.server.leases import PartState
from lamella.server.protocol import Stats
from lamella.server.settings import ServerSettings
from lamella.server.wire import Code
from server_driver import MISS, Bench, keys_of, refused, space_of, tokens

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


# ---- settings, figures, the end


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
