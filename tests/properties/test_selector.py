"""The kernel's layer selector, asked of the shared address header itself: both 0 is all layers."""

import ctypes
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella.reference.geometry import KVGeometry
from native_build import COMPILER, SOURCES, compile_library
from strategies import geometries

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler: set CXX or install g++")

SHIM = """
#include "lamella/address.cuh"
using namespace lamella;
extern "C" __attribute__((visibility("default")))
std::int64_t staged(const std::int32_t* sizes, const std::int32_t* selector, const std::int32_t* at) {
  Group g{};
  g.num_layers = sizes[0]; g.kv = sizes[1]; g.num_heads = sizes[2]; g.head_dim = sizes[3]; g.element_bytes = sizes[4];
  return staged_token(g, {selector[0], selector[1]}, sizes[5], at[0], at[1], at[2]);
}
extern "C" __attribute__((visibility("default")))
std::int32_t layer_of(const std::int32_t* selector, std::int32_t slot) {
  return engine_layer({selector[0], selector[1]}, slot);
}
"""


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return load_shim(tmp_path_factory.mktemp("selector"))


def load_shim(folder: Path) -> ctypes.CDLL:
    source = folder / "selector.cpp"
    source.write_text(SHIM, encoding="utf-8")
    compile_library([source], SOURCES / "include", folder / "selector.so")
    library = ctypes.CDLL(str(folder / "selector.so"))
    library.staged.restype = ctypes.c_int64
    return library


def _ints(*values: int) -> ctypes.Array[ctypes.c_int32]:
    return (ctypes.c_int32 * len(values))(*values)


def _image(header: ctypes.CDLL, geometry: KVGeometry, tokens: int, selector: tuple[int, int], slots: int) -> list[int]:
    """Staging offset of every (kv, slot, token), in that order."""
    sizes = _ints(
        geometry.num_layers, geometry.kv, geometry.num_heads, geometry.head_dim, geometry.element_bytes, tokens
    )
    return [
        header.staged(sizes, _ints(*selector), _ints(kv, slot, token))
        for kv in range(geometry.kv)
        for slot in range(slots)
        for token in range(tokens)
    ]


@given(geometry=geometries(), tokens=st.integers(1, 9))
def test_the_default_selector_is_all_layers(header: ctypes.CDLL, geometry: KVGeometry, tokens: int) -> None:
    layers = geometry.num_layers
    assert _image(header, geometry, tokens, (0, 0), layers) == _image(header, geometry, tokens, (0, layers), layers)


@given(geometry=geometries(), tokens=st.integers(1, 9), data=st.data())
def test_a_staged_slice_is_dense_and_the_engine_is_addressed_behind_its_offset(
    header: ctypes.CDLL, geometry: KVGeometry, tokens: int, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, geometry.num_layers - 1))
    count = data.draw(st.integers(1, geometry.num_layers - first))
    dense = [index * geometry.hidden_bytes for index in range(geometry.kv * count * tokens)]
    assert _image(header, geometry, tokens, (first, count), count) == dense
    layers = [header.layer_of(_ints(first, count), slot) for slot in range(count)]
    assert layers == list(range(first, first + count))
