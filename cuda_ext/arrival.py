"""How a transfer's order against other work is said: what must come before it, and how its layers are waited for.

Before a transfer (XFER-3): a fence. Its first write into blocks, or for a store its first read of them, starts behind.

After it, two carriers of "this slice has landed", behind one `Transfer.wait_layer`:

- `Carrier.EVENT`: an event a slice. It can be waited on only once it is recorded, so a wait for a later slice first
  waits on the host, bounded and reported. A stream wakes about 2 µs after the event.
- `Carrier.VALUE`: the copy's own stream writes a generation-tagged count (SAFE-2), and the waiting stream waits for the
  count. Enqueued at once, it never blocks the host; a stream wakes about 5 µs after the write. Should the write never
  come, the engine's watchdog forces the value at the transfer's deadline, and the transfer reports the failure.

Inside a captured graph a wait has a constant operand; there `GraphWaits` uses a word a layer that is 0 when nothing
that must be waited for is outstanding. Measured on an H200: the wake-up times above; 32 waits in a graph replay in
90 µs.
"""

from __future__ import annotations

import ctypes
import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lamella.cuda_ext._engine_library import check_engine, engine_library

if TYPE_CHECKING:
    from lamella.cuda_ext.engine import TransferEngine
    from lamella.cuda_ext.transfer import Transfer


class Carrier(enum.Enum):
    """What tells a stream that a slice has landed."""

    EVENT = 0
    """An event a slice. A stream can wait only for slices that were enqueued, so the caller may wait first."""

    VALUE = 1
    """A word in memory. A stream, or a captured graph, can wait for slices that are not enqueued yet.

    What such a stream holds back must not be what the slice needs: kernels must have been loaded before (by a run, or
    by `CUDA_MODULE_LOADING=EAGER`), because loading waits for the device; and the stream must not have the highest
    priority, whose hardware queues the transfer's copies use. The engine does at its creation whatever CUDA sets up at
    a first use, because that can be made to wait as well. The transfer's deadline ends such a wait.
    """


@dataclass(frozen=True, slots=True)
class AfterEvent:
    """The transfer's first access to the blocks comes after this CUDA event, which has been recorded.

    The caller keeps the event, unrecorded anew, until the transfer has started or is final.
    """

    handle: int


@dataclass(frozen=True, slots=True)
class AfterStream:
    """The transfer's first access to the blocks comes after all that this CUDA stream was given so far."""

    handle: int


class HostFence:
    """A fence of the CPU device: the transfer's first window moves once `open` was called."""

    def __init__(self) -> None:
        self._library = engine_library("lamella_cpu")
        handle = ctypes.c_void_p()
        check_engine(self._library, self._library.lm_fence_create(ctypes.byref(handle)))
        self._handle = handle

    @property
    def handle(self) -> int:
        """Address of the native fence; it lives as long as this object or a transfer that waits for it."""
        return self._handle.value or 0

    def open(self) -> None:
        """Lets through whatever waits and will wait. A fence does not close again."""
        check_engine(self._library, self._library.lm_fence_signal(self._handle))

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.lm_fence_release(self._handle)


Fence = AfterEvent | AfterStream | HostFence


class GraphWaits:
    """Per-layer waits that can be captured into a CUDA graph once and replayed for any transfer.

    Capture `wait(layer, stream)` before each layer's attention. Before a replay, call `gate(transfer, stream)` for
    every released load that has not wholly landed: the replay's waits then hold each layer back until it has. Replays
    for which no load was gated pass at once.

    Only released loads are gated, because the words are shared: a gated load holds back every replay.
    """

    def __init__(self, engine: TransferEngine) -> None:
        """Of `engine`, whose carrier must be `Carrier.VALUE`.

        Raises:
            ValueError: an engine with another carrier.
        """
        if engine.carrier is not Carrier.VALUE:
            raise ValueError(
                f"graphs wait for words, and this engine's carrier is {engine.carrier.name.lower()}: make it with "
                "carrier=Carrier.VALUE"
            )
        self._engine = engine

    def wait(self, layer: int, stream: int) -> None:
        """`stream` goes on once nothing gated is outstanding for the layer. To be captured, or run as it is.

        Raises:
            ValueError: a layer the engine was not made for.
            RuntimeError: the CUDA driver refuses.
        """
        self._engine.wait_pending(layer, stream)

    def gate(self, transfer: Transfer, stream: int, timeout_s: float = 1.0) -> None:
        """Replays enqueued on `stream` from now on wait, layer by layer, for what of the transfer has not landed.

        What is on its way already is waited for by `stream` itself: what the lane has on the wire or in the staging
        ring. Does nothing for a transfer that has landed.

        Raises:
            TransferStopped: the transfer failed or was cancelled, or was gated before.
            TimeoutError: the engine's thread did not answer in time.
        """
        transfer.gate(stream, timeout_s)
