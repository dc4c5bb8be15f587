"""What happened in a run, in one form for a simulated and a measured one: loads slice by slice, steps, requests.

A recording is a value; `lamella.reference.chrome_trace` writes it as a file that Perfetto and Chrome open, and reads it
back. Instants are ns from the recording's own zero, on one clock.

Contracts: REC-1 .. REC-5 of `lamella.reference`; `check_recording` holds a recording to them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Final, NamedTuple

from lamella.reference.timeline import Chunk

LEFT_OUT: Final = -1
"""In place of the number of a request that the recording does not hold."""
STATIONS: Final = ("tier", "h2d", "scatter", "d2h")


class RunSource(Enum):
    """Where a recording comes from."""

    SIMULATED = "simulated"
    MEASURED = "measured"


class Landing(NamedTuple):
    """One slice of a load, and when its layers were visible in the engine's blocks (of every rank)."""

    first_layer: int
    num_layers: int
    landed_ns: int


class Occupation(NamedTuple):
    """A station busy with a slice, or with a window of one.

    Attributes:
        station: `h2d`, the link to the device; `d2h`, the link from it; `scatter`, `tier`.
        rank: of which tensor-parallel rank.
        request: whose slice.
        part: which slice of its load, or of its store.
        begin_ns: from then,
        end_ns: until then.
        num_bytes: how much it was.
    """

    station: str
    rank: int
    request: int
    part: int
    begin_ns: int
    end_ns: int
    num_bytes: int


class LayerStall(NamedTuple):
    """A step stood for `stall_ns` at this layer of the model, until the layer of request `culprit` had landed.

    The culprit is `LEFT_OUT` if the request is not in the recording, because its load failed and it had no first token.
    """

    layer: int
    stall_ns: int
    culprit: int


class StepSpan(NamedTuple):
    """One step, or a stretch of `num_steps` in which only decoding happened.

    Attributes:
        polled_ns: when the step formed.
        start_ns: when its first layer could begin.
        end_ns: when its last layer ended.
        chunks: the prefills in it.
        stalls: where it stood still; layers that did not are left out.
        decode_batch: requests that decode a token in it.
        num_steps: more than 1 only without chunks.
    """

    polled_ns: int
    start_ns: int
    end_ns: int
    chunks: tuple[Chunk, ...]
    stalls: tuple[LayerStall, ...]
    decode_batch: int
    num_steps: int = 1


class RequestSpan(NamedTuple):
    """One request.

    Attributes:
        request: its number, which chunks, culprits and occupations refer to.
        cached_tokens: prompt tokens that are loaded or already there.
        new_tokens: prompt tokens to compute.
        output_tokens: tokens generated.
        arrival_ns: when it came.
        admitted_ns: when the engine had it in its queue.
        submitted_ns: when its load reached the link; without one, when the engine could have taken it.
        ready_ns: when so much had landed that the release rule was content.
        released_ns: when it might be scheduled.
        first_started_ns: when the first layer of its first step could begin.
        started_ns: the same, of the last start, where a preemption or a failed load threw work away.
        first_token_ns: when its first token was there: its prefill had ended, and the engine had handed it out.
        end_ns: when its last token was there.
        landings: its load, in layer order; empty without one.
    """

    request: int
    cached_tokens: int
    new_tokens: int
    output_tokens: int
    arrival_ns: int
    admitted_ns: int
    submitted_ns: int
    ready_ns: int
    released_ns: int
    first_started_ns: int
    started_ns: int
    first_token_ns: int
    end_ns: int
    landings: tuple[Landing, ...]

    @property
    def ttft_ns(self) -> int:
        """From arrival to first token."""
        return self.first_token_ns - self.arrival_ns

    @property
    def instants_ns(self) -> tuple[int, ...]:
        """Its instants, in the order in which they must come: arrival, admission, .. end."""
        return (
            self.arrival_ns,
            self.admitted_ns,
            self.submitted_ns,
            self.ready_ns,
            self.released_ns,
            self.first_started_ns,
            self.started_ns,
            self.first_token_ns,
            self.end_ns,
        )

    def landed_ns(self, layer: int) -> int | None:
        """When that layer landed; None for a request without a load."""
        for landing in self.landings:
            if layer < landing.first_layer + landing.num_layers:
                return landing.landed_ns
        return None


@dataclass(frozen=True, slots=True)
class Recording:
    """A run.

    Attributes:
        source: simulated or measured.
        system: on what: the profile, or the machine and its software.
        strategy: order, width and release, as the command line writes them.
        num_layers: layers of the model.
        requests: by number.
        steps: by time.
        occupations: of the stations, by time; empty if nobody kept them.
        notes: what a reader must know: what was estimated, what was left out.
    """

    source: RunSource
    system: str
    strategy: str
    num_layers: int
    requests: tuple[RequestSpan, ...]
    steps: tuple[StepSpan, ...]
    occupations: tuple[Occupation, ...] = ()
    notes: tuple[str, ...] = ()

    def request(self, number: int) -> RequestSpan:
        """The request of that number.

        Raises:
            ValueError: there is none; the message says which there are.
        """
        for one in self.requests:
            if one.request == number:
                return one
        numbers = [one.request for one in self.requests]
        known = f"{numbers[0]} .. {numbers[-1]}" if numbers else "none"
        raise ValueError(f"no request {number} in this recording; it holds {len(numbers)} ({known})")


def check_recording(recording: Recording) -> None:
    """The recording keeps REC-1 to REC-5.

    Raises:
        ValueError: it does not; the message names the request or step and the rule.
    """
    if recording.num_layers < 1:
        raise ValueError(f"a recording needs at least 1 layer, got {recording.num_layers}")
    by_number = {one.request: one for one in recording.requests}
    if len(by_number) != len(recording.requests):
        raise ValueError("two requests of the recording have the same number")
    for one in recording.requests:
        _check_request(one, recording.num_layers)
    for earlier, later in pairwise(recording.steps):
        if later.start_ns < earlier.end_ns:
            raise ValueError(
                f"REC-3: a step begins at {later.start_ns} ns, before the one above it ends ({earlier.end_ns})"
            )
    for step in recording.steps:
        _check_step(step, recording.num_layers, by_number)
    _check_membership(recording.steps, by_number)
    for busy in recording.occupations:
        if busy.station not in STATIONS or busy.request not in by_number or not 0 <= busy.begin_ns <= busy.end_ns:
            raise ValueError(f"REC-5: impossible occupation {busy}")


def _check_request(one: RequestSpan, num_layers: int) -> None:
    instants = one.instants_ns
    if one.arrival_ns < 0 or any(later < earlier for earlier, later in pairwise(instants)):
        raise ValueError(f"REC-1: instants of request {one.request} go back: {instants}")
    if min(one.cached_tokens, one.new_tokens - 1, one.output_tokens - 1) < 0:
        raise ValueError(f"request {one.request} computes and generates at least 1 token, got {one[1:4]}")
    layer = 0
    for part in one.landings:
        if part.first_layer != layer or part.num_layers < 1 or part.landed_ns < one.submitted_ns:
            raise ValueError(
                f"REC-2: request {one.request}, submitted at {one.submitted_ns} ns: {part} at layer {layer}"
            )
        layer += part.num_layers
    if one.landings and layer != num_layers:
        raise ValueError(f"REC-2: the slices of request {one.request} hold {layer} layers of {num_layers}")


def _check_step(step: StepSpan, num_layers: int, requests: Mapping[int, RequestSpan]) -> None:
    if not step.polled_ns <= step.start_ns <= step.end_ns or step.num_steps < 1 or step.decode_batch < 0:
        raise ValueError(f"REC-3: impossible step {step}")
    if step.num_steps > 1 and (step.chunks or step.stalls):
        raise ValueError(f"REC-3: a stretch of {step.num_steps} steps only decodes, got {step}")
    stood = 0
    for stall in step.stalls:
        stood += stall.stall_ns
        known = stall.culprit == LEFT_OUT or stall.culprit in requests
        if not known or not 0 <= stall.layer < num_layers or stall.stall_ns < 1:
            raise ValueError(f"REC-3: impossible stall {stall} in the step at {step.start_ns} ns")
    if stood > step.end_ns - step.start_ns:
        raise ValueError(f"REC-3: the step at {step.start_ns} ns stands for {stood} ns, longer than it runs")


def _check_membership(steps: Sequence[StepSpan], requests: Mapping[int, RequestSpan]) -> None:
    mine: dict[int, list[StepSpan]] = {}
    for step in steps:
        for chunk in step.chunks:
            if chunk.request not in requests:
                raise ValueError(f"REC-4: the step at {step.start_ns} ns computes for request {chunk.request}, unknown")
            mine.setdefault(chunk.request, []).append(step)
    for number, one in requests.items():
        own = [step for step in mine.get(number, []) if step.start_ns < one.first_token_ns]
        starts = {step.start_ns for step in own}
        if not {one.first_started_ns, one.started_ns} <= starts or own[-1].end_ns > one.first_token_ns:
            raise ValueError(
                f"REC-4: request {number} starts at {one.started_ns} ns and has its first token at "
                f"{one.first_token_ns}; it is in steps that start at {sorted(starts)}"
            )
