"""Executors on small transfers that a reader can follow; the laws are in tests/properties."""

import ctypes
import logging
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from lamella.cuda_ext import _library, executors
from lamella.cuda_ext._native import NativeRequest, host_objects_struct
from lamella.cuda_ext.executors import (
    Executor,
    HostObjects,
    Method,
    NativeExecutor,
    NumpyExecutor,
    choose_executor,
    expand_natively,
)
from lamella.reference.geometry import KVGeometry, ObjectForm
from lamella.reference.layout import EngineLayout, ObjectLayout, TensorView, engine_layout
from lamella.reference.plan import Direction, TransferPlan, TransferRequest, plan_layer_major
from native_build import NATIVE_MISSING

needs_native = pytest.mark.skipif(NATIVE_MISSING is not None, reason=str(NATIVE_MISSING))

GEOMETRY = KVGeometry(num_layers=3, kv=2, num_heads=2, head_dim=4, element_bytes=2, chunk_tokens=8)
BLOCK_TOKENS = 4
NUM_BLOCKS = 6


class Memory:
    """Three layers `[2, NB, BS, H, D]` full of 9s, and two objects that count up from 0."""

    def __init__(self) -> None:
        shape = (GEOMETRY.kv, NUM_BLOCKS, BLOCK_TOKENS, GEOMETRY.num_heads, GEOMETRY.head_dim)
        self.cache = np.full((GEOMETRY.num_layers, *shape), 9, dtype=np.uint16)
        size = 2 * GEOMETRY.object_bytes // 2
        self.host = np.arange(1000, 1000 + size, dtype=np.uint16)
        self.layout = ObjectLayout.single(GEOMETRY, BLOCK_TOKENS)

    @property
    def engine(self) -> EngineLayout:
        return engine_layout("KNTHD", [TensorView(t.ctypes.data, t.shape, t.strides, 2) for t in self.cache])

    @property
    def objects(self) -> HostObjects:
        start = int(self.host.ctypes.data)
        return HostObjects((start, start + GEOMETRY.object_bytes))

    def object(self, chunk: int) -> NDArray[np.uint16]:
        return self.host.reshape(2, 2, 3, 8, 2, 4)[chunk]  # [K, L, T, H, D]

    def plan(self, request: TransferRequest, width: int = 1) -> TransferPlan:
        return plan_layer_major(self.layout, request, width, staging_bytes=1 << 20)


def every_executor() -> list[Executor]:
    native: list[Executor] = [] if NATIVE_MISSING else [NativeExecutor(1), NativeExecutor(2)]
    return [NumpyExecutor(), *native]


each_executor = pytest.mark.parametrize("executor", every_executor(), ids=lambda executor: executor.name)
each_method = pytest.mark.parametrize("method", Method, ids=lambda method: method.value)


@pytest.mark.known_fault(61)
@each_executor
@each_method
def test_a_token_lands_where_its_block_says_and_nowhere_else(executor: Executor, method: Method) -> None:
    memory = Memory()
    request = TransferRequest(num_tokens=10, block_ids=((4, 0, 2),), skip_tokens=5)
    executor.run(memory.plan(request), [memory.engine], memory.objects, Direction.RETRIEVE, method=method)
    expected = np.full_like(memory.cache, 9)  # [L, K, N, BS, H, D]
    for layer in range(3):
        for kv in range(2):
            expected[layer, kv, 0, 1:4] = memory.object(0)[kv, layer, 5:8]
            expected[layer, kv, 2, 0:2] = memory.object(1)[kv, layer, 0:2]
    np.testing.assert_array_equal(memory.cache, expected)


@each_executor
@each_method
def test_a_store_fills_only_the_stored_tokens_of_the_objects(executor: Executor, method: Method) -> None:
    memory = Memory()
    memory.cache[...] = np.arange(memory.cache.size, dtype=np.uint16).reshape(memory.cache.shape)
    expected = memory.host.copy().reshape(2, 2, 3, 8, 2, 4)
    for layer in range(3):
        for kv in range(2):
            expected[0, kv, layer, 0:4] = memory.cache[layer, kv, 5]
            expected[0, kv, layer, 4:6] = memory.cache[layer, kv, 3, 0:2]
    request = TransferRequest(num_tokens=6, block_ids=((5, 3),))
    executor.run(memory.plan(request), [memory.engine], memory.objects, Direction.STORE, method=method)
    np.testing.assert_array_equal(memory.host, expected.reshape(-1))


@each_executor
def test_an_empty_request_completes_every_slice_and_moves_nothing(executor: Executor) -> None:
    memory = Memory()
    landed: list[int] = []
    plan = memory.plan(TransferRequest(num_tokens=8, block_ids=((0, 1),), skip_tokens=8))
    executor.run(plan, [memory.engine], HostObjects((0,)), Direction.RETRIEVE, on_slice=landed.append)
    assert landed == [0, 1, 2]
    assert (memory.cache == 9).all()


@each_executor
def test_an_exception_in_on_slice_reaches_the_caller(executor: Executor) -> None:
    def refuse(index: int) -> None:
        raise LookupError(f"slice {index}")

    memory = Memory()
    plan = memory.plan(TransferRequest(num_tokens=8, block_ids=((0, 1),)))
    with pytest.raises(LookupError, match="slice 0"):
        executor.run(plan, [memory.engine], memory.objects, Direction.RETRIEVE, on_slice=refuse)


@pytest.mark.known_fault(66, 76)
@each_executor
@pytest.mark.parametrize(
    ("block_ids", "addresses", "message"),
    [
        ((1, 1), 2, "block 1 would be written twice"),
        ((1, 6), 2, "block id 6 is outside the cache's 0 .. 5"),
        ((1,), 2, "8 tokens need 2 blocks of 4, got 1"),
        ((1, 2), 0, "chunk 0 has no object|need 1 objects"),
    ],
)
def test_what_cannot_be_moved_is_refused_before_the_first_byte(
    executor: Executor, block_ids: tuple[int, ...], addresses: int, message: str
) -> None:
    memory = Memory()
    plan = replace(memory.plan(TransferRequest(8, ((0, 1),))), request=TransferRequest(8, (block_ids,)))
    objects = HostObjects(memory.objects.addresses[:addresses])
    with pytest.raises(ValueError, match=message):
        executor.run(plan, [memory.engine], objects, Direction.RETRIEVE)
    assert (memory.cache == 9).all()


@needs_native
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r, o, p: setattr(p, "threads", 0), "threads must be between 1 and 1024, got 0"),
        (lambda r, o, p: setattr(p, "method", 7), "method must be LM_DIRECT or LM_STAGED, got 7"),
        (lambda r, o, p: setattr(p, "staging", 1), "staging must hold a window of 768 bytes, got 0"),
        (lambda r, o, p: setattr(r, "form", 2), "form is out of range: got 2"),
        (lambda r, o, p: setattr(r, "direction", -1), "direction is out of range: got -1"),
        (lambda r, o, p: setattr(r, "chunk_tokens", 0), "chunk_tokens is out of range: got 0"),
        (lambda r, o, p: setattr(r, "skip_tokens", 9), "skip_tokens is out of range: got 9"),
        (lambda r, o, p: setattr(r, "window_bytes", 1), "window_bytes must be at least 128"),
        (lambda r, o, p: setattr(r, "num_tokens", 13), "13 tokens need 4 blocks of 4, got 2 block ids"),
        (lambda r, o, p: setattr(r, "num_slices", 0), "num_slices is out of range: got 0"),
        (lambda r, o, p: setattr(r.groups[0], "kv", 3), "kv is out of range: got 3"),
        (lambda r, o, p: setattr(r.groups[0], "element_bytes", 3), "element_bytes is out of range: got 3"),
        (lambda r, o, p: setattr(r.groups[0], "num_blocks", 0), "kernel group 0 has no cache"),
        (lambda r, o, p: setattr(r.groups[0], "num_blocks", 1), "block id 1 is outside the cache's 0 .. 0"),
        (lambda r, o, p: setattr(o, "num_objects", 0), "8 tokens need 1 objects of 8, got 0"),
        (lambda r, o, p: setattr(o, "registered_piece_bytes", -1), "registered_piece_bytes must not be negative"),
        (
            lambda r, o, p: (setattr(o, "registered_piece_bytes", 64), setattr(o, "registered_base", 2**63)),
            "lies before registered_base",
        ),
    ],
)
def test_the_c_boundary_trusts_no_size(change: object, message: str) -> None:
    assert callable(change)
    memory = Memory()
    request = NativeRequest(memory.plan(TransferRequest(8, ((0, 1),))), Direction.RETRIEVE, [memory.engine])
    objects = host_objects_struct(memory.objects)
    options = _library.CpuOptionsStruct(method=1, threads=1)
    change(request.struct, objects, options)
    library = _library.cpu_library()
    with pytest.raises(ValueError, match=message):
        _library.check(library, library.lm_cpu_execute(request.struct, objects, options))
    assert (memory.cache == 9).all()


@needs_native
def test_the_block_form_of_a_cache_with_gaps_is_refused_by_native_code_too() -> None:
    memory = Memory()
    layout = ObjectLayout.single(GEOMETRY, BLOCK_TOKENS, ObjectForm.BLOCK)
    plan = plan_layer_major(layout, TransferRequest(8, ((0, 1),)), 1, staging_bytes=1 << 20)
    request = NativeRequest(plan, Direction.RETRIEVE, [replace(memory.engine, token_stride=32, block_stride=1024)])
    library = _library.cpu_library()
    with pytest.raises(ValueError, match="needs engine blocks without gaps"):
        _library.check(
            library,
            library.lm_cpu_execute(
                request.struct, host_objects_struct(memory.objects), _library.CpuOptionsStruct(threads=1)
            ),
        )


@needs_native
def test_a_staged_transfer_without_staging_memory_allocates_its_own() -> None:
    memory, other = Memory(), Memory()
    plan = memory.plan(TransferRequest(8, ((0, 1),)))
    request = NativeRequest(plan, Direction.RETRIEVE, [memory.engine])
    library = _library.cpu_library()
    options = _library.CpuOptionsStruct(method=1, threads=1)
    _library.check(library, library.lm_cpu_execute(request.struct, host_objects_struct(memory.objects), options))
    NumpyExecutor().run(plan, [other.engine], other.objects, Direction.RETRIEVE)
    np.testing.assert_array_equal(memory.cache, other.cache)


@needs_native
def test_the_native_planner_answers_with_sizes_however_small_the_arrays_are() -> None:
    plan = Memory().plan(TransferRequest(16, ((0, 1, 2, 3),)))
    request = NativeRequest(plan, Direction.RETRIEVE)
    library = _library.cpu_library()
    pieces, windows = (_library.PieceStruct * 1)(), (_library.WindowStruct * 0)()
    num_pieces, num_windows = ctypes.c_int64(), ctypes.c_int64()
    _library.check(library, library.lm_plan(request.struct, pieces, 1, windows, 0, num_pieces, num_windows))
    assert (num_pieces.value, num_windows.value) == (6, 3)
    assert expand_natively(plan).pieces[0].num_layers == pieces[0].num_layers == 1


@needs_native
def test_one_executor_serves_several_threads_at_once() -> None:
    executor = NativeExecutor(2)
    memories = [Memory() for _ in range(4)]

    def move(memory: Memory) -> None:
        for _ in range(20):
            plan = memory.plan(TransferRequest(16, ((0, 1, 2, 3),)))
            executor.run(plan, [memory.engine], memory.objects, Direction.RETRIEVE, method=Method.STAGED)

    threads = [threading.Thread(target=move, args=(memory,)) for memory in memories]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for memory in memories:
        np.testing.assert_array_equal(memory.cache, memories[0].cache)
        np.testing.assert_array_equal(memory.cache[2, 1, 3], memory.object(1)[1, 2, 4:8])


def test_bad_settings_are_refused_with_their_value() -> None:
    with pytest.raises(ValueError, match="registered_piece_bytes must be at least 1 or None, got 0"):
        HostObjects((1,), registered_piece_bytes=0)
    with pytest.raises(ValueError, match="addresses must not be negative"):
        HostObjects((-1,))
    with pytest.raises(ValueError, match="threads must be between 1 and 1024, got 0"):
        NativeExecutor(0)


@needs_native
def test_the_native_executor_is_chosen_where_it_is_installed() -> None:
    choice = choose_executor(threads=2)
    assert choice.executor.name == "native-2"


def test_without_a_native_library_numpy_is_chosen_and_says_why_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(_library.LIBRARY_FOLDER_VARIABLE, str(tmp_path))
    _library.cpu_library.cache_clear()
    executors._say_once.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            first, second = choose_executor(), choose_executor()
    finally:
        _library.cpu_library.cache_clear()
    assert first.executor.name == second.executor.name == "numpy"
    assert "apt-get install g++" in first.reason
    assert len(caplog.records) == 1
    assert first.reason in caplog.text


@needs_native
@pytest.mark.parametrize("method", [Method.DIRECT, Method.STAGED], ids=lambda method: method.value)
@pytest.mark.parametrize("direction", Direction, ids=lambda direction: direction.value)
def test_a_transfer_larger_than_a_cache_leaves_the_same_bytes_at_any_alignment(
    method: Method, direction: Direction
) -> None:
    # More than 32 MiB goes around the cache; a token of 1031 bytes puts every run at another alignment.
    geometry = KVGeometry(2, 2, 1, 1031, 1, chunk_tokens=500)
    random = np.random.default_rng(7)
    num_chunks, block_tokens = 20, 20
    num_tokens = num_chunks * 500 - 3
    ids = random.permutation(num_chunks * 25 + 1)[: num_chunks * 25]
    request = TransferRequest(num_tokens, (tuple(ids.tolist()),))
    layout = ObjectLayout.single(geometry, block_tokens)
    host = random.integers(0, 100, (num_chunks, 2, 2, 500, 1031), dtype=np.uint8)  # [chunk, K, L, T, D]
    cache = random.integers(100, 200, (2, 2, num_chunks * 25 + 1, block_tokens, 1031), dtype=np.uint8)
    assert num_tokens * geometry.token_bytes > 32 << 20
    views = [TensorView(t.ctypes.data, t.shape, t.strides, 1) for t in cache]  # a layer: [K, N, BS, D]
    start = int(host.ctypes.data)
    objects = HostObjects(
        tuple(start + chunk * geometry.object_bytes for chunk in range(num_chunks)), 1 << 20, start - 4096
    )
    expected_host, expected_cache = host.copy(), cache.copy()
    for token in range(num_tokens):
        place = np.s_[:, :, ids[token // block_tokens], token % block_tokens]
        own = np.s_[token // 500, :, :, token % 500]
        if direction is Direction.RETRIEVE:
            expected_cache[place] = host[own].transpose(1, 0, 2)
        else:
            expected_host[own] = cache[place].transpose(1, 0, 2)
    plan = plan_layer_major(layout, request, 1, staging_bytes=5 << 20)
    NativeExecutor(2).run(plan, [engine_layout("KNTD", views)], objects, direction, method=method)
    np.testing.assert_array_equal(cache, expected_cache)
    np.testing.assert_array_equal(host, expected_host)
