"""Keys: the one definition of when two chunks are the same bytes.

A chunk's key is a BLAKE3 chain over token ids: each link hashes the link before it and the chunk's own tokens, and
the first link hashes everything else that decides the bytes (the key space). Equal keys therefore mean equal prefixes,
and a lookup is a walk along the chain until the first miss (KEY-1).

Keys stay structured: a layer's key is (chunk key, layer), never a joined string, and resolves to the layer's byte
ranges in the whole object.
"""

from __future__ import annotations

import contextlib
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from blake3 import blake3

from lamella.reference.geometry import ObjectForm, check_form
from lamella.reference.layout import ByteRange, ObjectLayout
from lamella.reference.whole import check_whole

_FORMAT_VERSION = 1
MAX_TOKEN_ID = 2**32 - 1
_MOST = 2**63 - 1  # that a key spells in its 64 bits, and that whoever reads it back can hold


@dataclass(frozen=True, slots=True)
class KeySpace:
    """Everything beside the tokens that decides an object's bytes.

    Args:
        model: name and revision as the deployment knows it, adapter included.
        dtype: element type as the engine names it, such as "bfloat16" or "fp8_e4m3".
        form: token or block form.
        inner_layout: order of a token's (or block's) own axes, such as "THD", "HTD" or "packed-HTD"; the engine block
            size too in block form, which is not portable.
        chunk_tokens: T; chunks of different sizes never meet.
        tp_rank, tp_size: this rank's share of the heads.
        layers: first and one past the last model layer of this pipeline stage.
        salt: the tenant's secret or name; tenants with different salts never share an object.

    Raises:
        TypeError: a salt that is not bytes, and any other field of the wrong type.
        ValueError: an empty model, dtype or inner_layout, a rank outside the size, or an empty layer range.
    """

    model: str
    dtype: str
    form: ObjectForm
    inner_layout: str
    chunk_tokens: int
    tp_rank: int
    tp_size: int
    layers: tuple[int, int]
    salt: bytes = b""

    def __post_init__(self) -> None:
        for name in ("model", "dtype", "inner_layout"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name} must be a str, got {getattr(self, name)!r}")
            if not getattr(self, name):
                raise ValueError(f"{name} must not be empty: it decides what an object's bytes mean")
        check_form(self.form)
        if not isinstance(self.salt, bytes):
            raise TypeError(f"salt must be bytes, got {self.salt!r}: encode it, as in b'acme'")
        check_whole("chunk_tokens", self.chunk_tokens, 1, _MOST)
        check_whole("tp_size", self.tp_size, 1, _MOST)
        check_whole("tp_rank", self.tp_rank, 0)
        if self.tp_rank >= self.tp_size:
            raise ValueError(f"tp_rank must be between 0 and tp_size - 1, got {self.tp_rank} of {self.tp_size}")
        layers: object = self.layers
        if not isinstance(layers, tuple) or len(layers) != 2:
            raise TypeError(f"layers must be a tuple of a first and a later end layer, got {self.layers!r}")
        for layer in self.layers:
            check_whole("layers", layer, 0, _MOST)
        if not self.layers[0] < self.layers[1]:
            raise ValueError(f"layers must be a first and a later end layer, got {self.layers}")

    def digest(self) -> bytes:
        """32 bytes; fields are length-prefixed, so that no two spaces spell the same bytes."""
        fields = (
            self.model.encode(errors="surrogatepass"),  # a path may have bytes that are no text
            self.dtype.encode(),
            self.form.value.encode(),
            self.inner_layout.encode(),
            struct.pack("<5Q", self.chunk_tokens, self.tp_rank, self.tp_size, *self.layers),
            self.salt,
        )
        hasher = blake3(b"lamella key space" + struct.pack("<Q", _FORMAT_VERSION))
        for field in fields:
            hasher.update(struct.pack("<Q", len(field)) + field)
        return hasher.digest()


class ChunkKey(NamedTuple):
    """The key of one object. `num_tokens` is less than the chunk size only for a partial last chunk."""

    space: bytes
    prefix: bytes
    num_tokens: int

    def split_layers(self, num_layers: int) -> tuple[LayerKey, ...]:
        """One key a layer, in layer order.

        Raises:
            ValueError: num_layers < 1.
        """
        if num_layers < 1:
            raise ValueError(f"num_layers must be at least 1, got {num_layers}")
        return tuple(LayerKey(self, layer) for layer in range(num_layers))


class LayerKey(NamedTuple):
    """One layer of one object; `layer` counts within the stage."""

    chunk: ChunkKey
    layer: int

    def ranges(self, layout: ObjectLayout) -> tuple[ByteRange, ...]:
        """The layer's bytes in the whole object, over every kernel group that has this layer.

        Raises:
            ValueError: a layer that the object does not hold.
        """
        found: list[ByteRange] = []
        for index, group in enumerate(layout.groups):
            first, count = group.span(self.layer, 1)
            if count:
                found += layout.ranges(index, first, count, 0, layout.chunk_tokens)
        if not found:
            raise ValueError(f"layer must be between 0 and {layout.num_layers - 1}, got {self.layer}")
        return tuple(found)


def chunk_keys(
    space: KeySpace, token_ids: Sequence[int], *, partial: bool = False, after: ChunkKey | None = None
) -> tuple[ChunkKey, ...]:
    """Keys of a sequence's chunks, in order; a partial last chunk has one only if `partial`.

    Args:
        after: the chain goes on behind this chunk, and `token_ids` are the tokens that follow it; None: from the
            sequence's first token.

    Raises:
        ValueError: a token id that is no whole number of 0 .. 2**32 - 1, or `after` a chunk of another space or a
            partial one.
    """
    if after is not None and (after.space != space.digest() or after.num_tokens != space.chunk_tokens):
        raise ValueError(f"a chain goes on behind a full chunk of its own space, got one of {after.num_tokens} tokens")
    return tuple(_chain(space, token_ids, partial, after))


def _chain(space: KeySpace, token_ids: Sequence[int], partial: bool, after: ChunkKey | None) -> Iterator[ChunkKey]:
    payload = _payload(token_ids)
    space_digest = space.digest()
    link = after.prefix if after else space_digest
    for start in range(0, len(payload) // 4, space.chunk_tokens):
        num_tokens = min(space.chunk_tokens, len(payload) // 4 - start)
        if num_tokens < space.chunk_tokens and not partial:
            return
        tokens = payload[4 * start : 4 * (start + num_tokens)]
        link = blake3(link + struct.pack("<Q", num_tokens) + tokens).digest()
        yield ChunkKey(space_digest, link, num_tokens)


def _payload(token_ids: Sequence[int]) -> bytes:
    """The ids as little-endian 32-bit words."""
    if isinstance(token_ids, list) and token_ids and type(token_ids[0]) is int:  # prompts; three times as fast
        with contextlib.suppress(OverflowError, TypeError):
            return np.asarray(array("I", token_ids)).astype("<u4").tobytes()
    ids = np.asarray(token_ids) if len(token_ids) else np.empty(0, dtype=np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"token_ids must be one sequence of whole numbers, got {ids.dtype} of shape {ids.shape}")
    bad = np.flatnonzero((ids < 0) | (ids > MAX_TOKEN_ID))
    if bad.size:
        raise ValueError(f"token ids must be between 0 and {MAX_TOKEN_ID}, got {ids[bad[0]]} at position {bad[0]}")
    return ids.astype("<u4").tobytes()
