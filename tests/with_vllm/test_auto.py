"""`auto` in a real engine: each arm it can choose is taken, right to the bit and counted; its profile is corrected."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lamella.reference.auto_view import Arm
from with_vllm.live_engine import LiveEngine
from with_vllm.tiny_engine import prompt

P = prompt(500)


@pytest.fixture(scope="module")
def auto(deep_llama: Path) -> Iterator[LiveEngine]:
    live = LiveEngine(
        deep_llama,
        {"layers_per_slice": "auto", "host_pool_gib": 0.25, "chunk_tokens": 64, "wait_timeout_s": 60.0},
        num_gpu_blocks_override=100,
    )
    yield live
    live.close()


def force(live: LiveEngine, arm: Arm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next choices fall on that arm: the others have become dear."""
    policy = live.side._auto._policy  # type: ignore[union-attr]
    chosen = type(policy).choose

    def choose(*arguments: object) -> object:
        decision = chosen(policy, *arguments)  # type: ignore[arg-type]
        forced = next(one for one in decision.predictions if one.arm is arm)
        return type(decision)(
            forced,
            decision.predictions,
            decision.release,
            decision.compute_ns,
            decision.prefill_ns,
            decision.load_ns,
        )

    monkeypatch.setattr(policy, "choose", choose)


@pytest.mark.parametrize("arm", Arm, ids=lambda arm: arm.value)
def test_every_arm_is_exact_and_counted(auto: LiveEngine, arm: Arm, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = auto.stored(P)
    force(auto, arm, monkeypatch)
    before = auto.side.metrics.total(f"auto_{arm.value}")
    auto.add("r1", P)
    auto.step()
    runs = auto.request("r1").status.name == "RUNNING"
    assert runs == (arm in (Arm.SYNC, Arm.OFF))
    loaded = auto.finish("r1")[0]
    assert loaded.same(computed)
    assert loaded.cached == (0 if arm is Arm.OFF else 448)
    assert auto.side.metrics.total(f"auto_{arm.value}") == before + 1
    auto.forget_blocks()


def test_steps_and_loads_of_the_engine_correct_the_profile(auto: LiveEngine) -> None:
    auto.stored(P)
    auto.generate(P)
    auto.forget_blocks()
    correction = auto.side._auto.correction  # type: ignore[union-attr]
    assert correction.wire_seen > 0
    assert correction.steps_seen > 0
    assert (correction.wire, correction.steps) != (1.0, 1.0)  # this machine is no H200
