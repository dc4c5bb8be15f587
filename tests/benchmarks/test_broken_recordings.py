"""What the report says of recordings that are not whole: one sentence with file, line and remedy, and status 2."""

from __future__ import annotations

import copy
import json
import lzma
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from concurrency import report
from concurrency.recording import RecordingError, read, rows_there

from recorded_rows import answers, engine, lines, request, row

REPORT = Path(__file__).parents[2] / "benchmarks" / "concurrency" / "report.py"
FULL = request(
    60.0, asked_us=900, released_us=3_500, landed_by_rank_us=[[3_000, 42_000], [2_900, 41_000]], bytes=1 << 20,
    predicted_us=59_000, regret=0.01,
)  # fmt: skip
"""All that a request's line may hold."""
RUN = [
    engine(),
    answers("recompute_alone", [1, 2, 3]),
    answers("recompute", [1, 2, 3]),
    answers("auto", [1, 2, 4]),
    *lines(chunk_bounded=[100.0, 101.0], auto=[60.0, 61.0]),
    row(
        "auto",
        2,
        60.0,
        requests=[FULL, FULL],
        probe_us=[[700.0], [705.0]],
        window_us=90_000,
        at_s=5.0,
        bystander_us=[[1_000, 2_000]],
        counters={"auto_early": 2},
    ),
    {"schema": 1, "kind": "failed", "cell": {"name": "d"}, "error": "no room"},
]


def text_of(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


TEXT = text_of(RUN)


def reported(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["report.py", *map(str, arguments)])
    return report.main()


def changed(number: int, *path: str | int, to: Any) -> str:
    """The run with one value changed, in the line of that number."""
    rows = copy.deepcopy(RUN)
    at: Any = rows[number - 1]
    for key in path[:-1]:
        at = at[key]
    if to is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = to
    return text_of(rows)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("run.jsonl", None, "No such file or directory; name a recording"),
        ("folder", ..., "Is a directory; name a recording"),
        ("run.jsonl", "", "holds no line; record one with benchmarks/concurrency/measure.py"),
        ("run.jsonl", "\n\n", "holds no line; record one"),
        ("run.jsonl.xz", lzma.compress(TEXT.encode())[:-30], "cut short or not packed by xz"),
        ("run.jsonl.xz", TEXT.encode(), "cut short or not packed by xz"),
        ("run.jsonl", lzma.compress(TEXT.encode()), "no text (invalid start byte at byte 0); unpack it first"),
        ("run.jsonl", TEXT[:50], "line 1: "),
        ("run.jsonl", TEXT.replace("\n", '\n{"schema": 1, "ki\n', 1), "line 2: "),
        ("run.jsonl", '{"traceEvents": []}\n', "line 1: schema must be 1 and kind one of engine, repeat"),
        ("run.jsonl", json.dumps({"cells": {}}, indent=1) + "\n", "line 1: "),
        ("run.jsonl", "[]\n", "line 1: must be a JSON object, got list"),
        ("run.jsonl", changed(1, "schema", to=2), "line 1: schema must be 1 "),
        ("run.jsonl", changed(1, "kind", to="step"), "line 1: schema must be 1 and kind one of"),
        ("run.jsonl", changed(1, "commit", to=...), "line 1: Object missing required field `commit`"),
        (
            "run.jsonl",
            changed(5, "requests", 1, "queued_us", to=None),
            "line 5: Expected `float`, got `null` - at `$.req",
        ),
        ("run.jsonl", changed(5, "requests", 1, "token_us", 0, to=float("nan")), "line 5: JSON is malformed"),
        (
            "run.jsonl",
            changed(5, "requests", 1, "token_us", to=[1000, 1000]),
            "line 5: a request's times must rise from",
        ),
        (
            "run.jsonl",
            changed(5, "requests", 1, "token_us", to=[9000, 8000]),
            "line 5: a request's times must rise from",
        ),
        (
            "run.jsonl",
            changed(6, "requests", to=RUN[4]["requests"][:1]),
            "line 6: must have a request beside the first",
        ),
        ("run.jsonl", changed(6, "wall_us", to=0), "line 6: Expected `float` > 0.0 - at `$.wall_us`"),
        ("run.jsonl", changed(6, "requests", 0, "predicted_us", to=5), "line 6: predicted_us must come with asked_us"),
        (
            "run.jsonl",
            changed(6, "requests", 0, "landed_by_rank_us", to=[[5], []]),
            "line 6: what landed must have landed on every rank - at `$.requests[0].landed_by_rank_us`",
        ),
        ("run.jsonl", changed(4, "answers", 0, "tokens", 1, to=9), "line 4: each of an answer's tokens must be among"),
        (
            "run.jsonl",
            text_of([*RUN, answers("sync", [1, 2])]),
            "c: answers of sync have [2] tokens, those of recompute",
        ),
        ("run.jsonl", text_of(RUN[:4]), "no repeats at all; name other recordings"),
    ],
)
def test_a_broken_recording_is_refused_in_one_sentence(
    name: str,
    content: str | bytes | None,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / name
    if content is ...:
        path.mkdir()
    elif content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert reported(monkeypatch, path) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert told in err
    assert err.startswith(str(path)) or "c: answers" in err
    assert ";" in err, "what to do"


def test_a_line_that_a_kill_cut_short_is_left_out_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.jsonl").write_text(TEXT)
    assert reported(monkeypatch, tmp_path / "run.jsonl") == 0
    whole = capsys.readouterr()
    assert whole.err == ""
    cut = TEXT + TEXT.splitlines()[4][:-40]
    (tmp_path / "cut.jsonl").write_text(cut)
    (tmp_path / "cut.jsonl.xz").write_bytes(lzma.compress(cut.encode()))
    for name in ("cut.jsonl", "cut.jsonl.xz"):
        assert reported(monkeypatch, tmp_path / name) == 0
        out, err = capsys.readouterr()
        assert out == whole.out
        assert err == f"{tmp_path / name}, line 11: cut short, and left out\n"


def test_the_program_itself_ends_with_that_status(tmp_path: Path) -> None:
    command = [sys.executable, str(REPORT), str(tmp_path / "none.jsonl")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"{tmp_path / 'none.jsonl'}: No such file or directory; ")


@pytest.mark.parametrize(
    ("option", "content", "told"),
    [
        ("--cell", None, "no repeats of a cell named like '"),
        ("--predicted", None, "No such file or directory; write it by `lamella validate --json`"),
        ("--predicted", "{", "not as `lamella validate --json` writes it ("),
        ("--predicted", '{"test": {"arms": [{"cell": "c"}]}}', "not as `lamella validate --json` writes it (KeyError"),
        ("--predicted", "[]", "not as `lamella validate --json` writes it ("),
        ("--json", ..., "name a place that can be written to"),
        ("--each", ..., "name a place that can be written to"),
    ],
)
def test_so_is_what_is_asked_beside_it(
    option: str,
    content: str | None,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "run.jsonl").write_text(TEXT)
    other = tmp_path / ("none/there" if content is ... else "other")
    if isinstance(content, str):
        other.write_text(content)
    assert reported(monkeypatch, tmp_path / "run.jsonl", option, other) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert told in err


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    if isinstance(value, dict):
        for key in value:
            yield from _places(value[key], (*path, key))
    if isinstance(value, list):
        for number in range(len(value)):
            yield from _places(value[number], (*path, number))


PLACES = [(number + 1, *path) for number, one in enumerate(RUN) if number != 5 for path in _places(one)]


@pytest.mark.parametrize("to", [..., None, True, "x", -7, 1e300, [], {}, [[]]], ids=repr)
def test_whatever_is_wrong_there_is_no_traceback(
    to: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every value of every kind of line in turn: either it is refused, or the figures can be reckoned."""
    path, refused = tmp_path / "run.jsonl", 0
    for place in PLACES:
        path.write_text(changed(*place, to=to))
        status = reported(monkeypatch, path)
        err = capsys.readouterr().err
        assert status in (0, 2), place
        assert err.count("\n") == (status == 2), place
        refused += status == 2
    assert refused > len(PLACES) / 4


def test_a_file_that_is_no_recording_gets_no_lines_and_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "notes.md"
    path.write_text("# Notes\n\nNothing of a run\n")
    with pytest.raises(RecordingError, match=r"notes.md, line 1: .*: name another"):
        rows_there(path)
    assert path.read_text() == "# Notes\n\nNothing of a run\n"
    assert rows_there(tmp_path / "none.jsonl") == []


def test_a_broken_line_between_others_is_measured_again_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(changed(5, "requests", 1, "queued_us", to=None))
    assert len(rows_there(path)) == len(RUN) - 1
    assert f"{path}, line 5: Expected `float`, got `null`" in capsys.readouterr().err
    with pytest.raises(RecordingError, match="line 5"):
        read([path])


@pytest.mark.parametrize("damage", [lambda text: text[:-1], lambda text: text[:-9], lambda text: text + '{"sch'])
def test_what_is_mended_reads_like_the_lines_that_are_whole(damage: Callable[[str], str], tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(damage(TEXT))
    rows = rows_there(path)
    assert read([path]) == rows
    assert rows == (RUN[:-1] if damage(TEXT) == TEXT[:-9] else RUN)
    with path.open("a") as out:
        out.write(json.dumps(RUN[0]) + "\n")
    assert read([path]) == [*rows, RUN[0]]
