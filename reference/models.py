"""Cache shapes of known models, for `verify` and the simulator: one tensor-parallel rank's share.

Sizes are from each model's published configuration; an attention layer's KV heads are divided over the ranks, and
repeated where there are more ranks than heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lamella.reference.geometry import KVGeometry, ObjectForm
from lamella.reference.layout import KernelGroup, ObjectLayout


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """What one kernel group of a model caches for a token.

    `layers` are model layer indices; `kv_heads` is over all ranks; `head_dim` as in `KVGeometry`.
    """

    layers: tuple[int, ...]
    kv: int
    kv_heads: int
    head_dim: int
    element_bytes: int
    block_tokens: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model by the shape of its cache; `groups` in the order in which an object holds them."""

    name: str
    num_layers: int
    groups: tuple[CacheSpec, ...]
    note: str = ""

    def object_layout(
        self, chunk_tokens: int, tensor_parallel: int = 1, form: ObjectForm = ObjectForm.TOKEN
    ) -> ObjectLayout:
        """The object of one rank.

        Raises:
            ValueError: tensor_parallel below 1, or neither a divisor nor a multiple of the KV heads.
        """
        return ObjectLayout(
            tuple(
                KernelGroup(
                    KVGeometry(
                        num_layers=len(group.layers),
                        kv=group.kv,
                        num_heads=_heads_of_rank(group.kv_heads, tensor_parallel),
                        head_dim=group.head_dim,
                        element_bytes=group.element_bytes,
                        chunk_tokens=chunk_tokens,
                    ),
                    group.layers,
                    group.block_tokens,
                )
                for group in self.groups
            ),
            form,
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers and ranks, heads not repeated."""
        return sum(
            len(group.layers) * group.kv * group.kv_heads * group.head_dim * group.element_bytes
            for group in self.groups
        )


def _heads_of_rank(kv_heads: int, tensor_parallel: int) -> int:
    if tensor_parallel < 1 or (kv_heads % tensor_parallel and tensor_parallel % kv_heads):
        raise ValueError(
            f"tensor_parallel must divide the {kv_heads} KV heads or be a multiple of them, got {tensor_parallel}"
        )
    return max(1, kv_heads // tensor_parallel)


def _dense(name: str, num_layers: int, kv_heads: int, head_dim: int) -> ModelShape:
    return ModelShape(name, num_layers, (CacheSpec(tuple(range(num_layers)), 2, kv_heads, head_dim, 2, 16),))


def _hybrid_gemma3(name: str, num_layers: int) -> ModelShape:
    """Five sliding-window layers, then one global layer; one shape, but a block table for each kind."""
    full = tuple(layer for layer in range(num_layers) if layer % 6 == 5)
    sliding = tuple(layer for layer in range(num_layers) if layer % 6 != 5)
    groups = tuple(CacheSpec(layers, 2, 16, 128, 2, 16) for layers in (full, sliding))
    return ModelShape(name, num_layers, groups, "sliding-window and global layers, a block table each")


MODELS: Mapping[str, ModelShape] = {
    model.name: model
    for model in (
        _dense("llama-3.1-8b", 32, 8, 128),
        _dense("llama-3.1-70b", 80, 8, 128),
        _dense("qwen3-32b", 64, 8, 128),
        ModelShape("deepseek-v3", 61, (CacheSpec(tuple(range(61)), 1, 1, 576, 2, 64),), "MLA: one latent a token"),
        _hybrid_gemma3("gemma-3-27b", 62),
        ModelShape(
            "deepseek-v3.2",
            61,
            (CacheSpec(tuple(range(61)), 1, 1, 576, 2, 64), CacheSpec(tuple(range(61)), 1, 1, 132, 1, 64)),
            "MLA latents and, for the same layers, a sparse-attention indexer's fp8 keys with their scales",
        ),
    )
}
"""Shipped shapes by name."""


def find_model(name: str) -> ModelShape:
    """The shipped shape of that name.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
    """
    try:
        return MODELS[name.lower()]
    except KeyError:
        raise ValueError(f"unknown model {name!r}; known: {', '.join(sorted(MODELS))}") from None
