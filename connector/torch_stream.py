"""The compute stream of an engine that runs on torch."""

from __future__ import annotations

from lamella.connector.streams import Moment
from lamella.cuda_ext.arrival import AfterEvent
from lamella.cuda_ext.torch import current_stream, event_handle

try:
    import torch
except ImportError as missing:
    raise ImportError("this stream needs torch: pip install 'lamella[torch]', or use your engine's own") from missing


class TorchStream:
    """Whatever stream torch enqueues on when it is asked, in the thread that asks.

    Args:
        device: the CUDA device the engine computes on, such as "cuda:0".

    Raises:
        ValueError: a device that is not CUDA's; on the CPU the calling thread is the stream (`HostStream`).
    """

    def __init__(self, device: str) -> None:
        if torch.device(device).type != "cuda":
            raise ValueError(f"a torch stream is a CUDA device's, got {device!r}: use HostStream on the CPU")
        self._device = device

    @property
    def handle(self) -> int:
        """`cudaStream_t` of the present stream."""
        return current_stream(self._device)

    def record(self) -> Moment:
        """An event behind what the present stream was given so far; the moment keeps it alive."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(torch.device(self._device)))
        return Moment(AfterEvent(event_handle(event)), event, event.query)
