"""Plans: what moves, once, within a budget, and what is refused before anything moves."""

import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella.reference import oracle
from lamella.reference.arena import Arena, CacheCase
from lamella.reference.geometry import KVGeometry, ObjectForm
from lamella.reference.laws import TransferCase
from lamella.reference.layout import EngineLayout, ObjectLayout
from lamella.reference.plan import (
    Direction,
    Piece,
    TransferPlan,
    TransferRequest,
    Window,
    check_request,
    expand_block_ids,
    plan_chunk_major,
    plan_layer_major,
)
from lamella.reference.slices import Slice
from strategies import transfer_cases

# Two layers, K and V, two bytes a token, layer and kv; chunks of 4 tokens, blocks of 2.
LAYOUT = ObjectLayout.single(KVGeometry(2, 2, 1, 2, 1, 4), 2)
CACHE = EngineLayout(((0, 100), (200, 300)), 4, 2, 2, 1, 10, 2, 1, 2, 1)
WHOLE = 1 << 20


def test_layer_major_moves_every_object_of_a_slice_before_the_next_slice() -> None:
    plan = plan_layer_major(LAYOUT, TransferRequest(6, ((7, 3, 5),)), width=1, staging_bytes=WHOLE)
    assert plan.slices == (Slice(0, 1), Slice(1, 1))
    assert plan.windows == (
        Window((Piece(0, 0, 0, 1, 0, 4, 0), Piece(1, 0, 0, 1, 0, 2, 16)), 24, 0),
        Window((Piece(0, 0, 1, 1, 0, 4, 0), Piece(1, 0, 1, 1, 0, 2, 16)), 24, 1),
    )
    assert plan.num_bytes == 48


def test_chunk_major_moves_every_layer_of_an_object_before_the_next_object() -> None:
    plan = plan_chunk_major(LAYOUT, TransferRequest(6, ((7, 3, 5),)), staging_bytes=WHOLE)
    assert plan.slices == (Slice(0, 2),)
    assert plan.windows == (Window((Piece(0, 0, 0, 2, 0, 4, 0), Piece(1, 0, 0, 2, 0, 2, 32)), 48, 0),)


def test_a_slice_larger_than_a_window_completes_with_its_last_window() -> None:
    plan = plan_layer_major(LAYOUT, TransferRequest(8, ((7, 3, 5, 1),)), width=2, staging_bytes=32)
    assert [window.completes_slice for window in plan.windows] == [None, None, None, 0]
    assert [window.num_bytes for window in plan.windows] == [16] * 4
    assert [window.pieces[0].first_layer for window in plan.windows] == [0, 1, 0, 1]


def test_a_layer_larger_than_a_window_is_cut_between_blocks() -> None:
    plan = plan_layer_major(LAYOUT, TransferRequest(8, ((7, 3, 5, 1),), skip_tokens=1), width=1, staging_bytes=16)
    tokens = [(p.object_index, p.first_token, p.num_tokens) for w in plan.windows for p in w.pieces]
    assert tokens[:4] == [(0, 1, 1), (0, 2, 2), (1, 0, 2), (1, 2, 2)]
    assert tokens[4:] == tokens[:4]


@pytest.mark.known_fault(52)
def test_a_skip_inside_a_chunk_enters_its_object_in_the_middle() -> None:
    plan = plan_layer_major(LAYOUT, TransferRequest(8, ((0, 1, 2, 3),), skip_tokens=5), 2, WHOLE)
    assert [piece[:6] for piece in plan.windows[0].pieces] == [(1, 0, 0, 2, 1, 3)]


@pytest.mark.known_fault(53)
def test_a_skip_by_blocks_is_taken_from_both_sides() -> None:
    # Chunks of 64 tokens, blocks of 16, 48 tokens there already: the object is read from its fourth block on.
    layout = ObjectLayout.single(KVGeometry(1, 1, 1, 1, 1, 64), 16, ObjectForm.BLOCK)
    plan = plan_layer_major(layout, TransferRequest(128, (tuple(range(8)),), skip_tokens=48), 1, WHOLE)
    assert [piece[:6] for piece in plan.windows[0].pieces] == [(0, 0, 0, 1, 48, 16), (1, 0, 0, 1, 0, 64)]
    assert layout.ranges(0, 0, 1, 48, 16)[0].offset == 48


@pytest.mark.known_fault(59)
def test_objects_are_named_by_absolute_chunk_whatever_is_skipped() -> None:
    plan = plan_layer_major(LAYOUT, TransferRequest(12, ((0, 1, 2, 3, 4, 5),), skip_tokens=8), 2, WHOLE)
    assert [piece.object_index for window in plan.windows for piece in window.pieces] == [2]


@pytest.mark.known_fault(55)
def test_a_prefix_that_is_no_multiple_of_the_chunk_moves_its_tail_and_no_padding() -> None:
    layout = ObjectLayout.single(KVGeometry(1, 1, 1, 1, 1, 256), 16)
    plan = plan_layer_major(layout, TransferRequest(300, (tuple(range(19)),)), 1, WHOLE)
    assert [(p.object_index, p.first_token, p.num_tokens) for p in plan.windows[0].pieces] == [(0, 0, 256), (1, 0, 44)]


@pytest.mark.known_fault(1, 50)
@pytest.mark.parametrize("tokens", [0, 8])
def test_a_transfer_of_nothing_completes_every_slice(tokens: int) -> None:
    request = TransferRequest(tokens, ((),), skip_tokens=tokens)
    check_request(LAYOUT, [CACHE], request, Direction.RETRIEVE)
    plan = plan_layer_major(LAYOUT, request, 1, WHOLE)
    assert plan.windows == (Window((), 0, 0), Window((), 0, 1))


@pytest.mark.known_fault(66)
def test_the_null_block_repeats_and_is_never_moved() -> None:
    request = TransferRequest(8, ((0, 0, 7, 0),), null_block=0)
    check_request(LAYOUT, [CACHE], request, Direction.RETRIEVE)
    plan = plan_layer_major(LAYOUT, request, 2, WHOLE)
    assert [piece[:6] for piece in plan.windows[0].pieces] == [(1, 0, 0, 2, 0, 2)]


@pytest.mark.known_fault(66)
def test_a_block_written_twice_is_refused_and_read_twice_is_not() -> None:
    request = TransferRequest(6, ((7, 3, 7),))
    with pytest.raises(ValueError, match="block 7 would be written twice by one retrieve; name it once, or as null_b"):
        check_request(LAYOUT, [CACHE], request, Direction.RETRIEVE)
    check_request(LAYOUT, [CACHE], request, Direction.STORE)


@pytest.mark.known_fault(64)
def test_the_last_partial_block_moves_too() -> None:
    plan = plan_layer_major(LAYOUT, TransferRequest(7, ((0, 1, 2, 3),)), 2, WHOLE)
    assert sum(piece.num_tokens for window in plan.windows for piece in window.pieces) == 7


@given(transfer_cases(max_requests=3))
def test_a_plan_moves_every_mapped_layer_and_token_exactly_once(case: TransferCase) -> None:
    for request in case.requests:
        moved: Counter[tuple[int, int, int]] = Counter()
        for window in case.plan(request).windows:
            for piece in window.pieces:
                tokens = range(piece.first_token, piece.first_token + piece.num_tokens)
                moved.update(
                    (piece.group, layer, piece.object_index * case.chunk_tokens + token)
                    for layer in range(piece.first_layer, piece.first_layer + piece.num_layers)
                    for token in tokens
                )
        expected = Counter(
            (group, layer, token)
            for group, cache in enumerate(case.caches)
            for layer in range(len(cache.layers))
            for token in range(request.skip_tokens, request.num_tokens)
            if request.block_ids[group][token // cache.block_tokens] != request.null_block
        )
        assert moved == expected


@given(transfer_cases())
def test_windows_keep_their_pieces_apart_and_within_the_budget(case: TransferCase) -> None:
    plan = case.plan(case.requests[0])
    assert plan.window_bytes * case.num_windows <= case.staging_bytes
    for window in plan.windows:
        end = 0
        for piece in window.pieces:
            assert piece.staging_offset == end
            token_bytes = case.layout.groups[piece.group].geometry.token_layer_bytes
            end += piece.num_layers * piece.num_tokens * token_bytes
        assert end == window.num_bytes <= plan.window_bytes


@given(transfer_cases())
def test_slices_complete_in_layer_order_each_with_its_last_window(case: TransferCase) -> None:
    plan = case.plan(case.requests[0])
    completed = [w.completes_slice for w in plan.windows if w.completes_slice is not None]
    assert completed == list(range(len(plan.slices)))
    assert plan.windows[-1].completes_slice == len(plan.slices) - 1
    current = 0
    for window in plan.windows:
        inside = range(plan.slices[current].first_layer, plan.slices[current].end_layer)
        for piece in window.pieces:
            held = case.caches[piece.group].layers[piece.first_layer : piece.first_layer + piece.num_layers]
            assert all(layer in inside for layer in held)
        current += window.completes_slice is not None


@given(transfer_cases())
def test_no_piece_cuts_a_block_that_it_could_have_moved_whole(case: TransferCase) -> None:
    request = case.requests[0]
    for window in case.plan(request).windows:
        for piece in window.pieces:
            start = piece.object_index * case.chunk_tokens + piece.first_token
            end = start + piece.num_tokens
            edges = {request.skip_tokens, request.num_tokens}
            size = case.caches[piece.group].block_tokens
            for token in (start, end):
                assert token % size == 0 or token in edges or token % case.chunk_tokens == 0


@given(transfer_cases())
def test_one_plan_a_slice_holds_the_windows_of_the_whole_plan(case: TransferCase) -> None:
    plan = case.plan(case.requests[0])
    parts = plan.per_slice()
    assert [part.slices for part in parts] == [(layers,) for layers in plan.slices]
    assert [w[:2] for part in parts for w in part.windows] == [w[:2] for w in plan.windows]
    assert all([w.completes_slice for w in part.windows] == [None] * (len(part.windows) - 1) + [0] for part in parts)


@given(transfer_cases())
def test_the_staging_budget_decides_windows_and_never_what_moves(case: TransferCase) -> None:
    generous = replace(case, staging_bytes=WHOLE)

    def moved(plan: TransferPlan) -> int:
        return sum(piece.num_layers * piece.num_tokens for window in plan.windows for piece in window.pieces)

    for request in case.requests:
        assert moved(case.plan(request)) == moved(generous.plan(request))
        assert case.plan(request).num_bytes == generous.plan(request).num_bytes


# ---------------------------------------------------------------- logical and kernel blocks


@pytest.mark.known_fault(62)
def test_a_logical_block_is_several_kernel_blocks() -> None:
    assert expand_block_ids([5, 2], logical_tokens=32, kernel_tokens=16) == (10, 11, 4, 5)


@pytest.mark.known_fault(61)
def test_ids_that_are_not_consecutive_stay_so() -> None:
    assert expand_block_ids([5, 11], logical_tokens=16, kernel_tokens=16) == (5, 11)


@pytest.mark.known_fault(71)
def test_a_block_of_1600_tokens_is_25_kernel_blocks_of_64() -> None:
    assert expand_block_ids([3], logical_tokens=1600, kernel_tokens=64) == tuple(range(75, 100))


@pytest.mark.parametrize("kernel_tokens", [0, 24, 64])
def test_a_logical_block_that_is_no_whole_number_of_kernel_blocks_is_refused(kernel_tokens: int) -> None:
    with pytest.raises(ValueError, match=re.escape("a logical block (32 tokens) must be a whole number of kernel b")):
        expand_block_ids([1], logical_tokens=32, kernel_tokens=kernel_tokens)


@pytest.mark.known_fault(62, 71)
@given(st.permutations(range(6)), st.integers(1, 4), st.integers(1, 3), st.integers(0, 24))
def test_expanded_ids_on_the_kernel_view_name_the_logical_views_tokens(
    ids: list[int], kernel_tokens: int, ratio: int, skip: int
) -> None:
    logical_tokens = kernel_tokens * ratio
    num_tokens = 4 * logical_tokens
    skip = min(skip, num_tokens)
    source = [[np.arange(num_tokens, dtype=np.uint8).reshape(1, 1, num_tokens, 1, 1) + 1]]
    logical = np.zeros((6, logical_tokens, 1, 1), np.uint8)
    kernel = np.zeros((6 * ratio, kernel_tokens, 1, 1), np.uint8)
    size = {"num_tokens": num_tokens, "chunk_tokens": num_tokens, "skip_tokens": skip}
    oracle.retrieve(source, [[[logical]]], [ids], **size)
    oracle.retrieve(source, [[[kernel]]], [expand_block_ids(ids, logical_tokens, kernel_tokens)], **size)
    np.testing.assert_array_equal(kernel.reshape(logical.shape), logical)


# ---------------------------------------------------------------- refused before the first byte

GOOD = TransferRequest(8, ((7, 3, 5, 1),))


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (replace(GOOD, skip_tokens=9), "skip_tokens must be between 0 and 8, got 9"),
        (replace(GOOD, skip_tokens=-1), "skip_tokens must be between 0 and 8, got -1"),
        (replace(GOOD, num_tokens=9), "9 tokens need 5 blocks of 2, got 4 block ids"),
        (replace(GOOD, block_ids=((7, 3, 10, 1),)), "block id 10 is outside the cache's 0 .. 9"),
        (replace(GOOD, block_ids=((7, -1, 5, 1),)), "block id -1 is outside the cache's 0 .. 9"),
        (replace(GOOD, block_ids=()), "the object has 1 kernel groups, got 1 caches and 0 block tables"),
    ],
)
def test_a_request_that_cannot_be_carried_out_is_refused_with_its_value(
    request_: TransferRequest, sentence: str
) -> None:
    for direction in Direction:
        with pytest.raises(ValueError, match=re.escape(sentence)):
            check_request(LAYOUT, [CACHE], request_, direction)


@pytest.mark.known_fault(58)
def test_more_skipped_than_held_is_refused_not_moved_backwards() -> None:
    with pytest.raises(ValueError, match="skip_tokens must be between 0 and 4, got 6"):
        check_request(LAYOUT, [CACHE], TransferRequest(4, ((0, 1),), skip_tokens=6), Direction.RETRIEVE)


def test_ids_of_tokens_that_are_skipped_or_beyond_the_end_are_never_looked_at() -> None:
    check_request(LAYOUT, [CACHE], TransferRequest(6, ((99, 4, 5, -3, 4),), skip_tokens=2), Direction.RETRIEVE)


@pytest.mark.known_fault(76)
def test_groups_may_have_caches_of_different_sizes_and_each_is_bounded_by_its_own() -> None:
    caches = (
        CacheCase((0,), 1, 1, 1, 1, num_blocks=8, block_tokens=2, axes="NTHD"),
        CacheCase((1,), 1, 1, 1, 1, num_blocks=4, block_tokens=4, axes="NTHD"),
    )
    arena = Arena.lay_out(caches, ObjectForm.TOKEN, 8, [1], seed=0)
    layout = ObjectLayout(tuple(cache.group(8) for cache in caches))
    engines = arena.engines(np.zeros(arena.engine_bytes, np.uint8))
    check_request(layout, engines, TransferRequest(8, ((7, 6, 5, 4), (3, 2))), Direction.RETRIEVE)
    with pytest.raises(ValueError, match=re.escape("block id 7 is outside the cache's 0 .. 3")):
        check_request(layout, engines, TransferRequest(8, ((7, 6, 5, 4), (7, 2))), Direction.RETRIEVE)
    with pytest.raises(ValueError, match="the object has 2 kernel groups, got 1 caches and 2 block tables"):
        check_request(layout, engines[:1], TransferRequest(8, ((7, 6, 5, 4), (3, 2))), Direction.RETRIEVE)


def test_a_cache_of_another_block_size_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="blocks of 2 tokens, its cache of 4: expand the block ids with expand_block"):
        check_request(LAYOUT, [replace(CACHE, block_tokens=4, block_stride=8)], GOOD, Direction.RETRIEVE)


BLOCK_LAYOUT = replace(LAYOUT, form=ObjectForm.BLOCK)


@pytest.mark.known_fault(53)
@pytest.mark.parametrize(
    ("wrong", "name", "value"),
    [(replace(GOOD, num_tokens=7), "num_tokens", 7), (replace(GOOD, skip_tokens=3), "skip_tokens", 3)],
)
def test_the_block_form_moves_whole_blocks_only(wrong: TransferRequest, name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"in block form {name} must be a multiple of 2, got {value}"):
        check_request(BLOCK_LAYOUT, [CACHE], wrong, Direction.RETRIEVE)


def test_the_block_form_refuses_blocks_with_gaps() -> None:
    gaps = replace(CACHE, token_stride=3, block_stride=6)
    with pytest.raises(ValueError, match="the block form needs engine blocks without gaps; use the token form"):
        check_request(BLOCK_LAYOUT, [gaps], GOOD, Direction.RETRIEVE)


@pytest.mark.parametrize("form", ObjectForm)
def test_a_budget_smaller_than_one_window_is_refused_with_the_least_that_would_do(form: ObjectForm) -> None:
    layout = replace(LAYOUT, form=form)
    least = 3 * 2 * 4  # three windows of one block of two tokens of four bytes
    plan_layer_major(layout, GOOD, 1, least, num_windows=3)
    with pytest.raises(
        ValueError, match=re.escape(f"staging_bytes must be at least {least} (3 windows of one block of one layer)")
    ):
        plan_layer_major(layout, GOOD, 1, least - 1, num_windows=3)


def test_one_window_is_refused_because_nothing_could_overlap() -> None:
    with pytest.raises(ValueError, match="num_windows must be at least 2, got 1"):
        plan_chunk_major(LAYOUT, GOOD, WHOLE, num_windows=1)
