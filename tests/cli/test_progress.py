"""What long verbs say on stderr of what they are at: a bar on a terminal, lines elsewhere where it takes long."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli.test_validate import record
from lamella.cli import _progress
from lamella.cli._progress import QUIET_S, progress_bar, progress_by_name

COMMAND = (sys.executable, "-c", "from lamella.cli.main import main; main()")


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_without_a_terminal_each_new_name_is_a_line_once_it_has_taken_long(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with progress_by_name("validating", "arms", clock) as tell:
        tell("a quick cell", 0, 9)
        clock.now_s += QUIET_S
        for done in range(1, 5):
            tell("four users" if done < 4 else "eight users", done, 9)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "validating: four users, 1 of 9 arms done",
        "validating: eight users, 4 of 9 arms done",
    ]


def test_without_a_terminal_what_takes_long_says_how_far_it_is_ever_more_seldom(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    with progress_bar("map", 40, clock) as advance:
        for _ in range(40):
            clock.now_s += 1
            advance(1)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [f"map: {s} of 40 done after {s} s" for s in (5, 10, 20)]


@pytest.mark.parametrize("by_name", [True, False])
def test_a_first_piece_that_takes_long_is_said_while_it_runs(
    by_name: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_progress, "QUIET_S", 0.05)
    said = ""
    if by_name:
        with progress_by_name("simulating", "strategies") as tell:
            tell("chunk-major", 0, 8)
            said = until_said(capsys)
    else:
        with progress_bar("map", 40):
            said = until_said(capsys)
    assert said == ("simulating: chunk-major, 0 of 8 strategies done\n" if by_name else "map: 0 of 40 done after 0 s\n")


def until_said(capsys: pytest.CaptureFixture[str]) -> str:
    """What stderr gets meanwhile; at most ten seconds."""
    end = time.monotonic() + 10
    said = ""
    while not said.endswith("\n") and time.monotonic() < end:
        time.sleep(0.01)
        said += capsys.readouterr().err
    return said


def test_what_is_quick_says_nothing_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with progress_by_name("validating", "arms", clock) as tell:
        for done in range(9):
            tell(f"cell {done}", done, 9)
            clock.now_s += QUIET_S / 10
    with progress_bar("map", 9, clock) as advance:
        for _ in range(9):
            clock.now_s += QUIET_S / 10
            advance(1)
    assert capsys.readouterr() == ("", "")


def on_a_terminal(*arguments: str) -> tuple[bytes, bytes]:
    """Stdout, which goes into a pipe, and what a terminal on stderr got."""
    mine, theirs = pty.openpty()
    process = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    seen = b""
    try:
        while chunk := os.read(mine, 1 << 16):
            seen += chunk
    except OSError:  # the other end is closed
        pass
    os.close(mine)
    assert process.stdout is not None
    with process.stdout as pipe:
        said = pipe.read()
    assert process.wait() == 0, seen
    return said, seen


def test_validate_names_on_a_terminal_what_it_is_at_and_its_results_are_the_same_bytes(tmp_path: Path) -> None:
    made, split = record(tmp_path / "run.jsonl"), tmp_path / "split.json"
    split.write_text(json.dumps({"calibrate": ["one"], "test": ["four", "far"]}))
    verb = ["validate", str(made), "--split", str(split), "--json"]
    said, seen = on_a_terminal(*verb, str(tmp_path / "seen.json"))
    assert b"validating" in seen
    assert b"12/12" in seen
    assert all(cell in seen for cell in (b"one", b"four", b"far"))
    unseen = subprocess.run([*COMMAND, *verb, str(tmp_path / "unseen.json")], capture_output=True, check=True)
    assert (unseen.stdout, unseen.stderr) == (said, b"")
    assert (tmp_path / "unseen.json").read_bytes() == (tmp_path / "seen.json").read_bytes()


@pytest.mark.parametrize(
    ("verb", "seen_at_last"),
    [
        (["simulate", "--requests", "1"], [b"simulating", b"recompute", b"8/8"]),
        (["verify", "--layers", "2", "--heads", "1", "--head-dim", "8", "--tokens", "40"], [b"verifying", b"8/8"]),
        (["replay", "--limit", "20"], [b"replaying", b"7/7"]),
    ],
    ids=lambda one: one[0] if isinstance(one[0], str) else "",
)
def test_every_verb_that_works_for_long_moves_a_bar_on_a_terminal(
    verb: list[str], seen_at_last: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LAMELLA_TRACE", raising=False)
    said, seen = on_a_terminal(*verb)
    assert said
    assert all(part in seen for part in seen_at_last), seen
