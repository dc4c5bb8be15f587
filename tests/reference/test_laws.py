"""The laws themselves: they accept what is right, and each kind of wrong executor is found, and found at its place."""

import ctypes
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella.reference.arena import Arena, CacheCase, Place
from lamella.reference.geometry import ObjectForm
from lamella.reference.laws import Move, Transfer, TransferCase, Trial, check, check_landing, check_round_trip
from lamella.reference.plan import Direction, TransferRequest
from moves import MOVES
from strategies import transfer_cases

RIGHT = MOVES[0].move
CASE = TransferCase(
    caches=(
        CacheCase((0, 1, 2, 3), 2, 2, 3, 2, 8, 2, "KNTHD", "NKHTD", (1, 1, 1, 1, 1), (1, 0, 0, 0, 1)),
        CacheCase((1, 3), 1, 1, 4, 1, 8, 4, "NTD"),
    ),
    form=ObjectForm.TOKEN,
    chunk_tokens=6,
    requests=(TransferRequest(11, ((5, 1, 3, 0, 2, 7), (4, 2, 6)), skip_tokens=1),),
    direction=Direction.RETRIEVE,
    width=2,
    staging_bytes=1 << 12,
)


def _breaking(byte: Callable[[Transfer], int]) -> Move:
    """The right executor, but one byte is flipped afterwards."""

    def move(transfer: Transfer) -> None:
        RIGHT(transfer)
        ctypes.c_uint8.from_address(byte(transfer)).value ^= 0x55

    return move


def _cell(transfer: Transfer) -> int:
    return transfer.engines[0].address(layer=2, kv=1, block=3, token=1, head=1, dim=2)


def test_a_wrong_byte_is_named_by_layer_kv_block_token_head_and_dim() -> None:
    found = check(CASE, _breaking(_cell))
    assert found is not None
    assert found.place == Place("engine", 0, 2, 1, 3, 1, 1, 2)
    assert str(found).startswith("1 bytes differ, first at engine group 0 layer 2 kv 1 block 3 token 1 head 1 dim 2: ")
    assert found.expected ^ found.found == 0x55


def test_a_wrong_byte_of_an_object_is_named_by_chunk_and_token() -> None:
    case = replace(CASE, direction=Direction.STORE)
    layer_bytes = 6 * 2 * 3 * 2

    def byte(transfer: Transfer) -> int:
        return transfer.object_addresses[1] + 4 * layer_bytes + 3 * layer_bytes + 2 * 12 + 7

    found = check(case, _breaking(byte))
    assert found is not None
    assert found.place == Place("request 0's object", 0, 3, 1, 1, 2, 1, 0)


def test_a_changed_source_is_found() -> None:
    found = check(CASE, _breaking(lambda transfer: transfer.object_addresses[0] + 300))
    assert found is not None
    assert found.buffer == "host"


def test_a_byte_between_an_objects_groups_belongs_to_nobody_and_is_watched() -> None:
    case = replace(CASE, direction=Direction.STORE)
    used = 2 * 4 * 6 * 12  # of the first group; the second begins at the next multiple of 256
    found = check(case, _breaking(lambda transfer: transfer.object_addresses[0] + used))
    assert found is not None
    assert found.place is None
    assert "which belongs to no element" in str(found)


def test_a_margin_of_a_padded_tensor_is_watched() -> None:
    found = check(CASE, _breaking(lambda t: t.engines[0].address(0, 0, 5, 0, 0, 2) + 2))
    assert found is not None
    assert found.place is None


def test_an_executor_that_does_nothing_is_found() -> None:
    found = check(CASE, lambda transfer: None)
    assert found is not None
    assert found.found & 0x80, "the destination's poison is still there"
    assert not found.expected & 0x80


def test_the_round_trip_finds_a_wrong_store_and_a_wrong_retrieve() -> None:
    def store_wrong(transfer: Transfer) -> None:
        RIGHT(transfer)
        if transfer.direction is Direction.STORE:
            ctypes.memset(transfer.object_addresses[1], 0x11, 20)

    def retrieve_wrong(transfer: Transfer) -> None:
        (_breaking(_cell) if transfer.direction is Direction.RETRIEVE else RIGHT)(transfer)

    assert check_round_trip(CASE, RIGHT) is None
    assert check_round_trip(CASE, store_wrong) is not None
    assert check_round_trip(CASE, retrieve_wrong) is not None


def test_landing_finds_slices_reported_early_late_or_not_at_all() -> None:
    assert check_landing(CASE, RIGHT) is None

    def early(transfer: Transfer) -> None:
        assert transfer.on_slice is not None
        for index in range(len(transfer.plan.slices)):
            transfer.on_slice(index)
        RIGHT(transfer._replace(on_slice=None))

    def late(transfer: Transfer) -> None:
        assert transfer.on_slice is not None
        RIGHT(transfer._replace(on_slice=None))
        for index in range(len(transfer.plan.slices)):
            transfer.on_slice(index)

    assert check_landing(CASE, early) == "slice 0 reported: layer 0 of group 0, kv 0 has not landed"
    assert check_landing(CASE, late) == "slice 0 reported: layer 2 of group 0, kv 0 has moved already"
    silent = check_landing(CASE, lambda transfer: RIGHT(transfer._replace(on_slice=None)))
    assert silent == "slices reported as [], the plan has 2"


def test_a_trial_runs_again_from_the_same_bytes_whatever_the_last_run_left() -> None:
    trial = Trial(CASE)
    assert trial.run(_breaking(_cell)) is not None
    assert trial.run(RIGHT) is None
    wider = trial.moved_as(replace(CASE, width=4))
    assert wider.run(lambda transfer: None) is not None
    assert wider.run(RIGHT) is None
    assert trial.run(RIGHT) is None


def test_requests_take_turns_slice_by_slice() -> None:
    request = TransferRequest(4, ((0, 1), (0,)))
    case = replace(CASE, width=1, requests=(request, replace(request, block_ids=((2, 3), (1,)))), turns=(1, 0, 1))
    order = [(index, plan.slices[0].first_layer) for index, plan in case.in_turns()]
    assert order == [(1, 0), (0, 0), (1, 1), (0, 1), (0, 2), (0, 3), (1, 2), (1, 3)]


def test_a_case_that_is_no_legal_transfer_is_refused() -> None:
    twice = replace(CASE, requests=(TransferRequest(4, ((5, 5), (4,))),))
    with pytest.raises(ValueError, match="block 5 would be written twice"):
        Trial(twice)
    with pytest.raises(ValueError, match="block 5 would be written twice"):
        check_round_trip(replace(twice, direction=Direction.STORE), RIGHT)
    Trial(replace(twice, direction=Direction.STORE))
    with pytest.raises(ValueError, match="staging_bytes must be at least 96"):
        Trial(replace(CASE, staging_bytes=95))


@given(transfer_cases(max_requests=2))
def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(case: TransferCase) -> None:
    first, again, other = Trial(case), Trial(case), Trial(replace(case, seed=case.seed + 1))
    np.testing.assert_array_equal(first.expected, again.expected)
    assert first.arena == again.arena
    assert first.source.tobytes() != other.source.tobytes()


@given(transfer_cases(), st.data())
def test_every_element_is_found_again_by_its_address(case: TransferCase, data: st.DataObject) -> None:
    objects = [-(-request.num_tokens // case.chunk_tokens) for request in case.requests]
    arena = Arena.lay_out(case.caches, case.form, case.chunk_tokens, objects, case.seed)
    engine, host = np.zeros(arena.engine_bytes, np.uint8), np.zeros(arena.host_bytes, np.uint8)
    group = data.draw(st.integers(0, len(case.caches) - 1))
    cache = case.caches[group]
    own = data.draw(st.integers(0, len(cache.layers) - 1))
    kv = data.draw(st.integers(0, cache.kv - 1))
    plane = arena.planes(engine)[group][own][kv]
    index = tuple(data.draw(st.integers(0, size - 1)) for size in plane.shape)
    byte = data.draw(st.integers(0, cache.element_bytes - 1))
    element = plane[tuple(slice(i, i + 1) for i in index)]
    place = arena.place_in_engine(element.ctypes.data - engine.ctypes.data + byte, engine)
    assert place == Place("engine", group, cache.layers[own], kv, *index)
    if objects[0]:
        chunk = data.draw(st.integers(0, objects[0] - 1))
        token = data.draw(st.integers(0, case.chunk_tokens - 1))
        array = arena.objects(host, 0)[chunk][group]
        at = (kv, own, token) if case.form is ObjectForm.TOKEN else (
            own, token // cache.block_tokens, kv, token % cache.block_tokens
        )  # fmt: skip
        element = array[tuple(slice(i, i + 1) for i in (*at, 0, 0))]
        place = arena.place_in_host(element.ctypes.data - host.ctypes.data + byte, host)
        assert place == Place("request 0's object", group, cache.layers[own], kv, chunk, token, 0, 0)


@given(transfer_cases(max_requests=2))
def test_tensors_and_objects_share_no_byte_and_leave_room_around_them(case: TransferCase) -> None:
    objects = [-(-request.num_tokens // case.chunk_tokens) for request in case.requests]
    arena = Arena.lay_out(case.caches, case.form, case.chunk_tokens, objects, case.seed)
    spans = [
        sorted(
            (at, at + cache.tensor_bytes)
            for cache, places in zip(case.caches, arena.tensor_offsets, strict=True)
            for at in places
        ),
        sorted((at, at + case.layout.object_bytes) for places in arena.object_offsets for at in places),
    ]
    for found, size in zip(spans, (arena.engine_bytes, arena.host_bytes), strict=True):
        edges = [0, *(edge for span in found for edge in span), size]
        assert all(before < after for before, after in zip(edges[::2], edges[1::2], strict=True))
        assert edges == sorted(edges)
