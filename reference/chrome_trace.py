"""A recording as a Chrome trace: the JSON that Perfetto (ui.perfetto.dev) and chrome://tracing open, and back.

Tracks: the engine's steps with their stalls; each station of each rank with one slice after another; and each request
with the parts of its way to the first token. The exact integers stand in each event's `args`; `ts` and `dur`
are the same in microseconds, for the eye. Reading uses `args` alone and is strict.

Source: the Trace Event Format, complete events (`ph` X) and metadata events (`ph` M).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, Final

from lamella.reference.recording import (
    STATIONS,
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

SCHEMA_VERSION: Final = 1
KIND: Final = "lamella.recording"
ENGINE, TRANSFER, REQUESTS = 1, 2, 3
_PROCESSES: Final = {ENGINE: "engine", TRANSFER: "transfer", REQUESTS: "requests"}

_PARTS: Final = (
    "admission",
    "waits to be submitted",
    "transfer wait",
    "release wait",
    "queue",
    "done again",
    "prefill",
    "decode",
)
"""From each instant of a request to its next."""

Event = dict[str, Any]


def to_chrome_trace(recording: Recording) -> dict[str, Any]:
    """The document to write as JSON.

    Raises:
        ValueError: what `check_recording` refuses.
    """
    check_recording(recording)
    by_number = {one.request: one for one in recording.requests}
    return {
        "traceEvents": [
            *_names(recording),
            *(event for step in recording.steps for event in _step_events(step, by_number)),
            *map(_occupation_event, recording.occupations),
            *(event for one in recording.requests for event in _request_events(one)),
        ],
        "displayTimeUnit": "ms",
        "otherData": {
            "kind": KIND,
            "schema_version": SCHEMA_VERSION,
            "source": recording.source.value,
            "system": recording.system,
            "strategy": recording.strategy,
            "num_layers": recording.num_layers,
            "notes": list(recording.notes),
        },
    }


def from_chrome_trace(document: object) -> Recording:
    """The recording that `to_chrome_trace` wrote; events of others are ignored.

    Raises:
        ValueError: not a recording of this schema, or what `check_recording` refuses.
    """
    head = document.get("otherData") if isinstance(document, Mapping) else None
    events = document.get("traceEvents") if isinstance(document, Mapping) else None
    if not isinstance(head, Mapping) or head.get("kind") != KIND or not isinstance(events, list):
        raise ValueError(f"not a recording: a trace of lamella has otherData.kind {KIND!r}")
    if head.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"the recording's schema_version must be {SCHEMA_VERSION}, got {head.get('schema_version')!r}")
    steps: list[StepSpan] = []
    requests: list[RequestSpan] = []
    occupations: list[Occupation] = []
    for position, event in enumerate(events):
        category = event.get("cat") if isinstance(event, Mapping) else None
        if category not in ("lamella.step", "lamella.request", "lamella.occupation"):
            continue
        try:
            if category == "lamella.step":
                steps.append(_read_step(event["args"]))
            elif category == "lamella.request":
                requests.append(_read_request(event["args"]))
            else:
                occupations.append(_read_occupation(event["args"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"event {position} of the trace is no {category}: {error!r}") from error
    try:
        recording = Recording(
            RunSource(head["source"]),
            str(head["system"]),
            str(head["strategy"]),
            _whole(head["num_layers"]),
            tuple(sorted(requests)),
            tuple(sorted(steps)),
            tuple(occupations),
            tuple(map(str, head["notes"])),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"otherData of the trace is incomplete: {error!r}") from error
    check_recording(recording)
    return recording


# ---------------------------------------------------------------- events


def _span(name: str, category: str, process: int, track: int, begin_ns: int, end_ns: int, args: Any = None) -> Event:
    event: Event = {
        "name": name,
        "cat": category,
        "ph": "X",
        "pid": process,
        "tid": track,
        "ts": begin_ns / 1000,
        "dur": (end_ns - begin_ns) / 1000,
    }
    if args is not None:
        event["args"] = args
    return event


def _names(recording: Recording) -> Iterator[Event]:
    title = f"{recording.source.value}, {recording.strategy}"
    for process, name in _PROCESSES.items():
        yield _name("process_name", process, 0, f"{name} ({title})")
        yield {**_name("process_sort_index", process, 0, ""), "args": {"sort_index": process}}
    yield _name("thread_name", ENGINE, 1, "steps")
    for track in sorted({_track(busy.station, busy.rank) for busy in recording.occupations}):
        rank, station = divmod(track - 1, len(STATIONS))
        yield _name("thread_name", TRANSFER, track, STATIONS[station] + (f", rank {rank}" if rank else ""))
    for one in recording.requests:
        yield _name("thread_name", REQUESTS, one.request + 1, f"request {one.request}")


def _name(what: str, process: int, track: int, name: str) -> Event:
    return {"name": what, "ph": "M", "pid": process, "tid": track, "args": {"name": name}}


def _step_events(step: StepSpan, requests: Mapping[int, RequestSpan]) -> Iterator[Event]:
    if step.chunks:
        name = "prefill " + ", ".join(f"{chunk.num_tokens} of {chunk.request}" for chunk in step.chunks)
    else:
        name = f"decode × {step.num_steps}"
    args = {
        "polled_ns": step.polled_ns,
        "start_ns": step.start_ns,
        "end_ns": step.end_ns,
        "chunks": [list(chunk) for chunk in step.chunks],
        "stalls": [list(stall) for stall in step.stalls],
        "decode_batch": step.decode_batch,
        "num_steps": step.num_steps,
    }
    yield _span(name, "lamella.step", ENGINE, 1, step.start_ns, step.end_ns, args)
    for stall in step.stalls:
        # A stall ends when the layer that it waited for lands.
        culprit = requests.get(stall.culprit)
        landed = (culprit.landed_ns(stall.layer) if culprit is not None else None) or step.end_ns
        begin, end = max(step.start_ns, landed - stall.stall_ns), min(landed, step.end_ns)
        if begin < end:
            name = f"stall: layer {stall.layer} of request {stall.culprit}"
            yield _span(name, "lamella.stall", ENGINE, 1, begin, end)


def _track(station: str, rank: int) -> int:
    return 1 + rank * len(STATIONS) + STATIONS.index(station)


def _occupation_event(busy: Occupation) -> Event:
    name = f"request {busy.request}, slice {busy.part}"
    track = _track(busy.station, busy.rank)
    return _span(name, "lamella.occupation", TRANSFER, track, busy.begin_ns, busy.end_ns, busy._asdict())


def _request_events(one: RequestSpan) -> Iterator[Event]:
    args = {**one._asdict(), "landings": [list(landing) for landing in one.landings]}
    track = one.request + 1
    name = f"request {one.request}: {one.cached_tokens} cached + {one.new_tokens} new"
    yield _span(name, "lamella.request", REQUESTS, track, one.arrival_ns, one.end_ns, args)
    for part_name, (begin, end) in zip(_PARTS, pairwise(one.instants_ns), strict=True):
        if begin < end:
            yield _span(part_name, "lamella.part", REQUESTS, track, begin, end)


# ---------------------------------------------------------------- reading


def _whole(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"a whole number, got {value!r}")
    return value


def _wholes(values: Any) -> tuple[int, ...]:
    return tuple(_whole(value) for value in values)


def _read_step(args: Mapping[str, Any]) -> StepSpan:
    polled, start, end, batch, steps = _wholes(
        args[name] for name in ("polled_ns", "start_ns", "end_ns", "decode_batch", "num_steps")
    )
    chunks = tuple(Chunk(*_wholes(chunk)) for chunk in args["chunks"])
    stalls = tuple(LayerStall(*_wholes(stall)) for stall in args["stalls"])
    return StepSpan(polled, start, end, chunks, stalls, batch, steps)


def _read_occupation(args: Mapping[str, Any]) -> Occupation:
    station, *numbers = (args[name] for name in Occupation._fields)
    return Occupation(str(station), *_wholes(numbers))


def _read_request(args: Mapping[str, Any]) -> RequestSpan:
    unknown = set(args) - set(RequestSpan._fields)
    if unknown:
        raise ValueError(f"unknown keys {sorted(unknown)}")
    numbers = {name: _whole(args[name]) for name in RequestSpan._fields if name != "landings"}
    return RequestSpan(**numbers, landings=tuple(Landing(*_wholes(landing)) for landing in args["landings"]))
