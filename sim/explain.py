"""Where one request's time to first token went, and who caused it; of a simulated or a measured recording.

The way to the first token is cut into intervals that follow each other, so the parts add up to it to the nanosecond::

    arrival ─ admission ─ submission ─ transfer wait ─ release wait ─ queue ─ done again ─ stalls, computing ─ hand-out

The *transfer wait* lasts until so much has landed that the release rule is content; within it the link carried the
request's own slices, or others', or nothing. Where all has landed and the rule holds the request back all the same, as
`auto` does whose prefills take turns, that is a part of its own. The *release wait* is what follows until the engine
looks, which it does once a step. *Done again* is what a preemption or a failed load threw away. The *hand-out* is what
an engine that schedules ahead takes until it lets go of a token: it launches the next step before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lamella.reference.recording import LEFT_OUT, LayerStall, Recording, RequestSpan, StepSpan

Interval = tuple[int, int]


class Blame(NamedTuple):
    """A request, and for how long it was the cause."""

    request: int
    ns: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """The parts of one time to first token, in ns.

    Attributes:
        request: its number.
        ttft_ns: what the parts add up to.
        admission_ns: until the engine had the request in its queue.
        submission_ns: until its load reached the link: a poll, room for its KV.
        own_transfer_ns: of the transfer wait, its own slices on the link.
        behind: of the transfer wait, only others' slices on the link, by whose they were, the longest first.
        link_idle_ns: of the transfer wait, nothing on the link.
        held_ns: all had landed, and the release rule was not content yet.
        release_in_step_ns: of the release wait, the engine was in a step, so it did not look.
        release_idle_ns: of the release wait, the rest: the poll of an idle engine.
        queue_ns: released, until its first step began.
        redone_ns: from its first start to its last.
        stalls: in its steps, in order of time, with whose layer was waited for.
        stall_wire: whose slices the link carried meanwhile, the longest first; what is missing it carried nothing, or
            nobody wrote down when the layer landed.
        between_steps_ns: from one of its steps to the next.
        computing_ns: the rest of its steps, all their members together.
        handing_out_ns: from the end of its prefill until its token was seen.
    """

    request: int
    ttft_ns: int
    admission_ns: int
    submission_ns: int
    own_transfer_ns: int
    behind: tuple[Blame, ...]
    link_idle_ns: int
    held_ns: int
    release_in_step_ns: int
    release_idle_ns: int
    queue_ns: int
    redone_ns: int
    stalls: tuple[LayerStall, ...]
    stall_wire: tuple[Blame, ...]
    between_steps_ns: int
    computing_ns: int
    handing_out_ns: int

    @property
    def stall_ns(self) -> int:
        """All stalls."""
        return sum(stall.stall_ns for stall in self.stalls)

    @property
    def behind_ns(self) -> int:
        """All waiting for others' slices."""
        return sum(blame.ns for blame in self.behind)

    def parts(self) -> tuple[tuple[str, int], ...]:
        """(what, ns), in the order of time; they add up to `ttft_ns`."""
        return (
            ("admission", self.admission_ns),
            ("waits to be submitted", self.submission_ns),
            ("transfer wait: own slices", self.own_transfer_ns),
            ("transfer wait: behind others", self.behind_ns),
            ("transfer wait: link idle", self.link_idle_ns),
            ("held back by the release rule", self.held_ns),
            ("release wait: engine in a step", self.release_in_step_ns),
            ("release wait: idle poll", self.release_idle_ns),
            ("queue", self.queue_ns),
            ("done again", self.redone_ns),
            ("stall", self.stall_ns),
            ("between steps", self.between_steps_ns),
            ("computing", self.computing_ns),
            ("handing out", self.handing_out_ns),
        )


def explain(recording: Recording, number: int) -> Explanation:
    """The parts of that request's time to first token.

    Raises:
        ValueError: no such request.
    """
    one = recording.request(number)
    landed_ns = max((landing.landed_ns for landing in one.landings), default=one.ready_ns)
    carried_ns = max(one.submitted_ns, min(landed_ns, one.ready_ns))
    waits, link_idle_ns = _carried(recording, [(one.submitted_ns, carried_ns)], number)
    own_ns = sum(blame.ns for blame in waits if blame.request == number)
    polls = [(step.polled_ns, step.end_ns) for step in recording.steps]
    idle = _length(_without([(one.ready_ns, one.released_ns)], polls))
    steps = own_steps(recording, one)
    stalls = tuple(stall for step in steps for stall in step.stalls)
    running = sum(step.end_ns - step.start_ns for step in steps)
    handing_out_ns = one.first_token_ns - steps[-1].end_ns
    return Explanation(
        number,
        one.ttft_ns,
        one.admitted_ns - one.arrival_ns,
        one.submitted_ns - one.admitted_ns,
        own_ns,
        tuple(blame for blame in waits if blame.request != number),
        link_idle_ns,
        one.ready_ns - carried_ns,
        one.released_ns - one.ready_ns - idle,
        idle,
        one.first_started_ns - one.released_ns,
        one.started_ns - one.first_started_ns,
        stalls,
        _carried(recording, _stall_intervals(recording, steps), number)[0],
        one.first_token_ns - one.started_ns - running - handing_out_ns,
        running - sum(stall.stall_ns for stall in stalls),
        handing_out_ns,
    )


def _carried(recording: Recording, intervals: list[Interval], first: int) -> tuple[tuple[Blame, ...], int]:
    """Whose slices the link carried in the intervals, the longest first, and for how long it carried nothing.

    Where several were on their way at once (ranks, an equally shared link) the time is `first`'s, else the lowest
    number's.
    """
    if not intervals:
        return (), 0
    begin, end = intervals[0][0], intervals[-1][1]
    wire: dict[int, list[Interval]] = {}
    for busy in recording.occupations:
        if busy.station == "h2d" and busy.begin_ns < end and busy.end_ns > begin:
            wire.setdefault(busy.request, []).append((busy.begin_ns, busy.end_ns))
    left, taken = intervals, []
    for request in sorted(wire, key=lambda request: (request != first, request)):
        after = _without(left, wire[request])
        if _length(after) < _length(left):
            taken.append(Blame(request, _length(left) - _length(after)))
        left = after
    return tuple(sorted(taken, key=lambda blame: (-blame.ns, blame.request))), _length(left)


def _stall_intervals(recording: Recording, steps: Sequence[StepSpan]) -> list[Interval]:
    """When the steps stood: each stall ends when the layer that it waited for landed."""
    intervals: list[Interval] = []
    for step in steps:
        for stall in step.stalls:
            if stall.culprit == LEFT_OUT:
                continue
            landed = recording.request(stall.culprit).landed_ns(stall.layer)
            if landed is not None:
                intervals.append((max(step.start_ns, landed - stall.stall_ns), min(landed, step.end_ns)))
    return sorted(interval for interval in intervals if interval[0] < interval[1])


def own_steps(recording: Recording, one: RequestSpan) -> list[StepSpan]:
    """The steps that computed for the request from its last start to its first token."""
    return [
        step
        for step in recording.steps
        if one.started_ns <= step.start_ns < one.first_token_ns
        and any(chunk.request == one.request for chunk in step.chunks)
    ]


def explanation_lines(recording: Recording, explanation: Explanation) -> list[str]:
    """The explanation as people read it, a line a part; parts of nothing are left out."""
    one = recording.request(explanation.request)
    lines = [
        f"Request {one.request} ({recording.source.value}, {recording.strategy}): {one.cached_tokens:,} cached + "
        f"{one.new_tokens:,} new tokens, first token after {_ms(explanation.ttft_ns)} ms.",
        f"On {recording.system}.",
    ]
    for name, ns in explanation.parts():
        if ns:
            lines.append(f"{_ms(ns):>12} ms {ns / max(1, explanation.ttft_ns):5.1%}  {name}")
        if name == "transfer wait: behind others":
            lines += [f"{'':23}{_ms(blame.ns):>12} ms  request {blame.request}" for blame in explanation.behind]
        if name == "stall":
            lines += [f"{'':23}{_ms(ns):>12} ms  {cause}" for cause, ns in _stall_lines(explanation)]
            lines += [
                f"{'':23}{_ms(blame.ns):>12} ms  of it the link carried "
                + ("its own slices" if blame.request == one.request else f"slices of request {blame.request}")
                for blame in explanation.stall_wire
            ]
    lines.append(f"{_ms(sum(ns for _, ns in explanation.parts())):>12} ms         in all")
    lines += [f"Note: {note}" for note in recording.notes]
    return lines


def _stall_lines(explanation: Explanation) -> list[tuple[str, int]]:
    """Stalls at neighbouring layers for the same request as one line."""
    runs: list[list[LayerStall]] = []
    for stall in explanation.stalls:
        last = runs[-1][-1] if runs else None
        if last is not None and (stall.culprit, stall.layer) == (last.culprit, last.layer + 1):
            runs[-1].append(stall)
        else:
            runs.append([stall])
    lines = []
    for run in runs:
        layers = f"layer {run[0].layer}" if len(run) == 1 else f"layers {run[0].layer} .. {run[-1].layer}"
        whose = f" of request {run[0].culprit}"
        if run[0].culprit == explanation.request:
            whose = ", its own"
        elif run[0].culprit == LEFT_OUT:
            whose = " of a request whose load failed"
        lines.append((layers + whose, sum(stall.stall_ns for stall in run)))
    return lines


def explanation_document(explanation: Explanation) -> dict[str, object]:
    """The same for JSON, exact."""
    return {
        "request": explanation.request,
        "ttft_ns": explanation.ttft_ns,
        "parts_ns": dict(explanation.parts()),
        "behind": [blame._asdict() for blame in explanation.behind],
        "stalls": [stall._asdict() for stall in explanation.stalls],
        "stall_wire": [blame._asdict() for blame in explanation.stall_wire],
    }


def _length(intervals: Iterable[Interval]) -> int:
    return sum(end - begin for begin, end in intervals)


def _without(intervals: Sequence[Interval], taken: Sequence[Interval]) -> list[Interval]:
    """What of the intervals the taken ones do not cover.

    >>> _without([(0, 10)], [(2, 4), (3, 6), (9, 12)])
    [(0, 2), (6, 9)]
    """
    left = list(intervals)
    for begin, end in taken:
        pieces: list[Interval] = []
        for low, high in left:
            if end <= low or high <= begin:
                pieces.append((low, high))
            else:
                pieces += [piece for piece in ((low, begin), (end, high)) if piece[0] < piece[1]]
        left = pieces
    return [(low, high) for low, high in left if low < high]


def _ms(ns: int) -> str:
    return f"{ns / 1e6:,.3f}"
