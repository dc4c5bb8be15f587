"""What one rank measures for forecasts: how long the link had a load, and how long a step took that waited for none.

A step is measured on the stream that computes, from its begin until its layers are through: until the next step's
begin there may lie what the host does in between, which is no time of the step's. Of a load, the slices behind the
first are measured: before that it may wait on the device for blocks that are still being read, which is no time of the
link's. A load of one slice is measured only if the device had computed all that it was given when the load was ordered:
then there was no reader. Nothing here waits: what a GPU has not reached yet is reported with a later step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

from lamella.connector.step_orders import Observed, StepOrders
from lamella.reference.correction import time_on_link

_MOST_OPEN: Final = 64
_NOTHING: Final = Observed()


class Marks(Protocol):
    """Instants on whatever computes."""

    def mark(self) -> Any:
        """The instant at which what was enqueued so far has been computed."""

    def between_ns(self, begin: Any, end: Any) -> int | None:
        """The time between two marks; None while the second has not been reached."""

    def all_computed(self) -> bool:
        """Whether all that was enqueued so far has been computed."""


class HostMarks:
    """Marks of a device that computes on the calling thread."""

    def mark(self) -> int:
        """Now."""
        return time.monotonic_ns()

    def between_ns(self, begin: int, end: int) -> int:
        """The time between two marks."""
        return end - begin

    def all_computed(self) -> bool:
        """Always: a caller who asks is not computing."""
        return True


class CudaMarks:
    """Events on the current stream.

    Args:
        device: such as "cuda:0".
    """

    def __init__(self, device: str) -> None:
        import torch

        self._device = torch.device(device)

    def mark(self) -> Any:
        """An event behind all that the stream has been given."""
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def between_ns(self, begin: Any, end: Any) -> int | None:
        """The time between two events; None while the second has not come."""
        return round(begin.elapsed_time(end) * 1e6) if end.query() else None

    def all_computed(self) -> bool:
        """Whether the current stream has nothing left to do."""
        import torch

        return bool(torch.cuda.current_stream(self._device).query())


def marks_of(device: str) -> Marks:
    """The marks of a device as torch names it."""
    return CudaMarks(device) if device.startswith("cuda") else HostMarks()


class _Measured(NamedTuple):
    expected_ns: int
    begin: Any
    end: Any


class Observations:
    """See the module; called on the model runner's thread.

    Args:
        marks: of the device that computes.
        sees_landings: landings are told as they were, and not as somebody saw them who looks now and then.
    """

    def __init__(self, marks: Marks, *, sees_landings: bool = True) -> None:
        self._marks = marks
        self._sees_landings = sees_landings
        self._found = _NOTHING
        self._last_landed_ns = 0
        self._begun: tuple[int, Any] | None = None  # (expected, mark) of the step under way, if it is to be measured
        self._open: deque[_Measured] = deque(maxlen=_MOST_OPEN)

    def has_no_readers(self) -> bool:
        """Whether a load that has just been ordered waits for nobody who computes."""
        return self._sees_landings and self._marks.all_computed()

    def load_landed(self, part_bytes: Sequence[int], started_ns: int | None, landed_ns: Sequence[int]) -> None:
        """A load was on the link: its slices' bytes and landings, and when it began, if it waited for no reader."""
        slices, num_bytes, took_ns = time_on_link(part_bytes, started_ns, landed_ns, self._last_landed_ns)
        self._last_landed_ns = max(self._last_landed_ns, landed_ns[-1])
        if took_ns > 0:
            self._found = self._found.with_load(slices, num_bytes, took_ns)

    def step_begins(self, orders: StepOrders, waits: bool) -> None:
        """A step begins; `waits`: its layers wait for loads, so that its time would say nothing."""
        wanted = orders.expected_ns > 0 and not waits
        self._begun = (orders.expected_ns, self._marks.mark()) if wanted else None

    def step_computed(self) -> None:
        """All layers of the step under way were given to the device."""
        if self._begun is not None:
            self._open.append(_Measured(*self._begun, self._marks.mark()))
            self._begun = None

    def take(self) -> Observed:
        """What has been measured since the last call."""
        while self._open:
            took_ns = self._marks.between_ns(self._open[0].begin, self._open[0].end)
            if took_ns is None:
                break
            self._found = self._found.with_step(self._open.popleft().expected_ns, took_ns)
        found, self._found = self._found, _NOTHING
        return found
