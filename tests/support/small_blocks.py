"""The blocks of a `SmallEngine`: who uses which, and which hold a prefix that can be hit."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

BLOCK, NUM_BLOCKS = 4, 26


class SmallBlocks:
    """As an engine's block pool: block 0 is nobody's, and a free block can be hit until it is taken for another use.

    Attributes:
        cached: the block that holds the end of each prefix of whole blocks.
    """

    def __init__(self) -> None:
        self.cached: dict[tuple[int, ...], int] = {}
        self._free = deque(range(1, NUM_BLOCKS))
        self._users: Counter[int] = Counter()

    def hits(self, tokens: Sequence[int]) -> list[int]:
        """Blocks that hold the prompt's own prefix; never all of it."""
        prompt = tuple(tokens)
        found: list[int] = []
        while (end := (len(found) + 1) * BLOCK) < len(prompt) and prompt[:end] in self.cached:
            found.append(self.cached[prompt[:end]])
        return found

    def num_free_beside(self, hits: Sequence[int]) -> int:
        """Blocks that are free and no hits of a request that would use them."""
        return len([block for block in self._free if block not in hits])

    def grow(self, table: list[int], end: int) -> list[int] | None:
        """The table reaches that token, by these blocks more; None: there are none, and it is as it was."""
        needed = max(0, -(-end // BLOCK) - len(table))
        if len(self._free) < needed:
            return None
        more = self.take(needed)
        table += more
        return more

    def take(self, count: int) -> list[int]:
        """So many free blocks, of which nothing can be hit any more."""
        blocks = [self._free.popleft() for _ in range(count)]
        self.evict_blocks(set(blocks))
        self._users.update(blocks)
        return blocks

    def use(self, blocks: Sequence[int]) -> None:
        """One user more has these blocks, free or not."""
        for block in blocks:
            if not self._users[block]:
                self._free.remove(block)
        self._users.update(blocks)

    def give_back(self, blocks: Sequence[int]) -> None:
        """A user less; the last block of a table is taken again before the first."""
        self._users.subtract(blocks)
        self._free.extend(block for block in reversed(blocks) if not self._users[block])

    def commit(self, tokens: Sequence[int], table: Sequence[int], end: int) -> None:
        """Whole blocks up to that token can be hit."""
        for index in range(min(end, len(tokens)) // BLOCK):
            self.cached.setdefault(tuple(tokens[: (index + 1) * BLOCK]), table[index])

    def evict_blocks(self, blocks: set[int]) -> None:
        """None of these can be hit any more."""
        self.cached = {key: block for key, block in self.cached.items() if block not in blocks}
