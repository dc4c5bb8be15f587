"""One rank's loads without an engine: transfers that land as a test says, and steps as a model runner makes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from lamella.connector.captured_waits import CapturedWaits
from lamella.connector.connector_metrics import Metrics
from lamella.connector.load_in_flight import Load
from lamella.connector.safety_rules import ALL_RULES
from lamella.connector.step_orders import LoadOrder, StepOrders
from lamella.connector.worker_loads import WorkerLoads
from lamella.cuda_ext._engine_library import TransferStopped
from lamella.cuda_ext.transfer import CopyMethod, Progress, SliceTimes, TransferState
from lamella.reference.release import First
from lamella.reference.slices import Slice, plan_slices

LAYERS = 4
TABLE = (3, 5)
READS_IT = StepOrders(num_tokens=1, num_decoding=1, held_blocks=frozenset(TABLE))


class Words:
    """Remembers what was captured."""

    def __init__(self) -> None:
        self.captured: list[tuple[int, int]] = []

    def wait_pending(self, layer: int, stream: int) -> None:
        self.captured.append((layer, stream))


class Moving:
    """A transfer whose slices land as the test says, and whose enqueued waits return at once, as they do on a GPU."""

    def __init__(self, landed: int = 1, ends: TransferState = TransferState.LANDED) -> None:
        self.slices: tuple[Slice, ...] = plan_slices(LAYERS, 1)
        self.gates = 0
        self.cancelled = False
        self._landed, self._ends, self._state = landed, ends, TransferState.RUNNING

    num_slices = LAYERS
    error = "the copy was lost"

    @property
    def state(self) -> TransferState:
        return self._state

    def land(self, layers: int = 1) -> None:
        """So many layers more are there; with the last one it has ended."""
        self._landed = min(LAYERS, self._landed + layers)
        if self._landed == LAYERS:
            self._state = TransferState.LANDED

    def fail(self) -> None:
        """The copy is lost."""
        self._state = TransferState.FAILED

    def query(self) -> Progress:
        return Progress(self.state, LAYERS, self._landed, CopyMethod.AUTO, 0, 1, 1)

    def gate(self, stream: int, timeout_s: float) -> None:
        if self.gates:
            raise TransferStopped("the transfer is gated already")
        self.gates += 1

    def wait_layer(self, layer: int, stream: int = 0, timeout_s: float = 30.0) -> int:
        return 0

    def wait_final(self, timeout_s: float) -> TransferState:
        if self._ends is TransferState.RUNNING and not self.cancelled:
            raise TimeoutError("not final within the bound")
        self._landed = LAYERS if self._ends is TransferState.LANDED else self._landed
        self._state = TransferState.CANCELLED if self.cancelled else self._ends
        return self._state

    def timestamps_ns(self) -> SliceTimes:
        return SliceTimes((1,) * LAYERS, (1,) * LAYERS)

    def cancel(self) -> None:
        self.cancelled = self._state is TransferState.RUNNING


class Rank:
    """One rank's loads, whose graphs were captured as the test says."""

    def __init__(self, *, captured: Callable[[int], int] = lambda layer: 2, any_batch: bool = False) -> None:
        self.metrics = Metrics()
        self.words = Words()
        self.captured = CapturedWaits(self.words, LAYERS, lambda: 7, lambda: False, any_batch, self.metrics)
        for layer in range(LAYERS):
            for _graph in range(captured(layer)):
                self.captured.capture(layer)
        self.moving: list[Moving] = []
        self.loads = WorkerLoads(
            lambda order: lambda: self.moving[order.number],
            LAYERS,
            First(1),
            16,
            4,
            0.05,
            lambda: 7,
            ALL_RULES,
            self.metrics,
            captured=self.captured,
        )

    def load(self, moving: Moving | None = None) -> Moving:
        """A load that was released early and is landing."""
        load = self.load_of(moving or Moving())
        assert self.loads.poll().received == {load.order.request}
        return self.moving[-1]

    def load_of(self, moving: Moving, *, joins_step: bool = False) -> Load:
        """A load that a step has begun, with this transfer; the step is still open."""
        self.moving.append(moving)
        number = len(self.moving) - 1
        order = LoadOrder(number, f"r{number}", (0, 1), 0, (TABLE,), 32, 0, joins_step)
        orders = replace(READS_IT, loads=(order,)) if joins_step else StepOrders(loads=(order,))
        self.loads.begin_step(orders)
        load = self.loads.find(number)
        assert load is not None
        return load

    def step(self, orders: StepOrders, *, replays: bool = False, hooked: bool | Sequence[int] = False) -> set[int]:
        """One step as the engine makes it, whose hooks are called for these layers; the blocks that it reports."""
        layers = range(LAYERS) if hooked is True else hooked or ()
        self.loads.begin_step(orders)
        if replays:
            self.loads.replays()
        for layer in layers:
            self.loads.wait_layer(layer)
        self.loads.settle()
        self.loads.poll()
        return self.loads.errors()
