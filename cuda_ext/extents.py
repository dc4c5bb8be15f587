"""Free slots as runs of consecutive ones, so that a prefix's objects lie side by side.

Consecutive slots have one stride, and then a slice of a whole prefix is a single 2-D copy at wire rate however short
its runs are; scattered slots pay for every run.

Source: measurement, one strided copy against a batch of runs on an H200: 55 against 9 GB/s at 8 KiB runs.
"""

from __future__ import annotations

import bisect
from typing import NamedTuple


class Run(NamedTuple):
    """Slots `[first, first + num_slots)`."""

    first: int
    num_slots: int


class SlotExtents:
    """The set of free slots. Adjacent free slots always belong to one run (POOL-5).

    Not thread-safe: its owner locks.
    """

    def __init__(self) -> None:
        self._firsts: list[int] = []  # ascending
        self._count_by_first: dict[int, int] = {}
        self._by_count: list[tuple[int, int]] = []  # (count, first), ascending
        self._num_free = 0

    def __len__(self) -> int:
        """Free slots."""
        return self._num_free

    def runs(self) -> tuple[Run, ...]:
        """Every free run, by first slot."""
        return tuple(Run(first, self._count_by_first[first]) for first in self._firsts)

    def release(self, first: int, count: int = 1) -> None:
        """Slots `[first, first + count)` are free, in one run with free neighbours.

        Raises:
            ValueError: a negative slot or an empty range.
            RuntimeError: a slot that is free already.
        """
        if first < 0 or count < 1:
            raise ValueError(f"a run needs a first slot >= 0 and at least one slot, got first {first}, count {count}")
        end = first + count
        place = bisect.bisect_left(self._firsts, first)
        before = self._firsts[place - 1] if place else None
        after = self._firsts[place] if place < len(self._firsts) else None
        before_end = first if before is None else before + self._count_by_first[before]
        if (before is not None and before_end > first) or (after is not None and after < end):
            raise RuntimeError(f"slots {first} .. {end - 1} hold one that is free already: released twice")
        if after == end:
            end += self._remove(after)
        if before is not None and before_end == first:
            self._remove(before)
            first = before
        self._insert(first, end)

    def take(self, count: int, after: int | None = None) -> tuple[Run, ...] | None:
        """`count` free slots in as few runs as there can be, or None, with nothing taken, if too few are free.

        Args:
            count: slots wanted, at least 1.
            after: a slot whose continuation is preferred where the run behind it is long enough, so that a prefix
                that grows stays consecutive.

        Raises:
            ValueError: count < 1.
        """
        if count < 1:
            raise ValueError(f"count must be at least 1, got {count}")
        if count > self._num_free:
            return None
        if after is not None and self._count_by_first.get(after + 1, 0) >= count:
            return (self._take_from(after + 1, count),)
        taken: list[Run] = []
        while count:
            # Best fit where one run suffices; the longest while none does. No other choice needs fewer runs.
            fit = bisect.bisect_left(self._by_count, (count, -1))
            length, first = self._by_count[min(fit, len(self._by_count) - 1)]
            taken.append(self._take_from(first, min(length, count)))
            count -= taken[-1].num_slots
        return tuple(taken)

    def _take_from(self, first: int, count: int) -> Run:
        length = self._remove(first)
        if length > count:
            self._insert(first + count, first + length)
        return Run(first, count)

    def _insert(self, first: int, end: int) -> None:
        bisect.insort(self._firsts, first)
        self._count_by_first[first] = end - first
        bisect.insort(self._by_count, (end - first, first))
        self._num_free += end - first

    def _remove(self, first: int) -> int:
        count = self._count_by_first.pop(first)
        del self._firsts[bisect.bisect_left(self._firsts, first)]
        del self._by_count[bisect.bisect_left(self._by_count, (count, first))]
        self._num_free -= count
        return count
