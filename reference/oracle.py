"""The oracle: what a retrieve and a store leave, said token by token on plain NumPy views.

It indexes arrays and knows nothing of addresses, strides, slices or plans (it imports neither `layout` nor `plan`), so
that one mistake cannot pass on both sides of a comparison. Everything else in Lamella is tested against it.

Views it takes, for each kernel group:
    an object's array     token form `[K, L, T, H, D]`, block form `[L, B, K, T, H, D]` (T = tokens of a block here)
    a layer's cache       one array for each kv, axes in the order `[N, T, H, D]`, strided as the engine has them
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class _Place(NamedTuple):
    chunk: int
    chunk_token: int
    block: int
    block_token: int


def retrieve(
    objects: Sequence[Sequence[Array]],
    caches: Sequence[Sequence[Sequence[Array]]],
    block_ids: Sequence[Sequence[int]],
    *,
    num_tokens: int,
    chunk_tokens: int,
    skip_tokens: int = 0,
    null_block: int | None = None,
) -> None:
    """Copies tokens `[skip_tokens, num_tokens)` of every layer from `objects` into `caches`, in place.

    Args:
        objects: `objects[chunk][group]`, chunks counted from token 0.
        caches: `caches[group][layer][kv]`, `[N, T, H, D]`.
        block_ids: `block_ids[group][i]` holds tokens from `i * T` on, T being the group's block size.
        num_tokens, chunk_tokens, skip_tokens, null_block: as in `TransferRequest` and `KVGeometry`.
    """
    for group, layers in enumerate(caches):
        block_tokens = layers[0][0].shape[1]
        for place in _places(block_ids[group], block_tokens, num_tokens, chunk_tokens, skip_tokens, null_block):
            source = objects[place.chunk][group]
            for layer, planes in enumerate(layers):
                for kv, plane in enumerate(planes):
                    plane[place.block, place.block_token] = _token(source, layer, kv, place.chunk_token)


def store(
    objects: Sequence[Sequence[Array]],
    caches: Sequence[Sequence[Sequence[Array]]],
    block_ids: Sequence[Sequence[int]],
    *,
    num_tokens: int,
    chunk_tokens: int,
    skip_tokens: int = 0,
    null_block: int | None = None,
) -> None:
    """Copies tokens `[skip_tokens, num_tokens)` of every layer from `caches` into `objects`, in place."""
    for group, layers in enumerate(caches):
        block_tokens = layers[0][0].shape[1]
        for place in _places(block_ids[group], block_tokens, num_tokens, chunk_tokens, skip_tokens, null_block):
            target = objects[place.chunk][group]
            for layer, planes in enumerate(layers):
                for kv, plane in enumerate(planes):
                    _token(target, layer, kv, place.chunk_token)[...] = plane[place.block, place.block_token]


def _places(
    block_ids: Sequence[int],
    block_tokens: int,
    num_tokens: int,
    chunk_tokens: int,
    skip_tokens: int,
    null_block: int | None,
) -> Iterator[_Place]:
    for token in range(skip_tokens, num_tokens):
        block = block_ids[token // block_tokens]
        if block != null_block:
            yield _Place(token // chunk_tokens, token % chunk_tokens, block, token % block_tokens)


def _token(array: Array, layer: int, kv: int, chunk_token: int) -> Array:
    """One token's `[H, D]` in an object's array."""
    if array.ndim == 5:
        found = array[kv, layer, chunk_token]
    else:
        block_tokens = array.shape[3]
        found = array[layer, chunk_token // block_tokens, kv, chunk_token % block_tokens]
    return np.asarray(found)
