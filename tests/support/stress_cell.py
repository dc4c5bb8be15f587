"""One cache shape under stress: blocks on a device, a pool, and what every byte of both ought to be."""

from __future__ import annotations

import numpy as np

from lamella.cuda_ext.bench_cases import BenchShape
from lamella.cuda_ext.device import Device
from lamella.cuda_ext.pool import Backing, HostPool
from lamella.reference.arena import CacheCase
from lamella.reference.geometry import ObjectForm
from lamella.reference.keys import ChunkKey
from lamella.reference.layout import TensorView, engine_layout

SLOTS = 24
OBJECTS = 4  # of the longest prefix


class Cell:
    """One cache shape: its blocks on the device, its pool, and what each object and block ought to hold."""

    def __init__(self, device: Device, shape: BenchShape, number: int) -> None:
        self.shape = shape
        geometry = shape.geometry
        self.num_blocks = 2 * OBJECTS * geometry.chunk_tokens // shape.block_tokens * 2
        self.case = CacheCase(
            tuple(range(geometry.num_layers)),
            geometry.kv,
            geometry.num_heads,
            geometry.head_dim,
            2,
            self.num_blocks,
            shape.block_tokens,
            shape.axes,
            shape.memory,
        )
        self.layer_bytes = self.case.tensor_bytes
        self.blocks = device.allocate(self.layer_bytes * geometry.num_layers)
        self.blocks.fill(0)
        self.engines = (engine_layout(shape.axes, [self._view(layer) for layer in range(geometry.num_layers)]),)
        self.pool = HostPool(shape.layout, SLOTS, backing=Backing.SHARED, registrar=device.registrar())
        self.pool.memory.wait_registered(120)
        self.free_blocks = list(range(self.num_blocks))
        self.space = b"stress%d" % number
        self.content: dict[ChunkKey, int] = {}  # key -> what its bytes are made of

    def _view(self, layer: int) -> TensorView:
        tensor = self.case.view(np.zeros(self.layer_bytes, dtype=np.uint8))
        return TensorView(self.blocks.address + layer * self.layer_bytes, tensor.shape, tensor.strides, 2)

    def key(self, number: int) -> ChunkKey:
        return ChunkKey(self.space, number.to_bytes(8, "little"), self.shape.geometry.chunk_tokens)

    def expected_layer(self, made_of: int, layer: int) -> np.ndarray:
        """`[K, T, H, D]` of the object made of that number."""
        geometry = self.shape.geometry
        size = geometry.kv * geometry.chunk_tokens * geometry.hidden
        draw = np.random.default_rng([made_of, layer]).integers(0, 1 << 16, size, dtype=np.uint16)
        return draw.reshape(geometry.kv, geometry.chunk_tokens, geometry.num_heads, geometry.head_dim)

    def object_view(self, slot: int) -> np.ndarray:
        """`[K, L, T, H, D]` over the slot's bytes, whatever the form."""
        geometry, shape = self.shape.geometry, self.shape
        flat = np.frombuffer(self.pool.memory.buffer(slot), dtype=np.uint16)
        if shape.form is ObjectForm.TOKEN:
            return flat.reshape(
                geometry.kv, geometry.num_layers, geometry.chunk_tokens, geometry.num_heads, geometry.head_dim
            )
        inner = [axis for axis in shape.memory if axis in "THD"]
        sizes = shape.sized(self.num_blocks)
        blocks = flat.reshape(geometry.num_layers, -1, geometry.kv, *[sizes[axis] for axis in inner])
        # [K, L, B, T, H, D], a view: written and read block by block
        return blocks.transpose(2, 0, 1, *[3 + inner.index(axis) for axis in "THD"])

    def write_object(self, slot: int, made_of: int) -> None:
        view = self.object_view(slot)
        for layer in range(self.shape.geometry.num_layers):
            wanted = self.expected_layer(made_of, layer)
            view[:, layer] = wanted.reshape(view[:, layer].shape)

    def object_is_right(self, slot: int, made_of: int, layer: int) -> bool:
        view, wanted = self.object_view(slot)[:, layer], self.expected_layer(made_of, layer)
        return bool(np.array_equal(view, wanted.reshape(view.shape)))

    def blocks_are_right(self, ids: list[int], made_of: list[int], layer: int, skip_tokens: int) -> bool:
        raw = np.empty(self.layer_bytes, dtype=np.uint8)
        self.blocks.read(raw.ctypes.data, self.layer_bytes, layer * self.layer_bytes)
        view = self.case.view(raw)
        wanted = np.concatenate([self.expected_layer(number, layer) for number in made_of], axis=1)
        for kv in range(self.shape.geometry.kv):
            plane = self.case.plane([view] * self.shape.geometry.num_layers, layer, kv)  # [N, T, H, D]
            stored = plane[ids].reshape(-1, *plane.shape[2:])
            if not np.array_equal(stored[skip_tokens:], wanted[kv, skip_tokens:]):
                return False
        return True

    def close(self) -> None:
        self.pool.close()
        self.blocks.close()
