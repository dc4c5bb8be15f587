"""The case that `lamella verify` builds from a user's geometry: real sizes, two requests, tables in random order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lamella.reference.arena import CacheCase
from lamella.reference.geometry import ObjectForm
from lamella.reference.laws import TransferCase
from lamella.reference.layout import LAYOUTS, KernelGroup, ObjectLayout
from lamella.reference.plan import Direction, TransferRequest
from lamella.reference.slices import plan_slices
from lamella.sim.bounds import check_seed

Width = int | tuple[int, ...] | None

DEFAULT_BYTES = 64 << 20
"""Bytes that a transfer moves where the caller names no number of tokens."""

_COPIES = 4  # of both sides at most: source, poison, expectation, and a run's own
_SPARE_BLOCKS = 3


@dataclass(frozen=True, slots=True)
class Scope:
    """What to verify.

    Args:
        layout: the objects.
        layout_name: of the engine's cache, as in `LAYOUTS`.
        widths: each a width, a schedule, or None for chunk-major.
        num_tokens: of the first request; the second one's are fewer.
        staging_bytes: budget.
        seed: of bytes, block tables and places.
        block_ids: the caller's own table, the same for every group; None for tables in random order.
        num_blocks: of every cache; None for just enough and a few more.
        null_block: as in `TransferRequest`.
        skip_tokens: of the caller's own table.
    """

    layout: ObjectLayout
    layout_name: str
    widths: tuple[Width, ...]
    num_tokens: int
    staging_bytes: int
    seed: int
    block_ids: tuple[int, ...] | None = None
    num_blocks: int | None = None
    null_block: int | None = None
    skip_tokens: int = 0


def default_widths(num_layers: int) -> tuple[Width, ...]:
    """Chunk-major, every width of a small model, a telling few of a large one, and two schedules."""
    several = range(1, num_layers + 1) if num_layers <= 8 else (1, 2, 3, 8, num_layers // 2 + 1, num_layers)
    found: list[Width] = [None, *dict.fromkeys(width for width in several if width <= num_layers)]
    found += [schedule for schedule in ((1, 1, 2, 4), (3, 1)) if max(schedule) <= num_layers]
    return tuple(found)


def default_tokens(layout: ObjectLayout, max_bytes: int) -> int:
    """About `DEFAULT_BYTES` of whole chunks and a partial one, or as much of that as `max_bytes` of memory allow."""
    token_bytes = sum(group.geometry.token_bytes for group in layout.groups)
    chunk = layout.chunk_tokens
    unit = max(group.block_tokens for group in layout.groups) if layout.form is ObjectForm.BLOCK else 1
    tail = max(unit, chunk // 3 // unit * unit)
    chunks = max(1, min(8, DEFAULT_BYTES // (token_bytes * chunk)))
    while chunks and _COPIES * token_bytes * chunk * (4 * chunks + 6) > max_bytes:
        chunks -= 1
    return chunks * chunk + (tail if chunks == 0 or tail < chunk else 0)


def caches_of(layout: ObjectLayout, layout_name: str, num_blocks: Sequence[int]) -> tuple[CacheCase, ...]:
    """The caches of an engine that pages the object's groups in the named layout.

    Groups with one run a token and one head keep the layout `mla` beside whatever the others have.

    Raises:
        ValueError: a layout that the groups cannot have.
    """
    if layout_name not in LAYOUTS:
        raise ValueError(f"unknown layout {layout_name!r}; known: {', '.join(LAYOUTS)}")
    return tuple(_cache(group, layout_name, blocks) for group, blocks in zip(layout.groups, num_blocks, strict=True))


def _cache(group: KernelGroup, layout_name: str, num_blocks: int) -> CacheCase:
    geometry = group.geometry
    is_latent = geometry.kv == 1 and geometry.num_heads == 1
    name = "mla" if is_latent and not layout_name.startswith("packed") else layout_name
    wanted_kv = 1 if name == "mla" or name.startswith("packed") else 2
    if geometry.kv != wanted_kv or (name == "mla" and geometry.num_heads != 1):
        raise ValueError(
            f"layout {layout_name} holds {'one run' if wanted_kv == 1 else 'keys and values'} a token"
            f"{' and one head' if name == 'mla' else ''}, but the geometry has kv {geometry.kv} "
            f"and {geometry.num_heads} heads"
        )
    return CacheCase(
        layers=group.layers,
        kv=geometry.kv,
        num_heads=geometry.num_heads,
        head_dim=geometry.head_dim,
        element_bytes=geometry.element_bytes,
        num_blocks=num_blocks,
        block_tokens=group.block_tokens,
        axes=LAYOUTS[name],
        separate_kv=name.startswith("separate"),
    )


def build_case(scope: Scope, max_bytes: int) -> TransferCase:
    """A retrieve of the scope: its own table, or two requests whose slices take turns.

    Of the two, one has a partial last chunk; the other enters a chunk in the middle and has a null block. Tables are in
    random order.

    Raises:
        ValueError: whatever the plan or the request refuses, or a case that needs more than `max_bytes` of memory.
    """
    if scope.num_tokens < 1:
        raise ValueError(f"tokens must be at least 1, got {scope.num_tokens}")
    check_seed(scope.seed)
    if scope.num_blocks is not None and scope.num_blocks < 1:
        raise ValueError(f"num_blocks must be at least 1, got {scope.num_blocks}")
    # Before the tables: those of more tokens than memory holds would not fit either.
    token_bytes = sum(group.geometry.token_bytes for group in scope.layout.groups)
    _check_memory(scope, _COPIES * scope.num_tokens * token_bytes, max_bytes)
    sizes = [group.block_tokens for group in scope.layout.groups]
    if scope.block_ids is not None:
        tables = tuple(scope.block_ids for _ in sizes)
        requests = [TransferRequest(scope.num_tokens, tables, scope.skip_tokens, scope.null_block)]
        needed = [1 + max((0, *scope.block_ids)) for _ in sizes]
    else:
        requests, needed = _two_requests(scope, sizes)
        if scope.num_blocks is not None and scope.num_blocks < max(needed):
            raise ValueError(
                f"num_blocks must be at least {max(needed)} for two requests of up to {scope.num_tokens} tokens, got "
                f"{scope.num_blocks}; leave it out, or name fewer tokens"
            )
    blocks = [count + _SPARE_BLOCKS if scope.num_blocks is None else scope.num_blocks for count in needed]
    case = TransferCase(
        caches=caches_of(scope.layout, scope.layout_name, blocks),
        form=scope.layout.form,
        chunk_tokens=scope.layout.chunk_tokens,
        requests=tuple(requests),
        direction=Direction.RETRIEVE,
        width=scope.widths[0],
        staging_bytes=scope.staging_bytes,
        registered_piece_bytes=max(1, scope.layout.object_bytes // 3),
        turns=(1, 0, 0, 1),
        seed=scope.seed,
    )
    for wanted in scope.widths:
        plan_slices(scope.layout.num_layers, wanted or 1)
    _check_memory(scope, memory_needed(case), max_bytes)
    case.check()
    return case


def _check_memory(scope: Scope, needed_bytes: int, max_bytes: int) -> None:
    if needed_bytes > max_bytes:
        fitting = scope.num_tokens * max_bytes // needed_bytes
        fewer = f"about {fitting} tokens fit, or " if fitting else ""
        if scope.num_blocks is not None:  # fewer tokens may need as much
            fewer = f"leave num_blocks {scope.num_blocks} out, or "
        raise ValueError(
            f"verifying {scope.num_tokens} tokens of this geometry needs {-(-needed_bytes >> 20)} MiB, more than the "
            f"{max_bytes / (1 << 20):g} MiB allowed; {fewer}raise --memory"
        )


def _two_requests(scope: Scope, sizes: list[int]) -> tuple[list[TransferRequest], list[int]]:
    random = np.random.default_rng(scope.seed)
    unit = max(sizes) if scope.layout.form is ObjectForm.BLOCK else 1
    lengths = [scope.num_tokens, max(unit, scope.num_tokens * 2 // 3 // unit * unit)]
    skip = min((scope.layout.chunk_tokens // 2 // unit * unit) or unit, lengths[1] - unit)
    if unit == 1 and skip > 1:
        skip -= 1  # inside a block as well as inside a chunk
    tables: list[list[tuple[int, ...]]] = [[], []]
    needed = []
    for size in sizes:
        counts = [-(-length // size) for length in lengths]
        needed.append(1 + sum(counts))
        order = [1 + int(block) for block in random.permutation(sum(counts))]  # block 0 stays the null block
        first, second = order[: counts[0]], order[counts[0] :]
        if counts[1] > 2:
            second[(skip // size + counts[1]) // 2] = 0
        tables[0].append(tuple(first))
        tables[1].append(tuple(second))
    requests = [
        TransferRequest(lengths[0], tuple(tables[0]), null_block=0),
        TransferRequest(lengths[1], tuple(tables[1]), skip_tokens=skip, null_block=0),
    ]
    return requests, needed


def memory_needed(case: TransferCase) -> int:
    """Bytes that verifying the case occupies at most."""
    cache_bytes = sum(cache.num_tensors * cache.tensor_bytes for cache in case.caches)
    objects = sum(-(-request.num_tokens // case.chunk_tokens) for request in case.requests)
    return _COPIES * (cache_bytes + objects * case.layout.object_bytes)
