"""What the pool keeps of a prompt that is stored over several steps: its head, whoever needs room."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from lamella.connector.objects import PoolObjects, Refusal, Taken
from lamella.connector.step_orders import Ended, LoadOrder, StepReport, StoreOrder
from lamella.reference.keys import ChunkKey
from prefix_model import Prefix, prefixes

CHUNK_TOKENS = 16


def keys_of(document: Sequence[int]) -> tuple[ChunkKey, ...]:
    """Of a document's chunks."""
    return tuple(ChunkKey(b"space", bytes(chunk), CHUNK_TOKENS) for chunk in prefixes(document))


def alone(document: int, num_chunks: int) -> tuple[ChunkKey, ...]:
    """Keys of a document that shares nothing with those of other numbers."""
    return keys_of([document] * num_chunks)


class Pool:
    """The scheduler side's objects, and prompts stored in them step by step."""

    def __init__(self, num_slots: int, *, keeps_files: bool = False, num_ranks: int = 1) -> None:
        self.num_slots = num_slots
        self.keeps_files = keeps_files
        chosen = SimpleNamespace(file_tier=Path("/never-entered") if keeps_files else None, load_timeout_s=1.0)
        facts = SimpleNamespace(space=SimpleNamespace(chunk_tokens=CHUNK_TOKENS), num_ranks=num_ranks, refusal=None)
        self.objects = PoolObjects(cast("Any", chosen), cast("Any", facts))
        self.objects.index.add_slots(0, num_slots)
        self._numbers = count()

    def reserve(self, document: int, first: int, end: int) -> Taken:
        """Orders to store these chunks."""
        return self.objects.reserve("r", alone(document, end), first, (), lambda: next(self._numbers))

    def store(self, document: int, ends: list[int], *, fails_at: int = -1) -> None:
        """Chunks up to each of `ends` in turn, as a prompt computed in so many steps; one store may fail."""
        kept = 0
        for step, end in enumerate(ends):
            ok = step != fails_at
            for order in self.reserve(document, kept, end).orders:
                self.objects.store_ended(order, ok=ok)
            kept = end if ok else kept

    def is_a_prefix(self, document: int, num_chunks: int) -> bool:
        """Whether what is there of a document could be hit, all of it."""
        keys = alone(document, num_chunks)
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
    assert pool.objects.index.leading_hits(alone(0, ends[-1])) >= fitting


def test_the_head_stays_while_its_tail_is_written() -> None:
    pool = Pool(3)
    pool.store(0, [1])
    (tail,) = pool.reserve(0, 1, 3).orders
    assert pool.reserve(1, 0, 1) == ([], Refusal.NO_ROOM), "whoever asks"
    pool.objects.store_ended(tail, ok=True)
    assert pool.objects.index.leading_hits(alone(0, 3)) == 3


def test_a_tail_that_was_loaded_behind_the_engines_own_hit_leaves_before_its_head() -> None:
    pool = Pool(4)
    pool.store(0, [4])
    pool.objects.load_ended(pool.objects.load(LoadOrder(7, "x", (), 2, (), 64, 32, False), alone(0, 4)[2:]))
    pool.store(1, [1])
    assert pool.objects.index.leading_hits(alone(0, 4)) == 3


def test_a_tail_that_a_file_tier_has_kept_leaves_before_its_head() -> None:
    pool = Pool(4, keeps_files=True)
    for number, (first, end) in enumerate([(0, 2), (2, 4)]):
        (order,) = pool.reserve(0, first, end).orders
        pool.objects.store_ended(order, ok=True)
        pool.objects.take_in(StepReport(puts={number: Ended(1, True)}))
    pool.store(1, [1])
    assert pool.objects.index.leading_hits(alone(0, 4)) == 3


def test_a_failed_store_is_tried_again_though_a_rank_still_makes_a_file_of_its_share() -> None:
    pool = Pool(4, keeps_files=True, num_ranks=2)
    (failed,) = pool.reserve(0, 0, 2).orders
    pool.objects.store_ended(failed, ok=False)
    (again,) = pool.reserve(0, 0, 2).orders
    assert set(again.slots).isdisjoint(failed.slots), "its file is made of these"
    pool.objects.take_in(StepReport(puts={failed.number: Ended(2, False)}))
    assert pool.objects.index.occupancy().free == 2


def test_a_prompt_that_grows_lies_side_by_side_though_others_store_too() -> None:
    """A slice of it is one copy then (POOL-5)."""
    pool = Pool(9)
    for document, num_chunks in enumerate([2, 4, 1]):
        pool.store(document, [num_chunks])
    pool.objects.index.discard(alone(1, 4))  # four slots right behind it are free, and two that would fit better
    (order,) = pool.reserve(0, 2, 4).orders
    assert order.slots == (2, 3)
    pool.objects.drop(order)


class CountedKey(ChunkKey):
    """A key that counts how often it is looked for."""

    times = 0

    def __hash__(self) -> int:
        CountedKey.times += 1
        return super().__hash__()


def looks_of_a_step(num_chunks: int) -> int:
    """Looks at keys that a step of four chunks costs behind so many."""
    pool = Pool(num_chunks + 4)
    keys = [CountedKey(b"space", number.to_bytes(4, "little"), CHUNK_TOKENS) for number in range(num_chunks + 4)]
    for first, end in ((0, num_chunks), (num_chunks, num_chunks + 4)):
        CountedKey.times = 0
        (order,) = pool.objects.reserve("r", keys[:end], first, (), lambda: 0).orders
        pool.objects.store_ended(order, ok=True)
    return CountedKey.times


@given(st.integers(5, 400))
def test_a_step_of_a_long_prompt_costs_its_own_chunks(num_chunks: int) -> None:
    assert looks_of_a_step(num_chunks) == looks_of_a_step(4) > 0


documents = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)
MAX_OPEN = 4


class PoolObjectsMachine(RuleBasedStateMachine):
    """Prompts that share beginnings, stored over several steps, loaded in part, given up and written behind, at once.

    KEEP-1: whatever is kept has everything before it, except what a failed store or a reset took away.
    """

    prompts = Bundle("prompts")

    @initialize(num_slots=st.integers(2, 6), keeps_files=st.booleans(), num_ranks=st.integers(1, 2))
    def start(self, num_slots: int, keeps_files: bool, num_ranks: int) -> None:
        self.pool = Pool(num_slots, keeps_files=keeps_files, num_ranks=num_ranks)
        self.num_ranks = num_ranks
        self.numbers = count(1000)
        self.kept: dict[Prefix, int] = {}  # chunks of the prompts under way
        self.stores: list[StoreOrder] = []
        self.chunks: dict[int, Sequence[ChunkKey]] = {}  # by store; an order itself names those for the file tier alone
        self.loads: list[LoadOrder] = []
        self.puts: dict[int, tuple[StoreOrder, int]] = {}  # by store: ranks whose tiers may still read its slots
        self.outdated: set[int] = set()
        self.failed: set[int] = set()
        self.lost: set[Prefix] = set()

    @rule(target=prompts, document=documents)
    def begin(self, document: Prefix) -> Prefix:
        """Anew, if there was one like it."""
        self.kept[document] = 0
        return document

    @rule(document=prompts, size=st.integers(1, 3))
    def compute(self, document: Prefix, size: int) -> None:
        """A step of a prompt, which goes on where its last one ended."""
        if len(self.stores) >= MAX_OPEN:
            return
        first = self.kept[document]
        end = min(len(document), first + size)
        if end == first:
            return
        found = self.pool.objects.reserve("r", keys_of(document[:end]), first, (), lambda: next(self.numbers)).orders
        self.kept[document] = end
        self.stores += found
        whole = all(self.holds(chunk) for chunk in prefixes(document[:first]))
        assert whole or not found, "a tail whose head is gone could never be hit"
        read = {slot for order, _left in self.puts.values() for slot in order.slots}
        for order in found:
            assert read.isdisjoint(order.slots), "a tier still reads what another store would write"
            self.chunks[order.number] = keys_of(document)[order.first_chunk :][: len(order.slots)]
            assert order.keys in ((), self.chunks[order.number])
            if order.keys:
                self.puts[order.number] = order, self.num_ranks

    @precondition(lambda self: self.stores)
    @rule(pick=st.integers(0, 9), ok=st.sampled_from([True, True, False]))
    def end_store(self, pick: int, ok: bool) -> None:
        order = self.stores.pop(pick % len(self.stores))
        if not ok or order.number in self.outdated:
            self.failed.add(order.number)
            self.lost |= {tuple(key.prefix) for key in self.chunks[order.number]}
        self.pool.objects.store_ended(order, ok=ok)
        ready = set(self.pool.objects.index.ready_keys())
        assert order.number not in self.outdated or ready.isdisjoint(self.chunks[order.number]), (
            "stored before a reset, found behind it"
        )

    @precondition(lambda self: self.puts)
    @rule(pick=st.integers(0, 9), ok=st.booleans())
    def end_put_of_a_rank(self, pick: int, ok: bool) -> None:
        """Whose own store has ended, which other ranks' need not have."""
        order, left = self.puts[number := sorted(self.puts)[pick % len(self.puts)]]
        if left == 1 and order in self.stores:
            return
        self.pool.objects.take_in(StepReport(puts={number: Ended(1, ok)}))
        self.puts[number] = order, left - 1
        if left == 1:
            del self.puts[number]
            if number in self.failed:
                self.lost |= {tuple(key.prefix) for key in order.keys}

    @rule(document=prompts, local=st.integers(0, 5))
    def load(self, document: Prefix, local: int) -> None:
        """Of what the engine does not have itself."""
        if len(self.loads) >= MAX_OPEN:
            return
        keys = keys_of(document)
        hits = self.pool.objects.find("x", keys, local) or 0
        if local < hits:
            order = LoadOrder(next(self.numbers), "x", (), local, (), hits * CHUNK_TOKENS, local * CHUNK_TOKENS, False)
            self.loads.append(self.pool.objects.load(order, keys[local:hits]))

    @precondition(lambda self: self.loads)
    @rule(pick=st.integers(0, 9))
    def end_load(self, pick: int) -> None:
        self.pool.objects.load_ended(self.loads.pop(pick % len(self.loads)))

    @rule(chance=st.sampled_from([False] * 9 + [True]))
    def reset(self, chance: bool) -> None:
        if chance:
            self.lost |= set(self.present())
            assert self.pool.objects.reset() is not self.pool.keeps_files
            if not self.pool.keeps_files:
                self.outdated |= {order.number for order in self.stores}

    def present(self) -> list[Prefix]:
        return [tuple(key.prefix) for key in self.pool.objects.index._by_key]

    def holds(self, document: Prefix) -> bool:
        return keys_of(document)[-1] in self.pool.objects.index._by_key

    @invariant()
    def what_is_kept_has_everything_before_it(self) -> None:
        here = set(self.present())
        self.lost -= {chunk for chunk in self.lost if chunk in here}
        for chunk in here:
            missing = [before for before in prefixes(chunk) if before not in here]
            assert not missing or set(missing) & self.lost, f"KEEP-1: {chunk} without {missing}"

    def teardown(self) -> None:
        for load in self.loads:
            self.pool.objects.load_ended(load)
        for order in self.stores:
            self.pool.objects.store_ended(order, ok=False)
        for number, (_order, left) in self.puts.items():
            self.pool.objects.take_in(StepReport(puts={number: Ended(left, True)}))
        assert not self.pool.objects.num_open
        now = self.pool.objects.index.occupancy()
        assert (now.pins, now.writing) == (0, 0)
        fresh = [ChunkKey(b"other", bytes([number]), CHUNK_TOKENS) for number in range(self.pool.num_slots)]
        assert self.pool.objects.index.reserve(fresh) is not None, "nothing is kept for ever"


PoolObjectsMachine.TestCase.settings = settings(stateful_step_count=60)
TestPoolObjectsMachine = PoolObjectsMachine.TestCase
