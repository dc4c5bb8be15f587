"""The host pool of a simulated instance: which prefixes are held, and which leave, by the engine's own rule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lamella.reference.prefix_ages import Kept, PrefixAges


class PrefixPool:
    """Chunks of equal size by id, at most as many as fit.

    What leaves is always the end of a prefix, and the longest unused (KEEP-1).

    Args:
        capacity_bytes: size of the pool; 0 holds nothing.
        chunk_bytes: size of a chunk.

    Raises:
        ValueError: a negative capacity, or a chunk below one byte.

    >>> pool = PrefixPool(capacity_bytes=30, chunk_bytes=10)
    >>> pool.insert([1, 2, 3]); pool.insert([1, 4])
    >>> pool.held_prefix([1, 2, 3]), pool.held_prefix([1, 4])
    (2, 2)
    """

    def __init__(self, capacity_bytes: int, chunk_bytes: int) -> None:
        if capacity_bytes < 0:
            raise ValueError(f"capacity_bytes must be at least 0, got {capacity_bytes}")
        if chunk_bytes < 1:
            raise ValueError(f"chunk_bytes must be at least 1, got {chunk_bytes}")
        self._slots = capacity_bytes // chunk_bytes
        self._ages: PrefixAges[int, Kept[int]] = PrefixAges()

    def __len__(self) -> int:
        """Chunks held."""
        return len(self._ages.kept)

    def __contains__(self, chunk_id: int) -> bool:
        """Whether the chunk is held."""
        return chunk_id in self._ages.kept

    def held_prefix(self, chunk_ids: Iterable[int]) -> int:
        """How many chunks from the first on are held; changes nothing."""
        held = 0
        for chunk_id in chunk_ids:
            if chunk_id not in self._ages.kept:
                break
            held += 1
        return held

    def use(self, chunk_ids: Sequence[int]) -> int:
        """The held prefix, now the most recently used; returns its length in chunks."""
        held = self.held_prefix(chunk_ids)
        self._ages.free([self._ages.kept[chunk_id] for chunk_id in chunk_ids[:held]])
        return held

    def insert(self, chunk_ids: Sequence[int]) -> None:
        """The chunks are the most recently used; of a prefix longer than the pool only the beginning stays."""
        fitting = chunk_ids[: self._slots]
        for before, chunk_id in zip((None, *fitting), fitting, strict=False):
            if chunk_id not in self._ages.kept:
                self._ages.add([Kept(chunk_id, before)])
        self._ages.free([self._ages.kept[chunk_id] for chunk_id in fitting])
        self._ages.take(len(self) - self._slots, ())
