"""Which requests hold which blocks, and what each step takes for computed.

The scheduler side of a connector sees block tables grow step by step. From them follow the blocks that a batch reads as
computed, those it writes anew, and everybody who holds a block that went bad.

An engine makes a step some hundred times a second, and most of them only go on: so nothing here looks at each request
of a step unless somebody asks for each.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import compress
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

    def num_tokens(self, requests: Mapping[str, Any]) -> int:
        """Of its request, by the engine's; of one that is not among them, those that are there after the step."""
        request = requests.get(self.request)
        return self.end if request is None else int(request.num_tokens)

    def decodes(self, num_tokens: int) -> bool:
        """Whether a request of so many tokens lacks none but its last, and maybe drafts of what comes behind it."""
        return num_tokens - self.computed <= 1


class StepBatch:
    """The requests of one step, as vLLM lists them.

    Args:
        output: vLLM's SchedulerOutput.
        joined: those that are new in the batch, or back in it.
        grown: names of those that got blocks, `joined` among them.
    """

    __slots__ = ("_all", "_output", "_places", "grown", "joined", "num_tokens")

    def __init__(self, output: Any, joined: list[Scheduled], grown: list[str]) -> None:
        self._output = output
        self._all: list[Scheduled] | None = None
        self._places: dict[str, int] | None = None
        self.joined = joined
        self.grown = grown
        self.num_tokens: int = output.total_num_scheduled_tokens

    @property
    def names(self) -> Collection[str]:
        """Of all its requests."""
        names: Collection[str] = self._output.num_scheduled_tokens
        return names

    @property
    def num_decoding(self) -> int:
        """Requests that compute one token."""
        new = self._output.num_scheduled_tokens
        return len(new) if len(new) == self.num_tokens else list(new.values()).count(1)

    def of(self, request: str) -> Scheduled | None:
        """The request's part of the step; None if it has none."""
        new = self._output.num_scheduled_tokens.get(request)
        if new is None:
            return None
        cached = self._output.scheduled_cached_reqs
        if self._places is None:  # a search for each of many would take the square of their number
            self._places = dict(zip(cached.req_ids, range(len(cached.req_ids)), strict=True))
        place = self._places.get(request)
        if place is None:
            return next(one for one in self.joined if one.request == request)
        return Scheduled(request, cached.num_computed_tokens[place], new)

    def all(self) -> list[Scheduled]:
        """Every request's part."""
        if self._all is None:
            new, cached = self._output.num_scheduled_tokens, self._output.scheduled_cached_reqs
            self._all = [
                Scheduled(fresh.req_id, fresh.num_computed_tokens, new[fresh.req_id])
                for fresh in self._output.scheduled_new_reqs
            ]
            self._all += [
                Scheduled(name, computed, new[name])
                for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            ]
        return self._all


class BatchBlocks:
    """Block tables by request, and who holds which of the blocks that are watched.

    Watched are blocks that a load writes, and failed ones until they are computed anew. A load's are its owner's alone
    when it begins, and whoever holds them later is known from the table that he joins a step with: so no step looks
    through tables, which hold a thousand blocks each.

    Args:
        block_tokens: of each KV cache group.
    """

    def __init__(self, block_tokens: Sequence[int]) -> None:
        self._block_tokens = tuple(block_tokens)
        self._tables: dict[str, list[list[int]]] = {}
        self._watched: set[int] = set()
        self._watched_in: dict[str, dict[int, int]] = {}  # request -> its watched blocks, and their places
        self._rewritten_tokens: dict[int, int] = {}  # bad block -> its leading tokens that were computed anew

    def replace(self, request: str, tables: Sequence[Sequence[int]]) -> None:
        """The request has these tables."""
        self._tables[request] = [list(table) for table in tables]
        self._watched_in.pop(request, None)
        if self._watched:
            self._look(request, 0)

    def append(self, request: str, tables: Sequence[Sequence[int]]) -> None:
        """The request got these further blocks."""
        mine = self._tables.setdefault(request, [[] for _ in self._block_tokens])
        first = len(mine[0])
        for table, more in zip(mine, tables, strict=True):
            table.extend(more)
        if self._watched:
            self._look(request, first)

    def _look(self, request: str, first: int) -> None:
        """The request's blocks from index `first` on are looked through for watched ones."""
        table = self._tables[request][0]
        found = {table[index]: index for index in range(first, len(table)) if table[index] in self._watched}
        if found:
            self._watched_in.setdefault(request, {}).update(found)

    def watch(self, blocks: Collection[int], owner: str) -> None:
        """A load writes these blocks of the first group, which its owner alone holds; what they held is nothing."""
        self.loaded(blocks)
        self._watched.update(blocks)
        self._look(owner, 0)

    def unwatch(self, blocks: frozenset[int]) -> None:
        """A load has landed in these blocks, or they were computed anew."""
        self._watched.difference_update(blocks)
        for name, mine in list(self._watched_in.items()):
            for block in mine.keys() & blocks:
                del mine[block]
            if not mine:
                del self._watched_in[name]

    def take_step(self, output: Any) -> StepBatch:
        """The batch of a step that `output` (vLLM's SchedulerOutput) describes; its tables are known from here on."""
        joined: list[Scheduled] = []
        grown: list[str] = []
        new = output.num_scheduled_tokens
        for fresh in output.scheduled_new_reqs:
            self.replace(fresh.req_id, fresh.block_ids)
            joined.append(Scheduled(fresh.req_id, fresh.num_computed_tokens, new[fresh.req_id]))
            grown.append(fresh.req_id)
        cached = output.scheduled_cached_reqs
        for name in cached.resumed_req_ids:
            index = cached.req_ids.index(name)
            self.replace(name, cached.new_block_ids[index] or [[] for _ in self._block_tokens])
            joined.append(Scheduled(name, cached.num_computed_tokens[index], new[name]))
            grown.append(name)
        more = cached.new_block_ids
        for name, tables in compress(zip(cached.req_ids, more, strict=True), more):
            if name not in cached.resumed_req_ids:
                self.append(name, tables)
                grown.append(name)
        return StepBatch(output, joined, grown)

    def forget(self, request: str) -> None:
        """The request holds nothing any more."""
        self._tables.pop(request, None)
        self._watched_in.pop(request, None)

    def num_tokens(self, request: str) -> int:
        """Tokens that there are blocks for."""
        tables = self._tables.get(request)
        return len(tables[0]) * self._block_tokens[0] if tables else 0

    def written(self, batch: Sequence[Scheduled]) -> set[int]:
        """Blocks, of all groups, that requests of the batch write."""
        found: set[int] = set()
        for one in batch:
            for table, size in zip(self._tables.get(one.request, ()), self._block_tokens, strict=False):
                found.update(table[one.computed // size : -(-one.end // size)])
        return found

    def tables(self, request: str, num_tokens: int) -> BlockTables | None:
        """The request's tables up to `num_tokens`; None if they are not that long."""
        mine = self._tables.get(request)
        if mine is None:
            return None
        needed = [-(-num_tokens // size) for size in self._block_tokens]
        if any(len(table) < count for table, count in zip(mine, needed, strict=True)):
            return None
        return tuple(tuple(table[:count]) for table, count in zip(mine, needed, strict=True))

    def held(self, batch: StepBatch) -> frozenset[int]:
        """The watched blocks that requests of the batch take for computed.

        A block that went bad, was freed and is being filled anew counts only beyond the tokens computed anew in it.
        """
        size = self._block_tokens[0]
        found: set[int] = set()
        for name, mine in self._watched_in.items():
            one = batch.of(name)
            if one is None:
                continue
            end = -(-one.computed // size)
            hits = {block for block, index in mine.items() if index < end}
            for block in hits & self._rewritten_tokens.keys():
                if one.computed - mine[block] * size <= self._rewritten_tokens[block]:
                    hits.discard(block)
            found |= hits
        return frozenset(found)

    def rewritten(self, batch: StepBatch, bad: Collection[int]) -> frozenset[int]:
        """Those of `bad`, all watched, that with this step are wholly computed anew, by it or by several."""
        size = self._block_tokens[0]
        done: set[int] = set()
        for name, mine in self._watched_in.items():
            one = batch.of(name)
            if one is None:
                continue
            first, end = one.computed // size, -(-one.end // size)
            for block, index in mine.items():
                start = index * size
                if (
                    first <= index < end
                    and block in bad
                    and one.computed <= start + self._rewritten_tokens.get(block, 0)
                ):
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
        return set(bad).union(*(self.computed_over(bad, request) for request in self._tables))

    def computed_over(self, bad: Collection[int], request: str) -> set[int]:
        """The first bad block in the request's table, and all behind it there; empty without one."""
        table = self._tables.get(request, [[]])[0]
        first = next((index for index, block in enumerate(table) if block in bad), len(table))
        return set(table[first:])
