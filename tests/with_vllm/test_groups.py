"""A model with two KV cache groups, sliding windows beside full attention: right, released whole, fails by request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

from lamella.connector.vllm_engine import why_refused
from lamella.reference.plan import Direction
from with_vllm.live_engine import LiveEngine
from with_vllm.tiny_engine import prompt
from with_vllm.tiny_llama import write_tiny_llama

P = prompt(500)
CAN_BE_TOLD = hasattr(base, "KVConnectorTransferResults")
needs_reports_by_request = pytest.mark.skipif(
    not CAN_BE_TOLD, reason="this vLLM cannot be told of a failed load where there are several KV cache groups"
)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveEngine]:
    model = write_tiny_llama(tmp_path_factory.mktemp("hybrid"), window=64)
    settings = {"layers_per_slice": 1, "host_pool_gib": 0.1, "chunk_tokens": 64, "wait_timeout_s": 60}
    live = LiveEngine(model, settings, policy="recompute", num_gpu_blocks_override=100)
    assert len(live.scheduler.kv_cache_config.kv_cache_groups) == 2
    yield live
    live.close()


def refusal(groups: list[Any], reports_requests: bool = True, policy: str = "fail", **engine: Any) -> str:
    transfer = SimpleNamespace(kv_load_failure_policy=policy)
    caches = SimpleNamespace(kv_cache_groups=groups)
    return why_refused(
        SimpleNamespace(kv_transfer_config=transfer, **engine), caches, reports_requests=reports_requests
    )


def test_a_window_whose_failed_load_would_be_computed_in_part_is_refused_where_it_cannot_be_taken_back_whole() -> None:
    window = SlidingWindowSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32, sliding_window=64)
    groups = [SimpleNamespace(kv_cache_spec=window)]
    assert "use kv_load_failure_policy fail" in refusal(groups, reports_requests=False, policy="recompute")
    assert refusal(groups, reports_requests=True, policy="recompute") == ""
    assert refusal(groups, reports_requests=False) == ""


@pytest.mark.known_fault(65)
def test_states_of_a_recurrent_group_are_never_stored_whatever_block_they_lie_in() -> None:
    """A speculating engine relocates them: a block that holds a state in one step is a scratch block in the next."""
    attention = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32)
    states = MambaSpec(block_size=32, shapes=((8, 8),), dtypes=(torch.float32,))
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in (attention, states)]
    for reports_requests in (False, True):
        assert "MambaSpec is not supported" in refusal(groups, reports_requests)
    assert refusal(groups[:1]) == ""


def test_attention_that_looks_ahead_or_packs_tokens_stores_nothing() -> None:
    """Of prompts of a prefix language model a chunk's KV depends on what comes behind the chunk."""
    causal = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32)
    if not hasattr(causal, "non_causal"):
        pytest.skip("this vLLM has no such attention")
    groups = [SimpleNamespace(kv_cache_spec=replace(causal, non_causal=looks_ahead)) for looks_ahead in (False, True)]
    assert refusal(groups[:1]) == ""
    assert "looks ahead (non_causal)" in refusal(groups)
    if hasattr(causal, "tokens_per_state"):
        few = [SimpleNamespace(kv_cache_spec=replace(causal, tokens_per_state=4))]
        assert "4 tokens share a state" in refusal(few)
    assert "more than once" in refusal(groups[:1], diffusion_config=object())


@pytest.mark.skipif(CAN_BE_TOLD, reason="this vLLM can be told of a failed load")
def test_nothing_is_loaded_where_a_failure_could_not_be_reported(hybrid: LiveEngine) -> None:
    computed = hybrid.generate(P)
    assert hybrid.llm.reset_prefix_cache()
    again = hybrid.generate(P)
    assert again.same(computed)
    assert (computed.cached, again.cached) == (0, 0)
    assert hybrid.worker is None


@needs_reports_by_request
@pytest.mark.known_fault(79)
def test_two_groups_are_exact_and_released_whole(hybrid: LiveEngine) -> None:
    for length in (130, 448, 500):
        tokens = prompt(length, salt=length)
        computed = hybrid.stored(tokens)
        loaded = hybrid.generate(tokens)
        assert loaded.same(computed), length
        assert loaded.cached == (length - 1) // 64 * 64  # whole chunks, where there are windows
    assert hybrid.worker.metrics.total("released_early") == 0
    assert hybrid.worker.metrics.total("loads_layerwise") == 3


@needs_reports_by_request
def test_only_the_windows_blocks_are_loaded(hybrid: LiveEngine) -> None:
    hybrid.stored(P)
    hybrid.add("r1", P)
    hybrid.step()
    tables = [load.order.blocks for load in hybrid.loads] or [
        hybrid.scheduler.kv_cache_manager.get_block_ids(hybrid.request("r1").request_id)
    ]
    nulls = [sum(block == 0 for block in table) for table in tables[0]]
    assert sorted(nulls)[0] == 0  # full attention has every block
    assert sorted(nulls)[1] > 0  # the window left most of its blocks out
    hybrid.finish("r1")


@needs_reports_by_request
@pytest.mark.known_fault(66, 77)
def test_a_failed_load_is_reported_by_request(hybrid: LiveEngine) -> None:
    computed = hybrid.stored(P)
    lane = hybrid.worker.engine.lane(Direction.RETRIEVE)
    hybrid.worker.engine.plant_fault(Direction.RETRIEVE, lane.windows + 1)
    answer = hybrid.generate(P)
    assert answer.same(computed)
    assert hybrid.side.metrics.total("loads_failed") == 1
