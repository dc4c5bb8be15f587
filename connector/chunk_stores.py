"""Stores on the scheduler side: which chunks leave with a step, and whose blocks they still read.

A chunk can be complete only once its request's blocks reach to its end. So a request is looked at when it gets blocks,
and then in each step until the chunk that they reach to is stored; a step that merely goes on looks at nobody else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from lamella.connector.batch_blocks import BatchBlocks, Scheduled, StepBatch
from lamella.connector.connector_metrics import Metrics
from lamella.connector.engine_facts import EngineFacts
from lamella.connector.loads import Kind, OpenStore, Work, WorkBook
from lamella.connector.objects import Objects
from lamella.connector.request_keys import RequestKeys
from lamella.connector.step_orders import StoreOrder


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
        self._open: dict[int, OpenStore] = {}
        self._kept_chunks: dict[str, int] = {}
        self._due: dict[str, None] = {}  # requests whose blocks reach to the end of a chunk that is to be stored

    def has_kept(self, name: str, num_chunks: int) -> None:
        """So many of the request's chunks came from where they are kept."""
        self._kept_chunks[name] = num_chunks

    def conflicts(self, batch: StepBatch, loaded: Iterable[Iterable[int]]) -> tuple[int, ...]:
        """Stores whose blocks this step writes: their requests were preempted, or lost blocks to a window.

        Args:
            batch: of the step.
            loaded: blocks of the loads that begin with it.
        """
        if not self._open:
            return ()
        written = self._blocks.written(batch.all()).union(*loaded)
        written.discard(self._facts.null_block)
        return tuple(number for number, store in self._open.items() if store.blocks & written)

    def of_step(self, batch: StepBatch) -> tuple[StoreOrder, ...]:
        """Stores of the chunks that are complete with this step."""
        for name in batch.grown:
            self._note_reach(name)
        if not (self._due and self.enabled):
            return ()
        orders: list[StoreOrder] = []
        for name in tuple(self._due):
            one = batch.of(name)
            if one is not None:
                orders += self._of_request(one)
                self._note_reach(name)
        return tuple(orders)

    def _note_reach(self, name: str) -> None:
        """The request is due while its blocks reach to the end of the next chunk that is to be stored."""
        request = self._requests.get(name)
        end = (self._kept_chunks.get(name, 0) + 1) * self._facts.space.chunk_tokens
        if self._blocks.num_tokens(name) < end or request is None:
            self._due.pop(name, None)
        elif name not in self._due and self._keys.has_keys(request):
            self._due[name] = None

    def _of_request(self, one: Scheduled) -> list[StoreOrder]:
        """Orders for its chunks that are complete with this step and not kept yet."""
        request, size = self._requests[one.request], self._facts.space.chunk_tokens
        first, end = self._kept_chunks.get(one.request, 0), min(one.end, request.num_tokens) // size
        if end <= first:
            return []
        keys = self._keys.keys(request, end * size)
        blocks = self._blocks.tables(one.request, end * size)
        if len(keys) < end or blocks is None:
            return []
        self._kept_chunks[one.request] = end
        orders = self.objects.reserve(one.request, keys[first:], first, blocks, self._take_number)
        if orders is None:
            self._metrics.count("stores_without_room")
        return [order for found in orders or () if (order := self._begin(found)) is not None]

    def _begin(self, order: StoreOrder) -> StoreOrder | None:
        blocks = self._blocks.tables(order.request, order.num_tokens)
        assert blocks is not None, "they were looked at above"
        sources = {
            block
            for table, block_tokens in zip(blocks, self._facts.block_tokens, strict=True)
            for block in table[order.skip_tokens // block_tokens :]
        }
        if self._facts.null_block in sources:  # a sliding window has left part of the chunk behind
            self.objects.drop(order)
            return None
        order = replace(order, blocks=blocks)
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
            self._note_reach(name)

    def forget(self, name: str) -> None:
        """The request is gone; its stores go on."""
        self._kept_chunks.pop(name, None)
        self._due.pop(name, None)
