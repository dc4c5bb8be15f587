"""Stores, retrieves and evictions in any order over tiers that fail in every way: nothing torn, foreign or leaked.

Retrieves are opened, advanced and ended by separate rules, so they overlap with each other, with stores and faults.
Whatever comes is compared with what the key means; what does not come must have a reason.
"""

from __future__ import annotations

import errno
import shutil
import tempfile
from abc import abstractmethod
from collections.abc import Generator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cache_driver import WAIT_S
from lamella.connector.storage.circuit import CircuitBreaker, GuardedTier
from lamella.connector.storage.file_tier import FileTier
from lamella.connector.storage.held_prefix import HeldPrefix, LayerObjects
from lamella.connector.storage.metrics import MeteredTier
from lamella.connector.storage.object_format import layer_runs
from lamella.connector.storage.redis_tier import RedisTier
from lamella.connector.storage.tier import Tier, TierError
from lamella.reference.keys import ChunkKey
from lamella.reference.slices import plan_slices
from storage_driver import LAYERS, LAYOUT, Storage, content_of
from storage_servers import REDIS_MISSING, RedisProcess, Wire, redis_server
from tier_objects import FaultyOs

MAX_CHUNKS, MAX_OPEN, SLOTS, BUFFERS = 3, 2, 4, 8
TENANTS = (b"a" * 32, b"b" * 32)

documents = st.tuples(st.sampled_from(TENANTS), st.just(0), st.integers(1, MAX_CHUNKS))
widths = st.integers(1, LAYERS)


def keys_of(document: tuple[bytes, int, int]) -> tuple[ChunkKey, ...]:
    space, story, chunks = document
    return tuple(ChunkKey(space, (10 * story + chunk).to_bytes(32, "big"), 8) for chunk in range(chunks))


class OpenRetrieve:
    """A retrieve between two of its layers."""

    def __init__(self, storage: Storage, keys: tuple[ChunkKey, ...], width: int) -> None:
        self.held: HeldPrefix = storage.manager.hold_prefix(keys)
        self.futures: Generator[Future[LayerObjects], None, None] = storage.manager.layerwise_batched_get(
            self.held, plan_slices(LAYERS, width)
        )
        self.layer = 0

    def advance(self, storage: Storage) -> bool:
        """Whether there is more to come."""
        future = next(self.futures, None)
        if future is None:
            return False
        found = future.result(WAIT_S)
        if found.part.first_layer == self.layer:  # the later layers of a slice come with its first
            there = storage.check(self.held, found)
            assert (there < self.held.num_chunks) == (found.reason is not None), "what does not come has a reason"
        self.layer += 1
        return True

    def end(self) -> None:
        self.futures.close()
        self.held.release()


class TierMachine(RuleBasedStateMachine):
    """Over one tier, which subclasses make and break."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[OpenRetrieve] = []
        self.tier = self.make_tier()
        breaker = CircuitBreaker("tier", 3, 0, lambda: 0)
        self.metered = MeteredTier(self.tier)
        self.storage = Storage(
            [GuardedTier(self.metered, breaker)],
            slots=SLOTS,
            buffers=BUFFERS,
            promote=True,
            max_pending_put_bytes=2 * LAYOUT.object_bytes,
        )

    @abstractmethod
    def make_tier(self) -> Tier:
        """The tier under test, empty."""

    def mend(self) -> None:
        """Every fault is gone; what was damaged stays damaged."""

    @abstractmethod
    def stored_places(self) -> list[Any]:
        """Handles of what is stored, for `damage`."""

    @abstractmethod
    def damage(self, place: Any, how: str, where: float) -> None:
        """The stored object is cut off or has a changed byte, `where` of the way through it."""

    # ---- what is done

    @initialize()
    def some_objects_are_there(self) -> None:
        for space in TENANTS:
            self.store((space, 0, 2), "only in the tier")

    @rule(
        document=documents, fate=st.sampled_from(["abandoned", "in the pool", "only in the tier", "only in the tier"])
    )
    def store(self, document: tuple[bytes, int, int], fate: str) -> None:
        reservation = self.storage.manager.allocate(keys_of(document))
        if reservation is None:
            return
        if fate == "abandoned":
            reservation.abandon()
            return
        for one, slot in zip(reservation.keys, reservation.slots, strict=True):
            with self.storage.pool.memory.buffer(slot) as view:
                view[:] = content_of(one)
        self.storage.manager.batched_put(reservation)
        if fate == "only in the tier":
            self.settle()
            self.evict(document)

    @rule(document=documents, width=widths)
    def retrieve(self, document: tuple[bytes, int, int], width: int) -> None:
        whole = OpenRetrieve(self.storage, keys_of(document), width)
        while whole.advance(self.storage):
            pass
        whole.end()

    @precondition(lambda self: len(self.open) < MAX_OPEN)
    @rule(document=documents, width=widths)
    def begin(self, document: tuple[bytes, int, int], width: int) -> None:
        self.open.append(OpenRetrieve(self.storage, keys_of(document), width))

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, MAX_OPEN - 1), layers=st.integers(1, LAYERS))
    def advance(self, which: int, layers: int) -> None:
        retrieve = self.open[which % len(self.open)]
        for _ in range(layers):
            if not retrieve.advance(self.storage):
                retrieve.end()
                self.open.remove(retrieve)
                return

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, MAX_OPEN - 1))
    def give_up(self, which: int) -> None:
        self.open.pop(which % len(self.open)).end()

    @rule(document=documents)
    def evict(self, document: tuple[bytes, int, int]) -> None:
        self.storage.pool.discard(keys_of(document))

    @rule(document=documents)
    def delete(self, document: tuple[bytes, int, int]) -> None:
        self.settle()
        try:
            self.storage.manager.delete(keys_of(document))
        except TierError:
            return
        if not self.open:  # whose promotion or copies may still put it back
            assert self.storage.manager.lookup(keys_of(document)) == 0

    @rule()
    def settle(self) -> None:
        self.storage.manager.flush(WAIT_S)

    # ---- what goes wrong

    @rule()
    def mended(self) -> None:
        self.mend()

    @rule(how=st.sampled_from(["flip", "flip", "cut"]), which=st.integers(0, 20), where=st.floats(0, 0.999))
    def damaged(self, how: str, which: int, where: float) -> None:
        places = self.stored_places()
        if places:
            self.damage(places[which % len(places)], how, where)

    @rule(how=st.sampled_from(["flip", "cut"]), which=st.integers(0, 5), where=st.floats(0, 0.999), width=widths)
    def damaged_and_wanted(self, how: str, which: int, where: float, width: int) -> None:
        for space in TENANTS:
            self.store((space, 0, 2), "only in the tier")
            self.evict((space, 0, 2))
        self.damaged(how, which, where)
        for space in TENANTS:
            self.retrieve((space, 0, 2), width)

    @rule(document=documents, width=st.integers(1, LAYERS - 1), layers=st.integers(1, LAYERS - 1))
    def given_up_and_wanted(self, document: tuple[bytes, int, int], width: int, layers: int) -> None:
        self.store(document, "only in the tier")
        self.evict(document)
        part = OpenRetrieve(self.storage, keys_of(document), width)
        for _ in range(layers):
            part.advance(self.storage)
        part.end()
        self.retrieve(document, width)

    # ---- what always holds

    @invariant()
    def nothing_is_held_by_nobody(self) -> None:
        if not self.open:
            assert self.storage.references() == (0, 0, 0)

    def teardown(self) -> None:
        for retrieve in self.open:
            retrieve.end()
        self.mend()
        assert self.storage.references() == (0, 0, 0)
        fresh = (ChunkKey(b"c" * 32, (99).to_bytes(32, "big"), 8),)
        self.storage.only_in_tiers(fresh)
        assert self.storage.retrieve(fresh) == 1, "a tier that was mended serves again"
        self.storage.__exit__()
        self.tier.close()


class FileMachine(TierMachine):
    """A disk that refuses, and files that are damaged."""

    def make_tier(self) -> Tier:
        self.folder = Path(tempfile.mkdtemp(prefix="lamella-machine-"))
        self.patched = pytest.MonkeyPatch()
        self.disk = FaultyOs(self.patched)
        return FileTier(
            self.folder, LAYOUT.object_bytes, layer_runs(LAYOUT), max_bytes=6 * (4096 + LAYOUT.object_bytes)
        )

    def mend(self) -> None:
        self.disk.refused.clear()

    def stored_places(self) -> list[Path]:
        return sorted(self.folder.rglob("*.kv"))

    def damage(self, place: Path, how: str, where: float) -> None:
        try:
            size = place.stat().st_size
            with place.open("r+b") as file:
                at = int(where * size)
                if how == "cut":
                    file.truncate(at)
                elif size:
                    file.seek(at)
                    byte = file.read(1)
                    file.seek(at)
                    file.write(bytes([byte[0] ^ 0x55]))
        except FileNotFoundError:
            pass  # made room for another just now

    @rule(
        fault=st.sampled_from(
            [
                ("write", errno.ENOSPC),
                ("fsync", errno.EIO),
                ("open", errno.EACCES),
                ("preadv", errno.ETIMEDOUT),
                ("preadv", errno.EIO),
                ("cached read", errno.EAGAIN),
                ("cached read", errno.EOPNOTSUPP),
                ("flock", errno.ENOLCK),
            ]
        )
    )
    def refused(self, fault: tuple[str, int]) -> None:
        self.disk.refused[fault[0]] = fault[1]

    @rule()
    def opened_again(self) -> None:
        """As another process would."""
        if not self.disk.refused:
            FileTier(self.folder, LAYOUT.object_bytes, layer_runs(LAYOUT))

    def teardown(self) -> None:
        try:
            super().teardown()
            assert list(self.folder.rglob("*.unfinished")) == []
        finally:
            self.patched.undo()
            shutil.rmtree(self.folder)


class RedisMachine(TierMachine):
    """A server that is cut off, silent, full, or refuses; and values that are damaged."""

    server: RedisProcess
    numbers = iter(range(1 << 30))

    def make_tier(self) -> Tier:
        self.namespace = f"machine-{next(self.numbers)}"
        self.wire = Wire(self.server.port)
        import redis

        self.admin = redis.Redis(port=self.server.port, username="admin", password="admin")
        return RedisTier(
            f"redis://127.0.0.1:{self.wire.port}/0",
            LAYOUT.object_bytes,
            layer_runs(LAYOUT),
            namespace=self.namespace,
            timeout_s=0.6,
            retries=0,
        )

    def mend(self) -> None:
        self.admin.acl_setuser("default", enabled=True, nopass=True, categories=["+@all"], keys=["*"])
        self.admin.config_set("maxmemory", 0)
        if self.wire.silent or self.wire.cut_after is not None:
            self.wire.mend()
            self.wire.cut()

    def stored_places(self) -> list[bytes]:
        return sorted(self.admin.keys(f"{self.namespace}:*"))

    def damage(self, place: bytes, how: str, where: float) -> None:
        size = self.admin.strlen(place)
        if size == 0:
            return
        at = int(where * size)
        self.admin.config_set("maxmemory", 0)
        if how == "cut":
            self.admin.set(place, self.admin.getrange(place, 0, at))
        else:
            byte = self.admin.getrange(place, at, at)
            self.admin.setrange(place, at, bytes([byte[0] ^ 0x55]))

    @rule(after=st.integers(0, 20_000))
    def cut(self, after: int) -> None:
        self.wire.mend()
        self.wire.cut_after = after

    @rule()
    def silent(self) -> None:
        self.wire.silent = True

    @rule()
    def full(self) -> None:
        self.admin.config_set("maxmemory", 1)

    @rule(category=st.sampled_from(["-@read", "-@write"]))
    def forbidden(self, category: str) -> None:
        self.admin.acl_setuser("default", categories=[category])

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            self.mend()
            self.admin.close()
            self.wire.close()


def test_files() -> None:
    examples = max(15, settings.default.max_examples // 3)
    run_state_machine_as_test(FileMachine, settings=settings(max_examples=examples, stateful_step_count=50))


@pytest.mark.skipif(REDIS_MISSING is not None, reason=str(REDIS_MISSING))
def test_redis(tmp_path: Path) -> None:
    examples = max(5, settings.default.max_examples // 10)  # silence costs its time-out
    with redis_server(tmp_path / "redis") as server:
        import redis

        with redis.Redis(port=server.port) as client:
            client.acl_setuser("admin", enabled=True, passwords=["+admin"], categories=["+@all"], keys=["*"])
        RedisMachine.server = server
        run_state_machine_as_test(RedisMachine, settings=settings(max_examples=examples, stateful_step_count=25))
