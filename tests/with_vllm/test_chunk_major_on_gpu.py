"""With `layers_per_slice` 0 vLLM keeps its full CUDA graphs on a GPU, and loads are exact all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from with_vllm.live_engine import LiveEngine
from with_vllm.tiny_engine import ON_GPU, prompt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_GPU, reason="only a GPU has CUDA graphs, and there is none here"),
]
P = prompt(500)


def test_full_graphs_stay_and_loads_are_exact_where_no_step_waits(tiny_llama: Path) -> None:
    settings = {"layers_per_slice": 0, "host_pool_gib": 0.1, "chunk_tokens": 64}
    live = LiveEngine(tiny_llama, settings, num_gpu_blocks_override=100)
    try:
        mode = live.llm.llm_engine.vllm_config.compilation_config.cudagraph_mode
        assert mode.has_full_cudagraphs()
        computed = live.stored(P)
        for _repetition in range(3):
            loaded = live.generate(P)
            assert loaded.same(computed)
            assert loaded.cached == 448
            live.forget_blocks()
        assert live.worker.metrics.total("loads_whole") == 3
    finally:
        live.close()
