"""A small Llama with seeded random weights over a paged cache: GQA, RoPE, SwiGLU. The examples' engine."""

import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

LAYERS, HEADS, KV_HEADS, HEAD, VOCAB, BLOCK = 6, 8, 2, 32, 512, 16
WIDE, NARROW = HEADS * HEAD, KV_HEADS * HEAD
SHAPES = {"q": (WIDE, WIDE), "k": (WIDE, NARROW), "v": (WIDE, NARROW), "o": (WIDE, WIDE)}
SHAPES |= {"up": (WIDE, 2 * WIDE), "gate": (WIDE, 2 * WIDE), "down": (2 * WIDE, WIDE)}


def make_weights(seed):
    """(embedding [VOCAB, WIDE], a dict of matrices for each layer); the same for the same seed."""
    torch.manual_seed(seed)
    layers = [{name: torch.randn(shape) / shape[0] ** 0.5 for name, shape in SHAPES.items()} for _ in range(LAYERS)]
    return torch.randn(VOCAB, WIDE), layers


def make_cache(num_blocks):
    """A paged cache `[2, num_blocks, BLOCK, KV_HEADS, HEAD]` for each layer."""
    return [torch.zeros(2, num_blocks, BLOCK, KV_HEADS, HEAD) for _ in range(LAYERS)]


def rope(x, positions):
    """`x` [tokens, heads, HEAD], turned by its positions [tokens]."""
    angles = positions[:, None, None] / 10000 ** (torch.arange(0, HEAD, 2) / HEAD)  # [tokens, 1, HEAD / 2]
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(-2)


def forward(weights, tokens, start, cache, blocks, wait_for_layer=lambda layer: None):
    """Logits [VOCAB] after `tokens`, which stand at positions start, start + 1, ...; their KV goes into the blocks."""
    embedding, layers = weights
    x, positions = embedding[tokens], torch.arange(start, start + len(tokens))  # [new, WIDE], [new]
    mask = torch.arange(start + len(tokens)) <= positions[:, None]  # [new, all]
    for layer, (w, kv) in enumerate(zip(layers, cache, strict=True)):
        q, k, v = ((rms_norm(x, (WIDE,)) @ w[name]).unflatten(-1, (-1, HEAD)) for name in "qkv")  # [new, heads, HEAD]
        kv[:, blocks[positions // BLOCK], positions % BLOCK] = torch.stack((rope(k, positions), v))
        wait_for_layer(layer)
        k, v = kv[:, blocks].flatten(1, 2)[:, : len(mask.T)].transpose(1, 2)  # [KV_HEADS, all, HEAD] each
        attended = scaled_dot_product_attention(rope(q, positions).transpose(0, 1), k, v, mask, enable_gqa=True)
        x = x + attended.transpose(0, 1).flatten(1) @ w["o"]
        h = rms_norm(x, (WIDE,))
        x = x + (silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]
    return x[-1] @ embedding.T
