"""Which chunk leaves next: the longest unused of those that nothing kept comes behind.

A chunk is of use only while every chunk before it is kept. So it leaves only when nothing behind it is kept (KEEP-1),
and counts by then as used when the last of what was behind it was (KEEP-2): a prompt loses its tail before its head, in
however many steps it was stored and whoever used which part of it.

    add ──► kept ──free──► may leave once nothing behind it is kept ──take──► gone
               └──────────────────remove───────────────────────────────────────┘

Each call costs the chunks that it names or takes, however long what comes before them is; only whether a prompt is
whole is looked up chunk by chunk where one has lost its head, and then once.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any, Final, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
_SLACK: Final = 64


@dataclass(slots=True, eq=False)
class Kept(Generic[Key]):
    """A chunk that is kept.

    Attributes:
        key: its own, the same wherever what comes before it is the same.
        before: key of the chunk before it; None: it is a prompt's first.
        is_free: nobody holds it. `PrefixAges.free` sets it; whoever takes hold of the chunk clears it.
        used: when it was last used, or something that has left from behind it was.
        num_behind: kept chunks right behind it.
        seen_whole: how many heads had been lost when everything before it was seen to be kept; -1: never.
    """

    key: Key
    before: Key | None
    is_free: bool = field(default=False, init=False)
    used: int = field(default=0, init=False)
    num_behind: int = field(default=0, init=False)
    seen_whole: int = field(default=-1, init=False)


Node = TypeVar("Node", bound=Kept[Any])


class PrefixAges(Generic[Key, Node]):
    """The chunks that are kept, and the order in which they leave.

    Source: SGLang's radix cache, which evicts leaves, the least recently used first.
    """

    def __init__(self) -> None:
        self._kept: dict[Key, Node] = {}
        self._missing: dict[Key, int] = {}  # not kept -> kept chunks right behind it
        self._leaves: list[tuple[int, int, Node]] = []  # a heap of (used, push, chunk); some entries are out of date
        self._now = self._pushes = 0
        self._lost_heads = 0

    @property
    def kept(self) -> Mapping[Key, Node]:
        """Every chunk, by key."""
        return self._kept

    def is_whole(self, last: Key | None) -> bool:
        """Whether a prompt is kept from its first chunk to this one; None: to nowhere, which it is."""
        if not self._missing:  # then nothing is kept without what comes before it
            return last is None or last in self._kept
        passed: list[Node] = []
        while last is not None:
            found = self._kept.get(last)
            if found is None:
                return False
            if found.seen_whole == self._lost_heads:
                break
            passed.append(found)
            last = found.before
        for chunk in passed:
            chunk.seen_whole = self._lost_heads
        return True

    def check(self, chunks: Sequence[Node]) -> None:
        """They can be added.

        Args:
            chunks: none of them kept.

        Raises:
            ValueError: one would come behind itself, so that neither it nor what is between could ever leave.
        """
        if not self._missing:
            return
        new = {chunk.key: chunk for chunk in chunks}
        for key in new.keys() & self._missing.keys():
            passed: set[Key] = set()
            at: Key | None = key
            while at is not None:
                if at in passed:
                    raise ValueError(f"{at} would come behind itself: name a prompt's keys in their order")
                passed.add(at)
                found = new.get(at) or self._kept.get(at)
                at = None if found is None else found.before

    def add(self, chunks: Sequence[Node]) -> None:
        """They are kept, each behind the one it names, and held until `free`; see `check`."""
        for chunk in chunks:
            chunk.num_behind = self._missing.pop(chunk.key, 0)
            self._kept[chunk.key] = chunk
            self._link(chunk)

    def free(self, chunks: Sequence[Node]) -> None:
        """Nobody holds them; they are the most recently used, the first most of all.

        Args:
            chunks: kept ones, of one prompt in its order.
        """
        for chunk in reversed(chunks):
            self._now += 1
            chunk.used = self._now
            chunk.is_free = True
            if not chunk.num_behind:
                self._push(chunk)

    def remove(self, chunk: Node) -> None:
        """It is gone, whatever comes behind it."""
        del self._kept[chunk.key]
        chunk.is_free = False
        if chunk.num_behind:
            self._missing[chunk.key] = chunk.num_behind
            self._lost_heads += 1
        self._unlink(chunk)

    def take(self, count: int, keep: Collection[Key | None]) -> list[Node] | None:
        """So many chunks are gone, in the order in which they had to leave; or None, and none is.

        Args:
            count: at least as many as should go.
            keep: these do not leave.
        """
        taken: list[Node] = []
        aside: list[Node] = []
        while self._leaves and len(taken) < count:
            used, _push, chunk = heappop(self._leaves)
            if used != chunk.used or chunk.num_behind or not chunk.is_free:
                continue
            if chunk.key in keep:
                aside.append(chunk)
                continue
            taken.append(chunk)
            chunk.is_free = False
            self._unlink(chunk)
        for chunk in aside:
            self._push(chunk)
        if len(taken) < count:
            for chunk in reversed(taken):
                self._link(chunk)
                chunk.is_free = True
                self._push(chunk)
            return None
        for chunk in taken:
            del self._kept[chunk.key]
        return taken

    def _link(self, chunk: Node) -> None:
        if chunk.before is None:
            return
        before = self._kept.get(chunk.before)
        if before is None:
            self._missing[chunk.before] = self._missing.get(chunk.before, 0) + 1
        else:
            before.num_behind += 1

    def _unlink(self, chunk: Node) -> None:
        if chunk.before is None:
            return
        before = self._kept.get(chunk.before)
        if before is None:
            left = self._missing.pop(chunk.before) - 1
            if left:
                self._missing[chunk.before] = left
            return
        before.used = max(before.used, chunk.used)
        before.num_behind -= 1
        if before.is_free and not before.num_behind:
            self._push(before)

    def _push(self, chunk: Node) -> None:
        self._pushes += 1
        heappush(self._leaves, (chunk.used, self._pushes, chunk))
        if len(self._leaves) > 2 * len(self._kept) + _SLACK:  # a pool that never fills takes nothing out
            leaves = [one for one in self._kept.values() if one.is_free and not one.num_behind]
            self._leaves = [(one.used, place, one) for place, one in enumerate(leaves)]
            heapify(self._leaves)
