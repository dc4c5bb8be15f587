"""Requests let run when outputs are handed out, before anything has landed: right to the bit because steps wait.

As early as can be, as `-p with_vllm.released_by_forecast` has it for other tests.
"""

from __future__ import annotations

import math

import pytest

from lamella.connector.vllm_scheduler import SchedulerSide
from with_vllm.live_engine import LiveEngine
from with_vllm.no_number import READERS
from with_vllm.replays import HIT, OWN
from with_vllm.tiny_engine import prompt

P = prompt(HIT + OWN)
RELEASED = "released_by_forecast"


@pytest.fixture
def everybody_is_let_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SchedulerSide, "_may_join", lambda side: list(side.book._parked))
    monkeypatch.setattr(SchedulerSide, "_wants_hand_outs", property(lambda side: bool(side.book._parked)))


@pytest.mark.usefixtures("everybody_is_let_run")
@pytest.mark.parametrize("waits", READERS)
def test_who_is_let_run_before_anything_landed_waits_and_answers_with_no_number_where_it_does_not(
    engine: LiveEngine, waits: bool
) -> None:
    computed = engine.stored(P)
    engine.add("r1", P)
    before = engine.side.metrics.total(RELEASED)
    rules = [] if waits else ["wait_for_released"]
    with engine.landing_on_nothing(), engine.without(*rules), engine.landing_on_demand():
        engine.step_until(lambda: engine.side.metrics.total(RELEASED) == before + 1, 5)
        answer = engine.finish("r1")[0]
    for load in engine.loads:
        engine.land(load)
    engine.forget_blocks()
    assert answer.same(computed) == waits
    assert any(map(math.isnan, answer.logprobs)) != waits


@pytest.mark.usefixtures("everybody_is_let_run")
def test_who_is_aborted_at_once_when_let_run_leaves_nothing_behind(engine: LiveEngine) -> None:
    engine.stored(P)
    engine.add("r1", P)
    before = engine.side.metrics.total(RELEASED)
    engine.step_until(lambda: engine.side.metrics.total(RELEASED) == before + 1, 5)
    load = engine.load_of("r1")
    engine.abort("r1")
    engine.step(3)
    assert engine.side.book.num_held == 1  # its blocks: the load still writes them
    engine.land(load)
    engine.forget_blocks()
    assert (engine.side.book.num_held, engine.side.book._ahead) == (0, {})
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 39
