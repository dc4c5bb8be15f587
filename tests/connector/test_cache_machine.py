"""The cache engine against dictionaries: whatever is stored, retrieved, evicted, pinned, interrupted or fails.

Retrieves and stores are opened, advanced and ended by separate rules, so they overlap in every way. The pool has one
object less than the longest sequence, the tier can go down, and a transfer can fail.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache_driver import BLOCK, CHUNK, Deployment, MemoryTier
from engine_driver import ENGINE_MISSING
from lamella.connector.storage.circuit import CircuitBreaker, CircuitState, GuardedTier
from lamella.connector.storage.held_prefix import HeldPrefix
from lamella.reference.keys import ChunkKey
from lamella.reference.plan import Direction
from pool_model import NUM_SLOTS, Object, PoolModel, Prefix
from waiting import wait_until

pytestmark = pytest.mark.skipif(ENGINE_MISSING is not None, reason=str(ENGINE_MISSING))

MAX_CHUNKS, LAYERS, MAX_OPEN = 4, 3, 2
TABLE = MAX_CHUNKS * CHUNK // BLOCK
POISON = 0xFFFF
SOON_S = 3.0
"""What ends on other threads, reads of tiers and copies that were let go of, may be seen a moment late."""

documents = st.lists(st.integers(0, 1), min_size=1, max_size=MAX_CHUNKS)


@dataclass
class OpenRetrieve:
    """A retrieve between two of its yields."""

    generator: Generator[Any, None, None]
    document: list[int]
    table: list[int]
    skip: int
    end: int  # tokens promised
    runs: list[list[Object]]
    tier_chunks: int
    yields: int = 1
    shaken: bool = False  # something may have failed it since


@dataclass
class OpenStore:
    """A store between two of its yields."""

    generator: Generator[int, None, None]
    document: list[int]
    table: list[int]
    missing: list[Prefix] | None
    yields: int = 0
    shaken: bool = False


class CacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_ns = 0
        self.memory = MemoryTier(1)
        self.tier = GuardedTier(self.memory, CircuitBreaker("memory", 2, 100, lambda: self.now_ns))
        self.run = Deployment(
            num_layers=LAYERS,
            num_slots=NUM_SLOTS,
            num_buffers=MAX_OPEN * MAX_CHUNKS,
            num_blocks=(2 * MAX_OPEN + 1) * TABLE,
            tiers=[self.tier],
            io_threads=1,
        )
        self.memory.object_bytes = self.run.layout.object_bytes
        self.model = PoolModel()
        self.retrieves: list[OpenRetrieve] = []
        self.stores: list[OpenStore] = []
        self.planted: dict[Direction, int] = {}
        self.pins: list[tuple[HeldPrefix, list[list[Object]]]] = []
        self.tables = [list(range(start * TABLE, (start + 1) * TABLE)) for start in range(2 * MAX_OPEN + 1)]

    # ---- words

    def tokens(self, document: list[int]) -> list[int]:
        return [symbol * 100 + place for symbol in document for place in range(CHUNK)]

    def key(self, prefix: Prefix) -> ChunkKey:
        return self.run.cache_engine.keys_of(self.tokens(list(prefix)))[-1]

    def prefixes(self, document: list[int]) -> list[Prefix]:
        return [tuple(document[: chunk + 1]) for chunk in range(len(document))]

    def tier_serves(self) -> bool:
        return not self.memory.down and self.tier.breaker.state is not CircuitState.OPEN

    def hold(self, document: list[int], first_wanted: int = 0) -> tuple[list[list[Object]], int, int]:
        """(pool runs pinned, chunks, of them read from the tier), as `hold_prefix` must find and pin them."""
        runs: list[list[Object]] = []
        asked, serves, chunk, from_tier = False, False, 0, 0
        prefixes = self.prefixes(document)
        while chunk < len(prefixes):
            hits = 0
            while chunk + hits < len(prefixes) and prefixes[chunk + hits] in self.model.ready:
                hits += 1
            if hits:
                runs.append(self.model.pin(prefixes[chunk : chunk + hits]))
                chunk += hits
                continue
            if not asked:
                asked, serves = True, self.tier_serves()
            if not serves or self.key(prefixes[chunk]) not in self.memory.objects:
                break
            from_tier += chunk >= first_wanted
            chunk += 1
        return runs, chunk, from_tier

    def release(self, runs: list[list[Object]]) -> None:
        for objects in runs:
            self.model.unpin(objects)

    # ---- asking and pinning

    @rule(document=documents)
    def lookup(self, document: list[int]) -> None:
        runs, chunks, _ = self.hold(document)
        self.release(runs)
        assert self.run.cache_engine.lookup(self.tokens(document)) == chunks * CHUNK

    @precondition(lambda self: len(self.pins) < MAX_OPEN)
    @rule(document=documents)
    def pin(self, document: list[int]) -> None:
        runs, chunks, _ = self.hold(document)
        held = self.run.storage.hold_prefix(self.run.cache_engine.keys_of(self.tokens(document)))
        assert held.num_chunks == chunks
        self.pins.append((held, runs))

    @precondition(lambda self: self.pins)
    @rule(which=st.integers(0, 9))
    def unpin(self, which: int) -> None:
        held, runs = self.pins.pop(which % len(self.pins))
        held.release()
        self.release(runs)

    # ---- retrieving

    @precondition(lambda self: len(self.retrieves) < MAX_OPEN)
    @rule(document=documents, skip=st.integers(0, 5))
    def begin_retrieve(self, document: list[int], skip: int) -> None:
        tokens = self.tokens(document)
        skip = min(skip, len(tokens))
        mask = np.arange(len(tokens)) >= skip
        runs, chunks, from_tier = self.hold(document, skip // CHUNK) if skip < len(tokens) else ([], 0, 0)
        table = self.tables.pop()
        self.run.cache[:, :, table] = POISON
        generator = self.run.cache_engine.retrieve_layer(tokens, [table], mask)
        shaken = self.will_break(Direction.RETRIEVE)
        end = max(skip, chunks * CHUNK)
        assert next(generator) == end - skip
        self.retrieves.append(OpenRetrieve(generator, document, table, skip, end, runs, from_tier, shaken=shaken))

    @precondition(lambda self: self.retrieves)
    @rule(which=st.integers(0, 9), times=st.integers(1, LAYERS))
    def advance_retrieve(self, which: int, times: int) -> None:
        one = self.retrieves[which % len(self.retrieves)]
        for _ in range(min(times, LAYERS + 1 - one.yields)):
            coming = next(one.generator)
            one.yields += 1
            assert coming == one.end - one.skip or one.shaken
            if one.yields > 2:
                self.check_layers(one, one.yields - 2)

    @precondition(lambda self: self.retrieves)
    @rule(which=st.integers(0, 9))
    def end_retrieve(self, which: int) -> None:
        one = self.retrieves.pop(which % len(self.retrieves))
        rest = list(one.generator)
        assert len(rest) == LAYERS + 2 - one.yields, "N+2 yields, whatever was found"
        mask = rest[-1]
        there = int(mask.sum())
        assert mask.tolist() == [one.skip <= place < one.skip + there for place in range(len(mask))]
        assert there == one.end - one.skip or (one.shaken and there < one.end - one.skip)
        one.end = one.skip + there
        tokens = self.tokens(one.document)
        assert all(self.run.holds(layer, tokens, one.table, one.skip, one.end) for layer in range(LAYERS))
        self.check_layers(one, LAYERS)
        self.finish(one)

    @precondition(lambda self: self.retrieves)
    @rule(which=st.integers(0, 9))
    def close_retrieve(self, which: int) -> None:
        one = self.retrieves.pop(which % len(self.retrieves))
        one.generator.close()
        self.finish(one)

    def check_layers(self, one: OpenRetrieve, layers: int) -> None:
        """The layers waited for hold the sequence's bytes, and nothing beside the promised tokens was touched."""
        tokens = self.tokens(one.document)
        for layer in range(layers):
            assert one.shaken or self.run.holds(layer, tokens, one.table, one.skip, one.end)
            for place in [*range(one.skip), *range(one.end, TABLE * BLOCK)]:
                kv = self.run.cache[layer, :, one.table[place // BLOCK], place % BLOCK]
                assert one.shaken or (kv == POISON).all()

    def finish(self, one: OpenRetrieve) -> None:
        self.run.settle()
        self.release(one.runs)
        self.tables.append(one.table)

    # ---- storing

    @precondition(lambda self: len(self.stores) < MAX_OPEN)
    @rule(document=documents)
    def begin_store(self, document: list[int]) -> None:
        tokens, table = self.tokens(document), self.tables.pop()
        generator = self.run.cache_engine.store_layer(tokens, [table])
        missing = self.model.reserve(self.prefixes(document))
        one = OpenStore(generator, document, table, missing, shaken=self.will_break(Direction.STORE))
        self.stores.append(one)
        self.step_store(one)

    @precondition(lambda self: len(self.stores) < MAX_OPEN)
    @rule(document=documents)
    def store_whole(self, document: list[int]) -> None:
        self.begin_store(document)
        self.end_store(len(self.stores) - 1)

    @precondition(lambda self: self.stores)
    @rule(which=st.integers(0, 9), times=st.integers(1, LAYERS))
    def advance_store(self, which: int, times: int) -> None:
        one = self.stores[which % len(self.stores)]
        for _ in range(min(times, LAYERS - one.yields)):
            self.step_store(one)

    def step_store(self, one: OpenStore) -> None:
        self.run.compute(one.yields, self.tokens(one.document), one.table)
        storing = next(one.generator)
        one.yields += 1
        assert storing == len(one.missing or ()) * CHUNK or one.shaken

    @precondition(lambda self: self.stores)
    @rule(which=st.integers(0, 9))
    def end_store(self, which: int) -> None:
        one = self.stores.pop(which % len(self.stores))
        while one.yields < LAYERS:
            self.step_store(one)
        kept_by_tier = self.tier_serves() and self.tier.breaker.state is CircuitState.CLOSED
        *nothing, stored = list(one.generator)
        assert nothing == [], "N+1 yields, whatever was found"
        self.run.settle()
        missing = one.missing or []
        if stored:
            assert stored == len(missing) * CHUNK
            self.model.commit(missing)
            self.model.unpin(self.model.pin(missing))  # while the tier kept them
        else:
            assert one.shaken or not missing
            self.model.give_up(missing)
        if stored and kept_by_tier:
            assert {self.key(prefix) for prefix in missing} <= set(self.memory.objects)
        self.tables.append(one.table)

    @precondition(lambda self: self.stores)
    @rule(which=st.integers(0, 9))
    def close_store(self, which: int) -> None:
        one = self.stores.pop(which % len(self.stores))
        one.generator.close()
        self.run.settle()
        self.model.give_up(one.missing or [])
        self.tables.append(one.table)

    # ---- what goes wrong

    @rule(document=documents, most=st.integers(1, MAX_CHUNKS))
    def evict(self, document: list[int], most: int) -> None:
        prefixes = self.prefixes(document)[-most:]
        self.run.pool.discard([self.key(prefix) for prefix in prefixes])
        self.model.discard(prefixes)

    @rule(document=documents)
    def lose_from_tier(self, document: list[int]) -> None:
        self.memory.objects.pop(self.key(tuple(document)), None)
        self.shake()

    @rule(down=st.booleans())
    def turn_tier(self, down: bool) -> None:
        self.memory.down = down
        self.shake()

    @rule()
    def let_time_pass(self) -> None:
        self.now_ns += 100

    @precondition(lambda self: self.retrieves or self.stores)
    @rule(direction=st.sampled_from(Direction))
    def break_next_transfer(self, direction: Direction) -> None:
        self.planted[direction] = self.run.engine.lane(direction).windows
        self.run.engine.plant_fault(direction, self.planted[direction])
        for one in [*self.retrieves, *self.stores]:
            one.shaken = True

    def will_break(self, direction: Direction) -> bool:
        """Whether a planted fault has not been met yet."""
        return self.planted.get(direction, -1) >= self.run.engine.lane(direction).windows

    def shake(self) -> None:
        for one in self.retrieves:
            one.shaken |= one.tier_chunks > 0

    # ---- always

    @invariant()
    def references_are_what_the_model_says(self) -> None:
        pins = sum(one.pins for one in [*self.model.ready.values(), *self.model.zombies])
        held = pins, len(self.model.writing), len(self.model.ready)
        free = NUM_SLOTS - len(self.model.ready) - len(self.model.writing) - len(self.model.zombies)

        def are_so() -> bool:
            now = self.run.pool.report().occupancy
            return (now.pins, now.writing, now.ready, now.free) == (*held, free)

        self.run.settle()
        wait_until(are_so, f"(pins, writing, ready) are {held} and {free} slots free", SOON_S)

    @invariant()
    def buffers_are_held_only_for_the_slice_to_come(self) -> None:
        waiting = sum(one.tier_chunks for one in self.retrieves if one.yields <= LAYERS)
        may_be_fewer = any(one.shaken for one in self.retrieves)

        def are_so() -> bool:
            used = self.run.buffers.used
            return used == waiting or (used < waiting and may_be_fewer)

        self.run.settle()
        wait_until(are_so, f"{waiting} buffers are held", SOON_S)

    @invariant()
    def the_tier_keeps_only_what_was_computed(self) -> None:
        assert set(map(len, self.memory.objects.values())) <= {self.run.layout.object_bytes}

    def teardown(self) -> None:
        for one in [*self.retrieves, *self.stores]:
            one.generator.close()
        for held, _ in self.pins:
            held.release()
        wait_until(lambda: self.run.references() == (0, 0, 0), "everything returned to its baseline", SOON_S)
        self.run.close()


CacheMachine.TestCase.settings = settings(stateful_step_count=30)
TestCacheMachine = CacheMachine.TestCase
