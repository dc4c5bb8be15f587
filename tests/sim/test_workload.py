"""Workloads: a trace is read strictly and by line, and a generated one is made of conversations."""

import json
import os
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella.sim.workload import (
    TRACE_CHUNK_TOKENS,
    TraceRequest,
    generate_conversations,
    load_trace,
    parse_trace,
    scale_rate,
)

LINE = {"timestamp": 1500, "input_length": 700, "output_length": 9, "hash_ids": [4, 7]}


def line(**changes: Any) -> str:
    return json.dumps({**LINE, **changes})


def test_a_line_becomes_a_request() -> None:
    assert parse_trace([line()], "t") == [TraceRequest(0, 700, 9, (4, 7))]


def test_arrivals_count_from_the_first_request_so_that_an_excerpt_is_a_trace() -> None:
    """What an instance's time is counted from: an hour before the first request it was neither busy nor idle."""
    late = [line(timestamp=3_600_000), line(timestamp=3_600_001.5)]
    assert [request.arrival_ns for request in parse_trace(late, "t")] == [0, 1_500_000]


def test_only_chunks_that_are_full_are_whole() -> None:
    assert TraceRequest(0, 1023, 1, (1, 2)).whole_chunks == (1,)
    assert TraceRequest(0, 1024, 1, (1, 2)).whole_chunks == (1, 2)


def test_blank_lines_and_other_keys_do_no_harm() -> None:
    assert parse_trace(["\n", line(type="text"), "  \n"], "t") == parse_trace([line()], "t")


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("{", "not JSON .*; repair or remove the line"),
        ("[" * 100_000, "not JSON .*; repair or remove the line"),
        ("[1]", "a request is a JSON object, got list"),
        ('{"timestamp": 1}', "input_length is missing"),
        (line(timestamp=-1), "timestamp must be milliseconds from 0 to 1e12, got -1"),
        (line(timestamp="3"), "timestamp must be milliseconds"),
        (line(timestamp=float("nan")), "timestamp must be milliseconds"),
        (line(timestamp=True), "timestamp must be milliseconds"),
        (line(timestamp=3), "before that of the request above; sort the trace by timestamp"),
        (line(input_length=0), "input_length must be a whole number of at least 1, got 0"),
        (line(output_length=1.5), "output_length must be a whole number of at least 1, got 1.5"),
        (line(output_length=0), "output_length must be a whole number of at least 1, got 0"),
        (line(hash_ids="ab"), "hash_ids must be a list of whole numbers"),
        (line(hash_ids=[1, None]), "hash_ids must be a list of whole numbers"),
        (line(hash_ids=[1]), "700 tokens need 2 hash_ids, one for each 512; got 1"),
    ],
)
def test_a_broken_line_is_refused_by_its_number_and_with_a_remedy(broken: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^t.jsonl, line 3: .*{message}"):
        parse_trace([line(), "\n", broken, line()], "t.jsonl")


def test_a_trace_without_a_request_is_refused() -> None:
    with pytest.raises(ValueError, match="t holds no request"):
        parse_trace(["\n"], "t")


def test_a_limit_stops_before_a_later_broken_line() -> None:
    assert len(parse_trace([line(), line(), "{"], "t", limit=2)) == 2


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not a text file"):
        load_trace(path)


@given(st.floats(0.01, 100))
def test_a_scaled_rate_moves_arrivals_and_nothing_else(scale: float) -> None:
    requests = generate_conversations(3, 5)
    scaled = scale_rate(requests, scale)
    assert [request[1:] for request in scaled] == [request[1:] for request in requests]
    assert scaled[-1].arrival_ns == pytest.approx(requests[-1].arrival_ns / scale, rel=1e-9)
    assert [request.arrival_ns for request in scaled] == sorted(request.arrival_ns for request in scaled)


@pytest.mark.parametrize("scale", [0, -1, float("nan"), float("inf"), 1e300, 1e-300])
def test_a_rate_that_is_not_positive_or_beyond_reason_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="rate_scale must be between 1e-6 and 1e6"):
        scale_rate([], scale)


# ---------------------------------------------------------------- the generated sample


def _check_well_formed(requests: Sequence[TraceRequest]) -> None:
    """What holds of a trace: sorted, one id a chunk, and an id always stands behind the same ids."""
    assert [request.arrival_ns for request in requests] == sorted(request.arrival_ns for request in requests)
    before: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    for request in requests:
        assert len(request.chunk_ids) == -(-request.input_tokens // TRACE_CHUNK_TOKENS)
        assert request.output_tokens >= 1
        for depth, chunk_id in enumerate(request.chunk_ids):
            before[chunk_id].add(request.chunk_ids[max(0, depth - 1) : depth])
    assert all(len(predecessors) == 1 for predecessors in before.values())


@given(seed=st.integers(0, 1000), conversations=st.integers(1, 8), system=st.integers(0, 2000))
def test_a_generated_sample_is_a_well_formed_trace(seed: int, conversations: int, system: int) -> None:
    requests = generate_conversations(seed, conversations, system_tokens=system)
    assert len(requests) >= conversations
    _check_well_formed(requests)


def test_the_same_seed_gives_the_same_sample_and_another_seed_another() -> None:
    assert generate_conversations(1, 20) == generate_conversations(1, 20) != generate_conversations(2, 20)


def test_a_turn_contains_the_turns_before_it() -> None:
    requests = generate_conversations(0, 50)
    by_beginning: dict[tuple[int, ...], list[TraceRequest]] = defaultdict(list)
    for request in requests:
        by_beginning[request.whole_chunks[:3]].append(request)
    turns = max(by_beginning.values(), key=len)
    assert len(turns) >= 3
    for earlier, later in pairwise(turns):
        assert later.input_tokens > earlier.input_tokens
        assert later.chunk_ids[: len(earlier.whole_chunks)] == earlier.whole_chunks


@pytest.mark.parametrize(("count", "rate"), [(0, 1.0), (1, 0.0)])
def test_an_empty_sample_is_refused(count: int, rate: float) -> None:
    with pytest.raises(ValueError, match="need at least 1 conversation at a positive rate"):
        generate_conversations(0, count, rate)


# ---------------------------------------------------------------- the published traces


@pytest.mark.parametrize(
    ("name", "requests", "span_s"),
    [("mooncake_conversation_trace.jsonl", 12_031, 3537), ("mooncake_synthetic_trace.jsonl", 3993, 1022)],
)
def test_the_published_traces_read_whole(name: str, requests: int, span_s: int) -> None:
    folder = os.environ.get("LAMELLA_TRACE_DIR")
    if not folder:
        pytest.skip("LAMELLA_TRACE_DIR names no folder with the Mooncake traces")
    trace = load_trace(Path(folder) / name)
    assert len(trace) == requests
    assert round((trace[-1].arrival_ns - trace[0].arrival_ns) / 1e9) == span_s
