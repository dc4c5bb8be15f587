"""A layer buffer as torch sees it: keys and values of a sequence, over the buffer's own memory."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from lamella.reference.layout import TensorView

try:
    import torch
except ImportError as missing:
    raise ImportError("blending needs torch: pip install 'lamella[torch]'") from missing


class LayerKV(NamedTuple):
    """A layer's KV, a row a token in the sequence's order; `[rows, H, D]` each. Writing into them writes the buffer."""

    keys: torch.Tensor
    values: torch.Tensor


class _DeviceBytes:
    """Device memory as other libraries take it over: NumPy's array interface, for CUDA."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def tensor_over(view: TensorView, dtype: torch.dtype, device: str) -> torch.Tensor:
    """A tensor over that memory, which the caller keeps alive and in place.

    Args:
        view: address, shape and byte strides.
        dtype: of the elements.
        device: "cpu" or "cuda:N", where the memory is.

    Raises:
        ValueError: a dtype of another size than the view's elements.
        RuntimeError: torch would copy the memory instead.
    """
    size = view.element_bytes
    if dtype.itemsize != size:
        raise ValueError(f"the buffers hold elements of {size} bytes, got {dtype} of {dtype.itemsize}")
    span = sum((count - 1) * stride for count, stride in zip(view.shape, view.strides, strict=True)) + size
    if device == "cpu":
        flat = torch.frombuffer((ctypes.c_char * span).from_address(view.address), dtype=torch.uint8)
    else:
        flat = torch.as_tensor(_DeviceBytes(view.address, span), device=device)
    if flat.data_ptr() != view.address:
        raise RuntimeError(f"torch copied the buffer at {view.address:#x} instead of using it in place")
    return flat.view(dtype).as_strided(view.shape, [stride // size for stride in view.strides])


def layer_kv(layer: torch.Tensor, *, packed: bool) -> LayerKV:
    """Keys and values of a buffer `[K, rows, H, D]`: K = 2, or K = 1 with both packed in a head, `D = 2 * head`."""
    if packed:
        keys, values = layer[0].chunk(2, dim=-1)  # [rows, H, head] each
        return LayerKV(keys, values)
    return LayerKV(layer[0], layer[1])


class ReadBack:
    """A number on its way from the device, which the stream does not wait for."""

    def __init__(self, number: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._number = number
        if number.is_cuda:
            self._number = torch.empty_like(number, device="cpu", pin_memory=True)
            self._number.copy_(number, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def value(self) -> float:
        """The number; waits for what was given to the stream before it, and for nothing after."""
        if self._event is not None:
            self._event.synchronize()
        return float(self._number)
