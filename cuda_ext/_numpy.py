"""The NumPy executor: the same meaning by strided views, for machines without a compiler."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lamella.cuda_ext._execution import HostObjects, Method, SliceLanded
from lamella.reference.geometry import KVGeometry, ObjectForm
from lamella.reference.layout import EngineLayout, KernelGroup
from lamella.reference.plan import Direction, Piece, TransferPlan, Window, check_request

Array = NDArray[Any]


class _Segment(NamedTuple):
    """Tokens of a piece that lie in one block."""

    block: int
    block_token: int
    piece_token: int
    num_tokens: int


class NumpyExecutor:
    """Follows a plan's windows with NumPy views made from addresses; strides of any sign.

    It knows nothing of registration pieces, because a copy by the CPU may cross them.
    """

    @property
    def name(self) -> str:
        """`numpy`."""
        return "numpy"

    def run(
        self,
        plan: TransferPlan,
        engines: Sequence[EngineLayout],
        objects: HostObjects,
        direction: Direction,
        *,
        method: Method = Method.AUTO,
        on_slice: SliceLanded | None = None,
    ) -> None:
        """As `Executor.run`."""
        check_request(plan.layout, engines, plan.request, direction)
        _check_objects(plan, objects)
        staged = method is Method.STAGED
        largest = max((window.num_bytes for window in plan.windows), default=0)
        staging = np.empty(largest if staged else 0, dtype=np.uint8)
        for window in plan.windows:
            if staged and direction is Direction.RETRIEVE:
                _fill(plan, window, objects, staging, to_staging=True)
            for piece in window.pieces:
                image = _image(plan, piece, objects, staging if staged else None)
                _scatter(plan, piece, engines[piece.group], image, direction)
            if staged and direction is Direction.STORE:
                _fill(plan, window, objects, staging, to_staging=False)
            if on_slice is not None and window.completes_slice is not None:
                on_slice(window.completes_slice)


def _check_objects(plan: TransferPlan, objects: HostObjects) -> None:
    for chunk in sorted({piece.object_index for window in plan.windows for piece in window.pieces}):
        if chunk >= len(objects.addresses) or not objects.addresses[chunk]:
            raise ValueError(f"chunk {chunk} has no object: {len(objects.addresses)} addresses were given")


def _view(address: int, shape: tuple[int, ...], strides: tuple[int, ...], element_bytes: int) -> Array:
    """Memory at `address` as unsigned integers of `element_bytes`."""
    below = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if stride < 0)
    above = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if stride > 0)
    memory = (ctypes.c_uint8 * (above - below + element_bytes)).from_address(address + below)
    return np.ndarray(shape, dtype=f"u{element_bytes}", buffer=memoryview(memory), offset=-below, strides=strides)


def _dense(address: int, shape: tuple[int, ...], element_bytes: int) -> Array:
    strides = tuple(element_bytes * int(np.prod(shape[axis + 1 :], dtype=np.int64)) for axis in range(len(shape)))
    return _view(address, shape, strides, element_bytes)


def _fill(plan: TransferPlan, window: Window, objects: HostObjects, staging: Array, *, to_staging: bool) -> None:
    """Copies the objects' ranges into their pieces' images, one after another, or back."""
    for piece in window.pieces:
        position = piece.staging_offset
        for found in plan.layout.ranges(
            piece.group, piece.first_layer, piece.num_layers, piece.first_token, piece.num_tokens
        ):
            host = _dense(objects.addresses[piece.object_index] + found.offset, (found.num_bytes,), 1)
            image = staging[position : position + found.num_bytes]
            if to_staging:
                image[...] = host
            else:
                host[...] = image
            position += found.num_bytes


def _image(plan: TransferPlan, piece: Piece, objects: HostObjects, staging: Array | None) -> Array:
    """The piece as `[K, layers, tokens, H, D]` (token form) or bytes `[layers, blocks, K, plane]` (block form)."""
    group = plan.layout.groups[piece.group]
    geometry, tokens, layers = group.geometry, piece.num_tokens, piece.num_layers
    first_token, first_layer = piece.first_token, piece.first_layer
    if staging is not None:
        address = staging.ctypes.data + piece.staging_offset
        whole_layers, whole_tokens, first_layer, first_token = layers, tokens, 0, 0
    else:
        address = objects.addresses[piece.object_index] + plan.layout.group_offset(piece.group)
        whole_layers, whole_tokens = geometry.num_layers, geometry.chunk_tokens
    if plan.layout.form is ObjectForm.TOKEN:
        shape = (geometry.kv, whole_layers, whole_tokens, geometry.num_heads, geometry.head_dim)
        image = _dense(address, shape, geometry.element_bytes)  # [K, L, T, H, D]
        return image[:, first_layer : first_layer + layers, first_token : first_token + tokens]
    blocks = whole_tokens // group.block_tokens
    image = _dense(address, (whole_layers, blocks, geometry.kv, _plane_bytes(group)), 1)  # [L, B, K, plane]
    first_block = first_token // group.block_tokens
    return image[first_layer : first_layer + layers, first_block : first_block + tokens // group.block_tokens]


def _plane_bytes(group: KernelGroup) -> int:
    return group.block_tokens * group.geometry.hidden_bytes


def _segments(plan: TransferPlan, piece: Piece) -> Iterator[_Segment]:
    block_tokens = plan.layout.groups[piece.group].block_tokens
    origin = piece.object_index * plan.layout.chunk_tokens + piece.first_token
    token = 0
    while token < piece.num_tokens:
        index, within = divmod(origin + token, block_tokens)
        count = min(block_tokens - within, piece.num_tokens - token)
        yield _Segment(plan.request.block_ids[piece.group][index], within, token, count)
        token += count


def _scatter(plan: TransferPlan, piece: Piece, engine: EngineLayout, image: Array, direction: Direction) -> None:
    """Between a piece's image and the engine's blocks."""
    group = plan.layout.groups[piece.group]
    segments = tuple(_segments(plan, piece))
    for slot in range(piece.num_layers):
        layer = piece.first_layer + slot
        for kv in range(engine.kv):
            for segment in segments:
                if plan.layout.form is ObjectForm.TOKEN:
                    cache = _tokens(engine, group.geometry, layer, kv, segment)  # [T, H, D]
                    part = image[kv, slot, segment.piece_token : segment.piece_token + segment.num_tokens]
                else:
                    address = engine.address(layer, kv, segment.block, 0, 0, 0)
                    cache = _dense(address, (_plane_bytes(group),), 1)
                    part = image[slot, segment.piece_token // group.block_tokens, kv]
                if direction is Direction.RETRIEVE:
                    cache[...] = part
                else:
                    part[...] = cache


def _tokens(engine: EngineLayout, geometry: KVGeometry, layer: int, kv: int, segment: _Segment) -> Array:
    return _view(
        engine.address(layer, kv, segment.block, segment.block_token, 0, 0),
        (segment.num_tokens, geometry.num_heads, geometry.head_dim),
        (engine.token_stride, engine.head_stride, engine.dim_stride),
        geometry.element_bytes,
    )
