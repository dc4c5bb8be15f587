"""What measure.py says to a command line that cannot mean anything, before an engine starts; and report.py to head."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from concurrency import measure
from concurrency.arms import ARMS
from concurrency.groups import GROUPS

ROOT = Path(__file__).parents[2]


def said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], out: Path, *arguments: str
) -> tuple[int, str, str]:
    """The exit status and what was printed; the call that would start an engine answers 0 instead."""
    monkeypatch.setattr(sys, "argv", ["measure.py", str(out), *arguments])
    monkeypatch.setattr(measure, "measure", lambda *_what: 0)
    try:
        status = measure.main()
    except SystemExit as ended:
        status = int(ended.code or 0)
    return status, *capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--cells", "both_chanks"), "there is no group both_chanks; there are "),
        (("--arms", "fifo_frist"), "--arms fifo_frist: these cells have no such arm; they have chunk_bounded, "),
        (("--arms", "fifo_both_graphs"), "--arms fifo_both_graphs: these cells have no such arm"),
        (("--only", "new_768"), "--only new_768: no cell of core is called so; there are c4_hit15360_new768_chunk256"),
        (("--only", "new768,c5"), "--only c5: no cell of core"),
        (("--shard", "3"), "--shard: must be I/N with I below N, as 0/2 and 1/2, got '3'"),
        (("--shard", "1/0"), "got '1/0'"),
        (("--side", "2/2"), "--side: must be I/N with I below N"),
        (("--only", "c8", "--shard", "1/2"), "--shard 1/2: there are 1 cells"),
        (("--repeats", "-1"), "--repeats: must be a number, 0 or more, got '-1'"),
        (("--arm", "mine"), "--arm: must be NAME=JSON, got 'mine'"),
        (("--arm", "mine=3"), "mine must be settings of the connector"),
        (("--arm", 'mine={"layers_per_slise": 1}'), "did you mean layers_per_slice?"),
        (("--arm", "auto={}"), "auto is an arm already"),
        (("--option", "enforce_eager"), "--option: must be NAME=JSON"),
    ],
)
def test_a_slip_is_named_and_nothing_begins(
    arguments: tuple[str, ...],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, _printed, errors = said(monkeypatch, capsys, tmp_path / "run.jsonl", *arguments)
    assert (status, list(tmp_path.iterdir())) == (2, [])
    assert text in errors


def test_only_what_was_asked_for_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--only", "c4", "--shard", "1/3", "--arms", "auto,mine", "--arm", 'mine={"order": "round_robin"}')
    status, printed, _errors = said(monkeypatch, capsys, tmp_path / "run.jsonl", *arguments, "--repeats", "7", "--list")
    assert (status, printed) == (0, "c4_hit15360_new256_chunk256 7 chunk_bounded,auto,mine\n")


def test_a_folder_that_is_not_there_is_said_before_the_engine_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _printed, errors = said(monkeypatch, capsys, tmp_path / "out" / "run.jsonl", "--tiny")
    assert status == 2
    assert "No such file or directory" in errors


def test_every_arm_is_in_a_group_or_is_the_control_or_is_what_one_by_other_graphs_was_made_of() -> None:
    in_groups = {name for group in GROUPS.values() for cell in group.cells for name in cell.arms}
    assert in_groups <= ARMS.keys()
    assert {
        name for name in ARMS.keys() - in_groups if f"{name.removesuffix('_first')}_both_graphs" not in in_groups
    } == {"early_read"}


def test_a_report_whose_reader_has_seen_enough_ends_without_a_word() -> None:
    run = ROOT / "benchmarks" / "results" / "h200-2026-11-30-grid-new1024.jsonl.xz"
    command = [sys.executable, ROOT / "benchmarks" / "concurrency" / "report.py", run]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as report:
        assert report.stdout is not None
        report.stdout.close()  # before anything is written: all of it fits into a pipe
        assert report.stderr is not None
        assert report.stderr.read() == b""
    assert report.returncode == -signal.SIGPIPE
