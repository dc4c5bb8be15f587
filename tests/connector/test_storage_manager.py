"""Pool and tiers together: where a prefix is found, how it comes, what is kept, and what is given back."""

import ctypes
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_driver import WAIT_S, MemoryTier
from lamella.connector.slice_objects import own_ranges, slice_groups, slice_layout, slice_ranges
from lamella.connector.storage.held_prefix import HeldPrefix, LayerObjects
from lamella.connector.storage.layer_buffers import LayerBuffers
from lamella.connector.storage.storage_manager import StorageManager
from lamella.connector.storage.tier import TierError
from lamella.cuda_ext.pool import HostPool
from lamella.reference.geometry import KVGeometry, ObjectForm
from lamella.reference.keys import ChunkKey
from lamella.reference.layout import KernelGroup, ObjectLayout
from lamella.reference.slices import Slice, plan_slices

LAYOUT = ObjectLayout.single(KVGeometry(3, 2, 2, 2, 2, 4), 2)
SLICES = plan_slices(3, 1)


def key(number: int) -> ChunkKey:
    return ChunkKey(b"s" * 32, number.to_bytes(32, "big"), 4)


KEYS = [key(number) for number in range(4)]


def content(one: ChunkKey) -> bytes:
    size = LAYOUT.object_bytes
    return bytes(np.random.default_rng(one.prefix[-1]).integers(0, 256, size, np.uint8))


class Store:
    """A manager over a pool of four slots and two tiers."""

    def __init__(self, num_buffers: int = 8, timeout_s: float = WAIT_S) -> None:
        self.pool = HostPool(LAYOUT, 4)
        self.near, self.far = MemoryTier(LAYOUT.object_bytes), MemoryTier(LAYOUT.object_bytes)
        self.buffers = LayerBuffers(slice_layout(LAYOUT, Slice(0, 1)).object_bytes, num_buffers)
        self.manager = StorageManager(self.pool, [self.near, self.far], self.buffers, timeout_s=timeout_s)

    def put(self, *keys: ChunkKey) -> None:
        reservation = self.manager.allocate(keys)
        assert reservation is not None
        for one, slot in zip(reservation.keys, reservation.slots, strict=True):
            self.pool.memory.buffer(slot)[:] = content(one)
        for kept in self.manager.batched_put(reservation):
            kept.result(WAIT_S)

    def layers(self, held: HeldPrefix) -> list[LayerObjects]:
        return [future.result(WAIT_S) for future in self.manager.layerwise_batched_get(held, SLICES)]

    def read(self, objects: LayerObjects) -> dict[int, bytes]:
        """Each chunk's bytes of the layer, in the order of the object's ranges."""
        small = slice_layout(LAYOUT, objects.part)
        found = {}
        for source in objects.sources:
            ranges = own_ranges(small) if source.is_slice else slice_ranges(LAYOUT, objects.part)
            for chunk in range(source.first_chunk, source.first_chunk + source.num_chunks):
                address = source.objects.addresses[chunk]
                found[chunk] = b"".join(_at(address + one.offset, one.num_bytes) for one in ranges)
            source.release()
        return found

    def idle(self) -> tuple[int, int, int]:
        self.manager.flush(WAIT_S)
        now = self.pool.report().occupancy
        return now.pins, now.writing, self.buffers.used

    def close(self) -> None:
        self.manager.close(WAIT_S)
        self.buffers.close()
        self.pool.close()


def _at(address: int, num_bytes: int) -> bytes:
    return ctypes.string_at(address, num_bytes)


def layer_bytes(one: ChunkKey, part: Slice) -> bytes:
    whole = content(one)
    return b"".join(whole[it.offset : it.offset + it.num_bytes] for it in slice_ranges(LAYOUT, part))


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store()
    yield made
    assert made.idle() == (0, 0, 0)
    made.close()


def test_what_is_put_is_in_the_pool_and_in_every_tier(store: Store) -> None:
    store.put(*KEYS[:2])
    assert store.pool.leading_hits(KEYS) == 2
    for tier in (store.near, store.far):
        assert tier.objects == {one: content(one) for one in KEYS[:2]}


def test_one_future_a_layer_each_with_every_chunk_wherever_it_lies(store: Store) -> None:
    store.put(*KEYS)
    store.pool.discard(KEYS[1:2] + KEYS[3:])
    del store.near.objects[KEYS[3]]
    held = store.manager.hold_prefix(KEYS)
    assert [(run.first_chunk, run.num_chunks, run.tier) for run in held.runs] == [
        (0, 1, None),
        (1, 1, store.near),
        (2, 1, None),
        (3, 1, store.far),
    ]
    for layer, objects in enumerate(store.layers(held)):
        part = Slice(layer, 1)
        assert (objects.part, objects.num_chunks, objects.reason) == (part, 4, None)
        assert store.read(objects) == {chunk: layer_bytes(KEYS[chunk], part) for chunk in range(4)}
    held.release()


def test_several_requests_at_once_read_independently(store: Store) -> None:
    store.put(*KEYS)
    store.pool.discard(KEYS)
    holds = [store.manager.hold_prefix(KEYS[: 1 + count]) for count in range(2)]
    gets = [store.manager.layerwise_batched_get(held, SLICES) for held in holds]
    futures: list[tuple[int, Future[LayerObjects]]] = []
    for _ in SLICES:
        futures += [(number, next(get)) for number, get in enumerate(gets)]
    for number, future in futures:
        objects = future.result(WAIT_S)
        assert sorted(store.read(objects)) == list(range(number + 1))
    for held in holds:
        held.release()


def test_layers_of_one_slice_share_a_future_and_are_read_by_one_range_a_plane(store: Store) -> None:
    store.put(KEYS[0])
    store.pool.discard(KEYS)
    wide = StorageManager(store.pool, [store.near], LayerBuffers(LAYOUT.object_bytes, 2))
    held = wide.hold_prefix(KEYS[:1])
    first, second, third = wide.layerwise_batched_get(held, plan_slices(3, 2))
    assert first is second
    assert second is not third
    for future in (first, third):
        for source in future.result(WAIT_S).sources:
            source.release()
    held.release()
    assert [len(ranges) for _, ranges in store.near.reads] == [2, 2], "K ranges a slice"
    wide.close()


def test_a_read_begins_only_when_its_layer_is_asked_for(store: Store) -> None:
    store.put(KEYS[0])
    store.pool.discard(KEYS)
    held = store.manager.hold_prefix(KEYS[:1])
    get = store.manager.layerwise_batched_get(held, SLICES)
    store.read(next(get).result(WAIT_S))
    store.manager.flush(WAIT_S)
    assert len(store.near.reads) == 1
    held.release()


@pytest.mark.known_fault(80)
def test_a_chunk_lost_by_its_tier_shortens_the_prefix_and_says_why(store: Store) -> None:
    store.put(*KEYS)
    store.pool.discard(KEYS[1:])
    held = store.manager.hold_prefix(KEYS)
    del store.near.objects[KEYS[2]]
    objects = next(store.manager.layerwise_batched_get(held, SLICES)).result(WAIT_S)
    assert objects.num_chunks == 2
    assert objects.reason is not None
    assert objects.reason == "memory lost its object at chunk 2"
    assert store.read(objects) == {chunk: layer_bytes(KEYS[chunk], Slice(0, 1)) for chunk in range(2)}
    held.release()


def test_a_tier_of_ones_own_that_raises_nonsense_does_not_take_the_engine_down(store: Store) -> None:
    store.put(KEYS[0])
    store.pool.discard(KEYS)
    held = store.manager.hold_prefix(KEYS[:1])

    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    store.near.get_ranges = broken  # type: ignore[method-assign]
    objects = store.layers(held)[0]
    assert (objects.num_chunks, objects.sources) == (0, ())
    assert "ZeroDivisionError" in str(objects.reason)
    held.release()


@pytest.mark.known_fault(41)
def test_buffers_that_do_not_come_in_time_shorten_the_prefix() -> None:
    store = Store(num_buffers=2, timeout_s=0.1)
    store.put(*KEYS[:2])
    store.pool.discard(KEYS)
    taken = store.buffers.take(1, WAIT_S)
    held = store.manager.hold_prefix(KEYS[:2])
    objects = next(store.manager.layerwise_batched_get(held, SLICES)).result(WAIT_S)
    assert (objects.num_chunks, "2 of 2 layer buffers were not free" in str(objects.reason)) == (0, True)
    held.release()
    taken.release()
    assert store.idle() == (0, 0, 0)
    store.close()


def test_a_tier_that_cannot_say_counts_as_empty(store: Store) -> None:
    store.put(KEYS[0])
    store.pool.discard(KEYS)
    store.near.down = True
    assert store.manager.lookup(KEYS) == 1, "the far tier has it"
    store.far.down = True
    assert store.manager.lookup(KEYS) == 0


def test_a_put_that_a_tier_refuses_fails_its_future_and_the_pool_has_the_object(store: Store) -> None:
    store.far.down = True
    reservation = store.manager.allocate(KEYS[:1])
    assert reservation is not None
    near, far = store.manager.batched_put(reservation)
    near.result(WAIT_S)
    with pytest.raises(TierError, match="is down"):
        far.result(WAIT_S)
    assert store.pool.leading_hits(KEYS) == 1


def test_a_prefix_loses_its_tail_before_its_head_after_it_was_put(store: Store) -> None:
    store.put(*KEYS)
    store.put(key(9))
    assert store.pool.leading_hits(KEYS) == 3


def test_deleting_asks_the_pool_and_every_tier_and_reports_the_one_that_fails(store: Store) -> None:
    store.put(*KEYS[:2])
    store.near.down = True
    with pytest.raises(TierError):
        store.manager.delete(KEYS)
    assert (store.pool.leading_hits(KEYS), store.far.objects) == (0, {})


@pytest.mark.known_fault(40)
def test_a_held_prefix_ends_with_its_last_holder_and_not_before(store: Store) -> None:
    store.put(*KEYS[:2])
    held = store.manager.hold_prefix(KEYS)
    held.hold()
    held.release()
    assert store.pool.report().occupancy.pins == 2
    held.release()
    assert store.pool.report().occupancy.pins == 0
    with pytest.raises(RuntimeError, match="released twice"):
        held.release()
    with pytest.raises(RuntimeError, match="hold_prefix it again"):
        held.hold()


def test_layer_keys_name_the_layers_of_every_chunk(store: Store) -> None:
    store.put(*KEYS[:2])
    held = store.manager.hold_prefix(KEYS)
    layers = held.split_layers(3)
    assert [[one.layer for one in row] for row in layers] == [[0, 0], [1, 1], [2, 2]]
    assert [one.chunk for one in layers[1]] == KEYS[:2]
    assert layers[1][0].ranges(LAYOUT) == slice_ranges(LAYOUT, Slice(1, 1))
    held.release()


def test_tiers_without_buffers_are_refused() -> None:
    pool = HostPool(LAYOUT, 1)
    with pytest.raises(ValueError, match="give some"):
        StorageManager(pool, [MemoryTier(1)])
    with pytest.raises(ValueError, match="io_threads must be at least 1, got 0"):
        StorageManager(pool, io_threads=0)
    with pytest.raises(ValueError, match="timeout_s must be positive"):
        StorageManager(pool, timeout_s=0)
    pool.close()


@given(
    width=st.integers(1, 4),
    form=st.sampled_from(ObjectForm),
    kv=st.sampled_from((1, 2)),
    first=st.sets(st.integers(0, 3), min_size=1),
    second=st.sets(st.integers(0, 3)),
)
def test_a_slice_object_is_the_slices_ranges_end_to_end(
    width: int, form: ObjectForm, kv: int, first: set[int], second: set[int]
) -> None:
    """Also for several kernel groups, some of which have no layer in the slice."""
    second |= set(range(4)) - first
    groups = tuple(
        KernelGroup(KVGeometry(len(layers), kv, 1, size, 2, 4), tuple(sorted(layers)), 2)
        for layers, size in ((first, 3), (second, 5))
        if layers
    )
    layout = ObjectLayout(groups, form)
    for part in plan_slices(4, width):
        small = slice_layout(layout, part)
        wanted, own = slice_ranges(layout, part), own_ranges(small)
        assert [one.num_bytes for one in wanted] == [one.num_bytes for one in own]
        assert small.num_layers == part.num_layers
        assert len(slice_groups(layout, part)) == len(small.groups)
        assert sum(one.num_bytes for one in own) == sum(group.geometry.object_bytes for group in small.groups)
