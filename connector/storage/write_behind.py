"""Objects on their way from the pool to one tier, behind the engine's back and never more than a limit.

The engine never waits for a tier. Objects that wait stay pinned in the pool, so a tier that is slower than the engine
stores would in time pin all of it; beyond the limit an object is therefore not sent to that tier at all, and counted.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from lamella.connector.storage.tier import Tier, TierError
from lamella.reference.keys import ChunkKey

_log = logging.getLogger(__name__)


class WriteCounts(NamedTuple):
    """What became of the objects that were to be kept; `pending_bytes` is of this moment."""

    kept: int
    failed: int
    skipped: int
    pending_bytes: int


class WriteBehind:
    """One tier's puts, one after another on a thread of their own, so that no tier holds up another or a read.

    Args:
        tier: where to.
        max_bytes: of the objects that wait; one object may always.
    """

    def __init__(self, tier: Tier, max_bytes: int) -> None:
        if max_bytes < 1:
            raise ValueError(f"max_bytes must be at least 1, got {max_bytes}")
        self.tier = tier
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept = self._failed = self._skipped = self._pending_bytes = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lamella-put")

    def put(
        self, key: ChunkKey, open_view: Callable[[], memoryview], num_bytes: int, done: Callable[[], None]
    ) -> Future[None]:
        """The object is on its way, or skipped; the future says how it ended, with TierError if it is not kept.

        Args:
            open_view: the object's bytes, opened when their turn comes and released again.
            done: called once when the bytes are not needed any more, before the future resolves.
        """
        refused: str | None = None
        with self._lock:
            if self._pending_bytes and self._pending_bytes + num_bytes > self._max_bytes:
                self._skipped += 1
                refused = f"{self._pending_bytes} bytes wait for it, the limit is {self._max_bytes}"
            else:
                self._pending_bytes += num_bytes
        if refused is None:
            try:
                return self._thread.submit(self._put, key, open_view, num_bytes, done)
            except RuntimeError:  # closed
                refused = "it is closed"
                with self._lock:
                    self._pending_bytes -= num_bytes
                    self._skipped += 1
        done()
        skipped: Future[None] = Future()
        skipped.set_exception(TierError(f"{self.tier.name} does not get this object: {refused}"))
        return skipped

    def counts(self) -> WriteCounts:
        """Of this moment."""
        with self._lock:
            return WriteCounts(self._kept, self._failed, self._skipped, self._pending_bytes)

    def close(self) -> None:
        """Nothing more is taken; the thread ends with its work."""
        self._thread.shutdown(wait=False)

    def _put(
        self, key: ChunkKey, open_view: Callable[[], memoryview], num_bytes: int, done: Callable[[], None]
    ) -> None:
        kept = False
        try:
            with open_view() as view:
                self.tier.put(key, view)
            kept = True
        except TierError as error:
            _log.debug("%s did not keep %s: %s", self.tier.name, key.prefix.hex()[:16], error)
            raise
        finally:
            with self._lock:
                self._pending_bytes -= num_bytes
                self._kept += kept
                self._failed += not kept
            done()
