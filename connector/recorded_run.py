"""The logs of a run of the engine as a recording, the form that simulated runs have as well.

What the host did not see is estimated, and the recording's notes say so: a slice's first byte is taken to follow the
last byte of the slice before it on that link, and a step to end with its forward
pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from lamella.connector.run_log import SCHEDULER_LOG, WORKER_LOGS, read_log
from lamella.reference.recording import (
    Landing,
    LayerStall,
    Occupation,
    Recording,
    RequestSpan,
    RunSource,
    StepSpan,
    check_recording,
)
from lamella.reference.timeline import Chunk

NOTES: Final = (
    "the first byte of a slice is taken to follow the last byte of the slice before it on the link",
    "a step ends when its forward pass has; sampling is not in it",
)


@dataclass(slots=True)
class _Load:
    """A load of one request on one rank."""

    submitted_ns: int
    started_ns: int
    slices: list[list[int]]
    landed_ns: list[int]
    num_bytes: int


@dataclass(slots=True)
class _Request:
    """What the logs say of a request; steps by number."""

    name: str
    prompt_tokens: int
    arrived_ns: int
    admitted_ns: int
    released_ns: int = 0
    loads: dict[int, _Load] = field(default_factory=dict)
    steps: list[tuple[int, int, int]] = field(default_factory=list)  # (step, tokens there, tokens computed)


def read_run(folder: Path) -> Recording:
    """The recording of the run whose logs lie in the folder.

    Requests that were not served to a first token are left out.

    Raises:
        ValueError: logs that are missing, broken, or say the impossible.
        OSError: one that cannot be read.
    """
    workers = sorted(folder.glob(WORKER_LOGS))
    if not (folder / SCHEDULER_LOG).exists() or not workers:
        raise ValueError(f"{folder} holds no run: it needs {SCHEDULER_LOG} and {WORKER_LOGS}")
    return assemble([read_log(folder / SCHEDULER_LOG), *map(read_log, workers)])


def assemble(logs: Sequence[Sequence[Mapping[str, Any]]]) -> Recording:
    """The recording that the logs make: the scheduler's first, then one a rank.

    Raises:
        ValueError: they say the impossible.
    """
    scheduler, *workers = logs
    try:
        recording = _assemble(scheduler, workers)
    except (KeyError, TypeError, IndexError, StopIteration) as error:
        raise ValueError(f"the logs do not fit together: {error!r}") from error
    check_recording(recording)
    return recording


def _assemble(scheduler: Sequence[Mapping[str, Any]], workers: Sequence[Sequence[Mapping[str, Any]]]) -> Recording:
    engine = next(event for event in scheduler if event["event"] == "engine")
    num_layers = next(event["num_layers"] for event in workers[0] if event["event"] == "caches")
    requests: dict[str, _Request] = {}
    polls: list[tuple[int, list[list[Any]]]] = []
    for event in scheduler:
        if event["event"] == "admitted":
            name = event["request"]
            requests[name] = _Request(name, event["prompt_tokens"], event["arrived_ns"], event["at_ns"])
        elif event["event"] == "scheduled":
            for name, computed, new in event["batch"]:
                requests[name].steps.append((len(polls), computed, new))
            polls.append((event["at_ns"], event["batch"]))
        elif event["event"] == "released":
            for name in event["requests"]:
                if name in requests:
                    requests[name].released_ns = event["at_ns"]
    for rank, log in enumerate(workers):
        for event in log:
            if event["event"] == "load" and event["state"] == "LANDED" and event["request"] in requests:
                requests[event["request"]].loads[rank] = _Load(
                    event["submitted_ns"],
                    event["started_ns"],
                    event["slices"],
                    event["landed_ns"],
                    event["num_bytes"],
                )
    spans = _step_times(workers[0])
    done = [one for one in requests.values() if _first_token(one) is not None and _ran(one, spans)]
    done.sort(key=lambda one: (one.arrived_ns, one.name))
    numbers = {one.name: number for number, one in enumerate(done)}
    zero = min((one.arrived_ns for one in done), default=0)
    left = len(requests) - len(done)
    notes = NOTES + ((f"{left} requests without a first token are left out",) if left else ())
    taken = [_request(one, numbers[one.name], zero, polls, spans, num_layers) for one in done]
    return Recording(
        RunSource.MEASURED,
        str(engine["system"]),
        str(engine["strategy"]),
        num_layers,
        tuple(taken),
        tuple(_steps(polls, spans, requests, numbers, taken, zero)),
        tuple(_occupations(done, numbers, zero)),
        notes,
    )


_Span = tuple[int, int, list[list[int]]]


def _step_times(worker: Sequence[Mapping[str, Any]]) -> list[_Span | None]:
    """(begin, end, waits) of each step, as the worker saw it; None for one without a forward pass."""
    return [
        (event["began_ns"], event["ended_ns"], event["waits"]) if event["event"] == "step" else None
        for event in worker
        if event["event"] in ("step", "step_empty")
    ]


def _first_token(one: _Request) -> int | None:
    """The step that completes the prompt; None if none does. Of several, after a preemption, the first."""
    return next((step for step, computed, new in one.steps if computed + new >= one.prompt_tokens), None)


def _ran(one: _Request, spans: Sequence[_Span | None]) -> bool:
    return all(step < len(spans) and spans[step] is not None for step, _, _ in one.steps)


def _span(spans: Sequence[_Span | None], step: int) -> _Span:
    found = spans[step]
    assert found is not None, "only steps with a forward pass have members"
    return found


def _request(
    one: _Request,
    number: int,
    zero: int,
    polls: Sequence[tuple[int, object]],
    spans: Sequence[_Span | None],
    num_layers: int,
) -> RequestSpan:
    last = _first_token(one)
    assert last is not None, "only requests with a first token are kept"
    mine = [entry for entry in one.steps if entry[0] <= last]
    # A preempted request begins again where its tokens there fall; its last start is the last such step.
    starts = [mine[0]] + [now for before, now in pairwise(mine) if now[1] < before[1] + before[2]]
    cached = starts[-1][1]
    polled = polls[mine[0][0]][0]
    first_started, started = (_span(spans, entry[0])[0] for entry in (mine[0], starts[-1]))
    landings = _landings(one, num_layers)
    if landings:
        submitted = min(load.submitted_ns for load in one.loads.values())
        released = one.released_ns or polled  # a load that joins the very next step is never reported
    else:
        submitted = released = min(one.released_ns or polled, polled)
    submitted = max(one.admitted_ns, submitted)
    released = min(max(released, submitted), first_started)
    submitted = min(submitted, released)
    ready = min(released, max(submitted, landings[0].landed_ns)) if landings else submitted
    end = max(_span(spans, entry[0])[1] for entry in one.steps)
    return RequestSpan(
        number,
        cached,
        one.prompt_tokens - cached,
        1 + sum(entry[0] > last for entry in one.steps),
        one.arrived_ns - zero,
        max(one.arrived_ns, one.admitted_ns) - zero,
        submitted - zero,
        ready - zero,
        released - zero,
        first_started - zero,
        started - zero,
        _span(spans, last)[1] - zero,
        end - zero,
        tuple(Landing(part.first_layer, part.num_layers, part.landed_ns - zero) for part in landings),
    )


def _landings(one: _Request, num_layers: int) -> list[Landing]:
    """When each slice was there on every rank; nothing if a load brought less than all layers."""
    if not one.loads:
        return []
    loads = list(one.loads.values())
    found = []
    for part, (first, width) in enumerate(loads[0].slices):
        found.append(Landing(first, width, max(load.landed_ns[part] for load in loads)))
    return found if sum(part.num_layers for part in found) == num_layers else []


def _steps(
    polls: Sequence[tuple[int, list[list[Any]]]],
    spans: Sequence[_Span | None],
    requests: Mapping[str, _Request],
    numbers: Mapping[str, int],
    taken: Sequence[RequestSpan],
    zero: int,
) -> list[StepSpan]:
    found: list[StepSpan] = []
    for (polled, batch), span in zip(polls, spans, strict=False):
        if span is None or not any(name in numbers for name, _, _ in batch):
            continue
        begin, end, waits = span
        if begin < zero:
            continue
        chunks = []
        decoding = 0
        for name, computed, new in batch:
            if name not in numbers:
                continue
            one = requests[name]
            if computed < one.prompt_tokens:
                cached = taken[numbers[name]].cached_tokens
                chunks.append(Chunk(numbers[name], max(0, computed - cached), new))
            else:
                decoding += 1
        stalls = tuple(stall for wait in waits if (stall := _stall(wait, taken, zero)) is not None)
        found.append(StepSpan(min(polled, begin) - zero, begin - zero, end - zero, tuple(chunks), stalls, decoding))
    return found


def _stall(wait: Sequence[int], taken: Sequence[RequestSpan], zero: int) -> LayerStall | None:
    """A wait that began before a load's layer landed is a stall, for the one that landed last before the wait ended."""
    layer, began, ended = wait[0], wait[1] - zero, wait[2] - zero
    landed = [(at, one.request) for one in taken if (at := one.landed_ns(layer)) is not None and began < at <= ended]
    if not landed:
        return None
    return LayerStall(layer, ended - began, max(landed)[1])


def _occupations(done: Sequence[_Request], numbers: Mapping[str, int], zero: int) -> list[Occupation]:
    found: list[Occupation] = []
    ranks = {rank for one in done for rank in one.loads}
    for rank in sorted(ranks):
        slices = sorted(
            (landed, numbers[one.name], part, one.loads[rank])
            for one in done
            if rank in one.loads
            for part, landed in enumerate(one.loads[rank].landed_ns)
        )
        before = 0
        for landed, number, part, load in slices:
            begin = min(landed, max(before, load.started_ns))
            layers = sum(width for _, width in load.slices)
            num_bytes = load.num_bytes * load.slices[part][1] // layers
            found.append(Occupation("h2d", rank, number, part, begin - zero, landed - zero, num_bytes))
            before = landed
    return found
