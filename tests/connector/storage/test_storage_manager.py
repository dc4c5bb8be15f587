"""Pool and tiers together: promotion, write-behind with a limit, and what the first layer costs."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cache_driver import WAIT_S, MemoryTier
from lamella.connector.storage.object_format import layer_runs
from lamella.connector.storage.redis_tier import RedisTier
from lamella.connector.storage.tier import TierError
from lamella.reference.geometry import KVGeometry
from lamella.reference.keys import ChunkKey
from lamella.reference.layout import KernelGroup, ObjectLayout
from lamella.reference.slices import Slice, plan_slices
from storage_driver import LAYERS, LAYOUT, Storage, memory
from storage_servers import RedisProcess, Wire
from tier_objects import key

KEYS = tuple(key(number, 8) for number in range(6))


# ---- promotion


@pytest.mark.parametrize("width", range(1, LAYERS + 1))
def test_what_a_retrieve_brings_from_a_tier_is_in_the_pool_afterwards(width: int) -> None:
    tier = memory()
    with Storage([tier], promote=True) as run:
        run.only_in_tiers(KEYS)
        assert run.retrieve(KEYS, width) == 6
        assert run.pool.leading_hits(KEYS) == 6
        reads = len(tier.reads)
        assert run.retrieve(KEYS, width) == 6
        assert len(tier.reads) == reads, "the second time the tier is not asked"
        assert run.references() == (0, 0, 0)
        assert run.manager.counts().promoted == 6


def test_while_a_retrieve_reads_the_objects_are_found_by_nobody_and_evicted_by_nobody() -> None:
    with Storage([memory()], slots=6, promote=True) as run:
        run.only_in_tiers(KEYS)
        held = run.manager.hold_prefix(KEYS)
        futures = run.manager.layerwise_batched_get(held, plan_slices(LAYERS, 1))
        sources = [source for future in futures for source in future.result(WAIT_S).sources]
        assert run.pool.leading_hits(KEYS) == 0
        assert run.pool.reserve([key(99, 8)]) is None, "every slot is being copied from"
        for source in sources:
            source.release()
        assert run.pool.leading_hits(KEYS) == 0, "the retrieve itself has not let go"
        held.release()
        assert run.pool.leading_hits(KEYS) == 6


def test_without_room_for_all_of_a_run_it_passes_through_buffers() -> None:
    with Storage([memory()], slots=6, promote=True) as run:
        run.only_in_tiers(KEYS)
        other = run.pool.reserve([key(50, 8)])
        assert other is not None
        assert run.retrieve(KEYS) == 6
        assert run.pool.leading_hits(KEYS) == 0
        other.abandon()
        assert run.references() == (0, 0, 0)


def test_two_retrieves_at_once_both_come_and_one_promotes() -> None:
    with Storage([memory()], slots=8, promote=True) as run:
        run.only_in_tiers(KEYS[:3])
        helds = [run.manager.hold_prefix(KEYS[:3]) for _ in range(2)]
        gets = [run.manager.layerwise_batched_get(held, plan_slices(LAYERS, 1)) for held in helds]
        for first, second in zip(*gets, strict=True):
            for held, future in ((helds[0], first), (helds[1], second)):
                assert run.check(held, future.result(WAIT_S)) == 3
        for held in helds:
            held.release()
        assert run.pool.leading_hits(KEYS) == 3
        assert run.references() == (0, 0, 0)


@pytest.mark.known_fault(4, 41)
def test_an_object_lost_under_way_leaves_nothing_half_in_the_pool() -> None:
    tier = memory()
    with Storage([tier], promote=True) as run:
        run.only_in_tiers(KEYS)
        held = run.manager.hold_prefix(KEYS)
        futures = run.manager.layerwise_batched_get(held, plan_slices(LAYERS, 1))
        assert run.check(held, next(futures).result(WAIT_S)) == 6
        tier.delete(KEYS[2])
        cut = next(futures).result(WAIT_S)
        assert "memory lost its object at chunk 2" in str(cut.reason)
        assert run.check(held, cut) == 2
        futures.close()
        held.release()
        assert run.pool.leading_hits(KEYS) == 0
        assert run.references() == (0, 0, 0)
        assert run.manager.counts().not_promoted == 6


@pytest.mark.parametrize("lost", range(LAYERS))
def test_an_object_of_which_one_layer_is_missing_is_not_found_in_the_pool(lost: int) -> None:
    """The tier loses it for one layer and has it again for the next: all that was read is not all there is."""
    tier = memory()
    with Storage([tier], promote=True) as run:
        run.only_in_tiers(KEYS)
        held = run.manager.hold_prefix(KEYS)
        futures = run.manager.layerwise_batched_get(held, plan_slices(LAYERS, 1))
        whole = tier.objects[KEYS[2]]
        for layer in range(LAYERS):
            if layer == lost:
                tier.delete(KEYS[2])
            assert run.check(held, next(futures).result(WAIT_S)) == (2 if layer == lost else 6)
            tier.objects[KEYS[2]] = whole
        futures.close()
        held.release()
        assert run.pool.leading_hits(KEYS) == 0
        assert run.references() == (0, 0, 0)
        assert run.manager.counts().not_promoted == 6


@pytest.mark.parametrize("layers", range(LAYERS))
def test_a_retrieve_that_ends_early_promotes_nothing(layers: int) -> None:
    with Storage([memory()], promote=True) as run:
        run.only_in_tiers(KEYS)
        held = run.manager.hold_prefix(KEYS)
        futures = run.manager.layerwise_batched_get(held, plan_slices(LAYERS, 1))
        for _ in range(layers):
            run.check(held, next(futures).result(WAIT_S))
        futures.close()
        held.release()
        assert run.pool.leading_hits(KEYS) == 0
        assert run.references() == (0, 0, 0)


@pytest.mark.parametrize("buffers", [1, 4, 6, 7])
def test_no_more_chunks_of_tiers_are_promised_than_buffers_can_hold(buffers: int) -> None:
    with Storage([memory()], buffers=buffers) as run:
        run.only_in_tiers(KEYS)
        assert run.retrieve(KEYS) == min(buffers, 6)
        held = run.manager.hold_prefix(KEYS)
        assert held.num_chunks == min(buffers, 6)
        held.release()


def test_chunks_that_the_engine_has_already_are_not_promoted() -> None:
    with Storage([memory()], promote=True) as run:
        run.only_in_tiers(KEYS)
        held = run.manager.hold_prefix(KEYS, 2)
        for future in run.manager.layerwise_batched_get(held, [Slice(0, LAYERS)]):
            found = future.result(WAIT_S)
        assert run.check(held, found) == 6
        held.release()
        assert run.pool.leading_hits(KEYS[2:]) == 4
        assert run.pool.leading_hits(KEYS) == 0


def test_what_comes_from_a_far_tier_goes_to_the_nearer_ones() -> None:
    near, far = memory(), memory()
    far.name = "far"
    with Storage([near, far], promote=True) as run:
        run.only_in_tiers(KEYS)
        near.objects.clear()
        assert run.retrieve(KEYS) == 6
        run.manager.flush(WAIT_S)
        assert near.exists(KEYS) == (True,) * 6
        assert near.objects == far.objects


def test_gaps_between_groups_carry_nobody_elses_bytes() -> None:
    groups = tuple(KernelGroup(KVGeometry(1, 2, 1, dim, 2, 4), (layer,), 4) for layer, dim in ((0, 3), (1, 5)))
    layout = ObjectLayout(groups)
    held = sum(group.geometry.object_bytes for group in groups)
    assert layout.object_bytes > held, "there is a gap"
    tier = memory(layout)
    with Storage([tier], slots=1, layout=layout, promote=True) as run:
        run.store([key(1)])  # every byte of the slot is one tenant's
        run.manager.flush(WAIT_S)
        reservation = run.manager.allocate([key(2)])
        assert reservation is not None
        with run.pool.memory.buffer(reservation.slots[0]) as view:
            gap = bytes(view[groups[0].geometry.object_bytes : layout.group_offset(1)])
        assert gap == bytes(len(gap))
        reservation.abandon()
        run.store([key(3)])
        run.manager.flush(WAIT_S)
        assert run.retrieve([key(1)]) == 1  # promoted into the slot that held key 3
        lease = run.pool.pin([key(1)])
        with run.pool.memory.buffer(lease.slots[0]) as view:
            assert bytes(view[groups[0].geometry.object_bytes : layout.group_offset(1)]) == bytes(len(gap))
        lease.release()


# ---- behind the engine's back


class GatedTier(MemoryTier):
    """Puts wait for the gate."""

    def __init__(self, object_bytes: int) -> None:
        super().__init__(object_bytes)
        self.gate = threading.Event()

    def put(self, key: ChunkKey, data: memoryview) -> None:
        assert self.gate.wait(WAIT_S)
        super().put(key, data)


def test_a_tier_that_is_too_slow_is_not_sent_more_than_its_limit_and_pins_no_more() -> None:
    slow = GatedTier(LAYOUT.object_bytes)
    with Storage([slow], max_pending_put_bytes=2 * LAYOUT.object_bytes) as run:
        puts = run.store(KEYS)
        skipped = [put for put in puts if put.done()]
        assert len(skipped) == 4
        for put in skipped:
            with pytest.raises(TierError, match="wait for it, the limit is"):
                put.result()
        assert run.pool.report().occupancy.pinned == 6, "one lease: the prefix ages as one"
        counts = run.manager.counts().written["memory"]
        assert (counts.skipped, counts.pending_bytes) == (4, 2 * LAYOUT.object_bytes)
        slow.gate.set()
        assert run.references() == (0, 0, 0)
        assert slow.exists(KEYS) == (True, True, False, False, False, False)
        assert run.manager.counts().written["memory"] == (2, 0, 4, 0)


def test_one_object_may_always_wait_however_small_the_limit() -> None:
    tier = memory()
    with Storage([tier], max_pending_put_bytes=1) as run:
        for one in KEYS:
            run.store([one])
            run.manager.flush(WAIT_S)
        assert tier.exists(KEYS) == (True,) * 6


def test_a_slow_tier_holds_up_neither_another_tier_nor_a_read() -> None:
    slow, quick = GatedTier(LAYOUT.object_bytes), memory()
    quick.name = "quick"
    with Storage([slow, quick], io_threads=1) as run:
        puts = run.store(KEYS[:3])
        for put in puts[1::2]:
            put.result(WAIT_S)  # quick's
        run.pool.discard(KEYS)
        assert run.retrieve(KEYS[:3]) == 3
        slow.gate.set()
        assert run.references() == (0, 0, 0)


def test_a_tier_that_refuses_is_counted_and_lets_go() -> None:
    tier = memory()
    with Storage([tier]) as run:
        tier.down = True
        for put in run.store(KEYS):
            with pytest.raises(TierError, match="is down"):
                put.result(WAIT_S)
        assert run.references() == (0, 0, 0)
        assert run.manager.counts().written["memory"] == (0, 6, 0, 0)


# ---- the first layer


class CountingTier:
    """Bytes read from a tier below a manager, and how many when."""

    def __init__(self, layout: ObjectLayout, rate: Callable[[int], None]) -> None:
        self.tier = memory(layout)
        self.name = "counting"
        self.read_bytes = 0
        self._rate = rate

    def get_leading(self, keys: Any, ranges: Any, into: Any) -> Any:
        num_bytes = len(keys) * sum(wanted.num_bytes for wanted in ranges)
        self.read_bytes += num_bytes
        self._rate(num_bytes)
        return self.tier.get_leading(keys, ranges, into)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tier, name)


@pytest.mark.parametrize("kv", [1, 2])
def test_when_the_first_layer_is_there_a_layer_was_read_and_no_more(kv: int) -> None:
    layout = ObjectLayout.single(KVGeometry(8, kv, 2, 4, 2, 8), 4)
    tier = CountingTier(layout, lambda num_bytes: None)
    with Storage([tier], layout=layout) as run:
        run.only_in_tiers(KEYS)
        held = run.manager.hold_prefix(KEYS)
        futures = run.manager.layerwise_batched_get(held, plan_slices(8, 1))
        run.check(held, next(futures).result(WAIT_S))
        assert tier.read_bytes * 8 == 6 * layout.object_bytes
        futures.close()
        held.release()


@pytest.fixture
def throttled(redis: RedisProcess) -> Iterator[tuple[RedisTier, Wire, ObjectLayout]]:
    layout = ObjectLayout.single(KVGeometry(8, 2, 8, 64, 2, 64), 16)  # 1 MiB, a layer 128 KiB
    with Wire(redis.port) as wire:
        tier = RedisTier(
            f"redis://127.0.0.1:{wire.port}/0", layout.object_bytes, layer_runs(layout), namespace="throttled"
        )
        yield tier, wire, layout
        tier.close()


def test_on_a_throttled_wire_the_first_layer_comes_within_its_share_of_the_time(
    throttled: tuple[RedisTier, Wire, ObjectLayout],
) -> None:
    tier, wire, layout = throttled
    with Storage([tier], layout=layout) as run:
        run.only_in_tiers(KEYS[:4])
        wire.mend()
        wire.bytes_per_s = 4 * layout.object_bytes / 2.0  # the whole takes two seconds
        held = run.manager.hold_prefix(KEYS[:4])
        start = time.monotonic()
        arrivals = []
        for future in run.manager.layerwise_batched_get(held, plan_slices(8, 1)):
            found = future.result(WAIT_S)
            arrivals.append(time.monotonic() - start)
            for source in found.sources:
                source.release()
        held.release()
        wire.mend()
        assert arrivals[-1] > 1.9
        assert arrivals[0] <= 1.3 / 8 * arrivals[-1]


def test_files_are_read_by_ranges_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lamella.connector.storage.file_tier import FileTier
    from tier_objects import FaultyOs

    layout = ObjectLayout.single(KVGeometry(16, 2, 8, 64, 2, 64), 16)
    watched = FaultyOs(monkeypatch)
    tier = FileTier(tmp_path / "kv", layout.object_bytes, layer_runs(layout))
    with Storage([tier], layout=layout) as run:
        run.only_in_tiers(KEYS[:2])
        held = run.manager.hold_prefix(KEYS[:2])
        futures = run.manager.layerwise_batched_get(held, plan_slices(16, 1))
        run.check(held, next(futures).result(WAIT_S))
        assert watched.read_bytes <= 2 * (layout.object_bytes // 16 + tier.format.header_bytes)
        futures.close()
        held.release()
