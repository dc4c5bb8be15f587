"""What an engine's paged cache looks like to Lamella: axes by shape, order by strides, never assumed contiguous.

vLLM from 0.26 on hands out `(blocks, heads, block_tokens, 2 * head)` views whose bytes may lie in another order; older
and other backends keep K and V on an axis of their own, and MLA has no heads at all. A kernel's block may be a part of
the engine's logical block; block ids are then expanded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from lamella.reference.geometry import KVGeometry, ObjectForm
from lamella.reference.layout import EngineLayout, KernelGroup, ObjectLayout
from lamella.reference.plan import expand_block_ids

if TYPE_CHECKING:
    import torch

_AXES_4 = ("NHTD", "NTHD")
_AXES_5 = ("KNTHD", "NKTHD", "KNHTD", "NKHTD")


class GroupShape(NamedTuple):
    """One KV cache group as its engine describes it.

    Attributes:
        layer_names: of the layers, in order.
        block_tokens: tokens of a logical block.
        num_heads: KV heads on this rank.
        head_dim: elements of a head of K; of the latent for MLA.
    """

    layer_names: tuple[str, ...]
    block_tokens: int
    num_heads: int
    head_dim: int


def axes_of(shape: Sequence[int], group: GroupShape) -> str:
    """The axes of a cache tensor, letters as in `lamella.reference.layout.LAYOUTS`.

    Raises:
        ValueError: a shape that fits none of the known layouts.

    >>> axes_of((8192, 2, 32, 128), GroupShape(("a",), 32, 2, 64))
    'NHTD'
    """

    def fits(axes: str) -> bool:
        sizes = dict(zip(axes, shape, strict=True))
        packed = "K" not in axes
        return (
            sizes.get("K", 2) == 2
            and sizes.get("H", group.num_heads) == group.num_heads
            and group.block_tokens % sizes["T"] == 0
            and sizes["D"] in ((2 * group.head_dim, group.head_dim) if packed else (group.head_dim,))
        )

    candidates = {3: ("NTD",), 4: _AXES_4, 5: _AXES_5}.get(len(shape), ())
    for axes in candidates:
        if fits(axes):
            return axes
    raise ValueError(
        f"a cache tensor of shape {tuple(shape)} fits no known layout for blocks of {group.block_tokens} tokens, "
        f"{group.num_heads} heads of {group.head_dim}"
    )


@dataclass(frozen=True, slots=True)
class DescribedCaches:
    """An engine's caches, ready for a transfer engine.

    Attributes:
        layout: of the objects.
        engines: one paged cache a KV cache group.
        layers: the stage's layer index of each layer name.
        block_tokens: (logical, kernel) block tokens of each group.
        inner: order of the bytes of a block, and of several groups how long their elements are and which layers they
            hold, for the key space.
    """

    layout: ObjectLayout
    engines: tuple[EngineLayout, ...]
    layers: Mapping[str, int]
    block_tokens: tuple[tuple[int, int], ...]
    inner: str

    def kernel_tables(self, tables: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """Block tables in the kernels' own blocks; every part of the null block is kernel block 0."""
        return [
            ids if logical == kernel else _expanded(ids, logical, kernel)
            for ids, (logical, kernel) in zip(tables, self.block_tokens, strict=True)
        ]


def _expanded(ids: Sequence[int], logical: int, kernel: int) -> tuple[int, ...]:
    parts = logical // kernel
    return tuple(0 if block < parts else block for block in expand_block_ids(ids, logical, kernel))


def describe_caches(
    caches: Mapping[str, torch.Tensor], groups: Sequence[GroupShape], chunk_tokens: int, form: str
) -> DescribedCaches:
    """Describes every layer's cache tensor.

    Args:
        caches: by layer name, in layer order.
        groups: the engine's KV cache groups; a layer without a tensor of its own (it shares another's) is left out.
        chunk_tokens: tokens of an object.
        form: `token`, `block`, or `auto`: block where every block is contiguous and a chunk is whole blocks.

    Raises:
        ValueError: shapes that fit no layout, or `block` where blocks are not contiguous.
    """
    from lamella.cuda_ext.torch import cache_layout

    layers = {name: index for index, name in enumerate(caches)}
    engines: list[EngineLayout] = []
    kernel_groups: list[KernelGroup] = []
    inner: list[str] = []
    sizes: list[tuple[int, int]] = []
    for group in groups:
        names = sorted((name for name in group.layer_names if name in caches), key=layers.__getitem__)
        tensors = [caches[name] for name in names]
        axes = axes_of(tensors[0].shape, group)
        engine = cache_layout(axes, tensors)
        geometry = KVGeometry(
            len(names), engine.kv, engine.num_heads, engine.head_dim, engine.element_bytes, chunk_tokens
        )
        engines.append(engine)
        kernel_groups.append(KernelGroup(geometry, tuple(layers[name] for name in names), engine.block_tokens))
        sizes.append((group.block_tokens, engine.block_tokens))
        order = engine.inner_order()
        its = ",".join(str(layers[name]) for name in names)
        its = "" if len(groups) == 1 else f" of {engine.element_bytes} bytes in layers {its}"
        inner.append(f"{axes}:{order or 'strided'}{its}")
    dense = all(engine.inner_order() for engine in engines)
    if form == "block" and not dense:
        raise ValueError(f"object_form block needs blocks whose bytes are contiguous, got {inner}; use token or auto")
    chosen = ObjectForm.BLOCK if form == "block" or (form == "auto" and dense) else ObjectForm.TOKEN
    if chosen is ObjectForm.BLOCK:
        inner = [f"{order} of {kernel}" for order, (_logical, kernel) in zip(inner, sizes, strict=True)]
    return DescribedCaches(
        ObjectLayout(tuple(kernel_groups), chosen), tuple(engines), layers, tuple(sizes), " ".join(inner)
    )
