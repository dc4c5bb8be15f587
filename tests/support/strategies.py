"""Hypothesis strategies, legal by construction: nothing is drawn and then thrown away.

Sizes are tiny on purpose. What breaks a transfer is the shape of a case (a tail, a skip inside a block, a stride that
is not the one expected), not its size, and small cases are many cases.
"""

from __future__ import annotations

from hypothesis import strategies as st

from lamella.reference.arena import CacheCase
from lamella.reference.geometry import KVGeometry, ObjectForm
from lamella.reference.laws import TransferCase
from lamella.reference.layout import LAYOUTS
from lamella.reference.plan import Direction, TransferRequest

MAX_LAYERS = 6


def geometries() -> st.SearchStrategy[KVGeometry]:
    return st.builds(
        KVGeometry,
        num_layers=st.integers(1, MAX_LAYERS),
        kv=st.sampled_from((1, 2)),
        num_heads=st.integers(1, 3),
        head_dim=st.integers(1, 5),
        element_bytes=st.sampled_from((1, 2, 4)),
        chunk_tokens=st.integers(1, 12),
    )


def widths(num_layers: int) -> st.SearchStrategy[int | tuple[int, ...]]:
    """A width 1 .. L or a schedule of up to four."""
    width = st.integers(1, num_layers)
    return width | st.lists(width, min_size=1, max_size=4).map(tuple)


@st.composite
def transfer_cases(draw: st.DrawFn, direction: Direction | None = None, max_requests: int = 1) -> TransferCase:
    """Any legal transfer: one or several kernel groups and requests, either form, chunk-major or layer-major."""
    form = draw(st.sampled_from(ObjectForm))
    direction = direction or draw(st.sampled_from(Direction))
    null_block = draw(st.sampled_from((None, 0, 2, -1)))
    shapes = draw(_shapes(form))
    block_tokens = [shape[1] for shape in shapes]
    chunk_tokens = draw(st.integers(1, 12))
    if form is ObjectForm.BLOCK:  # whole blocks of every group, whatever its size
        unit = max(block_tokens)
        chunk_tokens = unit * draw(st.integers(1, 3))
    else:
        unit = 1
    num_requests = draw(st.integers(1, max_requests))
    lengths = [unit * draw(st.integers(0, 24 // unit)) for _ in range(num_requests)]
    skips = [unit * draw(st.integers(0, length // unit)) for length in lengths]
    caches, tables = [], []
    for layers, tokens in shapes:
        cache, own = draw(_caches(form, layers, tokens, lengths, skips, null_block, direction))
        caches.append(cache)
        tables.append(own)
    requests = tuple(
        TransferRequest(length, tuple(own[index] for own in tables), skip, null_block)
        for index, (length, skip) in enumerate(zip(lengths, skips, strict=True))
    )
    num_layers = 1 + max(cache.layers[-1] for cache in caches)
    smallest = max(cache.group(chunk_tokens).block_bytes for cache in caches)
    num_windows = draw(st.integers(2, 4))
    return TransferCase(
        caches=tuple(caches),
        form=form,
        chunk_tokens=chunk_tokens,
        requests=requests,
        direction=direction,
        width=draw(st.none() | widths(num_layers)),
        staging_bytes=num_windows * smallest * draw(st.integers(1, 12)) + draw(st.integers(0, 7)),
        num_windows=num_windows,
        registered_piece_bytes=draw(st.none() | st.integers(1, 600)),
        turns=tuple(draw(st.lists(st.integers(0, 5), max_size=12))) if num_requests > 1 else (),
        seed=draw(st.integers(0, 2**16)),
    )


@st.composite
def _shapes(draw: st.DrawFn, form: ObjectForm) -> list[tuple[tuple[int, ...], int]]:
    """(layers, block_tokens) of one to three kernel groups that together hold every layer of the stage."""
    num_layers = draw(st.integers(1, MAX_LAYERS))
    num_groups = draw(st.sampled_from((1, 1, 2, 3)))
    held: list[set[int]] = [set() for _ in range(num_groups)]
    for layer in range(num_layers):
        owners = draw(st.sets(st.integers(0, num_groups - 1), min_size=1, max_size=2))
        for owner in owners:
            held[owner].add(layer)
    sizes = (1, 2, 4) if form is ObjectForm.BLOCK else (1, 2, 3, 4, 5)
    return [(tuple(sorted(layers)), draw(st.sampled_from(sizes))) for layers in held if layers]


@st.composite
def _caches(
    draw: st.DrawFn,
    form: ObjectForm,
    layers: tuple[int, ...],
    block_tokens: int,
    lengths: list[int],
    skips: list[int],
    null_block: int | None,
    direction: Direction,
) -> tuple[CacheCase, list[tuple[int, ...]]]:
    """A kernel group's cache, and its block table for each request."""
    kv = draw(st.sampled_from((1, 2)))
    separate_kv = kv == 2 and draw(st.booleans())
    axes = "NTHD" if kv == 1 or separate_kv else "KNTHD"
    if draw(st.sampled_from((False, False, True))) and not separate_kv:
        axes += "L"
    num_heads = draw(st.integers(1, 3))
    if num_heads == 1 and draw(st.booleans()):
        axes = axes.replace("H", "")
    known = [name for name in LAYOUTS.values() if sorted(name) == sorted(axes)]
    axes = draw(st.sampled_from(known) | st.permutations(axes).map("".join)) if known else axes
    if form is ObjectForm.BLOCK:  # a block's own axes innermost and without gaps, the others as they like
        inner = draw(st.sampled_from(("THD", "HTD"))) if "H" in axes else "TD"
        outer = "".join(draw(st.permutations([axis for axis in axes if axis not in inner])))
        memory = outer + inner
    else:
        orders = st.just(axes) | st.permutations(axes).map("".join)
        if axes in ("KNTHD", "NKTHD", "KNHTD", "NKHTD"):  # packed keys and values, seen as two
            orders |= st.sampled_from(("NTHKD", "NHTKD"))
        memory, outer = draw(orders), axes
    free = [axis in outer for axis in memory]
    steps = tuple(draw(st.sampled_from((1, 1, 1, 2, -1, -2))) if loose else 1 for loose in free)
    margins = tuple(draw(st.sampled_from((0, 0, 0, 1, 3))) if loose else 0 for loose in free)
    tables, num_blocks = draw(_block_tables(block_tokens, lengths, skips, null_block, direction))
    cache = CacheCase(
        layers=layers,
        kv=kv,
        num_heads=num_heads,
        head_dim=draw(st.integers(1, 5)),
        element_bytes=draw(st.sampled_from((1, 2, 4))),
        num_blocks=num_blocks,
        block_tokens=block_tokens,
        axes=axes,
        memory=memory,
        steps=steps,
        margins=margins,
        separate_kv=separate_kv,
    )
    return cache, tables


@st.composite
def _block_tables(
    draw: st.DrawFn,
    block_tokens: int,
    lengths: list[int],
    skips: list[int],
    null_block: int | None,
    direction: Direction,
) -> tuple[list[tuple[int, ...]], int]:
    """Tables in shuffled order, disjoint between requests, with null blocks, and nonsense where nothing is read."""
    needed = [-(-length // block_tokens) for length in lengths]
    num_blocks = sum(needed) + draw(st.integers(1, 4))
    if null_block is not None:
        num_blocks = max(num_blocks, null_block + 1) + 1
    usable = draw(st.permutations([block for block in range(num_blocks) if block != null_block]))
    tables, taken = [], 0
    for count, skip in zip(needed, skips, strict=True):
        table = list(usable[taken : taken + count])
        taken += count
        for index in range(count):
            if index < skip // block_tokens:
                table[index] = draw(st.sampled_from((table[index], -7, num_blocks)))  # never looked at
            elif null_block is not None and draw(st.sampled_from((False, False, False, True))):
                table[index] = null_block
            elif direction is Direction.STORE and index and draw(st.sampled_from((False, False, False, True))):
                table[index] = table[-1]  # a store may read a block twice
        tables.append((*table, *draw(st.sampled_from(((), (-1, 999), (table[0] if table else 0,))))))
    return tables, num_blocks
