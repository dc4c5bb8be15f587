"""The vLLM connector's two halves on a real server process, without an engine: bounds, leases, ranks, its end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine_driver import ENGINE_MISSING
from lamella.connector.cache_shapes import DescribedCaches
from lamella.connector.connector_metrics import Metrics
from lamella.connector.engine_facts import EngineFacts
from lamella.connector.mover import RankPlace
from lamella.connector.safety_rules import ALL_RULES
from lamella.connector.step_orders import Ended, StepOrders, StepReport
from lamella.connector.vllm_scheduler import SchedulerSide
from lamella.connector.vllm_settings import ConnectorSettings
from lamella.connector.worker_loads import WorkerLoads
from lamella.reference.geometry import ObjectForm
from lamella.reference.keys import KeySpace
from lamella.reference.release import First
from lamella.reference.slices import plan_slices
from lamella.server.back_end import ServerBackEnd
from lamella.server.engine_mover import EngineMover
from lamella.server.engine_objects import ANSWER_S, EngineObjects
from lamella.server.protocol import TransferSide
from rank_driver import BLOCK, CHUNK, RankMemory, ServerProcess, serving
from scheduler_side import Request
from waiting import wait_until

pytestmark = pytest.mark.skipif(ENGINE_MISSING is not None, reason=str(ENGINE_MISSING))

SPACE = KeySpace("small", "uint16", ObjectForm.TOKEN, "logical", CHUNK, 0, 1, (0, 8))
HERE, THERE = tuple(range(1, 9)), tuple(range(20, 29))
TOKENS = list(range(4 * CHUNK))


class Rank:
    """A rank's half, as the worker side drives it."""

    def __init__(self, folder: Path, engine: str, rank: int, num_ranks: int, side: str = "worker") -> None:
        self.memory = RankMemory(num_layers=8, heads=4 // num_ranks, tp_rank=rank, tp_size=num_ranks)
        caches = DescribedCaches(self.memory.layout, self.memory.engines, {}, ((BLOCK, BLOCK),), "THD")
        settings = replace(settings_of(folder), transfer_side=side)
        place = RankPlace(settings, self.memory.space, caches, "cpu", lambda: 0, engine, rank, num_ranks, {})
        mover = ServerBackEnd().mover(place, lambda size: pytest.fail("it has no memory of its own"))
        assert isinstance(mover, EngineMover)
        self.mover, metrics = mover, Metrics()
        slices = plan_slices(8, 1)
        self.stores = mover.stores(slices, False, metrics)
        self.loads = WorkerLoads(
            lambda order: mover.load(order, slices), 8, First(1), BLOCK, 64, 5.0, lambda: 0, ALL_RULES, metrics,
            executor=mover.executor,
        )  # fmt: skip

    def step(self, orders: StepOrders) -> tuple[StepReport, set[str]]:
        self.stores.begin_step(orders.stores, orders.fetches)
        self.loads.begin_step(orders)
        for layer in range(8):
            self.loads.wait_layer(layer)
        self.stores.step_computed(self.loads.spoils)
        self.mover.look()
        polled = self.loads.poll()
        self.mover.loads_ended(polled.ended)
        stores, _puts, _fetches = self.stores.poll()
        return StepReport(dict(polled.ended), stores), polled.received

    def close(self) -> None:
        self.loads.close()
        self.stores.drain(5.0)
        self.stores.close()
        self.mover.close()
        self.memory.close()


class Engine:
    """A scheduler side and its ranks, stepped by hand."""

    def __init__(self, folder: Path, name: str = "engine", num_ranks: int = 1) -> None:
        self.ranks = [Rank(folder, name, rank, num_ranks) for rank in range(num_ranks)]
        space = replace(SPACE, tp_size=num_ranks)
        facts = EngineFacts((BLOCK,), 64, num_ranks, space, engine=name)
        settings = settings_of(folder)
        objects = ServerBackEnd().objects(settings, facts)
        assert isinstance(objects, EngineObjects)
        self.objects = objects
        objects._answer_s = 5.0  # the machine that runs the tests may be busy
        self.side = SchedulerSide(settings, facts, objects=objects)
        self.side.set_ranks([], 0)
        wait_until(lambda: self.objects._session.stats().figures is not None, "the session answers")

    def step(self, output: Any) -> Any:
        """One step; what the engine is told."""
        orders = self.side.step_orders(output)
        told = SimpleNamespace(finished_recving=None, finished_sending=None, invalid_block_ids=set())
        report: StepReport | None = None
        received: list[set[str]] = []
        for rank in self.ranks:
            one, names = rank.step(orders)
            received.append(names)
            report = one if report is None else report.merged(one)
        self.received: dict[str, int] = getattr(self, "received", {})
        for names in received:
            for name in names:
                self.received[name] = self.received.get(name, 0) + 1
        told.finished_recving = {name for name, count in self.received.items() if count == len(self.ranks)}
        for name in told.finished_recving:
            del self.received[name]
        self.side.step_done(told, report)
        return told

    def settle(self) -> None:
        wait_until(lambda: not self.side.book.num_open or not self.step(step_of()), "every load has ended")

    def store(self, name: str, tokens: list[int], blocks: tuple[int, ...], salt: Any = None) -> None:
        """The tokens' chunks were computed, and are on the server."""
        request = Request(name, tokens)
        request.cache_salt = salt
        assert self.side.matched_tokens(request, 0) == (0, False)
        self.side.allocated(request, (blocks,), 0)
        keys = self.side._keys.keys(request, len(tokens))
        for rank in self.ranks:
            rank.memory.fill(keys, blocks)
        self.step(step_of((name, blocks, 0, len(tokens))))
        self.settle()
        self.side.request_ended(request)
        wait_until(lambda: self.finds(tokens, salt) == len(tokens) // CHUNK, "all of it is found")

    def finds(self, tokens: list[int], salt: Any = None) -> int:
        request = Request("probe", tokens)
        request.cache_salt = salt
        found = self.objects.find("probe", self.side._keys.keys(request, len(tokens)), 0)
        self.side._keys.forget("probe")
        self.objects.forget("probe")
        assert found is not None
        return found

    def load(self, name: str, tokens: list[int], blocks: tuple[int, ...], local: int = 0) -> Any:
        """The request's load has ended; whether it ended well."""
        request = Request(name, tokens)
        wanted, parked = self.side.matched_tokens(request, local)
        assert wanted
        assert parked
        self.side.allocated(request, (blocks,), wanted)
        self.step(step_of())
        failed = self.side.metrics.total("loads_failed")
        self.settle()
        self.side.request_ended(request)
        return self.side.metrics.total("loads_failed") == failed

    def right(self, tokens: list[int], blocks: tuple[int, ...], skip_chunks: int = 0) -> list[int]:
        """Layers that are right, a rank an entry."""
        keys = self.side._keys.keys(Request("right", tokens), len(tokens))
        self.side._keys.forget("right")
        return [len(rank.memory.right_layers(keys, blocks, skip_chunks)) for rank in self.ranks]

    def restart(self, server: ServerProcess) -> None:
        """A server is there again, and every part of the engine has found it."""
        sessions = [self.objects._session, *(rank.mover._mover.session for rank in self.ranks)]
        before = [session._epoch.server for session in sessions if session._epoch is not None]
        server.start()
        wait_until(
            lambda: all(not one.is_lost and one.epoch.server not in before for one in sessions),
            "every session has the new server",
        )

    def held(self) -> float:
        figures = self.objects._session.stats().figures
        return sum(value for name, value in figures.items() if name.startswith("lamella_server_parts"))

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.side.close()


def settings_of(folder: Path) -> ConnectorSettings:
    return ConnectorSettings(layers_per_slice=1, server=folder, load_timeout_s=5.0)


def step_of(*batch: tuple[str, tuple[int, ...], int, int]) -> Any:
    """vLLM's SchedulerOutput: (name, blocks, computed, scheduled) of each request."""
    fresh = [SimpleNamespace(req_id=n, block_ids=([*b],), num_computed_tokens=c) for n, b, c, _s in batch]
    cached = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
    return SimpleNamespace(
        scheduled_new_reqs=fresh,
        scheduled_cached_reqs=cached,
        num_scheduled_tokens={name: scheduled for name, _b, _c, scheduled in batch},
        total_num_scheduled_tokens=sum(scheduled for *_rest, scheduled in batch),
    )


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with serving(tmp_path / "s", "--memory", "8MiB") as process:
        wait_until(lambda: (process.folder / "server.sock").exists(), "it serves")
        yield process


@pytest.fixture
def engine(server: ServerProcess) -> Iterator[Engine]:
    made = Engine(server.folder)
    yield made
    made.close()


def test_what_one_engine_stored_another_one_loads(server: ServerProcess, engine: Engine) -> None:
    engine.store("a", TOKENS, HERE)
    other = Engine(server.folder, "other")
    assert other.load("b", [*TOKENS, 1], THERE)
    assert other.right(TOKENS, THERE) == [8]
    other.close()
    wait_until(lambda: engine.held() == 0, "nothing is held")


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_each_rank_loads_its_own_part_and_a_request_is_received_once_all_have(
    server: ServerProcess, num_ranks: int
) -> None:
    engine = Engine(server.folder, num_ranks=num_ranks)
    engine.store("a", TOKENS, HERE)
    for rank in engine.ranks:
        rank.memory.poison()
    assert engine.load("b", [*TOKENS, 1], THERE)
    assert engine.right(TOKENS, THERE) == [8] * num_ranks
    wait_until(lambda: engine.held() == 0, "nothing is held")
    engine.close()


def test_a_load_behind_the_engines_own_hit_leaves_that_alone(engine: Engine) -> None:
    engine.store("a", TOKENS, HERE)
    engine.ranks[0].memory.poison()
    assert engine.load("b", [*TOKENS, 1], THERE, local=CHUNK + BLOCK)
    assert engine.right(TOKENS, THERE, skip_chunks=2) == [8]
    assert engine.ranks[0].memory.is_poisoned_outside(THERE[3:])


def test_a_chunk_in_the_middle_that_is_kept_already_is_not_stored_again(engine: Engine) -> None:
    """The rest leaves in two orders, each under a lease of its own."""
    from lamella.server.sequences import SharedStore

    keys = engine.side._keys.keys(Request("x", TOKENS), len(TOKENS))
    (head,) = engine.objects.reserve("h", keys[:1], 0, (HERE,), engine.side._number).orders
    (middle,) = engine.objects.reserve("m", keys[:2], 1, (HERE,), engine.side._number).orders
    assert isinstance(middle, SharedStore)
    engine.objects.drop(head)
    orders = engine.objects.reserve("r", keys, 0, (HERE,), engine.side._number).orders
    assert [(order.first_chunk, order.num_tokens // CHUNK) for order in orders] == [(0, 1), (2, 4)]
    for order in (middle, *orders):
        engine.objects.drop(order)
    wait_until(lambda: engine.held() == 0, "nothing is held")


def test_a_request_that_goes_on_asking_keeps_one_lock_and_gives_it_back_when_it_ends(engine: Engine) -> None:
    engine.store("a", TOKENS, HERE)
    wait_until(lambda: engine.held() == 0, "nothing is held")
    request = Request("b", [*TOKENS, 1])
    for _ in range(5):
        assert engine.side.matched_tokens(request, 0) == (len(TOKENS), True)
    first = engine.objects._asked["b"].locked.found.lease
    assert engine.held() == 1
    engine.objects._clock_ns = lambda: time.monotonic_ns() + 16_000_000_000  # more than half of the lease
    assert engine.side.matched_tokens(request, 0) == (len(TOKENS), True)
    assert engine.objects._asked["b"].locked.found.lease != first, "a lock that is about to end is renewed"
    engine.side.request_ended(request)
    wait_until(lambda: engine.held() == 0, "nothing is held")


def test_tenants_share_nothing(engine: Engine) -> None:
    engine.store("a", TOKENS, HERE, salt="one")
    assert engine.finds(TOKENS, "one") == 4
    assert engine.finds(TOKENS, "two") == engine.finds(TOKENS) == 0


def test_a_silent_server_costs_one_wait_and_what_it_locked_late_is_given_back(
    server: ServerProcess, engine: Engine
) -> None:
    """SAFE-5: the scheduler's thread waits 50 ms in all."""
    engine.store("a", TOKENS, HERE)
    engine.objects._answer_s = ANSWER_S
    os.kill(server.process.pid, signal.SIGSTOP)
    began = time.monotonic()
    assert [engine.finds(TOKENS) for _ in range(50)] == [0] * 50
    took_s = time.monotonic() - began
    os.kill(server.process.pid, signal.SIGCONT)
    assert took_s < 0.15
    wait_until(lambda: engine.finds(TOKENS) == 4, "all of it is found")
    wait_until(lambda: engine.held() == 0, "nothing is held")


def test_a_killed_server_is_a_miss_at_once_and_is_found_again_by_itself(server: ServerProcess, engine: Engine) -> None:
    engine.store("a", TOKENS, HERE)
    server.kill()
    began = time.monotonic()
    assert [engine.finds(TOKENS) for _ in range(20)] == [0] * 20
    assert time.monotonic() - began < 0.2
    engine.restart(server)
    engine.store("b", TOKENS, HERE)
    assert engine.load("c", [*TOKENS, 1], THERE)
    assert engine.right(TOKENS, THERE) == [8]


def test_orders_of_an_earlier_server_touch_nothing_of_the_next_one(server: ServerProcess, engine: Engine) -> None:
    """SRV-6: a store that was given slots there, and a load that was locked there, end badly and move no byte."""
    engine.store("a", TOKENS, HERE)
    request = Request("b", [*TOKENS, 1])
    wanted, _parked = engine.side.matched_tokens(request, 0)
    assert wanted
    engine.side.allocated(request, (THERE,), wanted)
    fresh = [token + 100 for token in TOKENS]
    writer = Request("w", fresh)
    engine.side.matched_tokens(writer, 0)
    engine.side.allocated(writer, (HERE,), 0)
    orders = engine.side.step_orders(step_of(("w", HERE, 0, len(fresh))))
    assert orders.loads
    assert orders.stores
    server.kill()
    engine.restart(server)
    other = Engine(server.folder, "other")
    others = [token + 200 for token in TOKENS]
    other.store("c", others, HERE)  # its slots are those of the earlier server's orders
    engine.ranks[0].memory.poison()
    report, _received = engine.ranks[0].step(orders)
    loads, stores = dict(report.loads), dict(report.stores)
    wait_until(
        lambda: len(loads) == len(stores) == 1 or more(engine, loads, stores), "one load and one store are ordered"
    )
    assert [*loads.values(), *stores.values()] == [Ended(1, False)] * 2
    assert engine.ranks[0].memory.is_poisoned_outside([])
    assert other.load("d", [*others, 1], THERE)
    assert other.right(others, THERE) == [8]
    other.close()


def more(engine: Engine, loads: dict[int, Ended], stores: dict[int, Ended]) -> bool:
    report, _received = engine.ranks[0].step(StepOrders())
    loads.update(report.loads)
    stores.update(report.stores)
    return False


def test_a_server_that_cannot_open_the_caches_leaves_the_moving_to_the_worker_and_says_why(
    server: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """As vLLM's caches on a CPU, which lie in no shared memory."""
    rank = Rank(server.folder, "engine", 0, 1, side="server")
    assert rank.mover.transfer_side is TransferSide.WORKER
    assert "this process moves the bytes, not the server" in caplog.text
    rank.close()


def test_no_server_is_an_error_that_says_what_to_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"lamella serve --folder {tmp_path / 'none'}"):
        ServerBackEnd().objects(settings_of(tmp_path / "none"), EngineFacts((BLOCK,), 64, 1, SPACE))
