"""A storage manager over any tiers, whose objects' bytes follow from their keys."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from cache_driver import WAIT_S, MemoryTier
from lamella.connector.slice_objects import own_ranges, slice_layout, slice_ranges
from lamella.connector.storage.held_prefix import HeldPrefix, LayerObjects
from lamella.connector.storage.layer_buffers import LayerBuffers
from lamella.connector.storage.storage_manager import StorageManager
from lamella.connector.storage.tier import Tier
from lamella.cuda_ext.pool import HostPool
from lamella.reference.geometry import KVGeometry
from lamella.reference.keys import ChunkKey
from lamella.reference.layout import ObjectLayout
from lamella.reference.slices import plan_slices
from tier_objects import content

LAYERS = 4
LAYOUT = ObjectLayout.single(KVGeometry(LAYERS, 2, 2, 4, 2, 8), 4)


class Storage:
    """A manager, its pool and its buffers, for a `with` block."""

    def __init__(
        self, tiers: Sequence[Tier], *, slots: int = 8, buffers: int = 8, layout: ObjectLayout = LAYOUT, **options: Any
    ) -> None:
        self.layout = layout
        self.pool = HostPool(layout, slots)
        self.buffers = LayerBuffers(layout.object_bytes, buffers)
        self.manager = StorageManager(self.pool, tiers, self.buffers, timeout_s=WAIT_S, **options)

    def __enter__(self) -> Storage:
        return self

    def __exit__(self, *_: object) -> None:
        self.manager.close()
        self.buffers.close()
        self.pool.close()

    def store(self, keys: Sequence[ChunkKey]) -> tuple[Future[None], ...]:
        """The keys' objects are in the pool and on their way to the tiers."""
        reservation = self.manager.allocate(keys)
        assert reservation is not None, "no room"
        for one, slot in zip(reservation.keys, reservation.slots, strict=True):
            with self.pool.memory.buffer(slot) as view:
                view[:] = content_of(one, self.layout)
        return self.manager.batched_put(reservation)

    def only_in_tiers(self, keys: Sequence[ChunkKey]) -> None:
        self.store(keys)
        self.manager.flush(WAIT_S)
        self.pool.discard(keys)

    def retrieve(self, keys: Sequence[ChunkKey], width: int = 1) -> int:
        """How many chunks came with every layer; what came is what was stored."""
        held = self.manager.hold_prefix(keys)
        parts = plan_slices(self.layout.num_layers, width)
        chunks = held.num_chunks
        for layer, future in enumerate(self.manager.layerwise_batched_get(held, parts)):
            found = future.result(WAIT_S)
            if layer == found.part.first_layer:
                chunks = min(chunks, self.check(held, found))
        held.release()
        return chunks

    def check(self, held: HeldPrefix, found: LayerObjects) -> int:
        """The sources hold the slice of every chunk that they say they do; they are released."""
        for source in found.sources:
            ranges = slice_ranges(self.layout, found.part)
            places = own_ranges(slice_layout(self.layout, found.part)) if source.is_slice else ranges
            for chunk in range(source.first_chunk, source.first_chunk + source.num_chunks):
                whole = content_of(held.keys[chunk], self.layout)
                for wanted, place in zip(ranges, places, strict=True):
                    there = ctypes.string_at(source.objects.addresses[chunk] + place.offset, place.num_bytes)
                    assert there == whole[wanted.offset : wanted.offset + wanted.num_bytes], (chunk, found.part)
            source.release()
        return found.num_chunks

    def references(self) -> tuple[int, int, int]:
        self.manager.flush(WAIT_S)
        now = self.pool.report().occupancy
        return now.pins, now.writing, self.buffers.used


@functools.lru_cache(64)
def content_of(one: ChunkKey, layout: ObjectLayout = LAYOUT) -> bytes:
    return content(int.from_bytes(one.prefix[-2:], "big") + one.space[0], layout.object_bytes)


def memory(layout: ObjectLayout = LAYOUT) -> MemoryTier:
    return MemoryTier(layout.object_bytes)
