"""Blending on a GPU: the two ends against the oracle, the order of streams with its control, and the pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from lamella.connector.streams import Moment, Span
from lamella.cuda_ext._library import LibraryMissingError
from lamella.cuda_ext.device import Device

torch: Any = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and torch with CUDA"),
]

from blend_driver import BLOCK, BlendingEngine, random_tokens  # noqa: E402
from lamella.connector.blend import Blended, Reuse  # noqa: E402

NEAR = 1e-4
ONE, TWO = random_tokens(1, 24), random_tokens(2, 16)
TOKENS = [*random_tokens(3, 5), *TWO, *random_tokens(4, 3), *ONE, *ONE, *random_tokens(5, 7)]
REUSES = [Reuse(ONE, 24), Reuse(TWO, 5), Reuse(ONE, 48)]
BLOCKS = np.random.default_rng(6).permutation(64)[: -(-len(TOKENS) // BLOCK)].tolist()
DELAY_CYCLES = 40_000_000
"""About 20 ms a layer, several times what the host takes to launch one: the device is behind by whole layers."""


def torch_stream() -> Any:
    from lamella.connector.torch_stream import TorchStream

    return TorchStream("cuda:0")


def make(**options: Any) -> BlendingEngine:
    try:
        Device("cuda:0").facts()
    except (LibraryMissingError, RuntimeError) as missing:
        pytest.skip(f"no CUDA library here: {missing}")
    return BlendingEngine(device="cuda:0", **{"compute_stream": torch_stream(), **options})


@pytest.fixture(params=["default stream", "another stream"])
def run(request: pytest.FixtureRequest) -> Iterator[BlendingEngine]:
    with make() as made:
        with torch.cuda.stream(torch.cuda.Stream() if request.param == "another stream" else None):
            made.store(ONE)
            made.store(TWO)
            yield made
        torch.cuda.synchronize()


def blend(run: BlendingEngine, ratio: Any, **options: Any) -> tuple[Blended, Any]:
    for kv in run.cache:
        kv.fill_(torch.nan)
    blended = run.blender(ratio=ratio, **options).blend(TOKENS, REUSES, BLOCKS)
    logits = run.model.logits(blended.hidden).double()
    assert run.references() == (0, 0, 0)
    return blended, logits


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_both_ends_are_the_oracles(run: BlendingEngine, ratio: float) -> None:
    blended, logits = blend(run, ratio)
    expected, layers = run.oracle.reuse(TOKENS, REUSES if ratio == 0 else [])
    rows = slice(None) if ratio == 0 else blended.positions
    assert float((logits - expected[rows]).abs().max()) < NEAR
    for layer, pair in enumerate(layers):
        for found, wanted in zip(run.kv(layer, BLOCKS, len(TOKENS)), pair, strict=True):
            assert float((found.double() - wanted).abs().max()) < NEAR
    assert blended.sampled_deviation is not None
    assert blended.sampled_deviation < 1e-5


def test_between_the_ends_it_is_between(run: BlendingEngine) -> None:
    expected = run.oracle.prefill(TOKENS)[0][-1]
    apart = [float((blend(run, ratio)[1][-1] - expected).norm()) for ratio in (0.0, 0.5, (0.75, 0.5), 1.0)]
    assert apart[3] < NEAR < min(apart[1:3]) <= max(apart[1:3]) < apart[0]


def test_a_slow_recompute_is_scattered_after_it_ended_and_waits_for_nothing_else() -> None:
    """Each layer is computed slowly on the GPU, while the host runs ahead: what it left is in the blocks."""
    recorded: list[Span] = []
    with make(num_layers=6, recorder=recorded.append) as run, torch.cuda.stream(torch.cuda.Stream()):
        run.store(ONE)
        run.store(TWO)
        blend(run, 0.5)  # torch's first kernels take their time
        run.model.at_layer = lambda layer: torch.cuda._sleep(DELAY_CYCLES)
        recorded.clear()
        _, logits = blend(run, 1.0, recorder=recorded.append)
        assert float((logits[-1] - run.oracle.prefill(TOKENS)[0][-1]).abs().max()) < NEAR
        layers = run.oracle.prefill(TOKENS)[1]
        for layer, pair in enumerate(layers):
            for found, wanted in zip(run.kv(layer, BLOCKS, len(TOKENS)), pair, strict=True):
                assert float((found.double() - wanted).abs().max()) < NEAR
        torch.cuda.synchronize()
        of = {kind: [span for span in recorded if span.kind == kind] for kind in ("load", "recompute", "scatter")}
        recompute = {span.first_layer: span for span in of["recompute"]}
        scatter = {span.first_layer: span for span in of["scatter"]}
        for layer in range(5):
            (following,) = (span for span in of["load"] if span.first_layer == layer + 1)
            assert following.end_ns < recompute[layer].end_ns, "loaded meanwhile"
            assert scatter[layer].start_ns < recompute[layer + 1].end_ns, "scattered beside the next"


class NoOrder:
    """The control: a compute stream that nothing waits for, and that waits for nothing."""

    def __init__(self) -> None:
        self._elsewhere = torch.cuda.Stream()
        self.handle = int(self._elsewhere.cuda_stream)

    def record(self) -> Moment:
        return Moment(None)


def test_without_the_order_of_streams_the_same_blend_is_wrong() -> None:
    with make(num_layers=6) as run, torch.cuda.stream(torch.cuda.Stream()):
        run.store(ONE)
        run.store(TWO)
        blend(run, 0.5)
        run.connector.current_stream = NoOrder()
        run.model.at_layer = lambda layer: torch.cuda._sleep(DELAY_CYCLES)
        for kv in run.cache:
            kv.fill_(torch.nan)
        torch.cuda.synchronize()
        run.blender(ratio=1.0, tolerance=1e9).blend(TOKENS, REUSES, BLOCKS)
        torch.cuda.synchronize()
        layers = run.oracle.prefill(TOKENS)[1]
        wrong = [
            layer
            for layer, pair in enumerate(layers)
            for found, wanted in zip(run.kv(layer, BLOCKS, len(TOKENS)), pair, strict=True)
            if not float((found.double() - wanted).abs().max()) < NEAR
        ]
        assert wrong, "scattered before they were computed"


def test_half_precision_turns_keys_to_within_rounding() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        with make(dtype=dtype) as run, torch.cuda.stream(torch.cuda.Stream()):
            run.store(ONE)
            run.store(TWO)
            blended, _ = blend(run, 0.0)
            assert blended.sampled_deviation is not None
            assert 0 < blended.sampled_deviation < 0.02
            _, layers = run.oracle.reuse(TOKENS, REUSES)
            keys, _ = run.kv(0, BLOCKS, len(TOKENS))
            assert float((keys.double() - layers[0][0]).norm() / layers[0][0].norm()) < 0.02
