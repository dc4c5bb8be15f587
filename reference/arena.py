"""Memory in which a transfer is tried: caches and objects of any description, laid out by NumPy alone.

Every view here comes from indexing, slicing and transposing arrays. Nothing is computed with `layout`'s strides,
offsets or byte ranges, so that a mistake there meets an independent answer instead of itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lamella.reference.geometry import KVGeometry, ObjectForm
from lamella.reference.layout import EngineLayout, KernelGroup, TensorView, engine_layout

Array = NDArray[Any]
Bytes = NDArray[np.uint8]

_GUARD_BYTES = 64
_GROUP_BOUNDARY_BYTES = 256  # each kernel group's array begins at such a multiple inside its object


@dataclass(frozen=True, slots=True)
class CacheCase:
    """One kernel group's paged cache, as an engine might have allocated and viewed it.

    Args:
        layers: the stage's layers that this group holds, ascending.
        kv, num_heads, head_dim, element_bytes: as in `KVGeometry`.
        num_blocks, block_tokens: the paging.
        axes: order of the axes in the view that the engine hands out, letters as in `LAYOUTS`.
        memory: order of the same axes in memory, outermost first; empty means as in `axes`.
        steps: for each axis of `memory`, which stored elements the view takes: 2 is every other one, -1 all of them
            backwards; empty means 1 everywhere.
        margins: for each axis of `memory`, stored elements behind the view's last; empty means none.
        separate_kv: keys and values in tensors of their own (then `axes` has no K).
    """

    layers: tuple[int, ...]
    kv: int
    num_heads: int
    head_dim: int
    element_bytes: int
    num_blocks: int
    block_tokens: int
    axes: str
    memory: str = ""
    steps: tuple[int, ...] = ()
    margins: tuple[int, ...] = ()
    separate_kv: bool = False

    def group(self, chunk_tokens: int) -> KernelGroup:
        """The group's part of an object of `chunk_tokens` tokens."""
        geometry = KVGeometry(
            len(self.layers), self.kv, self.num_heads, self.head_dim, self.element_bytes, chunk_tokens
        )
        return KernelGroup(geometry, self.layers, self.block_tokens)

    @property
    def num_tensors(self) -> int:
        """Tensors of the group: one for all layers, one a layer, or two a layer."""
        return 1 if "L" in self.axes else len(self.layers) * (1 + self.separate_kv)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of one tensor's storage, margins and skipped elements included."""
        return math.prod(self._stored_shape()) * self.element_bytes

    def view(self, storage: Bytes) -> Array:
        """The tensor over `tensor_bytes` of storage, axes in the order of `axes`."""
        memory, steps, _ = self._spelled_out()
        stored: Array = storage.view(f"u{self.element_bytes}").reshape(self._stored_shape())
        taken = stored[tuple(_every(self._size(a), step) for a, step in zip(memory, steps, strict=True))]
        return taken.transpose([memory.index(axis) for axis in self.axes])

    def plane(self, tensors: Sequence[Array], layer: int, kv: int) -> Array:
        """One layer's keys or values `[N, T, H, D]`, a view into the group's tensors."""
        view = tensors[0 if "L" in self.axes else layer * 2 + kv if self.separate_kv else layer]
        view = view[tuple({"L": layer, "K": kv}.get(axis, slice(None)) for axis in self.axes)]
        left = [axis for axis in self.axes if axis not in "LK"]
        plane = view.transpose([left.index(axis) for axis in "NTHD" if axis in left])
        return plane if "H" in left else plane[:, :, None, :]

    def engine(self, tensors: Sequence[Array]) -> EngineLayout:
        """What a connector would learn from the engine's tensors: addresses, shapes, strides."""
        views = [TensorView(t.ctypes.data, t.shape, t.strides, self.element_bytes) for t in tensors]
        if self.separate_kv:
            return engine_layout(self.axes, list(zip(views[::2], views[1::2], strict=True)))
        return engine_layout(self.axes, views)

    def _spelled_out(self) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        memory = self.memory or self.axes
        return memory, self.steps or (1,) * len(memory), self.margins or (0,) * len(memory)

    def _stored_shape(self) -> tuple[int, ...]:
        spelled = zip(*self._spelled_out(), strict=True)
        return tuple(self._size(axis) * abs(step) + margin for axis, step, margin in spelled)

    def _size(self, axis: str) -> int:
        sizes = {"K": self.kv, "N": self.num_blocks, "T": self.block_tokens}
        return (sizes | {"H": self.num_heads, "D": self.head_dim, "L": len(self.layers)})[axis]


def _every(size: int, step: int) -> slice:
    return slice(0, size * step, step) if step > 0 else slice(size * -step - 1, None, step)


class Place(NamedTuple):
    """Where a byte lies, in the words of the model rather than of memory; `layer` counts within the stage."""

    memory: str
    group: int
    layer: int
    kv: int
    block: int
    token: int
    head: int
    dim: int


@dataclass(frozen=True, slots=True)
class Arena:
    """Positions of every tensor and object in two buffers, the engine's and the host's, with gaps between them.

    Buffers are plain byte arrays that the caller makes, `engine_bytes` and `host_bytes` long; every method gives views
    into the buffer it is handed, so that one arena serves the buffer before, the one after and the one expected.
    """

    caches: tuple[CacheCase, ...]
    form: ObjectForm
    chunk_tokens: int
    tensor_offsets: tuple[tuple[int, ...], ...]
    object_offsets: tuple[tuple[int, ...], ...]
    engine_bytes: int
    host_bytes: int

    @classmethod
    def lay_out(
        cls, caches: tuple[CacheCase, ...], form: ObjectForm, chunk_tokens: int, num_objects: Sequence[int], seed: int
    ) -> Arena:
        """An arena for `num_objects[r]` objects of each request, everything in shuffled order with odd gaps."""
        random = np.random.default_rng(seed)
        tensors = [(group, cache.tensor_bytes) for group, cache in enumerate(caches) for _ in range(cache.num_tensors)]
        object_bytes = _array_offsets(caches, chunk_tokens)[-1]
        objects = [(request, object_bytes) for request, count in enumerate(num_objects) for _ in range(count)]
        tensor_offsets, engine_bytes = _scatter(tensors, len(caches), random)
        object_offsets, host_bytes = _scatter(objects, len(num_objects), random)
        return cls(caches, form, chunk_tokens, tensor_offsets, object_offsets, engine_bytes, host_bytes)

    def tensors(self, engine: Bytes, group: int) -> tuple[Array, ...]:
        """A group's tensors as the engine sees them."""
        cache = self.caches[group]
        return tuple(cache.view(engine[at : at + cache.tensor_bytes]) for at in self.tensor_offsets[group])

    def planes(self, engine: Bytes) -> list[list[list[Array]]]:
        """`[group][layer][kv]`, each `[N, T, H, D]`: the oracle's caches."""
        found = []
        for group, cache in enumerate(self.caches):
            tensors = self.tensors(engine, group)
            found.append(
                [[cache.plane(tensors, layer, kv) for kv in range(cache.kv)] for layer in range(len(cache.layers))]
            )
        return found

    def engines(self, engine: Bytes) -> tuple[EngineLayout, ...]:
        """The same caches as addresses: the executor's."""
        return tuple(cache.engine(self.tensors(engine, group)) for group, cache in enumerate(self.caches))

    def objects(self, host: Bytes, request: int) -> list[list[Array]]:
        """`[chunk][group]` of one request: the oracle's objects, as `oracle` describes them."""
        starts = _array_offsets(self.caches, self.chunk_tokens)
        return [
            [self._array(host[at + start :], cache) for start, cache in zip(starts, self.caches, strict=False)]
            for at in self.object_offsets[request]
        ]

    def object_addresses(self, host: Bytes, request: int) -> tuple[int, ...]:
        """The same objects as addresses, by absolute chunk."""
        return tuple(int(host.ctypes.data) + at for at in self.object_offsets[request])

    def place_in_engine(self, offset: int, engine: Bytes) -> Place | None:
        """The element to which byte `offset` of the engine's buffer belongs; None for gaps and margins."""
        for group, layers in enumerate(self.planes(engine)):
            for index, planes in enumerate(layers):
                for kv, plane in enumerate(planes):
                    found = _index_of(plane, engine.ctypes.data + offset)
                    if found:
                        return Place("engine", group, self.caches[group].layers[index], kv, *found)
        return None

    def place_in_host(self, offset: int, host: Bytes) -> Place | None:
        """The element of an object to which byte `offset` of the host's buffer belongs; None for gaps and padding.

        `block` is the sequence's chunk and `token` counts within it.
        """
        for request in range(len(self.object_offsets)):
            for chunk, arrays in enumerate(self.objects(host, request)):
                for group, array in enumerate(arrays):
                    found = _index_of(array, host.ctypes.data + offset)
                    if found and self.form is ObjectForm.TOKEN:
                        kv, index, token, head, dim = found
                    elif found:
                        index, block, kv, token, head, dim = found
                        token += block * self.caches[group].block_tokens
                    else:
                        continue
                    name = f"request {request}'s object"
                    return Place(name, group, self.caches[group].layers[index], kv, chunk, token, head, dim)
        return None

    def _array(self, memory: Bytes, cache: CacheCase) -> Array:
        layers, heads, dims = len(cache.layers), cache.num_heads, cache.head_dim
        size = cache.kv * layers * self.chunk_tokens * heads * dims * cache.element_bytes
        flat: Array = memory[:size].view(f"u{cache.element_bytes}")
        if self.form is ObjectForm.TOKEN:
            return flat.reshape(cache.kv, layers, self.chunk_tokens, heads, dims)  # [K, L, T, H, D]
        blocks = self.chunk_tokens // cache.block_tokens
        memory_order = cache.memory or cache.axes
        if "H" in memory_order and memory_order.index("H") < memory_order.index("T"):
            by_head = flat.reshape(layers, blocks, cache.kv, heads, cache.block_tokens, dims)
            return by_head.transpose(0, 1, 2, 4, 3, 5)  # [L, B, K, T, H, D]
        return flat.reshape(layers, blocks, cache.kv, cache.block_tokens, heads, dims)  # [L, B, K, T, H, D]


def _array_offsets(caches: Sequence[CacheCase], chunk_tokens: int) -> list[int]:
    """Where each group's array begins in an object, and at the end the object's own size."""
    offsets, end = [], 0
    for cache in caches:
        offsets.append(math.ceil(end / _GROUP_BOUNDARY_BYTES) * _GROUP_BOUNDARY_BYTES)
        token = cache.kv * len(cache.layers) * cache.num_heads * cache.head_dim * cache.element_bytes
        end = offsets[-1] + token * chunk_tokens
    return [*offsets, end]


def _scatter(
    items: Sequence[tuple[int, int]], num_owners: int, random: np.random.Generator
) -> tuple[tuple[tuple[int, ...], ...], int]:
    """Offsets for (owner, bytes) items, by owner in the order given, and the bytes needed for all."""
    offsets, end = [0] * len(items), _GUARD_BYTES
    for index in random.permutation(len(items)):
        end += 4 * int(random.integers(0, 9)) - end % 4 + 4  # elements of 1, 2 and 4 bytes stay aligned
        offsets[index] = end
        end += items[index][1]
    by_owner = [
        tuple(at for at, (owner, _) in zip(offsets, items, strict=True) if owner == wanted)
        for wanted in range(num_owners)
    ]
    return tuple(by_owner), end + _GUARD_BYTES


def _index_of(array: Array, address: int) -> tuple[int, ...] | None:
    """The index of the element that holds the byte at `address`, or None."""
    left = address - int(array.ctypes.data)
    for size, stride in zip(array.shape, array.strides, strict=True):
        left -= min(0, (size - 1) * stride)
    index = [0] * array.ndim
    for axis in sorted(range(array.ndim), key=lambda axis: -abs(array.strides[axis])):
        size, stride = array.shape[axis], array.strides[axis]
        if size > 1:
            steps = min(max(left // abs(stride), 0), size - 1)
            left -= steps * abs(stride)
            index[axis] = steps if stride > 0 else size - 1 - steps
    return tuple(index) if 0 <= left < array.itemsize else None
