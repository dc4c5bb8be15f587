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
from lamella.connector.step_orders import Ended, StoreOrder
from lamella.connector.storage.file_tier import FileTier
from lamella.connector.storage.tier import TierError
from lamella.connector.tier_prefetch import rank_key
from lamella.connector.worker_stores import WorkerStores
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
