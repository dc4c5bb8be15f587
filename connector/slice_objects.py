"""A slice of an object as an object of its own: what a slower tier's ranges are read into.

`[K, L, T, D]` restricted to a slice is `[K, width, T, D]`, dense, with the same groups in the same order; a group
without a layer in the slice has no array. The ranges of the slice in the whole object and in the slice object pair up
one to one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lamella.reference.layout import ByteRange, EngineLayout, KernelGroup, ObjectLayout
from lamella.reference.slices import Slice


def slice_layout(layout: ObjectLayout, part: Slice) -> ObjectLayout:
    """The layout of an object that holds only the slice's layers, counted from its first."""
    groups: list[KernelGroup] = []
    for group in layout.groups:
        first, count = group.span(*part)
        if count:
            layers = tuple(layer - part.first_layer for layer in group.layers[first : first + count])
            groups.append(KernelGroup(replace(group.geometry, num_layers=count), layers, group.block_tokens))
    return ObjectLayout(tuple(groups), layout.form)


def slice_engines(layout: ObjectLayout, engines: Sequence[EngineLayout], part: Slice) -> tuple[EngineLayout, ...]:
    """The paged caches of the groups that `slice_layout` keeps, restricted to the slice's layers."""
    kept: list[EngineLayout] = []
    for group, engine in zip(layout.groups, engines, strict=True):
        first, count = group.span(*part)
        if count:
            kept.append(replace(engine, bases=engine.bases[first : first + count]))
    return tuple(kept)


def slice_groups(layout: ObjectLayout, part: Slice) -> tuple[int, ...]:
    """Which of the object's groups `slice_layout` keeps."""
    return tuple(index for index, group in enumerate(layout.groups) if group.span(*part)[1])


def slice_ranges(layout: ObjectLayout, part: Slice) -> tuple[ByteRange, ...]:
    """The slice's bytes in the whole object; range `i` is `own_ranges(slice_layout(...))[i]` of the slice object."""
    found: list[ByteRange] = []
    for index, group in enumerate(layout.groups):
        first, count = group.span(*part)
        if count:
            found += layout.ranges(index, first, count, 0, layout.chunk_tokens)
    return tuple(found)


def own_ranges(layout: ObjectLayout) -> tuple[ByteRange, ...]:
    """All of an object's bytes that belong to a group, in the order of `slice_ranges`."""
    return slice_ranges(layout, Slice(0, layout.num_layers))
