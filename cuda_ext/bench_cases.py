"""What is measured: cache shapes as engines have them, and the memory of one such transfer, checked byte for byte."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from lamella.cuda_ext.device import Device, DeviceMemory
from lamella.cuda_ext.executors import HostObjects
from lamella.cuda_ext.pool import HostPool, PinnedObjects
from lamella.reference.geometry import KVGeometry, ObjectForm
from lamella.reference.keys import ChunkKey
from lamella.reference.layout import EngineLayout, ObjectLayout, TensorView, engine_layout
from lamella.reference.plan import Direction, TransferRequest

_POISON = 0xA5


@dataclass(frozen=True, slots=True)
class BenchShape:
    """A paged cache, one tensor a layer, and the objects that go with it.

    Args:
        name: for tables.
        geometry: of the objects; bf16.
        axes: the tensor's axes as the engine names them, see `LAYOUTS`.
        memory: the same axes in the order in which they lie in memory.
        block_tokens: tokens of a block.
        form: of the objects.
    """

    name: str
    geometry: KVGeometry
    axes: str
    memory: str
    block_tokens: int
    form: ObjectForm = ObjectForm.TOKEN

    @property
    def layout(self) -> ObjectLayout:
        """Of the objects."""
        return ObjectLayout.single(self.geometry, self.block_tokens, self.form)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer, all kv."""
        return self.layout.groups[0].block_bytes

    def tokens_of(self, num_bytes: int) -> int:
        """The whole chunks that come nearest to `num_bytes` from below, in tokens; at least one chunk."""
        return max(1, num_bytes // self.geometry.object_bytes) * self.geometry.chunk_tokens

    def sized(self, num_blocks: int) -> dict[str, int]:
        """Size of each axis."""
        geometry = self.geometry
        sizes = {"K": geometry.kv, "N": num_blocks, "T": self.block_tokens, "H": geometry.num_heads}
        return sizes | {"D": geometry.head_dim}


def _llama(
    name: str, chunk: int, axes: str, memory: str, heads: int, form: ObjectForm = ObjectForm.TOKEN
) -> BenchShape:
    packed = "K" not in axes
    geometry = KVGeometry(32, 1 if packed else 2, heads, 256 if packed else 128, 2, chunk)
    return BenchShape(name, geometry, axes, memory, 16, form)


MAIN_SHAPES = (
    _llama("packed NHD", 256, "NHTD", "NTHD", 8),
    _llama("classic NHD", 256, "KNTHD", "KNTHD", 8),
)
"""Llama-3.1-8B, bf16: vLLM's packed blocks `[NB, 8, 16, 256]` with NHD strides, and the classic `[2, NB, 16, 1024]`."""

BLOCK_SHAPE = _llama("packed HND, block form", 256, "NHTD", "NHTD", 8, ObjectForm.BLOCK)
"""Packed blocks with heads outside tokens, objects in block form: one run a block, and no kernel to move it."""

SMALL_SHAPES = tuple(
    shape
    for chunk in (256, 64)
    for shape in (
        _llama(f"packed NHD, chunk {chunk}", chunk, "NHTD", "NTHD", 8),
        _llama(f"packed HND, chunk {chunk}", chunk, "NHTD", "NHTD", 8),
        _llama(f"classic HND, chunk {chunk}", chunk, "KNTHD", "KNHTD", 8),
        _llama(f"hidden 128 (TP 8), chunk {chunk}", chunk, "KNTHD", "KNTHD", 1),
        BenchShape(f"MLA 576, chunk {chunk}", KVGeometry(61, 1, 1, 576, 2, chunk), "NTD", "NTD", 64),
    )
)
"""Shapes whose runs are short: small ranks, small chunks, heads outside tokens."""


class BenchMemory:
    """A prefix of `num_tokens` tokens in a pool and blocks for it on a device, both in shuffled order.

    Args:
        device: where the blocks are.
        shape: what they look like.
        num_tokens: whole chunks.
        shuffled_slots: objects in random slots rather than consecutive ones.
        seed: of the bytes and the orders.
        spare: share of blocks that the prefix does not use, and that no transfer may touch.
    """

    def __init__(
        self,
        device: Device,
        shape: BenchShape,
        num_tokens: int,
        *,
        shuffled_slots: bool = True,
        seed: int = 1,
        spare: float = 0.25,
    ) -> None:
        random = np.random.default_rng(seed)
        self.shape = shape
        self.num_tokens = num_tokens
        used = num_tokens // shape.block_tokens
        self.num_blocks = math.ceil(used * (1 + spare))
        num_objects = num_tokens // shape.geometry.chunk_tokens
        self.block_ids = tuple(int(block) for block in random.permutation(self.num_blocks)[:used])
        self._cache: DeviceMemory = device.allocate(shape.geometry.num_layers * self.num_blocks * shape.block_bytes)
        self.pool = HostPool(shape.layout, num_objects, registrar=device.registrar(), numa_node=device.numa_node())
        self.pool.memory.wait_registered(600)
        keys = [ChunkKey(b"bench", index.to_bytes(8, "little"), 0) for index in range(num_objects)]
        order = random.permutation(num_objects) if shuffled_slots else range(num_objects)
        reservation = self.pool.reserve([keys[index] for index in order])
        assert reservation is not None
        reservation.commit()
        self.lease: PinnedObjects = self.pool.pin(keys)
        pattern = random.integers(0, 0x80, 1 << 22, dtype=np.uint8)
        for index, slot in enumerate(self.lease.slots):
            self._object(slot)[:] = np.resize(np.roll(pattern, 4097 * index + 1), shape.geometry.object_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes that a whole transfer moves."""
        return self.num_tokens * self.shape.geometry.token_bytes

    @property
    def request(self) -> TransferRequest:
        """All of the prefix."""
        return TransferRequest(self.num_tokens, (self.block_ids,))

    @property
    def objects(self) -> HostObjects:
        """Where the prefix lies in the pool."""
        return self.lease.host_objects()

    @property
    def engines(self) -> tuple[EngineLayout, ...]:
        """The paged cache as the engine would describe it."""
        return (engine_layout(self.shape.axes, [self._view(layer) for layer in range(self.shape.geometry.num_layers)]),)

    @property
    def cache_address(self) -> int:
        """Where the blocks begin; as long as `cache_bytes`."""
        return self._cache.address

    @property
    def cache_bytes(self) -> int:
        """Bytes of all blocks of all layers."""
        return self._cache.num_bytes

    def poison(self) -> None:
        """No byte of the cache is one that an object holds."""
        self._cache.fill(_POISON)

    def scramble_cache(self) -> None:
        """The cache holds bytes of its own, and the objects none of them: what a store starts from."""
        cache = np.random.default_rng(2).integers(0x80, 0x100, 1 << 22, dtype=np.uint8)
        whole = np.resize(cache, self.cache_bytes)
        self._cache.write(whole.ctypes.data)
        for slot in self.lease.slots:
            self._object(slot)[:] = 0

    def check(self, direction: Direction) -> None:
        """Every block of the prefix holds its object's bytes, and (retrieve) every other block is as poisoned.

        Raises:
            RuntimeError: a byte differs; a figure measured on wrong bytes is worth nothing.
        """
        cache = np.empty(self.cache_bytes, dtype=np.uint8)
        self._cache.read(cache.ctypes.data)
        blocks = np.array(self.block_ids)
        for layer in range(self.shape.geometry.num_layers):
            planes = self._planes(cache, layer)  # [K, N, T, H, D]
            stored = planes[:, blocks].reshape(planes.shape[0], -1, *planes.shape[3:])  # [K, tokens, H, D]
            wanted = np.concatenate([self._object_planes(slot, layer) for slot in self.lease.slots], axis=1)
            if not np.array_equal(stored, wanted):
                raise RuntimeError(f"{self.shape.name}: layer {layer} does not hold the objects' bytes")
            spare = np.delete(planes, blocks, axis=1)
            if direction is Direction.RETRIEVE and not (spare.view(np.uint8) == _POISON).all():
                raise RuntimeError(f"{self.shape.name}: layer {layer} was written outside the prefix's blocks")

    def close(self) -> None:
        """Both memories are gone; no copy may still be in flight."""
        self.lease.release()
        self.pool.close()
        self._cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _view(self, layer: int) -> TensorView:
        sizes, stride = self.shape.sized(self.num_blocks), 2
        strides: dict[str, int] = {}
        for axis in reversed(self.shape.memory):
            strides[axis] = stride
            stride *= sizes[axis]
        start = self._cache.address + layer * self.num_blocks * self.shape.block_bytes
        shape = tuple(sizes[axis] for axis in self.shape.axes)
        return TensorView(start, shape, tuple(strides[axis] for axis in self.shape.axes), 2)

    def _planes(self, cache: NDArray[np.uint8], layer: int) -> NDArray[Any]:
        """One layer `[K, N, T, H, D]`, by NumPy alone."""
        sizes, size = self.shape.sized(self.num_blocks), self.num_blocks * self.shape.block_bytes
        stored = cache[layer * size : (layer + 1) * size].view(np.uint16)
        shaped = stored.reshape([sizes[axis] for axis in self.shape.memory])
        missing = [axis for axis in "KH" if axis not in self.shape.memory]
        shaped = shaped.reshape(*shaped.shape, *[1] * len(missing))
        order = self.shape.memory + "".join(missing)
        return shaped.transpose([order.index(axis) for axis in "KNTHD"])

    def _object_planes(self, slot: int, layer: int) -> NDArray[Any]:
        """One layer of one object `[K, T, H, D]`."""
        geometry, stored = self.shape.geometry, self._object(slot).view(np.uint16)
        heads, dim = geometry.num_heads, geometry.head_dim
        if self.shape.form is ObjectForm.TOKEN:
            return np.asarray(stored.reshape(geometry.kv, geometry.num_layers, -1, heads, dim)[:, layer])
        inner = [axis for axis in self.shape.memory if axis in "THD"]
        sizes = self.shape.sized(self.num_blocks)
        blocks = stored.reshape(geometry.num_layers, -1, geometry.kv, *[sizes[axis] for axis in inner])[layer]
        by_token = blocks.transpose(1, 0, *[2 + inner.index(axis) for axis in "THD"])  # [K, B, T, H, D]
        planes: NDArray[Any] = by_token.reshape(geometry.kv, -1, heads, dim)
        return planes

    def _object(self, slot: int) -> NDArray[np.uint8]:
        return np.frombuffer(self.pool.memory.buffer(slot), dtype=np.uint8)
