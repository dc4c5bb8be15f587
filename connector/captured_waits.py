"""Waits for layers inside captured CUDA graphs: captured once, and met by every replay.

    capture: each layer's hook ──► a wait for the layer's pending word to be 0
    replay:  released loads are gated ──► words of their layers are 1 until the layer has landed

A full graph calls no hook when it is replayed, so the wait must lie in it; its operand is a constant, so it waits on a
word for each layer and not for a transfer (see `lamella.cuda_ext.arrival.GraphWaits`). A load that fails, is cancelled
or runs out of time clears its words, so that no replay hangs; that it failed is found at the step's end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol, cast

from lamella.connector.connector_metrics import Metrics
from lamella.connector.step_orders import StepOrders
from lamella.cuda_ext._engine_library import TransferStopped
from lamella.cuda_ext.transfer import Arriving, TransferState

_GATE_S: Final = 1.0
"""Bound on the answer of the engine's thread, which comes between two windows."""


class PendingWords(Protocol):
    """The engine's words that graphs wait on."""

    def wait_pending(self, layer: int, stream: int) -> None:
        """As `GraphWaits.wait`."""


class Gateable(Arriving, Protocol):
    """A transfer of an engine that has such words."""

    def gate(self, stream: int, timeout_s: float) -> None:
        """As `GraphWaits.gate`."""


class CapturedWaits:
    """See the module. For the model runner's thread.

    Args:
        words: of the transfer engine.
        num_layers: of this stage.
        stream: the stream that is computing, or being captured, now.
        is_capturing: whether that stream is being captured.
        any_batch: full graphs are replayed for any batch; otherwise only where every request computes one token.
        metrics: counts.
    """

    def __init__(
        self,
        words: PendingWords,
        num_layers: int,
        stream: Callable[[], int],
        is_capturing: Callable[[], bool],
        any_batch: bool,
        metrics: Metrics,
    ) -> None:
        self._words = words
        self._stream = stream
        self.is_capturing = is_capturing
        """Whether a hook is called to be captured."""
        self._any_batch = any_batch
        self._metrics = metrics
        self._captured = [0] * num_layers

    def capture(self, layer: int) -> None:
        """The graph being captured waits for the layer."""
        self._words.wait_pending(layer, self._stream())
        self._captured[layer] += 1

    @property
    def why_useless(self) -> str:
        """Why a replay would not wait for every layer; "" if it does."""
        if min(self._captured) == max(self._captured) > 0:
            return ""
        without = sum(count < max(*self._captured, 1) for count in self._captured)
        return f"{without} of {len(self._captured)} layers were captured into graphs without their wait"

    def may_replay(self, orders: StepOrders) -> bool:
        """Whether the step may be one captured graph."""
        return orders.num_tokens > 0 and (self._any_batch or orders.num_tokens == orders.num_decoding)

    def gate(self, transfer: Arriving | None, stream: int) -> bool:
        """Whether replays on `stream` wait, from now on, for what of the transfer has not landed.

        False: it was never begun, or has ended; whoever looks at it next finds out how.

        Raises:
            TimeoutError: the engine did not answer in time.
        """
        if transfer is None:
            return False
        try:
            cast("Gateable", transfer).gate(stream, _GATE_S)  # a worker's loads are its own engine's
        except TransferStopped:
            return False
        self._metrics.count("gated_loads", transfer.state is not TransferState.LANDED)
        return True
