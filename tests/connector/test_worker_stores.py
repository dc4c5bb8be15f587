"""What a rank tells of stores that go into a file tier, whether they ended well here or not."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lamella.connector.connector_metrics import Metrics
from lamella.connector.step_orders import Ended, FetchOrder, StoreOrder
from lamella.connector.storage.file_tier import FileTier
from lamella.connector.storage.tier import TierError
from lamella.connector.tier_prefetch import RankObjects, TierPrefetch, rank_key
from lamella.connector.worker_stores import WorkerStores
from lamella.cuda_ext.slot_index import SlotIndex
from lamella.cuda_ext.transfer import TransferState
from lamella.reference.keys import ChunkKey
from lamella.reference.slices import Slice, plan_slices
from waiting import wait_until

SIZE, SPACE = 64, b"s" * 32
KEY = ChunkKey(b"k" * 32, b"p" * 32, 8)
ORDER = StoreOrder(7, "r", (0,), 0, ((1,),), 8, 0, (KEY,))


class Memory:
    """One slot, with the bytes of an object."""

    shape = SimpleNamespace(object_bytes=SIZE)

    def buffer(self, slot: int) -> memoryview:
        return memoryview(bytes(range(SIZE)))


def stores_into(tier: FileTier, state: TransferState) -> WorkerStores:
    """Of a rank whose every copy has ended so."""

    def submit(order: StoreOrder, slices: Sequence[Slice]) -> Any:
        return SimpleNamespace(state=state, wait_final=lambda timeout_s: state, cancel=lambda: None)

    memory: Any = Memory()
    return WorkerStores(submit, plan_slices(4, 1), False, memory, SPACE, tier, 1, Metrics())


@pytest.mark.parametrize("spoiled", [False, True])
@pytest.mark.parametrize("state", [TransferState.LANDED, TransferState.FAILED])
def test_every_rank_tells_of_every_store_once_when_its_tier_is_done_with_it(
    tmp_path: Path, state: TransferState, spoiled: bool
) -> None:
    """A rank whose store failed said nothing, so nobody could know when all ranks' tiers had read the slots."""
    tmp_path.chmod(0o700)
    tier = FileTier(tmp_path, SIZE)
    stores = stores_into(tier, state)
    stores.begin_step([ORDER], [])
    stores.step_computed(lambda tables: spoiled)
    is_kept = state is TransferState.LANDED and not spoiled
    ended, puts, _fetches = stores.poll()
    assert ended == {7: Ended(1, is_kept)}
    assert puts or is_kept  # of what failed at once, so that it can be stored again
    until = time.monotonic() + 10
    while not puts and time.monotonic() < until:
        ended, puts, _fetches = stores.poll()
        assert not ended
    assert puts == {7: Ended(1, is_kept)}
    assert stores.num_open == 0
    assert tier.exists([rank_key(KEY, SPACE)]) == (is_kept,)
    stores.close()


class FullDisk(FileTier):
    """A tier that keeps nothing while it is full."""

    full = True

    def put(self, key: ChunkKey, data: memoryview) -> None:
        if self.full:
            raise TierError("No space left on device (ENOSPC)")
        super().put(key, data)


def test_a_full_disk_is_said_once_and_counted_and_so_is_that_it_has_room_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o700)
    tier = FullDisk(tmp_path, SIZE)
    stores = stores_into(tier, TransferState.LANDED)

    def store(number: int) -> bool:
        stores.begin_step([replace(ORDER, number=number)], [])
        stores.step_computed(lambda tables: False)
        ends: dict[int, Ended] = {}

        def has_ended() -> bool:
            ends.update(stores.poll()[1])
            return number in ends

        wait_until(has_ended, "its put has ended")
        return ends[number].ok

    assert [store(number) for number in range(3)] == [False] * 3
    (said,) = caplog.messages
    assert "does not keep what is stored" in said
    assert "No space left on device" in said
    tier.full = False
    assert store(3)
    assert store(4)
    assert caplog.messages[1:] == ["the file tier keeps what is stored again, after 3 stores that it did not"]
    assert stores._metrics.take()["tier_puts_failed"] == 3
    tier.full = True
    assert not store(5)
    assert len(caplog.messages) == 3
    stores.close()


@pytest.mark.parametrize("state", [TransferState.LANDED, TransferState.CANCELLED])
def test_a_store_that_does_not_end_costs_itself_and_not_the_engine_when_its_blocks_are_written_again(
    state: TransferState, caplog: pytest.LogCaptureFixture
) -> None:
    """It may have read what came into its blocks, whatever becomes of the copy; its slots stay its own until then."""
    copy = SimpleNamespace(state=TransferState.RUNNING, cancelled=False)
    waited: list[float] = []

    def wait_final(timeout_s: float) -> Any:
        waited.append(timeout_s)
        raise TimeoutError("the device is stuck")

    copy.wait_final, copy.cancel = wait_final, lambda: setattr(copy, "cancelled", True)
    stores = WorkerStores(lambda order, slices: copy, plan_slices(4, 1), False, None, SPACE, None, 1, Metrics())
    stores.begin_step([ORDER, replace(ORDER, number=8)], ())
    stores.step_computed(lambda blocks: False)
    stores.flush([7, 8], 0.5)
    assert copy.cancelled
    assert waited[0] <= 0.5
    assert sum(waited) <= 1.0, "the bound is of all of them"
    assert "store 7 of request r is given up" in caplog.text
    assert stores.poll()[0] == {}
    copy.state = state
    assert stores.poll()[0] == {7: Ended(1, False), 8: Ended(1, False)}
    stores.close()


def test_what_no_tier_is_to_keep_goes_into_none_and_is_counted(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    stores = stores_into(FileTier(tmp_path, SIZE), TransferState.LANDED)
    stores.begin_step([replace(ORDER, keys=())], [])
    stores.step_computed(lambda tables: False)
    assert stores.poll() == ({7: Ended(1, True)}, {}, {})
    assert stores.num_open == 0
    assert stores._metrics.take()["tier_puts_skipped"] == 1
    stores.close()


class Broken(FileTier):
    """It fails as no tier may."""

    def put(self, key: ChunkKey, data: memoryview) -> None:
        raise AttributeError("a slip")

    def get_ranges(self, *arguments: Any) -> None:
        raise AttributeError("a slip")

    def exists(self, keys: Sequence[ChunkKey]) -> tuple[bool, ...]:
        raise AttributeError("a slip")


def test_a_tiers_own_fault_is_a_miss_and_no_end_of_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    stores = stores_into(Broken(tmp_path, SIZE), TransferState.LANDED)
    stores.begin_step([ORDER], [FetchOrder(9, (0,), (KEY,))])
    stores.step_computed(lambda tables: False)
    found: list[Any] = []

    def have_ended() -> bool:
        _stores, puts, fetches = stores.poll()
        found.extend([*puts.items(), *fetches.items()])
        return len(found) == 2

    wait_until(have_ended, "the put and the fetch have ended")
    assert sorted(found) == [(7, Ended(1, False)), (9, (Ended(1, False),))]
    stores.close()
    monkeypatch.setattr("lamella.connector.tier_prefetch.FileTier", Broken)
    prefetch = TierPrefetch(tmp_path, SlotIndex(), [RankObjects(SPACE, SIZE)], iter(range(9)).__next__, 5.0)
    wait_until(lambda: prefetch.settle("r", [KEY]), "the lookup has ended")
    assert prefetch.num_open == 0
    prefetch.close()
