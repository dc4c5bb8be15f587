"""A run on several processes that is ended from outside ends at once, quietly, with all of its processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lamella.cli._running import stoppable

PATIENCE_S = 60.0
AT_ONCE_S = 10.0
ENDLESS = ("--requests", "50000", "--concurrencies", "1,2", "--ratios", "1", "--strategy", "fifo/1/first")
COMMANDS = {
    "sweep": ("point.jsonl", "sweep", *ENDLESS, "--out", "out"),
    "replay": ("replay.jsonl", "replay", "--instances", "3"),
}

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc, to see what is left")


def alive(group: int) -> list[str]:
    """Commands of the group's processes that have not ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, of_group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(of_group) == group and state not in "ZX":
                found.append((folder / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue  # it ended meanwhile
    return found


def wait_for(what: Callable[[], bool], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not what():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def begun(verb: str, tmp_path: Path) -> subprocess.Popen[str]:
    """The verb on two processes, each of them in the midst of its cells; the leader of a group of its own."""
    journal, *words = COMMANDS[verb]
    command = [sys.executable, "-c", "from lamella.cli.main import main; main()", *words, "--engine", "processes"]
    run = subprocess.Popen(
        [*command, "--workers", "2", "--journal", "kept"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert wait_for((tmp_path / "kept" / journal).exists, PATIENCE_S), run.communicate()
    assert wait_for(lambda: sum("spawn_main" in one for one in alive(run.pid)) == 2, PATIENCE_S), run.communicate()
    time.sleep(1)
    return run


@pytest.mark.parametrize("verb", COMMANDS)
@pytest.mark.parametrize("whom", ["the first process", "all of them"])
@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT], ids=lambda one: one.name)
def test_a_signal_ends_it_at_once_without_a_warning_and_says_what_is_kept(
    verb: str, whom: str, by: signal.Signals, tmp_path: Path
) -> None:
    run = begun(verb, tmp_path)
    (os.kill if whom == "the first process" else os.killpg)(run.pid, by)
    try:
        _, errors = run.communicate(timeout=AT_ONCE_S)
        assert wait_for(lambda: not alive(run.pid), AT_ONCE_S), alive(run.pid)
    finally:
        if alive(run.pid):
            os.killpg(run.pid, signal.SIGKILL)
    assert run.returncode == 128 + by
    assert errors.endswith("Stopped: finished cells are in kept, and the same command goes on from there.\n"), errors
    assert not any(word in errors for word in ("Traceback", "Error", "Warning", "leaked")), errors


def test_what_lets_it_clean_nothing_up_leaves_no_process_behind(tmp_path: Path) -> None:
    run = begun("sweep", tmp_path)
    run.kill()
    try:
        run.communicate(timeout=AT_ONCE_S)
        assert wait_for(lambda: not alive(run.pid), AT_ONCE_S), alive(run.pid)
    finally:
        if alive(run.pid):
            os.killpg(run.pid, signal.SIGKILL)


def test_without_a_journal_it_says_that_nothing_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, stoppable(None):
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    assert ended.value.code == 128 + signal.SIGTERM
    assert capsys.readouterr().err == "Stopped: nothing is kept; with --journal FOLDER finished cells would be.\n"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_signal_that_somebody_else_handles_is_left_to_him() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda signum, frame: heard.append(signum))
    try:
        with stoppable(None):
            os.kill(os.getpid(), signal.SIGTERM)
            assert wait_for(lambda: bool(heard), AT_ONCE_S)
    finally:
        signal.signal(signal.SIGTERM, before)
