"""Transfer plans: what moves, in which order, through which staging windows.

A plan is the meaning of a transfer; the native planner expands the same request into the same windows, and every
executor (NumPy, C++, CUDA) only carries it out. Bytes go from an object into a window of the staging ring and from
there into the engine's blocks; an executor that needs no staging still moves window by window, so that the bytes in
flight are bounded the same way.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from lamella.reference.geometry import ObjectForm
from lamella.reference.layout import EngineLayout, ObjectLayout
from lamella.reference.slices import Slice, plan_slices


class Direction(enum.Enum):
    """Which way the bytes go."""

    RETRIEVE = "retrieve"
    """Host object to engine blocks (H2D)."""
    STORE = "store"
    """Engine blocks to host object (D2H)."""


@dataclass(frozen=True, slots=True)
class TransferRequest:
    """Tokens `[skip_tokens, num_tokens)` of one sequence, between its objects and its engine blocks.

    Args:
        num_tokens: tokens of the prefix that the objects hold. Object `i` is the sequence's chunk `i`, counted from
            token 0 whatever is skipped.
        block_ids: for each kernel group the engine's block table; entry `i` holds tokens
            `[i * block_tokens, (i + 1) * block_tokens)`, counted from token 0.
        skip_tokens: leading tokens that the engine holds already; they are neither read nor written.
        null_block: a block id that stands for "no block here"; its tokens are skipped.
    """

    num_tokens: int
    block_ids: tuple[tuple[int, ...], ...]
    skip_tokens: int = 0
    null_block: int | None = None


class Piece(NamedTuple):
    """A rectangle of one object: some layers of one kernel group, some tokens of the chunk.

    `first_layer` counts within the group, `first_token` within the chunk. In staging the piece is dense,
    `[K, num_layers, num_tokens, D]` (token form) or `[num_layers, blocks, block bytes]` (block form).
    """

    object_index: int
    group: int
    first_layer: int
    num_layers: int
    first_token: int
    num_tokens: int
    staging_offset: int


class Window(NamedTuple):
    """Pieces in flight together. `completes_slice` is the slice that has wholly moved once this window has, or None."""

    pieces: tuple[Piece, ...]
    num_bytes: int
    completes_slice: int | None


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Windows in order, with the slices they complete (XFER-4, XFER-5)."""

    layout: ObjectLayout
    request: TransferRequest
    slices: tuple[Slice, ...]
    windows: tuple[Window, ...]
    window_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes the plan moves."""
        return sum(window.num_bytes for window in self.windows)

    def per_slice(self) -> tuple[TransferPlan, ...]:
        """One plan a slice, in order; run one after another they move what the whole plan moves."""
        ends = [index for index, window in enumerate(self.windows, 1) if window.completes_slice is not None]
        starts = [0, *ends[:-1]]
        return tuple(
            replace(self, slices=(layers,), windows=_as_only_slice(self.windows[start:end]))
            for layers, start, end in zip(self.slices, starts, ends, strict=True)
        )


def _as_only_slice(windows: tuple[Window, ...]) -> tuple[Window, ...]:
    return (*windows[:-1], windows[-1]._replace(completes_slice=0))


def expand_block_ids(block_ids: Sequence[int], logical_tokens: int, kernel_tokens: int) -> tuple[int, ...]:
    """Block ids of the kernel's blocks, where the engine's logical block is a whole number of them.

    Raises:
        ValueError: logical_tokens is not a multiple of kernel_tokens.

    >>> expand_block_ids([5, 2], logical_tokens=32, kernel_tokens=16)
    (10, 11, 4, 5)
    """
    if kernel_tokens < 1 or logical_tokens % kernel_tokens:
        raise ValueError(
            f"a logical block ({logical_tokens} tokens) must be a whole number of kernel blocks ({kernel_tokens})"
        )
    ratio = logical_tokens // kernel_tokens
    return tuple(block * ratio + part for block in block_ids for part in range(ratio))


def check_request(
    layout: ObjectLayout, engines: Sequence[EngineLayout], request: TransferRequest, direction: Direction
) -> None:
    """Settles before the first byte moves whatever can fail cheaply.

    Raises:
        ValueError: engines that do not fit the layout; a skip outside `0 .. num_tokens`; too few block ids; an id
            outside the cache; a block written twice by a retrieve; (block form) blocks that are not dense, or tokens
            that are not whole blocks.
    """
    if len(engines) != len(layout.groups) or len(request.block_ids) != len(layout.groups):
        raise ValueError(
            f"the object has {len(layout.groups)} kernel groups, got {len(engines)} caches "
            f"and {len(request.block_ids)} block tables"
        )
    if not 0 <= request.skip_tokens <= request.num_tokens:
        raise ValueError(f"skip_tokens must be between 0 and {request.num_tokens}, got {request.skip_tokens}")
    for index, (group, engine, ids) in enumerate(zip(layout.groups, engines, request.block_ids, strict=True)):
        engine.check_matches(group.geometry)
        if engine.block_tokens != group.block_tokens:
            raise ValueError(
                f"kernel group {index} has blocks of {group.block_tokens} tokens, its cache of {engine.block_tokens}: "
                "expand the block ids with expand_block_ids"
            )
        if layout.form is ObjectForm.BLOCK:
            if engine.inner_order() is None:
                raise ValueError("the block form needs engine blocks without gaps; use the token form for this view")
            for name in ("skip_tokens", "num_tokens"):
                if getattr(request, name) % group.block_tokens:
                    raise ValueError(
                        f"in block form {name} must be a multiple of {group.block_tokens}, got {getattr(request, name)}"
                    )
        _check_block_ids(request, ids, engine, direction)


def _check_block_ids(
    request: TransferRequest, ids: tuple[int, ...], engine: EngineLayout, direction: Direction
) -> None:
    if request.skip_tokens == request.num_tokens:
        return
    needed = -(-request.num_tokens // engine.block_tokens)
    if len(ids) < needed:
        raise ValueError(
            f"{request.num_tokens} tokens need {needed} blocks of {engine.block_tokens}, got {len(ids)} block ids"
        )
    seen: set[int] = set()
    for block in ids[request.skip_tokens // engine.block_tokens : needed]:
        if block == request.null_block:
            continue
        if not 0 <= block < engine.num_blocks:
            raise ValueError(f"block id {block} is outside the cache's 0 .. {engine.num_blocks - 1}")
        if block in seen and direction is Direction.RETRIEVE:
            raise ValueError(f"block {block} would be written twice by one retrieve; name it once, or as null_block")
        seen.add(block)


def plan_chunk_major(
    layout: ObjectLayout, request: TransferRequest, staging_bytes: int, num_windows: int = 2
) -> TransferPlan:
    """Whole objects one after another, every layer of each; the one slice is complete at the very end.

    Raises: as `plan_layer_major`.
    """
    return _plan(layout, request, (Slice(0, layout.num_layers),), staging_bytes, num_windows)


def plan_layer_major(
    layout: ObjectLayout,
    request: TransferRequest,
    width: int | Sequence[int],
    staging_bytes: int,
    num_windows: int = 2,
) -> TransferPlan:
    """Slice by slice in layer order, each slice of every object before the next.

    Args:
        layout: the objects.
        request: already settled by `check_request`.
        width: layers per slice, or a schedule.
        staging_bytes: budget of the whole staging ring.
        num_windows: windows of the ring, at least 2, so that one can be copied while another is scattered.

    Raises:
        ValueError: a bad width, fewer than two windows, or a budget in which one block of one layer does not fit.
    """
    return _plan(layout, request, plan_slices(layout.num_layers, width), staging_bytes, num_windows)


def _plan(
    layout: ObjectLayout, request: TransferRequest, slices: tuple[Slice, ...], staging_bytes: int, num_windows: int
) -> TransferPlan:
    if num_windows < 2:
        raise ValueError(f"num_windows must be at least 2, got {num_windows}")
    smallest = max(group.block_bytes for group in layout.groups)
    window_bytes = staging_bytes // num_windows
    if window_bytes < smallest:
        raise ValueError(
            f"staging_bytes must be at least {smallest * num_windows} ({num_windows} windows of one block of one "
            f"layer), got {staging_bytes}"
        )
    windows: list[Window] = []
    for index, layers in enumerate(slices):
        pieces: list[Piece] = []
        used = 0
        for piece in _rectangles(layout, request, layers):
            for part in _cut(layout, piece, window_bytes):
                size = _piece_bytes(layout, part)
                if used + size > window_bytes:
                    windows.append(Window(tuple(pieces), used, None))
                    pieces, used = [], 0
                pieces.append(part._replace(staging_offset=used))
                used += size
        windows.append(Window(tuple(pieces), used, index))
    return TransferPlan(layout, request, slices, tuple(windows), window_bytes)


def _rectangles(layout: ObjectLayout, request: TransferRequest, layers: Slice) -> Iterator[Piece]:
    """The slice's rectangles, uncut: chunk by chunk, group by group, one for each run of tokens that has blocks."""
    chunk_tokens = layout.chunk_tokens
    for chunk in range(request.skip_tokens // chunk_tokens, -(-request.num_tokens // chunk_tokens)):
        start = max(request.skip_tokens, chunk * chunk_tokens)
        end = min(request.num_tokens, (chunk + 1) * chunk_tokens)
        for index, group in enumerate(layout.groups):
            first, count = group.span(*layers)
            if not count:
                continue
            for first_token, end_token in _mapped_runs(request, index, group.block_tokens, start, end):
                yield Piece(chunk, index, first, count, first_token - chunk * chunk_tokens, end_token - first_token, 0)


def _mapped_runs(
    request: TransferRequest, group: int, block_tokens: int, start: int, end: int
) -> Iterator[tuple[int, int]]:
    """Longest runs of tokens within `[start, end)` whose blocks are not the null block."""
    run_start: int | None = None
    for block_index in range(start // block_tokens, -(-end // block_tokens) if end > start else 0):
        is_null = request.block_ids[group][block_index] == request.null_block
        if is_null and run_start is not None:
            yield run_start, block_index * block_tokens
            run_start = None
        elif not is_null and run_start is None:
            run_start = max(start, block_index * block_tokens)
    if run_start is not None:
        yield run_start, end


def _cut(layout: ObjectLayout, piece: Piece, window_bytes: int) -> Iterator[Piece]:
    """Parts of a rectangle that each fit a window: whole layers while one fits, else block-aligned runs of tokens."""
    group = layout.groups[piece.group]
    layer_bytes = piece.num_tokens * group.geometry.token_layer_bytes
    if layer_bytes <= window_bytes:
        step = min(piece.num_layers, window_bytes // layer_bytes)
        for done in range(0, piece.num_layers, step):
            yield piece._replace(first_layer=piece.first_layer + done, num_layers=min(step, piece.num_layers - done))
        return
    blocks = window_bytes // group.block_bytes
    origin = piece.object_index * layout.chunk_tokens
    for layer in range(piece.num_layers):
        token, end = origin + piece.first_token, origin + piece.first_token + piece.num_tokens
        while token < end:
            stop = min(end, (token // group.block_tokens + blocks) * group.block_tokens)
            yield piece._replace(
                first_layer=piece.first_layer + layer, num_layers=1, first_token=token - origin, num_tokens=stop - token
            )
            token = stop


def _piece_bytes(layout: ObjectLayout, piece: Piece) -> int:
    return piece.num_layers * piece.num_tokens * layout.groups[piece.group].geometry.token_layer_bytes
