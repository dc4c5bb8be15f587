"""Memory for host objects: anonymous, or shared with other processes, and never left behind.

A shared memory is a file of `/dev/shm`, mode 0600, created with O_EXCL under a random name. Everybody who maps it holds
a shared `flock` on it, which the kernel drops with the process, also on SIGKILL. So a file nobody locks is stale, and
the next creator on the machine removes it (SHM-1). A lock is asked rather than a pid, because containers that share
`/dev/shm` need not share pids. Attaching never unlinks (SHM-2).

`unlink()` may be called as soon as everybody has attached; then not even a stale file can remain. Who comes later
attaches through a descriptor, inherited or received.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import stat
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Final

FOLDER: Final = Path("/dev/shm")
PREFIX: Final = "lamella-"

_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14; absent from mmap before Python 3.13
_libc = ctypes.CDLL(None, use_errno=True)


class HostMemory:
    """A mapping of `num_bytes` bytes, page-aligned and zero at first; made by the class methods.

    Close it when no copy can touch it any more. One that is dropped instead leaves no name behind either.
    """

    def __init__(self, mapping: mmap.mmap, num_bytes: int, fd: int | None, path: Path | None) -> None:
        self._mapping = mapping
        self._fd = fd
        self._view: ctypes.Array[ctypes.c_char] | None = (ctypes.c_char * num_bytes).from_buffer(mapping)
        self.num_bytes = num_bytes
        self.path = path
        """Where others find what this process created; None for anonymous and attached memory, and after `unlink`."""
        self._unlink = None if path is None else weakref.finalize(self, _unlink_if_creator, path, os.getpid())

    @classmethod
    def anonymous(cls, num_bytes: int) -> HostMemory:
        """Memory of this process alone. A forked child does not get it: copies may be in flight on its pages.

        Raises:
            ValueError: num_bytes < 1.
            OSError: the machine refuses; the message carries the size.
        """
        _check_size(num_bytes)
        try:
            mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as refused:
            raise OSError(refused.errno, f"cannot map {num_bytes} bytes of host memory ({refused.strerror})") from None
        mapping.madvise(mmap.MADV_DONTFORK)
        with contextlib.suppress(OSError):  # a kernel built without huge pages; only start-up is slower then
            mapping.madvise(mmap.MADV_HUGEPAGE)
        return cls(mapping, num_bytes, None, None)

    @classmethod
    def create(cls, num_bytes: int, folder: Path = FOLDER) -> HostMemory:
        """Memory that other processes of this user can attach by `path`, after stale ones were removed.

        Raises:
            ValueError: num_bytes < 1.
            OSError: the folder is missing, or has not that many bytes; the message says how to give it more.
        """
        _check_size(num_bytes)
        reclaim_stale(folder)
        space = os.statvfs(folder)
        available = space.f_bavail * space.f_frsize
        if num_bytes > available:
            raise OSError(
                errno.ENOSPC,
                f"{folder} has {available} bytes left and the pool needs {num_bytes}: make the pool smaller, or mount "
                "a larger one (docker: --shm-size; Kubernetes: an emptyDir of medium Memory)",
            )
        while True:
            path = folder / f"{PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            fcntl.flock(fd, fcntl.LOCK_SH)
            if os.fstat(fd).st_nlink:
                break
            os.close(fd)  # another creator took it for stale before it was locked
        try:
            os.fchmod(fd, 0o600)  # whatever the umask
            os.ftruncate(fd, num_bytes)
            return cls(mmap.mmap(fd, num_bytes), num_bytes, fd, path)
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise

    @classmethod
    def attach(cls, source: Path | int, num_bytes: int) -> HostMemory:
        """Another process's memory, by path or by descriptor (which stays the caller's).

        Raises:
            PermissionError: the file belongs to another user, or others may open it.
            ValueError: it is not a file of `num_bytes` bytes.
            OSError: it does not exist (any more).
        """
        fd = os.dup(source) if isinstance(source, int) else os.open(source, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_size != num_bytes:
                raise ValueError(f"{source} must be a file of {num_bytes} bytes, got one of {found.st_size}")
            if found.st_uid != os.geteuid() or found.st_mode & 0o077:
                raise PermissionError(
                    f"{source} must belong to user {os.geteuid()} alone (mode 0600), got owner {found.st_uid} and "
                    f"mode {stat.S_IMODE(found.st_mode):04o}"
                )
            fcntl.flock(fd, fcntl.LOCK_SH)
            if isinstance(source, Path) and not os.fstat(fd).st_nlink:
                raise FileNotFoundError(errno.ENOENT, "its creator is gone", str(source))
            return cls(mmap.mmap(fd, num_bytes), num_bytes, fd, None)
        except BaseException:
            os.close(fd)
            raise

    @property
    def address(self) -> int:
        """Address of the first byte.

        Raises:
            RuntimeError: the memory is closed.
        """
        return ctypes.addressof(self.buffer)

    @property
    def buffer(self) -> ctypes.Array[ctypes.c_char]:
        """The bytes, as a writable buffer; `close` refuses while a view made from it lives.

        Raises:
            RuntimeError: the memory is closed.
        """
        if self._view is None:
            raise RuntimeError("this memory is closed: attach or create another")
        return self._view

    @property
    def fd(self) -> int | None:
        """Descriptor to hand to another process; None for anonymous memory."""
        return self._fd

    def populate(self, offset: int, num_bytes: int) -> None:
        """Pages of `[offset, offset + num_bytes)` exist, so that neither a copy nor a registration faults on them.

        Contents are kept, and other threads may use the memory meanwhile. Offset and length are whole pages.

        Raises:
            OSError: the machine, the container or `/dev/shm` has no such pages left.
        """
        if self._fd is not None:
            os.posix_fallocate(self._fd, offset, num_bytes)  # ENOSPC here, instead of SIGBUS in a copy
        start = ctypes.c_void_p(self.address + offset)
        while _libc.madvise(start, ctypes.c_size_t(num_bytes), _MADV_POPULATE_WRITE):
            code = ctypes.get_errno()
            if code == errno.EINVAL:  # an older kernel: the registration or the first copy touches the pages
                return
            if code not in (errno.EINTR, errno.EAGAIN):
                raise OSError(code, f"cannot back {num_bytes} bytes of the pool with memory ({os.strerror(code)})")

    def unlink(self) -> None:
        """The name is gone; those who have mapped the memory keep it. A second call does nothing."""
        if self._unlink is not None:
            self._unlink()
            self.path = None

    def close(self) -> None:
        """The mapping is gone, as far as this process goes; the name too if this process created it.

        Raises:
            RuntimeError: a view of the bytes is still alive.
        """
        if self._view is None:
            return
        self._view = None
        try:
            self._mapping.close()
        except BufferError:
            self._view = (ctypes.c_char * self.num_bytes).from_buffer(self._mapping)
            raise RuntimeError("views of this memory are still alive: drop them, then close it") from None
        self.unlink()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _unlink_if_creator(path: Path, creator: int) -> None:
    if os.getpid() == creator:  # a forked child must not take the name away from its parent
        path.unlink(missing_ok=True)


def reclaim_stale(folder: Path = FOLDER) -> tuple[Path, ...]:
    """Removes this user's memories that no process holds any more, and returns them."""
    removed: list[Path] = []
    for path in _ours(folder):
        with contextlib.suppress(OSError):  # gone, or just taken by another reclaimer
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                removed.append(path)
            finally:
                os.close(fd)
    return tuple(removed)


def _ours(folder: Path) -> Iterator[Path]:
    for path in folder.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            found = path.lstat()
            if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
                yield path


def _check_size(num_bytes: int) -> None:
    if num_bytes < 1:
        raise ValueError(f"num_bytes must be at least 1, got {num_bytes}")
