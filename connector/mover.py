"""Where a rank's objects are and what moves them: this process's own pool, or a cache server's.

`Mover` is what the worker side needs of either; who waits, who is released and which blocks have failed is decided
above it, once for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

from lamella.connector.at_once import AtOnce
from lamella.connector.cache_shapes import DescribedCaches
from lamella.connector.connector_metrics import Metrics
from lamella.connector.step_orders import LoadOrder, StoreOrder
from lamella.connector.storage.file_tier import FileTier
from lamella.connector.vllm_settings import ConnectorSettings
from lamella.connector.worker_stores import WorkerStores
from lamella.cuda_ext._execution import HostObjects
from lamella.cuda_ext.arrival import AfterEvent, Fence
from lamella.cuda_ext.engine import RegisteredCache, TransferEngine
from lamella.cuda_ext.slots import SlotMemory
from lamella.cuda_ext.transfer import Arriving, Transfer
from lamella.reference.keys import KeySpace
from lamella.reference.ordering import parse_order
from lamella.reference.plan import Direction
from lamella.reference.slices import Slice

NULL_BLOCK: Final = 0
"""vLLM's own block that stands for none, where a window has left a sequence's blocks behind; nobody's KV lies in it."""

_MIB: Final = 1 << 20
_GATHER_FACTOR: Final = 2.0
"""A kernel that reads host memory slows the model's products beside it by half and more, so it has to save as much."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One rank's caches, and what their objects are called.

    Attributes:
        settings: the connector's.
        space: this rank's key space.
        caches: as described.
        device: `"cpu"` or `"cuda:N"`.
        stream: the stream that computes now, as `cudaStream_t`.
        engine: name of the engine, the same for all of its ranks.
        rank, num_ranks: counted over the engine.
        engine_options: for the transfer engine, in tests.
    """

    settings: ConnectorSettings
    space: KeySpace
    caches: DescribedCaches
    device: str
    stream: Callable[[], int]
    engine: str
    rank: int
    num_ranks: int
    engine_options: Mapping[str, Any]

    def options(self) -> dict[str, Any]:
        """Of the transfer engine."""
        settings = self.settings
        return {
            "num_layers": self.caches.layout.num_layers,
            "staging_bytes": settings.staging_mib * _MIB,
            "window_bytes": settings.window_mib * _MIB,
            "turn_bytes": settings.turn_mib * _MIB,
            "in_flight_bytes": settings.in_flight_mb * 1_000_000,
            "carrier": settings.carrier_kind,
            "order": parse_order(settings.order),
            "deadline_s": settings.load_deadline_s,
            "gather_factor": _GATHER_FACTOR,
            **self.engine_options,
        }


@contextmanager
def settings_named(settings: ConnectorSettings) -> Iterator[None]:
    """What a transfer engine refuses is said with the setting that asks for it.

    Raises:
        MemoryError: no room for its staging ring.
        ValueError: windows that are narrower than a block.
    """
    try:
        yield
    except ValueError as error:
        if "window_bytes" not in str(error):
            raise
        raise ValueError(f"window_mib {settings.window_mib}: {error}; raise it") from error
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "out of memory" not in str(error):
            raise
        raise MemoryError(
            f"staging_mib {settings.staging_mib}, which each rank takes of its device's memory: {error}; lower it (it "
            f"must hold four windows of {settings.window_mib} MiB), or leave the device more beside the engine's caches"
        ) from error


class Mover(Protocol):
    """Moves one rank's objects into blocks and out of them. On the model runner's thread."""

    @property
    def engine(self) -> TransferEngine | None:
        """This process's own, where it moves the bytes."""

    @property
    def executor(self) -> Executor:
        """Begins what `load` returns."""

    def load(self, order: LoadOrder, slices: Sequence[Slice]) -> Callable[[], Arriving]:
        """The load, behind what the stream was given so far (XFER-3); what it returns begins it."""

    def loads_ended(self, numbers: Iterable[int]) -> None:
        """Of these loads nothing is in flight any more, or they will never begin."""

    def stores(self, slices: Sequence[Slice], layerwise: bool, metrics: Metrics) -> WorkerStores:
        """What keeps this rank's stores."""

    def look(self) -> None:
        """Answers that have come are taken in; once a step, and never a wait."""

    @property
    def ready_slots(self) -> int:
        """Slots from 0 on that the scheduler side may use; 0 where it does not choose them."""

    def close(self) -> None:
        """Nothing is in flight, threads have ended and memory is given back."""


class PoolMover:
    """Objects in this process's own host memory, and in a folder behind it.

    Args:
        place: whose.
        memory: the slots; closed with this object.
    """

    def __init__(self, place: RankPlace, memory: SlotMemory) -> None:
        self._place = place
        self._caches = place.caches
        self.memory = memory
        self.executor: Executor = AtOnce()
        with settings_named(place.settings):
            self.engine: TransferEngine = TransferEngine(place.device, **place.options())
            self.registered: RegisteredCache = self.engine.register_cache(place.caches.layout, place.caches.engines)

    def load(self, order: LoadOrder, slices: Sequence[Slice]) -> Callable[[], Transfer]:
        """As `Mover.load`."""
        fence, kept = self._fence()

        def submit() -> Transfer:
            return self._submit(Direction.RETRIEVE, order, slices, fence, kept)

        return submit

    def loads_ended(self, numbers: Iterable[int]) -> None:
        """As `Mover.loads_ended`: their transfers hold all that they need."""

    def stores(self, slices: Sequence[Slice], layerwise: bool, metrics: Metrics) -> WorkerStores:
        """As `Mover.stores`."""
        settings = self._place.settings
        tier: FileTier | None = None
        if settings.file_tier is not None:
            tier = FileTier(settings.file_tier, self._caches.layout.object_bytes, max_bytes=settings.file_tier_bytes)
        space = self._place.space.digest()
        return WorkerStores(self._store, slices, layerwise, self.memory, space, tier, settings.io_threads, metrics)

    def _store(self, order: StoreOrder, slices: Sequence[Slice]) -> Transfer:
        return self._submit(Direction.STORE, order, slices, *self._fence())

    def _submit(
        self,
        direction: Direction,
        order: LoadOrder | StoreOrder,
        slices: Sequence[Slice],
        fence: Fence | None,
        kept: object,
    ) -> Transfer:
        return self.engine.submit(
            self.registered,
            direction,
            self.objects(order.first_chunk, order.slots),
            self._caches.kernel_tables(order.blocks),
            order.num_tokens,
            slices=slices,
            skip_tokens=order.skip_tokens,
            null_block=NULL_BLOCK,
            fence=fence,
            on_drained=lambda: kept and None,  # the event lives as long as the transfer may wait for it
        )

    def objects(self, first_chunk: int, slots: Sequence[int]) -> HostObjects:
        """Slots as the engine takes them: of chunks `first_chunk`, `first_chunk + 1`, ..."""
        shape = self.memory.shape
        return HostObjects((0,) * first_chunk + self.memory.addresses(slots), shape.piece_bytes, self.memory.base)

    def _fence(self) -> tuple[Fence | None, object]:
        """Behind all that the computing stream was given so far (XFER-3), and what must outlive it."""
        if not self._place.device.startswith("cuda"):
            return None, None
        import torch

        from lamella.cuda_ext.torch import event_handle

        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(torch.device(self._place.device)))
        return AfterEvent(event_handle(event)), event

    def look(self) -> None:
        """As `Mover.look`: there is nobody to answer."""

    @property
    def ready_slots(self) -> int:
        """As `SlotMemory.ready_slots`."""
        return self.memory.ready_slots

    def close(self) -> None:
        """As `Mover.close`."""
        self.engine.close()
        self.memory.close()
