"""Objects of a file tier on their way into the pool: found on every rank or not at all, fetched once, bounded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import pytest

from lamella.connector.step_orders import Ended
from lamella.connector.storage.file_tier import FileTier
from lamella.connector.tier_prefetch import RankObjects, TierPrefetch, rank_key
from lamella.cuda_ext.slot_index import SlotIndex
from lamella.reference.keys import ChunkKey

RANKS = [RankObjects(b"0" * 32, 64), RankObjects(b"1" * 32, 64)]
KEYS = [ChunkKey(b"s" * 32, bytes([number]) * 32, 8) for number in range(4)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


def keep(folder: Path, keys: list[ChunkKey], ranks: list[RankObjects] = RANKS) -> None:
    tier = FileTier(folder, 64)
    for key in keys:
        for rank in ranks:
            tier.put(rank_key(key, rank.space), memoryview(bytes(64)))


def prefetch_of(folder: Path, slots: int = 8, clock_ns: Callable[[], int] = lambda: 0) -> TierPrefetch:
    index = SlotIndex()
    index.add_slots(0, slots)
    numbers = count()
    return TierPrefetch(folder, index, RANKS, lambda: next(numbers), 1.0, clock_ns)


def until_settled(prefetch: TierPrefetch, name: str, keys: list[ChunkKey]) -> bool:
    """Asks until the lookup has ended: then it has settled, or a fetch is ordered."""
    while name not in prefetch._asked or not prefetch._asked[name].lookup.done():
        prefetch.settle(name, keys)
        threading.Event().wait(0.001)
    return prefetch.settle(name, keys)


def test_what_every_rank_has_is_fetched_and_readable_when_all_have_it(folder: Path) -> None:
    keep(folder, KEYS[:2])
    keep(folder, KEYS[2:3], RANKS[:1])  # one rank's share alone
    prefetch = prefetch_of(folder)
    assert not until_settled(prefetch, "a", KEYS)
    (order,) = prefetch.take_orders()
    assert order.keys == tuple(KEYS[:2])
    prefetch.ended(order.number, [Ended(1, True)] * 2, num_ranks=2)
    assert not prefetch.settle("a", KEYS)
    prefetch.ended(order.number, [Ended(1, True), Ended(1, False)], num_ranks=2)
    assert prefetch.settle("a", KEYS)
    assert prefetch._index.leading_hits(KEYS) == 1  # the other did not arrive on one rank
    assert prefetch._index.occupancy().writing == 0


def test_what_is_fetched_takes_no_room_from_what_comes_before_it_and_leaves_before_it(folder: Path) -> None:
    keep(folder, KEYS)
    prefetch = prefetch_of(folder, slots=4)
    index = prefetch._index
    others = [key._replace(space=b"o" * 32) for key in KEYS]
    for keys in (KEYS[:1], others[:2]):  # the head is the oldest
        reserved = index.reserve(keys)
        assert reserved is not None
        index.commit(reserved.slots)
    while not prefetch._asked or not prefetch._asked["a"].lookup.done():
        prefetch.settle("a", KEYS[1:], KEYS[0])
        threading.Event().wait(0.001)
    assert not prefetch.settle("a", KEYS[1:], KEYS[0])
    (order,) = prefetch.take_orders()
    prefetch.ended(order.number, [Ended(2, True)] * 3, num_ranks=2)
    assert index.leading_hits(KEYS) == 4
    assert index.reserve(others[3:]) is not None
    assert index.leading_hits(KEYS) == 3, "the last of them went"


def test_nothing_there_settles_without_a_fetch(folder: Path) -> None:
    prefetch = prefetch_of(folder)
    assert until_settled(prefetch, "a", KEYS)
    assert prefetch.take_orders() == ()


def test_two_requests_for_the_same_chunks_wait_for_one_fetch(folder: Path) -> None:
    keep(folder, KEYS[:2])
    prefetch = prefetch_of(folder)
    assert not until_settled(prefetch, "a", KEYS)
    assert not until_settled(prefetch, "a", KEYS)
    while "b" not in prefetch._asked or not prefetch._asked["b"].lookup.done():
        prefetch.settle("b", KEYS)
        threading.Event().wait(0.001)
    assert not prefetch.settle("b", KEYS)
    (order,) = prefetch.take_orders()
    prefetch.ended(order.number, [Ended(2, True)] * 2, num_ranks=2)
    assert prefetch.settle("a", KEYS)
    assert prefetch.settle("b", KEYS)


@pytest.mark.known_fault(44)
def test_a_tier_that_does_not_answer_is_a_miss_after_the_bound(folder: Path) -> None:
    keep(folder, KEYS[:2])
    now = [0]
    prefetch = prefetch_of(folder, clock_ns=lambda: now[0])
    assert not until_settled(prefetch, "a", KEYS)  # a fetch is under way, and nobody ends it
    now[0] = 2_000_000_000
    assert prefetch.settle("a", KEYS)


@pytest.mark.known_fault(41)
def test_a_pool_too_small_for_a_fetch_fetches_nothing(folder: Path) -> None:
    keep(folder, KEYS)
    prefetch = prefetch_of(folder, slots=2)
    assert until_settled(prefetch, "a", KEYS)
    assert prefetch._index.occupancy().free == 2


def test_a_folder_that_hangs_is_a_miss_at_once_for_all_that_come_later_and_keeps_no_queue(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request waited for the bound, and its lookup was kept for good."""
    keep(folder, KEYS)
    answers, begun = threading.Event(), threading.Event()
    exists = FileTier.exists

    def hangs(tier: FileTier, keys: Sequence[ChunkKey]) -> tuple[bool, ...]:
        begun.set()
        assert answers.wait(60)
        return exists(tier, keys)

    monkeypatch.setattr(FileTier, "exists", hangs)
    now = [0]
    prefetch = prefetch_of(folder, clock_ns=lambda: now[0])
    assert not prefetch.settle("first", KEYS)
    assert begun.wait(60)
    assert not prefetch.settle("second", KEYS)
    assert not prefetch.settle("aborted", KEYS)
    prefetch.forget("aborted")
    now[0] = 2_000_000_000
    assert prefetch.settle("second", KEYS), "it stood behind the first"
    assert prefetch.settle("first", KEYS)
    for number in range(100):
        assert prefetch.settle(f"r{number}", KEYS)
        prefetch.forget(f"r{number}")
    assert set(prefetch._asked) == {"first", "second"}
    waiting = [prefetch._thread._work_queue.get() for _ in range(prefetch._thread._work_queue.qsize())]
    assert all(item.future.cancelled() for item in waiting)
    assert len(waiting) == 2
    answers.set()
    while not prefetch._asked["first"].lookup.done():
        threading.Event().wait(0.001)
    assert not until_settled(prefetch, "later", KEYS), "it answers again"
    prefetch.close()
