"""A step's four calls: in order, over a batch, with what overlaps shown in a trace."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cache_driver import WAIT_S, Deployment, MemoryTier
from engine_driver import ENGINE_MISSING
from lamella.connector.layer_hooks import LayerwiseHooks, StepReport, StepRequest
from lamella.connector.streams import HostStream, Moment, Span
from lamella.reference.plan import Direction

pytestmark = pytest.mark.skipif(ENGINE_MISSING is not None, reason=str(ENGINE_MISSING))

TOKENS = list(range(100, 116))
HERE, THERE, ELSEWHERE = list(range(8)), list(range(8, 16)), list(range(16, 24))


def step(
    run: Deployment,
    hooks: LayerwiseHooks,
    requests: list[StepRequest],
    at_layer: Callable[[int], None] = lambda layer: None,
) -> StepReport:
    """A step of a model whose layers compute every request's new tokens."""
    hooks.start_load_kv(requests)
    for layer in range(run.num_layers):
        for one in requests:
            run.compute(layer, list(one.tokens), list(one.block_ids[0]), one.loaded_tokens)
        hooks.wait_for_layer_load(layer)
        at_layer(layer)
        hooks.save_kv_layer(layer)
    return hooks.wait_for_save()


@pytest.mark.known_fault(7)
def test_a_first_step_that_is_wholly_a_hit_stores_nothing_and_ends() -> None:
    with Deployment() as run:
        run.store(TOKENS, HERE)
        hooks = LayerwiseHooks(run.cache_engine)
        report = step(run, hooks, [StepRequest("a", TOKENS, [THERE], 0, 15, save=False)])
        assert report == StepReport({"a": 15}, {}, {})
        assert all(run.holds(layer, TOKENS, THERE, 0, 16) for layer in range(run.num_layers))
        assert run.references() == (0, 0, 0)


@pytest.mark.known_fault(7)
def test_a_step_with_nothing_to_do_ends() -> None:
    with Deployment() as run:
        hooks = LayerwiseHooks(run.cache_engine)
        assert step(run, hooks, []) == StepReport({}, {}, {})
        hooks.start_load_kv([])
        assert hooks.wait_for_save() == StepReport({}, {}, {}), "an engine without a forward pass in this step"


def test_each_layer_is_there_when_it_is_waited_for_and_the_new_tokens_are_stored() -> None:
    with Deployment() as run:
        run.store(TOKENS[:8], HERE)
        hooks = LayerwiseHooks(run.cache_engine)
        run.cache[:, :, THERE] = 0

        def look(layer: int) -> None:
            assert run.holds(layer, TOKENS, THERE, 0, 16)

        report = step(run, hooks, [StepRequest("a", TOKENS, [THERE], 0, 8)], look)
        assert report == StepReport({"a": 8}, {}, {"a": 8})
        assert run.cache_engine.lookup(TOKENS) == 16


def test_the_last_request_of_a_batch_waits_for_every_requests_layer() -> None:
    """Only the last one has `sync`, also where it is a miss: a batch is gated as one."""
    with Deployment(num_slots=12, num_blocks=32, engine_options={"paced": True}) as run:
        run.engine.grant(Direction.STORE, 1000)
        run.store(TOKENS, HERE)
        keys = run.cache_engine.keys_of(TOKENS)
        hooks = LayerwiseHooks(run.cache_engine)
        requests = [StepRequest("a", TOKENS, [THERE], 0, 15), StepRequest("b", [9] * 8, [ELSEWHERE[:4]], 0, 4)]
        hooks.start_load_kv(requests)
        assert hooks.failed_loads() == {"b": 0}, "a miss is known before the first layer"
        waiting = threading.Thread(target=hooks.wait_for_layer_load, args=(0,))
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive(), "layer 0 of request a has not landed"
        run.engine.grant(Direction.RETRIEVE, 1)
        waiting.join(WAIT_S)
        assert not waiting.is_alive()
        assert run.holds(0, TOKENS, THERE, 0, 15)
        run.engine.grant(Direction.RETRIEVE, 1000)
        hooks.abort()
        assert run.pool.leading_hits(keys) == 4
        assert run.references() == (0, 0, 0)


def test_only_the_last_request_waits_so_that_every_load_of_a_layer_is_on_its_way_first() -> None:
    with Deployment(num_slots=12, num_blocks=32, engine_options={"paced": True}) as run:
        run.engine.grant(Direction.STORE, 1000)
        run.store(TOKENS, HERE)
        hooks = LayerwiseHooks(run.cache_engine)
        hooks.start_load_kv(
            [StepRequest(name, TOKENS, [table], 0, 15) for name, table in (("a", THERE), ("b", ELSEWHERE))]
        )
        waiting = threading.Thread(target=hooks.wait_for_layer_load, args=(0,))
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive()
        assert run.engine.lane(Direction.RETRIEVE).live_transfers == 4, "layers 0 and 1 of both"
        run.engine.grant(Direction.RETRIEVE, 1000)
        waiting.join(WAIT_S)
        assert not waiting.is_alive()
        hooks.abort()
        assert run.references() == (0, 0, 0)


def test_nothing_is_evicted_for_a_request_whose_load_has_failed_already() -> None:
    with Deployment(num_slots=4) as run:
        run.store(TOKENS, HERE)
        hooks = LayerwiseHooks(run.cache_engine)
        report = step(run, hooks, [StepRequest("a", [9] * 16, [THERE], 0, 8)])
        assert report == StepReport({"a": 0}, {"a": 0}, {"a": 0})
        assert run.cache_engine.lookup(TOKENS) == 16


def test_a_batch_shares_a_prefix_and_each_request_gets_its_own_copy() -> None:
    with Deployment(num_slots=12, num_blocks=32) as run:
        run.store(TOKENS, HERE)
        other = [*TOKENS[:8], *range(50, 58)]
        hooks = LayerwiseHooks(run.cache_engine)
        requests = [StepRequest("a", [*TOKENS, 1], [[*THERE, 24]], 0, 16), StepRequest("b", other, [ELSEWHERE], 0, 8)]
        report = step(run, hooks, requests)
        assert report == StepReport({"a": 16, "b": 8}, {}, {"a": 0, "b": 8})
        for layer in range(run.num_layers):
            assert run.holds(layer, [*TOKENS, 1], [*THERE, 24], 0, 17)
            assert run.holds(layer, other, ELSEWHERE, 0, 16)
        assert run.cache_engine.lookup(other) == 16


@pytest.mark.known_fault(80)
def test_a_load_that_fails_is_known_in_the_same_step_and_nothing_computed_on_it_is_stored() -> None:
    tier = MemoryTier(0)
    with Deployment(num_layers=4, tiers=[tier]) as run:
        tier.object_bytes = run.layout.object_bytes
        run.store(TOKENS[:8], HERE)
        run.settle()
        run.pool.discard(run.cache_engine.keys_of(TOKENS))
        hooks = LayerwiseHooks(run.cache_engine)
        seen: list[dict[str, int]] = []

        def lose(layer: int) -> None:
            tier.down = True  # layer 2 is perhaps being read, layer 3 is not
            seen.append(hooks.failed_loads())

        requests = [StepRequest("a", TOKENS, [THERE], 0, 8), StepRequest("b", [7] * 8, [ELSEWHERE[:4]])]
        report = step(run, hooks, requests, lose)
        assert seen[0] == {}
        assert seen[-1] == {"a": 0}
        assert report.failed == {"a": 0}
        assert report.stored == {"a": 0, "b": 8}, "the others are not touched"
        assert run.cache_engine.lookup(TOKENS) == 0, "what was computed on a failed load is poison"
        assert run.references() == (0, 0, 0)
        tier.down = False
        again = step(run, hooks, [StepRequest("a", TOKENS, [THERE], 0, 8)])
        assert again == StepReport({"a": 8}, {}, {"a": 8})


class CountingStream(HostStream):
    """A compute stream that counts how often its present instant was asked for."""

    def __init__(self) -> None:
        self.moments = 0

    def record(self) -> Moment:
        self.moments += 1
        return super().record()


def test_stores_wait_for_each_layer_also_when_the_first_requests_load_has_failed() -> None:
    """The first request's wait is the whole batch's: without it the others would store a layer not yet computed."""
    tier = MemoryTier(0)
    with Deployment(num_layers=4, num_slots=12, tiers=[tier]) as run:
        tier.object_bytes = run.layout.object_bytes
        run.store(TOKENS[:8], HERE)
        run.settle()
        run.pool.discard(run.cache_engine.keys_of(TOKENS))
        run.connector.current_stream = stream = CountingStream()
        hooks = LayerwiseHooks(run.cache_engine)
        hooks.start_load_kv([StepRequest("a", TOKENS, [THERE], 0, 8), StepRequest("b", [7] * 8, [ELSEWHERE[:4]])])
        moments = []
        for layer in range(4):
            hooks.wait_for_layer_load(layer)
            before = stream.moments
            hooks.save_kv_layer(layer)
            moments.append(stream.moments - before)
            run.settle()
            tier.down = True
        assert hooks.failed_loads() == {"a": 0}
        assert moments == [1, 1, 1, 1], "one a layer"
        assert hooks.wait_for_save().stored == {"a": 0, "b": 8}


def test_a_chunk_that_left_between_lookup_and_load_is_known_before_the_forward_pass() -> None:
    with Deployment() as run:
        run.store(TOKENS, HERE)
        matched = run.cache_engine.num_new_matched_tokens(TOKENS, 0)
        run.pool.discard(run.cache_engine.keys_of(TOKENS)[1:])
        hooks = LayerwiseHooks(run.cache_engine)
        hooks.start_load_kv([StepRequest("a", TOKENS, [THERE], 0, matched)])
        assert hooks.failed_loads() == {"a": 4}
        hooks.abort()
        assert run.references() == (0, 0, 0)


# ---- a model that does not keep to the order


def test_a_model_that_skips_the_waits_is_found_out_and_its_loads_have_failed() -> None:
    """SAFE-4."""
    with Deployment() as run:
        run.store(TOKENS, HERE)
        hooks = LayerwiseHooks(run.cache_engine)
        hooks.start_load_kv([StepRequest("a", [*TOKENS, 1], [[*THERE, 16]], 0, 16)])
        hooks.wait_for_layer_load(0)
        assert hooks.wait_for_save() == StepReport({"a": 0}, {"a": 0}, {"a": 0})
        assert run.references() == (0, 0, 0)


def test_a_model_that_skips_a_save_stores_nothing() -> None:
    with Deployment() as run:
        hooks = LayerwiseHooks(run.cache_engine)
        hooks.start_load_kv([StepRequest("a", TOKENS, [HERE])])
        hooks.save_kv_layer(0)
        assert hooks.wait_for_save() == StepReport({}, {}, {"a": 0})
        assert run.cache_engine.lookup(TOKENS) == 0
        assert run.references() == (0, 0, 0)


def test_calls_out_of_order_name_what_is_missing() -> None:
    with Deployment() as run:
        run.store(TOKENS, HERE)
        hooks = LayerwiseHooks(run.cache_engine)
        for call in (lambda: hooks.wait_for_layer_load(0), lambda: hooks.save_kv_layer(0), hooks.wait_for_save):
            with pytest.raises(RuntimeError, match=r"call start_load_kv\(\) first"):
                call()
        hooks.start_load_kv([StepRequest("a", TOKENS, [THERE], 0, 15)])
        with pytest.raises(RuntimeError, match="layer 0 is next, got 1"):
            hooks.wait_for_layer_load(1)
        with pytest.raises(RuntimeError, match=r"layer 0 is saved before wait_for_layer_load\(0\)"):
            hooks.save_kv_layer(0)
        with pytest.raises(RuntimeError, match=r"wait_for_save\(\) or abort\(\) first"):
            hooks.start_load_kv([])
        hooks.abort()
        hooks.abort()
        assert run.references() == (0, 0, 0)


def test_a_step_that_is_refused_leaves_nothing_open() -> None:
    with Deployment() as run:
        run.store(TOKENS, HERE)
        hooks = LayerwiseHooks(run.cache_engine)
        good, bad = StepRequest("a", TOKENS, [THERE], 0, 15), StepRequest("b", TOKENS, [[99] * 8], 0, 15)
        with pytest.raises(ValueError, match="outside"):
            hooks.start_load_kv([good, bad])
        with pytest.raises(ValueError, match="unique"):
            hooks.start_load_kv([good, good])
        assert run.references() == (0, 0, 0)
        hooks.start_load_kv([good])
        hooks.abort()


@pytest.mark.parametrize(
    ("values", "reason"),
    [({"num_computed_tokens": -1}, "num_computed_tokens must not be negative"), ({"num_matched_tokens": 17}, "17")],
)
def test_a_request_with_impossible_counts_is_refused(values: dict[str, int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        StepRequest("a", TOKENS, [HERE], **values)


# ---- the trace


def _overlap(one: Span, other: Span) -> bool:
    return one.start_ns < other.end_ns and other.start_ns < one.end_ns


def _spans(recorded: list[Span], kind: str) -> dict[int, Span]:
    return {span.first_layer: span for span in recorded if span.kind == kind}


class TracedStep:
    """A step on a paced device: what moves while a layer computes is what the trace must show, without luck."""

    def __init__(self, **options: Any) -> None:
        self.recorded: list[Span] = []
        self.run = Deployment(num_layers=4, engine_options={"paced": True}, recorder=self.recorded.append, **options)
        self.hooks = LayerwiseHooks(self.run.cache_engine)

    def compute(self, layer: int, meanwhile: Callable[[], None]) -> None:
        """One layer's computing, during which `meanwhile` happens."""
        start_ns = time.monotonic_ns()
        meanwhile()
        self.recorded.append(Span("compute", layer, 1, start_ns, time.monotonic_ns()))


def test_computing_layer_n_plus_1_overlaps_the_store_of_layer_n() -> None:
    """The store of layer n may not end before layer n+1 computes: a flow that waited for it would never get there."""
    traced = TracedStep(num_slots=8)
    with traced.run as run:
        traced.hooks.start_load_kv([StepRequest("a", TOKENS, [HERE])])
        for layer in range(4):

            def meanwhile(layer: int = layer) -> None:
                run.compute(layer, TOKENS, HERE)
                if layer:
                    run.engine.grant(Direction.STORE, 1)
                    _landed(run, Direction.STORE, layer)

            traced.compute(layer, meanwhile)
            traced.hooks.wait_for_layer_load(layer)
            traced.hooks.save_kv_layer(layer)
        run.engine.grant(Direction.STORE, 1)
        assert traced.hooks.wait_for_save().stored == {"a": 16}
        computes, stores = _spans(traced.recorded, "compute"), _spans(traced.recorded, "store")
        assert sorted(stores) == [0, 1, 2, 3]
        for layer in range(3):
            assert _overlap(computes[layer + 1], stores[layer]), (layer, computes, stores)
        assert not _overlap(computes[3], stores[3]), "a layer is stored after it was computed"


def test_loading_layer_n_plus_1_overlaps_computing_layer_n() -> None:
    """While layer n computes, and not before, layer n+1 may land."""
    traced = TracedStep(num_slots=8)
    with traced.run as run:
        run.engine.grant(Direction.STORE, 4)
        run.store(TOKENS, HERE)
        traced.recorded.clear()
        traced.hooks.start_load_kv([StepRequest("a", [*TOKENS, 1], [[*THERE, 16]], 0, 16, save=False)])
        run.engine.grant(Direction.RETRIEVE, 1)  # layer 0 comes before any computing
        for layer in range(4):
            traced.hooks.wait_for_layer_load(layer)
            assert run.holds(layer, TOKENS, THERE, 0, 16)

            def meanwhile(layer: int = layer) -> None:
                if layer < 3:
                    run.engine.grant(Direction.RETRIEVE, 1)
                    _landed(run, Direction.RETRIEVE, layer + 2)

            traced.compute(layer, meanwhile)
            traced.hooks.save_kv_layer(layer)
        assert traced.hooks.wait_for_save().loaded == {"a": 16}
        computes, loads = _spans(traced.recorded, "compute"), _spans(traced.recorded, "load")
        assert sorted(loads) == [0, 1, 2, 3]
        for layer in range(3):
            assert _overlap(computes[layer], loads[layer + 1]), (layer, computes, loads)
            assert loads[layer].end_ns <= computes[layer].start_ns, "a layer is computed after it landed"


def _landed(run: Deployment, direction: Direction, transfers: int) -> None:
    """That many transfers of the direction have drained, counted from the first."""
    stream = run.connector.store_stream if direction is Direction.STORE else run.connector.load_stream
    assert stream.outstanding.wait_ended(transfers, WAIT_S), f"{transfers} transfers did not drain"


def test_a_trace_has_one_span_a_slice_with_its_layers() -> None:
    recorded: list[Span] = []
    with Deployment(num_layers=5, width=(1, 2), recorder=recorded.append) as run:
        run.store(TOKENS, HERE)
        run.retrieve(TOKENS, THERE)
        for kind in ("store", "load"):
            cuts = [(span.first_layer, span.num_layers) for span in recorded if span.kind == kind]
            assert cuts == [(0, 1), (1, 2), (3, 2)]
        assert all(0 < span.start_ns <= span.end_ns for span in recorded)
        assert np.diff([span.start_ns for span in recorded if span.kind == "load"]).min() >= 0


def test_a_step_that_has_ended_holds_nothing_so_the_next_one_has_room() -> None:
    """A pool of one prompt: each step's load is of what the next step's store must evict."""
    one, other = TOKENS[:8], [token + 1000 for token in TOKENS[:8]]
    with Deployment(num_slots=2) as run:
        hooks = LayerwiseHooks(run.cache_engine)

        def step(request: StepRequest) -> StepReport:
            hooks.start_load_kv([request])
            for layer in range(run.num_layers):
                hooks.wait_for_layer_load(layer)
                hooks.save_kv_layer(layer)
            return hooks.wait_for_save()

        step(StepRequest("first", one, [HERE], 0, 0))
        for turn in range(500):
            here, there = (one, other) if turn % 2 == 0 else (other, one)
            matched = run.cache_engine.num_new_matched_tokens(here, 0)
            assert step(StepRequest("load", here, [THERE], 0, matched)).loaded == {"load": 7}
            assert run.pool.report().occupancy.pins == 0
            assert step(StepRequest("store", there, [HERE], 0, 0)).stored == {"store": 8}
