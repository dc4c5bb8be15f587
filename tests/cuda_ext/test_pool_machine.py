"""The host pool against plain dictionaries, in any order of what its users do. POOL-1 to POOL-4, POOL-7."""

from collections.abc import Callable, Iterable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from lamella.cuda_ext.pool import HostPool, PinnedObjects, Reservation
from lamella.reference.keys import ChunkKey
from pool_driver import LAYOUT
from prefix_model import Prefix, PrefixModel, prefixes

documents = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple)


def key_of(chunk: Prefix) -> ChunkKey:
    return ChunkKey(b"space", bytes(chunk), 16)


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
        self.ages = PrefixModel()  # of READY objects and those being written
        self.dropped: set[Prefix] = set()  # once discarded or given up: what is behind them may be without a head
        self.open: dict[object, Callable[[], None]] = {}  # what nobody ended yet, and how it ends

    def _let_go(self, keys: Iterable[ChunkKey]) -> None:
        """Those of a prompt's objects that nobody pins any more are the most recently used."""
        found = [key for key in keys if key in self.ready and not self.held.get(self.ready[key])]
        self.ages.use([tuple(key.prefix) for key in found])

    @rule(target=reservations, document=documents, first=st.integers(0, 3))
    def reserve(self, document: Prefix, first: int) -> object:
        chunks = prefixes(document)[first:]
        wanted = [key_of(chunk) for chunk in chunks]
        after = key_of(document[:first]) if first and chunks else None
        missing = [key for key in wanted if key not in self.ready and key not in self.writing]
        taken = set(self.ready.values()) | set(self.writing.values()) | set(self.held)
        free = {tuple(key.prefix) for key, slot in self.ready.items() if not self.held.get(slot)}
        needed = len(missing) - (self.NUM_SLOTS - len(taken))
        leaving = self.ages.leaving(max(0, needed), free, {*chunks, document[:first]}) if missing else []
        reservation = self.pool.reserve(wanted, after)
        if leaving is None:
            assert reservation is None, "POOL-3"
            return None
        assert reservation is not None
        assert list(reservation.keys) == missing
        assert list(reservation.evicted) == [key_of(chunk) for chunk in leaving], "exactly what was needed, in order"
        for key in reservation.evicted:
            self.ages.remove(tuple(key.prefix))
            taken.remove(self.ready.pop(key))
        assert not taken & set(reservation.slots), "POOL-2"
        if first and missing and missing[0] == wanted[0] and document[:first] not in self.ages.used:
            self.dropped.add(document[:first])
        for key, slot in zip(reservation.keys, reservation.slots, strict=True):
            self.writing[key] = slot
            self.bytes[slot] = key.prefix
            self.pool.memory.buffer(slot)[: len(key.prefix)] = key.prefix
        self.ages.add([tuple(key.prefix) for key in reservation.keys])
        self.open[reservation] = reservation.abandon
        return reservation

    @rule(reservation=consumes(reservations))
    def commit(self, reservation: Reservation | None) -> None:
        if reservation is None:
            return
        reservation.commit()
        del self.open[reservation]
        for key in reservation.keys:
            self.ready[key] = self.writing.pop(key)
        self._let_go(reservation.keys)

    @rule(reservation=consumes(reservations))
    def abandon(self, reservation: Reservation | None) -> None:
        if reservation is None:
            return
        reservation.abandon()
        del self.open[reservation]
        for key in reservation.keys:
            del self.writing[key]
            self._drop(key)

    def _drop(self, key: ChunkKey) -> None:
        self.ages.remove(tuple(key.prefix))
        self.dropped.add(tuple(key.prefix))

    @rule(target=leases, document=documents, first=st.integers(0, 3))
    def pin(self, document: Prefix, first: int) -> object:
        wanted = [key_of(chunk) for chunk in prefixes(document)[first:]]
        if not set(wanted) <= set(self.ready):
            with pytest.raises(KeyError):
                self.pool.pin(wanted)
            return None
        lease = self.pool.pin(wanted)
        assert list(lease.slots) == [self.ready[key] for key in wanted]
        for key in wanted:
            self.held[self.ready[key]] = self.held.get(self.ready[key], 0) + 1
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
        for slot in lease.slots:
            self.held[slot] -= 1
            if not self.held[slot]:
                del self.held[slot]
        self._let_go(key for key, slot in zip(lease.keys, lease.slots, strict=True) if self.ready.get(key) == slot)

    @precondition(lambda self: self.ready)
    @rule(document=documents, first=st.integers(0, 3))
    def discard(self, document: Prefix, first: int) -> None:
        found = [key_of(chunk) for chunk in prefixes(document)[first:]]
        self.pool.discard(found)
        for key in found:
            if self.ready.pop(key, None) is not None:
                self._drop(key)

    @invariant()
    def only_who_was_discarded_leaves_others_without_a_head(self) -> None:
        assert {chunk[:-1] for chunk in self.ages.headless()} <= self.dropped, "POOL-7"

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
        for chunk in self.ages.used:
            key = key_of(chunk)
            assert self.pool.leading_hits([key]) == (key in self.ready)
            assert self.pool.is_whole(key) == all(before in self.ages.used for before in prefixes(chunk))

    @invariant()
    def held_bytes_are_untouched(self) -> None:
        for slot in [*self.held, *self.ready.values()]:
            assert bytes(self.pool.memory.buffer(slot)[: len(self.bytes[slot])]) == self.bytes[slot], "POOL-2"

    def teardown(self) -> None:
        for end in self.open.values():
            end()
        now = self.pool.report().occupancy
        assert (now.pins, now.writing) == (0, 0), "POOL-4"
        self.pool.close()


TestPoolMachine = PoolMachine.TestCase
