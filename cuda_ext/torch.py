"""The thin layer to torch: cache tensors become addresses and strides, streams and events become handles.

Nothing here copies, allocates or makes a tensor contiguous: engines hand out strided views of one buffer, and a
contiguous copy of such a view would be another memory, which nobody reads. The caller keeps the tensors, streams and
events alive while a transfer uses what was read from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from lamella.reference.layout import LAYOUTS, EngineLayout, TensorView, engine_layout

try:
    import torch
except ImportError as missing:
    raise ImportError("this layer needs torch: pip install 'lamella[torch]', or use your engine's own") from missing

CacheEntry: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"
"""One layer of a paged cache: a tensor, or K and V apart."""


def tensor_view(tensor: torch.Tensor) -> TensorView:
    """Where the tensor's elements lie, whatever its strides.

    Raises:
        ValueError: a tensor without dense memory of its own (meta, fake, sparse).
    """
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        raise ValueError(f"a cache tensor must have strided memory, got {tensor.layout} on {tensor.device}")
    element_bytes = tensor.element_size()
    return TensorView(
        address=tensor.data_ptr(),
        shape=tuple(tensor.shape),
        strides=tuple(stride * element_bytes for stride in tensor.stride()),
        element_bytes=element_bytes,
    )


def cache_layout(layout: str, tensors: Sequence[CacheEntry]) -> EngineLayout:
    """Describes one kernel group's paged cache.

    Args:
        layout: a name of `lamella.reference.layout.LAYOUTS`, or the order of the axes itself, such as "KNTHD".
        tensors: one entry a layer, in layer order (for a layout with an `L` axis exactly one entry): a tensor, or a
            pair (K tensor, V tensor) where they are apart.

    Raises:
        ValueError: tensors on different devices, or as `tensor_view` and `engine_layout`.
    """
    device_of(tensors)
    views = [
        (tensor_view(entry[0]), tensor_view(entry[1])) if isinstance(entry, tuple) else tensor_view(entry)
        for entry in tensors
    ]
    return engine_layout(LAYOUTS.get(layout, layout), views)


def device_of(tensors: Sequence[CacheEntry]) -> str:
    """The device all these tensors are on, such as "cuda:1" or "cpu", as `TransferEngine` takes it.

    Raises:
        ValueError: none, or more than one device.
    """
    devices = {str(tensor.device) for entry in tensors for tensor in (entry if isinstance(entry, tuple) else (entry,))}
    if len(devices) != 1:
        raise ValueError(f"all tensors of a paged cache must be on one device, got {sorted(devices)}")
    return devices.pop()


def stream_handle(stream: torch.cuda.Stream) -> int:
    """The stream's `cudaStream_t`; 0 is the legacy default stream. It lives as long as `stream` does."""
    return int(stream.cuda_stream)


def event_handle(event: torch.cuda.Event) -> int:
    """The event's `cudaEvent_t`. It lives as long as `event` does.

    Raises:
        ValueError: an event that was never recorded: torch has not created it yet, and waiting for it would wait for
            nothing.
    """
    handle = int(event.cuda_event)
    if not handle:
        raise ValueError("the event was never recorded, so waiting for it would order nothing: record it first")
    return handle


def current_stream(device: str) -> int:
    """Handle of the stream torch enqueues on now, in this thread, for this CUDA device."""
    return stream_handle(torch.cuda.current_stream(torch.device(device)))
