"""SRV-3: engines of several ranks or stages on one service: one answer for all, and a part for each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lamella.reference.geometry import KVGeometry, ObjectForm
from lamella.reference.layout import ObjectLayout
from lamella.server.shapes import send_groups
from lamella.server.wire import Code
from server_driver import CHUNK, MISS, Bench, Client, keys_of, layout_of, refused, registration, space_of


def two_ranks(bench: Bench, **others: object) -> tuple[Client, Client, Client]:
    """A tensor-parallel engine: its scheduler and two ranks, each with a process of its own."""
    ranks = [bench.rank(rank=rank, num_ranks=2, space=space_of(rank=rank, ranks=2), **others) for rank in range(2)]
    return bench.scheduler(num_ranks=2), ranks[0], ranks[1]


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


def test_keys_that_one_rank_refuses_take_no_slot_of_another(tmp_path: Path) -> None:
    """Ranks with chunks of other sizes: the last one is a chunk of the first alone."""
    half = CHUNK // 2
    smaller = ObjectLayout.single(KVGeometry(2, 2, 1, 4, 2, half), half, ObjectForm.TOKEN)
    space = replace(space_of(rank=1, ranks=2), chunk_tokens=half)
    with Bench(tmp_path, models=2) as bench:
        first = bench.rank(num_ranks=2, space=space_of(ranks=2))
        bench.rank(num_ranks=2, rank=1, space=space, groups=send_groups(smaller))
        with refused(Code.REFUSED, f"between 1 and {half} tokens, got last_tokens {CHUNK}"):
            first.allocate(keys_of(1))
        assert bench.occupancy()[1] == 0, "nothing is being written"
