"""What sliding windows leave of a sequence's blocks, and what of a chunk a load can ask for.

An engine frees a block as soon as the window of the next token lies behind it, and tells a connector nothing of that:
the ids that the connector was given once stand in its tables, while somebody else's KV comes into the blocks. A load
asks for no more than the window at its own end, and where there are windows it ends with a chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lamella.connector.step_orders import BlockTables


class Windows:
    """See the module.

    Args:
        block_tokens: of each KV cache group.
        window_tokens: of each; None: nothing is ever left behind. Fewer entries: the other groups have none.
        chunk_tokens: of an object, whole blocks of every group.
        null_block: id of the block that stands for none.

    >>> windows = Windows((4,), (8,), 16, 0)
    >>> windows.left(((5, 6, 7, 8, 9),), 17)  # the window of token 17 begins with token 10
    ((0, 0, 7, 8, 9),)
    >>> windows.lacks(((0, 0, 7, 8),), 0), windows.lacks(((0, 0, 0, 8),), 0)  # a load of 16 tokens asks for tokens 9 on
    (False, True)
    """

    def __init__(
        self, block_tokens: Sequence[int], window_tokens: Sequence[int | None], chunk_tokens: int, null_block: int
    ) -> None:
        self._block_tokens = tuple(block_tokens)
        self._windows = (*window_tokens, *[None] * (len(block_tokens) - len(window_tokens)))
        self._chunk_tokens = chunk_tokens
        self._null_block = null_block

    def left(self, tables: BlockTables, computed: int) -> BlockTables:
        """The tables with the null block in place of those that may be another's once so many tokens were computed."""
        if not any(self._windows):
            return tables
        found = []
        for table, size, window in zip(tables, self._block_tokens, self._windows, strict=True):
            gone = 0 if window is None else min(len(table), max(0, computed - window + 1) // size)
            found.append((self._null_block,) * gone + table[gone:])
        return tuple(found)

    def lacks(self, tables: BlockTables, skip_tokens: int) -> bool:
        """Whether these blocks, from `skip_tokens` on, lack one that a load of their chunks can ask for."""
        for table, size, window in zip(tables, self._block_tokens, self._windows, strict=True):
            for index in range(skip_tokens // size, len(table)):
                if table[index] == self._null_block and index >= self._first_wanted(index * size, size, window):
                    return True
        return False

    def _first_wanted(self, token: int, size: int, window: int | None) -> int:
        """The first block of a sequence that a load which ends with this token's chunk asks for."""
        end = (token // self._chunk_tokens + 1) * self._chunk_tokens
        return 0 if window is None else max(0, end - window + 1) // size

    def named(self, tables: Iterable[Sequence[int]], skip_tokens: int) -> set[int]:
        """The blocks of all groups from `skip_tokens` on, without the null block."""
        found = {
            block
            for table, size in zip(tables, self._block_tokens, strict=True)
            for block in table[skip_tokens // size :]
        }
        found.discard(self._null_block)
        return found
