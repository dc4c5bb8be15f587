"""`full_graphs: before`: decoding steps replay full CUDA graphs, behind the whole of what is landing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lamella.reference.plan import Direction
from with_vllm.full_graphs import (
    HIT,
    LAYERS,
    P,
    all_same,
    instead,
    leave_nothing_behind,
    loaded_and_shared,
    replays,
    stored,
    told,
    wide_engine,
    windows_of_a_load,
)
from with_vllm.live_engine import ON_GPU, LiveEngine, prompt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_GPU, reason="only a GPU has CUDA graphs, and there is none here"),
]


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveEngine]:
    live = wide_engine(tmp_path_factory.mktemp("wide"), "before")
    yield live
    live.close()


@pytest.fixture(autouse=True)
def leaves_nothing_behind(full: LiveEngine) -> Iterator[None]:
    yield
    leave_nothing_behind(full)


@pytest.mark.known_fault(17)
def test_a_full_graph_is_replayed_behind_what_is_landing(full: LiveEngine) -> None:
    right = stored(full)
    early = full.worker.metrics.total("released_early")
    for _repetition in range(5):
        with replays(full) as seen, full.landing_on_nothing():
            answers = loaded_and_shared(full)
        assert any(seen), f"no graph was replayed while a load was waited for: {seen}"
        assert all_same(answers, right), told(answers, right, seen)
        assert [answer.cached for answer in answers] == [HIT, HIT]
        assert not full.worker.loads.hooks_bypassed
        full.forget_blocks()
    assert full.worker.metrics.total("released_early") > early


def test_control_without_that_wait_the_hooks_are_missed_and_the_loads_fail(full: LiveEngine) -> None:
    right = stored(full)
    with instead(full.worker.loads, "wait_whole", lambda: None), replays(full) as seen:
        first, sharer = loaded_and_shared(full)
    assert first.reason == "error", told([first, sharer], right, seen)
    assert sharer.reason == "error" or sharer.same(right[1]), told([first, sharer], right, seen)
    assert full.worker.loads.hooks_bypassed


def test_a_copy_that_fails_behind_a_replay_is_reported_in_that_step(full: LiveEngine) -> None:
    right = stored(full)
    reached = 5 * windows_of_a_load(full) // LAYERS
    begun = full.worker.engine.lane(Direction.RETRIEVE).windows
    full.worker.engine.plant_fault(Direction.RETRIEVE, begun + reached, on_completion=True)
    with replays(full) as seen:
        answers = loaded_and_shared(full)
    assert full.worker.engine.lane(Direction.RETRIEVE).windows > begun + reached, "the planted fault was not met"
    assert (answers[0].reason, answers[0].tokens) == ("error", ()), told(answers, right, seen)


def test_a_prefill_still_overlaps_with_its_load(full: LiveEngine) -> None:
    """A prompt with many tokens to compute is no decode: its step calls the hooks."""
    longer = [*P[:HIT], *prompt(200, salt=9)][:8150]
    computed = full.stored(longer, 4)
    before = full.worker.metrics.total("layer_waits")
    loaded = full.generate(longer, 4)
    assert loaded.same(computed)
    assert full.worker.metrics.total("layer_waits") > before
