"""A real vLLM engine of the tiny model: by vLLM's defaults on a GPU, small and exact on a CPU."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

BLOCK = 32

ON_GPU = torch.cuda.is_available()
"""There the engine computes in bfloat16, by its defaults: Model Runner V2, asynchronous scheduling, CUDA graphs."""

PLAIN_STEPS = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0" if ON_GPU else not os.environ.get("LAMELLA_TEST_AHEAD")
"""Whether a running request can be taken back: by the first model runner, when it makes one step after another."""

BEFORE_BATCH = "LAMELLA_TEST_BEFORE_BATCH" in os.environ
"""Whether engines have `before_batch`, see `with_vllm.before_batch`."""

DTYPE = "bfloat16" if ON_GPU else "float32"


def prompt(num_tokens: int, salt: int = 0) -> list[int]:
    """Token ids between 3 and 502; another salt gives another prompt from its first token on."""
    return [(i * 37 + i * i * 11 + 11 + salt * 101) % 500 + 3 for i in range(num_tokens)]


def sampling(num_tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=num_tokens, min_tokens=num_tokens, ignore_eos=True, detokenize=False, logprobs=2
    )


def make_llm(model: Path, extra: Mapping[str, Any] | None, *, policy: str = "fail", **options: Any) -> LLM:
    """An engine of the tiny model; `extra` None: without a connector."""
    arguments: dict[str, Any] = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "enforce_eager": not ON_GPU,
        "dtype": DTYPE,
        "max_model_len": 1024,
        "seed": 0,
        "block_size": BLOCK,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        **({"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 30} if ON_GPU else {}),
        **({"async_scheduling": False} if ON_GPU and PLAIN_STEPS else {}),
        **options,
    }
    if extra is not None:
        arguments["kv_transfer_config"] = KVTransferConfig(
            kv_connector="LamellaConnector",
            kv_connector_module_path="lamella.connector.vllm",
            kv_role="kv_both",
            kv_load_failure_policy=policy,
            kv_connector_extra_config={"before_batch": BEFORE_BATCH, **extra},
        )
    return LLM(**arguments)
