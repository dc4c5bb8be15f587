"""A recorded repeat's instants, for questions about what happened between two of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from lamella.sim.recorded import RecordedRepeat, RecordedRequest, RecordedStep
from lamella.sim.settings import StepsWait


class Moments:
    """A repeat's instants, sorted, for questions about what happened between two of them."""

    def __init__(self, repeat: RecordedRepeat) -> None:
        self.repeat = repeat
        requests = repeat.requests
        self.tokens = sorted({one.at_ns + token for one in requests for token in one.token_ns})
        self.asks = sorted(one.at_ns + one.asked_ns for one in requests if one.asked_ns is not None)
        self.arrivals = sorted(one.at_ns for one in requests)
        self.loads = sorted((one for one in requests if one.landed_ns), key=started_ns)
        self._ends = [step.end_ns for step in repeat.steps]

    def gated(self, step: RecordedStep) -> bool:
        """Whether the step may have stood for a load that was released and had not landed."""
        return any(
            one.at_ns + one.landed_ns[-1] > step.begin_ns
            and (one.released_ns is None or one.at_ns + one.released_ns < step.begin_ns + step.host_ns)
            for one in self.loads
        )

    def gave(self, request: RecordedRequest) -> RecordedStep | None:
        """The pass that computed the request's prompt to its end, and so gave its first token."""
        last = bisect_right(self._ends, request.at_ns + request.token_ns[0]) - 1  # launched before it was handed out
        steps = self.repeat.steps[max(0, last - 1) : last + 1]
        return next((step for step in steps if step.tokens > step.decoding), None)

    def gates(self, load: RecordedRequest, step: RecordedStep) -> bool:
        """Whether the step's layers waited for the load; where only its batch's count, of a prompt computed at once."""
        if load.at_ns + load.landed_ns[-1] <= step.begin_ns:
            return False
        if load.released_ns is None:  # a load inside its own step
            return ordered_in(load, step)
        told_ns = step.end_ns if load.by_forecast else step.begin_ns
        if load.at_ns + load.released_ns > told_ns:
            return False
        return self.repeat.steps_wait is StepsWait.EVERY or self.gave(load) == step

    def beside(self, step: RecordedStep) -> float:
        """Which share of the step's device time the link was busy."""
        assert step.device_ns is not None, "asked only of steps that were timed"
        begin, end, covered = step.begin_ns, step.begin_ns + step.device_ns, 0
        for one in self.loads:
            low = max(begin, started_ns(one))
            begin = max(begin, min(end, one.at_ns + one.landed_ns[-1]))
            covered += max(0, min(end, one.at_ns + one.landed_ns[-1]) - low)
        return covered / max(1, step.device_ns)


def started_ns(one: RecordedRequest) -> int:
    """When the lane took the request's load up, from the repeat's begin."""
    return one.at_ns + (one.started_ns or 0)


def within(instants: Sequence[int], begin: int, end: int) -> Sequence[int]:
    """Those after `begin` and up to `end`."""
    return instants[bisect_right(instants, begin) : bisect_right(instants, end)]


def ordered_in(request: RecordedRequest, step: RecordedStep) -> bool:
    """Whether the request's load was begun with that pass."""
    instant = None if request.ordered_ns is None else request.at_ns + request.ordered_ns
    return instant is not None and step.begin_ns <= instant <= step.begin_ns + step.orders_ns


def link_bytes_per_s(repeat: RecordedRepeat) -> float | None:
    """What the link carried while at least one load was on it; None without loads."""
    on_link = sorted((started_ns(one), one.at_ns + one.landed_ns[-1]) for one in repeat.requests if one.landed_ns)
    busy_ns = until_ns = 0
    for begin_ns, end_ns in on_link:
        busy_ns += max(0, end_ns - max(begin_ns, until_ns))
        until_ns = max(until_ns, end_ns)
    return sum(one.load_bytes for one in repeat.requests) * 1e9 / busy_ns if busy_ns else None


def asked_together(one: Moments) -> Iterable[tuple[RecordedStep, list[int]]]:
    """Passes that begin loads, and when each of those requests asked, in order."""
    for step in one.repeat.steps:
        asked = [
            request.at_ns + request.asked_ns
            for request in one.repeat.requests
            if request.asked_ns is not None and ordered_in(request, step)
        ]
        if asked:
            yield step, sorted(asked)
