"""Stores of one rank into slots that the server gave it: blocks leave, then the server is told to show them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Final

from lamella.connector.connector_metrics import Metrics
from lamella.connector.step_orders import Ended, FetchOrder, StoreOrder
from lamella.connector.worker_stores import WorkerStores
from lamella.cuda_ext.transfer import Arriving
from lamella.reference.slices import Slice
from lamella.server.moves import LeasedStore
from lamella.server.rank_mover import RankMover

_LOOK_S: Final = 0.002


class RankStores(WorkerStores):
    """As `WorkerStores`, of orders with a lease; the server's tiers keep what they keep, so there are no puts.

    Args:
        mover: moves the bytes and tells the server.
        slices: the units in which stores leave.
        layerwise: whether they leave during the forward pass.
        metrics: counts.
    """

    def __init__(self, mover: RankMover, slices: Sequence[Slice], layerwise: bool, metrics: Metrics) -> None:
        super().__init__(self._move, slices, layerwise, None, b"", None, 1, metrics)
        self._mover = mover
        self._orders: dict[int, LeasedStore] = {}
        self._committing: dict[int, tuple[int, Future[Any]]] = {}  # (session that said so, the server's answer)
        self._readable: dict[int, bool] = {}

    def begin_step(self, orders: Sequence[StoreOrder], fetches: Sequence[FetchOrder]) -> None:
        """The step's stores are known.

        Args:
            orders: `LeasedStore`s of this rank.
            fetches: none.
        """
        for order in orders:
            assert isinstance(order, LeasedStore), "stores of a server's rank have a lease"
            self._orders[order.number] = order
        super().begin_step(orders, ())

    def _move(self, order: StoreOrder, parts: Sequence[Slice]) -> Arriving:
        return self._mover.side.store(self._orders[order.number], parts)

    def poll(self) -> tuple[dict[int, Ended], dict[int, Ended], dict[int, tuple[Ended, ...]]]:
        """Stores that read their blocks no longer; no puts and no fetches."""
        stores, puts, fetches = super().poll()
        for number, end in stores.items():
            answer = self._mover.side.commit(self._orders.pop(number), end.ok)
            if end.ok:
                self._committing[number] = self._mover.line.session, answer
            else:
                self._readable[number] = False
        self._take_answers()
        return stores, puts, fetches

    def _take_answers(self) -> None:
        session = self._mover.line.session
        for number, (asked, answer) in list(self._committing.items()):
            if answer.done() or session != asked:  # a server that is gone answers no more
                del self._committing[number]
                self._readable[number] = answer.done() and answer.exception() is None

    def take_readable(self) -> dict[int, bool]:
        """Stores that others can read now, since the last call; False: they never will."""
        taken, self._readable = self._readable, {}
        return taken

    def drain(self, timeout_s: float) -> None:
        """As `WorkerStores.drain`, and the server has been told of each.

        Raises:
            TimeoutError: no answer.
        """
        until = time.monotonic() + timeout_s
        super().drain(timeout_s)
        while self._committing:
            if time.monotonic() > until:
                raise TimeoutError(f"the cache server has not taken {len(self._committing)} stores in {timeout_s:g} s")
            self._mover.line.look(_LOOK_S)
            self._take_answers()

    @property
    def num_open(self) -> int:
        """Stores that have not ended, or of which the server has not said that they can be read."""
        return len(self._orders) + len(self._committing)
