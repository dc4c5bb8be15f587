"""Which object lies in which slot: keys, counted pins, and who leaves when others need room.

An object's life:

    reserve ──► WRITING ──commit──► READY ──evict──► gone
                   └───abandon──► gone   └──discard──► DISCARDED ──last unpin──► gone

A WRITING object is invisible to lookups and belongs to the one who reserved it. A READY object can be pinned by any
number of holders; it is evicted only while nobody pins it, and in the order of `PrefixAges`. A DISCARDED object is
invisible too; its holders finish.

A rule-based machine checks POOL-1 to POOL-4 after every step.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lamella.cuda_ext.extents import Run, SlotExtents
from lamella.reference.keys import ChunkKey
from lamella.reference.prefix_ages import Kept, PrefixAges


class ObjectState(enum.Enum):
    """Where an object is in its life; see the module's picture."""

    WRITING = "writing"
    READY = "ready"
    DISCARDED = "discarded"


class Reserved(NamedTuple):
    """What `SlotIndex.reserve` gave: `slots[i]` is for `keys[i]`; `evicted` left to make room."""

    keys: tuple[ChunkKey, ...]
    slots: tuple[int, ...]
    evicted: tuple[ChunkKey, ...]


class Occupancy(NamedTuple):
    """Slots by what they hold. `ready` counts the pinned ones too; `pins` counts holders, not objects."""

    free: int
    writing: int
    ready: int
    pinned: int
    pins: int


@dataclass(slots=True, eq=False)
class _Object(Kept[ChunkKey]):
    slot: int = -1
    state: ObjectState = ObjectState.WRITING
    pins: int = 0


class SlotIndex:
    """Keys to slots. Not thread-safe: its owner locks.

    It starts without slots; `add_slots` brings them as their memory becomes usable.
    """

    def __init__(self) -> None:
        self._free = SlotExtents()
        self._by_slot: dict[int, _Object] = {}
        self._ages: PrefixAges[ChunkKey, _Object] = PrefixAges()  # WRITING and READY; free are those that nobody pins
        self._by_key = self._ages.kept
        self._num_writing = self._num_discarded = self._num_pinned = self._num_pins = 0  # as they change

    def add_slots(self, first: int, count: int) -> None:
        """Slots `[first, first + count)` can be handed out from now on."""
        self._free.release(first, count)

    def leading_hits(self, keys: Sequence[ChunkKey]) -> int:
        """How many of `keys`, from the first on, are READY; the walk ends at the first that is not."""
        for hits, key in enumerate(keys):
            if not self.is_ready(key):
                return hits
        return len(keys)

    def is_ready(self, key: ChunkKey) -> bool:
        """Whether the object can be pinned."""
        found = self._by_key.get(key)
        return found is not None and found.state is ObjectState.READY

    def is_whole(self, last: ChunkKey | None) -> bool:
        """Whether every chunk of a prompt from its first to `last` is READY or being written; None: there is none."""
        return self._ages.is_whole(last)

    def ready_keys(self) -> tuple[ChunkKey, ...]:
        """Keys of every READY object."""
        return tuple(key for key in self._by_key if self.is_ready(key))

    def slot_of(self, key: ChunkKey) -> int | None:
        """The slot of a READY object, or None."""
        return self._by_key[key].slot if self.is_ready(key) else None

    def pin(self, keys: Sequence[ChunkKey]) -> tuple[int, ...]:
        """Each object has one more holder and stays; returns their slots in the order of `keys`.

        Raises:
            KeyError: a key that is not READY; nothing is pinned then.
        """
        for key in keys:
            if not self.is_ready(key):
                raise KeyError(f"no readable object for {key}: look it up and pin it under the same lock")
        return self._pin([self._by_key[key] for key in keys])

    def pin_leading(self, keys: Sequence[ChunkKey]) -> tuple[int, ...]:
        """Each object of `keys` up to the first that is not READY has one more holder; their slots in order.

        `leading_hits` and `pin` in one walk, for those who look up hundreds of keys at a time.
        """
        found: list[_Object] = []
        for key in keys:
            one = self._by_key.get(key)
            if one is None or one.state is not ObjectState.READY:
                break
            found.append(one)
        return self._pin(found)

    def _pin(self, objects: Sequence[_Object]) -> tuple[int, ...]:
        for one in objects:
            one.is_free = False
            if not one.pins:
                self._num_pinned += 1
            one.pins += 1
        self._num_pins += len(objects)
        return tuple([one.slot for one in objects])

    def unpin(self, slots: Sequence[int]) -> None:
        """Each object has one holder fewer; an unpinned READY object is now the most recently used.

        Args:
            slots: in a prompt's order.

        Raises:
            RuntimeError: a slot whose object nobody pins; nothing changes then.
        """
        objects = [self._by_slot.get(slot) for slot in slots]
        freed: list[_Object] = []
        for place, one in enumerate(objects):
            if one is None or not one.pins:
                self._repin(slots[:place])
                raise RuntimeError(f"slot {slots[place]} has fewer holders than let go of it: unpinned twice?")
            one.pins -= 1
            if not one.pins:
                freed.append(one)
        self._num_pins -= len(objects)
        self._num_pinned -= len(freed)
        gone = [one for one in freed if one.state is ObjectState.DISCARDED]
        if gone:
            self._leave(gone)
            freed = [one for one in freed if one.state is not ObjectState.DISCARDED]
        self._ages.free(freed)

    def reserve(self, keys: Sequence[ChunkKey], after: ChunkKey | None = None) -> Reserved | None:
        """Slots for those of `keys` that have none yet, consecutive where that is possible; or None, all or nothing.

        Keys that are READY or being written by another keep what they have, are left out of the result, and are not
        evicted to make room for the others; nor is anything that comes before one of them, now or later (KEEP-1).

        Args:
            keys: of a prompt's consecutive chunks, in its order.
            after: the chunk before the first of them; None: they begin the prompt.

        Raises:
            ValueError: a key named twice, or one that would come behind itself.
        """
        named = {after, *keys}
        if len(named) <= len(keys):
            raise ValueError(f"each key can be reserved once, got {len(keys) + 1 - len(named)} repetitions")
        missing = [
            _Object(key, before) for before, key in zip((after, *keys), keys, strict=False) if key not in self._by_key
        ]
        if not missing:
            return Reserved((), (), ())
        self._ages.check(missing)
        victims = self._ages.take(len(missing) - len(self._free), named)
        if victims is None:
            return None
        self._leave(victims)
        before = self._by_key.get(missing[0].before) if missing[0].before is not None else None
        runs = self._free.take(len(missing), None if before is None else before.slot)
        assert runs is not None, "room was made for every missing key"
        slots = [slot for run in runs for slot in range(run.first, run.first + run.num_slots)]
        for one, slot in zip(missing, slots, strict=True):
            one.slot = slot
            self._by_slot[slot] = one
        self._num_writing += len(missing)
        self._ages.add(missing)
        return Reserved(tuple(one.key for one in missing), tuple(slots), tuple(victim.key for victim in victims))

    def commit(self, slots: Sequence[int]) -> None:
        """The objects are written: READY, unpinned and most recently used.

        Args:
            slots: in a prompt's order.

        Raises:
            RuntimeError: a slot that is not being written; nothing changes then.
        """
        written = self._writing(slots)
        for found in written:
            found.state = ObjectState.READY
        self._num_writing -= len(written)
        self._ages.free(written)

    def abandon(self, slots: Sequence[int]) -> None:
        """The objects will not be written: their keys are unknown again and their slots free.

        Raises:
            RuntimeError: a slot that is not being written; nothing changes then.
        """
        writing = self._writing(slots)
        for found in writing:
            self._ages.remove(found)
        self._leave(writing)

    def discard(self, keys: Sequence[ChunkKey]) -> None:
        """READY objects are invisible from now on, and gone when their last holder is; other keys are left alone."""
        gone = []
        for key in keys:
            if not self.is_ready(key):
                continue
            found = self._by_key[key]
            self._ages.remove(found)
            found.state = ObjectState.DISCARDED
            self._num_discarded += 1
            if not found.pins:
                gone.append(found)
        self._leave(gone)

    def occupancy(self) -> Occupancy:
        """Counts of this moment; at once, however many objects there are."""
        return Occupancy(
            free=len(self._free),
            writing=self._num_writing,
            ready=len(self._by_slot) - self._num_writing - self._num_discarded,
            pinned=self._num_pinned,
            pins=self._num_pins,
        )

    def free_runs(self) -> tuple[Run, ...]:
        """The free slots, by first slot."""
        return self._free.runs()

    def _writing(self, slots: Sequence[int]) -> list[_Object]:
        found = [self._by_slot.get(slot) for slot in slots]
        writing = [entry for entry in found if entry is not None and entry.state is ObjectState.WRITING]
        if len(writing) != len(slots) or len(set(slots)) != len(slots):
            raise RuntimeError(f"slots {list(slots)} are not all being written: committed or abandoned before?")
        return writing

    def _repin(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._by_slot[slot].pins += 1

    def _leave(self, objects: Sequence[_Object]) -> None:
        """Their slots are free, as many side by side at once as there are."""
        self._num_writing -= sum(found.state is ObjectState.WRITING for found in objects)
        self._num_discarded -= sum(found.state is ObjectState.DISCARDED for found in objects)
        first, end = -1, -1
        for slot in sorted([found.slot for found in objects]):
            del self._by_slot[slot]
            if slot != end:
                if end > first:
                    self._free.release(first, end - first)
                first = slot
            end = slot + 1
        if end > first:
            self._free.release(first, end - first)
