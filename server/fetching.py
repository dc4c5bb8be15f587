"""Objects that only a tier has are brought into the pool before anybody may lock them.

    asked ──a thread──► found in a tier ──► slots reserved ──► read whole ──► readable
                            └──────── or not: either way it is settled, and the next look-up sees what came

Nobody waits here: a look-up is told that something may come, and asks again. What is asked and read at the same time is
bounded; more is a miss.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from lamella.connector.slice_objects import slice_ranges
from lamella.connector.storage.storage_manager import StorageManager
from lamella.connector.storage.tier import Tier, TierError
from lamella.reference.keys import ChunkKey
from lamella.reference.slices import Slice

_log = logging.getLogger(__name__)
_MAX_OPEN: Final = 64
_SETTLED_NS: Final = 1_000_000_000
"""How long an answer counts before the tiers are asked again."""


class Fetching:
    """Look-ups and reads of tiers in flight, by the first chunk that the pool lacked. Thread-safe.

    Args:
        storage: whose pool is filled.
        tiers: the nearest first.
        threads: that ask and read.
        clock_ns: a monotonic clock.
    """

    def __init__(
        self,
        storage: StorageManager,
        tiers: Sequence[Tier],
        threads: int,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._storage = storage
        self._tiers = tuple(tiers)
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._open: set[ChunkKey] = set()
        self._settled: dict[ChunkKey, int] = {}
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="lamella-fetch")
        self.fetched = self.failed = 0

    def want(self, keys: Sequence[ChunkKey], first: int) -> bool:
        """Whether a tier may bring some of a sequence's chunks from `first` on, which the pool lacks; ask again.

        Args:
            keys: of the sequence's chunks from chunk 0 on.
            first: chunks before it are in the pool, or are not needed.
        """
        if not self._tiers or first == len(keys):
            return False
        after, keys = keys[first - 1] if first else None, keys[first:]
        now_ns = self._clock_ns()
        with self._lock:
            while self._settled and now_ns - next(iter(self._settled.values())) >= _SETTLED_NS:
                del self._settled[next(iter(self._settled))]
            if keys[0] in self._open:
                return True
            if keys[0] in self._settled or len(self._open) >= _MAX_OPEN:
                return False
            self._open.add(keys[0])
        try:
            self._threads.submit(self._fetch, tuple(keys), after)
        except RuntimeError:  # closed
            with self._lock:
                self._open.discard(keys[0])
            return False
        return True

    @property
    def num_open(self) -> int:
        """Look-ups and reads in flight."""
        with self._lock:
            return len(self._open)

    def close(self) -> None:
        """Nothing is read any more."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _fetch(self, keys: tuple[ChunkKey, ...], after: ChunkKey | None) -> None:
        left = keys
        try:
            while left and (came := self._bring(left, after)):
                after, left = left[came - 1], left[came:]
        except Exception:  # a tier's own fault is a miss
            _log.exception("a tier failed")
            self.failed += 1
        finally:
            with self._lock:
                self._open.discard(keys[0])
                self._settled.pop(keys[0], None)  # what was settled last stands last
                self._settled[keys[0]] = self._clock_ns()

    def _bring(self, keys: tuple[ChunkKey, ...], after: ChunkKey | None) -> int:
        """How many of the leading keys are in the pool now, thanks to the nearest tier that has the first."""
        for tier in self._tiers:
            try:
                answers = tier.exists(keys)
            except TierError as error:
                _log.debug("%s counts as empty: %s", tier.name, error)
                continue
            found = answers.index(False) if False in answers else len(answers)
            while found:
                came = self._read(tier, keys[:found], after)
                if came == found:
                    return found
                found = came  # it lost one meanwhile: those before it are worth another read
        return 0

    def _read(self, tier: Tier, keys: tuple[ChunkKey, ...], after: ChunkKey | None) -> int:
        """How many of `keys` could be read; they are readable only if all could."""
        reservation = self._storage.allocate(keys, after)
        if reservation is None:
            return 0  # no room: what is used now comes first
        came = 0
        try:
            layout = self._storage.layout
            ranges = slice_ranges(layout, Slice(0, layout.num_layers))
            views = [self._storage.pool.memory.buffer(slot) for slot in reservation.slots]
            into = [[view[at.offset : at.offset + at.num_bytes] for at in ranges] for view in views]
            try:
                read = tier.get_leading(reservation.keys, ranges, into)
                came = read.num_objects
            finally:
                for parts in (*into, views):
                    for view in parts:
                        view.release()
        finally:
            if came == len(reservation.keys):
                reservation.commit()
                self.fetched += came
            else:
                reservation.abandon()
                self.failed += 1
        if came == len(reservation.keys):
            return len(keys)
        return keys.index(reservation.keys[came])
