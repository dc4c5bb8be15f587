"""Times of prefill steps in plain torch: layers of a model's shape, random weights, new tokens over cached ones.

A stand-in for where no engine is at hand. It has an engine's matrix products and attention, and neither its scheduler
nor its kernels, so an engine's own step times are always the better profile.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from lamella.reference.tables import PrefillTable

_WARM_UP, _REPEATS = 1, 3


@dataclass(frozen=True, slots=True)
class LayerShape:
    """A decoder layer with grouped-query attention and a gated MLP; sizes in elements."""

    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int


STAND_INS: Final[Mapping[str, LayerShape]] = {
    "llama-3.1-8b": LayerShape(4096, 14336, 32, 8, 128),
    "llama-3.1-70b": LayerShape(8192, 28672, 64, 8, 128),
    "qwen3-32b": LayerShape(5120, 25600, 64, 8, 128),
}
"""Layer shapes of shipped models, from each model's published configuration."""


class StandIn:
    """One layer with random weights; used again for every layer of a step, so it fits where the model would not.

    Args:
        device: as torch names it.
        shape: of the layer.
    """

    def __init__(self, device: str, shape: LayerShape) -> None:
        import torch

        self._torch: Any = torch
        self._device = torch.device(device)
        self._shape = shape
        random = torch.Generator(self._device).manual_seed(1)

        def weight(rows: int, columns: int) -> Any:
            made = torch.randn(rows, columns, device=device, dtype=torch.bfloat16, generator=random)
            return made * rows**-0.5

        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self._query, self._output = weight(shape.hidden, queries), weight(queries, shape.hidden)
        self._key_value = weight(shape.hidden, 2 * keys)
        self._gate_up = weight(shape.hidden, 2 * shape.feed_forward)
        self._down = weight(shape.feed_forward, shape.hidden)

    def step_ns(self, cached: int, new: int, num_layers: int) -> int:
        """Median time of a step of `num_layers` layers with `new` tokens over `cached` ones."""
        torch, shape = self._torch, self._shape
        options = {"device": self._device, "dtype": torch.bfloat16}
        keys = torch.randn(shape.kv_heads, cached + new, shape.head_dim, **options)  # [heads, context, dim]
        values = torch.randn_like(keys)
        tokens = torch.randn(new, shape.hidden, **options)  # [new, hidden]
        taken = []
        with torch.inference_mode():
            for repeat in range(_WARM_UP + _REPEATS):
                time_ns = self._time(tokens, keys, values, cached, num_layers)
                if repeat >= _WARM_UP:
                    taken.append(time_ns)
        return round(statistics.median(taken))

    def _time(self, tokens: Any, keys: Any, values: Any, cached: int, num_layers: int) -> int:
        torch = self._torch
        if self._device.type == "cpu":
            import time

            before = time.perf_counter_ns()
            self._layers(tokens, keys, values, cached, num_layers)
            return time.perf_counter_ns() - before
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        self._layers(tokens, keys, values, cached, num_layers)
        last.record()
        last.synchronize()
        return int(first.elapsed_time(last) * 1e6)

    def _layers(self, tokens: Any, keys: Any, values: Any, cached: int, num_layers: int) -> None:
        from torch.nn.attention.bias import causal_lower_right

        functional, shape = self._torch.nn.functional, self._shape
        new, context = tokens.shape[0], keys.shape[1]
        mask = causal_lower_right(new, context)
        for _ in range(num_layers):
            normed = functional.rms_norm(tokens, (shape.hidden,))
            query = (normed @ self._query).view(new, shape.heads, shape.head_dim).transpose(0, 1)
            fresh = (normed @ self._key_value).view(new, 2, shape.kv_heads, shape.head_dim)
            keys[:, cached:] = fresh[:, 0].transpose(0, 1)
            values[:, cached:] = fresh[:, 1].transpose(0, 1)
            attended = functional.scaled_dot_product_attention(
                query[None], keys[None], values[None], attn_mask=mask, enable_gqa=True
            )  # [1, heads, new, dim]
            tokens = tokens + attended[0].transpose(0, 1).reshape(new, -1) @ self._output
            gate, up = (functional.rms_norm(tokens, (shape.hidden,)) @ self._gate_up).chunk(2, dim=-1)
            tokens = tokens + (functional.silu(gate) * up) @ self._down


def measure_prefill(device: str, model: str, num_layers: int, nodes: PrefillTable) -> PrefillTable:
    """The times at the nodes of another table, measured here.

    Raises:
        ValueError: a model without a stand-in.
    """
    if model not in STAND_INS:
        raise ValueError(f"no layer shape is known for {model!r}; known: {', '.join(sorted(STAND_INS))}")
    layer = StandIn(device, STAND_INS[model])
    step_ns = tuple(
        tuple(layer.step_ns(cached, new, num_layers) for cached in nodes.cached_tokens) for new in nodes.new_tokens
    )
    return PrefillTable(nodes.cached_tokens, nodes.new_tokens, step_ns)
