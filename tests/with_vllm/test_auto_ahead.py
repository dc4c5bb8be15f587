"""`auto` in an engine that schedules ahead lets requests run by its own forecast, and their answers are the same.

pytest -p with_vllm.ahead_on_cpu tests/with_vllm/test_auto_ahead.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lamella.reference.auto_view import Arm
from lamella.reference.release import WeighedRelease
from with_vllm.live_engine import LiveEngine
from with_vllm.replays import GRAPHS, HIT, OWN
from with_vllm.tiny_engine import PLAIN_STEPS, prompt

pytestmark = pytest.mark.skipif(
    PLAIN_STEPS, reason="steps are made one after another: whom a look releases joins the next one"
)
P = prompt(HIT + OWN)
RELEASED = "released_by_forecast"


@pytest.fixture(scope="module")
def auto(tiny_llama: Path) -> Iterator[LiveEngine]:
    """An engine whose loads `auto` forecasts and the test lets land."""
    live = LiveEngine(
        tiny_llama,
        {**GRAPHS, "layers_per_slice": "auto", "host_pool_gib": 0.1, "chunk_tokens": 64, "load_timeout_s": 300},
        paced=True,
        num_gpu_blocks_override=40,
    )
    yield live
    live.close()


@pytest.fixture
def slices_of_one_layer(auto: LiveEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever seemed best: each layer is a slice, released early."""
    choice = auto.side._auto
    chosen = choice._policy.choose

    def choose(*arguments: object) -> object:
        decision = chosen(*arguments)
        early = next(one for one in decision.predictions if one.arm is Arm.EARLY)._replace(width=1)
        changed = {"chosen": early, "release": WeighedRelease()}
        kept = "predictions", "compute_ns", "prefill_ns", "load_ns"
        return type(decision)(**changed, **{name: getattr(decision, name) for name in kept})

    monkeypatch.setattr(choice._policy, "choose", choose)


def runs_before_anything_landed(engine: LiveEngine, beside: int) -> Callable[[], bool]:
    """Asked step by step: whether r1 runs. Others decode beside it."""
    for number in range(beside):
        engine.add(f"beside{number}", prompt(40, salt=number + 1), 40)
    engine.step_until(lambda: all(engine.request(f"beside{number}").num_output_tokens > 0 for number in range(beside)))
    engine.add("r1", P)
    engine.begin("r1")
    assert engine.load_of("r1").transfer.landed() == 0
    return lambda: engine.request("r1").status.name == "RUNNING"


@pytest.mark.usefixtures("slices_of_one_layer")
@pytest.mark.parametrize("beside", [0, 2])
def test_auto_lets_requests_run_by_its_forecast_and_answers_are_the_same_to_the_bit(
    auto: LiveEngine, beside: int
) -> None:
    computed = auto.stored(P)
    before = auto.side.metrics.total(RELEASED)
    with auto.landing_on_demand() as waited:
        runs = runs_before_anything_landed(auto, beside)
        auto.step_until(runs, 3_000)  # no layer has landed, so no look can have released it
        assert auto.side.metrics.total(RELEASED) == before + 1
        answer = auto.finish("r1")[0]
    assert answer.same(computed)
    assert answer.cached == HIT
    assert waited
    auto.forget_blocks()
    assert not auto.side.book._ahead
