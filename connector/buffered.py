"""The buffered connector: layers arrive in a buffer, are changed there, and then go to the engine's blocks.

For blending, some tokens' KV is computed anew over what was loaded. Three layers are in work at a time, each in a
buffer of its own, so that the recompute of one hides the load of the next (`i` counts layers):

    advance i+2:   load i+1 begins │ the compute stream waits for i │ i-1 is scattered
    then:          the caller recomputes what it wants of layer i, in `layer_view(i)`

The protocol is the paged connector's, with one addition: the generator is to be run to its end after the last layer's
recompute, because what follows the last yield scatters the last layer.

Rows of a buffer are the sequence's tokens in order. A load goes straight into them, by copies alone: no kernel takes
the recompute's multiprocessors, and chunks may begin at any row. Scatters have a lane of their own, so that none queues
behind a load, and are submitted once their layer's recompute has ended: a lane that looks in vain for what waits behind
a fence looks ever more rarely, and the next load needs that buffer at once.

Source: CacheBlend's use of the layerwise path (Yao et al., EuroSys 2025), as LMCache's buffered connector arranges it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Final

import numpy as np

from lamella.connector.in_flight import Bound, Load, Moving, drain
from lamella.connector.joined_load import JoinedLoad, PlacedLoad
from lamella.connector.layerwise import LayerFuture, LayerwiseConnector
from lamella.connector.slice_objects import slice_engines, slice_layout
from lamella.connector.streams import Blocks, ComputeStream, Moment, TransferStream
from lamella.cuda_ext.device import Device
from lamella.cuda_ext.engine import RegisteredCache, TransferEngine
from lamella.cuda_ext.executors import HostObjects
from lamella.cuda_ext.rates import H200_RATES
from lamella.cuda_ext.slots import SlotMemory
from lamella.cuda_ext.transfer import CopyMethod, Transfer
from lamella.reference.geometry import KVGeometry, ObjectForm
from lamella.reference.layout import EngineLayout, ObjectLayout, TensorView, engine_layout
from lamella.reference.plan import Direction
from lamella.reference.slices import Slice

NUM_BUFFERS: Final = 3
"""One that loads, one that is computed on, one that is scattered."""

SCATTER_WINDOW_BYTES: Final = 8 << 20
"""Moved by one kernel. The lane reserves four of them on the device, as every lane does, and uses none."""

_MEMORY_BYTES_PER_S: Final = 1e12  # within a device; from it the lane reckons when to look
_SCATTERS_IN_FLIGHT_BYTES: Final = 1 << 30  # a layer's windows are all enqueued at once
_POLL_S: Final = 20e-6


class BufferedPass:
    """One sequence on its way through the buffers. For one thread.

    Args:
        loads: what goes into them; rows of no load are the caller's to fill.
        rows: which rows go to which of the engine's blocks; asked when a layer is scattered.
    """

    def __init__(self, loads: Sequence[Load], rows: Callable[[], Blocks]) -> None:
        self.loads = tuple(loads)
        self.rows = rows
        self.computed: list[Moment] = []
        """When each layer's recompute ends."""
        self.scattered: list[Moving] = []
        self._reason: str | None = None

    @property
    def reason(self) -> str | None:
        """Why the rows cannot be relied on: a load came short, or a layer could not be scattered."""
        return self._reason or next((load.reason for load in self.loads if load.reason is not None), None)

    def fail(self, reason: str) -> None:
        """Nothing of it can be relied on any more."""
        self._reason = self._reason or reason
        for load in self.loads:
            load.shorten(0, reason)


class BufferedConnector(LayerwiseConnector):
    """Loads through layer buffers; stores straight from the blocks, as the paged connector does.

    One pass at a time: the buffers are one sequence's.

    Args:
        engine, layout, caches, host_memory, compute_stream, timeout_s: as for `LayerwiseConnector`.
        max_tokens: tokens that a buffer holds.
        scatter_engine: moves layers from their buffers to the blocks; None: one is made, and closed with this.

    Raises:
        ValueError: several kernel groups or the block form, whose bytes have no token axis of their own; caches that
            do not fit; or max_tokens below 1.
        RuntimeError, MemoryError: the device has no room for the buffers.
    """

    def __init__(
        self,
        engine: TransferEngine,
        layout: ObjectLayout,
        caches: Sequence[EngineLayout],
        host_memory: SlotMemory,
        *,
        max_tokens: int,
        compute_stream: ComputeStream | None = None,
        timeout_s: float = 10.0,
        scatter_engine: TransferEngine | None = None,
    ) -> None:
        if len(layout.groups) != 1 or layout.form is not ObjectForm.TOKEN:
            raise ValueError(
                f"blending needs one kernel group in token form, got {len(layout.groups)} in {layout.form.value} form"
            )
        group = layout.groups[0]
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}: a buffer holds the longest prompt")
        self.max_tokens = -(-max_tokens // group.block_tokens) * group.block_tokens
        # A chunk may begin and end anywhere: its first and its last block may reach beyond the sequence.
        self._margin = group.block_tokens
        self._rows = self.max_tokens + 2 * self._margin
        self._layer = _one_layer(group.geometry, self._rows)
        self._memory = Device(engine.device).allocate(NUM_BUFFERS * self._layer.object_bytes)
        self._busy = False
        self._own_engine: TransferEngine | None = None
        try:
            super().__init__(
                engine,
                layout,
                caches,
                [Slice(layer, 1) for layer in range(layout.num_layers)],
                host_memory,
                compute_stream=compute_stream,
                timeout_s=timeout_s,
            )
            self.load_stream = TransferStream(engine, Direction.RETRIEVE, CopyMethod.DIRECT_BATCH)
            if scatter_engine is None:
                scatter_engine = self._own_engine = _scatter_engine(engine, layout)
            self.scatter_stream = TransferStream(scatter_engine, Direction.RETRIEVE, CopyMethod.GATHER)
            one = ObjectLayout.single(self._layer, group.block_tokens)
            self._targets = [
                scatter_engine.register_cache(one, slice_engines(layout, caches, Slice(layer, 1)))
                for layer in range(layout.num_layers)
            ]
        except BaseException:
            if self._own_engine is not None:
                self._own_engine.close()
            self._memory.close()
            raise
        self._fine: dict[int, RegisteredCache] = {}
        self._shifted = {0: (self._whole, tuple(self._parts[part] for part in self.slices[:NUM_BUFFERS]))}

    def layer_view(self, layer: int) -> TensorView:
        """Where the layer's KV is while it is in work: `[K, max_tokens, H, D]`, tokens from the sequence's first on.

        It may be read and written on the compute stream from the advance that waited for it up to the next one.
        """
        geometry = self._layer
        size = geometry.element_bytes
        shape = (geometry.kv, self.max_tokens, geometry.num_heads, geometry.head_dim)
        row = geometry.hidden_bytes
        strides = (self._rows * row, row, geometry.head_dim * size, size)
        return TensorView(self._buffer(layer), shape, strides, size)

    def join(self, loads: Sequence[PlacedLoad]) -> JoinedLoad:
        """The loads as one, whose chunks follow one another; each loads something."""
        return JoinedLoad(loads, self.layout.chunk_tokens, self.layout.groups[0].block_tokens, self._margin)

    def batched_to_gpu(self, load: Load, *, sync: bool = True) -> Generator[None, LayerFuture, None]:
        """N+2 yields, as the paged connector's; run to its end, the last layer is in the blocks too.

        Raises:
            ValueError: more tokens than a buffer holds.
            RuntimeError: another load has the buffers.
        """

        def loaded() -> Blocks:
            num_tokens = min(load.blocks.num_tokens, load.num_chunks * self.layout.chunk_tokens)
            return load.blocks._replace(num_tokens=num_tokens, skip_tokens=min(load.blocks.skip_tokens, num_tokens))

        with closing(self.batched_blend(BufferedPass((load,), loaded))) as passing:
            next(passing)
            for _ in range(self.num_layers):
                future = yield
                passing.send((future,))
            yield
            next(passing)
            yield
            next(passing, None)

    def batched_blend(self, one: BufferedPass) -> Generator[None, Sequence[LayerFuture], None]:
        """As `batched_to_gpu`, for several loads: each layer's futures are sent together, one a load, in order.

        Raises:
            ValueError: rows that a buffer does not have.
            RuntimeError: another pass has the buffers.
        """
        for load in one.loads:
            rows = _rows(load)
            if not 0 <= rows[0] <= rows[1] <= self.max_tokens:
                raise ValueError(f"a buffer holds {self.max_tokens} tokens, got {rows[1]} from {rows[0]} on")
        if one.rows().num_tokens > self.max_tokens:
            raise ValueError(f"a buffer holds {self.max_tokens} tokens, got {one.rows().num_tokens}")
        if self._busy:
            raise RuntimeError("the buffers are another load's: run its generator to the end, or close it")
        for load in one.loads:
            self._make_known(load)
        self._busy = True
        self.load_stream.wait_stream(self.current_stream)
        begun = self.load_stream.moment
        ended = False
        try:
            for layer in range(self.num_layers):
                futures = yield
                self._computed_up_to(one, layer - 1)
                if layer >= NUM_BUFFERS:
                    self._scatter(one, through=layer - NUM_BUFFERS)
                    self._wait(one, layer - NUM_BUFFERS, on_host=True)
                for load, future in zip(one.loads, futures, strict=True):
                    self._send(load, Slice(layer, 1), future, begun)
                self._hold_back(layer - 1)
                self._scatter(one)
            yield
            self._computed_up_to(one, self.num_layers - 1)
            self._hold_back(self.num_layers - 1)
            self._scatter(one)
            yield
            self._computed_up_to(one, self.num_layers)
            self._scatter(one, through=self.num_layers - 1)
            for layer in range(self.num_layers):
                self._wait(one, layer, on_host=False)
            ended = True
        finally:
            if not ended:
                for load in one.loads:
                    load.close()
                for moving in one.scattered:
                    moving.transfer.cancel()
            for load in one.loads:
                self._finish(load)
            drain([moving.transfer for moving in one.scattered], self.timeout_s)
            self._busy = False

    def close(self) -> None:
        """As the paged connector's, and the buffers are freed. A second call does nothing."""
        super().close()
        if not self.scatter_stream.outstanding.wait(self.timeout_s):
            raise TimeoutError(f"a layer is still being scattered after {self.timeout_s} s: its buffer cannot be freed")
        if self._own_engine is not None:
            self._own_engine.close()
        self._memory.close()

    # ---- where loads go

    def _load_caches(self) -> tuple[EngineLayout, ...]:
        """The buffers as a paged cache whose blocks follow one another."""
        return self._buffers_from(0)

    def _buffers_from(self, row: int, block_tokens: int | None = None) -> tuple[EngineLayout, ...]:
        """The same, with the first block beginning at that row of the margin; blocks of the engine's size, or that."""
        geometry, block_tokens = self._layer, block_tokens or self.layout.groups[0].block_tokens
        size, width = geometry.element_bytes, geometry.hidden_bytes
        num_blocks = (self._rows - row) // block_tokens
        shape = (geometry.kv, num_blocks, block_tokens, geometry.num_heads, geometry.head_dim)
        strides = (self._rows * width, block_tokens * width, width, geometry.head_dim * size, size)
        views = [
            TensorView(self._buffer(layer) + (row - self._margin) * width, shape, strides, size)
            for layer in range(self.layout.num_layers)
        ]
        return (engine_layout("KNTHD", views),)

    def _make_known(self, load: Load) -> None:
        """Makes the buffers known as the load sees them; at most once for each row, and each size, of a block."""
        group = self.layout.groups[0]
        if isinstance(load, JoinedLoad):
            size = load.block_tokens
            if size not in self._fine:
                layout = ObjectLayout.single(group.geometry, size)
                self._fine[size] = self.engine.register_cache(layout, self._buffers_from(0, size))
            return
        row = _offset(load) % group.block_tokens
        if row in self._shifted:
            return
        caches = self._buffers_from(row)
        whole = self.engine.register_cache(self.layout, caches)
        parts = [
            self.engine.register_cache(slice_layout(self.layout, part), slice_engines(self.layout, caches, part))
            for part in self.slices[:NUM_BUFFERS]
        ]
        self._shifted[row] = whole, tuple(parts)

    def _target(self, load: Load) -> RegisteredCache:
        if isinstance(load, JoinedLoad):
            return self._fine[load.block_tokens]
        return self._shifted[_offset(load) % self.layout.groups[0].block_tokens][0]

    def _part_target(self, load: Load, part: Slice) -> RegisteredCache:
        shifted = self._shifted[_offset(load) % self.layout.groups[0].block_tokens]
        return shifted[1][part.first_layer % NUM_BUFFERS]

    def _destination(self, load: Load) -> Blocks:
        """Row by row in order; a table's entries for skipped tokens are never looked at."""
        if isinstance(load, JoinedLoad):
            return load.blocks
        table = load.table if isinstance(load, PlacedLoad) else None
        if table is None:
            block_tokens = self.layout.groups[0].block_tokens
            first = (self._margin + _offset(load)) // block_tokens
            blocks = np.arange(first, first + -(-load.blocks.num_tokens // block_tokens), dtype=np.int32)
            table = np.maximum(blocks, 0)
            if isinstance(load, PlacedLoad):
                load.table = table
        return load.blocks._replace(block_ids=(table,))

    # ---- where layers go from there

    def _computed_up_to(self, one: BufferedPass, layers: int) -> None:
        """That many layers have been given to the compute stream."""
        if len(one.computed) < layers:
            one.computed.append(self.current_stream.record())

    def _scatter(self, one: BufferedPass, *, through: int = -1) -> None:
        """Layers whose recompute has ended go from their buffers to the blocks; up to `through` it is waited for."""
        for layer in range(len(one.scattered), len(one.computed)):
            moment = one.computed[layer]
            bound = Bound(self.timeout_s)
            while not moment.has_passed():
                if layer > through:
                    return
                if not bound.left_s:
                    break  # behind its fence it is waited for once more, and fails
                time.sleep(_POLL_S)
            objects = HostObjects((self._buffer(layer),))
            transfer = self.scatter_stream.submit(
                self._targets[layer], Slice(0, 1), objects, one.rows(), lambda: None, moment
            )
            one.scattered.append(Moving(Slice(layer, 1), 0, transfer, 0))

    def _wait(self, one: BufferedPass, layer: int, *, on_host: bool) -> None:
        transfer: Transfer = one.scattered[layer].transfer
        try:
            if on_host:  # its buffer is written next, on whatever stream
                transfer.wait(self.timeout_s)
            else:
                transfer.wait_layer(0, self.current_stream.handle, self.timeout_s)
        except (RuntimeError, TimeoutError) as error:  # stopped, or the device is lost
            one.fail(f"layer {layer} could not be scattered: {error}")

    def _buffer(self, layer: int) -> int:
        """Where the layer's first row is."""
        margin_bytes = self._margin * self._layer.hidden_bytes
        return self._memory.address + layer % NUM_BUFFERS * self._layer.object_bytes + margin_bytes


def _offset(load: Load) -> int:
    return load.offset if isinstance(load, PlacedLoad) else 0


def _rows(load: Load) -> tuple[int, int]:
    """The first row that it writes, and the one behind its last."""
    if isinstance(load, PlacedLoad | JoinedLoad):
        return load.rows
    return load.blocks.skip_tokens, load.blocks.num_tokens


def _one_layer(geometry: KVGeometry, tokens: int) -> KVGeometry:
    return KVGeometry(1, geometry.kv, geometry.num_heads, geometry.head_dim, geometry.element_bytes, tokens)


def _scatter_engine(engine: TransferEngine, layout: ObjectLayout) -> TransferEngine:
    group = layout.groups[0]
    window_bytes = max(SCATTER_WINDOW_BYTES, group.block_tokens * group.geometry.token_layer_bytes)
    return TransferEngine(
        engine.device,
        num_layers=1,
        staging_bytes=4 * window_bytes,
        window_bytes=window_bytes,
        in_flight_bytes=_SCATTERS_IN_FLIGHT_BYTES,
        carrier=engine.carrier,
        rates=replace(H200_RATES, wire_bytes_per_s=_MEMORY_BYTES_PER_S),
    )
