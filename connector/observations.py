"""What one rank measures for forecasts: how long the link had a load, and how long a step took that waited for none.

A step is measured on the stream that computes, from its begin until its layers are through: until the next step's
begin there may lie what the host does in between, which is no time of the step's. Of a load, the slices behind the
first are measured: before that it may wait on the device for blocks that are still being read, which is no time of the
link's. A load of one slice is measured only if the device had computed all that it was given when the load was ordered:
then there was no reader. Else it took no longer than since it was ordered, and no less than since a look found that the
device had computed all that. Nothing here waits: what a GPU has not reached yet is reported with a later step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
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

    def reached(self, mark: Any) -> bool:
        """Whether what was enqueued before the mark has been computed."""

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

    def reached(self, mark: int) -> bool:
        """Always."""
        return True

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

    def reached(self, mark: Any) -> bool:
        """Whether the event has come."""
        return bool(mark.query())

    def all_computed(self) -> bool:
        """Whether the current stream has nothing left to do."""
        import torch

        return bool(torch.cuda.current_stream(self._device).query())


def marks_of(device: str) -> Marks:
    """The marks of a device as torch names it."""
    return CudaMarks(device) if device.startswith("cuda") else HostMarks()


@dataclass(slots=True)
class Readers:
    """Who computed what a device had been given when a load was ordered: its blocks may be read until that is done.

    Attributes:
        marks: of the device; None where nobody looks.
        mark: behind all of that.
        gone_ns: they were gone by then; None: not as far as anybody has looked.
    """

    marks: Marks | None = None
    mark: Any = None
    gone_ns: int | None = None

    def look(self) -> None:
        """They are gone by now, if they are."""
        if self.gone_ns is None and self.marks is not None and self.marks.reached(self.mark):
            self.gone_ns = time.monotonic_ns()


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

    def load_ordered(self) -> Readers:
        """Who may read on while a load that has just been ordered waits."""
        if not self._sees_landings:
            return Readers()
        return Readers(gone_ns=0) if self._marks.all_computed() else Readers(self._marks, self._marks.mark())

    def load_landed(
        self, part_bytes: Sequence[int], started_ns: int, landed_ns: Sequence[int], readers: Readers
    ) -> None:
        """A load was on the link: its slices' bytes and landings, when it began, and who had it wait behind that."""
        before_ns, gone_ns = self._last_landed_ns, readers.gone_ns
        self._last_landed_ns = max(before_ns, landed_ns[-1])
        begun_ns = started_ns if gone_ns is not None and gone_ns <= started_ns else None
        slices, num_bytes, took_ns = time_on_link(part_bytes, begun_ns, landed_ns, before_ns)
        if took_ns > 0:
            self._found = self._found.with_load(slices, num_bytes, took_ns)
        elif len(part_bytes) == 1 and readers.marks is not None:
            most_ns = landed_ns[0] - max(started_ns, before_ns)
            least_ns = 0 if gone_ns is None else max(0, landed_ns[0] - max(started_ns, before_ns, gone_ns))
            if most_ns > 0:
                self._found = self._found.with_bounded_load(part_bytes[0], least_ns, most_ns)

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
