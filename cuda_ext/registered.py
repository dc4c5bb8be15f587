"""What an engine knows beforehand: a paged cache with its objects, and the widths it has been cut into."""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Sequence
from ctypes import POINTER, c_int32, c_uint64
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lamella.cuda_ext._library import GroupStruct, RequestStruct, SliceStruct
from lamella.reference.geometry import ObjectForm
from lamella.reference.layout import EngineLayout, ObjectLayout
from lamella.reference.slices import Slice, plan_slices

_KNOWN_CUTS = 256  # a layerwise load asks for each layer's alone


class Cut(NamedTuple):
    """A cache's layers in slices, worked out once for each width."""

    slices: tuple[Slice, ...]
    native: Any  # SliceStruct[num_slices]
    address: int  # of `native`
    layers: tuple[tuple[int, ...], ...]  # [slice][group] layers of the group in the slice
    token_bytes: tuple[int, ...]  # [slice] bytes of a token of every group


class RegisteredCache:
    """A paged cache and the objects that go with it, known to an engine. Made by `TransferEngine.register_cache`."""

    def __init__(self, number: int, layout: ObjectLayout, engines: tuple[EngineLayout, ...]) -> None:
        self.number = number
        self.layout = layout
        self.engines = engines
        self._cuts: dict[int | tuple[int, ...], Cut] = {}
        self._cut_once = lru_cache(_KNOWN_CUTS)(self._cut)

    def cut_by(self, width: int | Sequence[int]) -> Cut:
        """The slices of a width or schedule.

        Raises:
            ValueError: as `plan_slices`.
        """
        key = width if isinstance(width, int) else tuple(width)
        found = self._cuts.get(key)
        if found is None:
            found = self._cuts[key] = self.cut_at(plan_slices(self.layout.num_layers, key))
        return found

    def cut_at(self, slices: tuple[Slice, ...]) -> Cut:
        """Slices of the caller's own; those asked for last are known.

        Raises:
            ValueError: one that ends behind the stage.
        """
        return self._cut_once(slices)

    def _cut(self, slices: tuple[Slice, ...]) -> Cut:
        groups = self.layout.groups
        for index, part in enumerate(slices):
            if part.end_layer > self.layout.num_layers:  # native code adds ends up in 32 bits
                raise ValueError(f"slice {index} ends at layer {part.end_layer}, the stage at {self.layout.num_layers}")
        layers = tuple(tuple(group.span(*part)[1] for group in groups) for part in slices)
        sizes = [group.geometry.token_layer_bytes for group in groups]
        native = (SliceStruct * len(slices))(*(SliceStruct(*part) for part in slices))
        return Cut(
            slices,
            native,
            ctypes.addressof(native),
            layers,
            tuple(sum(map(int.__mul__, counts, sizes)) for counts in layers),
        )

    def slice_bytes(
        self,
        cut: Cut,
        tables: Sequence[array[int]],
        num_tokens: int,
        skip_tokens: int,
        null_block: int | None,
    ) -> tuple[int, ...]:
        """Bytes of each slice of a request, for order policies that look at them."""
        if null_block is None:
            tokens = max(0, num_tokens - skip_tokens)
            return tuple([tokens * size for size in cut.token_bytes])
        bytes_a_layer = []
        for group, table in zip(self.layout.groups, tables, strict=False):
            size = group.block_tokens
            first = np.arange(len(table), dtype=np.int64) * size  # [blocks]
            held = np.minimum(first + size, num_tokens) - np.maximum(first, skip_tokens)  # [blocks]
            tokens = int(held[(held > 0) & (np.frombuffer(table, np.int32) != null_block)].sum())
            bytes_a_layer.append(tokens * group.geometry.token_layer_bytes)
        return tuple(
            sum(count * size for count, size in zip(counts, bytes_a_layer, strict=False)) for counts in cut.layers
        )


def block_table(ids: Sequence[int] | NDArray[np.int32]) -> array[int]:
    """Block ids as C reads them. For a tuple `struct` takes a third of NumPy's or `array`'s time, and a load waits.

    Raises:
        ValueError: an id that is no 32-bit integer.
    """
    if isinstance(ids, np.ndarray):
        return array("i", np.ascontiguousarray(ids, dtype=np.int32).tobytes())
    try:
        return array("i", struct.pack(f"{len(ids)}i", *ids))
    except struct.error:
        wrong = next((one for one in ids if not -(2**31) <= one < 2**31), ids)
        raise ValueError(f"block ids must be 32-bit integers, got {wrong!r}") from None


def native_shape(layout: ObjectLayout, engines: Sequence[EngineLayout]) -> tuple[RequestStruct, list[object]]:
    """The C structure of a cache without a request, and what must stay alive while it is read."""
    groups = (GroupStruct * len(layout.groups))()
    kept: list[object] = [groups]
    for index, (target, group, engine) in enumerate(zip(groups, layout.groups, engines, strict=True)):
        geometry = group.geometry
        target.num_layers, target.kv = geometry.num_layers, geometry.kv
        target.num_heads, target.head_dim = geometry.num_heads, geometry.head_dim
        target.element_bytes, target.block_tokens = geometry.element_bytes, group.block_tokens
        target.num_blocks, target.object_offset = engine.num_blocks, layout.group_offset(index)
        target.block_stride, target.token_stride = engine.block_stride, engine.token_stride
        target.head_stride, target.dim_stride = engine.head_stride, engine.dim_stride
        layers = np.array(group.layers, dtype=np.int32)  # [L]
        bases = np.array(engine.bases, dtype=np.uint64)  # [L, K]
        target.layers = layers.ctypes.data_as(POINTER(c_int32))
        target.bases = bases.ctypes.data_as(POINTER(c_uint64))
        kept += [layers, bases]
    shape = RequestStruct(
        form=int(layout.form is ObjectForm.BLOCK),
        chunk_tokens=layout.chunk_tokens,
        num_groups=len(groups),
        groups=groups,
    )
    return shape, kept
