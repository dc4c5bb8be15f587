"""Writes a small random Llama that vLLM opens offline, whose tokens depend on every byte of its KV cache.

There is no tokenizer: engines use `skip_tokenizer_init` and prompts of token ids. Dummy weights would not do: they give
the same two tokens for any prompt and any cache, so a corrupted cache would not be seen.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 4, 256, 8, 2, 64, 512


def write_tiny_llama(
    folder: Path,
    *,
    window: int | None = None,
    everywhere: bool = False,
    layers: int = LAYERS,
    kv_heads: int = KV_HEADS,
    head_dim: int = HEAD_DIM,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """`folder` holds config.json and model.safetensors.

    With `window`, every other layer slides over so many tokens; `everywhere`: every layer does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": 2 * HIDDEN,
        "max_position_embeddings": 4096,
        "mlp_bias": False,
        "num_attention_heads": HEADS,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "vocab_size": VOCABULARY,
    }
    if window is not None:
        slides = [everywhere or layer % 2 == 1 for layer in range(layers)]
        kinds = ["sliding_attention" if one else "full_attention" for one in slides]
        config |= {"sliding_window": window, "layer_types": kinds}
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    weights = {name: tensor.to(dtype) for name, tensor in _weights(layers, kv_heads, head_dim).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _weights(layers: int, kv_heads: int, head_dim: int) -> dict[str, torch.Tensor]:
    """Seeded weights, scaled so that 24 greedy tokens are nearly all distinct."""
    generator = torch.Generator().manual_seed(1234)

    def normal(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * (scale / columns**0.5)  # [rows, columns]

    weights = {
        "model.embed_tokens.weight": 0.3 * torch.randn(VOCABULARY, HIDDEN, generator=generator),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": normal(VOCABULARY, HIDDEN, 4.0),
    }
    query, key = HEADS * head_dim, kv_heads * head_dim
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "self_attn.q_proj.weight": normal(query, HIDDEN, 2.0),
            prefix + "self_attn.k_proj.weight": normal(key, HIDDEN, 2.0),
            prefix + "self_attn.v_proj.weight": normal(key, HIDDEN, 1.5),
            prefix + "self_attn.o_proj.weight": normal(HIDDEN, query, 3.0),
            prefix + "mlp.gate_proj.weight": normal(2 * HIDDEN, HIDDEN),
            prefix + "mlp.up_proj.weight": normal(2 * HIDDEN, HIDDEN),
            prefix + "mlp.down_proj.weight": normal(HIDDEN, 2 * HIDDEN),
            prefix + "input_layernorm.weight": torch.ones(HIDDEN),
            prefix + "post_attention_layernorm.weight": torch.ones(HIDDEN),
        }
    return weights
