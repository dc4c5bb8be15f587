"""Loads that join their step and have begun before its batch is prepared: whatever becomes of them meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from with_vllm.live_engine import LiveEngine
from with_vllm.replays import HIT, OWN
from with_vllm.tiny_engine import ON_GPU, prompt

P = prompt(HIT + OWN)
Q = P[:HIT] + prompt(OWN, salt=9)

pytestmark = pytest.mark.skipif(ON_GPU, reason="the first model runner's preparing is looked into")


@pytest.fixture
def joining(engine: LiveEngine) -> Iterator[LiveEngine]:
    """Its loads join their step, and begin at the first sight of it."""
    engine.configure(1, use_layerwise=True, before_batch=True)
    yield engine
    engine.come_to_rest()
    engine.configure(1)


@contextmanager
def while_preparing(engine: LiveEngine, happens: Callable[[], None]) -> Iterator[list[int]]:
    """In the first step with a load it happens between the step's orders and its batch; yields loads open by then."""
    runner = engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    update, opened = runner._update_states, list[int]()

    def update_states(scheduler_output: object) -> object:
        if engine.worker.loads.num_open and not opened:
            opened.append(engine.worker.loads.num_open)
            happens()
        return update(scheduler_output)

    runner._update_states = update_states
    try:
        yield opened
    finally:
        del runner._update_states


def test_what_has_landed_before_the_batch_is_there_needs_no_wait(joining: LiveEngine) -> None:
    computed = joining.stored(P)
    joining.add("r1", P)
    waits = joining.worker.metrics.total("layer_waits")
    with joining.landing_on_nothing(), while_preparing(joining, lambda: joining.land(joining.load_of("r1"))) as opened:
        answer = joining.finish("r1")[0]
    assert opened == [1]
    assert answer.same(computed)
    assert answer.cached == HIT
    assert joining.worker.metrics.total("layer_waits") == waits


@pytest.mark.parametrize("layers", [0, 2])
def test_a_load_that_fails_before_the_batch_is_there_fails_its_request_in_that_step(
    joining: LiveEngine, layers: int
) -> None:
    joining.stored(P)
    joining.fail_at(layers)

    def fails() -> None:
        load = joining.load_of("r1")
        joining.wait_until(lambda: load.transfer is not None)
        joining.gate.grant(layers + 1)
        joining.wait_until(lambda: load.transfer.state.is_final)

    joining.add("r1", P)
    with while_preparing(joining, fails) as opened:
        answer = joining.finish("r1")[0]
    assert opened == [1]
    assert (answer.reason, answer.tokens) == ("error", ())
    joining.settle()
    assert joining.side.book.num_held == joining.worker.loads.num_open == 0


def test_who_shares_the_blocks_of_a_load_in_its_step_waits_for_it_too(joining: LiveEngine) -> None:
    expected = joining.stored(Q)
    computed = joining.stored(P)
    joining.add("r1", P)
    joining.add("r2", Q)
    with joining.landing_on_nothing(), joining.landing_on_demand():
        answers = joining.finish("r1", "r2")
    assert answers[0].same(computed)
    assert answers[1].same(expected)


def test_a_request_aborted_behind_its_step_leaves_nothing(joining: LiveEngine) -> None:
    computed = joining.stored(P)
    joining.add("r1", P)
    with while_preparing(joining, lambda: joining.land(joining.load_of("r1"), 2)), joining.landing_on_demand():
        joining.step()
    joining.abort("r1")
    joining.settle()
    assert joining.side.book.num_held == joining.worker.loads.num_open == 0
    joining.add("r3", P)
    with joining.landing_on_demand():
        assert joining.finish("r3")[0].same(computed)
