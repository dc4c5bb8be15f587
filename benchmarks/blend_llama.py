"""A transformer of Llama's shape with random weights, run layer by layer as a blend runs it, on any torch device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from lamella.connector.blend import Rotation

BASE = 500_000.0
_FAST = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder with grouped queries and a gated MLP."""

    layers: int
    wide: int
    heads: int
    kv_heads: int
    head: int
    inner: int
    vocab: int


class Llama:
    """Weights drawn from a seed, in bf16."""

    def __init__(self, shape: Shape, device: str, seed: int) -> None:
        self.shape = shape
        self.device = device
        self.rotation = Rotation.from_base(BASE, shape.head)
        self.frequencies = torch.tensor(self.rotation.frequencies, dtype=torch.float64, device=device)
        self.before_layer: Callable[[], None] = lambda: None
        random = torch.Generator(device).manual_seed(seed)

        def matrix(rows: int, columns: int) -> torch.Tensor:
            drawn = torch.randn(rows, columns, generator=random, dtype=torch.bfloat16, device=device)
            return drawn.mul_(rows**-0.5)

        out = shape.heads * shape.head
        self.layers = [
            {
                "qkv": matrix(shape.wide, out + 2 * shape.kv_heads * shape.head),
                "o": matrix(out, shape.wide),
                "gate_up": matrix(shape.wide, 2 * shape.inner),
                "down": matrix(shape.inner, shape.wide),
            }
            for _ in range(shape.layers)
        ]
        self.embedding = torch.randn(shape.vocab, shape.wide, generator=random, dtype=torch.bfloat16, device=device)
        self._mask: tuple[torch.Tensor, torch.Tensor] | None = None
        self._chosen: dict[tuple[bool, int], SDPBackend] = {}

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embedding[tokens]

    def project(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        shape = self.shape
        mixed = rms_norm(hidden, (shape.wide,)) @ self.layers[layer]["qkv"]
        heads = mixed.unflatten(-1, (-1, shape.head))  # [tokens, heads + 2 * kv_heads, head]
        q, k, v = heads.split((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)
        angles = (positions[:, None] * self.frequencies)[:, None]  # [tokens, 1, head / 2]
        cos, sin = angles.cos().float(), angles.sin().float()
        return self._turn(q, cos, sin), self._turn(k, cos, sin), v

    @staticmethod
    def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)

    def attend(
        self,
        layer: int,
        hidden: torch.Tensor,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        self.before_layer()
        shape, w = self.shape, self.layers[layer]
        group = shape.heads // shape.kv_heads
        k, v = (
            x.repeat_interleave(group, dim=1).transpose(0, 1)[None] for x in (keys, values)
        )  # [1, heads, all, head]
        q = queries.transpose(0, 1)[None]  # [1, heads, tokens, head]
        mask = None if len(queries) == len(keys) else self._mask_of(positions, len(keys))
        attended = self._attention(q, k, v, mask)[0].transpose(0, 1).flatten(1)  # [tokens, heads * head]
        hidden = hidden + attended @ w["o"]
        gate, up = (rms_norm(hidden, (shape.wide,)) @ w["gate_up"]).chunk(2, dim=-1)
        return hidden + (silu(gate) * up) @ w["down"]

    def _mask_of(self, positions: torch.Tensor, num_rows: int) -> torch.Tensor:
        """`[tokens, num_rows]`, the same for every layer with the same tokens."""
        if self._mask is None or self._mask[0] is not positions:
            self._mask = positions, torch.arange(num_rows, device=self.device) <= positions[:, None]
        return self._mask[1]

    def _attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """By the fastest of torch's kernels that takes it; each is tried once for sizes of this order."""
        masked = mask is not None
        kind = masked, q.shape[2].bit_length()

        def run(backend: SDPBackend) -> torch.Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, mask, is_causal=not masked)

        if kind not in self._chosen:
            took = {}
            for backend in _FAST:
                try:
                    took[backend] = self._time(lambda backend=backend: run(backend))
                except RuntimeError:
                    continue
            self._chosen[kind] = min(took, key=took.__getitem__) if took else SDPBackend.MATH
        return run(self._chosen[kind])

    def _time(self, call: Callable[[], object]) -> float:
        """Seconds of the quicker of two calls, after one more."""
        times = []
        for _ in range(3):
            start = time.perf_counter()
            call()
            if self.device != "cpu":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return min(times[1:])

    def attention_names(self) -> dict[str, str]:
        """Which kernels attend, with a mask and without, to at least how many queries."""
        return {
            f"{'masked' if masked else 'causal'} from {1 << bits - 1}": backend.name
            for (masked, bits), backend in self._chosen.items()
        }

    @torch.no_grad()
    def prefill(self, tokens: Sequence[int]) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """(layer, keys, values) of a sequence computed on its own, `[tokens, kv_heads, head]` each."""
        for layer, keys, values, _ in self._prefill(tokens):
            yield layer, keys, values

    @torch.no_grad()
    def prefill_hidden(self, tokens: Sequence[int]) -> torch.Tensor:
        """What the last layer puts out, `[tokens, wide]`."""
        *_, (_, _, _, hidden) = self._prefill(tokens)
        return hidden

    def _prefill(self, tokens: Sequence[int]) -> Iterator[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]]:
        positions = torch.arange(len(tokens), device=self.device)
        hidden = self.embed(torch.tensor(list(tokens), device=self.device))
        for layer in range(self.shape.layers):
            q, k, v = self.project(layer, hidden, positions)
            hidden = self.attend(layer, hidden, q, k, v, positions)
            yield layer, k, v, hidden
