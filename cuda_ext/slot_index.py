"""Which object lies in which slot: keys, counted pins, and eviction of the least recently used.

An object's life:

    reserve ──► WRITING ──commit──► READY ──evict──► gone
                   └───abandon──► gone   └──discard──► DISCARDED ──last unpin──► gone

A WRITING object is invisible to lookups and belongs to the one who reserved it. A READY object can be pinned by any
number of holders; it is evicted only while nobody pins it. A DISCARDED object is invisible too; its holders finish.

A rule-based machine checks POOL-1 to POOL-4 after every step.
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lamella.cuda_ext.extents import Run, SlotExtents
from lamella.reference.keys import ChunkKey


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


@dataclass(slots=True)
class _Object:
    key: ChunkKey
    slot: int
    state: ObjectState
    pins: int = 0


class SlotIndex:
    """Keys to slots. Not thread-safe: its owner locks.

    It starts without slots; `add_slots` brings them as their memory becomes usable.
    """

    def __init__(self) -> None:
        self._free = SlotExtents()
        self._by_slot: dict[int, _Object] = {}
        self._by_key: dict[ChunkKey, _Object] = {}  # WRITING and READY
        self._evictable: OrderedDict[ChunkKey, _Object] = OrderedDict()  # READY and unpinned, oldest first

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

    def holds(self, keys: Sequence[ChunkKey]) -> bool:
        """Whether each of them is READY or being written."""
        return all(key in self._by_key for key in keys)

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
        for key in keys:
            self._by_key[key].pins += 1
            self._evictable.pop(key, None)
        return tuple(self._by_key[key].slot for key in keys)

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
        for one in found:
            if not one.pins:
                self._evictable.pop(one.key, None)
            one.pins += 1
        return tuple([one.slot for one in found])

    def unpin(self, slots: Sequence[int]) -> None:
        """Each object has one holder fewer; an unpinned READY object is now the most recently used.

        Slots are given in prefix order and touched from the back, so that a prefix loses its tail before its head: a
        tail without its head can never be hit.

        Raises:
            RuntimeError: a slot whose object nobody pins; nothing changes then.
        """
        for slot, holders in Counter(slots).items():
            pins = self._by_slot[slot].pins if slot in self._by_slot else 0
            if pins < holders:
                raise RuntimeError(f"slot {slot} has {pins} holders, not {holders}: unpinned twice?")
        for slot in reversed(slots):
            found = self._by_slot[slot]
            found.pins -= 1
            if found.pins:
                continue
            if found.state is ObjectState.DISCARDED:
                self._forget(found)
            else:
                self._evictable[found.key] = found

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """Objects of a prefix that could be evicted are now the most recently used, the first one most of all."""
        for key in reversed(keys):
            if key in self._evictable:
                self._evictable.move_to_end(key)

    def reserve(self, keys: Sequence[ChunkKey], behind: Sequence[ChunkKey] = ()) -> Reserved | None:
        """Slots for those of `keys` that have none yet, consecutive where that is possible; or None, all or nothing.

        Keys that are READY or being written by another keep what they have, are left out of the result, and are not
        evicted to make room for the others; nor are those that come before them in the same prefix, `behind`, without
        which they could never be hit.

        Raises:
            ValueError: a key named twice.
        """
        if len(set(keys)) != len(keys):
            raise ValueError(f"each key can be reserved once, got {len(keys) - len(set(keys))} repetitions")
        missing = tuple(key for key in keys if key not in self._by_key)
        if not missing:
            return Reserved((), (), ())
        victims = self._victims(len(missing) - len(self._free), frozenset((*keys, *behind)))
        if victims is None:
            return None
        for victim in victims:
            self._forget(victim)
        runs = self._free.take(len(missing), self._continuation(keys, missing[0]))
        assert runs is not None, "room was made for every missing key"
        slots = tuple(slot for run in runs for slot in range(run.first, run.first + run.num_slots))
        for key, slot in zip(missing, slots, strict=True):
            self._by_key[key] = self._by_slot[slot] = _Object(key, slot, ObjectState.WRITING)
        return Reserved(missing, slots, tuple(victim.key for victim in victims))

    def commit(self, slots: Sequence[int]) -> None:
        """The objects are written: READY, unpinned and most recently used.

        Raises:
            RuntimeError: a slot that is not being written; nothing changes then.
        """
        for found in reversed(self._writing(slots)):
            found.state = ObjectState.READY
            self._evictable[found.key] = found

    def abandon(self, slots: Sequence[int]) -> None:
        """The objects will not be written: their keys are unknown again and their slots free.

        Raises:
            RuntimeError: a slot that is not being written; nothing changes then.
        """
        for found in self._writing(slots):
            self._forget(found)

    def discard(self, keys: Sequence[ChunkKey]) -> None:
        """READY objects are invisible from now on, and gone when their last holder is; other keys are left alone."""
        for key in keys:
            if not self.is_ready(key):
                continue
            found = self._by_key.pop(key)
            self._evictable.pop(key, None)
            found.state = ObjectState.DISCARDED
            if not found.pins:
                self._forget(found)

    def occupancy(self) -> Occupancy:
        """Counts of this moment."""
        states = [found.state for found in self._by_slot.values()]
        pins = [found.pins for found in self._by_slot.values()]
        return Occupancy(
            free=len(self._free),
            writing=states.count(ObjectState.WRITING),
            ready=states.count(ObjectState.READY),
            pinned=len(pins) - pins.count(0),
            pins=sum(pins),
        )

    def free_runs(self) -> tuple[Run, ...]:
        """The free slots, by first slot."""
        return self._free.runs()

    def _victims(self, count: int, keep: frozenset[ChunkKey]) -> list[_Object] | None:
        """The `count` least recently used evictable objects outside `keep`, or None if there are not as many."""
        victims: list[_Object] = []
        if count <= 0:
            return victims
        for key, found in self._evictable.items():
            if key not in keep:
                victims.append(found)
                if len(victims) == count:
                    return victims
        return None

    def _continuation(self, keys: Sequence[ChunkKey], first_missing: ChunkKey) -> int | None:
        place = keys.index(first_missing)
        return self._by_key[keys[place - 1]].slot if place else None

    def _writing(self, slots: Sequence[int]) -> list[_Object]:
        found = [self._by_slot.get(slot) for slot in slots]
        writing = [entry for entry in found if entry is not None and entry.state is ObjectState.WRITING]
        if len(writing) != len(slots) or len(set(slots)) != len(slots):
            raise RuntimeError(f"slots {list(slots)} are not all being written: committed or abandoned before?")
        return writing

    def _forget(self, found: _Object) -> None:
        del self._by_slot[found.slot]
        if self._by_key.get(found.key) is found:
            del self._by_key[found.key]
        if found.state is ObjectState.READY:
            del self._evictable[found.key]
        self._free.release(found.slot)
