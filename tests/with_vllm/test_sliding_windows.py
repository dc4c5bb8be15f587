"""A model whose layers all slide: one KV cache group, in whose tables block 0 stands for what the window has left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lamella.connector.objects import Refusal, Taken
from with_vllm.live_engine import LiveEngine
from with_vllm.tiny_engine import PLAIN_STEPS, prompt
from with_vllm.tiny_llama import write_tiny_llama

POOL = {"layers_per_slice": 1, "host_pool_gib": 0.1, "chunk_tokens": 64, "wait_timeout_s": 60}


@pytest.fixture(scope="module")
def sliding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveEngine]:
    model = write_tiny_llama(tmp_path_factory.mktemp("sliding"), window=64, everywhere=True)
    live = LiveEngine(model, POOL, policy="recompute" if PLAIN_STEPS else "fail", num_gpu_blocks_override=100)
    (group,) = live.scheduler.kv_cache_config.kv_cache_groups
    assert type(group.kv_cache_spec).__name__ == "SlidingWindowSpec"
    yield live
    live.close()


def test_a_model_of_sliding_windows_alone_is_exact_and_released_early(sliding: LiveEngine) -> None:
    for length in (60, 130, 448, 500):
        tokens = prompt(length, salt=length)
        computed = sliding.stored(tokens)
        loaded = sliding.generate(tokens)
        assert loaded.same(computed), length
        assert loaded.cached == min(length // 64 * 64, (length - 1) // 32 * 32)
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
