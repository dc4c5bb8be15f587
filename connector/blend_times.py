"""When each layer was recomputed: by the clock where the calling thread computes, by events on a GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lamella.connector.streams import Recorder, Span

try:
    import torch
except ImportError as missing:
    raise ImportError("blending needs torch: pip install 'lamella[torch]'") from missing


class LayerTimer:
    """Times layers on the current stream, without waiting for the device until `tell`.

    Args:
        recorder: takes the spans; None: nothing is timed.
        device: where layers are computed.
    """

    def __init__(self, recorder: Recorder | None, device: torch.device) -> None:
        self._recorder = recorder
        self._is_cuda = device.type == "cuda"
        self._layers: list[tuple[int, Any, Any]] = []
        if recorder is not None and self._is_cuda:
            torch.cuda.current_stream(device).synchronize()
            self._zero = self._event()
            self._zero.synchronize()
            self._zero_ns = time.monotonic_ns()

    @contextmanager
    def layer(self, layer: int) -> Iterator[None]:
        """What is given to the stream inside is the layer's."""
        if self._recorder is None:
            yield
            return
        start = self._event() if self._is_cuda else time.monotonic_ns()
        yield
        self._layers.append((layer, start, self._event() if self._is_cuda else time.monotonic_ns()))

    def tell(self) -> None:
        """The recorder has every layer; on a GPU, once the last one has ended."""
        if self._recorder is None:
            return
        for layer, start, end in self._layers:
            self._recorder(Span("recompute", layer, 1, self._ns(start), self._ns(end)))
        self._layers.clear()

    def _ns(self, moment: Any) -> int:
        if not self._is_cuda:
            return int(moment)
        moment.synchronize()
        return self._zero_ns + int(1e6 * self._zero.elapsed_time(moment))

    @staticmethod
    def _event() -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
