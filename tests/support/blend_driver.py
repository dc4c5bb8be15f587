"""A tiny Llama over a paged cache that can blend, and what it must compute: the same model in float64, all at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from cache_driver import MemoryTier
from lamella.connector.blend import Blended, Blender, Reuse, Rotation
from lamella.connector.buffered import BufferedConnector
from lamella.connector.cache_engine import CacheEngine
from lamella.connector.storage.layer_buffers import LayerBuffers
from lamella.connector.storage.storage_manager import StorageManager
from lamella.connector.streams import ComputeStream, Recorder
from lamella.cuda_ext.device import Device
from lamella.cuda_ext.engine import TransferEngine
from lamella.cuda_ext.pool import HostPool
from lamella.cuda_ext.torch import cache_layout
from lamella.reference.geometry import KVGeometry, ObjectForm
from lamella.reference.keys import KeySpace
from lamella.reference.layout import ObjectLayout

HEADS, KV_HEADS, HEAD, VOCAB = 4, 2, 16, 97
WIDE = HEADS * HEAD
CHUNK, BLOCK = 8, 4
BASE = 1000.0

Weights = tuple[torch.Tensor, list[dict[str, torch.Tensor]]]


def make_weights(seed: int, num_layers: int = 4, device: str = "cpu") -> Weights:
    random = torch.Generator().manual_seed(seed)
    shapes = {"q": (WIDE, WIDE), "k": (WIDE, KV_HEADS * HEAD), "v": (WIDE, KV_HEADS * HEAD), "o": (WIDE, WIDE)}
    shapes |= {"up": (WIDE, 2 * WIDE), "down": (2 * WIDE, WIDE)}
    layers = [
        {name: (torch.randn(shape, generator=random) / shape[0] ** 0.5).to(device) for name, shape in shapes.items()}
        for _ in range(num_layers)
    ]
    return torch.randn(VOCAB, WIDE, generator=random).to(device), layers


def rms(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def rope(x: torch.Tensor, positions: torch.Tensor, *, interleaved: bool = False, dim: int = HEAD) -> torch.Tensor:
    """`x` [tokens, heads, HEAD] with its first `dim` elements turned by the positions, in float64, pair by pair."""
    turned = x.double().clone()
    for pair in range(dim // 2):
        i, j = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + dim // 2)
        angle = (positions.double() * BASE ** (-2 * pair / dim))[:, None]
        turned[..., i] = x[..., i] * angle.cos() - x[..., j] * angle.sin()
        turned[..., j] = x[..., i] * angle.sin() + x[..., j] * angle.cos()
    return turned.to(x.dtype)


class TinyLlama:
    """The model as a blend runs it; `interleaved` and `dim` say how it turns keys."""

    def __init__(self, weights: Weights, *, interleaved: bool = False, dim: int = HEAD) -> None:
        self.embedding, self.layers = weights
        self.turning: dict[str, Any] = {"interleaved": interleaved, "dim": dim}
        self.rotation = Rotation.from_base(BASE, dim, interleaved=interleaved)
        self.at_layer: Callable[[int], None] = lambda layer: None

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embedding[tokens]

    def project(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = ((rms(hidden) @ self.layers[layer][name]).unflatten(-1, (-1, HEAD)) for name in "qkv")
        return rope(q, positions, **self.turning), rope(k, positions, **self.turning), v

    def attend(
        self,
        layer: int,
        hidden: torch.Tensor,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        self.at_layer(layer)
        w = self.layers[layer]
        k, v = (x.to(hidden.dtype).repeat_interleave(HEADS // KV_HEADS, 1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries, k) / HEAD**0.5
        scores = scores.masked_fill(torch.arange(len(k), device=k.device) > positions[:, None], -torch.inf)
        hidden = hidden + torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1) @ w["o"]
        up = rms(hidden) @ w["up"]
        return hidden + (up * up.sigmoid()) @ w["down"]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.embedding.T


class Oracle:
    """The same model in float64, whole sequences at a time."""

    def __init__(self, model: TinyLlama) -> None:
        embedding, layers = model.embedding, model.layers
        weights = embedding.double(), [{name: w.double() for name, w in layer.items()} for layer in layers]
        self.model = TinyLlama(weights)
        self.model.turning = model.turning

    def prefill(self, tokens: Sequence[int]) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Logits of every token, and (keys, values) of each layer."""
        return self.reuse(tokens, [])

    def reuse(
        self, tokens: Sequence[int], reuses: Sequence[Reuse]
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Logits of the computed tokens over KV that is reused as it was, but for its keys' positions; and that KV."""
        there = {}
        for reuse in reuses:
            stored = self._unturned(tuple(reuse.tokens))
            there |= {reuse.start + token: (stored, reuse.first + token) for token in range(reuse.num_tokens)}
        there.pop(len(tokens) - 1, None)
        model, device = self.model, self.model.embedding.device
        computed = torch.tensor([place for place in range(len(tokens)) if place not in there], device=device)
        hidden = model.embed(torch.tensor(list(tokens), device=device)[computed])
        layers = []
        for layer in range(len(model.layers)):
            q, k, v = model.project(layer, hidden, computed)
            keys = torch.zeros(len(tokens), KV_HEADS, HEAD, dtype=torch.float64, device=device)
            values = torch.zeros_like(keys)
            for place, (stored, token) in there.items():
                keys[place], values[place] = stored[layer][0][token], stored[layer][1][token]
            keys = rope(keys, torch.arange(len(tokens), device=device), **model.turning)
            keys[computed], values[computed] = k, v
            hidden = model.attend(layer, hidden, q, keys, values, computed)
            layers.append((keys, values))
        return model.logits(hidden), layers

    def _unturned(self, tokens: tuple[int, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(keys before they are turned, values) of each layer."""
        places = torch.arange(len(tokens), device=self.model.embedding.device)
        return [(rope(keys, -places, **self.model.turning), values) for keys, values in self.prefill(tokens)[1]]


class BlendingEngine:
    """An engine process: the tiny Llama, its paged cache, a pool, a tier and a cache engine with buffers."""

    def __init__(
        self,
        seed: int = 0,
        *,
        num_layers: int = 4,
        interleaved: bool = False,
        dim: int = HEAD,
        packed: bool = False,
        max_tokens: int = 128,
        device: str = "cpu",
        compute_stream: ComputeStream | None = None,
        recorder: Recorder | None = None,
        paced: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model = TinyLlama(make_weights(seed, num_layers, device), interleaved=interleaved, dim=dim)
        self.oracle = Oracle(self.model)
        self.num_layers, self.packed, self.dtype, self.device = num_layers, packed, dtype, device
        kv, head = (1, 2 * HEAD) if packed else (2, HEAD)
        size = dtype.itemsize
        self.layout = ObjectLayout.single(KVGeometry(num_layers, kv, KV_HEADS, head, size, CHUNK), BLOCK)
        self.cache = [torch.zeros(kv, 64, BLOCK, KV_HEADS, head, dtype=dtype, device=device) for _ in range(num_layers)]
        caches = [cache_layout("KNTHD", self.cache)]
        self.space = KeySpace("tiny", str(dtype), ObjectForm.TOKEN, "THD", CHUNK, 0, 1, (0, num_layers))
        self.engine = TransferEngine(device, num_layers=num_layers, paced=paced)
        self.scatter_engine = TransferEngine(device, num_layers=1, paced=paced)
        self.pool = HostPool(self.layout, 64, registrar=Device(device).registrar())
        self.tier = MemoryTier(self.layout.object_bytes)
        self.buffers = LayerBuffers(self.layout.object_bytes, 32, Device(device).registrar())
        self.storage = StorageManager(self.pool, [self.tier], self.buffers)
        self.connector = BufferedConnector(
            self.engine,
            self.layout,
            caches,
            self.pool.memory,
            max_tokens=max_tokens,
            compute_stream=compute_stream,
            scatter_engine=self.scatter_engine,
        )
        self.cache_engine = CacheEngine(self.space, self.storage, self.connector, recorder=recorder)

    def blender(self, **options: Any) -> Blender:
        given = {"rotation": self.model.rotation, "dtype": self.dtype, "packed": self.packed, **options}
        return Blender(self.cache_engine, self.model, given.pop("rotation"), **given)

    def store(self, tokens: Sequence[int]) -> None:
        """Computes and stores a sequence on its own, through blocks that are wiped afterwards."""
        blocks = list(range(-(-len(tokens) // BLOCK)))
        places = torch.arange(len(tokens), device=self.device)
        hidden = self.model.embed(torch.tensor(list(tokens), device=self.device))
        saving = self.cache_engine.store_layer(tokens, [blocks])
        for layer in range(self.num_layers):
            q, k, v = self.model.project(layer, hidden, places)
            self._write(layer, k, v)
            hidden = self.model.attend(layer, hidden, q, k, v, places)
            next(saving)
        stored = next(saving)
        saving.close()
        assert stored == len(tokens) // CHUNK * CHUNK
        self.settle()
        for kv in self.cache:
            kv.fill_(torch.nan)

    def _write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        rows = self.cache[layer].flatten(1, 2)  # [K, tokens, H, D]
        new = torch.cat((keys, values), -1)[None] if self.packed else torch.stack((keys, values))
        rows[:, : len(keys)] = new.to(self.dtype)

    def kv(self, layer: int, blocks: Sequence[int], num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(keys, values) of a sequence in its blocks, `[tokens, H, D]` each."""
        found = self.cache[layer][:, list(blocks)].flatten(1, 2)[:, :num_tokens]
        keys, values = found[0].chunk(2, -1) if self.packed else found
        return keys, values

    def settle(self) -> None:
        assert self.cache_engine.drain(10)
        self.storage.flush(10)

    def references(self) -> tuple[int, int, int]:
        """(pins, objects being written, layer buffers taken)."""
        self.settle()
        now = self.pool.report().occupancy
        return now.pins, now.writing, self.buffers.used

    def close(self) -> None:
        self.storage.close(10)
        self.connector.close()
        self.scatter_engine.close()
        self.engine.close()
        self.buffers.close()
        self.pool.close()

    def __enter__(self) -> BlendingEngine:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.scatter_engine.close()
            self.engine.close()


def random_tokens(seed: int, count: int) -> list[int]:
    """Token ids of one sequence; another seed gives another."""
    return np.random.default_rng([7, seed]).integers(0, VOCAB, count).tolist()


NEAR = 1e-4
ONE, TWO = random_tokens(1, 24), random_tokens(2, 16)
SOME, MORE, LAST = random_tokens(3, 5), random_tokens(4, 3), random_tokens(5, 7)
CASES = {
    "a gap before, between and behind": ([*SOME, *ONE, *MORE, *TWO, *LAST], [Reuse(ONE, 5), Reuse(TWO, 32)]),
    "in another order, named in any": ([*TWO, *ONE, *LAST], [Reuse(ONE, 16), Reuse(TWO, 0)]),
    "one chunk twice": ([*ONE, *MORE, *ONE, *LAST], [Reuse(ONE, 0), Reuse(ONE, 27)]),
    "out of the middle of what was stored": ([*MORE, *ONE[10:19], *LAST], [Reuse(ONE, 3, first=10, end=19)]),
    "further to the front than before": ([*ONE[16:24], *LAST], [Reuse(ONE, 0, first=16)]),
    "nothing behind the last reuse": ([*SOME, *ONE], [Reuse(ONE, 5)]),
    "nothing but what was stored": (ONE, [Reuse(ONE, 0)]),
    "nothing reused": ([*SOME, *LAST], []),
}


def blend(
    run: BlendingEngine, tokens: Sequence[int], reuses: Sequence[Reuse], **options: Any
) -> tuple[Blended, Any, list[int]]:
    """(what it says, logits of the computed tokens, blocks), with nothing left held."""
    blocks = np.random.default_rng(3).permutation(64)[: -(-len(tokens) // BLOCK)].tolist()
    for kv in run.cache:
        kv.fill_(torch.nan)
    blended = run.blender(**options).blend(tokens, reuses, blocks)
    assert run.references() == (0, 0, 0)
    return blended, run.model.logits(blended.hidden).double(), blocks


def apart(found: Any, expected: Any) -> float:
    return float((found - expected).abs().max())


def kv_apart(run: BlendingEngine, blocks: Sequence[int], expected: Any, num_tokens: int) -> float:
    """Furthest that any layer's keys or values in the blocks are from those expected."""
    return max(
        apart(found.double(), one)
        for layer, pair in enumerate(expected)
        for found, one in zip(run.kv(layer, blocks, num_tokens), pair, strict=True)
    )
