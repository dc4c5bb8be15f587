"""An engine whose decoding steps replay full CUDA graphs, and a prompt of which only the last token is computed.

Such a prompt makes the replayed step: the request that loads and one that shares its blocks both decode over KV that
needs some ten milliseconds to land, where the graph alone takes one. Blocks hold 7.0 beforehand, so a layer read early
shows. What is right is what the same two requests answer when they hit the engine's own cache: then they make the same
steps, with everything there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from lamella.reference.plan import Direction
from with_vllm.answers import Answer, Tolerance
from with_vllm.live_engine import LiveEngine
from with_vllm.tiny_engine import prompt
from with_vllm.tiny_llama import write_tiny_llama

LAYERS, CHUNKS, CHUNK = 8, 126, 64
HIT = CHUNKS * CHUNK
P = prompt(HIT + 1)
BOUND_S = 1.0


def wide_engine(folder: Path, full_graphs: str) -> LiveEngine:
    """Half a gigabyte of KV a prompt; `full_graphs` as in the connector's settings, CUDA graphs by vLLM's defaults."""
    model = write_tiny_llama(folder, layers=LAYERS, kv_heads=8, head_dim=256, dtype=torch.bfloat16)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    settings = {
        "layers_per_slice": 1,
        "full_graphs": full_graphs,
        "host_pool_gib": 2,
        "chunk_tokens": CHUNK,
        "in_flight_mb": 8,
        "wait_timeout_s": BOUND_S,
    }
    sizes = {"max_model_len": 8192, "max_num_batched_tokens": 8192, "kv_cache_memory_bytes": 4 << 30}
    live = LiveEngine(model, settings, **sizes)
    assert live.llm.llm_engine.vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs()
    return live


def leave_nothing_behind(live: LiveEngine) -> None:
    """As a test found it."""
    live.worker.loads.hooks_bypassed = False
    live.worker.engine.plant_fault(Direction.RETRIEVE, -1)  # none, whether one was met or not
    live.come_to_rest()
    assert live.side.book.num_held == 0
    assert live.side.objects.index.occupancy().pins == 0


def loaded_and_shared(live: LiveEngine) -> list[Answer]:
    """Two requests for P, of which the first loads it and the second hits the first one's blocks."""
    live.add("r1", P)
    live.add("r2", P)
    return live.finish("r1", "r2")


def stored(live: LiveEngine) -> list[Answer]:
    """What both must answer; P is in the host pool afterwards, and nowhere else."""
    live.stored(P, 1)
    with live.nothing_loaded():
        live.generate(P, 1)
        answers = loaded_and_shared(live)
    assert [answer.cached for answer in answers] == [HIT, HIT], "the yardstick hits the engine's own cache"
    live.forget_blocks()
    return answers


def told(answers: list[Answer], right: list[Answer], met: list[list[int]]) -> str:
    """All that is known of answers that are not as they should be."""
    apart = [answer.deviation(own) for answer, own in zip(answers, right, strict=True)]
    return (
        f"apart {apart}, tolerated {Tolerance.logprob}; ended {[answer.reason for answer in answers]}; hits "
        f"{[answer.cached for answer in answers]}; layers landed at each replay {met}; tokens "
        f"{[answer.tokens for answer in answers]}, right {[own.tokens for own in right]}"
    )


def all_same(answers: list[Answer], right: list[Answer]) -> bool:
    return all(answer.same(own) for answer, own in zip(answers, right, strict=True))


def windows_of_a_load(live: LiveEngine) -> int:
    """Windows in which P's load moves."""
    before = live.worker.engine.lane(Direction.RETRIEVE).windows
    loaded_and_shared(live)
    live.forget_blocks()
    return int(live.worker.engine.lane(Direction.RETRIEVE).windows - before)


@contextmanager
def instead(owner: Any, name: str, does: Callable[..., Any]) -> Iterator[None]:
    setattr(owner, name, does)
    try:
        yield
    finally:
        delattr(owner, name)


def waits_inside(live: LiveEngine) -> bool:
    """Whether the graphs themselves wait."""
    return live.worker.captured is not None


@contextmanager
def without_its_wait(live: LiveEngine) -> Iterator[None]:
    """A replay does not wait, inside or before, and nothing notices."""
    inside = waits_inside(live)
    with instead(live.worker.captured, "gate", lambda *_: True) if inside else live.without("wait_for_released"):
        yield


@contextmanager
def nobody_knows_of_replays(live: LiveEngine) -> Iterator[None]:
    """No step is taken for one that may be replayed."""
    if waits_inside(live):
        with instead(live.worker.captured, "may_replay", lambda orders: False):
            yield
    else:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("lamella.connector.vllm._is_replay", lambda: False)
            yield
