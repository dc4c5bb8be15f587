"""Decoding steps replay full CUDA graphs: behind all that is landing (`before`), or with waits inside (`inside`)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lamella.connector.vllm_engine import TRY_GRAPH_WAITS
from lamella.cuda_ext.arrival import AfterEvent
from lamella.cuda_ext.engine import Fault
from lamella.cuda_ext.torch import event_handle
from lamella.reference.plan import Direction
from lamella.reference.slices import Slice
from with_vllm.full_graphs import (
    CHUNK,
    HIT,
    LAYERS,
    P,
    all_same,
    instead,
    leave_nothing_behind,
    loaded_and_shared,
    nobody_knows_of_replays,
    stored,
    told,
    waits_inside,
    wide_engine,
    windows_of_a_load,
    without_its_wait,
)
from with_vllm.live_engine import LiveEngine
from with_vllm.replays import replays
from with_vllm.tiny_engine import ON_GPU, prompt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_GPU, reason="only a GPU has CUDA graphs, and there is none here"),
]
STUCK_CYCLES = 10_000_000_000  # some 5 s


@pytest.fixture(scope="module", params=["before", "inside"])
def full(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveEngine]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(TRY_GRAPH_WAITS, "1")
        live = wide_engine(tmp_path_factory.mktemp("wide"), request.param)
        yield live
        live.close()


@pytest.fixture(autouse=True)
def leaves_nothing_behind(full: LiveEngine) -> Iterator[None]:
    yield
    leave_nothing_behind(full)


@pytest.mark.known_fault(17)
def test_a_full_graph_replayed_over_a_landing_load_reads_nothing_early(full: LiveEngine) -> None:
    right = stored(full)
    early, met = full.worker.metrics.total("released_early"), []
    for _repetition in range(5):
        with replays(full) as seen, full.landing_on_nothing():
            answers = loaded_and_shared(full)
        met += [landed for landed in seen if landed]
        assert all_same(answers, right), told(answers, right, seen)
        assert [answer.cached for answer in answers] == [HIT, HIT]
        assert not full.worker.loads.hooks_bypassed
        full.forget_blocks()
    assert met, "no graph was replayed while a load was waited for"
    assert full.worker.metrics.total("released_early") > early
    if waits_inside(full):
        assert min(landed for each in met for landed in each) < LAYERS - 2, f"no replay met a landing load: {met}"
        assert full.worker.metrics.total("gated_loads") >= 1


def test_control_without_the_wait_the_graph_reads_what_has_not_landed(full: LiveEngine) -> None:
    """Whether the test above could tell an early read from rounding; where it could not, this says so and is skipped.

    On an H200, vLLM 0.26, replays met loads of which one to seven of eight layers had landed, and answered with numbers
    (`no_number`). Where 0.58 was tolerated they were at most 0.48 off with `before` by the first model runner, and 0.84
    by the second; with `inside` 0.66 and 0.84. The control of `before` is in `test_windows.py`: a load held back.
    """
    right, told_of = stored(full), []
    for _repetition in range(5):  # a copy that nobody holds back may be there in time
        with without_its_wait(full), replays(full) as seen, full.landing_on_nothing():
            answers = loaded_and_shared(full)
        if not all_same(answers, right):
            return
        told_of.append(told(answers, right, seen))
        full.forget_blocks()
    pytest.skip("no answer without the wait was further off than rounding: " + "; ".join(told_of))


def test_a_replay_that_nobody_knows_of_fails_its_loads_and_releases_are_whole_from_then_on(full: LiveEngine) -> None:
    right = stored(full)
    with nobody_knows_of_replays(full), replays(full) as seen:
        first, sharer = loaded_and_shared(full)
    assert first.reason == "error", told([first, sharer], right, seen)
    # it shared the blocks, or loaded them anew
    assert sharer.reason == "error" or sharer.same(right[1]), told([first, sharer], right, seen)
    assert full.worker.loads.hooks_bypassed


def test_a_copy_that_fails_behind_a_replay_is_reported_in_that_step(full: LiveEngine) -> None:
    right = stored(full)
    reached = 5 * windows_of_a_load(full) // LAYERS
    begun = full.worker.engine.lane(Direction.RETRIEVE).windows
    full.worker.engine.plant_fault(Direction.RETRIEVE, begun + reached, Fault.COMPLETED)
    with replays(full) as seen:
        answers = loaded_and_shared(full)
    assert full.worker.engine.lane(Direction.RETRIEVE).windows > begun + reached, "the planted fault was not met"
    assert (answers[0].reason, answers[0].tokens) == ("error", ()), told(answers, right, seen)


def test_a_prefill_overlaps_with_its_load_in_its_hooks(full: LiveEngine) -> None:
    """A prompt with many tokens to compute is no decode: its step calls the hooks."""
    longer = [*P[:HIT], *prompt(200, salt=9)][:8150]
    computed = full.stored(longer, 4)
    before = full.worker.metrics.total("layer_waits")
    loaded = full.generate(longer, 4)
    assert loaded.same(computed)
    assert full.worker.metrics.total("layer_waits") > before


@pytest.mark.parametrize("full", ["inside"], indirect=True)
def test_a_graph_that_waits_for_a_write_that_does_not_come_is_let_go_within_the_bound(full: LiveEngine) -> None:
    """Behind the gate the copy engine gets stuck for five seconds; the watchdog frees the graph after one."""
    full.stored(P)
    worker, captured, slow = full.worker, full.worker.captured, torch.cuda.Stream()
    gate, stuck = captured.gate, []

    def gate_and_get_stuck(transfer: Any, stream: int) -> bool:
        gated = gate(transfer, stream)
        if not stuck:
            with torch.cuda.stream(slow):
                torch.cuda._sleep(STUCK_CYCLES)
                event = torch.cuda.Event()
                event.record(slow)
            last = full.scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1  # blocks that nobody has
            tables = worker.caches.kernel_tables(((last - 1, last),))
            slots = full.loads[0].order.slots[:1]
            more = {"slices": (Slice(0, 1),), "keys": [-1], "fence": AfterEvent(event_handle(event)), "deadline_s": 20}
            objects = worker.mover.objects(0, slots)
            moves = worker.engine.retrieve(worker.mover.registered, objects, tables, CHUNK, **more)
            computing = torch.cuda.ExternalStream(stream) if stream else torch.cuda.default_stream()
            stuck.extend((moves, computing, event))
        return gated

    with instead(captured, "gate", gate_and_get_stuck):
        full.add("r1", P)
        full.step_until(lambda: bool(stuck), 2000)
    stuck[1].synchronize()
    assert not slow.query(), "the stuck copy came first: nothing was lost"
    assert full.finish("r1")[0].reason == "error"
    stuck[0].wait(20)
    time.sleep(0.1)
    full.side.reset()
