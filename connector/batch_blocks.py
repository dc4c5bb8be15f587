"""Which requests hold which blocks, and what each step takes for computed.

The scheduler side of a connector sees block tables grow step by step. From them follow the blocks that a batch reads as
computed, those it writes anew, and everybody who holds a block that went bad.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from lamella.connector.step_orders import BlockTables


class Scheduled(NamedTuple):
    """One request of a step: tokens `[0, computed)` are there, tokens `[computed, computed + new)` are computed."""

    request: str
    computed: int
    new: int

    @property
    def end(self) -> int:
        """Tokens that are there after the step."""
        return self.computed + self.new


class BatchBlocks:
    """Block tables by request.

    Args:
        block_tokens: of each KV cache group.
    """

    def __init__(self, block_tokens: Sequence[int]) -> None:
        self._block_tokens = tuple(block_tokens)
        self._tables: dict[str, list[list[int]]] = {}
        self._rewritten_tokens: dict[int, int] = {}  # bad block -> its leading tokens that were computed anew

    def replace(self, request: str, tables: Sequence[Sequence[int]]) -> None:
        """The request has these tables."""
        self._tables[request] = [list(table) for table in tables]

    def append(self, request: str, tables: Sequence[Sequence[int]]) -> None:
        """The request got these further blocks."""
        mine = self._tables.setdefault(request, [[] for _ in self._block_tokens])
        for table, more in zip(mine, tables, strict=True):
            table.extend(more)

    def take_step(self, output: Any) -> list[Scheduled]:
        """The batch of a step that `output` (vLLM's SchedulerOutput) describes; its tables are known from here on."""
        batch: list[Scheduled] = []
        new = output.num_scheduled_tokens
        for fresh in output.scheduled_new_reqs:
            self.replace(fresh.req_id, fresh.block_ids)
            batch.append(Scheduled(fresh.req_id, fresh.num_computed_tokens, new[fresh.req_id]))
        cached = output.scheduled_cached_reqs
        for name, tables, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if name in cached.resumed_req_ids:
                self.replace(name, tables or [[] for _ in self._block_tokens])
            elif tables is not None:
                self.append(name, tables)
            batch.append(Scheduled(name, computed, new[name]))
        return batch

    def forget(self, request: str) -> None:
        """The request holds nothing any more."""
        self._tables.pop(request, None)

    def tables(self, request: str, num_tokens: int) -> BlockTables | None:
        """The request's tables up to `num_tokens`; None if they are not that long."""
        mine = self._tables.get(request)
        if mine is None:
            return None
        needed = [-(-num_tokens // size) for size in self._block_tokens]
        if any(len(table) < count for table, count in zip(mine, needed, strict=True)):
            return None
        return tuple(tuple(table[:count]) for table, count in zip(mine, needed, strict=True))

    def held(self, batch: Sequence[Scheduled], watched: Collection[int]) -> frozenset[int]:
        """Those of `watched` (blocks of the first group) that requests of the batch take for computed.

        A block that went bad, was freed and is being filled anew counts only beyond the tokens computed anew in it.
        """
        size = self._block_tokens[0]
        wanted = watched if isinstance(watched, frozenset | set) else frozenset(watched)
        found: set[int] = set()
        for one in batch if wanted else ():
            table = self._tables.get(one.request, [[]])[0]
            computed = table[: -(-one.computed // size)]
            hits = wanted.intersection(computed)  # tables hold a thousand blocks, and this runs in every step
            for block in hits & self._rewritten_tokens.keys():
                if one.computed - computed.index(block) * size <= self._rewritten_tokens[block]:
                    hits -= {block}
            found |= hits
        return frozenset(found)

    def rewritten(self, batch: Sequence[Scheduled], bad: Collection[int]) -> frozenset[int]:
        """Those of `bad` that, once this step has run, were wholly computed anew, in one step or several."""
        size = self._block_tokens[0]
        done: set[int] = set()
        for one in batch if bad else ():
            table = self._tables.get(one.request, [[]])[0]
            for index in range(one.computed // size, min(-(-one.end // size), len(table))):
                block = table[index]
                start = index * size
                if block in bad and one.computed <= start + self._rewritten_tokens.get(block, 0):
                    there = min(size, one.end - start)
                    self._rewritten_tokens[block] = max(there, self._rewritten_tokens.get(block, 0))
                    if there == size:
                        done.add(block)
        self.loaded(done)
        return frozenset(done)

    def loaded(self, blocks: Collection[int]) -> None:
        """Nothing that these blocks hold counts as computed anew: a load writes them, or has failed to, or all is."""
        for block in blocks:
            self._rewritten_tokens.pop(block, None)

    def behind(self, bad: Collection[int]) -> set[int]:
        """The bad blocks, and in every table that holds one all blocks behind it: what was computed from them."""
        found = set(bad)
        for tables in self._tables.values():
            for index, block in enumerate(tables[0]):
                if block in bad:
                    found.update(tables[0][index:])
                    break
        return found
