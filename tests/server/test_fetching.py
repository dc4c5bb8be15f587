"""Tiers behind a server: what is stored reaches them, and what only they have is brought before it is locked."""

from __future__ import annotations

import threading
import time
import timeit
from pathlib import Path

import pytest

from lamella.connector.storage.file_tier import FileTier
from lamella.cuda_ext.pool import HostPool
from lamella.server.frames import RefusedError
from lamella.server.protocol import Found
from lamella.server.wire import Code
from server_driver import MISS, Bench, Client, keys_of, layout_of, space_of
from waiting import wait_until


def fill(pool: HostPool, slots: tuple[int, ...], byte: int) -> None:
    for slot in slots:
        with pool.memory.buffer(slot) as view:
            view[:] = bytes([byte + slot]) * len(view)


def store(bench: Bench, engine: Client, *document: int, byte: int = 1) -> tuple[int, ...]:
    stored = engine.allocate(keys_of(*document))
    (place,) = stored.places
    fill(bench.pools[0], place.slots, byte)
    engine.commit(stored.lease)
    bench.service.places.all()[0].flush(10)
    return place.slots


def come(engine: Client, *document: int) -> Found:
    """Asked again until no tier has more to bring."""
    found = engine.lookup(keys_of(*document))

    def settled() -> bool:
        nonlocal found
        if found.pending:
            engine.release(found.lease)
            found = engine.lookup(keys_of(*document))
        return not found.pending

    wait_until(settled, "the tiers have answered")
    return found


def test_what_a_server_stored_is_found_by_the_next_one_with_its_bytes(tmp_path: Path) -> None:
    tiers = (str(tmp_path / "tier"),)
    with Bench(tmp_path, tiers=tiers) as first:
        store(first, first.rank(), 1, 2)
    with Bench(tmp_path, tiers=tiers) as second:
        engine = second.rank()
        asked = engine.lookup(keys_of(1, 2, 3))
        assert asked == Found(0, 0, (), True), "nothing is locked before its bytes are there"
        found = come(engine, 1, 2, 3)
        assert found.num_chunks == 2
        for chunk, slot in enumerate(found.slots[0]):
            with second.pools[0].memory.buffer(slot) as view:
                assert view == bytes([1 + chunk]) * layout_of().object_bytes
        engine.release(found.lease)


def test_who_does_not_want_tiers_does_not_wait_for_them(tmp_path: Path) -> None:
    tiers = (str(tmp_path / "tier"),)
    with Bench(tmp_path, tiers=tiers) as first:
        store(first, first.rank(), 1)
    with Bench(tmp_path, tiers=tiers) as second:
        engine = second.rank()
        assert engine.lookup(keys_of(1), use_tiers=False) == MISS
        assert second.service.places.all()[0].fetching.num_open == 0


def test_what_the_pool_has_is_locked_while_a_tier_brings_the_rest(tmp_path: Path) -> None:
    tiers = (str(tmp_path / "tier"),)
    with Bench(tmp_path, tiers=tiers, num_slots=2) as bench:
        engine = bench.rank()
        store(bench, engine, 1, 2)
        bench.pools[0].discard(keys_of(1, 2)[1:])
        found = engine.lookup(keys_of(1, 2))
        assert (found.num_chunks, found.pending) == (1, True)
        assert engine.retrieve(found.lease).slots == (0,)
        engine.release(found.lease)
        assert come(engine, 1, 2).num_chunks == 2


def test_a_full_pool_is_not_emptied_for_a_tier(tmp_path: Path) -> None:
    tiers = (str(tmp_path / "tier"),)
    with Bench(tmp_path, tiers=tiers, num_slots=2) as first:
        store(first, first.rank(), 1, 2)
    with Bench(tmp_path, tiers=tiers, num_slots=2) as second:
        engine = second.rank()
        store(second, engine, 7, 8)
        held = engine.lookup(keys_of(7, 8)).lease
        assert come(engine, 1, 2) == MISS
        assert second.occupancy() == (0, 0, 2, 2)
        engine.release(held)


def test_an_object_that_is_damaged_on_its_way_is_a_miss_and_leaves_no_slot_behind(tmp_path: Path) -> None:
    tiers = (str(tmp_path / "tier"),)
    with Bench(tmp_path, tiers=tiers) as first:
        store(first, first.rank(), 1, 2, 3)
    files = sorted((tmp_path / "tier").rglob("*.kv"), key=lambda path: path.stat().st_mtime_ns)
    key = keys_of(1, 2, 3)[1]
    (second_chunk,) = [path for path in files if key.prefix.hex() in str(path)]
    damaged = bytearray(second_chunk.read_bytes())
    damaged[-20] ^= 1
    second_chunk.write_bytes(damaged)
    with Bench(tmp_path, tiers=tiers) as bench:
        engine = bench.rank()
        found = come(engine, 1, 2, 3)
        assert found.num_chunks == 1, "what comes before it is good"
        engine.release(found.lease)
        assert bench.occupancy() == (3, 0, 1, 0)


def test_ranks_are_brought_each_its_own_and_count_together(tmp_path: Path) -> None:
    tiers, both = (str(tmp_path / "tier"),), 2 * layout_of().object_bytes

    def ranks(bench: Bench) -> list[Client]:
        return [bench.rank(rank=rank, num_ranks=2, space=space_of(rank=rank, ranks=2)) for rank in range(2)]

    with Bench(tmp_path, tiers=tiers, chunk_bytes=both) as first:
        clients = ranks(first)
        lease = clients[0].allocate(keys_of(1, 2)).lease
        for client in clients:
            client.commit(lease)
        for place in first.service.places.all():
            place.flush(10)
    with Bench(tmp_path, tiers=tiers, chunk_bytes=both) as second:
        found = come(ranks(second)[0], 1, 2)
        assert (found.num_chunks, [len(slots) for slots in found.slots]) == (2, [2, 2])


def test_what_was_asked_of_tiers_lately_costs_the_next_question_nothing(tmp_path: Path) -> None:
    """Each look-up went through every answer of the last second, on the server's one thread."""
    with Bench(tmp_path, tiers=(str(tmp_path / "tier"),)) as bench:
        bench.rank()
        fetching = bench.service.places.all()[0].fetching

        def shortest_s(settled: int) -> float:
            fetching._settled = {key: time.monotonic_ns() + 10**12 for key in keys_of(*range(10, 10 + settled))}
            asked = keys_of(10)
            assert not fetching.want(asked, 0)
            return min(timeit.repeat(lambda: fetching.want(asked, 0), number=1, repeat=20))

        assert shortest_s(20_000) < 20 * shortest_s(20)


def test_an_answer_counts_for_a_second_whatever_was_settled_before_and_after(tmp_path: Path) -> None:
    with Bench(tmp_path, tiers=(str(tmp_path / "tier"),)) as bench:
        bench.rank()
        fetching = bench.service.places.all()[0].fetching
        now_ns = 0
        fetching._clock_ns = lambda: now_ns

        def asks(document: int) -> bool:
            asked = fetching.want(keys_of(document), 0)
            wait_until(lambda: fetching.num_open == 0, "it has answered")
            return asked

        assert asks(1)
        now_ns = 600_000_000
        assert asks(2)
        assert not asks(1)
        now_ns = 1_100_000_000
        assert asks(1), "its second is over"
        assert not asks(2)
        now_ns = 1_700_000_000
        assert asks(2)
        assert not asks(1), "settled anew, a moment ago"


def test_tenants_are_apart_in_the_tiers_too(tmp_path: Path) -> None:
    tiers = (str(tmp_path / "tier"),)
    with Bench(tmp_path, tiers=tiers) as first:
        engine = first.rank(space=space_of(salt=b"mine"))
        engine.store(keys_of(1, space=space_of(salt=b"mine")))
        first.service.places.all()[0].flush(10)
    with Bench(tmp_path, tiers=tiers) as second:
        other = second.rank(space=space_of(salt=b"theirs"))
        assert come(other, 1) == MISS
        found = other.lookup(keys_of(1, space=space_of(salt=b"mine")))
        wait_until(lambda: second.service.places.all()[0].fetching.num_open == 0, "it has answered")
        assert other.lookup(keys_of(1, space=space_of(salt=b"mine"))).num_chunks == found.num_chunks == 0


def test_a_tier_that_cannot_be_opened_refuses_the_registration_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with Bench(tmp_path, tiers=(str(tmp_path / "file"),)) as bench:
        with pytest.raises(RefusedError, match="file") as refused:
            bench.rank()
        assert refused.value.code is Code.REFUSED
        assert bench.pools == []


def test_a_tier_that_does_not_end_does_not_hold_up_the_server_s_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(FileTier, "put", lambda self, key, data: goes_on.wait(20) and None)
    bench = Bench(tmp_path, tiers=(str(tmp_path / "tier"),))
    bench.rank().store(keys_of(1))
    (pool,) = bench.pools
    bench.service.close(0.2)
    assert "reads and puts of tiers have not ended within 0.2 s" in caplog.text
    assert "is not closed" in caplog.text
    goes_on.set()
    bench.service.places.all()[0].flush(20)
    pool.close()
