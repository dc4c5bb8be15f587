"""Blending on a small transformer: against a full prefill and against plain reuse, both in float64 and all at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine_driver import ENGINE_MISSING

torch: Any = pytest.importorskip("torch", reason="no CPU build of torch on this machine")

from blend_driver import (  # noqa: E402
    CASES,
    HEAD,
    LAST,
    NEAR,
    ONE,
    TWO,
    BlendingEngine,
    apart,
    blend,
    kv_apart,
    random_tokens,
)
from lamella.connector.blend import Reuse  # noqa: E402

pytestmark = [
    pytest.mark.skipif(ENGINE_MISSING is not None, reason=str(ENGINE_MISSING)),
    pytest.mark.usefixtures("one_thread"),
]


# ---- the two ends


@pytest.mark.parametrize("case", CASES)
def test_with_ratio_1_logits_and_kv_are_a_full_prefills(shared: BlendingEngine, case: str) -> None:
    tokens, reuses = CASES[case]
    blended, logits, blocks = blend(shared, tokens, reuses, ratio=1.0)
    expected, layers = shared.oracle.prefill(tokens)
    assert apart(logits, expected[blended.positions]) < NEAR
    assert kv_apart(shared, blocks, layers, len(tokens)) < NEAR


@pytest.mark.parametrize("case", CASES)
def test_with_ratio_0_logits_and_kv_are_plain_reuses(shared: BlendingEngine, case: str) -> None:
    tokens, reuses = CASES[case]
    blended, logits, blocks = blend(shared, tokens, reuses, ratio=0.0)
    expected, layers = shared.oracle.reuse(tokens, reuses)
    assert blended.recomputed_tokens == 0
    assert apart(logits, expected) < NEAR
    assert kv_apart(shared, blocks, layers, len(tokens)) < NEAR


@st.composite
def _sequences(draw: st.DrawFn) -> tuple[list[int], list[Reuse]]:
    tokens: list[int] = []
    reuses = []
    for index in range(draw(st.integers(0, 4))):
        tokens += random_tokens(100 + index, draw(st.integers(0, 9)))
        stored = draw(st.sampled_from((ONE, TWO)))
        first = draw(st.integers(0, len(stored) - 1))
        end = draw(st.integers(first + 1, len(stored)))
        reuses.append(Reuse(stored, len(tokens), first, end))
        tokens += stored[first:end]
    tokens += random_tokens(200, draw(st.integers(0 if tokens else 1, 5)))
    return tokens, draw(st.permutations(reuses))


@settings(max_examples=40)
@given(case=_sequences(), ratio=st.sampled_from((0.0, 1.0)))
@example(case=(ONE, [Reuse(ONE, 0)]), ratio=0.0)
def test_whatever_is_put_together_both_ends_are_the_oracles(case: tuple[list[int], list[Reuse]], ratio: float) -> None:
    tokens, reuses = case
    run = _stored_once()
    blended, logits, blocks = blend(run, tokens, reuses, ratio=ratio)
    expected, layers = run.oracle.reuse(tokens, reuses if ratio == 0 else [])
    assert apart(logits[-1], expected[-1]) < NEAR
    assert kv_apart(run, blocks, layers, len(tokens)) < NEAR
    assert int(blended.positions[-1]) == len(tokens) - 1


_RUNS: list[BlendingEngine] = []


def _stored_once() -> BlendingEngine:
    if not _RUNS:
        _RUNS.append(BlendingEngine())
        _RUNS[0].store(ONE)
        _RUNS[0].store(TWO)
    return _RUNS[0]


@pytest.fixture(scope="module", autouse=True)
def _closed_at_the_end() -> Any:
    yield
    while _RUNS:
        _RUNS.pop().close()


@pytest.mark.parametrize(
    "model",
    [{"interleaved": True}, {"dim": HEAD // 2}, {"packed": True}, {"num_layers": 1}, {"num_layers": 2}],
    ids=["neighbours turn", "half a head turns", "keys and values packed", "one layer", "two layers"],
)
def test_other_models_blend_too(model: dict[str, Any]) -> None:
    tokens, reuses = CASES["a gap before, between and behind"]
    with BlendingEngine(**model) as run:
        run.store(ONE)
        run.store(TWO)
        for ratio in (0.0, 1.0):
            _, logits, blocks = blend(run, tokens, reuses, ratio=ratio)
            expected, layers = run.oracle.reuse(tokens, reuses if ratio == 0 else [])
            assert apart(logits[-1], expected[-1]) < NEAR
            assert kv_apart(run, blocks, layers, len(tokens)) < NEAR


def test_a_part_may_end_inside_a_block_at_the_very_end_of_the_buffers() -> None:
    tokens = [*random_tokens(11, 26), *ONE[:22]]
    with BlendingEngine(max_tokens=len(tokens)) as run:
        run.store(ONE)
        for start in range(27):  # wherever its blocks begin
            moved = [*tokens[26 - start : 26], *ONE[:22], *tokens[: 26 - start]]
            _, logits, _ = blend(run, moved, [Reuse(ONE, start, end=22)], ratio=1.0)
            assert apart(logits[-1], run.oracle.prefill(moved)[0][-1]) < NEAR


# ---- between

RATIOS = (0.0, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)


def test_the_mean_deviation_falls_with_every_step_of_the_ratio() -> None:
    tokens, reuses = CASES["a gap before, between and behind"]
    deviations = []
    for seed in range(10):
        with BlendingEngine(seed) as run:
            run.store(ONE)
            run.store(TWO)
            expected = run.oracle.prefill(tokens)[0][-1]
            logits = [blend(run, tokens, reuses, ratio=ratio)[1][-1] for ratio in RATIOS]
            deviations.append([float((found - expected).norm() / expected.norm()) for found in logits])
    mean = np.mean(deviations, axis=0)
    assert (np.diff(mean) < 0).all(), dict(zip(RATIOS, mean, strict=True))
    assert mean[-1] < NEAR < 0.1 < mean[0]


def test_the_tokens_that_deviate_most_are_worth_more_than_as_many_others(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, reuses = CASES["a gap before, between and behind"]
    apart_by = {True: 0.0, False: 0.0}
    topk = torch.Tensor.topk
    for largest in apart_by:
        if not largest:
            monkeypatch.setattr(torch.Tensor, "topk", lambda self, k, **rest: topk(self, k, largest=False, **rest))
        for seed in range(6):
            with BlendingEngine(seed) as run:
                run.store(ONE)
                run.store(TWO)
                _, logits, _ = blend(run, tokens, reuses, ratio=0.3)
                apart_by[largest] += apart(logits[-1], run.oracle.prefill(tokens)[0][-1])
    assert apart_by[True] < 0.9 * apart_by[False]


def test_a_schedule_lets_go_of_tokens_layer_by_layer(shared: BlendingEngine) -> None:
    tokens, reuses = CASES["a gap before, between and behind"]
    computed: dict[int, int] = {}
    shared.model.at_layer = lambda layer: computed.setdefault(layer, 0)
    attend = shared.model.attend

    def counted(layer: int, hidden: Any, *rest: Any) -> Any:
        computed[layer] = len(hidden)
        return attend(layer, hidden, *rest)

    shared.model.attend = counted  # type: ignore[method-assign]
    try:
        blended, _, _ = blend(shared, tokens, reuses, ratio=(0.5, 0.25, 0.1))
    finally:
        del shared.model.attend  # type: ignore[method-assign]
    assert computed == {0: 55, 1: 15 + 20, 2: 15 + 10, 3: 15 + 4}
    assert blended.recomputed_tokens == 4


def test_what_stands_where_it_stood_at_the_very_beginning_is_exact_and_not_computed(shared: BlendingEngine) -> None:
    tokens = [*ONE, *TWO, *LAST]
    blended, logits, _ = blend(shared, tokens, [Reuse(ONE, 0), Reuse(TWO, 24)], ratio=1.0)
    assert blended.positions.tolist() == list(range(24, 47))
    assert blended.recomputed_tokens == 16
    assert apart(logits[-1], shared.oracle.prefill(tokens)[0][-1]) < NEAR
