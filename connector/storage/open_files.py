"""Files of loads that go on, open from one slice of theirs to the next.

A slice of one layer is read in less time than a few files take to open when the core's caches hold nothing of the way
to them, so a load opens its files once. It takes them out for each slice and gives them back, so that no two threads
ever have one file; a slice that ends with its object's last byte gives nothing back. What a load that was given up
has left is closed when it was not used for a while, whether or not the tier is asked for anything: a file that somebody
removed meanwhile keeps its bytes on the disk only for so long.

An open file is no promise that its object is still there: whoever takes it looks.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from lamella.connector.storage.object_format import Header
from lamella.reference.keys import ChunkKey

_MOST_OPEN: Final = 128
_IDLE_S: Final = 2.0
_SHORTEST_S: Final = 0.01


class OpenObject(NamedTuple):
    """A file that is open for reading, what its header says, and for which file: its inode and time of change."""

    place: str
    descriptor: int
    header: Header
    identity: tuple[int, int]


class OpenFiles:
    """Open files that no thread is reading. Thread-safe.

    Args:
        most: files that are kept; what is given beyond is closed.
        idle_s: how long one that nobody takes is kept.
        clock_s: a clock that never goes back.
    """

    def __init__(
        self, most: int = _MOST_OPEN, idle_s: float = _IDLE_S, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._most = most
        self._idle_s = idle_s
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._files: dict[ChunkKey, tuple[OpenObject, float]] = {}  # in the order in which they were given
        self._sweep: threading.Timer | None = None  # there is one while there are files

    def take(self, keys: Sequence[ChunkKey]) -> dict[ChunkKey, OpenObject]:
        """The open files of these objects, the caller's from now on, to give or to close."""
        if not self._files:
            return {}
        with self._lock:
            return {key: self._files.pop(key)[0] for key in keys if key in self._files}

    def give(self, files: Iterable[tuple[ChunkKey, OpenObject]]) -> None:
        """These files are kept for the next slice, as far as there is room."""
        now = self._clock_s()
        spare: list[OpenObject] = []
        with self._lock:
            for key, one in files:
                if key in self._files or len(self._files) >= self._most:
                    spare.append(one)
                else:
                    self._files[key] = (one, now)
            self._look_later(self._idle_s)
        close_all(spare)

    def _look_later(self, delay_s: float) -> None:
        """With the lock: somebody looks for idle files then. Where no thread can be had, the tier's next call does."""
        if self._sweep is not None or not self._files:
            return
        sweep = threading.Timer(delay_s, self._close_later)
        sweep.daemon = True
        with contextlib.suppress(RuntimeError):
            sweep.start()
            self._sweep = sweep

    def _close_later(self) -> None:
        self.close_idle()
        with self._lock:
            self._sweep = None
            if self._files:
                _, given_s = next(iter(self._files.values()))
                self._look_later(max(_SHORTEST_S, given_s + self._idle_s - self._clock_s()))

    def close_idle(self) -> None:
        """What nobody took for too long is closed."""
        if self._files:
            self._close_given_before(self._clock_s() - self._idle_s)

    def make_room(self) -> bool:
        """All are closed; False if there were none."""
        return self._close_given_before(float("inf"))

    def close(self) -> None:
        """All are closed, and what is given from now on is too."""
        with self._lock:
            self._most = 0
            if self._sweep is not None:
                self._sweep.cancel()
        self.make_room()

    def _close_given_before(self, limit_s: float) -> bool:
        idle: list[OpenObject] = []
        with self._lock:
            for key, (one, given_s) in list(self._files.items()):
                if given_s >= limit_s:
                    break
                idle.append(one)
                del self._files[key]
        close_all(idle)
        return bool(idle)


def close_all(files: Iterable[OpenObject]) -> None:
    """None of these files is open any more."""
    for one in files:
        os.close(one.descriptor)
