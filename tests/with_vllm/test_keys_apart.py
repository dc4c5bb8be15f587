"""What vLLM's own prefix cache keeps apart has keys of its own here, or none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
from vllm.v1.request import Request

from lamella.connector.request_keys import RequestKeys
from lamella.reference.geometry import ObjectForm
from lamella.reference.keys import KeySpace
from with_vllm.tiny_engine import BLOCK, prompt

SPACE = KeySpace("m", "float32", ObjectForm.TOKEN, "logical", BLOCK, 0, 1, (0, 4))
TOKENS = prompt(2 * BLOCK)
IMAGE = MultiModalFeatureSpec(data=None, modality="image", identifier="i", mm_position=PlaceholderRange(0, 4))
KINDS: dict[str, dict[str, Any]] = {
    "adapter": {"lora_request": LoRARequest("a", 1, "/a")},
    "another adapter": {"lora_request": LoRARequest("b", 2, "/b")},
    "tenant": {"cache_salt": "s"},
    "image": {"mm_features": [IMAGE]},
    "embeddings": {"prompt_token_ids": None, "prompt_embeds": torch.ones(2 * BLOCK, 8)},
    "other embeddings": {"prompt_token_ids": None, "prompt_embeds": torch.zeros(2 * BLOCK, 8)},
}


def request_of(**more: Any) -> Request:
    common = {"prompt_token_ids": list(TOKENS), "sampling_params": SamplingParams(max_tokens=1), "pooling_params": None}
    return Request("r", **{**common, **more})


@pytest.mark.parametrize("kind", KINDS)
def test_whoever_has_block_hashes_of_its_own_in_vllm_shares_no_key(kind: str) -> None:
    request = request_of(**KINDS[kind])
    others = [request_of(), *(request_of(**more) for name, more in KINDS.items() if name != kind)]
    mine, _index = generate_block_hash_extra_keys(request, 0, BLOCK, 0)
    assert mine is not None
    keys = RequestKeys(SPACE).keys(request, 2 * BLOCK)
    for other in others:
        assert generate_block_hash_extra_keys(other, 0, BLOCK, 0)[0] != mine
        assert not set(keys) & set(RequestKeys(SPACE).keys(other, 2 * BLOCK))


def test_plain_requests_share_their_keys() -> None:
    one, other = (RequestKeys(SPACE).keys(request_of(), 2 * BLOCK) for _ in range(2))
    assert (len(one), one) == (2, other)
