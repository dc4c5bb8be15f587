"""The host pool against a plain model of it: least recently used leaves first, and always the end of a prefix."""

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lamella.sim.host_pool import PrefixPool


def prefix(branch: int, length: int) -> list[int]:
    """Chunk ids of a prompt: equal beginnings have equal ids, as in a trace. Prompts part where their branches do."""
    ids, node = [], 1
    for depth in range(length):
        node = 2 * node + (branch >> depth & 1)
        ids.append(node)
    return ids


PREFIXES = st.builds(prefix, st.integers(0, 7), st.integers(0, 6))


class PoolAgainstModel(RuleBasedStateMachine):
    """The model keeps (chunk -> instant of last touch) in a dictionary and looks for the oldest by hand."""

    @initialize(slots=st.integers(0, 8), chunk_bytes=st.integers(1, 100), rest=st.floats(0, 0.99))
    def begin(self, slots: int, chunk_bytes: int, rest: float) -> None:
        self.slots = slots
        self.pool = PrefixPool(slots * chunk_bytes + int(rest * chunk_bytes), chunk_bytes)
        self.touched: dict[int, int] = {}
        self.instant = 0

    def _touch(self, chunks: list[int]) -> None:
        for chunk in reversed(chunks):
            self.instant += 1
            self.touched[chunk] = self.instant

    @rule(chunks=PREFIXES)
    def insert(self, chunks: list[int]) -> None:
        self.pool.insert(chunks)
        self._touch(chunks)
        while len(self.touched) > self.slots:
            del self.touched[min(self.touched, key=self.touched.__getitem__)]

    @rule(chunks=PREFIXES)
    def use(self, chunks: list[int]) -> None:
        held = 0
        while held < len(chunks) and chunks[held] in self.touched:
            held += 1
        assert self.pool.held_prefix(chunks) == held
        assert self.pool.use(chunks) == held
        self._touch(chunks[:held])

    @invariant()
    def the_same_chunks_are_held(self) -> None:
        assert {chunk for chunk in range(1, 256) if chunk in self.pool} == set(self.touched)
        assert len(self.pool) == len(self.touched) <= self.slots

    @invariant()
    def no_chunk_is_held_without_those_before_it(self) -> None:
        for chunk in self.touched:
            assert chunk // 2 == 1 or chunk // 2 in self.pool, f"KEEP-1: {chunk} is of no use without {chunk // 2}"


TestPoolAgainstModel: Any = PoolAgainstModel.TestCase


def test_a_prefix_longer_than_the_pool_keeps_its_beginning() -> None:
    pool = PrefixPool(capacity_bytes=20, chunk_bytes=10)
    pool.insert([1, 2, 3])
    assert [chunk in pool for chunk in (1, 2, 3)] == [True, True, False]


def test_a_used_prefix_outlives_an_unused_one() -> None:
    pool = PrefixPool(capacity_bytes=40, chunk_bytes=10)
    pool.insert([1, 2])
    pool.insert([3, 4])
    assert pool.use([1, 2]) == 2
    pool.insert([5, 6])
    assert pool.held_prefix([1, 2]) == 2
    assert pool.held_prefix([3, 4]) == 0


def test_a_pool_smaller_than_a_chunk_holds_nothing() -> None:
    pool = PrefixPool(capacity_bytes=9, chunk_bytes=10)
    pool.insert([1])
    assert pool.held_prefix([1]) == 0


@pytest.mark.parametrize(("capacity", "chunk", "message"), [(-1, 1, "capacity_bytes"), (1, 0, "chunk_bytes")])
def test_impossible_sizes_are_refused(capacity: int, chunk: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"{message} must be at least"):
        PrefixPool(capacity, chunk)
