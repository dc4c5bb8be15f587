"""The thin layer to torch: what it reads from a tensor is where torch itself finds the element."""

import ctypes
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from lamella.cuda_ext.torch import cache_layout, device_of, event_handle, stream_handle, tensor_view  # noqa: E402
from lamella.reference.layout import LAYOUTS  # noqa: E402

SIZES = {"K": 2, "N": 5, "T": 4, "H": 3, "D": 2, "L": 3}


def _numbered(shape: tuple[int, ...], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    count = 1
    for size in shape:
        count *= size
    return torch.arange(count, dtype=dtype).reshape(shape)


def _read(address: int) -> int:
    return ctypes.c_int32.from_address(address).value


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_named_layout_addresses_the_element_that_torch_indexes(name: str) -> None:
    axes = LAYOUTS[name]
    tensors = [_numbered(tuple(SIZES[axis] for axis in axes)) + 10_000 * layer for layer in range(3)]
    entries = tensors[:1] if "L" in axes else tensors
    layout = cache_layout(name, entries)
    for layer in range(layout.num_layers):
        for kv in range(layout.kv):
            place = {"K": kv, "N": 3, "T": 1, "H": 2, "D": 1, "L": layer}
            tensor = tensors[0 if "L" in axes else layer]
            expected = tensor[tuple(place[axis] for axis in axes)].item()
            assert _read(layout.address(layer, kv, 3, 1, 2 if "H" in axes else 0, 1)) == expected


def test_separate_key_and_value_tensors_are_two_bases_of_a_layer() -> None:
    keys, values = _numbered((5, 4, 3, 2)), _numbered((5, 4, 3, 2)) + 1000
    layout = cache_layout("separate-nhd", [(keys, values)])
    assert layout.kv == 2
    assert _read(layout.address(0, 1, 4, 3, 2, 1)) == values[4, 3, 2, 1].item()


@pytest.mark.known_fault(73)
def test_a_strided_view_of_a_larger_buffer_is_addressed_where_it_lies() -> None:
    buffer = _numbered((6, 4, 3, 8))
    view = buffer[::2, :, :, 1:7:3]  # (3, 4, 3, 2), no axis dense
    assert not view.is_contiguous()
    layout = cache_layout("packed-nhd", [view])
    assert _read(layout.address(0, 0, 2, 3, 1, 1)) == view[2, 3, 1, 1].item()
    assert layout.bases[0][0] == view.data_ptr(), "an address elsewhere means that somebody copied"


@pytest.mark.known_fault(67)
def test_a_cache_shaped_nhd_and_stored_hnd_keeps_its_own_strides() -> None:
    stored = _numbered((5, 3, 4, 2))  # N H T D
    layout = cache_layout("NTHD", [stored.permute(0, 2, 1, 3)])
    assert layout.inner_order() == "HTD"
    assert _read(layout.address(0, 0, 1, 2, 1, 0)) == stored[1, 1, 2, 0].item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.uint8])
def test_strides_are_bytes_whatever_the_dtype(dtype: torch.dtype) -> None:
    tensor = torch.zeros(4, 2, 8).to(dtype)
    view = tensor_view(tensor)
    assert view.element_bytes == tensor.element_size()
    assert view.strides == tuple(stride * tensor.element_size() for stride in tensor.stride())


def test_a_tensor_without_memory_is_refused() -> None:
    with pytest.raises(ValueError, match=r"strided memory, got torch\.strided on meta"):
        tensor_view(torch.empty(2, 2, device="meta"))
    with pytest.raises(ValueError, match="sparse"):
        tensor_view(torch.eye(3).to_sparse())


def test_tensors_on_two_devices_are_refused_with_both_names() -> None:
    there = torch.empty(2, 2, device="meta")
    with pytest.raises(ValueError, match=r"one device, got \['cpu', 'meta'\]"):
        device_of([(torch.empty(2, 2), there)])
    assert device_of([torch.empty(2, 2)]) == "cpu"


def test_an_event_that_was_never_recorded_orders_nothing_and_is_refused() -> None:
    with pytest.raises(ValueError, match="record it first"):
        event_handle(SimpleNamespace(cuda_event=0))
    assert event_handle(SimpleNamespace(cuda_event=0x7F00)) == 0x7F00
    assert stream_handle(SimpleNamespace(cuda_stream=0x7F10)) == 0x7F10
