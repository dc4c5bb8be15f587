"""The layerwise connector: the engine's side of loads and stores, one layer a yield.

Two generators do the memory operations of one request. Between their yields runs whatever else the step does:

    batched_to_gpu      start │ layer 0 │ layer 1 │ ... │ layer N-1 │ end      N+2 yields
    batched_from_gpu            layer 0 │ layer 1 │ ... │ layer N-1 │ end      N+1 yields

Every request of a batch has its own generators, and all share `load_stream` and `store_stream`. The last request of
the batch loads with `sync`: when it moves on to layer l it makes the compute stream wait for layer l-1 of *every*
request. The first request of the batch stores with `sync`: it makes the store stream wait for what was computed so
far.

A yield is always a layer; a slice is the unit of a transfer. A slice is loaded when its first layer is due and stored
once its last layer was computed, so width 1 is the finest pipeline and width N is chunk-major.

Source: generators, their yields and the two `sync` rules are those of LMCache's layerwise GPU connectors.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from lamella.connector.in_flight import Bound, Load, Moving, Save, drain
from lamella.connector.slice_objects import slice_engines, slice_groups, slice_layout
from lamella.connector.storage.held_prefix import LayerObjects, SliceSource
from lamella.connector.streams import Blocks, ComputeStream, HostStream, Moment, Span, TransferStream
from lamella.cuda_ext.engine import RegisteredCache, TransferEngine
from lamella.cuda_ext.executors import HostObjects
from lamella.cuda_ext.slots import SlotMemory
from lamella.cuda_ext.transfer import CopyMethod, Transfer
from lamella.reference.layout import EngineLayout, ObjectLayout
from lamella.reference.plan import Direction, TransferRequest, check_request
from lamella.reference.slices import Slice

LayerFuture = Future[LayerObjects]


class _SliceLoad:
    """One slice of one load: its transfers, once its objects are there to be submitted."""

    def __init__(self, load: Load, part: Slice) -> None:
        self.load = load
        self.part = part
        self.submitted: Future[tuple[Moving, ...]] = Future()

    def hold_back(self, stream: ComputeStream, bound: Bound) -> None:
        """`stream` goes on once the slice has landed; what cannot be waited for ends the load there instead."""
        layer = self.part.first_layer
        try:
            moving = self.submitted.result(bound.left_s)
        except FutureTimeoutError:
            self.load.shorten(0, f"layer {layer} was not read in time")
            return
        for one in moving:
            try:
                one.transfer.wait_layer(one.layer, stream.handle, bound.left_s)
            except (RuntimeError, TimeoutError) as error:  # stopped, or the device is lost
                self.load.shorten(one.first_chunk, f"layer {layer}: {error}")


class LayerwiseConnector:
    """Loads into and stores from an engine's paged cache, layer by layer. Its generators belong to one thread.

    Args:
        engine: moves the bytes; made for at least the layout's layers.
        layout: of the objects.
        caches: the engine's paged cache of each kernel group.
        slices: what one transfer moves.
        host_memory: what whole objects lie in (`HostPool.memory`).
        use_gpu: copies pass through the engine's load and store buffers on the device; off: straight, by a kernel that
            reads host memory (on the CPU device: in one pass).
        compute_stream: where the engine computes.
        timeout_s: bound of every wait (SAFE-5).

    Raises:
        ValueError: caches that do not fit the layout.
    """

    def __init__(
        self,
        engine: TransferEngine,
        layout: ObjectLayout,
        caches: Sequence[EngineLayout],
        slices: Sequence[Slice],
        host_memory: SlotMemory,
        *,
        use_gpu: bool = True,
        compute_stream: ComputeStream | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        method = CopyMethod.STAGED_BATCH if use_gpu else CopyMethod.GATHER
        self.engine = engine
        self.layout = layout
        self.slices = tuple(slices)
        self.current_stream: ComputeStream = compute_stream or HostStream()
        self.load_stream = TransferStream(engine, Direction.RETRIEVE, method)
        self.store_stream = TransferStream(engine, Direction.STORE, method)
        self.timeout_s = timeout_s
        self._registered = (host_memory.shape.piece_bytes, host_memory.base)
        self._caches = tuple(caches)
        self._paged = engine.register_cache(layout, caches)
        loads = self._load_caches()
        self._whole = engine.register_cache(layout, loads)
        self._parts = {
            part: engine.register_cache(slice_layout(layout, part), slice_engines(layout, loads, part))
            for part in self.slices
        }
        self._starts = {part.first_layer: part for part in self.slices}
        self._ends = {part.end_layer - 1: part for part in self.slices}
        self._on_their_way: list[_SliceLoad] = []

    @property
    def num_layers(self) -> int:
        """N, layers of the stage."""
        return self.layout.num_layers

    def _load_caches(self) -> tuple[EngineLayout, ...]:
        """What loads are written into: here the engine's own blocks."""
        return self._caches

    def _destination(self, load: Load) -> Blocks:
        """Where a load goes in `_target`."""
        return load.blocks

    def _target(self, load: Load) -> RegisteredCache:
        """What a load from whole objects is written into."""
        return self._whole

    def _part_target(self, load: Load, part: Slice) -> RegisteredCache:
        """The slice of it, for a load from slice objects."""
        return self._parts[part]

    def check(self, blocks: Blocks, direction: Direction) -> None:
        """Raises ValueError for blocks that do not fit the caches, before anything is taken or moved."""
        tables = tuple(map(tuple, blocks.block_ids))
        request = TransferRequest(blocks.num_tokens, tables, blocks.skip_tokens, blocks.null_block)
        check_request(self.layout, self._caches, request, direction)

    # ---- loads

    def batched_to_gpu(self, load: Load, *, sync: bool = True) -> Generator[None, LayerFuture, None]:
        """N+2 yields: the load begins; each layer, whose future is sent, is on its way; all have been waited for.

        Closed early, it cancels what moves and returns once the blocks are the caller's again (SAFE-1).

        Args:
            load: the request's.
            sync: the last request of the batch: moving on to layer l, the compute stream waits for layer l-1 of all.
        """
        self.load_stream.wait_stream(self.current_stream)
        begun = self.load_stream.moment
        try:
            for layer in range(self.num_layers):
                future = yield
                if layer in self._starts:
                    self._send(load, self._starts[layer], future, begun)
                if sync and layer:
                    self._hold_back(layer - 1)
            yield
            self._hold_back(self.num_layers - 1, None if sync else load)
            yield
        finally:
            self._finish(load)

    def _send(self, load: Load, part: Slice, future: LayerFuture, begun: Moment) -> None:
        """The slice will be submitted as soon as its objects are there: now, or on the thread that reads them."""
        on_its_way = _SliceLoad(load, part)
        self._on_their_way.append(on_its_way)
        future.add_done_callback(lambda done: on_its_way.submitted.set_result(self._submit(load, part, done, begun)))

    def _submit(self, load: Load, part: Slice, future: LayerFuture, begun: Moment) -> tuple[Moving, ...]:
        try:
            objects = future.result()
        except (CancelledError, Exception) as error:
            load.shorten(0, f"layer {part.first_layer}: {error!r}")
            return ()
        if objects.reason is not None:
            load.shorten(objects.num_chunks, objects.reason)
        moving: list[Moving] = []
        for source in objects.sources:
            try:
                one = load.submit(source, part, lambda good, it=source: self._retrieve(load, part, it, good, begun))  # type: ignore[misc]
            except Exception as error:  # nothing was queued; this may be an I/O thread, so it is reported by the load
                load.shorten(source.first_chunk, f"layer {part.first_layer}: {error}")
                one = None
            if one is None:
                source.release()
            else:
                moving.append(one)
        return tuple(moving)

    def _retrieve(self, load: Load, part: Slice, source: SliceSource, good_chunks: int, begun: Moment) -> Transfer:
        chunk_tokens = self.layout.chunk_tokens
        end = min(good_chunks, source.first_chunk + source.num_chunks) * chunk_tokens
        num_tokens = min(load.blocks.num_tokens, end)
        skip_tokens = min(max(load.blocks.skip_tokens, source.first_chunk * chunk_tokens), num_tokens)
        blocks = self._destination(load)._replace(num_tokens=num_tokens, skip_tokens=skip_tokens)
        if not source.is_slice:
            return self.load_stream.submit(self._target(load), part, source.objects, blocks, source.release, begun)
        tables = tuple(blocks.block_ids[group] for group in slice_groups(self.layout, part))
        return self.load_stream.submit(
            self._part_target(load, part),
            Slice(0, part.num_layers),
            source.objects,
            blocks._replace(block_ids=tables),
            source.release,
            begun,
        )

    def _hold_back(self, layer: int, only: Load | None = None) -> None:
        """The compute stream goes on once every slice sent so far that begins at or before the layer has landed."""
        due = [
            one for one in self._on_their_way if one.part.first_layer <= layer and (only is None or one.load is only)
        ]
        bound = Bound(self.timeout_s)
        for one in due:
            self._on_their_way.remove(one)
            one.hold_back(self.current_stream, bound)

    def _finish(self, load: Load) -> None:
        """Nothing of the load is waited for any more; of one that did not end well nothing is in flight either."""
        unfinished = [one for one in self._on_their_way if one.load is load]
        self._on_their_way = [one for one in self._on_their_way if one.load is not load]
        if unfinished:
            load.close()
        if unfinished or load.reason is not None:
            drain([one.transfer for one in load.moving()], self.timeout_s)

    # ---- stores

    def batched_from_gpu(self, save: Save, *, sync: bool = True) -> Generator[None, None, None]:
        """N+1 yields: each layer, just computed, is on its way; all have landed, or `save.reason` says why not.

        Closed early, it cancels what moves and returns once that has drained.

        Args:
            save: the request's.
            sync: the first request of the batch: the store stream waits for what was computed so far.
        """
        landed = False
        try:
            for layer in range(self.num_layers):
                if sync:
                    self.store_stream.wait_stream(self.current_stream)
                part = self._ends.get(layer)
                if part is not None and save.reason is None:
                    self._store(save, part)
                yield
            self._wait_stored(save)
            landed = True
            yield
        finally:
            if not landed:
                save.give_up("closed before its last layer")
                drain([one.transfer for one in save.moving], self.timeout_s)

    def _store(self, save: Save, part: Slice) -> None:
        chunk_tokens = self.layout.chunk_tokens
        for first_chunk, addresses in save.runs():
            num_tokens = min(save.blocks.num_tokens, (first_chunk + len(addresses)) * chunk_tokens)
            blocks = save.blocks._replace(num_tokens=num_tokens, skip_tokens=first_chunk * chunk_tokens)
            objects = HostObjects((0,) * first_chunk + addresses, *self._registered)
            save.outstanding.begin()
            try:
                transfer = self.store_stream.submit(self._paged, part, objects, blocks, save.outstanding.end)
            except (ValueError, RuntimeError) as error:  # nothing was queued
                save.outstanding.end()
                save.give_up(f"layer {part.first_layer}: {error}")
                return
            save.moving.append(Moving(part, first_chunk, transfer, part.first_layer))

    def _wait_stored(self, save: Save) -> None:
        bound = Bound(self.timeout_s)
        for one in save.moving:
            try:
                one.transfer.wait(bound.left_s)
            except (RuntimeError, TimeoutError) as error:  # stopped, or the device is lost
                save.give_up(f"layer {one.part.first_layer}: {error}")
        if save.reason is not None:
            drain([one.transfer for one in save.moving], self.timeout_s)

    # ---- the end, and what was seen

    def close(self) -> None:
        """Nothing moves any more. A second call does nothing.

        Raises:
            TimeoutError: something still does after the bound.
        """
        for stream in (self.load_stream, self.store_stream):
            if not stream.outstanding.wait(self.timeout_s):
                raise TimeoutError(f"a transfer still moves after {self.timeout_s} s: close or end its generator")

    @staticmethod
    def spans(kind: str, moving: Sequence[Moving]) -> tuple[Span, ...]:
        """When each landed transfer was under way."""
        return tuple(
            Span(kind, *one.part, one.transfer.query().started_ns, one.transfer.timestamps_ns().landed_ns[-1])
            for one in moving
            if one.has_landed
        )
