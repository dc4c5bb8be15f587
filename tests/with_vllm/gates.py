"""Loads that land slice by slice as a test lets them, on any device.

The CPU device of the transfer engine can hold windows back by itself. A GPU cannot: there each slice of a load is a
transfer of its own, handed to the engine when the test lets it, and `GatedTransfer` shows them as the one that they
stand for. Either way the real engine moves the bytes, and the model runner's real waits are met.
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

from lamella.cuda_ext._engine_library import TransferStopped
from lamella.cuda_ext.transfer import CopyMethod, Progress, SliceTimes, Transfer, TransferState
from lamella.reference.plan import Direction

_TICK_S = 0.0002


class NativeGate:
    """Windows held back by the engine itself (CPU device, `paced`)."""

    held_of_a_stopped_load = 1
    """Slices that a failed or cancelled load still needs to be let: the one that was handed to the device."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        engine.grant(Direction.STORE, 1 << 40)

    def grant(self, slices: int) -> None:
        """So many more slices may move, those of the oldest load first."""
        self._engine.grant(Direction.RETRIEVE, slices)

    def fail_at(self, slices: int) -> None:
        """The slice of that number, counted from the next one on, fails when it is reached."""
        self._engine.plant_fault(Direction.RETRIEVE, self._engine.lane(Direction.RETRIEVE).windows + slices)

    @property
    def live(self) -> int:
        """Loads that are not final."""
        return int(self._engine.lane(Direction.RETRIEVE).live_transfers)


class GatedTransfer:
    """Stands for one transfer whose slices are submitted one by one; what `Transfer` says, of all of them."""

    def __init__(self, gate: SliceGate, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._gate = gate
        self._arguments = arguments
        self._drained = options.pop("on_drained", None)
        self.slices = tuple(options.pop("slices"))
        self._options = options
        self._parts: list[Transfer] = []
        self._cancelled = False
        self._in_hand = gate.held_of_a_stopped_load > 0
        self._broken = ""
        self._since_ns = time.monotonic_ns()
        self.num_bytes = 0

    def submit_next(self, fails: bool) -> None:
        if fails:
            self._broken = "planted"
            return
        self._in_hand = self._in_hand and not self._cancelled
        part = self._gate.submit(*self._arguments, slices=(self.slices[len(self._parts)],), **self._options)
        self._parts.append(part)

    @property
    def wants_more(self) -> bool:
        return len(self._parts) < len(self.slices) and (not self._stopped or self._still_moves)

    @property
    def _still_moves(self) -> bool:
        """Cancelled, but for the slice that counts as handed to the device."""
        return self._cancelled and self._in_hand and len(self._parts) < len(self.slices)

    @property
    def _stopped(self) -> bool:
        return self._cancelled or bool(self._broken) or any(one.state is TransferState.FAILED for one in self._parts)

    @property
    def num_slices(self) -> int:
        return len(self.slices)

    @property
    def state(self) -> TransferState:
        states = [part.state for part in self._parts]
        if self._still_moves or not all(state.is_final for state in states):
            return TransferState.RUNNING
        if len(states) == len(self.slices) and set(states) == {TransferState.LANDED}:
            return TransferState.LANDED
        if self._broken or TransferState.FAILED in states:
            return TransferState.FAILED
        if self._cancelled:
            return TransferState.CANCELLED
        return TransferState.RUNNING if states else TransferState.QUEUED

    def landed(self) -> int:
        return sum(1 for _ in itertools.takewhile(lambda part: part.state is TransferState.LANDED, self._parts))

    def recorded(self) -> int:
        return sum(part.recorded() for part in self._parts)

    def query(self) -> Progress:
        state, landed = self.state, self.landed()
        return Progress(state, max(landed, self.recorded()), landed, CopyMethod.AUTO, 0, self._since_ns, self._since_ns)

    def wait_final(self, timeout_s: float) -> TransferState:
        until = time.monotonic() + timeout_s
        while not self.state.is_final:
            if time.monotonic() >= until:
                raise TimeoutError(f"not final within {timeout_s} s")
            time.sleep(_TICK_S)
        return self.state

    def wait_layer(self, layer: int, stream: int = 0, timeout_s: float = 30.0) -> int:
        start = time.monotonic()
        index = next(number for number, part in enumerate(self.slices) if layer < part.end_layer)
        while len(self._parts) <= index:
            if self._stopped:
                raise TransferStopped(self.error or "the transfer was cancelled")
            if time.monotonic() - start > timeout_s:
                raise TimeoutError(f"layer {layer} was not recorded within {timeout_s} s")
            time.sleep(_TICK_S)
        for part, own in zip(self._parts[: index + 1], self.slices, strict=False):
            part.wait_layer(own.first_layer, stream, max(0.0, timeout_s - (time.monotonic() - start)))
        return int((time.monotonic() - start) * 1e9)

    def cancel(self) -> None:
        self._cancelled = True
        for part in self._parts:
            part.cancel()

    @property
    def error(self) -> str:
        return self._broken or next((part.error for part in self._parts if part.error), "")

    def timestamps_ns(self) -> SliceTimes:
        times = [part.timestamps_ns() for part in self._parts]
        missing = (0,) * (len(self.slices) - len(times))
        return SliceTimes(
            tuple(one.recorded_ns[0] for one in times) + missing, tuple(one.landed_ns[0] for one in times) + missing
        )


class SliceGate:
    """Slices of retrieves held back by this object, which stands between the connector and the engine.

    Args:
        engine: whose `submit` is replaced.
        in_hand: a load counts as having its next slice handed to the device already: cancelled, it still moves that one
            when it is let, and is not final before.
    """

    def __init__(self, engine: Any, *, in_hand: bool = False) -> None:
        self.held_of_a_stopped_load = int(in_hand)
        self.submit = engine.submit
        self._lock = threading.RLock()
        self._transfers: list[GatedTransfer] = []
        self._granted = 0
        self._fail_after: int | None = None
        engine.submit = self._submit

    def _submit(self, cache: Any, direction: Direction, *arguments: Any, **options: Any) -> Any:
        if direction is Direction.STORE:
            return self.submit(cache, direction, *arguments, **options)
        transfer = GatedTransfer(self, (cache, direction, *arguments), options)
        with self._lock:
            self._transfers.append(transfer)
            self._advance()
        return transfer

    def grant(self, slices: int) -> None:
        """As `NativeGate.grant`."""
        with self._lock:
            self._granted += slices
            self._advance()

    def fail_at(self, slices: int) -> None:
        """As `NativeGate.fail_at`."""
        with self._lock:
            self._fail_after = slices

    @property
    def live(self) -> int:
        """As `NativeGate.live`."""
        with self._lock:
            self._transfers = [one for one in self._transfers if not one.state.is_final]
            return len(self._transfers)

    def _advance(self) -> None:
        while self._granted > 0:
            self._transfers = [one for one in self._transfers if not one.state.is_final]
            waiting = next((one for one in self._transfers if one.wants_more), None)
            if waiting is None:
                return
            fails = self._fail_after == 0
            self._fail_after = None if self._fail_after in (None, 0) else self._fail_after - 1
            self._granted -= 1
            waiting.submit_next(fails)
