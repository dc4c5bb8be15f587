"""What the service asks of whoever moves bytes in the server's own process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from lamella.cuda_ext._execution import HostObjects
from lamella.cuda_ext.arrival_board import BoardPlace
from lamella.reference.layout import ObjectLayout
from lamella.server.cache_mover import Moved
from lamella.server.protocol import Register


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

    def close(self, timeout_s: float = 10.0) -> None:
        """Moves were cancelled and have ended, and the rank's memory is unmapped."""
        ...


OpenMover = Callable[[Register, ObjectLayout], Mover]
"""Opens a rank's caches; called on a thread of its own. Raises ValueError, OSError, ImportError or RuntimeError."""
