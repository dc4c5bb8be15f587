"""Objects that a retrieve brings from a tier stay in the pool: their slices are read straight into slots.

    reserve all of a run's slots ─► slices are read into them, and copied to the device from there
                                 ─► the retrieve lets go ─► every layer there: readable in the pool
                                                         └► something missing: slots free, nothing of it is found

The slots are nobody else's until the retrieve has let go of its prefix, so what is being copied is never evicted, and
half an object is never found (TIER-1 for the pool).
"""

from __future__ import annotations

import threading

from lamella.cuda_ext.pool import HostPool, Reservation
from lamella.reference.keys import ChunkKey
from lamella.reference.slices import Slice


class Promotion:
    """The slots that a run's objects are read into. Thread-safe.

    Made by `reserve`; ends with one `finish`.
    """

    def __init__(self, reservation: Reservation, num_layers: int) -> None:
        self._reservation = reservation
        self._missing = set(range(num_layers))
        self._lock = threading.Lock()

    @classmethod
    def reserve(
        cls, pool: HostPool, keys: tuple[ChunkKey, ...], after: ChunkKey | None, num_layers: int
    ) -> Promotion | None:
        """Slots for every one of these objects, or None: no room, or another is writing one of them.

        Args:
            pool: that gives them.
            keys, after: as `HostPool.reserve`.
            num_layers: of an object.
        """
        if not keys or len(keys) > pool.num_slots:
            return None
        reservation = pool.reserve(keys, after)
        if reservation is None:
            return None
        if reservation.keys != keys:
            reservation.abandon()
            return None
        return cls(reservation, num_layers)

    @property
    def keys(self) -> tuple[ChunkKey, ...]:
        """Of the objects."""
        return self._reservation.keys

    @property
    def slots(self) -> tuple[int, ...]:
        """`slots[i]` is for `keys[i]`."""
        return self._reservation.slots

    @property
    def addresses(self) -> tuple[int, ...]:
        """`addresses[i]` is where object `keys[i]` starts."""
        return self._reservation.addresses

    def arrived(self, part: Slice) -> None:
        """These layers of every object are in their slots."""
        with self._lock:
            self._missing.difference_update(range(part.first_layer, part.first_layer + part.num_layers))

    def finish(self) -> bool:
        """Whether the objects can be found in the pool now; called when nothing moves into or out of the slots."""
        with self._lock:
            whole = not self._missing
        if whole:
            self._reservation.commit()
        else:
            self._reservation.abandon()
        return whole
