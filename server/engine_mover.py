"""One rank of a vLLM engine on a cache server: `lamella.connector.mover.Mover`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Final

from lamella.connector.connector_metrics import Metrics
from lamella.connector.mover import NULL_BLOCK, RankPlace
from lamella.connector.step_orders import Ended, FetchOrder, LoadOrder, StoreOrder
from lamella.connector.worker_stores import WorkerStores
from lamella.cuda_ext.engine import TransferEngine
from lamella.cuda_ext.transfer import Arriving
from lamella.reference.slices import Slice, plan_slices
from lamella.server.protocol import TransferSide
from lamella.server.rank import RankCaches, RankOfEngine
from lamella.server.rank_mover import RankMover
from lamella.server.rank_stores import RankStores
from lamella.server.sequences import SharedLoad, SharedStore

_ARRIVAL_SLOTS: Final = 64
_CALL_S: Final = 2.0


class EngineMover:
    """See the module.

    Args:
        folder: the server's.
        place: whose.

    Raises:
        (all): as `RankMover`.
    """

    def __init__(self, folder: Path, place: RankPlace) -> None:
        caches = place.caches
        self._rank = place.rank
        self._num_layers = caches.layout.num_layers
        self._mover = RankMover(
            folder,
            RankOfEngine(place.engine, place.space, place.rank, place.num_ranks),
            RankCaches(caches.layout, caches.engines, place.device, tables=caches.kernel_tables, null_block=NULL_BLOCK),
            transfer_side=TransferSide(place.settings.transfer_side),
            layers_per_slice=0,
            num_arrival_slots=_ARRIVAL_SLOTS,
            load_timeout_s=place.settings.load_deadline_s,
            call_timeout_s=_CALL_S,
            stream=place.stream,
            engine_options=place.options(),
        )
        self.engine: TransferEngine | None = self._mover.engine
        self.executor: Executor = self._mover.executor

    @property
    def transfer_side(self) -> TransferSide:
        """Whose process moves the bytes."""
        return self._mover.transfer_side

    def load(self, order: LoadOrder, slices: Sequence[Slice]) -> Callable[[], Arriving]:
        """As `Mover.load`."""
        assert isinstance(order, SharedLoad), "what a server has found is loaded under its lease"
        return self._mover.load(order.part(self._rank, _width_of(slices, self._num_layers)))

    def loads_ended(self, numbers: Iterable[int]) -> None:
        """As `Mover.loads_ended`."""
        self._mover.loads_ended(numbers)

    def stores(self, slices: Sequence[Slice], layerwise: bool, metrics: Metrics) -> WorkerStores:
        """As `Mover.stores`; layer by layer only where this process moves them."""
        return _EngineStores(
            self._mover, self._rank, slices, layerwise and self.transfer_side is TransferSide.WORKER, metrics
        )

    def look(self) -> None:
        """As `Mover.look`."""
        self._mover.look()

    @property
    def ready_slots(self) -> int:
        """As `Mover.ready_slots`: the server chooses slots, and is told which are ready by its session."""
        return 0

    def close(self) -> None:
        """As `Mover.close`."""
        self._mover.close()


class _EngineStores(RankStores):
    """Of orders for every rank."""

    def __init__(self, mover: RankMover, rank: int, slices: Sequence[Slice], layerwise: bool, metrics: Metrics) -> None:
        super().__init__(mover, slices, layerwise, metrics)
        self._rank = rank
        self._others: list[int] = []  # stores of which this rank lacks nothing

    def begin_step(self, orders: Sequence[StoreOrder], fetches: Sequence[FetchOrder]) -> None:
        """The step's stores are known.

        Args:
            orders: `SharedStore`s.
            fetches: none.
        """
        own: list[StoreOrder] = []
        for order in orders:
            assert isinstance(order, SharedStore), "stores on a server have a lease"
            part = order.part(self._rank)
            if part is None:
                self._others.append(order.number)
            else:
                own.append(part)
        super().begin_step(own, fetches)

    def poll(self) -> tuple[dict[int, Ended], dict[int, Ended], dict[int, tuple[Ended, ...]]]:
        """As `RankStores.poll`."""
        stores, puts, fetches = super().poll()
        self.take_readable()  # nobody waits for what others can read
        stores.update(dict.fromkeys(self._others, Ended(1, True)))
        self._others = []
        return stores, puts, fetches


def _width_of(slices: Sequence[Slice], num_layers: int) -> int | tuple[int, ...]:
    """What cuts a stage like this; 0: whole."""
    if len(slices) == 1:
        return 0
    first = slices[0].num_layers
    if tuple(plan_slices(num_layers, first)) == tuple(slices):
        return first
    return tuple(part.num_layers for part in slices)
