"""Bounds, passed-over hooks, stores whose blocks are wanted again, and what the metrics say of it all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.config import CUDAGraphMode
from vllm.forward_context import override_forward_context
from vllm.v1.core.sched.request_queue import RequestQueue

from lamella.connector.captured_waits import CapturedWaits
from lamella.connector.connector_metrics import COUNTERS, TIMES
from lamella.connector.load_in_flight import Load, Polled
from lamella.connector.step_orders import StepOrders
from lamella.connector.vllm import LamellaConnector, LamellaOrders, _is_replay
from lamella.connector.vllm_stats import LamellaStats
from with_vllm.live_engine import LiveEngine
from with_vllm.replays import HIT, OWN, REPLAYED, decodes_by_replays
from with_vllm.tiny_engine import PLAIN_STEPS, prompt
from with_vllm.turns import turn_with

P = prompt(HIT + OWN)
LONGER = prompt(HIT + 52)  # whose reader is never replayed whole
FAIL_OR_RECOMPUTE = [
    pytest.param(False, id="fail"),
    pytest.param(
        True,
        id="recompute",
        marks=pytest.mark.skipif(not PLAIN_STEPS, reason="refused with asynchronous scheduling or Model Runner V2"),
    ),
]


@pytest.fixture(autouse=True)
def leaves_nothing_behind(engine: LiveEngine) -> Iterator[None]:
    with turn_with(engine):
        yield


@contextmanager
def waits_of(engine: LiveEngine, seconds: float) -> Iterator[None]:
    loads = engine.worker.loads
    before, loads._wait_timeout_s = loads._wait_timeout_s, seconds
    try:
        yield
    finally:
        loads._wait_timeout_s = before


@pytest.mark.parametrize("recompute", FAIL_OR_RECOMPUTE)
@pytest.mark.known_fault(23)
def test_a_wait_has_a_bound_and_fails_its_load_in_the_same_step(engine: LiveEngine, recompute: bool) -> None:
    engine.scheduler.recompute_kv_load_failures = recompute
    computed = engine.stored(P)
    engine.add("r1", P)
    engine.release("r1")
    load = engine.load_of("r1")
    timeouts = engine.worker.metrics.total("wait_timeouts")
    with waits_of(engine, 0.2):
        engine.step()
    assert engine.worker.metrics.total("wait_timeouts") == timeouts + 1
    assert "had not landed" in load.failed
    engine.land(load)  # the window in flight drains, and nothing more is issued
    answer = engine.finish("r1")[0]
    assert answer.same(computed) if recompute else answer.reason == "error"


@pytest.mark.parametrize("recompute", FAIL_OR_RECOMPUTE)
@pytest.mark.known_fault(19)
def test_a_step_that_passes_over_the_hook_fails_its_loads_and_releases_are_whole_from_then_on(
    engine: LiveEngine, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.scheduler.recompute_kv_load_failures = recompute
    computed = engine.stored(LONGER)
    engine.add("r1", LONGER)
    engine.release("r1")
    load = engine.load_of("r1")
    with monkeypatch.context() as patched:
        patched.setattr(type(engine.connector), "wait_for_layer_load", lambda self, name: None)
        patched.setattr("lamella.connector.worker_loads._DRAIN_S", 0.1)
        engine.step()  # runs r1 over layers that have not landed
    engine.land(load)
    answer = engine.finish("r1")[0]
    assert answer.same(computed) if recompute else answer.reason == "error"
    assert engine.worker.loads.hooks_bypassed
    try:
        engine.forget_blocks()
        engine.add("r2", LONGER)
        engine.step()
        load = engine.load_of("r2")
        engine.land(load, 3)
        engine.step()
        assert not load.reported  # three of four layers are not enough any more
        engine.land(load)
        assert engine.finish("r2")[0].same(computed)
    finally:
        engine.worker.loads.hooks_bypassed = engine.side._releases_whole = False


@pytest.mark.skipif(not REPLAYED, reason="no step that reads a landing load is replayed whole")
def test_a_replay_that_nobody_knows_of_fails_its_loads(engine: LiveEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.stored(P)
    engine.add("r1", P)
    engine.release("r1")
    load = engine.load_of("r1")
    with monkeypatch.context() as patched:
        patched.setattr("lamella.connector.vllm._is_replay", lambda: False)
        patched.setattr("lamella.connector.worker_loads._DRAIN_S", 0.1)
        engine.step_until(lambda: engine.worker.loads.hooks_bypassed, 4)
    try:
        assert load.failed == "the step did not call the per-layer hook"
        engine.land(load)
        assert engine.finish("r1")[0].reason == "error"
    finally:
        engine.worker.loads.hooks_bypassed = engine.side._releases_whole = False


def steps_beside_a_frozen_load(engine: LiveEngine) -> tuple[int, list[tuple[str, int]]]:
    """(tokens that a bystander decoded, what its steps waited for) while r1 is released and finds no block."""
    engine.add("r0", prompt(40, salt=3), 40)
    engine.step_until(lambda: engine.request("r0").num_output_tokens > 0)
    engine.add("r1", P)
    with engine.landing_on_demand() as waited:
        engine.release("r1")
        before = engine.request("r0").num_output_tokens
        with engine.no_block_for("r1"):
            engine.step(6)
        return engine.request("r0").num_output_tokens - before, waited


@contextmanager
def set_aside(engine: LiveEngine, name: str) -> Iterator[None]:
    """The request, which waits, is not looked at; who comes behind it is."""
    request = engine.request(name)
    (queue,) = [one for one in vars(engine.scheduler).values() if isinstance(one, RequestQueue) and request in one]
    queue.remove_request(request)
    try:
        yield
    finally:
        queue.add_request(request)


def test_a_bystander_decodes_beside_a_released_load_that_is_in_no_batch_and_a_sharer_of_its_blocks_waits(
    engine: LiveEngine,
) -> None:
    computed = engine.stored(P)
    decoded, waited = steps_beside_a_frozen_load(engine)
    load = engine.load_of("r1")
    assert (load.released, load.transfer.landed(), waited) == (True, 1, [])
    assert decoded >= 5
    engine.add("r2", P)
    with set_aside(engine, "r1"), engine.landing_on_demand() as waited:
        engine.step_until(lambda: engine.request("r2").num_output_tokens > 0)
        assert [layer for _request, layer in waited] == ([3] if REPLAYED else [0, 1, 2, 3])
        assert {request for request, _layer in waited} == {load.order.request}
    _bystander, loaded, sharer = engine.finish("r0", "r1", "r2")
    assert loaded.same(computed)
    assert sharer.same(computed)
    assert sharer.cached >= HIT


def test_a_bystander_stands_still_where_every_released_load_is_waited_for(
    engine: LiveEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.stored(P)
    monkeypatch.setattr(Load, "may_be_read_by", lambda self, orders: True)
    _decoded, waited = steps_beside_a_frozen_load(engine)
    assert [layer for _request, layer in waited] == ([3] if decodes_by_replays(engine) else [0, 1, 2, 3])
    engine.finish("r0", "r1")


def test_loads_beyond_the_bound_wait_in_the_queue_and_all_finish(engine: LiveEngine) -> None:
    prompts = [prompt(200, salt=salt) for salt in (31, 32, 33)]
    engine.side.reset()
    engine.forget_blocks()
    computed = [engine.generate(tokens) for tokens in prompts]
    engine.forget_blocks()
    room = engine.side.room
    before, room._most_loads = room._most_loads, 1
    try:
        for number, tokens in enumerate(prompts):
            engine.add(f"r{number}", tokens)
        most = 0
        for _ in range(500):
            if len(engine.outputs) == len(prompts):
                break
            engine.step()
            most = max(most, len(engine.side.book.open_loads()))
            for load in engine.loads:
                engine.land(load)
        answers = engine.finish("r0", "r1", "r2")
    finally:
        room._most_loads = before
    assert most == 1
    assert all(answer.same(right) for answer, right in zip(answers, computed, strict=True))
    assert engine.side.metrics.total("bound_waits") > 0


def test_every_metric_reaches_the_log_line_and_prometheus(engine: LiveEngine) -> None:
    engine.stored(P)
    engine.add("r1", P)
    engine.release("r1")
    with engine.landing_on_demand():
        engine.finish("r1")
    engine.settle()
    data: dict = dict.fromkeys(COUNTERS, 1) | {name: [2, 3_000_000_000, 2_000_000_000] for name in TIMES}
    stats = LamellaConnector.build_kv_connector_stats(data).aggregate(LamellaStats(data=dict(data)))
    reduced = stats.reduce()
    assert reduced["hit_tokens"] == 2
    assert reduced["release_mean_ms"] == 1500.0
    metrics = LamellaConnector.build_prom_metrics(
        engine.llm.llm_engine.vllm_config,
        {Counter: Counter, Gauge: Gauge, Histogram: Histogram},
        ["engine"],
        {0: ["0"]},
    )
    metrics.observe(stats.data)
    assert REGISTRY.get_sample_value("vllm:lamella_hit_tokens_total", {"engine": "0"}) == 2
    assert REGISTRY.get_sample_value("vllm:lamella_release_seconds_total", {"engine": "0"}) == 6.0


def test_hooks_are_called_while_a_graph_is_captured_and_their_waits_go_in(
    engine: LiveEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    words: list[int] = []
    capturing = [False]
    pending = SimpleNamespace(wait_pending=lambda layer, stream: words.append(layer))
    captured = CapturedWaits(pending, 4, lambda: 0, lambda: capturing[0], False, engine.worker.metrics)
    monkeypatch.setattr(engine.worker, "captured", captured)
    assert not engine.connector.has_connector_metadata()  # between steps; a warm-up calls no hook
    capturing[0] = True
    assert engine.connector.has_connector_metadata()
    for name in engine.worker.caches.layers:
        engine.connector.wait_for_layer_load(name)
    assert words == [0, 1, 2, 3]
    assert captured.why_useless == ""


@pytest.mark.parametrize(
    ("context", "replays"),
    [
        ({"attn_metadata": {"a layer": 1}}, False),
        (None, True),  # Model Runner V2
        ({"attn_metadata": None}, True),
        ({"attn_metadata": {"a layer": 1}, "cudagraph_runtime_mode": CUDAGraphMode.FULL}, True),
        ({"attn_metadata": {"a layer": 1}, "cudagraph_runtime_mode": CUDAGraphMode.PIECEWISE}, False),
        ({"attn_metadata": [{"a layer": 1}], "cudagraph_runtime_mode": CUDAGraphMode.NONE}, False),
    ],
)
def test_a_replay_is_known_before_it_is_launched(context: dict[str, Any] | None, replays: bool) -> None:
    with override_forward_context(None if context is None else SimpleNamespace(**context)):
        assert _is_replay() == replays


def test_who_is_replayed_waits_whole_when_its_step_is_bound_whatever_is_called_later(
    engine: LiveEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first runner of 0.32 says that loads may start when it has launched the forward pass."""
    worker, waited = engine.worker, []
    monkeypatch.setattr(worker, "begin_step", lambda orders: None)
    monkeypatch.setattr(worker.loads, "_orders", StepOrders(num_tokens=1))
    monkeypatch.setattr(worker.loads, "replayed", False)
    monkeypatch.setattr(worker.loads, "gated", [SimpleNamespace()])
    monkeypatch.setattr(worker.loads, "wait_whole", lambda: waited.append("waited"))
    monkeypatch.setattr(engine.connector, "_connector_metadata", None)
    with override_forward_context(None):
        engine.connector.bind_connector_metadata(LamellaOrders(StepOrders()))
        assert waited == ["waited"]
        engine.connector.start_load_kv(SimpleNamespace(attn_metadata=None))
    assert waited == ["waited"]


def test_how_loads_ended_is_known_before_anything_is_reported_whichever_is_asked_first(
    engine: LiveEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With speculative decoding the first runner asks for errors before it says that the pass was launched."""
    worker, called = engine.worker, []
    monkeypatch.setattr(worker, "_idle", False)
    monkeypatch.setattr(worker.loads, "gated", [SimpleNamespace()])
    monkeypatch.setattr(worker.loads, "settle", lambda: called.append("settled"))
    monkeypatch.setattr(worker.loads, "poll", lambda: called.append("polled") or Polled())
    worker.finished()
    assert called == ["settled", "polled"]


def test_a_load_moves_nothing_before_it_is_let(engine: LiveEngine) -> None:
    """The control of every test above: no window was let through that a load did not use."""
    computed = engine.stored(P)
    engine.add("r1", P)
    engine.step()
    load = engine.load_of("r1")
    engine.wait_until(lambda: load.transfer is not None)
    assert load.transfer.landed() == 0
    assert engine.gate.live == 1
    engine.land(load)
    assert engine.finish("r1")[0].same(computed)


def test_no_request_is_computed_again_for_the_sake_of_what_is_stored(engine: LiveEngine) -> None:
    assert not getattr(engine.scheduler, "requires_kv_delivery", False)  # asked from 0.27 on
    assert not engine.connector.requires_kv_delivery


def test_an_engine_that_cannot_come_to_rest_is_used_by_no_later_test(
    engine: LiveEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.stored(P)
    engine.add("r1", P)
    engine.release("r1")
    with monkeypatch.context() as patched:
        patched.setattr(engine.gate, "grant", lambda slices: None)
        patched.setattr("with_vllm.live_engine._REST_S", 0.2)
        with pytest.raises(AssertionError, match="it did not come to hold in time"):
            engine.come_to_rest()
    try:
        with pytest.raises(pytest.fail.Exception, match="not run, .* unusable: AssertionError"), turn_with(engine):
            pass
    finally:
        engine.broken = ""
