"""What a rank tells of stores that go into a file tier, whether they ended well here or not."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lamella.connector.connector_metrics import Metrics
from lamella.connector.step_orders import Ended, StoreOrder
from lamella.connector.storage.file_tier import FileTier
from lamella.connector.tier_prefetch import rank_key
from lamella.connector.worker_stores import WorkerStores
from lamella.cuda_ext.transfer import TransferState
from lamella.reference.keys import ChunkKey
from lamella.reference.slices import Slice, plan_slices

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
