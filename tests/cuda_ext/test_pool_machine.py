"""The host pool against plain dictionaries, in any order of what its users do."""

from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from lamella.cuda_ext.pool import HostPool, PinnedObjects, Reservation
from lamella.reference.keys import ChunkKey
from pool_driver import LAYOUT, key_of, keys


class PoolMachine(RuleBasedStateMachine):
    """The pool against dictionaries: who holds what, in which slot, and what may be evicted."""

    reservations = Bundle("reservations")
    leases = Bundle("leases")
    NUM_SLOTS = 6

    def __init__(self) -> None:
        super().__init__()
        self.pool = HostPool(LAYOUT, self.NUM_SLOTS)
        self.ready: dict[ChunkKey, int] = {}
        self.writing: dict[ChunkKey, int] = {}
        self.held: dict[int, int] = {}  # slot -> leases on it
        self.bytes: dict[int, bytes] = {}
        self.age: list[ChunkKey] = []  # of unpinned READY objects, oldest first
        self.open: dict[object, Callable[[], None]] = {}  # what nobody ended yet, and how it ends

    def _touch(self, key: ChunkKey) -> None:
        if key in self.age:
            self.age.remove(key)
        if key in self.ready and not self.held.get(self.ready[key]):
            self.age.append(key)

    @rule(target=reservations, numbers=st.lists(st.integers(0, 11), min_size=1, max_size=NUM_SLOTS, unique=True))
    def reserve(self, numbers: list[int]) -> object:
        wanted = keys(*numbers)
        missing = [key for key in wanted if key not in self.ready and key not in self.writing]
        taken = set(self.ready.values()) | set(self.writing.values()) | set(self.held)
        candidates = [key for key in self.age if key not in wanted]
        needed = len(missing) - (self.NUM_SLOTS - len(taken))
        reservation = self.pool.reserve(wanted)
        if needed > len(candidates):
            assert reservation is None, "POOL-3"
            return None
        assert reservation is not None
        assert list(reservation.keys) == missing
        assert list(reservation.evicted) == candidates[: max(0, needed)], "exactly what was needed, the oldest first"
        for key in reservation.evicted:
            self.age.remove(key)
            taken.remove(self.ready.pop(key))
        assert not taken & set(reservation.slots), "POOL-2"
        for key, slot in zip(reservation.keys, reservation.slots, strict=True):
            self.writing[key] = slot
            self.bytes[slot] = key.prefix
            self.pool.memory.buffer(slot)[:4] = key.prefix
        self.open[reservation] = reservation.abandon
        return reservation

    @rule(reservation=consumes(reservations))
    def commit(self, reservation: Reservation | None) -> None:
        if reservation is None:
            return
        reservation.commit()
        del self.open[reservation]
        for key in reversed(reservation.keys):
            self.ready[key] = self.writing.pop(key)
            self._touch(key)

    @rule(reservation=consumes(reservations))
    def abandon(self, reservation: Reservation | None) -> None:
        if reservation is None:
            return
        reservation.abandon()
        del self.open[reservation]
        for key in reservation.keys:
            del self.writing[key]

    @rule(target=leases, numbers=st.lists(st.integers(0, 11), max_size=4, unique=True))
    def pin(self, numbers: list[int]) -> object:
        wanted = keys(*numbers)
        if not set(wanted) <= set(self.ready):
            with pytest.raises(KeyError):
                self.pool.pin(wanted)
            return None
        lease = self.pool.pin(wanted)
        assert list(lease.slots) == [self.ready[key] for key in wanted]
        for key in wanted:
            self.held[self.ready[key]] = self.held.get(self.ready[key], 0) + 1
            self._touch(key)
        self.open[lease] = lease.release
        return lease

    @rule(lease=consumes(leases), twice=st.booleans())
    def release(self, lease: PinnedObjects | None, twice: bool) -> None:
        if lease is None:
            return
        lease.release()
        del self.open[lease]
        if twice:
            lease.release()
        for key, slot in reversed(list(zip(lease.keys, lease.slots, strict=True))):
            self.held[slot] -= 1
            if not self.held[slot]:
                del self.held[slot]
                if self.ready.get(key) == slot:
                    self._touch(key)

    @precondition(lambda self: self.ready)
    @rule(numbers=st.lists(st.integers(0, 11), min_size=1, max_size=2))
    def discard(self, numbers: list[int]) -> None:
        self.pool.discard(keys(*numbers))
        for key in keys(*numbers):
            if self.ready.pop(key, None) is not None and key in self.age:
                self.age.remove(key)

    @invariant()
    def every_slot_is_free_or_holds_one_object(self) -> None:
        now = self.pool.report().occupancy
        discarded = set(self.held) - set(self.ready.values())
        owned = [*self.ready.values(), *self.writing.values(), *discarded]
        assert len(owned) == len(set(owned)), "POOL-1"
        assert now.free == self.NUM_SLOTS - len(owned)
        assert (now.writing, now.ready) == (len(self.writing), len(self.ready))
        assert (now.pinned, now.pins) == (len(self.held), sum(self.held.values())), "POOL-4"

    @invariant()
    def what_is_found_is_what_was_committed(self) -> None:
        for number in range(12):
            assert self.pool.leading_hits(keys(number)) == (key_of(number) in self.ready)

    @invariant()
    def held_bytes_are_untouched(self) -> None:
        for slot in [*self.held, *self.ready.values()]:
            assert bytes(self.pool.memory.buffer(slot)[:4]) == self.bytes[slot], "POOL-2"

    def teardown(self) -> None:
        for end in self.open.values():
            end()
        now = self.pool.report().occupancy
        assert (now.pins, now.writing) == (0, 0), "POOL-4"
        self.pool.close()


TestPoolMachine = PoolMachine.TestCase
