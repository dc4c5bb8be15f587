"""Recordings keep REC-1 to REC-5, and their traces the rules of the format that Perfetto and Chrome open."""

import copy
import json
import re
from typing import Any

import pytest

from lamella.reference.chrome_trace import from_chrome_trace, to_chrome_trace
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

ALONE = RequestSpan(7, 16, 4, 3, 0, 10, 20, 30, 35, 40, 40, 90, 120, (Landing(0, 2, 30), Landing(2, 1, 60)))
NO_LOAD = RequestSpan(8, 0, 4, 1, 5, 15, 20, 20, 90, 90, 90, 140, 140, ())
STEPS = (
    StepSpan(35, 40, 90, (Chunk(7, 0, 4),), (LayerStall(2, 5, 7),), 0),
    StepSpan(90, 90, 140, (Chunk(8, 0, 4),), (), 1),
    StepSpan(140, 140, 150, (), (), 1, 2),
)
WIRE = (Occupation("h2d", 0, 7, 0, 20, 30, 64), Occupation("scatter", 1, 7, 1, 50, 60, 64))
GOOD = Recording(RunSource.SIMULATED, "a machine", "fifo/1/first", 3, (ALONE, NO_LOAD), STEPS, WIRE, ("a note",))


def changed(**fields: Any) -> Recording:
    values = {name: getattr(GOOD, name) for name in Recording.__dataclass_fields__}
    return Recording(**{**values, **fields})


def test_a_trace_is_read_back_to_the_same_recording_also_through_json() -> None:
    document = to_chrome_trace(GOOD)
    assert from_chrome_trace(json.loads(json.dumps(document))) == GOOD


def check_chrome_trace(document: Any) -> None:
    """The rules of the Trace Event Format that a viewer relies on, written from its description."""
    assert set(document) <= {"traceEvents", "displayTimeUnit", "otherData"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    named = set()
    spans: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in document["traceEvents"]:
        assert isinstance(event["name"], str)
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "process_sort_index")
            named.add((event["pid"], event["tid"] if event["name"] == "thread_name" else None))
        else:
            assert event["ph"] == "X"
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert isinstance(event["cat"], str)
            begin, length = (round(1000 * event[name]) for name in ("ts", "dur"))  # viewers keep whole ns
            spans.setdefault((event["pid"], event["tid"]), []).append((begin, begin + length))
    for (process, track), track_spans in spans.items():
        assert (process, None) in named, f"process {process} has no name"
        assert (process, track) in named, f"track {track} of process {process} has no name"
        open_until: list[int] = []
        for begin, end in sorted(track_spans, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or end <= open_until[-1], "spans of a track nest, or a viewer drops them"
            open_until.append(end)


def test_a_trace_keeps_the_rules_of_the_format() -> None:
    check_chrome_trace(to_chrome_trace(GOOD))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda event: event.update(ph="B"),
        lambda event: event.update(dur=-1),
        lambda event: event.update(tid="main"),
        lambda event: event.update(tid=99),
        lambda event: event.update(ts=event["ts"] - 0.005, dur=event["dur"] + 1),
    ],
)
def test_the_check_of_the_format_notices_a_broken_rule(spoil: Any) -> None:
    document = copy.deepcopy(to_chrome_trace(GOOD))
    spoil(next(event for event in document["traceEvents"] if event["name"].startswith("stall")))
    with pytest.raises((AssertionError, KeyError)):
        check_chrome_trace(document)


def test_a_stall_is_drawn_until_the_layer_that_it_waited_for_lands() -> None:
    (stall,) = [event for event in to_chrome_trace(GOOD)["traceEvents"] if event.get("cat") == "lamella.stall"]
    assert (stall["name"], stall["ts"], stall["dur"]) == ("stall: layer 2 of request 7", 0.055, 0.005)


def test_times_for_the_eye_are_the_exact_ones_in_microseconds() -> None:
    for event in to_chrome_trace(GOOD)["traceEvents"]:
        if event.get("cat") == "lamella.step":
            assert event["ts"] * 1000 == pytest.approx(event["args"]["start_ns"])
            assert event["dur"] * 1000 == pytest.approx(event["args"]["end_ns"] - event["args"]["start_ns"])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (changed(num_layers=0), "at least 1 layer"),
        (changed(requests=(ALONE, ALONE)), "the same number"),
        (changed(requests=(ALONE._replace(released_ns=29), NO_LOAD)), "REC-1: instants of request 7"),
        (changed(requests=(ALONE._replace(arrival_ns=-1), NO_LOAD)), "REC-1: instants of request 7"),
        (changed(requests=(ALONE._replace(new_tokens=0), NO_LOAD)), "request 7 computes and generates"),
        (changed(requests=(ALONE._replace(landings=(Landing(0, 2, 30),)), NO_LOAD)), "REC-2: the slices of request 7"),
        (changed(requests=(ALONE._replace(landings=(Landing(1, 2, 30),)), NO_LOAD)), "REC-2: request 7"),
        (changed(requests=(ALONE._replace(landings=(Landing(0, 3, 19),)), NO_LOAD)), "REC-2: request 7"),
        (changed(steps=(*STEPS[:2], STEPS[2]._replace(start_ns=139))), "REC-3"),
        (changed(steps=(STEPS[0]._replace(stalls=(LayerStall(2, 51, 7),)), *STEPS[1:])), "REC-3: .* stands for 51 ns"),
        (changed(steps=(STEPS[0]._replace(stalls=(LayerStall(2, 5, 9),)), *STEPS[1:])), "REC-3: impossible stall"),
        (changed(steps=(STEPS[0]._replace(stalls=(LayerStall(3, 5, 7),)), *STEPS[1:])), "REC-3: impossible stall"),
        (changed(steps=(*STEPS[:2], STEPS[2]._replace(chunks=(Chunk(7, 0, 1),)))), "REC-3: a stretch"),
        (changed(steps=(STEPS[0]._replace(start_ns=41), *STEPS[1:])), "REC-4: request 7"),
        (changed(requests=(ALONE._replace(first_token_ns=89), NO_LOAD)), "REC-4: request 7"),
        (changed(steps=STEPS[:1]), "REC-4: request 8"),
        (changed(steps=(STEPS[0]._replace(chunks=(Chunk(9, 0, 4),)), *STEPS[1:])), "REC-4: .* request 9, unknown"),
        (changed(occupations=(WIRE[0]._replace(request=9),)), "REC-5"),
        (changed(occupations=(WIRE[0]._replace(station="wire"),)), "REC-5"),
        (changed(occupations=(WIRE[0]._replace(end_ns=19),)), "REC-5"),
    ],
)
def test_an_impossible_recording_is_refused(wrong: Recording, message: str) -> None:
    check_recording(GOOD)
    with pytest.raises(ValueError, match=message):
        check_recording(wrong)
    with pytest.raises(ValueError, match=message):
        to_chrome_trace(wrong)


def spoilt(path: str, value: Any) -> dict[str, Any]:
    """The trace with one value replaced; the path's first step is a category or `otherData`."""
    document = copy.deepcopy(to_chrome_trace(GOOD))
    first, *rest = path.split(".")
    place: Any = document["otherData"]
    if first != "otherData":
        place = next(event for event in document["traceEvents"] if event.get("cat") == f"lamella.{first}")["args"]
    for name in rest[:-1]:
        place = place[name]
    place[rest[-1]] = value
    return document


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "not a recording"),
        ({"traceEvents": []}, "not a recording"),
        (spoilt("otherData.kind", "other"), "not a recording"),
        (spoilt("otherData.schema_version", 2), "schema_version must be 1, got 2"),
        (spoilt("otherData.num_layers", "3"), "otherData of the trace is incomplete"),
        (spoilt("otherData.source", "guessed"), "guessed"),
        (spoilt("step.end_ns", 90.5), "is no lamella.step"),
        (spoilt("step.chunks", [[7, 0]]), "is no lamella.step"),
        (spoilt("request.arrival_ns", None), "is no lamella.request"),
        (spoilt("request.extra", 1), "unknown keys"),
        (spoilt("occupation.rank", True), "is no lamella.occupation"),
    ],
)
def test_what_is_no_recording_is_refused(document: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        from_chrome_trace(document)


def test_events_of_others_are_left_alone() -> None:
    document = to_chrome_trace(GOOD)
    document["traceEvents"].append({"name": "cudaLaunchKernel", "ph": "X", "ts": 1, "dur": 1, "pid": 9, "tid": 9})
    assert from_chrome_trace(document) == GOOD
