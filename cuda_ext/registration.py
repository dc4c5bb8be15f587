"""Making host memory reachable for a device, piece by piece, beside the work.

Registering costs seconds for tens of gigabytes, so it runs on a thread of its own, one piece after another, and a piece
is usable as soon as it is done. A piece that fails stays out for good and is reported (POOL-6): handed out regardless,
its copies would silently take the slow pageable path.
"""

from __future__ import annotations

import ctypes
import enum
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

_libc = ctypes.CDLL(None, use_errno=True)


class RegistrationError(OSError):
    """Host memory could not be made reachable for the device; the message carries the limits in force."""


class Registrar(Protocol):
    """How one device wants its host memory prepared."""

    @property
    def name(self) -> str:
        """For messages."""

    def register(self, address: int, num_bytes: int) -> None:
        """The range is reachable by the device. Called from the registering thread.

        Raises:
            OSError: it is not.
        """

    def unregister(self, address: int, num_bytes: int) -> None:
        """Undoes `register` of exactly this range."""


class NoRegistrar:
    """For the CPU device: host memory is reachable as it is."""

    name = "cpu"

    def register(self, address: int, num_bytes: int) -> None:
        """Nothing to do."""

    def unregister(self, address: int, num_bytes: int) -> None:
        """Nothing to do."""


class LockRegistrar:
    """Keeps the memory from being swapped out (`mlock`); for hosts that overcommit, with any device."""

    name = "mlock"

    def register(self, address: int, num_bytes: int) -> None:
        """The range stays in memory.

        Raises:
            OSError: over RLIMIT_MEMLOCK, or out of memory.
        """
        if _libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes)):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def unregister(self, address: int, num_bytes: int) -> None:
        """The range may be swapped out again."""
        _libc.munlock(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes))


class PieceState(enum.Enum):
    """What became of a piece."""

    PENDING = "pending"
    READY = "ready"
    FAILED = "failed"


class FailedPiece(NamedTuple):
    """A piece that stays out, and why."""

    piece: int
    error: OSError


class RegistrationReport(NamedTuple):
    """Pieces by state, at one moment."""

    ready: int
    pending: int
    failed: tuple[FailedPiece, ...]


class Registration:
    """Registers pieces `0 .. num_pieces-1` of one memory, in order, on a thread that ends with the last.

    Args:
        base: address of piece 0, page-aligned.
        piece_bytes: bytes of a piece; whole pages.
        total_bytes: bytes of all pieces; the last may be shorter.
        registrar: makes a range reachable.
        populate: gives the pages of `(offset, num_bytes)`; may raise OSError.
        on_ready: called from the thread with each piece's index, after the piece is READY.

    Raises:
        RegistrationError: from the constructor, if piece 0 fails: a pool without memory is no pool.
    """

    def __init__(
        self,
        base: int,
        piece_bytes: int,
        total_bytes: int,
        registrar: Registrar,
        populate: Callable[[int, int], None],
        on_ready: Callable[[int], None] = lambda piece: None,
    ) -> None:
        self._base = base
        self._piece_bytes = piece_bytes
        self._total_bytes = total_bytes
        self._registrar = registrar
        self._populate = populate
        self._on_ready = on_ready
        self._states = [PieceState.PENDING] * -(-total_bytes // piece_bytes)
        self._failed: list[FailedPiece] = []
        self.leading_ready = 0
        """Pieces from piece 0 on that are all READY; read without a lock."""
        self._stopping = False
        self._changed = threading.Condition()
        if error := self._register(0):
            raise error
        self._thread = threading.Thread(target=self._register_rest, name="lamella-register", daemon=True)
        self._thread.start()

    def state(self, piece: int) -> PieceState:
        """The piece's state now; READY and FAILED are final."""
        with self._changed:
            return self._states[piece]

    def report(self) -> RegistrationReport:
        """Pieces by state now."""
        with self._changed:
            return RegistrationReport(
                self._states.count(PieceState.READY), self._states.count(PieceState.PENDING), tuple(self._failed)
            )

    def wait(self, timeout_s: float) -> RegistrationReport:
        """Waits until no piece is pending.

        Raises:
            TimeoutError: some still are after `timeout_s` seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: PieceState.PENDING not in self._states or self._stopping, timeout_s):
                pending = self._states.count(PieceState.PENDING)
                raise TimeoutError(f"{pending} pieces are still being registered after {timeout_s} s")
        return self.report()

    def close(self) -> None:
        """Nothing is registered any more; waits for the piece in work, if any. A second call does nothing."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()
        self.leading_ready = 0
        for piece, state in enumerate(self._states):
            if state is PieceState.READY:
                self._registrar.unregister(self._base + piece * self._piece_bytes, self._bytes_of(piece))
                self._states[piece] = PieceState.PENDING

    def _bytes_of(self, piece: int) -> int:
        return min(self._piece_bytes, self._total_bytes - piece * self._piece_bytes)

    def _register_rest(self) -> None:
        for piece in range(1, len(self._states)):
            with self._changed:
                if self._stopping:
                    return
            self._register(piece)

    def _register(self, piece: int) -> RegistrationError | None:
        error: RegistrationError | None = None
        offset, num_bytes = piece * self._piece_bytes, self._bytes_of(piece)
        try:
            self._populate(offset, num_bytes)
            self._registrar.register(self._base + offset, num_bytes)
        except Exception as refused:  # also a registrar's own fault must not leave pieces pending for ever
            error = RegistrationError(
                getattr(refused, "errno", None),
                f"{self._registrar.name} could not register {num_bytes} bytes of host memory at offset {offset}: "
                f"{getattr(refused, 'strerror', None) or refused}. {memory_limits()}",
            )
        with self._changed:
            self._states[piece] = PieceState.FAILED if error else PieceState.READY
            if error:
                self._failed.append(FailedPiece(piece, error))
            elif self.leading_ready == piece:
                self.leading_ready += 1
            self._changed.notify_all()
        if not error:
            self._on_ready(piece)
        return error


def memory_limits(cgroup: Path = Path("/sys/fs/cgroup")) -> str:
    """The limits that refuse pinned memory, and where to raise them, as a sentence for an error."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limits = [f"RLIMIT_MEMLOCK is {_bytes(soft)} (hard {_bytes(hard)}; raise it with ulimit -l or docker --ulimit)"]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            limits.append(f"the container's {name} is {(cgroup / name).read_text(encoding='utf-8').strip()} bytes")
        except OSError:
            continue
    return "; ".join(limits)


def _bytes(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes"
