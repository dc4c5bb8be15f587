"""Stores of one rank into slots that the server gave it: blocks leave, then the server is told to show them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from lamella.connector.connector_metrics import Metrics
from lamella.connector.step_orders import Ended, StoreOrder
from lamella.connector.worker_stores import WorkerStores
from lamella.cuda_ext.transfer import Arriving
from lamella.reference.slices import Slice
from lamella.server.moves import LeasedStore, Side


class RankStores:
    """See the module.

    Args:
        side: moves the bytes and tells the server.
        slices: the units in which stores leave.
        layerwise: whether they leave during the forward pass.
        metrics: counts.
    """

    def __init__(self, side: Side, slices: Sequence[Slice], layerwise: bool, metrics: Metrics) -> None:
        self._side = side
        self._metrics = metrics
        self._leaving = WorkerStores(self._begin, slices, layerwise, None, b"", None, 1, metrics)
        self._orders: dict[int, LeasedStore] = {}
        self._committing: dict[int, Future[Any]] = {}

    def begin(self, order: LeasedStore) -> None:
        """The store is one of this step's."""
        self._orders[order.number] = order
        self._leaving.begin_step([order], [])

    def _begin(self, order: StoreOrder, parts: Sequence[Slice]) -> Arriving:
        assert isinstance(order, LeasedStore), "stores of a server's worker have a lease"
        return self._side.store(order, parts)

    def layer_computed(self, layer: int) -> None:
        """The layer's KV is in its blocks, on the stream."""
        self._leaving.layer_computed(layer)

    def step_computed(self, spoils: Callable[[tuple[tuple[int, ...], ...]], bool]) -> None:
        """The forward pass was launched; `spoils` says whether something computed over some blocks may be wrong."""
        self._leaving.step_computed(spoils)

    def flush(self, numbers: Sequence[int], timeout_s: float) -> None:
        """These stores do not read their blocks any more.

        Raises:
            TimeoutError: one of them still may after so many seconds.
        """
        self._leaving.flush(numbers, timeout_s)

    def poll(self) -> tuple[dict[int, Ended], dict[int, bool]]:
        """Stores that read their blocks no longer; stores that others can read now, or never will."""
        stores, _puts, _fetches = self._leaving.poll()
        readable: dict[int, bool] = {}
        for number, end in stores.items():
            answer = self._side.commit(self._orders.pop(number), end.ok)
            if end.ok:
                self._committing[number] = answer
            else:
                self._metrics.count("stores_dropped")
                readable[number] = False
        for number, answer in list(self._committing.items()):
            if answer.done():
                del self._committing[number]
                readable[number] = answer.exception() is None
        return stores, readable

    @property
    def num_open(self) -> int:
        """Stores that have not ended, or of which the server has not said that they can be read."""
        return len(self._orders) + len(self._committing)

    def close(self) -> None:
        """Threads have ended."""
        self._leaving.close()
