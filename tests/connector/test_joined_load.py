"""Loads as one: every wanted token goes to its row, and nothing else goes anywhere."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from lamella.connector.joined_load import NULL_BLOCK, JoinedLoad, PlacedLoad

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


def test_blocks_are_as_large_as_the_parts_allow() -> None:
    aligned = [PlacedLoad(16, 0, 2, 4), PlacedLoad(16, 8, 2, 12)]
    assert JoinedLoad(aligned, CHUNK, BLOCK, MARGIN).block_tokens == 4
    assert JoinedLoad([*aligned, PlacedLoad(8, 0, 1, 30)], CHUNK, BLOCK, MARGIN).block_tokens == 2
    assert JoinedLoad([*aligned, PlacedLoad(7, 0, 1, 32)], CHUNK, BLOCK, MARGIN).block_tokens == 1
