"""One rank of an engine on a cache server: what an engine calls, whichever process moves the bytes.

    found = worker.lookup(keys)                          locked, on every rank of the engine
    number = worker.retrieve("r1", found, blocks, ...)   begins at once, behind what the stream was given so far
    worker.begin_step(held_blocks=..., num_tokens=...)   each step: what its layers must wait for is settled
      worker.wait_layer(layer)                           before the layer reads: every released retrieve, whoever is
                                                         in the batch (REL-2); bounded, a time-out fails that retrieve
      worker.layer_computed(layer)                       layerwise stores leave
    worker.step_computed()
    report = worker.poll()                               once a step: released (first layers landed), ended, failed

A retrieve is reported received once (REL-1), when its release rule says so; it stays in the draining set until its last
layer has landed, or its failure was collected, and only then are slot, locks and blocks anybody else's. A failure is
reported by block, in every step whose batch holds one (`errors`). Everything but `lookup`, `allocate` and the waits
returns at once, and each of those has a bound (SAFE-5). For the engine's thread alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lamella.connector.connector_metrics import Metrics
from lamella.connector.safety_rules import ALL_RULES, SafetyRules
from lamella.connector.step_orders import BlockTables, LoadOrder, StepOrders
from lamella.connector.worker_loads import WorkerLoads
from lamella.cuda_ext.arrival_board import LayerArrivalPool
from lamella.cuda_ext.engine import TransferEngine
from lamella.cuda_ext.transfer import Arriving
from lamella.reference.keys import ChunkKey
from lamella.reference.release import First, ReleasePolicy
from lamella.reference.slices import plan_slices
from lamella.server.client import MISS, CacheSession
from lamella.server.connection import ServerLostError
from lamella.server.moves import LeasedLoad, LeasedStore
from lamella.server.protocol import TransferSide
from lamella.server.rank import RankCaches, RankOfEngine, Report
from lamella.server.rank_mover import RankMover
from lamella.server.rank_stores import RankStores
from lamella.server.sequences import Locked, allocate
from lamella.server.wire import EVERY_RANK


class Worker:
    """See the module.

    Args:
        folder: the server's.
        of: which rank this is.
        caches: its paged caches.
        transfer_side: whose process moves the bytes; this one, the reason said, where the server cannot.
        layers_per_slice: width or schedule; 0: chunk-major.
        layerwise_stores: stores leave layer by layer while the step computes; this process's side only.
        release: when a request may run.
        num_arrival_slots: retrieves that can be layer-major at the same time.
        wait_timeout_s, load_timeout_s: bounds of a wait for a layer, and of a whole retrieve.
        stream: the stream that computes now, as `cudaStream_t`.
        rules: all of them, outside tests.
        engine_options: for the transfer engine.
        several_groups: the engine cannot report blocks; failures are by request, and release waits for everything.

    Raises:
        ServerLostError, RefusedError, OSError, ValueError: no server, or it refuses this rank.
        LibraryMissingError, RuntimeError: no native library, or no device.
    """

    def __init__(
        self,
        folder: Path,
        of: RankOfEngine,
        caches: RankCaches,
        *,
        transfer_side: TransferSide = TransferSide.WORKER,
        layers_per_slice: int | tuple[int, ...] = 1,
        layerwise_stores: bool = False,
        release: ReleasePolicy | None = None,
        num_arrival_slots: int = 64,
        wait_timeout_s: float = 10.0,
        load_timeout_s: float = 30.0,
        call_timeout_s: float = 2.0,
        stream: Callable[[], int] = lambda: 0,
        rules: SafetyRules = ALL_RULES,
        engine_options: Mapping[str, Any] | None = None,
        several_groups: bool = False,
    ) -> None:
        layout = caches.layout
        self.metrics = Metrics()
        self.rank = of.rank
        self._caches = caches
        self._next = 0
        self.mover = RankMover(
            folder,
            of,
            caches,
            transfer_side=transfer_side,
            layers_per_slice=layers_per_slice,
            num_arrival_slots=num_arrival_slots,
            load_timeout_s=load_timeout_s,
            call_timeout_s=call_timeout_s,
            stream=stream,
            engine_options=engine_options,
        )
        """Its session, its line and what moves its bytes."""
        slices = plan_slices(layout.num_layers, layers_per_slice or layout.num_layers)
        group = layout.groups[0]
        self.loads = WorkerLoads(
            self._begin_load,
            layout.num_layers,
            release or First(1),
            group.block_tokens,
            sum(one.geometry.token_bytes for one in layout.groups),
            wait_timeout_s,
            stream,
            rules,
            self.metrics,
            several_groups,
            self.mover.executor,
        )
        layerwise = layerwise_stores and self.transfer_side is TransferSide.WORKER and bool(layers_per_slice)
        self._stores = RankStores(self.mover, slices, layerwise, self.metrics)

    @property
    def engine(self) -> TransferEngine | None:
        """This process's own, where it moves the bytes."""
        return self.mover.engine

    @property
    def transfer_side(self) -> TransferSide:
        """Whose process moves the bytes."""
        return self.mover.transfer_side

    @property
    def arrivals(self) -> LayerArrivalPool:
        """Entries of this rank's board."""
        return self.mover.arrivals

    @property
    def session(self) -> CacheSession:
        """With the server.

        Raises:
            RuntimeError: the worker is closed.
        """
        return self.mover.session

    # ---- what is there

    def lookup(self, keys: Sequence[ChunkKey], *, first_wanted: int = 0, use_tiers: bool = True) -> Locked:
        """How many of `keys` are there on every rank, locked there; a miss where the server is lost.

        Args:
            keys: of a sequence's chunks from chunk 0 on, all in the key space of the engine's rank 0.
            first_wanted: chunks before it count as hits and are not locked.
            use_tiers: what the pool lacks is looked for in the tiers, behind this call's back.
        """
        before_ns = time.monotonic_ns()
        try:
            epoch = self.session.epoch
        except ServerLostError:
            return Locked(MISS, 0, 0, first_wanted)
        found = self.session.lookup(
            keys,
            first_wanted=first_wanted,
            rank=EVERY_RANK,
            use_tiers=use_tiers,
            epoch=epoch,
            meanwhile=None if self.loads.num_open else self.mover.rouse,
        )
        return Locked(found, epoch.server, before_ns + int(epoch.registered.lease_s * 1e9), first_wanted)

    def give_back(self, locked: Locked) -> None:
        """What was looked up will not be retrieved, on any rank."""
        if locked.found.lease:
            self.session.release(locked.found.lease, EVERY_RANK)

    # ---- loads

    def retrieve(
        self,
        request: str,
        locked: Locked,
        blocks: BlockTables,
        num_tokens: int,
        *,
        skip_tokens: int = 0,
        joins_step: bool = False,
        layers_per_slice: int | tuple[int, ...] | None = None,
    ) -> int:
        """The retrieve is on its way; returns its number.

        Args:
            request: whose.
            locked: from `lookup`; the part of this rank is the retrieve's from now on.
            blocks: block tables of the sequence from its first token on, one a KV cache group.
            num_tokens, skip_tokens: tokens `[skip_tokens, num_tokens)` are brought, within the chunks that were locked.
            joins_step: the request runs in this very step instead of waiting to be reported.
            layers_per_slice: of this retrieve; None: the worker's.
        """
        number = self._take_number()
        rows = locked.found.slots
        order = LeasedLoad(
            number,
            request,
            rows[self.rank] if rows else (),
            locked.first_chunk,
            blocks,
            num_tokens,
            skip_tokens,
            joins_step,
            lease=locked.found.lease,
            server=locked.server,
            locked_until_ns=locked.until_ns,
            layers_per_slice=layers_per_slice,
        )
        self.begin_load(order)
        return number

    def begin_load(self, order: LeasedLoad) -> None:
        """As `retrieve`, of an order that a scheduler made."""
        self.metrics.count("loads")
        self.loads.begin(order, time.monotonic_ns())

    def abort(self, number: int) -> None:
        """Nobody reads the retrieve: what was not issued of it never will be; its end is reported."""
        self.loads.cancel(number)

    def _begin_load(self, order: LoadOrder) -> Callable[[], Arriving]:
        assert isinstance(order, LeasedLoad), "loads of a server's worker have a lease"
        return self.mover.load(order)

    # ---- a step

    def begin_step(
        self,
        *,
        num_tokens: int = 0,
        num_decoding: int = 0,
        held_blocks: frozenset[int] = frozenset(),
        rewritten_blocks: frozenset[int] = frozenset(),
    ) -> None:
        """A step begins; its layers will wait for what was released before.

        Args:
            num_tokens, num_decoding: of the batch; no tokens: no forward pass.
            held_blocks, rewritten_blocks: as in `StepOrders`.
        """
        orders = StepOrders(num_tokens=num_tokens, num_decoding=num_decoding)
        self.loads.begin_step(replace(orders, held_blocks=held_blocks, rewritten_blocks=rewritten_blocks))

    def wait_layer(self, layer: int) -> None:
        """Work given to the stream from now on reads the layer right, or `errors` names its blocks in this step."""
        if self.loads.gated:
            self.loads.wait_layer(layer)

    def layer_computed(self, layer: int) -> None:
        """The layer's KV of this step is in its blocks, on the stream."""
        self._stores.layer_computed(layer)

    def step_computed(self) -> None:
        """The forward pass was launched: stores leave, unless a block of theirs has failed."""
        self._stores.step_computed(self.loads.spoils)

    def errors(self) -> set[int]:
        """Blocks whose retrieve failed, to report in this step (SAFE-3)."""
        return self.loads.errors()

    # ---- stores

    def store(self, request: str, keys: Sequence[ChunkKey], blocks: BlockTables, first_chunk: int = 0) -> list[int]:
        """What this rank has not stored leaves at `step_computed`, where there is room; numbers of stores.

        Args:
            request: whose.
            keys: of the sequence's chunks from chunk 0 on, in rank 0's key space.
            blocks: block tables of the sequence from its first token on.
            first_chunk: the first to store; it and those behind it are whole in their blocks by then.

        Raises:
            ValueError: a first chunk that is not among them.
        """
        orders = self.allocate(request, keys, blocks, first_chunk, self.rank)
        for order in orders:
            self.begin_store(order)
        return [order.number for order in orders]

    def allocate(
        self, request: str, keys: Sequence[ChunkKey], blocks: BlockTables, first_chunk: int, rank: int = EVERY_RANK
    ) -> list[LeasedStore]:
        """Orders for every rank, or one, to be begun there by `begin_store`; as `lamella.server.sequences.allocate`."""
        size = self._caches.layout.chunk_tokens
        orders = allocate(self.session, request, keys, blocks, first_chunk, size, rank, self._take_number)
        return [part for order in orders for part in order.parts()]

    def begin_store(self, order: LeasedStore) -> None:
        """As `store`, of an order that a scheduler made."""
        self._stores.begin_step([order], [])

    def _take_number(self) -> int:
        number, self._next = self._next, self._next + 1
        return number

    # ---- what has happened

    def poll(self) -> Report:
        """What has happened since the last poll; the engine asks once a step."""
        self.mover.look()
        polled = self.loads.poll()
        self.mover.loads_ended(polled.ended)
        stores, _puts, _fetches = self._stores.poll()
        self.metrics.count("stores_dropped", sum(not end.ok for end in stores.values()))
        return Report(polled.received, polled.failed, polled.ended, stores, self._stores.take_readable())

    def flush_stores(self, numbers: Sequence[int], timeout_s: float = 10.0) -> None:
        """Blocks of these stores can be written again.

        Raises:
            TimeoutError: one of them still reads after so many seconds.
        """
        self._stores.flush(numbers, timeout_s)

    @property
    def num_open(self) -> int:
        """Retrieves of which something is in flight, and stores that nobody can read yet."""
        return self.loads.num_open + self._stores.num_open

    @property
    def is_connected(self) -> bool:
        """Whether the server is there; without it everything is a miss."""
        return self.mover.is_connected

    # ---- the end

    def close(self) -> None:
        """Nothing of this rank is in flight, the server has let go of it, and its memory is unmapped."""
        self.loads.close()
        self.mover.close()
        self._stores.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
