"""Weights for a model of which only the shape matters, such that its tokens depend on every byte of its KV cache."""

from __future__ import annotations

from typing import Any, Final

_SEED: Final = 20_261_129


def count_parameters(model: Any) -> int:
    """How many there are."""
    return sum(weight.numel() for weight in model.parameters())


def seed_weights(model: Any) -> int:
    """The model's weights are random numbers of a fixed seed, scaled so that tokens depend on every layer's KV.

    vLLM's dummy weights give the same tokens for any prompt and any cache. In place, so captured graphs stay right.
    Each tensor parallel rank's share has numbers of its own, so that one rank's KV does not pass for another's.
    Returns the number of parameters.
    """
    import torch
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    scales = {"qkv_proj": 2.0, "o_proj": 3.0, "lm_head": 4.0}
    generators: dict[torch.device, torch.Generator] = {}
    for name, weight in model.named_parameters():
        generator = generators.setdefault(weight.device, torch.Generator(weight.device).manual_seed(_SEED + rank))
        if weight.dim() < 2:
            weight.data.fill_(1.0)
            continue
        scale = next((scale for part, scale in scales.items() if part in name), 1.0)
        inputs = weight.shape[-1] * (ranks if "o_proj" in name or "down_proj" in name else 1)  # cut along their inputs
        std = 0.3 if "embed_tokens" in name else scale / inputs**0.5
        weight.data.normal_(0.0, std, generator=generator)  # [out, in]
    return count_parameters(model)
