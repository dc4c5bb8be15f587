"""Blending on a small transformer: against a full prefill and against plain reuse, both in float64 and all at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine_driver import ENGINE_MISSING
from lamella.connector.streams import Span
from lamella.reference.plan import Direction

torch: Any = pytest.importorskip("torch", reason="no CPU build of torch on this machine")

from blend_driver import (  # noqa: E402
    BASE,
    BLOCK,
    CHUNK,
    HEAD,
    KV_HEADS,
    BlendingEngine,
    random_tokens,
)
from cache_driver import Deployment  # noqa: E402
from lamella.connector.blend import Blended, Blender, BlendError, Reuse, Rotation  # noqa: E402
from lamella.connector.buffered import BufferedConnector  # noqa: E402

pytestmark = pytest.mark.skipif(ENGINE_MISSING is not None, reason=str(ENGINE_MISSING))

NEAR = 1e-4
ONE, TWO = random_tokens(1, 24), random_tokens(2, 16)
SOME, MORE, LAST = random_tokens(3, 5), random_tokens(4, 3), random_tokens(5, 7)
CASES = {
    "a gap before, between and behind": ([*SOME, *ONE, *MORE, *TWO, *LAST], [Reuse(ONE, 5), Reuse(TWO, 32)]),
    "in another order, named in any": ([*TWO, *ONE, *LAST], [Reuse(ONE, 16), Reuse(TWO, 0)]),
    "one chunk twice": ([*ONE, *MORE, *ONE, *LAST], [Reuse(ONE, 0), Reuse(ONE, 27)]),
    "out of the middle of what was stored": ([*MORE, *ONE[10:19], *LAST], [Reuse(ONE, 3, first=10, end=19)]),
    "further to the front than before": ([*ONE[16:24], *LAST], [Reuse(ONE, 0, first=16)]),
    "nothing behind the last reuse": ([*SOME, *ONE], [Reuse(ONE, 5)]),
    "nothing but what was stored": (ONE, [Reuse(ONE, 0)]),
    "nothing reused": ([*SOME, *LAST], []),
}


@pytest.fixture(scope="module")
def shared() -> Any:
    with BlendingEngine() as run:
        run.store(ONE)
        run.store(TWO)
        yield run


def blend(
    run: BlendingEngine, tokens: Sequence[int], reuses: Sequence[Reuse], **options: Any
) -> tuple[Blended, Any, list[int]]:
    """(what it says, logits of the computed tokens, blocks), with nothing left held."""
    blocks = np.random.default_rng(3).permutation(64)[: -(-len(tokens) // BLOCK)].tolist()
    for kv in run.cache:
        kv.fill_(torch.nan)
    blended = run.blender(**options).blend(tokens, reuses, blocks)
    assert run.references() == (0, 0, 0)
    return blended, run.model.logits(blended.hidden).double(), blocks


def apart(found: Any, expected: Any) -> float:
    return float((found - expected).abs().max())


def kv_apart(run: BlendingEngine, blocks: Sequence[int], expected: Any, num_tokens: int) -> float:
    """Furthest that any layer's keys or values in the blocks are from those expected."""
    return max(
        apart(found.double(), one)
        for layer, pair in enumerate(expected)
        for found, one in zip(run.kv(layer, blocks, num_tokens), pair, strict=True)
    )


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
def _one_thread_and_closed_at_the_end() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the model is so small that threads would only wait for one another
    yield
    torch.set_num_threads(threads)
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


# ---- a wrong rotation

WRONG = {
    "of another base": Rotation.from_base(2 * BASE, HEAD),
    "with other pairs": Rotation.from_base(BASE, HEAD, interleaved=True),
    "the other way round": Rotation(tuple(-turn for turn in Rotation.from_base(BASE, HEAD).frequencies)),
    "of half a head": Rotation.from_base(BASE, HEAD // 2),
    "none": Rotation((0.0,)),
}


@pytest.mark.parametrize("rotation", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("ratio", [0.0, 0.3])
def test_a_wrong_rotation_is_refused_in_layer_0_and_would_be_wrong(
    shared: BlendingEngine, rotation: Rotation, ratio: float
) -> None:
    tokens, reuses = CASES["a gap before, between and behind"]
    with pytest.raises(ValueError, match=r"off by .* more than 0.05: they come from another model or another rotation"):
        blend(shared, tokens, reuses, rotation=rotation, ratio=ratio)
    assert shared.references() == (0, 0, 0)
    _, logits, _ = blend(shared, tokens, reuses, rotation=rotation, ratio=0.0, tolerance=1e9)
    assert apart(logits, shared.oracle.reuse(tokens, reuses)[0]) > 100 * NEAR


def test_another_models_kv_is_refused() -> None:
    tokens, reuses = CASES["a gap before, between and behind"]
    with BlendingEngine(0) as run, BlendingEngine(1) as other:
        run.store(ONE)
        run.store(TWO)
        run.model = other.model
        with pytest.raises(ValueError, match="another model"):
            blend(run, tokens, reuses)


def test_one_foreign_part_among_others_is_refused_however_few_tokens_are_sampled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lamella.connector.blend._SAMPLED_TOKENS", 1)
    tokens, reuses = CASES["a gap before, between and behind"]
    with BlendingEngine(0) as run, BlendingEngine(1) as other:
        run.store(ONE)
        own, run.model = run.model, other.model
        run.store(TWO)
        run.model = own
        with pytest.raises(ValueError, match="another model"):
            blend(run, tokens, reuses)


def test_without_turning_keys_a_blend_is_not_plain_reuse(
    shared: BlendingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault of forgetting to turn: what the comparison with plain reuse must notice."""
    tokens, reuses = CASES["a gap before, between and behind"]
    monkeypatch.setattr(Rotation, "turn", lambda self, keys, turns: None)
    _, logits, _ = blend(shared, tokens, reuses, ratio=0.0, tolerance=1e9)
    assert apart(logits, shared.oracle.reuse(tokens, reuses)[0]) > 100 * NEAR


# ---- what is not there, and what fails


def test_what_the_cache_does_not_hold_is_computed(shared: BlendingEngine) -> None:
    never, longer = random_tokens(8, 12), [*ONE, *random_tokens(9, 6)]
    tokens = [*never, *longer, *LAST]
    blended, logits, _ = blend(shared, tokens, [Reuse(never, 0), Reuse(longer, 12)], ratio=0.0)
    assert blended.plan.reused.tolist() == [False] * 12 + [True] * 24 + [False] * 13
    assert apart(logits, shared.oracle.reuse(tokens, [Reuse(ONE, 12)])[0]) < NEAR


def test_parts_come_from_the_pool_and_from_tiers_alike() -> None:
    tokens, reuses = CASES["one chunk twice"]
    with BlendingEngine() as run:
        run.store(ONE)
        keys = run.cache_engine.keys_of(ONE)
        run.pool.discard(keys[1:])
        _, logits, blocks = blend(run, tokens, reuses, ratio=0.0)
        expected, layers = run.oracle.reuse(tokens, reuses)
        assert run.tier.reads, "two chunks were in the tier alone"
        assert apart(logits, expected) < NEAR
        assert kv_apart(run, blocks, layers, len(tokens)) < NEAR


def test_a_layer_that_is_lost_ends_the_blend_and_the_next_one_works() -> None:
    tokens, reuses = CASES["a gap before, between and behind"]
    with BlendingEngine() as run:
        run.store(ONE)
        run.store(TWO)
        run.pool.discard(run.cache_engine.keys_of(ONE)[2:])
        blender, blocks = run.blender(ratio=0.3), list(range(20))

        def lose(layer: int) -> None:  # reading layer 3 begins after this
            run.tier.down = True

        run.model.at_layer = lose
        with pytest.raises(BlendError, match=r"memory cannot read .*; compute the sequence without reuse"):
            blender.blend(tokens, reuses, blocks)
        run.model.at_layer = lambda layer: None
        run.tier.down = False
        assert run.references() == (0, 0, 0)
        _, logits, _ = blend(run, tokens, reuses, ratio=1.0)
        assert apart(logits[-1], run.oracle.prefill(tokens)[0][-1]) < NEAR


@pytest.mark.parametrize("which", ["engine", "scatter_engine"])
def test_a_copy_that_fails_ends_the_blend_and_the_next_one_works(which: str) -> None:
    tokens, reuses = CASES["a gap before, between and behind"]
    with BlendingEngine() as run:
        run.store(ONE)
        run.store(TWO)
        engine = getattr(run, which)
        engine.plant_fault(Direction.RETRIEVE, engine.lane(Direction.RETRIEVE).windows + 2)
        with pytest.raises(BlendError, match="planted"):
            run.blender(ratio=0.3).blend(tokens, reuses, list(range(20)))
        assert run.references() == (0, 0, 0)
        _, logits, _ = blend(run, tokens, reuses, ratio=1.0)
        assert apart(logits[-1], run.oracle.prefill(tokens)[0][-1]) < NEAR


def test_a_model_that_fails_leaves_nothing_held(shared: BlendingEngine) -> None:
    tokens, reuses = CASES["a gap before, between and behind"]

    def fail(layer: int) -> None:
        if layer == 2:
            raise ArithmeticError("the model's own fault")

    shared.model.at_layer = fail
    with pytest.raises(ArithmeticError):
        shared.blender().blend(tokens, reuses, list(range(20)))
    shared.model.at_layer = lambda layer: None
    assert shared.references() == (0, 0, 0)
    _, logits, _ = blend(shared, tokens, reuses, ratio=0.0)
    assert apart(logits, shared.oracle.reuse(tokens, reuses)[0]) < NEAR


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda run: run.blender(ratio=1.5), "between 0 and 1, got 1.5"),
        (lambda run: run.blender(ratio=(0.1, 0.2)), "shares must not rise"),
        (lambda run: run.blender(dtype=torch.float16), "elements of 4 bytes, got torch.float16 of 2"),
        (lambda run: run.blender(dtype=torch.int32), "keys of torch.int32 cannot be turned"),
        (lambda run: run.blender(rotation=Rotation.from_base(BASE, 2 * HEAD)), "16 pairs turn, but a head has 16"),
        (lambda run: run.blender(packed=True), "packed means one array"),
        (lambda run: run.blender(tolerance=0), "tolerance must be positive, got 0"),
        (lambda run: run.blender().blend([], [], []), "no tokens"),
        (lambda run: run.blender().blend(ONE, [], [1, 2]), "24 tokens need 6 blocks of 4, got 2"),
        (lambda run: run.blender().blend(ONE, [], [1, 2, 3, 3, 4, 5]), "block 3 would be written twice"),
        (lambda run: run.blender().blend([1] * 129, [], list(range(33))), "holds 128 tokens, got 129: raise"),
        (lambda run: run.blender().blend(ONE, [Reuse(TWO, 3)], list(range(6))), "reuse 0 is of another token"),
        (lambda run: run.blender().blend(ONE, [Reuse(ONE, 8)], list(range(6))), "reuse 0 ends at 32"),
        (lambda run: run.blender(tolerance=float("nan")), "tolerance must be positive, got nan"),
        (lambda run: run.blender().blend([3, -1], [], [0]), "tokens must not be negative, got -1"),
        (lambda run: run.blender().blend([[3, 4]], [], [0]), r"one behind another, got an array of shape \(1, 2\)"),
        (lambda run: run.blender().blend([3], [], [-1]), "block_ids must not be negative, got -1"),
    ],
)
def test_what_cannot_be_is_refused_with_its_value_and_nothing_moves(
    shared: BlendingEngine, call: Callable[[BlendingEngine], Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        call(shared)
    assert shared.references() == (0, 0, 0)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda run: run.blender(ratio="0.5"), "ratio is a number between 0 and 1, or one a layer, got '0.5'"),
        (lambda run: run.blender(ratio=True), "got True"),
        (lambda run: run.blender(rotation=None), "rotation must be a Rotation, got None"),
        (lambda run: run.blender().blend(None, [], [0]), "tokens must be whole numbers, got None"),
        (lambda run: run.blender().blend([1.5], [], [0]), "tokens must be whole numbers, got .*1.5"),
        (lambda run: run.blender().blend([3], [], [0.0]), "block_ids must be whole numbers, got .*0.0"),
        (lambda run: run.blender().blend(ONE, [(ONE, 0)], list(range(6))), "reuse 0 must be a Reuse, got "),
        (lambda run: Reuse(ONE, 1.5), "start must be a whole number, got 1.5"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_number_is_refused_with_its_value(
    shared: BlendingEngine, call: Callable[[BlendingEngine], Any], reason: str
) -> None:
    with pytest.raises(TypeError, match=reason):
        call(shared)
    assert shared.references() == (0, 0, 0)


def test_buffers_for_no_tokens_are_refused() -> None:
    with Deployment() as run, pytest.raises(ValueError, match="max_tokens must be at least 1, got 0"):
        BufferedConnector(run.engine, run.layout, run.caches, run.pool.memory, max_tokens=0)


def test_mla_is_refused_with_the_reason() -> None:
    with Deployment(kv=1) as run:
        connector = BufferedConnector(run.engine, run.layout, run.caches, run.pool.memory, max_tokens=16)
        run.cache_engine.connector = connector
        with pytest.raises(ValueError, match="MLA's latent, which has no keys that could be turned"):
            Blender(run.cache_engine, None, Rotation((1.0,)), dtype=torch.half)  # type: ignore[arg-type]
        connector.close()


def test_a_paged_connector_is_refused_with_the_settings_that_help() -> None:
    with Deployment() as run, pytest.raises(ValueError, match="set use_layerwise and enable_blending"):
        Blender(run.cache_engine, None, Rotation((1.0,)), dtype=torch.half)  # type: ignore[arg-type]


# ---- the pipeline

LAYERS = 5


def _overlap(one: Span, other: Span) -> bool:
    return one.start_ns < other.end_ns and other.start_ns < one.end_ns


def _until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not what():
        assert time.monotonic() < deadline, "it did not happen while the layer was recomputed"
        time.sleep(0.001)


def test_while_layer_i_is_recomputed_the_next_is_loaded_and_the_one_before_scattered() -> None:
    """On devices that move nothing unless told: what is told while a layer computes must be under way by then.

    A flow that loads, recomputes and scatters in turn never gets there.
    """
    recorded: list[Span] = []
    tokens, reuses = CASES["one chunk twice"]
    with BlendingEngine(num_layers=LAYERS, paced=True, recorder=recorded.append) as run:
        run.engine.grant(Direction.STORE, 100)
        run.store(ONE)
        recorded.clear()
        loads, scatters = run.connector.load_stream.outstanding, run.connector.scatter_stream.outstanding

        def meanwhile(layer: int) -> None:
            if layer + 1 < LAYERS:
                run.engine.grant(Direction.RETRIEVE, 1)
                _until(lambda: loads.wait_ended(layer + 2, 0))
            if layer:
                run.scatter_engine.grant(Direction.RETRIEVE, 1)
                _until(lambda: scatters.wait_ended(layer, 0))
            if layer == LAYERS - 1:
                run.scatter_engine.grant(Direction.RETRIEVE, 1)  # its own, which comes after it

        run.model.at_layer = meanwhile
        run.engine.grant(Direction.RETRIEVE, 1)  # layer 0 comes before any recompute
        blender = run.blender(ratio=0.3, recorder=recorded.append)
        blender.blend(tokens, reuses, list(range(20)))
        by = {
            kind: {layer: [s for s in recorded if (s.kind, s.first_layer) == (kind, layer)] for layer in range(LAYERS)}
            for kind in ("load", "recompute", "scatter")
        }
        for layer in range(LAYERS):
            (load,), (recompute,), (scatter,) = (by[kind][layer] for kind in ("load", "recompute", "scatter"))
            assert load.end_ns <= recompute.start_ns, "recomputed once it landed"
            assert recompute.end_ns <= scatter.start_ns, "scattered once it was recomputed"
            if layer + 1 < LAYERS:
                assert _overlap(recompute, by["load"][layer + 1][0])
                assert _overlap(scatter, by["recompute"][layer + 1][0])


# ---- from settings


def test_use_layerwise_with_blending_selects_the_buffered_connector(tmp_path: Path) -> None:
    from lamella.connector.config import CacheSettings
    from lamella.connector.in_process import InProcessCache
    from lamella.connector.layerwise import LayerwiseConnector
    from lamella.cuda_ext.torch import cache_layout
    from lamella.reference.geometry import KVGeometry, ObjectForm
    from lamella.reference.keys import KeySpace
    from lamella.reference.layout import ObjectLayout

    layout = ObjectLayout.single(KVGeometry(2, 2, KV_HEADS, HEAD, 4, CHUNK), BLOCK)
    space = KeySpace("tiny", "float32", ObjectForm.TOKEN, "THD", CHUNK, 0, 1, (0, 2))
    cache = [torch.zeros(2, 8, BLOCK, KV_HEADS, HEAD) for _ in range(2)]
    chosen = {}
    for blending in (False, True):
        read = CacheSettings.from_mapping({"use_layerwise": True, "enable_blending": blending, "blend_tokens": 32})
        with InProcessCache(read, space, layout, [cache_layout("KNTHD", cache)]) as one:
            chosen[blending] = type(one.cache_engine.connector)
    assert chosen == {False: LayerwiseConnector, True: BufferedConnector}
