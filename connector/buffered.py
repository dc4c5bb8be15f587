"""The buffered connector: layers arrive in a buffer, are changed there, and then go to the engine's blocks.

For blending, some tokens' KV is computed anew over what was loaded. Three layers are in work at a time, each in a
buffer of its own, so that the recompute of one hides the load of the next (`i` counts layers):

    advance i+2:   load i+1 begins │ the compute stream waits for i │ i-1 is scattered
    then:          the caller recomputes what it wants of layer i, in `layer_view(i)`

The protocol is the paged connector's, with one addition: the generator is to be run to its end after the last layer's
recompute, because what follows the last yield scatters the last layer.

Source: CacheBlend's use of the layerwise path (Yao et al., EuroSys 2025), as LMCache's buffered connector arranges it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Final

from lamella.connector.in_flight import Load, drain
from lamella.connector.layerwise import LayerFuture, LayerwiseConnector
from lamella.connector.slice_objects import slice_engines
from lamella.connector.streams import Blocks, ComputeStream, TransferStream
from lamella.cuda_ext.device import Device
from lamella.cuda_ext.engine import TransferEngine
from lamella.cuda_ext.executors import HostObjects
from lamella.cuda_ext.slots import SlotMemory
from lamella.cuda_ext.transfer import CopyMethod, Transfer
from lamella.reference.geometry import KVGeometry, ObjectForm
from lamella.reference.layout import EngineLayout, ObjectLayout, TensorView, engine_layout
from lamella.reference.plan import Direction
from lamella.reference.slices import Slice

NUM_BUFFERS: Final = 3
"""One that loads, one that is computed on, one that is scattered."""


class BufferedConnector(LayerwiseConnector):
    """Loads through layer buffers; stores straight from the blocks, as the paged connector does.

    One load at a time: the buffers are one request's.

    Args:
        engine, layout, caches, host_memory, compute_stream, timeout_s: as for `LayerwiseConnector`.
        max_tokens: tokens that a buffer holds.

    Raises:
        ValueError: several kernel groups or the block form, whose bytes have no token axis of their own; or caches that
            do not fit.
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
    ) -> None:
        if len(layout.groups) != 1 or layout.form is not ObjectForm.TOKEN:
            raise ValueError(
                f"blending needs one kernel group in token form, got {len(layout.groups)} in {layout.form.value} form"
            )
        group = layout.groups[0]
        blocks = -(-max_tokens // group.block_tokens)
        self.max_tokens = blocks * group.block_tokens
        self._layer = _one_layer(group.geometry, self.max_tokens)
        self._memory = Device(engine.device).allocate(NUM_BUFFERS * self._layer.object_bytes)
        self._busy = False
        super().__init__(
            engine,
            layout,
            caches,
            [Slice(layer, 1) for layer in range(layout.num_layers)],
            host_memory,
            compute_stream=compute_stream,
            timeout_s=timeout_s,
        )
        self._scatter_stream = TransferStream(engine, Direction.RETRIEVE, CopyMethod.GATHER)
        one = ObjectLayout.single(self._layer, group.block_tokens)
        self._targets = [
            engine.register_cache(one, slice_engines(layout, caches, Slice(layer, 1)))
            for layer in range(layout.num_layers)
        ]

    def layer_view(self, layer: int) -> TensorView:
        """Where the layer's KV is while it is in work: `[K, max_tokens, H, D]`, tokens from the sequence's first on.

        It may be read and written on the compute stream from the advance that waited for it up to the next one.
        """
        geometry = self._layer
        size = geometry.element_bytes
        shape = (geometry.kv, self.max_tokens, geometry.num_heads, geometry.head_dim)
        row = geometry.hidden_bytes
        strides = (self.max_tokens * row, row, geometry.head_dim * size, size)
        return TensorView(self._buffer(layer), shape, strides, size)

    def batched_to_gpu(self, load: Load, *, sync: bool = True) -> Generator[None, LayerFuture, None]:
        """N+2 yields, as the paged connector's; run to its end, the last layer is in the blocks too.

        Raises:
            ValueError: more tokens than a buffer holds.
            RuntimeError: another load has the buffers.
        """
        if load.blocks.num_tokens > self.max_tokens:
            raise ValueError(f"a buffer holds {self.max_tokens} tokens, got {load.blocks.num_tokens}")
        if self._busy:
            raise RuntimeError("the buffers are another load's: run its generator to the end, or close it")
        self._busy = True
        self.load_stream.wait_stream(self.current_stream)
        begun = self.load_stream.moment
        scattered: list[Transfer] = []
        ended = False
        try:
            for layer in range(self.num_layers):
                future = yield
                if layer >= NUM_BUFFERS:
                    self._wait(load, scattered[layer - NUM_BUFFERS], on_host=True)
                self._send(load, Slice(layer, 1), future, begun)
                self._hold_back(layer - 1)
                if layer >= 2:
                    scattered.append(self._scatter(load, layer - 2))
            yield
            self._hold_back(self.num_layers - 1)
            if self.num_layers >= 2:
                scattered.append(self._scatter(load, self.num_layers - 2))
            yield
            scattered.append(self._scatter(load, self.num_layers - 1))
            for transfer in scattered:
                self._wait(load, transfer, on_host=False)
            ended = True
        finally:
            if not ended:
                load.close()
                for transfer in scattered:
                    transfer.cancel()
            self._finish(load)
            drain(scattered, self.timeout_s)
            self._busy = False

    def close(self) -> None:
        """As the paged connector's, and the buffers are freed."""
        super().close()
        if not self._scatter_stream.outstanding.wait(self.timeout_s):
            raise TimeoutError(f"a layer is still being scattered after {self.timeout_s} s: its buffer cannot be freed")
        self._memory.close()

    def _load_caches(self) -> tuple[EngineLayout, ...]:
        """The buffers as a paged cache whose blocks follow one another."""
        geometry, block_tokens = self._layer, self.layout.groups[0].block_tokens
        size, row = geometry.element_bytes, geometry.hidden_bytes
        shape = (geometry.kv, self.max_tokens // block_tokens, block_tokens, geometry.num_heads, geometry.head_dim)
        strides = (self.max_tokens * row, block_tokens * row, row, geometry.head_dim * size, size)
        views = [TensorView(self._buffer(layer), shape, strides, size) for layer in range(self.layout.num_layers)]
        return (engine_layout("KNTHD", views),)

    def _destination(self, load: Load) -> Blocks:
        """Loads go to the buffers, token by token in order."""
        tokens = self.layout.groups[0].block_tokens
        return load.blocks._replace(block_ids=(range(-(-load.blocks.num_tokens // tokens)),))

    def _scatter(self, load: Load, layer: int) -> Transfer:
        """The layer, recomputed by now, on its way from its buffer to the blocks."""
        self._scatter_stream.wait_stream(self.current_stream)
        num_tokens = min(load.blocks.num_tokens, load.num_chunks * self.layout.chunk_tokens)
        blocks = load.blocks._replace(num_tokens=num_tokens, skip_tokens=min(load.blocks.skip_tokens, num_tokens))
        return self._scatter_stream.submit(
            self._targets[layer], Slice(0, 1), HostObjects((self._buffer(layer),)), blocks, lambda: None
        )

    def _wait(self, load: Load, transfer: Transfer, *, on_host: bool) -> None:
        try:
            if on_host:  # its buffer is written next, on whatever stream
                transfer.wait(self.timeout_s)
            else:
                transfer.wait_layer(0, self.current_stream.handle, self.timeout_s)
        except (RuntimeError, TimeoutError) as error:  # stopped, or the device is lost
            load.shorten(0, f"a layer could not be scattered: {error}")

    def _buffer(self, layer: int) -> int:
        return self._memory.address + layer % NUM_BUFFERS * self._layer.object_bytes


def _one_layer(geometry: KVGeometry, tokens: int) -> KVGeometry:
    return KVGeometry(1, geometry.kv, geometry.num_heads, geometry.head_dim, geometry.element_bytes, tokens)
