"""Workloads: recorded traces in Mooncake's format, and a generated sample of conversations when there is none.

A trace is JSON lines, one request each, in order of arrival::

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ..., 2354]}

`timestamp` is in ms, from any instant; `hash_ids` has one id for each 512 prompt tokens or part of them, and equal ids
mean that these tokens and all before them are equal. Other keys are ignored: published traces differ in them.

Source: the traces published with Mooncake (Qin et al., FAST 2025).
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from lamella.sim.bounds import check_seed

TRACE_CHUNK_TOKENS: Final = 512
NS_PER_MS: Final = 1_000_000


class TraceRequest(NamedTuple):
    """One request of a workload.

    Attributes:
        arrival_ns: from the workload's begin; in a trace that is its first request.
        input_tokens: prompt, at least 1.
        output_tokens: answer, at least 1.
        chunk_ids: one id for each `TRACE_CHUNK_TOKENS` of the prompt, the last perhaps for fewer; equal ids, equal
            prefixes.
    """

    arrival_ns: int
    input_tokens: int
    output_tokens: int
    chunk_ids: tuple[int, ...]

    @property
    def whole_chunks(self) -> tuple[int, ...]:
        """Ids of the chunks that are full: only these are stored."""
        return self.chunk_ids[: self.input_tokens // TRACE_CHUNK_TOKENS]


def load_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests of the file, or all.

    Raises:
        ValueError: what `parse_trace` refuses, or a file that is not text.
        OSError: a file that cannot be read.
    """
    try:
        with path.open(encoding="utf-8-sig") as lines:
            return parse_trace(lines, str(path), limit)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file: {error}") from error


def parse_trace(lines: Iterable[str], name: str, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests of the lines, or all; blank lines are skipped.

    Args:
        name: what the lines are called in messages.

    Raises:
        ValueError: a line that is no request, arrivals out of order, or no request at all; the line is numbered.
    """
    requests: list[TraceRequest] = []
    for number, line in enumerate(lines, start=1):
        if limit is not None and len(requests) >= limit:
            break
        if not line.strip():
            continue
        try:
            request = _parse_line(line)
            if requests and request.arrival_ns < requests[-1].arrival_ns:
                raise ValueError("timestamp is before that of the request above; sort the trace by timestamp")
        except ValueError as error:
            raise ValueError(f"{name}, line {number}: {error}") from error
        requests.append(request)
    if not requests:
        raise ValueError(f"{name} holds no request")
    begin_ns = requests[0].arrival_ns  # an excerpt begins late, and nothing is busy or answered before it
    return [request._replace(arrival_ns=request.arrival_ns - begin_ns) for request in requests]


def _parse_line(line: str) -> TraceRequest:
    try:
        entry = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON ({error}); repair or remove the line") from error
    if not isinstance(entry, dict):
        raise ValueError(f"a request is a JSON object, got {type(entry).__name__}; repair or remove the line")
    for key in ("timestamp", "input_length", "output_length", "hash_ids"):
        if key not in entry:
            raise ValueError(f"{key} is missing; repair or remove the line")
    timestamp, hash_ids = entry["timestamp"], entry["hash_ids"]
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float) or not 0 <= timestamp < 1e12:
        raise ValueError(f"timestamp must be milliseconds from 0 to 1e12, got {timestamp!r}")
    for key in ("input_length", "output_length"):
        if type(entry[key]) is not int or entry[key] < 1:
            raise ValueError(f"{key} must be a whole number of at least 1, got {entry[key]!r}")
    if not isinstance(hash_ids, list) or not all(type(chunk_id) is int for chunk_id in hash_ids):
        raise ValueError(f"hash_ids must be a list of whole numbers, got {str(hash_ids)[:60]}")
    needed = -(-entry["input_length"] // TRACE_CHUNK_TOKENS)
    if len(hash_ids) != needed:
        raise ValueError(
            f"{entry['input_length']} tokens need {needed} hash_ids, one for each {TRACE_CHUNK_TOKENS}; got "
            f"{len(hash_ids)}"
        )
    return TraceRequest(round(timestamp * NS_PER_MS), entry["input_length"], entry["output_length"], tuple(hash_ids))


def scale_rate(requests: Iterable[TraceRequest], rate_scale: float) -> list[TraceRequest]:
    """The requests, arriving `rate_scale` times as fast.

    Raises:
        ValueError: a scale outside 1e-6 .. 1e6.
    """
    if not 1e-6 <= rate_scale <= 1e6:
        raise ValueError(f"rate_scale must be between 1e-6 and 1e6, got {rate_scale}")
    return [request._replace(arrival_ns=round(request.arrival_ns / rate_scale)) for request in requests]


def generate_conversations(
    seed: int,
    num_conversations: int = 400,
    conversations_per_s: float = 0.8,
    system_tokens: int = 1024,
) -> list[TraceRequest]:
    """A seeded sample of chats: every turn sends the whole conversation so far, so all but the last question is a hit.

    Conversations begin at random instants with a shared system prompt and a document of log-normal length; a turn adds
    a question, an answer and a pause to read it. Lengths are of the order of Mooncake's conversation trace.

    Raises:
        ValueError: no conversations, a rate that is not positive, or a negative seed.
    """
    if num_conversations < 1 or not conversations_per_s > 0:
        raise ValueError(
            f"need at least 1 conversation at a positive rate, got {num_conversations} at {conversations_per_s}/s"
        )
    check_seed(seed)
    rng = random.Random(seed)
    fresh_ids = iter(range(system_tokens // TRACE_CHUNK_TOKENS, 1 << 62))
    system_ids = list(range(system_tokens // TRACE_CHUNK_TOKENS))
    requests: list[TraceRequest] = []
    begin_s = 0.0
    for _ in range(num_conversations):
        begin_s += rng.expovariate(conversations_per_s)
        now_s, ids = begin_s, list(system_ids)
        tokens = system_tokens + min(int(rng.lognormvariate(8.3, 1.0)), 80_000)
        while True:
            tokens += min(int(rng.lognormvariate(4.5, 1.2)) + 1, 8_000)
            output = min(int(rng.lognormvariate(5.3, 0.9)) + 1, 2_000)
            ids.extend(next(fresh_ids) for _ in range(tokens // TRACE_CHUNK_TOKENS - len(ids)))
            partial = [next(fresh_ids)] if tokens % TRACE_CHUNK_TOKENS else []
            requests.append(TraceRequest(round(now_s * 1e9), tokens, output, (*ids, *partial)))
            tokens += output
            now_s += output * 0.02 + rng.expovariate(1 / 20)
            if rng.random() < 0.3 or tokens > 100_000:
                break
    return sorted(requests, key=lambda request: request.arrival_ns)
