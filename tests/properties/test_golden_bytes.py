"""Expected bytes written out by hand, so that no code of ours can be wrong on both sides.

Keys of token t are written `1t` (a second head's `3t`, a second layer's `5t`), values `2t` (`4t`, `6t`); a byte that
nothing names is `ee`. Memory is written as it lies, blocks apart by a bar; elements are one byte. Three tokens of one
chunk of three go to blocks of two by the table [1, 0]: tokens 0 and 1 to block 1, token 2 to block 0.
"""

from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from lamella.cuda_ext.trial import NamedMove
from lamella.reference.geometry import KVGeometry, ObjectForm
from lamella.reference.laws import Transfer
from lamella.reference.layout import KernelGroup, ObjectLayout, TensorView, engine_layout
from lamella.reference.plan import Direction, TransferRequest, plan_layer_major
from moves import MOVES


class Golden(NamedTuple):
    """One kernel group: sizes, the engine's view, and both sides of the transfer in hexadecimal."""

    kv: int
    heads: int
    head_dim: int
    axes: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    object_bytes: str
    tensors: tuple[str, ...]
    separate_kv: bool = False
    layers: int = 1
    chunk_tokens: int = 3
    tokens: int = 3
    form: ObjectForm = ObjectForm.TOKEN


ONE_HEAD = "10 11 12  20 21 22"
"""`[K, L, T, D]`: keys of tokens 0, 1, 2, then values."""
TWO_HEADS = "10 30  11 31  12 32    20 40  21 41  22 42"
"""As above, both heads of a token together."""
PACKED = "10 20 30 40  11 21 31 41  12 22 32 42"
"""`[1, L, T, H * 2 * head]`: key and value of a head together."""

GOLDEN = {
    "[2, NB, BS, H, D]": Golden(
        2, 1, 1, "KNTHD", (2, 2, 2, 1, 1), (4, 2, 1, 1, 1), ONE_HEAD, ("12 ee | 10 11    22 ee | 20 21",)
    ),
    "[NB, 2, BS, H, D]": Golden(
        2, 1, 1, "NKTHD", (2, 2, 2, 1, 1), (4, 2, 1, 1, 1), ONE_HEAD, ("12 ee 22 ee | 10 11 20 21",)
    ),
    "[2, NB, BS, H, D], two heads": Golden(
        2, 2, 1, "KNTHD", (2, 2, 2, 2, 1), (8, 4, 2, 1, 1), TWO_HEADS,
        ("12 32 ee ee | 10 30 11 31    22 42 ee ee | 20 40 21 41",),
    ),
    "[2, NB, H, BS, D]": Golden(
        2, 2, 1, "KNHTD", (2, 2, 2, 2, 1), (8, 4, 2, 1, 1), TWO_HEADS,
        ("12 ee 32 ee | 10 11 30 31    22 ee 42 ee | 20 21 40 41",),
    ),
    "[NB, 2, H, BS, D]": Golden(
        2, 2, 1, "NKHTD", (2, 2, 2, 2, 1), (8, 4, 2, 1, 1), TWO_HEADS,
        ("12 ee 32 ee 22 ee 42 ee | 10 11 30 31 20 21 40 41",),
    ),
    "keys and values in tensors of their own": Golden(
        2, 2, 1, "NTHD", (2, 2, 2, 1), (4, 2, 1, 1), TWO_HEADS,
        ("12 32 ee ee | 10 30 11 31", "22 42 ee ee | 20 40 21 41"), separate_kv=True,
    ),
    "vLLM packed (NB, H, BS, 2 * D), HND strides as on a CPU": Golden(
        1, 2, 2, "NHTD", (2, 2, 2, 2), (8, 4, 2, 1), PACKED,
        ("12 22 ee ee 32 42 ee ee | 10 20 11 21 30 40 31 41",),
    ),
    "vLLM packed (NB, H, BS, 2 * D), NHD strides as on an H200": Golden(
        1, 2, 2, "NHTD", (2, 2, 2, 2), (8, 2, 4, 1), PACKED,
        ("12 22 32 42 ee ee ee ee | 10 20 30 40 11 21 31 41",),
    ),
    "vLLM packed, keys and values split into two runs of the object": Golden(
        2, 2, 1, "KNHTD", (2, 2, 2, 2, 1), (1, 8, 2, 4, 1), TWO_HEADS,
        ("12 22 32 42 ee ee ee ee | 10 20 30 40 11 21 31 41",),
    ),
    "MLA [NB, BS, C], two layers": Golden(
        1, 1, 2, "NTD", (2, 2, 2), (4, 2, 1), "10 20  11 21  12 22    50 60  51 61  52 62",
        ("12 22 ee ee | 10 20 11 21", "52 62 ee ee | 50 60 51 61"), layers=2,
    ),
    "cross-layer [NB, L, 2, BS, H, D]": Golden(
        2, 1, 1, "NLKTHD", (2, 2, 2, 2, 1, 1), (8, 4, 2, 1, 1, 1), "10 11 12  50 51 52    20 21 22  60 61 62",
        ("12 ee 22 ee  52 ee 62 ee | 10 11 20 21  50 51 60 61",), layers=2,
    ),
    "every other row of a larger tensor, blocks backwards": Golden(
        1, 1, 1, "NTHD", (2, 2, 1, 1), (-4, 2, 1, 1), "10 11 12", ("10 ee 11 ee | 12 ee ee ee",)
    ),
    "block form: the engine's own blocks, HND": Golden(
        1, 2, 1, "NHTD", (2, 2, 2, 1), (4, 2, 1, 1), "10 11 30 31 | 12 13 32 33", ("12 13 32 33 | 10 11 30 31",),
        chunk_tokens=4, tokens=4, form=ObjectForm.BLOCK,
    ),
    "block form: keys and values of a block one after the other": Golden(
        2, 1, 1, "KNTHD", (2, 2, 2, 1, 1), (4, 2, 1, 1, 1), "10 11 20 21 | 12 13 22 23",
        ("12 13 | 10 11    22 23 | 20 21",), chunk_tokens=4, tokens=4, form=ObjectForm.BLOCK,
    ),
}  # fmt: skip


def _memory(written: str) -> NDArray[np.uint8]:
    return np.frombuffer(bytearray.fromhex(written.replace("|", "")), dtype=np.uint8)


def _written(memory: NDArray[np.uint8]) -> str:
    return memory.tobytes().hex(" ")


def _carry_out(
    golden: Golden,
    direction: Direction,
    host: NDArray[np.uint8],
    storages: list[NDArray[np.uint8]],
    named: NamedMove,
    width: int,
) -> None:
    geometry = KVGeometry(golden.layers, golden.kv, golden.heads, golden.head_dim, 1, golden.chunk_tokens)
    layout = ObjectLayout.single(geometry, 2, golden.form)
    # Of a negative stride the first element is the last in memory.
    first = sum(max(0, -stride) * (size - 1) for size, stride in zip(golden.shape, golden.strides, strict=True))
    views = [TensorView(int(storage.ctypes.data) + first, golden.shape, golden.strides, 1) for storage in storages]
    tensors = list(zip(views[::2], views[1::2], strict=True)) if golden.separate_kv else views
    plan = plan_layer_major(layout, TransferRequest(golden.tokens, ((1, 0),)), width, staging_bytes=64)
    engines = (engine_layout(golden.axes, tensors),)
    named.move(Transfer(plan, engines, (int(host.ctypes.data),), None, 0, direction))


@pytest.mark.known_fault(67, 73)
@pytest.mark.parametrize("named", MOVES, ids=lambda named: named.name)
@pytest.mark.parametrize("golden", GOLDEN.values(), ids=GOLDEN)
def test_a_retrieve_leaves_the_bytes_written_here(golden: Golden, named: NamedMove) -> None:
    for width in range(1, golden.layers + 1):
        host = _memory(golden.object_bytes)
        storages = [np.full_like(_memory(tensor), 0xEE) for tensor in golden.tensors]
        _carry_out(golden, Direction.RETRIEVE, host, storages, named, width)
        assert [_written(storage) for storage in storages] == [_written(_memory(t)) for t in golden.tensors]
        assert _written(host) == _written(_memory(golden.object_bytes))


@pytest.mark.parametrize("named", MOVES, ids=lambda named: named.name)
@pytest.mark.parametrize("golden", GOLDEN.values(), ids=GOLDEN)
def test_a_store_leaves_the_bytes_written_here(golden: Golden, named: NamedMove) -> None:
    for width in range(1, golden.layers + 1):
        host = np.full_like(_memory(golden.object_bytes), 0xEE)
        storages = [_memory(tensor) for tensor in golden.tensors]
        _carry_out(golden, Direction.STORE, host, storages, named, width)
        assert _written(host) == _written(_memory(golden.object_bytes))
        assert [_written(storage) for storage in storages] == [_written(_memory(t)) for t in golden.tensors]


@pytest.mark.known_fault(68)
@pytest.mark.parametrize("named", MOVES, ids=lambda named: named.name)
def test_a_second_kernel_group_begins_at_byte_256_and_has_its_own_table_and_head_size(named: NamedMove) -> None:
    # Layer 0: one head of one byte; layer 1: one head of two; chunks of two tokens, blocks of two and of one.
    layout = ObjectLayout(
        (
            KernelGroup(KVGeometry(1, 1, 1, 1, 1, 2), (0,), 2),
            KernelGroup(KVGeometry(1, 1, 1, 2, 1, 2), (1,), 1),
        )
    )
    host = np.full(260, 0x99, np.uint8)
    host[:2] = 0x10, 0x11
    host[256:] = 0x50, 0x60, 0x51, 0x61
    first, second = np.full(4, 0xEE, np.uint8), np.full(6, 0xEE, np.uint8)
    engines = (
        engine_layout("NTD", [TensorView(int(first.ctypes.data), (2, 2, 1), (2, 1, 1), 1)]),
        engine_layout("NTD", [TensorView(int(second.ctypes.data), (3, 1, 2), (2, 2, 1), 1)]),
    )
    plan = plan_layer_major(layout, TransferRequest(2, ((1,), (2, 0))), 1, staging_bytes=64)
    named.move(Transfer(plan, engines, (int(host.ctypes.data),), None, 0, Direction.RETRIEVE))
    assert _written(first) == "ee ee 10 11"
    assert _written(second) == "51 61 ee ee 50 60"
