"""Who may register with a service, what he gets of its memory, and that tenants share nothing in it (SRV-5)."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import lamella
from lamella.server.protocol import TransferSide
from lamella.server.wire import Code
from server_driver import MISS, Bench, keys_of, refused, registration, space_of


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
