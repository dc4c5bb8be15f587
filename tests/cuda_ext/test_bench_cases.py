"""The memory of a benchmark: what it calls right is what an executor that obeys the oracle leaves."""

from dataclasses import replace

import numpy as np
import pytest

from lamella.cuda_ext._library import LibraryMissingError
from lamella.cuda_ext.bench_cases import BLOCK_SHAPE, MAIN_SHAPES, SMALL_SHAPES, BenchMemory, BenchShape
from lamella.cuda_ext.device import Device
from lamella.cuda_ext.executors import NumpyExecutor
from lamella.reference.plan import Direction, check_request, plan_layer_major

SHAPES = (*MAIN_SHAPES, BLOCK_SHAPE, *SMALL_SHAPES)


@pytest.fixture(scope="module")
def cpu() -> Device:
    try:
        return Device("cpu")
    except LibraryMissingError as missing:
        pytest.skip(str(missing))


def _small(shape: BenchShape) -> BenchShape:
    return replace(shape, geometry=replace(shape.geometry, num_layers=2))


def _move(memory: BenchMemory, direction: Direction) -> None:
    check_request(memory.shape.layout, memory.engines, memory.request, direction)
    plan = plan_layer_major(memory.shape.layout, memory.request, 1, 1 << 24)
    NumpyExecutor().run(plan, memory.engines, memory.objects, direction)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_right_retrieve_and_a_right_store_are_called_right(cpu: Device, shape: BenchShape) -> None:
    small = _small(shape)
    with BenchMemory(cpu, small, 2 * small.geometry.chunk_tokens) as memory:
        assert memory.num_bytes == 2 * small.geometry.object_bytes
        memory.poison()
        _move(memory, Direction.RETRIEVE)
        memory.check(Direction.RETRIEVE)
        memory.scramble_cache()
        _move(memory, Direction.STORE)
        memory.check(Direction.STORE)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_one_wrong_byte_and_one_byte_too_many_are_called_wrong(cpu: Device, shape: BenchShape) -> None:
    small = _small(shape)
    with BenchMemory(cpu, small, 2 * small.geometry.chunk_tokens) as memory:
        memory.poison()
        with pytest.raises(RuntimeError, match="layer 0 does not hold the objects' bytes"):
            memory.check(Direction.RETRIEVE)
        _move(memory, Direction.RETRIEVE)
        cache = np.empty(memory.cache_bytes, dtype=np.uint8)
        memory._cache.read(cache.ctypes.data)
        layer, used = memory.cache_bytes // 2, set(memory.block_ids)
        spare = next(block for block in range(memory.num_blocks) if block not in used)
        inside = small.block_bytes // small.geometry.kv  # of a block, where K and V are apart
        for at, message in (
            (memory.block_ids[1] * inside, "does not hold"),
            (spare * inside + 1, "was written outside"),
        ):
            cache[layer + at] ^= 1
            memory._cache.write(cache.ctypes.data)
            with pytest.raises(RuntimeError, match=f"layer 1 {message}"):
                memory.check(Direction.RETRIEVE)
            cache[layer + at] ^= 1


def test_slots_are_shuffled_unless_asked_to_be_consecutive(cpu: Device) -> None:
    shape = _small(MAIN_SHAPES[0])
    with (
        BenchMemory(cpu, shape, 8 * 256) as shuffled,
        BenchMemory(cpu, shape, 8 * 256, shuffled_slots=False) as in_order,
    ):
        assert sorted(shuffled.lease.slots) == list(range(8)) != list(shuffled.lease.slots)
        assert list(in_order.lease.slots) == list(range(8))


def test_the_main_shape_is_a_gibibyte_of_8192_tokens() -> None:
    for shape in (*MAIN_SHAPES, BLOCK_SHAPE):
        assert shape.tokens_of(1 << 30) == 8192
        assert shape.geometry.token_bytes * 8192 == 1 << 30
