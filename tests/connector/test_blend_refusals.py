"""What a blend refuses, and what it leaves behind when something is lost or fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine_driver import ENGINE_MISSING
from lamella.reference.plan import Direction

torch: Any = pytest.importorskip("torch", reason="no CPU build of torch on this machine")

from blend_driver import (  # noqa: E402
    BASE,
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
from cache_driver import Deployment  # noqa: E402
from lamella.connector.blend import Blender, BlendError, Reuse, Rotation  # noqa: E402
from lamella.connector.buffered import BufferedConnector  # noqa: E402

pytestmark = [
    pytest.mark.skipif(ENGINE_MISSING is not None, reason=str(ENGINE_MISSING)),
    pytest.mark.usefixtures("one_thread"),
]


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
