"""How much of its folder a file tier may use, and for how long: old objects leave, the least recently used first.

A file's modification time is when its object was written, its access time when it was last read; the tier sets both
itself, so that mount options do not matter.

The folder is scanned when it is opened, and again whenever this process has written a sixteenth of the limit. Objects
of other processes are counted from the next scan on, so a folder that P processes fill together can exceed its limit
by P/16 for that long; one process alone never exceeds it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from lamella.connector.storage.tier import TierError
from lamella.reference.whole import check_whole

OBJECT_SUFFIX: Final = ".kv"
_ROOM_TO_MAKE: Final = 0.9  # of the limit: one scan makes room for many puts
_LOOK_AGAIN: Final = 16  # parts of the limit that are written between scans

_log = logging.getLogger(__name__)


class StoredFile(NamedTuple):
    """One object's file."""

    path: Path
    num_bytes: int
    written_ns: int
    used_ns: int


def stored_files(folder: Path) -> Iterator[StoredFile]:
    """Every object's file below `folder`, of every format and key space, in no order."""
    for path in folder.rglob(f"*{OBJECT_SUFFIX}"):
        try:
            now = path.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue  # another process removed it just now
        yield StoredFile(path, now.st_size, now.st_mtime_ns, now.st_atime_ns)


class FileSpace:
    """The room that a folder's objects take. Thread-safe.

    Args:
        folder: of the tier.
        max_bytes: the limit, headers included; None: the disk's.
        ttl_ns: how long after it was written an object is kept; None: without end.
        clock_ns: wall clock.

    Raises:
        ValueError: a limit or time that is not positive.
        OSError: the folder cannot be read.
    """

    def __init__(self, folder: Path, max_bytes: int | None, ttl_ns: int | None, clock_ns: Callable[[], int]) -> None:
        if max_bytes is not None:
            check_whole("max_bytes", max_bytes, 1)
        if ttl_ns is not None and ttl_ns < 1:
            raise ValueError(f"ttl_ns must be positive, got {ttl_ns}")
        self._folder = folder
        self._max_bytes = max_bytes
        self._ttl_ns = ttl_ns
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._used_bytes = 0
        self._writing_bytes = 0
        self._put_bytes = 0  # since the last scan
        if max_bytes is not None or ttl_ns is not None:
            with self._lock:
                self._scan(0)

    @property
    def used_bytes(self) -> int:
        """What is known to be used; 0 without a limit."""
        with self._lock:
            return self._used_bytes

    def is_expired(self, written_ns: int) -> bool:
        """Whether an object written then has outlived its time."""
        return self._ttl_ns is not None and self._clock_ns() - written_ns >= self._ttl_ns

    @contextmanager
    def taken(self, num_bytes: int) -> Iterator[None]:
        """Room for a file that is written in the block; it stays taken if the block ends well.

        Raises:
            TierError: a file larger than the limit.
            OSError: the folder cannot be read.
        """
        if self._max_bytes is None:
            yield
            return
        if num_bytes > self._max_bytes:
            raise TierError(f"a file of {num_bytes} bytes can never be kept below a limit of {self._max_bytes}")
        with self._lock:
            self._put_bytes += num_bytes
            full = self._used_bytes + self._writing_bytes + num_bytes > self._max_bytes
            if full or self._put_bytes * _LOOK_AGAIN > self._max_bytes:
                self._scan(self._writing_bytes + num_bytes)
            self._writing_bytes += num_bytes
        kept = 0
        try:
            yield
            kept = num_bytes
        finally:
            with self._lock:
                self._writing_bytes -= num_bytes
                self._used_bytes += kept

    def freed(self, num_bytes: int) -> None:
        """A file of this size was removed."""
        with self._lock:
            self._used_bytes = max(0, self._used_bytes - num_bytes)

    def _scan(self, wanted_bytes: int) -> None:
        """What is used is counted anew; what has expired is gone, and if there is no room, the least recently used."""
        kept: list[StoredFile] = []
        for file in stored_files(self._folder):
            if self.is_expired(file.written_ns):
                file.path.unlink(missing_ok=True)
            else:
                kept.append(file)
        self._put_bytes = 0
        used = sum(file.num_bytes for file in kept)
        if self._max_bytes is not None and used + wanted_bytes > self._max_bytes:
            goal = max(0, min(int(self._max_bytes * _ROOM_TO_MAKE), self._max_bytes - wanted_bytes))
            kept.sort(key=lambda file: file.used_ns)
            before = used
            for file in kept:
                if used <= goal:
                    break
                file.path.unlink(missing_ok=True)
                used -= file.num_bytes
            _log.info("%s: %d bytes of the least recently used objects made room", self._folder, before - used)
        self._used_bytes = used


def mark_used(descriptor: int, now_ns: int) -> None:
    """The open file was read now; when it was written stays."""
    os.utime(descriptor, ns=(now_ns, os.fstat(descriptor).st_mtime_ns))
