"""Loads as one: every wanted token goes to its row, and nothing else goes anywhere."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from lamella.connector.joined_load import NULL_BLOCK, JoinedLoad, PlacedLoad, layers_in_pool, pool_addresses
from lamella.connector.storage.storage_manager import StorageManager
from lamella.cuda_ext.pool import HostPool
from lamella.reference.geometry import KVGeometry
from lamella.reference.keys import ChunkKey
from lamella.reference.layout import ObjectLayout
from lamella.reference.slices import Slice, plan_slices

CHUNK, BLOCK, MARGIN = 8, 4, 4

Part = tuple[int, int, int]
"""(first token, tokens, rows between it and the part before it)."""


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20), st.integers(0, 5)), min_size=1, max_size=4))
@example([(0, 16, 0), (0, 16, 0)])
@example([(0, 16, 1), (3, 9, 0)])
@example([(3, 8, 4)])  # its rows begin and end with a block of four, its tokens do not
def test_every_wanted_token_goes_to_its_row_and_nothing_else_anywhere(parts: list[Part]) -> None:
    loads, expected, row, chunks = [], {}, 0, 0
    for first, count, gap in parts:
        row += gap
        loads.append(PlacedLoad(first + count, first, 9, row - first))
        begins, ends = first // CHUNK, -(-(first + count) // CHUNK)
        for token in range(first, first + count):
            expected[(chunks + token // CHUNK - begins, token % CHUNK)] = row + token - first
        row += count
        chunks += ends - begins
    joined = JoinedLoad(loads, CHUNK, BLOCK, MARGIN)
    size, (table,) = joined.block_tokens, joined.blocks.block_ids
    found = {
        divmod(block * size + inside, CHUNK): int(target) * size + inside - MARGIN
        for block, target in enumerate(table)
        if target != NULL_BLOCK
        for inside in range(size)
    }
    assert found == expected
    assert joined.num_chunks == chunks
    assert joined.blocks.num_tokens == chunks * CHUNK
    assert joined.rows == (min(expected.values()), max(expected.values()) + 1)
    assert (joined.blocks.null_block is None) == (len(expected) == chunks * CHUNK)


def test_objects_stay_pinned_until_every_layer_that_was_asked_for_is_let_go_of() -> None:
    layout = ObjectLayout.single(KVGeometry(3, 2, 1, 4, 2, CHUNK), BLOCK)
    pool = HostPool(layout, 4)
    storage = StorageManager(pool)
    keys = [ChunkKey(b"s" * 32, bytes([number]) * 32, CHUNK) for number in range(4)]
    reservation = storage.allocate(keys)
    assert reservation is not None
    storage.batched_put(reservation)
    holds = [storage.hold_prefix(keys[:2]), storage.hold_prefix(keys, 3)]
    addresses = [pool_addresses(held) for held in holds]
    assert addresses == [tuple(reservation.addresses[:2]), tuple(reservation.addresses[3:])]
    together = [*reservation.addresses[:2], *reservation.addresses[3:]]
    futures = layers_in_pool(pool, holds, together, plan_slices(3, 1))
    found = [next(futures).result() for _ in range(2)]
    assert [one.part for one in found] == [Slice(0, 1), Slice(1, 1)]
    assert all(one.sources[0].objects.addresses == tuple(together) for one in found)
    futures.close()
    for held in holds:
        held.release()
    for one in found:
        assert pool.report().occupancy.pins > 0, "a copy may still read them"
        one.sources[0].release()
    assert pool.report().occupancy.pins == 0
    storage.close()
    pool.close()


def test_blocks_are_as_large_as_the_parts_allow() -> None:
    aligned = [PlacedLoad(16, 0, 2, 4), PlacedLoad(16, 8, 2, 12)]
    assert JoinedLoad(aligned, CHUNK, BLOCK, MARGIN).block_tokens == 4
    assert JoinedLoad([*aligned, PlacedLoad(8, 0, 1, 30)], CHUNK, BLOCK, MARGIN).block_tokens == 2
    assert JoinedLoad([*aligned, PlacedLoad(7, 0, 1, 32)], CHUNK, BLOCK, MARGIN).block_tokens == 1
