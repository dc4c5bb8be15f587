"""The lines of a recording: what each holds, read and checked before anything is reckoned of them.

A line is a JSON object of one kind: `engine`, `repeat`, `verify` or `failed`. What a reader here relies on is declared
below; lines may hold more. A run that was killed leaves part of its last line, which tells nothing: it is left out, and
`mend` takes it off before more is appended.
"""

from __future__ import annotations

import json
import lzma
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NotRequired, TypedDict

import msgspec

SCHEMA_VERSION: Final = 1
_PROGRAM: Final = "benchmarks/concurrency/measure.py"

Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Us = Annotated[float, msgspec.Meta(ge=0)]
Step = tuple[float, float, Count, Count, float, float | None]
"""Begin, time on the thread, tokens, decoding requests, time of it for orders, time on the device."""


class RecordingError(ValueError):
    """A recording cannot be read, or its lines do not fit together; the text names file and line, and what to do."""


class NamedCell(TypedDict):
    """The cell of a line that is no repeat."""

    name: str


class CellRow(TypedDict):
    """See `cells.Cell`."""

    name: str
    concurrency: Positive
    hit: Count
    new: Positive
    chunk: Positive
    output: Positive
    mix: list[tuple[Count, Positive]]
    bystanders: Count
    rate_per_s: Annotated[float, msgspec.Meta(gt=0)] | None
    miss_every: Count
    tier_gb_per_s: float | None


class RequestRow(TypedDict):
    """Times in microseconds from the request's arrival, that from the repeat's begin."""

    at_us: float
    queued_us: Us
    token_us: Annotated[list[Us], msgspec.Meta(min_length=1)]
    tokens: Annotated[list[int], msgspec.Meta(min_length=1)]
    cached: Count
    asked_us: NotRequired[float]
    started_us: NotRequired[float]
    released_us: NotRequired[float]
    landed_us: NotRequired[list[Us]]
    landed_by_rank_us: NotRequired[Annotated[list[list[Us]], msgspec.Meta(min_length=1)]]
    bytes: NotRequired[Count]
    local_hit: NotRequired[Count]
    predicted_us: NotRequired[float]
    regret: NotRequired[float]


class RepeatRow(TypedDict):
    """One repeat of one arm."""

    cell: CellRow
    arm: str
    repeat: Count
    at_s: NotRequired[float]
    wall_us: Annotated[float, msgspec.Meta(gt=0)]
    window_us: NotRequired[Us]
    probe_us: NotRequired[list[list[float]]]
    requests: Annotated[list[RequestRow], msgspec.Meta(min_length=1)]
    steps: list[Step]
    host_stall_us: dict[str, float]
    peak_in_flight_bytes: Count
    bystander_us: list[list[float]]
    counters: dict[str, float]


class WireRow(TypedDict):
    """Rates of raw copies."""

    gb_per_s: NotRequired[dict[str, list[float]]]


class EngineRow(TypedDict):
    """The engine that the lines after it ran in."""

    commit: str
    wire: NotRequired[WireRow | None]


class AnswerRow(TypedDict):
    """An answer: for each token the likeliest ones there and their log-probabilities, its own among them."""

    tokens: list[int]
    top: list[list[tuple[int, float]]]


class VerifyRow(TypedDict):
    """An arm's answers."""

    cell: NamedCell
    arm: str
    answers: list[AnswerRow]


class FailedRow(TypedDict):
    """A cell that failed."""

    cell: NamedCell


_KINDS: Final[Mapping[str, Any]] = {
    "engine": EngineRow,
    "repeat": RepeatRow,
    "verify": VerifyRow,
    "failed": FailedRow,
}


def checked(line: str) -> dict[str, Any]:
    """The line's object, which holds what its kind declares.

    Raises:
        ValueError: it does not; the text says what and where in the object.
    """
    row = msgspec.json.decode(line)
    if not isinstance(row, dict):
        raise ValueError(f"must be a JSON object, got {type(row).__name__}")
    if row.get("schema") != SCHEMA_VERSION or row.get("kind") not in list(_KINDS):
        raise ValueError(
            f"schema must be {SCHEMA_VERSION} and kind one of {', '.join(_KINDS)}, got {row.get('schema')!r} and "
            f"{row.get('kind')!r}"
        )
    msgspec.convert(row, _KINDS[row["kind"]])
    if row["kind"] == "repeat":
        _check_repeat(row)
    if row["kind"] == "verify":
        _check_answers(row["answers"])
    return row


def _check_answers(answers: Sequence[Mapping[str, Any]]) -> None:
    for number, answer in enumerate(answers):
        tokens, top = answer["tokens"], answer["top"]
        if len(tokens) != len(top) or any(one not in dict(there) for one, there in zip(tokens, top, strict=True)):
            raise ValueError(f"each of an answer's tokens must be among its likeliest - at `$.answers[{number}]`")


def _check_repeat(row: Mapping[str, Any]) -> None:
    first = 0 if row["cell"]["rate_per_s"] else row["cell"]["concurrency"]
    if len(row["requests"]) <= first:
        raise ValueError(
            f"must have a request beside the first {first}, which do not count, got {len(row['requests'])}"
        )
    for number, request in enumerate(row["requests"]):
        times = [request["queued_us"], *request["token_us"]]
        if times != sorted(times) or times[0] == times[1]:
            raise ValueError(f"a request's times must rise from queued_us on - at `$.requests[{number}].token_us`")
        if "predicted_us" in request and not {"asked_us", "regret"} <= request.keys():
            raise ValueError(f"predicted_us must come with asked_us and regret - at `$.requests[{number}]`")
        if request.get("landed_us") and not all(request.get("landed_by_rank_us", [[0]])):
            raise ValueError(
                f"what landed must have landed on every rank - at `$.requests[{number}].landed_by_rank_us`"
            )


def read(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The lines of every file, of a packed one (.xz) too; a last one cut short is left out, and stderr says so.

    Raises:
        RecordingError: a file that is not there, is no recording or holds a broken line.
    """
    return [row for path in paths for row in _read(path)]


def _read(path: Path) -> list[dict[str, Any]]:
    lines = _text(path).split("\n")
    tail = lines.pop()  # what stands behind the last end of a line
    rows = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                rows.append(checked(line))
            except ValueError as error:
                raise RecordingError(
                    f"{path}, line {number}: {error}; remove the line, or give a recording of {_PROGRAM}"
                ) from error
    if tail.strip():
        try:
            rows.append(checked(tail))
        except ValueError as error:
            if not rows:
                raise RecordingError(f"{path}, line 1: {error}; give a recording of {_PROGRAM}") from error
            print(f"{path}, line {len(lines) + 1}: cut short, and left out", file=sys.stderr)
    if not rows:
        raise RecordingError(f"{path}: holds no line; record one with {_PROGRAM}")
    return rows


def _text(path: Path) -> str:
    try:
        content = path.read_bytes()
        return (lzma.decompress(content) if path.suffix == ".xz" else content).decode("utf-8")
    except OSError as error:
        raise RecordingError(f"{path}: {error.strerror}; name a recording of {_PROGRAM}") from error
    except (lzma.LZMAError, EOFError) as error:
        raise RecordingError(f"{path}: cut short or not packed by xz ({error}); copy or pack it anew") from error
    except UnicodeDecodeError as error:
        raise RecordingError(f"{path}: no text ({error.reason} at byte {error.start}); unpack it first") from error


def rows_there(path: Path) -> list[dict[str, Any]]:
    """The lines of a recording that more are to be appended to, which is mended first; none where there is no file.

    A broken line is left out, and stderr says so: what it held is measured again.

    Raises:
        RecordingError: the file's first line is none of a recording: it is something else, and stays as it is.
    """
    if not path.exists():
        return []
    lines = _text(path).split("\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(checked(line))
        except ValueError as error:
            if number == 1 and len(lines) > 1:
                raise RecordingError(
                    f"{path}, line 1: {error}; more lines would be added to a file that is no recording: name another"
                ) from error
            print(f"{path}, line {number}: {error}; left out", file=sys.stderr)
    mend(path)
    return rows


def mend(path: Path) -> None:
    """The file ends with a whole line: what was left of one when its writer was killed is taken off."""
    content = path.read_bytes()
    whole, newline, tail = content.rpartition(b"\n")
    if not tail:
        return
    try:
        json.loads(tail)
    except ValueError:
        os.truncate(path, len(whole) + len(newline))
    else:
        with path.open("ab") as out:
            out.write(b"\n")
