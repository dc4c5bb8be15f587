"""Engine layouts by strides, and byte ranges of an object."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lamella.reference.arena import CacheCase
from lamella.reference.geometry import KVGeometry, ObjectForm
from lamella.reference.keys import KeySpace, chunk_keys
from lamella.reference.laws import TransferCase
from lamella.reference.layout import (
    LAYOUTS,
    ByteRange,
    EngineLayout,
    KernelGroup,
    ObjectLayout,
    TensorView,
    engine_layout,
)
from strategies import geometries, transfer_cases

SIZES = {"K": 2, "N": 5, "T": 4, "H": 3, "D": 6, "L": 7}


def view_of(array: NDArray[Any]) -> TensorView:
    return TensorView(array.ctypes.data, array.shape, array.strides, array.itemsize)


@pytest.mark.parametrize(("name", "axes"), LAYOUTS.items())
def test_each_named_layout_addresses_the_element_that_numpy_indexes(name: str, axes: str) -> None:
    shape = tuple(SIZES[axis] for axis in axes)
    count = 1 if "L" in axes else 2
    arrays = [np.empty(shape, np.uint16) for _ in range(count * (1 + name.startswith("separate")))]
    views: list[Any] = [view_of(array) for array in arrays]
    if name.startswith("separate"):
        views = [(views[0], views[1]), (views[2], views[3])]
    layout = engine_layout(axes, views)
    layer, kv, index = 1, layout.kv - 1, {"N": 4, "T": 2, "H": 2 if "H" in axes else 0, "D": 5}
    array = arrays[0 if "L" in axes else layer * 2 + kv if name.startswith("separate") else layer]
    element = array[tuple(slice(i, i + 1) for i in ({**index, "K": kv, "L": layer}[axis] for axis in axes))]
    assert layout.address(layer, kv, index["N"], index["T"], index["H"], index["D"]) == element.ctypes.data
    assert layout.num_layers == (7 if "L" in axes else 2)


@given(transfer_cases())
def test_any_strided_view_addresses_the_element_that_numpy_indexes(case: TransferCase) -> None:
    for cache in case.caches:
        storages = [np.empty(cache.tensor_bytes, np.uint8) for _ in range(cache.num_tensors)]
        tensors = [cache.view(storage) for storage in storages]
        layout = cache.engine(tensors)
        for layer in range(len(cache.layers)):
            for kv in range(cache.kv):
                plane = cache.plane(tensors, layer, kv)
                last = tuple(size - 1 for size in plane.shape)
                for index in ((0, 0, 0, 0), last):
                    element = plane[tuple(slice(i, i + 1) for i in index)]
                    assert layout.address(layer, kv, *index) == element.ctypes.data


@pytest.mark.known_fault(67)
def test_hnd_and_nhd_views_of_one_shape_differ_by_their_strides_alone() -> None:
    nhd = np.zeros((2, 16, 4, 8), np.uint16)  # [N, T, H, D] in memory
    hnd = np.zeros((2, 4, 16, 8), np.uint16)  # [N, H, T, D] in memory
    as_engine = nhd.transpose(0, 2, 1, 3)
    assert as_engine.shape == hnd.shape
    first = engine_layout("NHTD", [view_of(as_engine)])
    second = engine_layout("NHTD", [view_of(hnd)])
    assert (first.token_stride, first.head_stride, first.inner_order()) == (64, 16, "THD")
    assert (second.token_stride, second.head_stride, second.inner_order()) == (16, 256, "HTD")


@pytest.mark.known_fault(73)
def test_a_strided_view_needs_no_copy() -> None:
    storage = np.zeros((8, 16, 4, 3, 8), np.uint8)
    view = storage[::-2, ..., 1, :]  # every other block backwards, a third of each row
    layout = engine_layout("NTHD", [view_of(view)])
    assert (layout.block_stride, layout.head_stride, layout.dim_stride) == (-2 * 16 * 96, 24, 1)
    assert layout.inner_order() is None
    assert layout.address(0, 0, 3, 1, 2, 4) == storage[1:, 1:, 2:, 1:, 4:].ctypes.data


@pytest.mark.known_fault(68)
def test_each_kernel_group_has_its_own_head_size() -> None:
    small = engine_layout("NHTD", [view_of(np.zeros((4, 2, 16, 128), np.uint16))])
    large = engine_layout("NHTD", [view_of(np.zeros((4, 2, 16, 256), np.uint16))])
    assert (small.head_dim, small.head_stride) == (128, 16 * 128 * 2)
    assert (large.head_dim, large.head_stride) == (256, 16 * 256 * 2)


@pytest.mark.parametrize(
    ("axes", "tensors", "sentence"),
    [
        ("NTX", [np.zeros((1, 1, 1), np.uint8)], "axes must name N, T, D and at most K, H, L once each, got 'NTX'"),
        ("NHD", [np.zeros((1, 1, 1), np.uint8)], "axes must name N, T, D and at most K, H, L once each, got 'NHD'"),
        ("NTTD", [np.zeros((1, 1, 1, 1), np.uint8)], "axes must name N, T, D and at most K, H, L once each"),
        ("NTHD", [np.zeros((1, 1, 1), np.uint8)], "axes 'NTHD' need a tensor of 4 dimensions, got shape (1, 1, 1)"),
        ("NTD", [], "a paged cache needs at least one tensor, got none"),
        ("NTD", [np.zeros((2, 1, 1), np.uint8), np.zeros((3, 1, 1), np.uint8)], "share shape and strides"),
        (
            "NKTHD",
            [np.zeros((2, 40, 16, 4, 32), np.uint8)] * 6,
            "axes 'NKTHD' take dimension 1 for keys and values, of which there are 1 or 2, and shape "
            "(2, 40, 16, 4, 32) has 40 there",
        ),
        ("NLTD", [np.zeros((2, 1, 1, 1), np.uint8)] * 2, "hold every layer in one tensor, got 2 tensors"),
    ],
)
def test_a_wrong_description_is_refused_with_its_value(axes: str, tensors: list[NDArray[Any]], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        engine_layout(axes, [view_of(tensor) for tensor in tensors])


@pytest.mark.parametrize("axes", ["KNTHD", "NKTHD", "KNHTD", "NKHTD", "NLKTHD", "LKNTHD", "NTHD", "NHTD", "NTD"])
def test_a_view_in_which_elements_of_any_two_axes_share_bytes_is_refused_by_the_axis(axes: str) -> None:
    """Each axis in turn steps over too little; of K and L too, which a block's own strides do not show."""
    whole = view_of(np.zeros([2] * len(axes), np.uint16))
    names = {"K": "kv", "N": "block", "T": "token", "H": "head", "D": "dim", "L": "layer"}
    entries = [whole] if "L" in axes else [whole, whole._replace(address=whole.address + 4096)]
    assert engine_layout(axes, entries).num_layers == 2
    for axis, name in enumerate(axes[:-1]):
        strides = list(whole.strides)
        strides[axis] = strides[axis + 1]
        narrow = [entry._replace(strides=tuple(strides)) for entry in entries]
        with pytest.raises(ValueError, match="_stride .* is smaller than the .* elements would share bytes") as refused:
            engine_layout(axes, narrow)
        assert str(refused.value).split("_stride")[0] in (names[name], names[axes[axis + 1]])


def test_separate_tensors_for_axes_that_hold_k_and_v_are_refused() -> None:
    view = view_of(np.zeros((2, 1, 1, 1, 1), np.uint8))
    with pytest.raises(ValueError, match="hold K and V or all layers in one tensor, got separate K and V tensors"):
        engine_layout("KNTHD", [(view, view)])


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"num_blocks": 0}, "num_blocks must be at least 1, got 0"),
        ({"head_dim": 0}, "head_dim must be at least 1, got 0"),
        ({"bases": ()}, "bases must hold 1 or 2 addresses for each layer, got []"),
        ({"bases": ((0, 1), (2,))}, "bases must hold 1 or 2 addresses for each layer, got [2, 1]"),
        ({"bases": ((0, 1, 2),)}, "bases must hold 1 or 2 addresses for each layer, got [3]"),
        ({"bases": ((0, 4096), (7, 7))}, "keys and values of a layer begin at one address"),
        ({"head_stride": 8}, "head_stride 8 is smaller than the 16 bytes it must step over"),
        ({"block_stride": 0}, "block_stride 0 is smaller than"),
        ({"token_stride": -30}, "token_stride 30 is smaller than the 32 bytes it must step over"),
    ],
)
def test_an_impossible_engine_layout_is_refused_with_its_value(wrong: dict[str, Any], sentence: str) -> None:
    good = EngineLayout(((0, 4096),), 128, 32, 16, 2, 32, 4, 2, 8, 2)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        replace(good, **wrong)


def test_a_cache_that_does_not_fit_the_geometry_is_refused_by_the_first_size_that_differs() -> None:
    layout = engine_layout("NTHD", [view_of(np.zeros((4, 16, 8, 64), np.uint16))])
    geometry = KVGeometry(1, 1, 8, 128, 2, 256)
    with pytest.raises(ValueError, match="cache has head_dim 64, the geometry 128"):
        layout.check_matches(geometry)
    layout.check_matches(replace(geometry, head_dim=64))


# ---------------------------------------------------------------- objects


def two_groups(form: ObjectForm = ObjectForm.TOKEN) -> ObjectLayout:
    """Layers 0 and 2 with K and V of 3 x 2 bytes, layers 1 and 2 as MLA of 5 bytes; chunks of 4 tokens."""
    return ObjectLayout(
        (
            KernelGroup(KVGeometry(2, 2, 3, 2, 1, 4), (0, 2), 2),
            KernelGroup(KVGeometry(2, 1, 1, 5, 1, 4), (1, 2), 2),
        ),
        form,
    )


def test_a_slice_of_a_token_form_object_is_k_runs() -> None:
    layout = ObjectLayout.single(KVGeometry(32, 2, 8, 128, 2, 256), 16)
    plane = 256 * 2048
    assert layout.ranges(0, 4, 8, 0, 256) == (
        ByteRange(4 * plane, 8 * plane),
        ByteRange((32 + 4) * plane, 8 * plane),
    )


def test_a_slice_of_a_block_form_object_is_one_run() -> None:
    layout = ObjectLayout.single(KVGeometry(32, 2, 8, 128, 2, 256), 16, ObjectForm.BLOCK)
    assert layout.ranges(0, 4, 8, 0, 256) == (ByteRange(4 * (1 << 20), 8 << 20),)


def test_part_of_a_chunk_is_a_run_a_layer() -> None:
    layout = two_groups()
    assert layout.ranges(0, 0, 2, 1, 2) == (
        ByteRange(6, 12), ByteRange(24 + 6, 12), ByteRange(48 + 6, 12), ByteRange(72 + 6, 12),
    )  # fmt: skip
    block = two_groups(ObjectForm.BLOCK)
    assert block.ranges(0, 0, 2, 2, 2) == (ByteRange(24, 24), ByteRange(48 + 24, 24))


def test_the_second_group_begins_at_the_next_256_bytes() -> None:
    layout = two_groups()
    assert layout.groups[0].geometry.object_bytes == 96
    assert (layout.group_offset(0), layout.group_offset(1), layout.object_bytes) == (0, 256, 256 + 40)


@given(transfer_cases(), st.data())
def test_ranges_of_all_layers_partition_the_object_up_to_its_padding(case: TransferCase, data: st.DataObject) -> None:
    layout = case.layout
    covered = np.zeros(layout.object_bytes, np.int64)
    for index, group in enumerate(layout.groups):
        unit = group.block_tokens if case.form is ObjectForm.BLOCK else 1
        cut = unit * data.draw(st.integers(0, layout.chunk_tokens // unit))
        for layer in range(group.geometry.num_layers):
            for first, count in ((0, cut), (cut, layout.chunk_tokens - cut)):
                for found in layout.ranges(index, layer, 1, first, count) if count else ():
                    covered[found.offset : found.offset + found.num_bytes] += 1
    expected = np.zeros(layout.object_bytes, np.int64)
    for index, group in enumerate(layout.groups):
        expected[layout.group_offset(index) :][: group.geometry.object_bytes] = 1
        assert layout.group_offset(index) % 256 == 0
    np.testing.assert_array_equal(covered, expected)


@given(transfer_cases(), st.data())
def test_ranges_of_several_layers_are_those_of_each_layer(case: TransferCase, data: st.DataObject) -> None:
    layout = case.layout
    group = data.draw(st.integers(0, len(layout.groups) - 1))
    num_layers = layout.groups[group].geometry.num_layers
    first = data.draw(st.integers(0, num_layers - 1))
    count = data.draw(st.integers(1, num_layers - first))

    def bytes_of(ranges: tuple[ByteRange, ...]) -> list[int]:
        return sorted(byte for r in ranges for byte in range(r.offset, r.offset + r.num_bytes))

    each = [layout.ranges(group, layer, 1, 0, layout.chunk_tokens) for layer in range(first, first + count)]
    assert bytes_of(layout.ranges(group, first, count, 0, layout.chunk_tokens)) == bytes_of(
        tuple(r for ranges in each for r in ranges)
    )


@pytest.mark.parametrize(
    ("asked", "form", "sentence"),
    [
        ((0, 1, 2, 0, 4), ObjectForm.TOKEN, "layers 1 .. 2 are outside 0 .. 1"),
        ((0, 0, 0, 0, 4), ObjectForm.TOKEN, "layers 0 .. -1 are outside 0 .. 1"),
        ((0, -1, 1, 0, 4), ObjectForm.TOKEN, "layers -1 .. -1 are outside 0 .. 1"),
        ((0, 0, 1, 2, 3), ObjectForm.TOKEN, "tokens 2 .. 4 are outside 0 .. 3"),
        ((0, 0, 1, 0, 0), ObjectForm.TOKEN, "tokens 0 .. -1 are outside 0 .. 3"),
        ((0, 0, 1, 0, 3), ObjectForm.BLOCK, "in block form tokens move by whole blocks of 2, got 3 from 0"),
        ((0, 0, 1, 1, 2), ObjectForm.BLOCK, "in block form tokens move by whole blocks of 2, got 2 from 1"),
    ],
)
def test_bytes_that_an_object_does_not_hold_are_refused(
    asked: tuple[int, int, int, int, int], form: ObjectForm, sentence: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        two_groups(form).ranges(*asked)


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: ObjectLayout(()), "an object needs at least one kernel group, got none"),
        (
            lambda: ObjectLayout((
                KernelGroup(KVGeometry(1, 1, 1, 1, 1, 4), (0,), 2),
                KernelGroup(KVGeometry(1, 1, 1, 1, 1, 8), (1,), 2),
            )),
            "all kernel groups of an object share chunk_tokens, got [4, 8]",
        ),
        (
            lambda: ObjectLayout((KernelGroup(KVGeometry(2, 1, 1, 1, 1, 4), (0, 2), 2),)),
            "the groups must hold every layer from 0 on, got [0, 2]",
        ),
        (
            lambda: ObjectLayout.single(KVGeometry(1, 1, 1, 1, 1, 10), 4, ObjectForm.BLOCK),
            "in block form chunk_tokens (10) must be a multiple of block_tokens (4)",
        ),
        (
            lambda: KernelGroup(KVGeometry(2, 1, 1, 1, 1, 4), (1, 0), 2),
            "layers must be 2 ascending layer indices, one a layer, got (1, 0)",
        ),
        (
            lambda: KernelGroup(KVGeometry(2, 1, 1, 1, 1, 4), (0,), 2),
            "layers must be 2 ascending layer indices, one a layer, got (0,)",
        ),
        (
            lambda: KernelGroup(KVGeometry(1, 1, 1, 1, 1, 4), (0,), 0),
            "block_tokens must be at least 1, got 0",
        ),
    ],
)  # fmt: skip
def test_an_impossible_object_is_refused_with_its_value(build: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        build()


def test_a_group_knows_which_of_its_own_layers_lie_in_a_slice() -> None:
    group = KernelGroup(KVGeometry(3, 1, 1, 1, 1, 4), (1, 4, 5), 2)
    assert group.span(0, 1) == (0, 0)
    assert group.span(0, 5) == (0, 2)
    assert group.span(4, 2) == (1, 2)


@given(geometries())
def test_a_layer_key_resolves_to_exactly_that_layers_bytes_in_the_whole_object(geometry: KVGeometry) -> None:
    layout = ObjectLayout.single(geometry, block_tokens=1)
    space = KeySpace("m", "u8", ObjectForm.TOKEN, "THD", geometry.chunk_tokens, 0, 1, (0, geometry.num_layers))
    (key,) = chunk_keys(space, range(geometry.chunk_tokens))
    names = np.arange(geometry.num_layers, dtype=np.uint8)[None, :, None]
    row = geometry.chunk_tokens * geometry.hidden_bytes
    whole = np.broadcast_to(names, (geometry.kv, geometry.num_layers, row)).tobytes()
    for layer_key in key.split_layers(geometry.num_layers):
        found = b"".join(whole[r.offset : r.offset + r.num_bytes] for r in layer_key.ranges(layout))
        assert found == bytes([layer_key.layer]) * geometry.layer_bytes


def test_a_cross_layer_cache_needs_no_tensor_a_layer() -> None:
    cache = CacheCase((0, 1, 2), 2, 2, 4, 2, 3, 4, "NLKTHD")
    assert cache.num_tensors == 1
    assert cache.engine([cache.view(np.zeros(cache.tensor_bytes, np.uint8))]).num_layers == 3
