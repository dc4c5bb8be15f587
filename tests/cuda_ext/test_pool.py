"""The host pool: leases, reservations, eviction."""

import re
import threading
import timeit
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella.cuda_ext.pool import Backing, HostPool
from lamella.cuda_ext.registration import NoRegistrar, RegistrationError
from lamella.cuda_ext.slot_index import SlotIndex
from lamella.cuda_ext.slots import SlotMemory
from lamella.reference.geometry import ObjectForm
from lamella.reference.layout import ObjectLayout
from pool_driver import LAYOUT, fill, key_of, keys


@pytest.fixture
def pool() -> Iterator[HostPool]:
    pool = HostPool(LAYOUT, 4)
    yield pool
    pool.close()


@pytest.mark.parametrize("name", ["num_slots", "piece_bytes"])
@pytest.mark.parametrize("wrong", [True, 1.5, "2", float("nan"), 0, -1, 10**30], ids=repr)
def test_a_size_of_a_pool_that_cannot_be_is_refused_by_its_name_and_value(name: str, wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=f"{name} must be .*, got {wrong:,}" if wrong == 10**30 else name):
        HostPool(LAYOUT, **{"num_slots": 2, name: wrong})


@pytest.mark.parametrize("wrong", ["shared", None, True], ids=repr)
def test_the_name_of_a_backing_is_none(wrong: Any) -> None:
    """It passed for anonymous memory, which no other process can map."""
    with pytest.raises(
        TypeError, match=re.escape(f"backing must be Backing.ANONYMOUS or Backing.SHARED, got {wrong!r}")
    ):
        HostPool(LAYOUT, 2, backing=wrong)


def test_an_object_is_found_only_after_its_bytes_are_there(pool: HostPool) -> None:
    reservation = pool.reserve(keys(1, 2))
    assert reservation is not None
    assert pool.leading_hits(keys(1, 2)) == 0
    with pytest.raises(KeyError, match="no readable object"):
        pool.pin(keys(1))
    reservation.commit()
    assert pool.leading_hits(keys(1, 2, 3)) == 2
    with pool.pin(keys(2, 1)) as objects:
        assert objects.slots == (1, 0)
        assert objects.addresses[0] - objects.addresses[1] == LAYOUT.object_bytes


def test_what_is_written_into_a_slot_is_what_a_lease_reads(pool: HostPool) -> None:
    fill(pool, 7)
    with pool.pin(keys(7)) as objects:
        pool.memory.buffer(objects.slots[0])[-3:] = b"end"
        assert bytes(pool.memory.buffer(objects.slots[0]))[-4:] == b"\0end"
    assert len(pool.memory.buffer(0)) == LAYOUT.object_bytes


@pytest.mark.parametrize("form", ObjectForm)
def test_a_pool_of_either_form_has_room_for_its_objects(form: ObjectForm) -> None:
    layout = ObjectLayout.single(LAYOUT.groups[0].geometry, block_tokens=4, form=form)
    pool = HostPool(layout, 3)
    assert pool.memory.shape.object_bytes == layout.object_bytes
    pool.close()


def test_a_lease_is_handed_to_a_transfer_by_absolute_chunk(pool: HostPool) -> None:
    fill(pool, 1, 2, 3)
    base = pool.memory.base
    with pool.pin(keys(3, 1)) as objects:
        assert objects.host_objects().addresses == (base + 2 * LAYOUT.object_bytes, base)
        placed = objects.host_objects([4, 1])
        assert placed.addresses == (0, base, 0, 0, base + 2 * LAYOUT.object_bytes)
        assert (placed.registered_base, placed.registered_piece_bytes) == (base, pool.memory.shape.piece_bytes)
        for wrong in ([0], [1, 1], [-1, 0]):
            with pytest.raises(ValueError, match="chunks must be 2 different ones, one an object"):
                objects.host_objects(wrong)
    with pool.pin([]) as nothing:
        assert nothing.host_objects().addresses == ()


@pytest.mark.known_fault(41)
def test_a_pool_smaller_than_the_request_refuses_it_whole_and_evicts_nothing(pool: HostPool) -> None:
    fill(pool, 1, 2)
    with pool.pin(keys(1)):
        assert pool.reserve(keys(11, 12, 13, 14)) is None
    assert pool.leading_hits(keys(1, 2)) == 2
    with pytest.raises(ValueError, match="5 objects can never fit into a pool of 4"):
        pool.reserve(keys(11, 12, 13, 14, 15))


@pytest.mark.known_fault(41)
def test_two_reservations_never_wait_for_one_anothers_slots(pool: HostPool) -> None:
    first = pool.reserve(keys(1, 2, 3))
    assert first is not None
    assert pool.reserve(keys(4, 5)) is None
    first.commit()
    second = pool.reserve(keys(4, 5))
    assert second is not None
    assert second.evicted == (key_of(3),), "one slot was free, and the tail of a prefix goes first"
    second.abandon()


@pytest.mark.known_fault(40)
def test_an_object_in_two_requests_stays_until_both_released_it(pool: HostPool) -> None:
    fill(pool, 1, 2, 3, 4)
    first, second = pool.pin(keys(1)), pool.pin(keys(1))
    first.release()
    first.release()
    assert pool.reserve(keys(5, 6, 7, 8)) is None
    reservation = pool.reserve(keys(5, 6, 7))
    assert reservation is not None, "the three others make room"
    assert pool.leading_hits(keys(1)) == 1
    reservation.abandon()
    second.release()
    reservation = pool.reserve(keys(5, 6, 7, 8))
    assert reservation is not None
    assert reservation.evicted == (key_of(1),)
    reservation.abandon()


@pytest.mark.known_fault(4)
def test_a_pool_of_one_less_serves_any_number_of_requests_one_after_another() -> None:
    pool = HostPool(LAYOUT, 3)
    for number in range(40):
        fill(pool, number)
        with pool.pin(keys(number)) as objects:
            assert pool.report().occupancy.pins == 1, objects.keys
    assert pool.report().occupancy == (0, 0, 3, 0, 0), "every reference returned to the baseline"
    pool.close()


@pytest.mark.known_fault(5)
def test_a_lease_is_on_every_object_or_on_none(pool: HostPool) -> None:
    fill(pool, 1, 2)
    with pytest.raises(KeyError):
        pool.pin(keys(1, 9, 2))
    assert pool.report().occupancy.pins == 0
    with pool.pin_leading(keys(1, 9, 2)) as objects:
        assert objects.keys == (key_of(1),)


@given(st.lists(st.integers(1, 6), max_size=6), st.lists(st.integers(1, 6), max_size=8))
def test_pinning_what_leads_is_looking_up_and_pinning_in_one(held: list[int], wanted: list[int]) -> None:
    index = SlotIndex()
    index.add_slots(0, 6)
    reserved = index.reserve(keys(*dict.fromkeys(held)))
    assert reserved is not None
    index.commit(reserved.slots)
    leading = keys(*wanted)[: index.leading_hits(keys(*wanted))]
    found = index.pin_leading(keys(*wanted))
    assert index.reserve(keys(*range(10, 17 - len(set(leading))))) is None, "what is pinned is not evicted"
    again = index.pin(leading)
    assert found == again
    assert index.occupancy().pins == 2 * len(leading)
    assert index.reserve(keys(*range(10, 17 - len(set(leading))))) is None, "what is pinned is not evicted"
    index.unpin(found)
    index.unpin(again)
    assert index.occupancy().pins == 0
    assert index.reserve(keys(*range(10, 16))) is not None, "and can be, once let go"


def test_what_a_pool_holds_is_said_at_once_however_much_it_is() -> None:
    """Who reads the figures holds the lock that look-ups need: a scrape of a million objects cost one its answer."""

    def shortest_s(objects: int) -> float:
        index = SlotIndex()
        index.add_slots(0, objects)
        for first in range(0, objects, 500):
            reserved = index.reserve(keys(*range(first, first + 500)))
            assert reserved is not None
            index.commit(reserved.slots)
        assert index.occupancy() == (0, 0, objects, 0, 0)
        return min(timeit.repeat(index.occupancy, number=1, repeat=20))

    assert shortest_s(50_000) < 20 * shortest_s(500)


def test_the_least_recently_used_object_goes_first_and_a_prefix_loses_its_tail_before_its_head(pool: HostPool) -> None:
    fill(pool, 1, 2)
    fill(pool, 3, 4)
    pool.pin(keys(1, 2)).release()
    gone = []
    for number in (10, 11, 12):
        reservation = pool.reserve(keys(number))
        assert reservation is not None
        gone += reservation.evicted
        reservation.commit()
    assert gone == keys(4, 3, 2)


def test_making_room_for_a_prefixs_tail_never_evicts_its_head(pool: HostPool) -> None:
    fill(pool, 1, 2)
    fill(pool, 8, 9)
    reservation = pool.reserve(keys(1, 2, 3, 4))
    assert reservation is not None
    assert reservation.keys == (key_of(3), key_of(4))
    assert set(reservation.evicted) == {key_of(8), key_of(9)}
    reservation.commit()
    assert pool.leading_hits(keys(1, 2, 3, 4)) == 4


def test_keys_that_another_is_writing_are_left_to_it(pool: HostPool) -> None:
    first, second = pool.reserve(keys(1, 2)), pool.reserve(keys(1, 2, 3))
    assert first is not None
    assert second is not None
    assert second.keys == (key_of(3),)
    first.commit()
    second.commit()
    third = pool.reserve(keys(1, 2, 3))
    assert third is not None
    assert (third.keys, third.slots) == ((), ())
    third.commit()


def test_a_reservation_ends_once_and_a_second_end_cannot_touch_the_slots_next_owner(pool: HostPool) -> None:
    first = pool.reserve(keys(1, 2, 3, 4))
    assert first is not None
    first.abandon()
    second = pool.reserve(keys(5, 6, 7, 8))
    assert second is not None
    assert second.slots == first.slots
    for end in (first.commit, first.abandon):
        with pytest.raises(RuntimeError, match="committed or abandoned before"):
            end()
    assert pool.leading_hits(keys(5)) == 0
    second.commit()


def test_a_discarded_object_is_unfindable_at_once_and_leaves_with_its_last_holder(pool: HostPool) -> None:
    fill(pool, 1, 2, 3, 4)
    lease = pool.pin(keys(1))
    pool.discard(keys(1, 2, 99))
    assert pool.leading_hits(keys(1)) == 0
    assert pool.report().occupancy.free == 1, "2 is gone, 1 is still held"
    again = pool.reserve(keys(1))
    assert again is not None
    assert again.slots != lease.slots, "the old bytes are still being read"
    again.commit()
    lease.release()
    assert pool.report().occupancy == (1, 0, 3, 0, 0)


def test_a_pool_that_is_in_use_refuses_to_close(pool: HostPool) -> None:
    reservation = pool.reserve(keys(1))
    assert reservation is not None
    with pytest.raises(RuntimeError, match="0 objects are pinned and 1 are being written"):
        pool.close()
    reservation.commit()
    with pool.pin(keys(1)), pytest.raises(RuntimeError, match="1 objects are pinned and 0 are being written"):
        pool.close()


@pytest.mark.known_fault(83)
def test_slots_whose_memory_failed_to_register_are_never_handed_out() -> None:
    class Refuses(NoRegistrar):
        calls = 0

        def register(self, address: int, num_bytes: int) -> None:
            self.calls += 1
            if self.calls == 2:
                raise OSError(12, "cannot allocate memory")

    pool = HostPool(LAYOUT, 24, piece_bytes=1, registrar=Refuses())
    report = pool.memory.wait_registered(20)
    per_piece = pool.memory.shape.piece_slots
    assert [failed.piece for failed in report.failed] == [1]
    assert pool.memory.ready_slots == per_piece, "slots behind a piece that failed do not count"
    bad = set(pool.memory.shape.slots_of(1))
    usable = 24 - len(bad)
    slots = fill(pool, *range(usable))
    assert len(bad) == per_piece
    assert not bad & set(slots), "POOL-6"
    more = pool.reserve(keys(*range(100, 100 + usable)))
    assert more is not None
    assert not bad & set(more.slots), "nor after eviction"
    more.abandon()
    with pytest.raises(RegistrationError, match="RLIMIT_MEMLOCK"):
        raise report.failed[0].error
    pool.close()


def test_a_shared_pools_bytes_are_reached_by_slot_from_an_attached_memory() -> None:
    pool = HostPool(LAYOUT, 4, backing=Backing.SHARED)
    (slot,) = fill(pool, 3)
    other = SlotMemory.attach(pool.shared(), NoRegistrar())
    pool.memory.buffer(slot)[:5] = b"layer"
    assert bytes(other.buffer(slot)[:5]) == b"layer"
    path = pool.shared().path
    other.close()
    pool.close()
    assert not path.exists()


def test_an_anonymous_pool_cannot_be_shared(pool: HostPool) -> None:
    with pytest.raises(RuntimeError, match="only the creator of a shared memory can share it"):
        pool.shared()


@given(before=st.integers(0, 5), count=st.integers(1, 12))
def test_a_prefix_in_an_empty_pool_is_consecutive_and_stays_so_as_it_grows(before: int, count: int) -> None:
    pool = HostPool(LAYOUT, 32)
    head = fill(pool, *range(before)) if before else ()
    slots = fill(pool, *range(before + count))
    assert [*head, *slots] == list(range(before + count))
    pool.close()


def test_threads_that_pin_reserve_and_evict_at_once_leave_a_pool_at_its_baseline() -> None:
    pool = HostPool(LAYOUT, 12)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for step in range(300):
                wanted = keys(*((seed * 7 + step * 3 + i) % 30 for i in range(4)))
                reservation = pool.reserve(wanted)
                if reservation is not None:
                    (reservation.commit if step % 3 else reservation.abandon)()
                with pool.pin_leading(wanted) as objects:
                    assert len(set(objects.slots)) == len(objects.slots)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    now = pool.report().occupancy
    assert (now.pins, now.writing, now.free + now.ready) == (0, 0, 12)
    pool.close()
