"""Host buffers for layers on their way from a slower tier: taken slice by slice, back as soon as they have landed.

A retrieve from a tier needs host memory for the slices in flight, not for the prefix. It takes the buffers of one slice
together, all or none, and needs nothing more to give them back, so retrieves that share a small memory wait for one
another but never for themselves (BUF-1). Who came first is served first, so a long prefix is not starved by short ones.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from lamella.cuda_ext.registration import NoRegistrar, Registrar
from lamella.cuda_ext.shared_memory import HostMemory
from lamella.cuda_ext.slots import DEFAULT_PIECE_BYTES, SlotMemory, SlotShape


class BufferLease:
    """Some buffers, this holder's own until `release`."""

    def __init__(self, owner: LayerBuffers, slots: tuple[int, ...]) -> None:
        self._owner = owner
        self._ended = False  # guarded by the owner's condition
        self.slots = slots
        self.addresses = owner.memory.addresses(slots)

    def views(self) -> tuple[memoryview, ...]:
        """The buffers' bytes, writable; dropped before `release`."""
        return tuple(self._owner.memory.buffer(slot) for slot in self.slots)

    def release(self) -> None:
        """The buffers are free; no copy may still read them. A second call does nothing."""
        self._owner._give_back(self)


class LayerBuffers:
    """A fixed number of equal host buffers, registered for the device. Thread-safe.

    Args:
        buffer_bytes: of one buffer: one chunk's widest slice.
        num_buffers: how many.
        registrar: as for `HostPool`.

    Raises:
        ValueError: a size below 1.
        OSError: the memory is not to be had.
    """

    def __init__(self, buffer_bytes: int, num_buffers: int, registrar: Registrar | None = None) -> None:
        shape = SlotShape(buffer_bytes, num_buffers, DEFAULT_PIECE_BYTES)
        self.num_buffers = num_buffers
        self._changed = threading.Condition()
        self._free: list[int] = []  # grows as pieces become ready
        self._waiting: deque[object] = deque()
        self._closed = False
        self.peak_used = 0
        """Most buffers that were taken at once."""
        self._used = 0
        memory = HostMemory.anonymous(shape.total_bytes)
        try:
            self.memory = SlotMemory(memory, shape, registrar or NoRegistrar(), on_ready=self._add)
        except BaseException:
            memory.close()
            raise

    @property
    def used(self) -> int:
        """Buffers taken now."""
        with self._changed:
            return self._used

    @property
    def waiting(self) -> int:
        """Who waits for buffers now."""
        with self._changed:
            return len(self._waiting)

    def take(self, count: int, timeout_s: float) -> BufferLease:
        """`count` buffers, once as many are free and whoever asked before has theirs.

        Raises:
            ValueError: more than there are, which no waiting can satisfy.
            TimeoutError: not within `timeout_s` seconds; nothing was taken.
            RuntimeError: the buffers were closed meanwhile.
        """
        if not 0 <= count <= self.num_buffers:
            raise ValueError(f"{count} layer buffers can never be taken from {self.num_buffers}")
        ticket = object()
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._waiting.append(ticket)
            try:
                while self._closed or not (self._waiting[0] is ticket and len(self._free) >= count):
                    if self._closed:
                        raise RuntimeError("the layer buffers are closed")
                    if not self._changed.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                        raise TimeoutError(
                            f"{count} of {self.num_buffers} layer buffers were not free in {timeout_s} s"
                        )
                slots = tuple(self._free[:count])
                del self._free[:count]
                self._used += count
                self.peak_used = max(self.peak_used, self._used)
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()
        return BufferLease(self, slots)

    def close(self) -> None:
        """Unregistered and unmapped; those who wait are turned away. A second call does nothing.

        Raises:
            RuntimeError: buffers are taken: a copy may be in flight.
        """
        with self._changed:
            if self._used:
                raise RuntimeError(f"{self._used} layer buffers are taken: let their transfers end first")
            self._closed = True
            self._changed.notify_all()
        self.memory.close()

    def _add(self, slots: range) -> None:
        with self._changed:
            self._free.extend(slots)
            self._changed.notify_all()

    def _give_back(self, lease: BufferLease) -> None:
        with self._changed:
            if lease._ended:
                return
            lease._ended = True
            self._free.extend(lease.slots)
            self._used -= len(lease.slots)
            self._changed.notify_all()
