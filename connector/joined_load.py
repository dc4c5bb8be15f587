"""Several loads into the layer buffers as one: a layer is one transfer, of however many parts a prompt is put together.

A transfer has one sequence of chunks, so the parts' chunks are put behind one another, and its table says for each
block of them which rows it goes to. Parts may begin and end at any row: the table's blocks are as small as all of
their beginnings and ends ask for, and those that no part wants are no block.

Source: measured on an H200 (2026-11-29, five parts, Llama-3.1-8B's shape): each submission takes the calling thread
about 0.1 ms, which it could have given to the model's kernels.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lamella.connector.in_flight import Load
from lamella.connector.storage.held_prefix import HeldPrefix, LayerObjects, SliceSource
from lamella.connector.streams import Blocks
from lamella.cuda_ext.executors import HostObjects
from lamella.cuda_ext.pool import HostPool
from lamella.reference.slices import Slice

NULL_BLOCK: Final = 0
"""A block of the margin before the sequence's first row, which no part's tokens go to."""


class PlacedLoad(Load):
    """A load into the buffers: token p of the stored sequence goes to row p + `offset`.

    Args:
        num_tokens, skip_tokens: of the stored sequence; what lies between them is loaded.
        num_chunks: chunks held.
        offset: rows between where a token stood when it was stored and where it stands now; may be negative.
    """

    def __init__(self, num_tokens: int, skip_tokens: int, num_chunks: int, offset: int) -> None:
        super().__init__(Blocks((), num_tokens, skip_tokens), num_chunks)
        self.offset = offset
        self.table: NDArray[np.int32] | None = None
        """Where it goes in the buffers, once that is known."""

    @property
    def rows(self) -> tuple[int, int]:
        """The first row that it writes, and the one behind its last."""
        return self.blocks.skip_tokens + self.offset, self.blocks.num_tokens + self.offset


class JoinedLoad(Load):
    """Loads as one, in a virtual sequence of their chunks one behind another.

    Args:
        loads: what is joined; each loads something.
        chunk_tokens: of the stored objects.
        block_tokens: of the engine's blocks; the table's divide it.
        margin: rows before the sequence's first, whole blocks.
    """

    def __init__(self, loads: Sequence[PlacedLoad], chunk_tokens: int, block_tokens: int, margin: int) -> None:
        ends = [number for load in loads for number in (load.blocks.skip_tokens, *load.rows)]
        size = math.gcd(block_tokens, *ends)
        tables = []
        for load in loads:
            skip, end = load.blocks.skip_tokens, load.blocks.num_tokens
            chunks = skip // chunk_tokens, -(-end // chunk_tokens)
            tokens = np.arange(chunks[0] * chunk_tokens, chunks[1] * chunk_tokens, size)  # [blocks], as stored
            there = (tokens >= skip) & (tokens < end)
            tables.append(np.where(there, (tokens + load.offset + margin) // size, NULL_BLOCK))
        table = np.concatenate(tables).astype(np.int32)  # [blocks]
        null_block = NULL_BLOCK if (table == NULL_BLOCK).any() else None
        super().__init__(Blocks((table,), len(table) * size, 0, null_block), len(table) * size // chunk_tokens)
        self.block_tokens = size
        """Of the table: every part begins and ends with a block."""
        self.rows = min(load.rows[0] for load in loads), max(load.rows[1] for load in loads)
        """The first row that it writes, and the one behind its last."""


def pool_addresses(held: HeldPrefix) -> tuple[int, ...] | None:
    """Where each wanted chunk lies in the pool; None if a tier has to read some."""
    found: tuple[int, ...] = ()
    for run in held.wanted_runs():
        if run.lease is None:
            return None
        found += tuple(run.lease.addresses[-run.num_chunks :])
    return found


def layers_in_pool(
    pool: HostPool, holds: Sequence[HeldPrefix], addresses: Sequence[int], slices: Sequence[Slice]
) -> Generator[Future[LayerObjects], None, None]:
    """As `StorageManager.layerwise_batched_get`, for the wanted chunks of several prefixes as one, all in the pool.

    Args:
        pool: that they lie in.
        holds: the prefixes, held by the caller until the generator is closed.
        addresses: of their wanted chunks, one behind another.
        slices: of one layer each.
    """
    everything = HeldPrefix((), ())
    for held in holds:
        held.hold()
        everything.when_released(held.release)
    try:
        objects = HostObjects(tuple(addresses), pool.memory.shape.piece_bytes, pool.memory.base)
        for part in slices:
            everything.hold()
            future: Future[LayerObjects] = Future()
            source = SliceSource(0, len(objects.addresses), objects, False, everything.release)
            future.set_result(LayerObjects(part, len(objects.addresses), (source,)))
            yield future
    finally:
        everything.release()
