"""Host memory cut into equal slots, one object each, mapped and registered by every process that moves them.

Slots have one pitch, and a registration piece holds whole slots, so an object never straddles two pieces; copies over
several slots are split where pieces meet. The process that creates a memory decides which object is where (`HostPool`);
others attach it by `SharedSlots` and are told slots.
"""

from __future__ import annotations

import logging
import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lamella.cuda_ext.numa import prefer_node
from lamella.cuda_ext.registration import PieceState, Registrar, Registration, RegistrationReport
from lamella.cuda_ext.shared_memory import HostMemory
from lamella.reference.layout import GROUP_ALIGNMENT_BYTES
from lamella.reference.whole import check_whole

DEFAULT_PIECE_BYTES: Final = 256 << 20
MOST_MEMORY: Final = 1 << 50
"""Bytes or slots: more than any machine has."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SlotShape:
    """How a memory is cut. Slot `i` starts at byte `i * pitch_bytes`.

    Args:
        object_bytes: bytes of one object.
        num_slots: slots of the memory.
        target_piece_bytes: about how many bytes are registered at once; a piece is whole slots and whole pages.

    Raises:
        TypeError: a size that is no whole number.
        ValueError: a size that is not positive, or beyond any machine's memory.
    """

    object_bytes: int
    num_slots: int
    target_piece_bytes: int = DEFAULT_PIECE_BYTES

    def __post_init__(self) -> None:
        for name in ("object_bytes", "num_slots", "target_piece_bytes"):
            check_whole(name, getattr(self, name), 1, MOST_MEMORY)

    @property
    def pitch_bytes(self) -> int:
        """Bytes from one slot to the next: the object, padded so that every slot is as aligned as the first."""
        return -(-self.object_bytes // GROUP_ALIGNMENT_BYTES) * GROUP_ALIGNMENT_BYTES

    @property
    def piece_slots(self) -> int:
        """Slots of one registration piece; the last piece may have fewer."""
        step = mmap.PAGESIZE // math.gcd(self.pitch_bytes, mmap.PAGESIZE)  # fewest slots that fill whole pages
        return max(1, self.target_piece_bytes // (self.pitch_bytes * step)) * step

    @property
    def piece_bytes(self) -> int:
        """Bytes of one registration piece."""
        return self.piece_slots * self.pitch_bytes

    @property
    def num_pieces(self) -> int:
        """Registration pieces, a shorter last one included."""
        return -(-self.num_slots // self.piece_slots)

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole memory, whole pages."""
        return -(-self.num_slots * self.pitch_bytes // mmap.PAGESIZE) * mmap.PAGESIZE

    def slots_of(self, piece: int) -> range:
        """The slots of one piece."""
        first = piece * self.piece_slots
        return range(first, min(first + self.piece_slots, self.num_slots))


@dataclass(frozen=True, slots=True)
class SharedSlots:
    """What another process needs to attach a memory; sent in a handshake."""

    path: Path
    shape: SlotShape


class SlotMemory:
    """A cut memory, mapped here and being registered for this process's device in the background.

    Args:
        memory: at least `shape.total_bytes` bytes; closed with this object.
        shape: how it is cut.
        registrar: makes pieces reachable for the device.
        numa_node: where pages that do not exist yet should come from; None leaves it to the kernel.
        on_ready: called with the slots of each piece that became usable, from the registering thread (the first
            piece: from the constructor).

    Raises:
        RegistrationError: not even the first piece could be registered; the message carries the limits.
    """

    def __init__(
        self,
        memory: HostMemory,
        shape: SlotShape,
        registrar: Registrar,
        *,
        numa_node: int | None = None,
        on_ready: Callable[[range], None] = lambda slots: None,
    ) -> None:
        if memory.num_bytes < shape.total_bytes:
            raise ValueError(f"{shape.num_slots} slots need {shape.total_bytes} bytes, got {memory.num_bytes}")
        self.shape = shape
        self._memory = memory
        self._base = memory.address
        self._pitch_bytes, self._piece_slots = shape.pitch_bytes, shape.piece_slots
        self.piece_bytes = shape.piece_bytes
        """`shape.piece_bytes`, worked out once."""
        self.numa_node = _place(memory, numa_node)
        """The node that was asked for and granted, or None."""
        self._registration = Registration(
            self._base,
            shape.piece_bytes,
            shape.total_bytes,
            registrar,
            memory.populate,
            lambda piece: on_ready(shape.slots_of(piece)),
        )

    @classmethod
    def attach(cls, shared: SharedSlots, registrar: Registrar) -> SlotMemory:
        """Another process's slots, mapped here and registered for this process's device.

        Raises:
            OSError, ValueError: as `HostMemory.attach`.
            RegistrationError: not even the first piece could be registered.
        """
        memory = HostMemory.attach(shared.path, shared.shape.total_bytes)
        try:
            return cls(memory, shared.shape, registrar)
        except BaseException:
            memory.close()
            raise

    @property
    def base(self) -> int:
        """Address of slot 0 in this process; registration pieces count from here."""
        return self._base

    def shared(self) -> SharedSlots:
        """How other processes attach these slots.

        Raises:
            RuntimeError: anonymous or attached memory, or one whose name is gone.
        """
        if self._memory.path is None:
            raise RuntimeError("only the creator of a shared memory can share it, and only until unlink()")
        return SharedSlots(self._memory.path, self.shape)

    def addresses(self, slots: Sequence[int]) -> tuple[int, ...]:
        """Addresses of slots whose memory this process's device can reach.

        Raises:
            ValueError: a slot outside the memory.
            RuntimeError: a slot whose piece is not registered here (yet): wait with `wait_registered`.
        """
        last = max(slots, default=0)
        for slot in (min(slots, default=0), last):
            if not 0 <= slot < self.shape.num_slots:
                raise ValueError(f"slot must be between 0 and {self.shape.num_slots - 1}, got {slot}")
        piece_slots, pitch_bytes, base = self._piece_slots, self._pitch_bytes, self._base
        if last // piece_slots >= self._registration.leading_ready:
            for piece in {slot // piece_slots for slot in slots}:
                state = self._registration.state(piece)
                if state is not PieceState.READY:
                    raise RuntimeError(f"slots {self.shape.slots_of(piece)} are not registered here: {state.value}")
        return tuple([base + slot * pitch_bytes for slot in slots])

    def buffer(self, slot: int) -> memoryview:
        """One object's bytes, writable; drop every view before `close`.

        Raises:
            ValueError: a slot outside the memory.
        """
        if not 0 <= slot < self.shape.num_slots:
            raise ValueError(f"slot must be between 0 and {self.shape.num_slots - 1}, got {slot}")
        start = slot * self.shape.pitch_bytes
        return memoryview(self._memory.buffer).cast("B")[start : start + self.shape.object_bytes]

    @property
    def ready_slots(self) -> int:
        """Slots from 0 on that can be used now; those behind a piece that is not registered do not count."""
        return min(self._registration.leading_ready * self._piece_slots, self.shape.num_slots)

    def report(self) -> RegistrationReport:
        """Pieces by state now."""
        return self._registration.report()

    def wait_registered(self, timeout_s: float) -> RegistrationReport:
        """Waits until every piece is registered or has failed.

        Raises:
            TimeoutError: some are still pending after `timeout_s` seconds.
        """
        return self._registration.wait(timeout_s)

    def unlink(self) -> None:
        """No further process can attach by path; those that have stay attached."""
        self._memory.unlink()

    def close(self) -> None:
        """Unregistered and unmapped; the caller has seen to it that no copy is in flight. A second call does nothing.

        Raises:
            RuntimeError: a `buffer` is still alive.
        """
        self._registration.close()
        self._memory.close()


def _place(memory: HostMemory, node: int | None) -> int | None:
    if node is None:
        return None
    try:
        prefer_node(memory.address, memory.num_bytes, node)
    except OSError as refused:
        _log.warning("host pool is not placed on memory node %d: %s", node, refused)
        return None
    return node
