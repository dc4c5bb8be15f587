"""A failing case made small: fewer requests, tokens, layers and heads, plainer memory, as long as it still fails.

Greedy: of all smaller cases the first that still fails is taken, until none does or the trials are used up. A
candidate that is no legal transfer is passed over. The result is what a person has to look at, so it must be small
rather than smallest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from lamella.reference.arena import CacheCase
from lamella.reference.geometry import ObjectForm
from lamella.reference.laws import TransferCase
from lamella.reference.plan import TransferRequest


def minimal(case: TransferCase, fails: Callable[[TransferCase], bool], max_trials: int = 400) -> TransferCase:
    """A case that fails and of which no smaller neighbour does, or the smallest found in `max_trials` trials.

    Args:
        case: a failing case.
        fails: whether a case fails; may raise ValueError for one that is not legal.
        max_trials: calls of `fails` at most.
    """
    left = max_trials
    smaller = True
    while smaller and left:
        smaller = False
        for candidate in _smaller(case):
            if not left:
                break
            left -= 1
            if _still_fails(candidate, fails):
                case, smaller = candidate, True
                break
    return case


def _still_fails(case: TransferCase, fails: Callable[[TransferCase], bool]) -> bool:
    try:
        return fails(case)
    except ValueError:
        return False


def _smaller(case: TransferCase) -> Iterator[TransferCase]:
    """Neighbours, the boldest first."""
    yield from _with_fewer_parts(case)
    yield from _with_fewer_tokens(case)
    yield from _with_smaller_caches(case)
    yield from _moved_plainly(case)


def _with_fewer_parts(case: TransferCase) -> Iterator[TransferCase]:
    for request in case.requests:
        if len(case.requests) > 1:
            yield replace(case, requests=(request,), turns=())
    if len(case.caches) > 1:
        for index, cache in enumerate(case.caches):
            own = tuple(range(len(cache.layers)))
            requests = tuple(replace(r, block_ids=(r.block_ids[index],)) for r in case.requests)
            yield _with_layers(replace(case, caches=(replace(cache, layers=own),), requests=requests), len(own))
    num_layers = case.layout.num_layers
    for fewer in _fewer(num_layers):
        yield _with_layers(case, fewer)


def _with_layers(case: TransferCase, num_layers: int) -> TransferCase:
    """The stage's first `num_layers` layers; groups that keep none are gone, widths are no larger than that."""
    kept = [
        (index, replace(cache, layers=tuple(layer for layer in cache.layers if layer < num_layers)))
        for index, cache in enumerate(case.caches)
        if cache.layers[0] < num_layers
    ]
    requests = tuple(replace(r, block_ids=tuple(r.block_ids[index] for index, _ in kept)) for r in case.requests)
    width = case.width
    if isinstance(width, int):
        width = min(width, num_layers)
    elif width is not None:
        width = tuple(min(layers, num_layers) for layers in width)
    return replace(case, caches=tuple(cache for _, cache in kept), requests=requests, width=width)


def _with_fewer_tokens(case: TransferCase) -> Iterator[TransferCase]:
    unit = max(cache.block_tokens for cache in case.caches) if case.form is ObjectForm.BLOCK else 1

    def with_request(index: int, request: TransferRequest) -> TransferCase:
        return replace(case, requests=(*case.requests[:index], request, *case.requests[index + 1 :]))

    for index, request in enumerate(case.requests):
        for tokens in _fewer(request.num_tokens // unit, least=0):
            fewer = tokens * unit
            skip = min(request.skip_tokens, fewer)
            yield with_request(index, replace(request, num_tokens=fewer, skip_tokens=skip))
        for skipped in _fewer(request.skip_tokens // unit, least=0):
            yield with_request(index, replace(request, skip_tokens=skipped * unit))
        if request.null_block is not None:
            yield with_request(index, replace(request, null_block=None))
    for fewer in _fewer(case.chunk_tokens // unit):
        yield replace(case, chunk_tokens=fewer * unit)
    yield from _with_blocks_in_order(case)


def _with_blocks_in_order(case: TransferCase) -> Iterator[TransferCase]:
    """Tables 0, 1, 2 … and caches just large enough; null blocks and blocks named twice are gone."""
    tables: list[list[tuple[int, ...]]] = [[] for _ in case.requests]
    caches = []
    for cache in case.caches:
        first = 0
        for index, request in enumerate(case.requests):
            needed = -(-request.num_tokens // cache.block_tokens)
            tables[index].append(tuple(range(first, first + needed)))
            first += needed
        caches.append(replace(cache, num_blocks=max(1, first)))
    plain = replace(
        case,
        caches=tuple(caches),
        requests=tuple(
            replace(request, block_ids=tuple(own), null_block=None)
            for request, own in zip(case.requests, tables, strict=True)
        ),
    )
    if plain != case:
        yield plain


def _with_smaller_caches(case: TransferCase) -> Iterator[TransferCase]:
    for index, cache in enumerate(case.caches):
        for smaller in _smaller_caches(cache):
            yield replace(case, caches=(*case.caches[:index], smaller, *case.caches[index + 1 :]))


def _smaller_caches(cache: CacheCase) -> Iterator[CacheCase]:
    plain = replace(cache, memory="", steps=(), margins=())
    if plain != cache:
        yield plain
    if any(cache.margins) or any(step != 1 for step in cache.steps):
        yield replace(cache, steps=(), margins=())
    for heads in _fewer(cache.num_heads):
        yield replace(cache, num_heads=heads)
    for dims in _fewer(cache.head_dim):
        yield replace(cache, head_dim=dims)
    for tokens in _fewer(cache.block_tokens):
        yield replace(cache, block_tokens=tokens)
    for size in _fewer(cache.element_bytes):
        yield replace(cache, element_bytes=size)


def _moved_plainly(case: TransferCase) -> Iterator[TransferCase]:
    if case.registered_piece_bytes is not None:
        yield replace(case, registered_piece_bytes=None)
    if case.turns:
        yield replace(case, turns=())
    if case.width is not None:
        yield replace(case, width=None)
    if isinstance(case.width, tuple):
        yield replace(case, width=case.width[0])
    if isinstance(case.width, int):
        for width in _fewer(case.width):
            yield replace(case, width=width)
    if case.num_windows > 2:
        yield replace(case, num_windows=2)
    roomy = (
        case.num_windows
        * max(1, sum(request.num_tokens for request in case.requests))
        * sum(cache.group(case.chunk_tokens).geometry.token_bytes for cache in case.caches)
    )
    if case.staging_bytes != roomy:
        yield replace(case, staging_bytes=roomy)


def _fewer(number: int, least: int = 1) -> Iterator[int]:
    """Smaller numbers to try, boldest first."""
    tried = set()
    for candidate in (least, number // 4, number // 2, number - 1):
        if least <= candidate < number and candidate not in tried:
            tried.add(candidate)
            yield candidate
