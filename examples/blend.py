"""Two documents, each cached on its own, come behind a new greeting: how many of their tokens to compute anew?

None is plain reuse, all is a full prefill; between, those whose KV deviates most, while the next layer loads.
"""

import torch
from small_llama import BLOCK, HEAD, KV_HEADS, LAYERS, VOCAB, WIDE, make_cache, make_weights, rope
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from lamella.connector.blend import Blender, Reuse, Rotation
from lamella.connector.config import CacheSettings
from lamella.connector.in_process import InProcessCache
from lamella.cuda_ext.torch import cache_layout
from lamella.reference.geometry import KVGeometry, ObjectForm
from lamella.reference.keys import KeySpace
from lamella.reference.layout import ObjectLayout

CHUNK, RATIOS = 32, (0.0, 0.15, 0.5, 1.0)
LAYOUT = ObjectLayout.single(KVGeometry(LAYERS, 2, KV_HEADS, HEAD, element_bytes=4, chunk_tokens=CHUNK), BLOCK)
SPACE = KeySpace("small-llama", "float32", ObjectForm.TOKEN, "THD", CHUNK, 0, 1, (0, LAYERS))
SETTINGS = CacheSettings(use_layerwise=True, enable_blending=True, blend_tokens=192)
ROTATION = Rotation.from_base(10000, HEAD, interleaved=True)


class Model:
    """The small Llama in the three parts that a blend asks for."""

    def __init__(self, seed):
        self.embedding, self.layers = make_weights(seed)
        self.embed = self.embedding.__getitem__

    def project(self, layer, x, positions):
        """Queries, keys, values."""
        q, k, v = ((rms_norm(x, (WIDE,)) @ self.layers[layer][name]).unflatten(-1, (-1, HEAD)) for name in "qkv")
        return rope(q, positions), rope(k, positions), v

    def attend(self, layer, x, q, k, v, positions):
        """The rest of the layer."""
        w, mask = self.layers[layer], torch.arange(len(k)) <= positions[:, None]
        q, k, v = (heads.transpose(0, 1) for heads in (q, k, v))
        x = x + scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(0, 1).flatten(1) @ w["o"]
        h = rms_norm(x, (WIDE,))
        return x + (silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]


def prefill(model, tokens):
    """The last token's logits, and (keys, values) of each layer; the whole sequence is computed."""
    x, positions, layers = model.embed(torch.tensor(tokens)), torch.arange(len(tokens)), []
    for layer in range(LAYERS):
        q, k, v = model.project(layer, x, positions)
        layers.append((k, v))
        x = model.attend(layer, x, q, k, v, positions)
    return x[-1] @ model.embedding.T, layers


def deviations(seed):
    """How far the logits are from a full prefill's, relative to it, at each ratio."""
    model, cache = Model(seed), make_cache(num_blocks=16)
    greeting, one, two, question = (torch.randint(VOCAB, (count,)).tolist() for count in (5, 64, 96, 11))
    prompt, reuses = [*greeting, *two, *one, *question], [Reuse(two, start=5), Reuse(one, start=101)]
    with InProcessCache(SETTINGS, SPACE, LAYOUT, [cache_layout("kv-nb-bs-h-d", cache)]) as lamella:
        for document in (one, two):
            saving = lamella.cache_engine.store_layer(document, [range(16)])
            for kv, blocks in zip(prefill(model, document)[1], cache, strict=True):
                blocks.flatten(1, 2)[:, : len(document)] = torch.stack(kv)
                next(saving)
            next(saving)
        whole, _ = prefill(model, prompt)
        blenders = [Blender(lamella.cache_engine, model, ROTATION, dtype=torch.float32, ratio=one) for one in RATIOS]
        logits = [one.blend(prompt, reuses, range(15, 3, -1)).hidden[-1] @ model.embedding.T for one in blenders]
        return torch.stack([(found - whole).norm() / whole.norm() for found in logits])


if __name__ == "__main__":
    torch.set_num_threads(1)  # for so small a model more would only wait for one another
    mean = torch.stack([deviations(seed) for seed in range(5)]).mean(0)
    print(*(f"ratio {ratio:4}: logits off by {off:.2%}" for ratio, off in zip(RATIOS, mean, strict=True)), sep="\n")
    assert (mean.diff() < 0).all(), "the more is computed, the nearer"
    assert mean[-1] < 1e-4, "with all of them it is a full prefill"
