"""What every executor takes and promises."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from lamella.reference.layout import EngineLayout
from lamella.reference.plan import Direction, TransferPlan

SliceLanded = Callable[[int], None]
"""Called with a slice's index once its last byte has landed, in slice order, on the thread that called `run`."""


class Method(enum.Enum):
    """How bytes get from an object into blocks, or back."""

    DIRECT = "direct"
    """Straight, in runs as long as both sides keep them contiguous."""
    STAGED = "staged"
    """Through a window of staging memory, as a copy engine and a kernel do it."""
    AUTO = "auto"
    """The executor picks; on host memory DIRECT, which touches each byte once."""


@dataclass(frozen=True, slots=True)
class HostObjects:
    """Where a request's objects lie in host memory.

    Args:
        addresses: byte address of each chunk's object, by absolute chunk; 0 where the request does not touch it.
        registered_piece_bytes: size of the pieces in which the pool was registered, counted from `registered_base`; a
            copy is split where two meet. None: registered as a whole, or not at all.
        registered_base: address of the pool's first byte; read only with registered_piece_bytes.

    Raises:
        ValueError: a negative address or a piece size below 1.
    """

    addresses: Sequence[int]
    registered_piece_bytes: int | None = None
    registered_base: int = 0

    def __post_init__(self) -> None:
        if self.registered_piece_bytes is not None and self.registered_piece_bytes < 1:
            raise ValueError(f"registered_piece_bytes must be at least 1 or None, got {self.registered_piece_bytes}")
        if min((*self.addresses, self.registered_base)) < 0:
            raise ValueError(f"addresses must not be negative, got {self.addresses}, base {self.registered_base}")


class Executor(Protocol):
    """Moves the bytes that a plan names, and no others."""

    @property
    def name(self) -> str:
        """Short, for tables and logs."""
        ...

    def run(
        self,
        plan: TransferPlan,
        engines: Sequence[EngineLayout],
        objects: HostObjects,
        direction: Direction,
        *,
        method: Method = Method.AUTO,
        on_slice: SliceLanded | None = None,
    ) -> None:
        """Every byte of the plan has moved.

        The caller keeps objects and caches alive, and lets nobody else touch the named bytes, until this returns.

        Args:
            plan: from `reference.plan`.
            engines: the paged cache of each kernel group.
            objects: the host objects.
            direction: retrieve writes the caches, store the objects.
            method: forced, or AUTO.
            on_slice: progress, slice by slice.

        Raises:
            ValueError: the request does not fit caches or objects; nothing was moved then.
        """
        ...
