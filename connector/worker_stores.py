"""Stores on one rank: blocks into slots while the engine goes on computing, then slots into the file tier.

A store's blocks are read behind the forward pass that wrote them. With layerwise stores each slice leaves as soon as
its last layer has been computed, while the next layers compute; otherwise everything leaves at the step's end. Blocks
are free again when the copy has ended (`StepReport.stores`), slots when a tier has kept them (`StepReport.puts`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from lamella.connector.connector_metrics import Metrics
from lamella.connector.step_orders import Ended, FetchOrder, StoreOrder
from lamella.connector.storage.file_tier import FileTier
from lamella.connector.tier_prefetch import rank_key
from lamella.cuda_ext._engine_library import TransferStopped
from lamella.cuda_ext.slots import SlotMemory
from lamella.cuda_ext.transfer import Arriving, TransferState
from lamella.reference.layout import ByteRange
from lamella.reference.slices import Slice

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Store:
    order: StoreOrder
    parts: list[Arriving] = field(default_factory=list)
    next_layer: int = 0
    dropped: bool = False


def _no_put() -> Future[bool]:
    """The put of a store that failed here. Other ranks' may go on, so each rank tells of its own."""
    done: Future[bool] = Future()
    done.set_result(False)
    return done


class WorkerStores:
    """See the module.

    Args:
        submit: begins one store of some slices; on the model runner's thread, behind what that has enqueued.
        slices: the units in which stores leave.
        layerwise: whether they leave during the forward pass.
        memory: the host slots, which a tier reads and writes; None where there is no tier.
        space: this rank's key space, for the tier.
        tier: the file tier, or None.
        io_threads: threads that read and write it.
        metrics: counts.
    """

    def __init__(
        self,
        submit: Callable[[StoreOrder, Sequence[Slice]], Arriving],
        slices: Sequence[Slice],
        layerwise: bool,
        memory: SlotMemory | None,
        space: bytes,
        tier: FileTier | None,
        io_threads: int,
        metrics: Metrics,
    ) -> None:
        self._submit = submit
        self._slices = tuple(slices)
        self._slice_ends = {part.end_layer - 1: part for part in self._slices}
        self._layerwise = layerwise
        self._memory = memory
        self._space = space
        self._tier = tier
        self._metrics = metrics
        self._threads = ThreadPoolExecutor(io_threads, thread_name_prefix="lamella-tier")
        self._lock = threading.Lock()  # of the tier's threads
        self._refused = self._uncounted = 0
        self._of_step: list[_Store] = []
        self._open: dict[int, _Store] = {}
        self._puts: dict[int, Future[bool]] = {}
        self._fetches: dict[int, Future[tuple[bool, ...]]] = {}

    def begin_step(self, orders: Sequence[StoreOrder], fetches: Sequence[FetchOrder]) -> None:
        """The step's stores and fetches are known; fetches begin, stores follow the forward pass."""
        for order in orders:
            store = self._open[order.number] = _Store(order)
            self._of_step.append(store)
        for fetch in fetches:
            self._fetches[fetch.number] = self._threads.submit(self._fetch, fetch)

    def layer_computed(self, layer: int) -> None:
        """The layer's KV is in its blocks, on the stream; a slice that is complete with it leaves."""
        part = self._slice_ends.get(layer)
        if not self._layerwise or part is None or not self._of_step:
            return
        for store in self._of_step:
            if store.next_layer == part.first_layer:
                self._begin(store, [part])

    def step_computed(self, spoils: Callable[[tuple[tuple[int, ...], ...]], bool]) -> None:
        """The forward pass has been launched: what has not left yet leaves, and what may be wrong does not.

        Args:
            spoils: whether something computed over these blocks may be wrong.
        """
        for store in self._of_step:
            if spoils(store.order.blocks):
                store.dropped = True
                for part in store.parts:
                    part.cancel()
                continue
            rest = [part for part in self._slices if part.first_layer >= store.next_layer]
            if rest:
                self._begin(store, rest)
        self._of_step = []

    def _begin(self, store: _Store, parts: Sequence[Slice]) -> None:
        try:
            store.parts.append(self._submit(store.order, parts))
        except (ValueError, RuntimeError, TransferStopped) as error:
            _log.error("store %d of request %s is given up: %s", store.order.number, store.order.request, error)
            store.dropped = True
        store.next_layer = parts[-1].end_layer

    def flush(self, numbers: Sequence[int], timeout_s: float) -> None:
        """What these stores keep was read before their blocks are written again.

        One that has not ended within so many seconds, in all, is given up: it may read what is written from here on.
        """
        until = time.monotonic() + timeout_s
        for number in numbers:
            store = self._open.get(number)
            for part in store.parts if store is not None else ():
                self._metrics.count("flush_waits", not part.state.is_final)
                try:
                    part.wait_final(max(0.0, until - time.monotonic()))
                except TimeoutError:
                    self._give_up(number, f"it has not ended within {timeout_s:g} s, and its blocks are written again")
                    break

    def _give_up(self, number: int, why: str) -> None:
        store = self._open[number]
        _log.error("store %d of request %s is given up: %s", number, store.order.request, why)
        store.dropped = True
        for part in store.parts:
            part.cancel()

    def poll(self) -> tuple[dict[int, Ended], dict[int, Ended], dict[int, tuple[Ended, ...]]]:
        """Stores, puts and fetches that have ended since the last look."""
        stores: dict[int, Ended] = {}
        waiting = {store.order.number for store in self._of_step}
        for number, store in list(self._open.items()):
            if number in waiting or not all(part.state.is_final for part in store.parts):
                continue
            del self._open[number]
            ok = not store.dropped and all(part.state is TransferState.LANDED for part in store.parts)
            stores[number] = Ended(1, ok)
            if ok and self._memory is not None:
                self._metrics.count("stored_bytes", len(store.order.slots) * self._memory.shape.object_bytes)
            if self._tier is not None and not store.order.keys:
                self._metrics.count("tier_puts_skipped")
            elif self._tier is not None:
                self._puts[number] = self._threads.submit(self._put, store.order) if ok else _no_put()
        puts = {number: Ended(1, put.result()) for number, put in self._puts.items() if put.done()}
        for number in puts:
            del self._puts[number]
        if puts:
            with self._lock:  # counts are this thread's alone
                failed, self._uncounted = self._uncounted, 0
            if failed:
                self._metrics.count("tier_puts_failed", failed)
        fetches = {
            number: tuple(Ended(1, ok) for ok in fetch.result())
            for number, fetch in self._fetches.items()
            if fetch.done()
        }
        for number in fetches:
            del self._fetches[number]
        return stores, puts, fetches

    def _put(self, order: StoreOrder) -> bool:
        assert self._tier is not None, "puts begin only where there is a tier"
        assert self._memory is not None, "a tier needs host slots"
        for slot, key in zip(order.slots, order.keys, strict=True):
            try:
                self._tier.put(rank_key(key, self._space), self._memory.buffer(slot))
            except Exception as error:  # a tier's own fault must not take the engine down
                self._not_kept(error)
                return False
        self._kept()
        return True

    def _not_kept(self, error: Exception) -> None:
        """Said once until the tier keeps something again: a full disk refuses each object of all that follow."""
        with self._lock:
            self._uncounted += 1
            self._refused += 1
            is_first = self._refused == 1
        if is_first:
            _log.warning("the file tier does not keep what is stored (said once until it does again): %s", error)

    def _kept(self) -> None:
        with self._lock:
            refused, self._refused = self._refused, 0
        if refused:
            _log.warning("the file tier keeps what is stored again, after %d stores that it did not", refused)

    def _fetch(self, fetch: FetchOrder) -> tuple[bool, ...]:
        return tuple(self._fetch_one(slot, index, fetch) for index, slot in enumerate(fetch.slots))

    def _fetch_one(self, slot: int, index: int, fetch: FetchOrder) -> bool:
        assert self._tier is not None, "fetches are ordered only where there is a tier"
        assert self._memory is not None, "a tier needs host slots"
        buffer = self._memory.buffer(slot)
        try:
            key = rank_key(fetch.keys[index], self._space)
            self._tier.get_ranges(key, [ByteRange(0, buffer.nbytes)], [buffer])
        except Exception as error:  # a tier's own fault must not take the engine down
            _log.warning("the file tier did not give an object: %r", error)
            return False
        return True

    @property
    def wait_for_step(self) -> bool:
        """Whether there are stores that leave with the layers, or at the end, of the step under way."""
        return bool(self._of_step)

    @property
    def wait_for_layers(self) -> bool:
        """Whether there are stores that leave with the layers of the step under way."""
        return self._layerwise and self.wait_for_step

    @property
    def num_open(self) -> int:
        """Stores, puts and fetches that have not ended."""
        return len(self._open) + len(self._puts) + len(self._fetches)

    def drain(self, timeout_s: float) -> None:
        """Stores that have begun have ended, or have been given up after so many seconds (`flush`).

        Those that ended well are on their way into the tier.
        """
        self.flush(tuple(self._open), timeout_s)
        self.poll()

    def close(self) -> None:
        """Reads and writes of the tier have ended, and it is closed."""
        self._threads.shutdown(wait=True)
        if self._tier is not None:
            self._tier.close()
