"""Stores on the scheduler side: which chunks leave with a step, and whose blocks they still read.

A chunk can be complete only once its request's blocks reach to its end, and once so many tokens were computed. So a
request is looked at when it gets blocks, and when as many have been computed in the meantime as its next chunk lacks: a
step that merely goes on looks at nobody.

Chunks that find no room are tried again, from the first of them on, while their request runs: with its next chunk, and
after 1, 2, 4 and at most 64 steps. What a request leaves behind without room, the next that holds the prefix stores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Any, Final

from lamella.connector.batch_blocks import BatchBlocks, Scheduled, StepBatch
from lamella.connector.connector_metrics import Metrics
from lamella.connector.engine_facts import EngineFacts
from lamella.connector.loads import Kind, OpenStore, Work, WorkBook
from lamella.connector.objects import Objects, Refusal
from lamella.connector.request_keys import RequestKeys
from lamella.connector.step_orders import LoadOrder, StoreOrder
from lamella.connector.windows import Windows

_LONGEST_PAUSE: Final = 64


@dataclass(slots=True)
class _Waiting:
    """Chunks of a request that found no room.

    Attributes:
        end: chunks that were tried, from the request's first that is not kept on.
        counted_end: those of them that were counted as without room.
        counted: as so many stores.
        pause: steps between the last try and the next.
        next_try: the step of that.
    """

    end: int = 0
    counted_end: int = 0
    counted: int = 0
    pause: int = 0
    next_try: int = 0


class ChunkStores:
    """See the module.

    Args:
        facts: of the engine.
        objects: where chunks are kept.
        keys: of the requests.
        blocks: their block tables.
        book: where what is in flight is entered.
        requests: the engine's, by name.
        metrics: counts.
        take_number: gives each store its number.
    """

    def __init__(
        self,
        facts: EngineFacts,
        objects: Objects,
        keys: RequestKeys,
        blocks: BatchBlocks,
        book: WorkBook,
        requests: Mapping[str, Any],
        metrics: Metrics,
        take_number: Callable[[], int],
    ) -> None:
        self.enabled = not facts.refusal
        """Whether anything is stored; a measurement or a test may do without."""
        self._facts = facts
        self.objects = objects
        """Where chunks are kept."""
        self._keys = keys
        self._blocks = blocks
        self._book = book
        self._requests = requests
        self._metrics = metrics
        self._take_number = take_number
        self._windows = Windows(facts.block_tokens, facts.windows, facts.space.chunk_tokens, facts.null_block)
        self._open: dict[int, OpenStore] = {}
        self._kept_chunks: dict[str, int] = {}
        self._passed = 0  # tokens that a request can have computed at most, had it been in every step
        self._look_at: dict[str, int] = {}  # when `_passed` is that much, a request can have completed its next chunk
        self._next_looks: list[tuple[int, str]] = []  # the same as a heap, with those that do not count any more
        self._waiting: dict[str, _Waiting] = {}
        self._steps = self._next_try = 0

    def has_kept(self, name: str, num_chunks: int) -> None:
        """So many of the request's chunks came from where they are kept."""
        self._kept_chunks[name] = num_chunks
        self._waiting.pop(name, None)

    def conflicts(self, batch: StepBatch, loads: Iterable[LoadOrder]) -> tuple[int, ...]:
        """Stores whose blocks this step writes: their requests were preempted, or lost blocks to a window.

        Args:
            batch: of the step.
            loads: that begin with it.
        """
        if not self._open:
            return ()
        loaded = [self._windows.named(load.blocks, load.skip_tokens) for load in loads]
        written = self._blocks.written(batch.all()).union(*loaded)
        written.discard(self._facts.null_block)
        return tuple(number for number, store in self._open.items() if store.blocks & written)

    def of_step(self, batch: StepBatch) -> tuple[StoreOrder, ...]:
        """Stores of the chunks that are complete with this step."""
        if batch.names:
            self._passed += batch.num_tokens - len(batch.names) + 1
        names = batch.grown
        while self._next_looks and self._next_looks[0][0] <= self._passed:
            look, name = heappop(self._next_looks)
            if self._look_at.get(name) == look:
                names = [*names, name]
        self._steps += 1
        if self._waiting and self._next_try <= self._steps:
            names = [*names, *(name for name, one in self._waiting.items() if one.next_try <= self._steps)]
        orders: list[StoreOrder] = []
        for name in dict.fromkeys(names):
            one, request = batch.of(name), self._requests.get(name)
            self._look_at.pop(name, None)
            if request is None or not self.enabled or not self._keys.has_keys(request):
                self._waiting.pop(name, None)
                continue
            if one is None:
                self._look(name, self._passed + 1)
                continue
            orders += self._of_request(one)
            waiting = self._waiting.get(name)
            tried = self._kept_chunks.get(name, 0) if waiting is None else waiting.end
            end = (tried + 1) * self._facts.space.chunk_tokens
            if self._blocks.num_tokens(name) >= end:
                self._look(name, self._passed + max(1, end - one.end))
        if self._waiting:
            self._next_try = min(one.next_try for one in self._waiting.values())
        return tuple(orders)

    def _look(self, name: str, when: int) -> None:
        self._look_at[name] = when
        heappush(self._next_looks, (when, name))

    def _of_request(self, one: Scheduled) -> list[StoreOrder]:
        """Orders for its chunks that are complete with this step and not kept yet."""
        request, size = self._requests[one.request], self._facts.space.chunk_tokens
        first, end = self._kept_chunks.get(one.request, 0), min(one.end, request.num_tokens) // size
        waiting = self._waiting.get(one.request)
        if end <= first or (waiting is not None and end <= waiting.end and self._steps < waiting.next_try):
            return []
        keys = self._keys.keys(request, end * size)
        blocks = self._blocks.tables(one.request, end * size)
        if len(keys) < end or blocks is None:
            return []
        taken = self.objects.reserve(one.request, keys, first, blocks, self._take_number)
        self._kept_chunks[one.request] = end
        if taken.refusal is not None:
            self._refused(one.request, end, taken.refusal)
            if taken.refusal.may_pass:
                self._kept_chunks[one.request] = taken.orders[-1].num_tokens // size if taken.orders else first
        elif waiting is not None:
            del self._waiting[one.request]
            self._metrics.count("stores_after_waiting", waiting.counted)
        return [order for found in taken.orders if (order := self._begin(found, one.computed)) is not None]

    def _refused(self, name: str, end: int, refusal: Refusal) -> None:
        """The request's chunks up to `end` are not all stored: they wait, or are given up."""
        waiting = self._waiting.pop(name, None) or _Waiting()
        if end > waiting.counted_end and refusal is not Refusal.NO_ANSWER:
            waiting.counted_end = end
            waiting.counted += 1
            self._metrics.count("stores_without_room")
        if refusal.may_pass:
            waiting.end = max(waiting.end, end)
            waiting.pause = min(max(1, 2 * waiting.pause), _LONGEST_PAUSE)
            waiting.next_try = self._steps + waiting.pause
            self._waiting[name] = waiting

    def _begin(self, order: StoreOrder, computed: int) -> StoreOrder | None:
        blocks = self._blocks.tables(order.request, order.num_tokens)
        assert blocks is not None, "they were looked at above"
        blocks = self._windows.left(blocks, computed)
        if self._windows.lacks(blocks, order.skip_tokens):
            self.objects.drop(order)
            return None
        order = replace(order, blocks=blocks)
        sources = self._windows.named(blocks, order.skip_tokens)
        num_bytes = (order.num_tokens - order.skip_tokens) * self._facts.token_bytes
        self._book.begin(Work(order.number, order.request, Kind.STORE, num_bytes))
        self._open[order.number] = OpenStore(order, frozenset(sources))
        return order

    def ended(self, number: int, *, ok: bool) -> None:
        """No rank reads the store's blocks any more; `ok`: every rank's bytes are where they belong."""
        store = self._open.pop(number)
        self.objects.store_ended(store.order, ok=ok)
        if ok:
            self._metrics.count("stored_tokens", store.order.num_tokens - store.order.skip_tokens)
            return
        self._metrics.count("stores_dropped")
        name = store.order.request
        if name in self._kept_chunks:
            self._kept_chunks[name] = min(self._kept_chunks[name], store.order.first_chunk)
            self._look(name, self._passed)

    def forget(self, name: str) -> None:
        """The request is gone; its stores go on."""
        self._kept_chunks.pop(name, None)
        self._look_at.pop(name, None)
        self._waiting.pop(name, None)
