"""A model whose layers all slide: one KV cache group, in whose tables block 0 stands for what the window has left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from lamella.connector.objects import Refusal, Taken
from lamella.reference.plan import Direction
from with_vllm.live_engine import LiveEngine
from with_vllm.tiny_engine import PLAIN_STEPS, prompt
from with_vllm.tiny_llama import write_tiny_llama

POOL = {"layers_per_slice": 1, "host_pool_gib": 0.1, "chunk_tokens": 64, "wait_timeout_s": 60}


@pytest.fixture(scope="module", params=["fail", "recompute"])
def sliding(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[LiveEngine]:
    if request.param == "recompute" and not (PLAIN_STEPS and hasattr(base, "KVConnectorTransferResults")):
        pytest.skip("this vLLM cannot take a load back whole")
    model = write_tiny_llama(tmp_path_factory.mktemp("sliding"), window=64, everywhere=True)
    live = LiveEngine(model, POOL, policy=request.param, num_gpu_blocks_override=100)
    (group,) = live.scheduler.kv_cache_config.kv_cache_groups
    assert type(group.kv_cache_spec).__name__ == "SlidingWindowSpec"
    yield live
    live.close()


def test_a_model_of_sliding_windows_alone_is_exact(sliding: LiveEngine) -> None:
    for length in (60, 130, 448, 500):
        tokens = prompt(length, salt=length)
        computed = sliding.stored(tokens)
        loaded = sliding.generate(tokens)
        assert loaded.same(computed), length
        assert loaded.cached == (length - 1) // 64 * 64  # whole chunks, where there are windows
    assert sliding.side.metrics.total("loads_failed") == 0
    assert sliding.worker.metrics.total("loads_layerwise") == 3


def test_what_a_window_has_left_behind_is_not_stored_late(sliding: LiveEngine) -> None:
    """The first chunk finds no room until its window is long past, and others have written into its blocks."""
    tokens = prompt(64, salt=7)
    computed = sliding.stored(prompt(65, salt=7))  # the same chunk, and one token more
    sliding.side.reset()
    sliding.forget_blocks()
    reserve = sliding.side.objects.reserve
    tried = []

    def full(*arguments: object) -> Taken:
        tried.append(arguments)
        return Taken([], Refusal.NO_ROOM) if len(tried) < 9 else reserve(*arguments)

    sliding.side.objects.reserve = full
    try:
        sliding.generate(tokens, 400)
    finally:
        sliding.side.objects.reserve = reserve
    assert len(tried) >= 9
    sliding.forget_blocks()
    again = sliding.generate(prompt(65, salt=7))
    assert (again.cached, again.same(computed)) == (0, True)


def test_a_failed_load_is_not_computed_anew_over_what_the_window_has_left_behind(sliding: LiveEngine) -> None:
    """vLLM would go on from the first block that failed, and the blocks before it are none: it answered wrong."""
    tokens = prompt(500, salt=5)
    computed = sliding.stored(tokens)
    failed = sliding.side.metrics.total("loads_failed")
    lane = sliding.worker.engine.lane(Direction.RETRIEVE)
    sliding.worker.engine.plant_fault(Direction.RETRIEVE, lane.windows + 1)
    answer = sliding.generate(tokens)
    assert sliding.side.metrics.total("loads_failed") == failed + 1
    recomputes = sliding.scheduler.recompute_kv_load_failures
    assert answer.same(computed) if recomputes else answer.reason == "error"
    assert sliding.generate(tokens).same(computed), "nothing wrong was stored"
