"""A circuit breaker: what has failed several times in a row is left alone for a while.

    CLOSED ──failures in a row──► OPEN ──retry time over──► HALF_OPEN ──success──► CLOSED
                                    ▲                            └──failure──┐
                                    └────────────────────────────────────────┘

Without it every request of a busy engine would wait for the same dead disk or server before it computes.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lamella.connector.storage.tier import Leading, NoSpaceError, Tier, TierError
from lamella.reference.keys import ChunkKey
from lamella.reference.layout import ByteRange

if TYPE_CHECKING:
    from collections.abc import Iterator

_log = logging.getLogger(__name__)


class CircuitState(enum.Enum):
    """See the module's picture."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class CircuitBreaker:
    """Whether to ask something that may be failing. Thread-safe.

    Args:
        name: of what it guards, for logs.
        max_failures: failures in a row that open it.
        retry_after_ns: how long it stays open before one try is let through.
        clock_ns: a monotonic clock.

    Raises:
        ValueError: max_failures below 1, or a negative time.
    """

    def __init__(self, name: str, max_failures: int, retry_after_ns: int, clock_ns: Callable[[], int]) -> None:
        if max_failures < 1:
            raise ValueError(f"max_failures must be at least 1, got {max_failures}")
        if retry_after_ns < 0:
            raise ValueError(f"retry_after_ns must not be negative, got {retry_after_ns}")
        self._name = name
        self._max_failures = max_failures
        self._retry_after_ns = retry_after_ns
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._failures = 0
        self._opened_ns: int | None = None
        self._trying = False

    @property
    def state(self) -> CircuitState:
        """The state now."""
        with self._lock:
            return self._state()

    def allows(self) -> bool:
        """Whether to ask now. While half open, one caller is let through until it reports how that went."""
        with self._lock:
            state = self._state()
            if state is CircuitState.HALF_OPEN and not self._trying:
                self._trying = True
                return True
            return state is CircuitState.CLOSED

    def succeeded(self) -> None:
        """It served: closed, and what failed before is forgotten."""
        with self._lock:
            if self._opened_ns is not None:
                _log.warning("%s serves again", self._name)
            self._failures, self._opened_ns, self._trying = 0, None, False

    def failed(self, reason: str) -> None:
        """It did not serve; said when that opens the circuit."""
        with self._lock:
            self._failures += 1
            if self._opened_ns is not None or self._failures >= self._max_failures:
                if self._opened_ns is None:
                    _log.warning("%s is left alone after %d failures: %s", self._name, self._failures, reason)
                self._opened_ns, self._trying = self._clock_ns(), False

    def _state(self) -> CircuitState:
        if self._opened_ns is None:
            return CircuitState.CLOSED
        waited_ns = self._clock_ns() - self._opened_ns
        return CircuitState.HALF_OPEN if waited_ns >= self._retry_after_ns else CircuitState.OPEN


class GuardedTier:
    """A tier behind a circuit breaker: while that is open every call raises TierError at once.

    A missing object, a caller's mistake and a full disk are answers, not failures: what the disk holds can be read.
    It is itself a `Tier`.
    """

    def __init__(self, tier: Tier, breaker: CircuitBreaker) -> None:
        self._tier = tier
        self.breaker = breaker

    @property
    def name(self) -> str:
        """The guarded tier's."""
        return self._tier.name

    def exists(self, keys: Sequence[ChunkKey]) -> tuple[bool, ...]:
        """As `Tier.exists`."""
        with self._asked():
            return self._tier.exists(keys)

    def get_ranges(self, key: ChunkKey, ranges: Sequence[ByteRange], into: Sequence[memoryview]) -> None:
        """As `Tier.get_ranges`."""
        with self._asked():
            self._tier.get_ranges(key, ranges, into)

    def get_leading(
        self, keys: Sequence[ChunkKey], ranges: Sequence[ByteRange], into: Sequence[Sequence[memoryview]]
    ) -> Leading:
        """As `Tier.get_leading`; while the circuit is open, nothing can be had."""
        if not self.breaker.allows():
            return Leading(0, self._left_alone())
        try:
            read = self._tier.get_leading(keys, ranges, into)
        except BaseException as error:
            self._report(error)
            raise
        self._report(read.error)
        return read

    def put(self, key: ChunkKey, data: memoryview) -> None:
        """As `Tier.put`."""
        with self._asked():
            self._tier.put(key, data)

    def delete(self, key: ChunkKey) -> bool:
        """As `Tier.delete`."""
        with self._asked():
            return self._tier.delete(key)

    def close(self) -> None:
        """As `Tier.close`, whatever the circuit's state."""
        self._tier.close()

    @contextmanager
    def _asked(self) -> Iterator[None]:
        if not self.breaker.allows():
            raise self._left_alone()
        try:
            yield
        except BaseException as error:
            self._report(error)
            raise
        self._report(None)

    def _left_alone(self) -> TierError:
        return TierError(f"{self.name} failed before and is left alone for now")

    def _report(self, error: BaseException | None) -> None:
        if error is None or isinstance(error, KeyError | ValueError | NoSpaceError):
            self.breaker.succeeded()
        else:
            self.breaker.failed(str(error))
