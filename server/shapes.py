"""What both sides know as values of `lamella.reference`, as it travels; each two functions are inverses."""

from __future__ import annotations

from collections.abc import Sequence

from lamella.cuda_ext.peer_memory import Allocation, ExportedCaches
from lamella.reference.geometry import KVGeometry, ObjectForm
from lamella.reference.keys import KeySpace
from lamella.reference.layout import EngineLayout, KernelGroup, ObjectLayout
from lamella.server import protocol


def send_space(space: KeySpace) -> protocol.Space:
    """A key space as it travels."""
    return protocol.Space(
        space.model,
        space.dtype,
        space.form.value,
        space.inner_layout,
        space.chunk_tokens,
        space.tp_rank,
        space.tp_size,
        space.layers,
        space.salt,
    )


def read_space(space: protocol.Space) -> KeySpace:
    """The key space that was sent.

    Raises:
        ValueError: a form that is none, or as `KeySpace`.
    """
    return KeySpace(
        space.model,
        space.dtype,
        ObjectForm(space.form),
        space.inner_layout,
        space.chunk_tokens,
        space.tp_rank,
        space.tp_size,
        space.layers,
        space.salt,
    )


def send_groups(layout: ObjectLayout) -> tuple[protocol.Group, ...]:
    """An object layout's groups as they travel; its form goes with the key space."""
    return tuple(
        protocol.Group(
            group.geometry.num_layers,
            group.geometry.kv,
            group.geometry.num_heads,
            group.geometry.head_dim,
            group.geometry.element_bytes,
            group.geometry.chunk_tokens,
            group.layers,
            group.block_tokens,
        )
        for group in layout.groups
    )


def read_layout(groups: Sequence[protocol.Group], form: ObjectForm) -> ObjectLayout:
    """The object layout that was sent.

    Raises:
        ValueError: as `KVGeometry`, `KernelGroup` and `ObjectLayout`.
    """
    read = []
    for sent in groups:
        geometry = KVGeometry(
            sent.num_layers, sent.kv, sent.num_heads, sent.head_dim, sent.element_bytes, sent.chunk_tokens
        )
        read.append(KernelGroup(geometry, sent.layers, sent.block_tokens))
    return ObjectLayout(tuple(read), form)


def send_caches(caches: ExportedCaches) -> tuple[str, tuple[protocol.Allocation, ...], tuple[protocol.PagedCache, ...]]:
    """Exported caches as they travel: device, allocations, caches; handles are not touched."""
    allocations = tuple(protocol.Allocation(one.handle, one.base, one.num_bytes) for one in caches.allocations)
    engines = tuple(
        protocol.PagedCache(
            engine.bases,
            engine.block_stride,
            engine.token_stride,
            engine.head_stride,
            engine.dim_stride,
            engine.num_blocks,
            engine.block_tokens,
            engine.num_heads,
            engine.head_dim,
            engine.element_bytes,
        )
        for engine in caches.engines
    )
    return caches.device, allocations, engines


def read_caches(
    device: str, allocations: Sequence[protocol.Allocation], caches: Sequence[protocol.PagedCache]
) -> ExportedCaches:
    """The exported caches that were sent.

    Raises:
        ValueError: as `EngineLayout`.
    """
    engines = tuple(
        EngineLayout(
            sent.bases,
            sent.block_stride,
            sent.token_stride,
            sent.head_stride,
            sent.dim_stride,
            sent.num_blocks,
            sent.block_tokens,
            sent.num_heads,
            sent.head_dim,
            sent.element_bytes,
        )
        for sent in caches
    )
    return ExportedCaches(
        device, tuple(Allocation(one.handle, one.base, one.num_bytes) for one in allocations), engines
    )
