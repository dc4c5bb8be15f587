"""What leaves a pool next, found by looking at everything each time: what `PrefixAges` must say without looking."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

Prefix = tuple[int, ...]
"""A chunk, by what it and everything before it hold."""


@dataclass
class PrefixModel:
    """Chunks that are kept, and when each was last used."""

    used: dict[Prefix, int] = field(default_factory=dict)
    now: int = 0

    def add(self, chunks: Sequence[Prefix]) -> None:
        self.used |= dict.fromkeys(chunks, 0)

    def use(self, chunks: Sequence[Prefix]) -> None:
        """Of one prompt in its order; the first is the most recent."""
        for chunk in reversed(chunks):
            self.now += 1
            self.used[chunk] = self.now

    def remove(self, chunk: Prefix) -> None:
        used = self.used.pop(chunk)
        if chunk[:-1] in self.used:  # KEEP-2
            self.used[chunk[:-1]] = max(self.used[chunk[:-1]], used)

    def leaving(self, count: int, free: Collection[Prefix], keep: Collection[Prefix]) -> list[Prefix] | None:
        """The next `count` to leave, the longest unused first, or None where there are not as many."""
        rest = PrefixModel(dict(self.used))
        found: list[Prefix] = []
        while len(found) < count:
            ends = set(rest.used) - {chunk[:-1] for chunk in rest.used}  # KEEP-1
            able = [chunk for chunk in ends if chunk in free and chunk not in keep]
            if not able:
                return None
            found.append(min(able, key=rest.used.__getitem__))
            rest.remove(found[-1])
        return found

    def headless(self) -> set[Prefix]:
        """Chunks that are kept without the one before them."""
        return {chunk for chunk in self.used if chunk[:-1] and chunk[:-1] not in self.used}


def prefixes(document: Sequence[int]) -> list[Prefix]:
    """A document's chunks in order."""
    return [tuple(document[: end + 1]) for end in range(len(document))]
