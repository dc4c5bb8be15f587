"""The kernels' own code, launched on host memory, against the oracle.

`lm_cpu_scatter` and `lm_cpu_move_mapped` run, thread by thread, what the CUDA kernels run: item arithmetic, vector
widths and address rules. What is left for a GPU is the grid.
"""

import ctypes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella.cuda_ext import _library
from lamella.cuda_ext._native import NativeRequest, host_objects_struct
from lamella.cuda_ext.executors import HostObjects
from lamella.reference.laws import Move, Transfer, TransferCase, Trial
from lamella.reference.plan import Direction, Piece, TransferRequest
from native_build import NATIVE_MISSING
from strategies import transfer_cases

pytestmark = pytest.mark.skipif(NATIVE_MISSING is not None, reason=str(NATIVE_MISSING))


def piece_structs(transfer: Transfer, pieces: tuple[Piece, ...], *, default: bool) -> ctypes.Array[ctypes.Structure]:
    """The pieces as launches; with `default`, those of every layer by the default selector (0, 0)."""
    structs = (_library.PieceStruct * len(pieces))(*(_library.PieceStruct(*piece) for piece in pieces))
    for struct in structs:
        if default and struct.num_layers == transfer.plan.layout.groups[struct.group].geometry.num_layers:
            struct.num_layers = 0
    return structs


def by_scatter(*, default: bool) -> Move:
    """Windows filled and emptied by plain copies of the object's ranges, scattered by the kernels' code."""

    def move(transfer: Transfer) -> None:
        library = _library.cpu_library()
        request = NativeRequest(transfer.plan, transfer.direction, transfer.engines)
        memory = ctypes.create_string_buffer(transfer.plan.window_bytes + 16)
        staging = -(-ctypes.addressof(memory) // 16) * 16
        for window in transfer.plan.windows:
            if transfer.direction is Direction.RETRIEVE:
                copy_ranges(transfer, window.pieces, staging)
            structs = piece_structs(transfer, window.pieces, default=default)
            _library.check(library, library.lm_cpu_scatter(request.struct, structs, len(structs), staging))
            if transfer.direction is Direction.STORE:
                copy_ranges(transfer, window.pieces, staging)

    return move


def copy_ranges(transfer: Transfer, pieces: tuple[Piece, ...], staging: int) -> None:
    for piece in pieces:
        image = staging + piece.staging_offset
        for offset, num_bytes in transfer.plan.layout.ranges(*piece[1:6]):
            host = transfer.object_addresses[piece.object_index] + offset
            ends = (image, host) if transfer.direction is Direction.RETRIEVE else (host, image)
            ctypes.memmove(*ends, num_bytes)
            image += num_bytes


def by_mapped(transfer: Transfer) -> None:
    library = _library.cpu_library()
    request = NativeRequest(transfer.plan, transfer.direction, transfer.engines)
    objects = host_objects_struct(HostObjects(transfer.object_addresses))
    for window in transfer.plan.windows:
        structs = piece_structs(transfer, window.pieces, default=True)
        _library.check(library, library.lm_cpu_move_mapped(request.struct, structs, len(structs), objects))


@given(case=transfer_cases())
def test_a_scatter_launch_leaves_exactly_the_oracles_bytes(case: TransferCase) -> None:
    difference = Trial(case).run(by_scatter(default=False))
    assert difference is None, str(difference)


@given(case=transfer_cases())
def test_the_default_selector_is_the_same_launch_as_an_explicit_one_of_all_layers(case: TransferCase) -> None:
    difference = Trial(case).run(by_scatter(default=True))
    assert difference is None, str(difference)


@given(case=transfer_cases())
def test_a_launch_that_reads_mapped_objects_leaves_exactly_the_oracles_bytes(case: TransferCase) -> None:
    difference = Trial(case).run(by_mapped)
    assert difference is None, str(difference)


@given(case=transfer_cases(Direction.RETRIEVE), data=st.data())
def test_a_launch_refuses_a_piece_outside_its_request(case: TransferCase, data: st.DataObject) -> None:
    def move(transfer: Transfer) -> None:
        library = _library.cpu_library()
        request = NativeRequest(transfer.plan, transfer.direction, transfer.engines)
        for piece in (piece for window in transfer.plan.windows for piece in window.pieces):
            field, value = data.draw(
                st.sampled_from(
                    [
                        ("object_index", -1),
                        ("object_index", transfer.plan.request.num_tokens),
                        ("group", len(transfer.engines)),
                        ("first_layer", piece.first_layer + transfer.engines[piece.group].num_layers),
                        ("num_layers", transfer.engines[piece.group].num_layers - piece.first_layer + 1),
                        ("num_tokens", 0),
                        ("num_tokens", transfer.plan.layout.chunk_tokens + 1),
                        ("staging_offset", -1),
                    ]
                )
            )
            wrong = (_library.PieceStruct * 1)(_library.PieceStruct(*piece._replace(**{field: value})))
            with pytest.raises(ValueError, match="piece"):
                _library.check(library, library.lm_cpu_scatter(request.struct, wrong, 1, 1))

    Trial(case).run(move)


def test_a_launch_of_wide_rows_moves_them_with_several_threads_and_vectors_each() -> None:
    from lamella.reference.arena import CacheCase
    from lamella.reference.geometry import ObjectForm

    # 16-byte vectors where seed and layout align them, several for each of 32 threads.
    for axes, heads in (("KNTHD", 9), ("KNHTD", 9), ("NTKHD", 16)):
        cache = CacheCase((0, 1, 2), 2, heads, 128, 2, 6, 4, axes)
        request = TransferRequest(21, ((3, 1, 5, 0, 2, 4),), 2)
        for seed in range(4):
            case = TransferCase((cache,), ObjectForm.TOKEN, 8, (request,), Direction.RETRIEVE, 2, 1 << 20, seed=seed)
            for move in (by_scatter(default=True), by_mapped):
                difference = Trial(case).run(move)
                assert difference is None, str(difference)
