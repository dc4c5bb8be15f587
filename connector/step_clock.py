"""Steps and the waits in them, by marks on whatever computes, as instants of the host's clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lamella.connector.observations import Marks


@dataclass(slots=True)
class TimedStep:
    """A step by marks on whatever computes; `end` is None for one without a forward pass."""

    begin: Any
    waits: list[tuple[int, Any, Any]] = field(default_factory=list)
    end: Any = None


class StepClock:
    """Turns marks into instants of `time.monotonic_ns`, step after step.

    Each step counts from the one before, so that the short float in which a GPU answers stays exact enough.

    Args:
        marks: of the device.
        mark: one that has been reached.
        at_ns: when it was.
    """

    def __init__(self, marks: Marks, mark: Any, at_ns: int) -> None:
        self._marks = marks
        self._mark = mark
        self._at_ns = at_ns

    def resolve(self, step: TimedStep) -> tuple[int, list[tuple[int, int, int]], int] | None:
        """(begin, waits, end) of a step with a forward pass; None while the device has not reached its end."""
        between = self._marks.between_ns
        length = between(step.begin, step.end)
        since = None if length is None else between(self._mark, step.begin)
        if length is None or since is None:
            return None
        begin_ns = self._at_ns + since
        waits = []
        for layer, begun, ended in step.waits:
            first, last = between(step.begin, begun), between(step.begin, ended)
            assert first is not None, "what was marked within the step has been reached with its end"
            assert last is not None, "what was marked within the step has been reached with its end"
            waits.append((layer, begin_ns + first, begin_ns + last))
        self._mark, self._at_ns = step.begin, begin_ns
        return begin_ns, waits, begin_ns + length
