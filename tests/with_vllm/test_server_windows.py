"""The windows of early release with a cache server behind them, and the server's end under an engine.

As in `test_windows.py`, every load is frozen between two layers and moves only when the test, or a wait, lets it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rank_driver import ServerProcess, serving
from with_vllm.live_engine import LiveEngine
from with_vllm.served_engines import HIT, found, kept, on, only_computed, parts, until_served
from with_vllm.tiny_engine import PLAIN_STEPS, prompt

P = prompt(500)
OTHER = prompt(980, salt=5)
needs_plain_steps = pytest.mark.skipif(
    not PLAIN_STEPS, reason="recompute is refused with asynchronous scheduling or Model Runner V2"
)


@pytest.fixture(scope="module")
def paced(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, LiveEngine]]:
    with serving(tmp_path_factory.mktemp("paced") / "s", "--memory", "256MiB") as process:
        until_served(process)
        live = on(process, tiny_llama, paced=True)
        yield process, live
        live.close()


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "paced" not in request.fixturenames:
        return
    _server, engine = request.getfixturevalue("paced")
    engine.scheduler.recompute_kv_load_failures = False
    for load in engine.loads:
        if load.transfer is not None and not load.transfer.state.is_final:
            engine.land(load)
    engine.outputs.clear()
    engine.settle()
    engine.wait_until(lambda: parts(engine) == 0)
    assert engine.side.book.num_held == 0
    assert engine.worker.loads.bad_blocks == engine.side._bad_blocks
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 39


def test_a_released_request_runs_while_its_layers_land(paced: tuple[ServerProcess, LiveEngine]) -> None:
    _server, engine = paced
    computed = kept(engine, P)
    before = engine.worker.metrics.total("released_early")
    engine.add("r1", P)
    engine.release("r1")
    load = engine.load_of("r1")
    assert load.transfer is not None
    assert load.transfer.query().landed == 1
    with engine.landing_on_demand() as waited:
        answer = engine.finish("r1")[0]
    assert (answer.cached, answer.same(computed)) == (HIT, True)
    assert [layer for _request, layer in waited] == [0, 1, 2, 3]
    assert engine.worker.metrics.total("released_early") == before + 1


@pytest.mark.known_fault(32)
@pytest.mark.parametrize("holds", [True, False], ids=["held", "control: not held"])
def test_b_blocks_of_a_request_aborted_after_release_are_held_until_all_has_landed(
    paced: tuple[ServerProcess, LiveEngine], holds: bool
) -> None:
    _server, engine = paced
    expected = only_computed(engine, OTHER)
    tokens = prompt(500, 40)
    kept(engine, tokens)
    engine.side.stores.enabled = False
    with engine.without("wait_for_released", *(() if holds else ("hold_on_abort",))):
        engine.add("r1", tokens)
        engine.release("r1")
        load = engine.load_of("r1")
        engine.abort("r1")
        engine.add("r3", OTHER)
        engine.step(6)  # without the hold r3 now computes in r1's blocks, before they land
        engine.land(load)
        answer = engine.finish("r3")[0]
    engine.side.stores.enabled = True
    assert answer.same(expected) is holds


@pytest.mark.parametrize("rules", [(), ("evict_on_abort", "wait_for_released")], ids=["evicted", "control: hit"])
def test_d_nobody_hits_blocks_of_an_aborted_load(
    paced: tuple[ServerProcess, LiveEngine], rules: tuple[str, ...]
) -> None:
    _server, engine = paced
    tokens = prompt(500, 50)
    computed = only_computed(engine, tokens) if found(engine, tokens) else kept(engine, tokens)
    engine.forget_blocks()
    asked = engine.scheduler.connector.get_num_new_matched_tokens
    hits: list[int] = []

    def ask(request: Any, local_hit: int) -> Any:
        hits.append(local_hit)
        return asked(request, local_hit)

    with engine.without(*rules):
        engine.add("r1", tokens)
        engine.release("r1")
        with engine.no_block_for("r1"):
            engine.step()  # promoted, its hashes committed, and not scheduled
        engine.abort("r1")
        engine.scheduler.connector.get_num_new_matched_tokens = ask
        try:
            engine.add("r2", tokens)
            with engine.landing_on_demand():
                for _ in range(200):
                    if "r2" in engine.outputs:
                        break
                    for load in engine.loads:
                        if not load.released:  # r2's own load, if it has one, lands behind r1's
                            engine.land(load, 1)
                    engine.step()
                answer = engine.finish("r2")[0]
        finally:
            del engine.scheduler.connector.get_num_new_matched_tokens
    assert (answer.same(computed), hits[0]) == ((True, 0) if not rules else (False, HIT))


def start_anew(server: ServerProcess, engine: LiveEngine, gone: int) -> None:
    """A server is there again, and the engine has found it."""
    server.start()
    sessions = engine.side.objects._session, engine.worker.mover._mover.session
    engine.wait_until(lambda: all(not one.is_lost and one.epoch.server != gone for one in sessions))
    engine.wait_until(lambda: engine.worker.mover._mover.ready_slots > 0)
    time.sleep(1.0)  # the server hears of them with the next ping


@needs_plain_steps
def test_a_server_killed_between_lookup_and_load_costs_a_computation(paced: tuple[ServerProcess, LiveEngine]) -> None:
    """The load fails, its request is computed; what comes next is a miss until a server is back, then a hit again."""
    server, engine = paced
    engine.scheduler.recompute_kv_load_failures = True
    tokens = prompt(500, 60)
    computed = kept(engine, tokens)
    gone = engine.side.objects.epoch.server
    load = engine.side.objects.load
    failed = engine.side.metrics.total("loads_failed")

    def kill(order: Any, keys: Any) -> Any:
        shared = load(order, keys)
        server.kill()
        return shared

    engine.side.objects.load = kill
    engine.add("r1", tokens)
    engine.gate.grant(1 << 20)  # were it granted, it would land
    try:
        answer = engine.finish("r1")[0]
    finally:
        del engine.side.objects.load
    assert answer.same(computed)
    assert engine.side.metrics.total("loads_failed") == failed + 1
    engine.forget_blocks()
    again = engine.generate(tokens)
    assert (again.cached, again.same(computed)) == (0, True)
    start_anew(server, engine, gone)
    kept(engine, tokens)
    loaded = engine.generate(tokens)
    assert (loaded.cached, loaded.same(computed)) == (HIT, True)


def test_a_load_under_way_lands_though_the_server_is_killed(paced: tuple[ServerProcess, LiveEngine]) -> None:
    server, engine = paced
    tokens = prompt(500, 70)
    computed = kept(engine, tokens)
    gone = engine.side.objects.epoch.server
    engine.add("r1", tokens)
    engine.release("r1")
    server.kill()
    with engine.landing_on_demand():
        answer = engine.finish("r1")[0]
    assert (answer.cached, answer.same(computed)) == (HIT, True)
    start_anew(server, engine, gone)
