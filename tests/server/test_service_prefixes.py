"""What a server keeps of prompts that are stored over several steps, read in part and given up: their heads. KEEP-1."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lamella.server.frames import allocation
from lamella.server.wire import EVERY_RANK, Code
from server_driver import Bench, Client, keys_of, refused, space_of

STEPS = st.lists(st.integers(1, 4), min_size=1, max_size=4)


def store(engine: Client, document: tuple[int, ...], ends: list[int]) -> None:
    """A prompt computed in so many steps."""
    for first, end in zip([0, *ends], ends, strict=False):
        lease = engine.allocate(keys_of(*document[:end]), first).lease
        if lease:
            engine.commit(lease)


def ends_of(steps: list[int]) -> list[int]:
    return [sum(steps[: number + 1]) for number in range(len(steps))]


def there(engine: Client, document: tuple[int, ...]) -> int:
    """Chunks that could be hit."""
    return engine.bench.pools[0].leading_hits(keys_of(*document))


def test_a_prompt_stored_over_several_steps_loses_its_tail_before_its_head(tmp_path: Path) -> None:
    with Bench(tmp_path, num_slots=4) as bench:
        engine = bench.rank()
        store(engine, (1, 1, 1, 1), [1, 2, 3, 4])
        store(engine, (2,), [1])
        assert there(engine, (1, 1, 1, 1)) == 3


def test_a_prompt_longer_than_the_pool_keeps_its_head_and_what_follows_is_told_so(tmp_path: Path) -> None:
    with Bench(tmp_path, num_slots=4) as bench:
        engine = bench.rank()
        keys = keys_of(*range(8))
        store(engine, tuple(range(8)), [2, 4])
        assert engine.allocate(keys[:6], 4).no_room
        later = engine.allocate(keys, 6)
        assert (later.lease, later.no_room, later.no_head) == (0, False, True)
        assert there(engine, tuple(range(8))) == 4
        assert bench.service.metrics.figures()["lamella_server_no_head_total"] == 1


def test_the_head_stays_while_its_tail_is_written_and_can_leave_when_that_is_given_up(tmp_path: Path) -> None:
    with Bench(tmp_path, num_slots=3) as bench:
        engine = bench.rank()
        store(engine, (1,), [1])
        tail = engine.allocate(keys_of(1, 1, 1), 1).lease
        assert engine.allocate(keys_of(2)).no_room
        engine.abort(tail)
        assert engine.allocate(keys_of(2, 2, 2)).lease != 0


def test_a_tail_that_was_read_behind_the_engines_own_hit_leaves_before_its_head(tmp_path: Path) -> None:
    with Bench(tmp_path, num_slots=4) as bench:
        engine = bench.rank()
        store(engine, (1, 1, 1, 1), [4])
        engine.release(engine.lookup(keys_of(1, 1, 1, 1), 2).lease)
        store(engine, (2,), [1])
        assert there(engine, (1, 1, 1, 1)) == 3


def test_what_one_rank_has_no_head_for_no_rank_stores(tmp_path: Path) -> None:
    with Bench(tmp_path, num_slots=4) as bench:
        spaces = [space_of(rank=rank, ranks=2) for rank in range(2)]
        ranks = [bench.rank(rank=rank, num_ranks=2, space=spaces[rank]) for rank in range(2)]
        lease = ranks[0].allocate(keys_of(1)).lease
        ranks[0].commit(lease)
        ranks[1].abort(lease, 1)
        assert ranks[0].allocate(keys_of(1, 1), 1).no_head
        assert ranks[0].allocate(keys_of(1, 1), 1, rank=0).lease != 0, "this one alone can use it"


def test_behind_a_tier_a_tail_is_stored_whatever_the_pool_has_lost(tmp_path: Path) -> None:
    """The tier brings the head back."""
    with Bench(tmp_path, num_slots=4, tiers=(str(tmp_path / "tier"),)) as bench:
        engine = bench.rank()
        store(engine, (1, 1), [1])
        bench.service.places.all()[0].flush(10)
        bench.pools[0].discard(keys_of(1))
        assert engine.allocate(keys_of(1, 1), 1).lease != 0


@pytest.mark.parametrize(("first", "after"), [(0, b"a" * 32), (1, b""), (1, b"short")])
def test_a_store_that_does_not_say_what_comes_before_is_refused_and_takes_nothing(
    tmp_path: Path, first: int, after: bytes
) -> None:
    with Bench(tmp_path) as bench:
        engine = bench.rank()
        message = msgspec.structs.replace(
            allocation(engine.session, keys_of(1), 0, EVERY_RANK), first_chunk=first, after=after
        )
        malformed = after == b"short"
        with refused(
            Code.MALFORMED if malformed else Code.REFUSED,
            "32 bytes each, got 5" if malformed else "chunk 0 alone has nothing before it",
        ):
            bench.ask(message)
        assert bench.occupancy() == (4, 0, 0, 0)


@pytest.mark.parametrize("first", [-1, 3])
def test_a_first_chunk_that_the_sequence_does_not_have_is_refused_before_anything_is_sent(first: int) -> None:
    with pytest.raises(ValueError, match=f"first_chunk must be between 0 and 2, the sequence's chunks, got {first}"):
        allocation(1, keys_of(1, 2), first, EVERY_RANK)


def test_chunks_that_would_come_behind_themselves_are_refused_and_keep_no_slot(tmp_path: Path) -> None:
    """They could never leave again."""
    with Bench(tmp_path, num_slots=2) as bench:
        engine = bench.rank()
        one, two = keys_of(1, 2)
        engine.store([one, two])
        bench.pools[0].discard([one])
        with refused(Code.REFUSED, "would come behind itself"):
            engine.allocate([two, one])
        assert bench.occupancy() == (1, 0, 1, 0)
        store(engine, (7, 7), [2])
        assert there(engine, (7, 7)) == 2


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num_slots=st.integers(1, 8),
    prompts=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), STEPS), min_size=1, max_size=10),
    reads=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6)), max_size=6),
)
def test_of_whatever_is_stored_and_read_in_part_only_ends_are_missing(
    tmp_path: Path, num_slots: int, prompts: list[tuple[int, int, list[int]]], reads: list[tuple[int, int]]
) -> None:
    """Prompts share two chunks at most, and are stored over steps in turns with reads behind an engine's own hits."""
    with Bench(tmp_path, num_slots=num_slots) as bench:
        engine = bench.rank()
        seen: list[tuple[int, ...]] = []
        for number, (shared, own, steps) in enumerate(prompts):
            length = sum(steps)
            document = (shared, shared, *[10 + own] * length)[:length]
            store(engine, document, ends_of(steps))
            seen.append(document)
            for which, local in reads[number : number + 2]:
                other = keys_of(*seen[which % len(seen)])
                found = engine.lookup(other, min(local, len(other)))
                if found.lease:
                    engine.release(found.lease)
            for one in seen:
                keys = keys_of(*one)
                ready = [bench.pools[0].leading_hits([key]) for key in keys]
                assert bench.pools[0].leading_hits(keys) == sum(ready), f"KEEP-1: {one} after {document}"
