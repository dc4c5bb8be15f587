"""Where a server is found, and who may speak to it.

A server owns a folder, mode 0700: its socket lies there (an ipc socket has no mode that counts on every system), the
lock that keeps a second server out, and a file for each client process. The folder's owner and mode are checked by both
sides, and the kernel's word on the peer's user by the server.

A client process holds a lock on its own file for as long as it lives; the kernel drops it with the process, also on
SIGKILL. A lock is asked rather than a pid, because containers that share the folder need not share pids (SRV-2).

TCP only with CURVE: both sides have keys, and the server a folder of the public keys that it lets in (SRV-5).
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

SOCKET: Final = "server.sock"
LOCK: Final = "server.lock"
"""Held by the folder's server for as long as it lives."""
_ALIVE: Final = re.compile(r"alive-\d{1,10}-[0-9a-f]{16}")
_LOOKED_AT_S: Final = 0.5
"""A client that asks whether an earlier server lives holds the lock for a moment (`peer_watch`)."""
_MAX_SOCKET_PATH: Final = 107  # sockaddr_un


def default_folder() -> Path:
    """`$XDG_RUNTIME_DIR/lamella`, or `/tmp/lamella-UID` where there is no such directory."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(runtime) / "lamella" if runtime else Path(f"/tmp/lamella-{os.geteuid()}")


def make_folder(folder: Path) -> None:
    """The folder is there, and this user's alone.

    Raises:
        PermissionError: it is another's, or others may enter it.
        OSError: it cannot be made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_folder(folder)


def check_folder(folder: Path) -> None:
    """The folder is this user's alone, so whoever listens in it is too.

    Raises:
        FileNotFoundError: there is none: no server was started there.
        PermissionError: it is another's, or others may enter it.
    """
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(
            f"{folder} must be a folder of user {os.geteuid()} alone (mode 0700), got owner {found.st_uid} and mode "
            f"{stat.S_IMODE(found.st_mode):04o}: chmod 700, or choose another"
        )


def ipc_endpoint(folder: Path) -> str:
    """The address of the server in a folder.

    Raises:
        ValueError: a path longer than a socket's may be.
    """
    path = folder.resolve() / SOCKET
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
        raise ValueError(
            f"a socket's path may have {_MAX_SOCKET_PATH} bytes, {path} has {len(os.fsencode(path))}: name a shorter "
            "folder"
        )
    return f"ipc://{path}"


class ServerLock:
    """This process is the only server of the folder, until `close` or its end.

    Raises:
        RuntimeError: another is.
    """

    def __init__(self, folder: Path) -> None:
        self._fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        until = time.monotonic() + _LOOKED_AT_S
        while not (taken := _lock(self._fd)) and time.monotonic() < until:
            time.sleep(_LOOKED_AT_S / 50)
        if not taken:
            pid = os.pread(self._fd, 32, 0).decode(errors="replace").strip()
            os.close(self._fd)
            raise RuntimeError(f"a server (pid {pid}) serves {folder} already: stop it, or choose another")
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        """Another may take over. A second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


class AliveMark:
    """A client process's file, locked for as long as the process lives or until `close`."""

    def __init__(self, folder: Path) -> None:
        while True:
            self.name = f"alive-{os.getpid()}-{secrets.token_hex(8)}"
            self._path = folder / self.name
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_nlink:
                break
            os.close(fd)  # the server took it for a dead one's before it was locked
        self._close = weakref.finalize(self, _close_mark, fd, self._path, os.getpid())
        _close_in_children(fd, weakref.ref(self))

    def close(self) -> None:
        """The process counts as gone. A second call does nothing."""
        self._close()


def _close_mark(fd: int, path: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child has closed its copy, and the name is not its own
        path.unlink(missing_ok=True)
        os.close(fd)


def _close_in_children(fd: int, mark: weakref.ref[AliveMark]) -> None:
    """A forked child shares the lock and would keep it beyond its parent's end."""

    def close() -> None:
        found = mark()
        if found is not None and found._close.alive:
            os.close(fd)

    os.register_at_fork(after_in_child=close)


def is_alive(folder: Path, name: str) -> bool:
    """Whether the process that made this mark lives; the mark of one that does not is removed.

    Where it cannot be told (no descriptor left), it lives: what it holds is not to be taken from it by mistake.

    Raises:
        ValueError: no name of a mark.
    """
    if not _ALIVE.fullmatch(name):
        raise ValueError(f"not the name of a client's file: {name!r}")
    try:
        fd = os.open(folder / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        if not _lock(fd):
            return True
        (folder / name).unlink(missing_ok=True)
        return False
    finally:
        os.close(fd)


def reclaim_marks(folder: Path) -> int:
    """Marks of processes that are gone are removed; how many. None are in a folder that is gone itself."""
    try:
        names = [name for name in os.listdir(folder) if _ALIVE.fullmatch(name)]
    except FileNotFoundError:
        return 0
    return sum(not is_alive(folder, name) for name in names)


@dataclass(frozen=True, slots=True, repr=False)
class CurveKeys:
    """A side's own key pair and, for a client, the server's public key; 40 bytes of Z85 each."""

    public: bytes
    secret: bytes
    server: bytes = b""

    @classmethod
    def load(cls, secret_file: Path, server_file: Path | None = None) -> Self:
        """Keys as `zmq.auth.create_certificates` writes them.

        Raises:
            PermissionError: others may read the secret.
            OSError, ValueError: a file that is missing, or has no such key.
        """
        import zmq.auth

        mode = secret_file.stat().st_mode
        if mode & 0o077:
            raise PermissionError(f"{secret_file} must be its owner's alone, got mode {stat.S_IMODE(mode):04o}")
        public, secret = zmq.auth.load_certificate(secret_file)
        if not secret:
            raise ValueError(f"{secret_file} has no secret key: name the file that ends in .key_secret")
        server = zmq.auth.load_certificate(server_file)[0] if server_file is not None else b""
        return cls(public, secret, server)
