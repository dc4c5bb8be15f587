"""Whether the server that one registered with has ended for certain, and with it every copy it was making.

A silent server may only be slow, and its copies may still land; one whose lock on its folder is free, or is another
process's by now, is dead. Asked only of what has not moved for a while: asking takes the lock for a moment.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from pathlib import Path
from typing import Final

from lamella.server.endpoint import LOCK

_PATIENCE_S: Final = 0.25
_BETWEEN_S: Final = 0.1
_SETTLE_S: Final = 0.5
"""After a process's end its device may go on for a moment with what was enqueued."""


class ServerWatch:
    """Watches the server that holds the folder's lock now.

    Args:
        folder: the server's.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._seen = self._identity()
        self._lock = threading.Lock()
        self._next = 0.0
        self._found_dead: float | None = None

    def gone_since(self, begun: float) -> bool:
        """Whether it is dead; not asked before the wait that began at `begun` (`time.monotonic`) is long.

        True only once its device has had time to let go of what was enqueued.
        """
        now = time.monotonic()
        if now - begun < _PATIENCE_S:
            return False
        with self._lock:
            if self._found_dead is None and now >= self._next:
                self._next = now + _BETWEEN_S
                if self._identity() != self._seen or self._is_free():
                    self._found_dead = now
            return self._found_dead is not None and now - self._found_dead >= _SETTLE_S

    def _identity(self) -> tuple[bytes, int] | None:
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            return os.pread(fd, 64, 0), os.fstat(fd).st_mtime_ns
        finally:
            os.close(fd)

    def _is_free(self) -> bool:
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        else:
            return True
        finally:
            os.close(fd)
