"""What the strategies can draw: a law that is never tried on a kind of case says nothing about it."""

from collections.abc import Callable

from hypothesis import Phase, given, settings

from lamella.reference.geometry import ObjectForm
from lamella.reference.laws import TransferCase
from lamella.reference.plan import Direction
from strategies import transfer_cases

Kind = Callable[[TransferCase], bool]


def _in_some_cache(kind: Callable[..., bool]) -> Kind:
    return lambda case: any(kind(cache) for cache in case.caches)


def _has_null(case: TransferCase) -> bool:
    request = case.requests[0]
    needed = [
        ids[request.skip_tokens // cache.block_tokens : -(-request.num_tokens // cache.block_tokens)]
        for ids, cache in zip(request.block_ids, case.caches, strict=True)
    ]
    return request.null_block is not None and any(request.null_block in ids for ids in needed)


KINDS: dict[str, Kind] = {
    "one run a token": _in_some_cache(lambda cache: cache.kv == 1),
    "keys and values": _in_some_cache(lambda cache: cache.kv == 2),
    "keys and values in separate tensors": _in_some_cache(lambda cache: cache.separate_kv),
    "one byte an element": _in_some_cache(lambda cache: cache.element_bytes == 1),
    "two bytes an element": _in_some_cache(lambda cache: cache.element_bytes == 2),
    "four bytes an element": _in_some_cache(lambda cache: cache.element_bytes == 4),
    "HND in memory": _in_some_cache(
        lambda cache: cache.num_heads > 1 < cache.block_tokens and "HTD" in (cache.memory or cache.axes)
    ),
    "a view whose axes are not in memory order": _in_some_cache(lambda cache: cache.memory not in ("", cache.axes)),
    "K interleaved inside a head": _in_some_cache(lambda cache: cache.memory.endswith("KD")),
    "a negative stride": _in_some_cache(lambda cache: min(cache.steps, default=1) < 0),
    "a view that leaves elements out": _in_some_cache(lambda cache: max(cache.steps, default=1) > 1),
    "padded rows": _in_some_cache(lambda cache: any(cache.margins)),
    "one tensor for all layers": _in_some_cache(lambda cache: "L" in cache.axes and len(cache.layers) > 1),
    "several kernel groups": lambda case: len(case.caches) > 1,
    "groups that share a layer": lambda case: (
        len({lr for c in case.caches for lr in c.layers}) < sum(len(c.layers) for c in case.caches)
    ),
    "groups with blocks of different sizes": lambda case: len({cache.block_tokens for cache in case.caches}) > 1,
    "block form": lambda case: case.form is ObjectForm.BLOCK and case.requests[0].num_tokens > 0,
    "a partial last chunk": lambda case: case.requests[0].num_tokens % case.chunk_tokens > 0,
    "a partial last block": lambda case: case.requests[0].num_tokens % case.caches[0].block_tokens > 0,
    "several chunks": lambda case: case.requests[0].num_tokens > 2 * case.chunk_tokens,
    "a skip inside a chunk": lambda case: case.requests[0].skip_tokens % case.chunk_tokens > 0,
    "a skip inside a block": lambda case: case.requests[0].skip_tokens % case.caches[0].block_tokens > 0,
    "nothing to move": lambda case: case.requests[0].skip_tokens == case.requests[0].num_tokens,
    "a null block": _has_null,
    "a block read twice": lambda case: (
        case.direction is Direction.STORE and any(len(set(ids)) < len(ids) for ids in case.requests[0].block_ids)
    ),
    "a schedule": lambda case: isinstance(case.width, tuple) and len(set(case.width)) > 1,
    "chunk-major": lambda case: case.width is None,
    "a width that does not divide": lambda case: (
        isinstance(case.width, int) and case.layout.num_layers % case.width > 0
    ),
    "a slice of several windows": lambda case: len((plan := case.plan(case.requests[0])).windows) > len(plan.slices),
    "a layer cut by tokens": lambda case: any(
        piece.num_tokens < min(case.chunk_tokens, case.requests[0].num_tokens - case.requests[0].skip_tokens)
        for window in case.plan(case.requests[0]).windows
        for piece in window.pieces
    ),
    "host memory registered in pieces": lambda case: (case.registered_piece_bytes or 10**9) < case.layout.object_bytes,
    "three requests in turns": lambda case: len(case.requests) == 3 and len(case.turns) > 2,
}


def test_the_strategy_reaches_every_kind_of_case() -> None:
    reached: dict[str, int] = dict.fromkeys(KINDS, 0)

    @settings(max_examples=500, derandomize=True, database=None, phases=[Phase.generate])
    @given(case=transfer_cases(max_requests=3))
    def draw(case: TransferCase) -> None:
        for name, kind in KINDS.items():
            reached[name] += kind(case)

    draw()
    assert {name: times for name, times in reached.items() if times < 3} == {}
