"""What the service asks of whoever moves bytes in the server's own process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from lamella.cuda_ext._execution import HostObjects
from lamella.cuda_ext.arrival_board import BoardPlace
from lamella.cuda_ext.device import Device
from lamella.cuda_ext.registration import Registrar
from lamella.reference.layout import ObjectLayout
from lamella.server.cache_mover import CacheMover, Moved
from lamella.server.protocol import Register
from lamella.server.shapes import read_caches


class Move(Protocol):
    """A move in flight."""

    def cancel(self) -> Any:
        """What was not issued of it never will be; it ends soon."""
        ...


class Mover(Protocol):
    """As `lamella.server.cache_mover.CacheMover`, for one rank."""

    def retrieve(
        self,
        objects: HostObjects,
        tables: Sequence[bytes],
        num_tokens: int,
        *,
        on_end: Callable[[Moved], object],
        width: int | Sequence[int] = 0,
        board: BoardPlace | None = None,
        **options: Any,
    ) -> Move:
        """Objects are on their way into blocks."""
        ...

    def store(
        self,
        objects: HostObjects,
        tables: Sequence[bytes],
        num_tokens: int,
        *,
        on_end: Callable[[Moved], object],
        **options: Any,
    ) -> Move:
        """Blocks are on their way into objects."""
        ...

    def rouse(self) -> None:
        """A retrieve that comes soon begins sooner."""
        ...

    def close(self, timeout_s: float = 10.0) -> None:
        """Moves were cancelled and have ended, and the rank's memory is unmapped."""
        ...


OpenMover = Callable[[Register, ObjectLayout], Mover]
"""Opens a rank's caches; called on a thread of its own. Raises ValueError, OSError, ImportError or RuntimeError."""


class Movement(NamedTuple):
    """A server that moves bytes: how it prepares its memory, and how it opens a rank's caches."""

    registrar: Registrar
    open: OpenMover


def movement(device: str, *, allow_kernels: bool = False) -> Movement:
    """What a server on this device moves with.

    Args:
        device: `"cpu"` or `"cuda:N"`, for which the memory is registered.
        allow_kernels: also takes objects that need a kernel to move; beside a busy engine they wait for time slices.

    Raises:
        ValueError, ImportError, RuntimeError: no such name, no native library for it, or no such device or driver.
    """
    on = Device(device)
    on.facts()  # here, and not when the first rank asks

    def open_caches(register: Register, layout: ObjectLayout) -> Mover:
        caches = read_caches(register.device, register.allocations, register.caches)
        mover = CacheMover(caches, layout, allow_kernels=allow_kernels)
        try:
            if register.board is not None:
                mover.attach_board(BoardPlace.parse(register.board))
        except BaseException:
            mover.close()
            raise
        return mover

    return Movement(on.registrar(), open_caches)
