"""The host pool: objects in slots of pinned memory, found by key, pinned by count, evicted from a prompt's end.

    keys ─► HostPool ─► SlotIndex    which object is where, who holds it       (one lock, here)
                   └──► SlotMemory   the bytes, registered in the background   (its own; never taken inside the other)

Reading: `pin(keys)` gives a lease with addresses; the transfer holds it until its last copy has completed (XFER-2),
then releases it. Writing: `reserve(keys)` gives slots nobody else sees; `commit` makes the objects readable, `abandon`
gives the slots back.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Sequence
from functools import cached_property
from types import TracebackType
from typing import NamedTuple, Self

from lamella.cuda_ext._execution import HostObjects
from lamella.cuda_ext.registration import NoRegistrar, Registrar, RegistrationReport
from lamella.cuda_ext.shared_memory import HostMemory
from lamella.cuda_ext.slot_index import Occupancy, SlotIndex
from lamella.cuda_ext.slots import DEFAULT_PIECE_BYTES, MOST_MEMORY, SharedSlots, SlotMemory, SlotShape
from lamella.reference.keys import ChunkKey
from lamella.reference.layout import ObjectLayout
from lamella.reference.whole import check_whole


class Backing(enum.Enum):
    """Where a pool's bytes live."""

    ANONYMOUS = "anonymous"
    """Memory of this process alone."""
    SHARED = "shared"
    """Memory that other processes of this user map and register too."""


class PoolReport(NamedTuple):
    """What a pool holds and how much of it can be used, at one moment."""

    occupancy: Occupancy
    registration: RegistrationReport
    numa_node: int | None


class _Held:
    """Some of a pool's slots, held by one holder; its end is guarded by the pool's lock."""

    def __init__(self, pool: HostPool, keys: tuple[ChunkKey, ...], slots: tuple[int, ...]) -> None:
        self._pool = pool
        self._ended = False
        self.keys = keys
        self.slots = slots

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        """`addresses[i]` is where object `keys[i]` starts; worked out for those who move the bytes in this process."""
        return self._pool.memory.addresses(self.slots)

    def host_objects(self, chunks: Sequence[int] | None = None) -> HostObjects:
        """These objects as a transfer takes them, by absolute chunk; 0 where the sequence has another chunk.

        Args:
            chunks: the chunk of the sequence that each object is; by default object `i` is chunk `i`.

        Raises:
            ValueError: another number of chunks than objects, a negative or a repeated one.
        """
        places = range(len(self.slots)) if chunks is None else chunks
        if len(places) != len(self.slots) or len(set(places)) != len(places) or min(places, default=0) < 0:
            raise ValueError(f"chunks must be {len(self.slots)} different ones, one an object, got {list(places)}")
        by_chunk = [0] * (max(places, default=-1) + 1)
        for chunk, address in zip(places, self.addresses, strict=True):
            by_chunk[chunk] = address
        memory = self._pool.memory
        return HostObjects(tuple(by_chunk), memory.shape.piece_bytes, memory.base)


class PinnedObjects(_Held):
    """A lease: these objects stay where they are until `release`."""

    def release(self) -> None:
        """The lease is over. A second call does nothing, so it cannot free another holder's object (fault 40)."""
        with self._pool._lock:
            if not self._ended:
                self._ended = True
                self._pool._index.unpin(self.slots)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()


class Reservation(_Held):
    """Slots being written; nobody else sees their keys until `commit`. Ends with exactly one commit or abandon.

    `keys` are those of the asked keys that had no object yet; `evicted` are the keys that left to make room.
    """

    def __init__(
        self, pool: HostPool, keys: tuple[ChunkKey, ...], slots: tuple[int, ...], evicted: tuple[ChunkKey, ...]
    ) -> None:
        super().__init__(pool, keys, slots)
        self.evicted = evicted

    def commit(self) -> None:
        """The bytes are there: the objects can be pinned from now on.

        Raises:
            RuntimeError: committed or abandoned before.
        """
        with self._pool._lock:
            self._end()
            self._pool._index.commit(self.slots)

    def abandon(self) -> None:
        """The bytes will not come; no copy into the slots may still be in flight.

        Raises:
            RuntimeError: committed or abandoned before.
        """
        with self._pool._lock:
            self._end()
            self._pool._index.abandon(self.slots)

    def _end(self) -> None:
        if self._ended:  # its slots may be another's by now
            raise RuntimeError("this reservation was committed or abandoned before: reserve again")
        self._ended = True


class HostPool:
    """Objects of one layout in equal slots. Thread-safe.

    Args:
        layout: what an object is; its form is the pool's form.
        num_slots: objects the pool holds.
        backing: anonymous, or shared with other processes.
        registrar: makes the memory reachable for the device; the CPU device needs none.
        numa_node: memory node to prefer, usually the device's.
        piece_bytes: about how much is registered at once. Slots of the first piece are usable when the constructor
            returns, the others as their pieces become ready.

    Raises:
        TypeError: num_slots or piece_bytes that is no whole number, a backing that is none.
        ValueError: num_slots or piece_bytes below 1, or beyond any machine's memory.
        OSError: the memory is not to be had; the message carries sizes and limits.
        RegistrationError: (an OSError) not even the first piece could be registered.
    """

    def __init__(
        self,
        layout: ObjectLayout,
        num_slots: int,
        *,
        backing: Backing = Backing.ANONYMOUS,
        registrar: Registrar | None = None,
        numa_node: int | None = None,
        piece_bytes: int = DEFAULT_PIECE_BYTES,
    ) -> None:
        if not isinstance(backing, Backing):
            raise TypeError(f"backing must be Backing.ANONYMOUS or Backing.SHARED, got {backing!r}")
        check_whole("num_slots", num_slots, 1, MOST_MEMORY)
        check_whole("piece_bytes", piece_bytes, 1, MOST_MEMORY)
        shape = SlotShape(layout.object_bytes, num_slots, piece_bytes)
        self.layout = layout
        self._lock = threading.Lock()
        self._index = SlotIndex()
        create = HostMemory.create if backing is Backing.SHARED else HostMemory.anonymous
        memory = create(shape.total_bytes)
        try:
            self.memory = SlotMemory(
                memory, shape, registrar or NoRegistrar(), numa_node=numa_node, on_ready=self._add_slots
            )
        except BaseException:
            memory.close()
            raise

    @property
    def num_slots(self) -> int:
        """Slots of the pool, registered or not."""
        return self.memory.shape.num_slots

    def leading_hits(self, keys: Sequence[ChunkKey]) -> int:
        """How many of `keys`, from the first on, can be pinned now. Only `pin` makes it certain."""
        with self._lock:
            return self._index.leading_hits(keys)

    def pin(self, keys: Sequence[ChunkKey]) -> PinnedObjects:
        """A lease on every one of these objects.

        Raises:
            KeyError: one of them is not there (any more); none is pinned then.
        """
        with self._lock:
            slots = self._index.pin(keys)
        return PinnedObjects(self, tuple(keys), slots)

    def pin_leading(self, keys: Sequence[ChunkKey]) -> PinnedObjects:
        """A lease on the objects of `keys` up to the first that is missing; looked up and pinned in one step."""
        with self._lock:
            slots = self._index.pin_leading(keys)
        return PinnedObjects(self, tuple(keys[: len(slots)]), slots)

    def is_whole(self, last: ChunkKey | None) -> bool:
        """As `SlotIndex.is_whole`."""
        with self._lock:
            return self._index.is_whole(last)

    def reserve(self, keys: Sequence[ChunkKey], after: ChunkKey | None = None) -> Reservation | None:
        """Slots for those of `keys` that have no object yet, in order and consecutive where possible.

        None means not now: too many objects are pinned or being written. Nothing was taken or evicted then, and a
        later call can succeed (fault 41).

        Args:
            keys, after: as `SlotIndex.reserve`.

        Raises:
            ValueError: as `SlotIndex.reserve`, or more keys than the pool has slots, which no waiting can satisfy.
        """
        if len(keys) > self.num_slots:
            raise ValueError(f"{len(keys)} objects can never fit into a pool of {self.num_slots}")
        with self._lock:
            reserved = self._index.reserve(keys, after)
        return None if reserved is None else Reservation(self, *reserved)

    def discard(self, keys: Sequence[ChunkKey]) -> None:
        """These objects cannot be found any more; those who hold a lease keep it."""
        with self._lock:
            self._index.discard(keys)

    def shared(self) -> SharedSlots:
        """How another process attaches the pool's bytes (`SlotMemory.attach`).

        Raises:
            RuntimeError: the pool is anonymous, or its name was unlinked.
        """
        return self.memory.shared()

    def report(self) -> PoolReport:
        """Occupancy, registration and placement now."""
        with self._lock:
            occupancy = self._index.occupancy()
        return PoolReport(occupancy, self.memory.report(), self.memory.numa_node)

    def close(self) -> None:
        """Memory unregistered and unmapped, the shared name gone. A second call does nothing.

        Raises:
            RuntimeError: objects are pinned or being written (a copy may be in flight), or a view is alive.
        """
        with self._lock:
            now = self._index.occupancy()
        if now.pins or now.writing:
            raise RuntimeError(
                f"{now.pinned} objects are pinned and {now.writing} are being written: release, commit or abandon first"
            )
        self.memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _add_slots(self, slots: range) -> None:
        with self._lock:
            self._index.add_slots(slots.start, len(slots))
