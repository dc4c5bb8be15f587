"""What the pool keeps of a prompt that is stored over several steps: its head, whoever needs room."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from lamella.connector.objects import PoolObjects
from lamella.reference.keys import ChunkKey

CHUNK_TOKENS = 16


def keys_of(document: int, num_chunks: int) -> tuple[ChunkKey, ...]:
    """Of a document's chunks."""
    return tuple(ChunkKey(b"space", bytes([document, number]), CHUNK_TOKENS) for number in range(num_chunks))


class Pool:
    """The scheduler side's objects, and prompts stored in them step by step."""

    def __init__(self, num_slots: int) -> None:
        settings = SimpleNamespace(file_tier=None, load_timeout_s=1.0)
        facts = SimpleNamespace(space=SimpleNamespace(chunk_tokens=CHUNK_TOKENS), num_ranks=1, refusal=None)
        self.objects = PoolObjects(cast("Any", settings), cast("Any", facts))
        self.objects.index.add_slots(0, num_slots)
        self._numbers = count()

    def store(self, document: int, ends: list[int], *, fails_at: int = -1) -> None:
        """Chunks up to each of `ends` in turn, as a prompt computed in so many steps; one store may fail."""
        kept = 0
        for step, end in enumerate(ends):
            keys = keys_of(document, end)
            orders = self.objects.reserve("r", keys, kept, (), lambda: next(self._numbers))
            ok = step != fails_at
            for order in orders or ():
                self.objects.store_ended(order, ok=ok)
            kept = end if ok else kept

    def is_a_prefix(self, document: int, num_chunks: int) -> bool:
        """Whether what is there of a document could be hit, all of it."""
        keys = keys_of(document, num_chunks)
        ready = [self.objects.index.is_ready(key) for key in keys]
        return self.objects.index.leading_hits(keys) == sum(ready)


PROMPTS = st.lists(
    st.tuples(st.integers(0, 5), st.lists(st.integers(1, 6), min_size=1, max_size=4)), min_size=1, max_size=12
)


@given(st.integers(1, 24), PROMPTS)
def test_a_prompt_loses_its_tail_before_its_head_in_however_many_steps_it_was_stored(
    num_slots: int, prompts: list[tuple[int, list[int]]]
) -> None:
    pool = Pool(num_slots)
    longest: dict[int, int] = {}
    for document, steps in prompts:
        ends = [sum(steps[: number + 1]) for number in range(len(steps))]
        pool.store(document, ends)
        longest[document] = max(longest.get(document, 0), ends[-1])
        for other, length in longest.items():
            assert pool.is_a_prefix(other, length), f"document {other} after {document}"


@given(st.integers(1, 12), st.lists(st.integers(1, 5), min_size=2, max_size=5))
def test_a_prompt_longer_than_the_pool_does_not_drive_out_its_own_head(num_slots: int, steps: list[int]) -> None:
    pool = Pool(num_slots)
    ends = [sum(steps[: number + 1]) for number in range(len(steps))]
    pool.store(0, ends)
    fitting = max((end for end in ends if end <= num_slots), default=0)
    assert pool.objects.index.leading_hits(keys_of(0, ends[-1])) >= fitting


@given(st.integers(0, 3))
def test_nothing_is_remembered_of_stores_that_ended_well_or_not(fails_at: int) -> None:
    pool = Pool(8)
    pool.store(0, [1, 3, 5], fails_at=fails_at)
    assert not pool.objects._prefixes
