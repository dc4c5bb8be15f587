"""A blend's layers are loaded, recomputed and scattered side by side; settings choose the buffered connector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine_driver import ENGINE_MISSING
from lamella.connector.streams import Span
from lamella.reference.plan import Direction
from waiting import wait_until

torch: Any = pytest.importorskip("torch", reason="no CPU build of torch on this machine")

from blend_driver import (  # noqa: E402
    BLOCK,
    CASES,
    CHUNK,
    HEAD,
    KV_HEADS,
    ONE,
    BlendingEngine,
)
from lamella.connector.buffered import BufferedConnector  # noqa: E402

pytestmark = [
    pytest.mark.skipif(ENGINE_MISSING is not None, reason=str(ENGINE_MISSING)),
    pytest.mark.usefixtures("one_thread"),
]


# ---- the pipeline

LAYERS = 5


def _overlap(one: Span, other: Span) -> bool:
    return one.start_ns < other.end_ns and other.start_ns < one.end_ns


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
                wait_until(lambda: loads.wait_ended(layer + 2, 0), "the layer after next was brought meanwhile")
            if layer:
                run.scatter_engine.grant(Direction.RETRIEVE, 1)
                wait_until(lambda: scatters.wait_ended(layer, 0), "the layer was scattered meanwhile")
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
