"""How an engine ends, and what must not harm it: another thread's call meanwhile, a forked child, no thread to be had,
a callback that fails, an interrupted submission."""

import logging
import subprocess
import sys
import threading
from typing import Any

import pytest

from engine_driver import ENGINE_MISSING, WAIT_S, SmallCache, retrieve, small_engine
from lamella.cuda_ext._engine_library import TransferStopped
from lamella.cuda_ext.engine import TransferEngine
from lamella.reference.plan import Direction

pytestmark = pytest.mark.skipif(ENGINE_MISSING is not None, reason=str(ENGINE_MISSING))


class Watched:
    """The native library, with a hook in front of one function and a note of every call."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self.called: list[str] = []
        self.before: dict[str, Any] = {}
        self.after: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.library, name)

        def call(*arguments: Any) -> Any:
            self.before.get(name, lambda: None)()
            self.called.append(name)
            result = function(*arguments)
            self.after.get(name, lambda: None)()
            return result

        return call if callable(function) else function


def _watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    from lamella.cuda_ext import _engine_library as abi

    found = Watched(abi.engine_library("lamella_cpu"))
    monkeypatch.setattr(abi, "engine_library", lambda _: found)
    return found


def test_a_call_that_another_thread_had_begun_finds_the_engine_still_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """`close` freed what the call then read."""
    native = _watched(monkeypatch)
    engine = TransferEngine("cpu", num_layers=1)
    closer = threading.Thread(target=engine.close)

    def close_first() -> None:
        if not closer.is_alive():
            closer.start()
            closer.join(WAIT_S)

    native.before["lm_engine_lane_status"] = close_first
    assert engine.lane(Direction.RETRIEVE).live_transfers == 0
    assert not closer.is_alive()
    assert "lm_engine_close" in native.called
    assert native.called[-2:] == ["lm_engine_lane_status", "lm_engine_destroy"]
    with pytest.raises(TransferStopped, match="the engine is closed"):
        engine.lane(Direction.RETRIEVE)


def test_a_submission_that_is_interrupted_after_it_was_queued_still_gives_its_objects_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C came between the queueing and its note: the reaper met a token it did not know, and ended."""
    native = _watched(monkeypatch)
    small = SmallCache()
    first, second = threading.Event(), threading.Event()

    def interrupt() -> None:
        native.after.clear()
        raise KeyboardInterrupt

    with small_engine(small) as (engine, cache):
        native.after["lm_engine_submit"] = interrupt
        with pytest.raises(KeyboardInterrupt):
            retrieve(engine, cache, small, on_drained=first.set)
        retrieve(engine, cache, small, on_drained=second.set).wait(WAIT_S)
        assert first.wait(WAIT_S)
        assert second.wait(WAIT_S)


def test_a_callback_that_fails_is_logged_and_the_next_ones_are_called(caplog: pytest.LogCaptureFixture) -> None:
    small = SmallCache()
    drained = threading.Event()

    def fail() -> None:
        raise RuntimeError("the lease was released twice")

    with caplog.at_level(logging.ERROR), small_engine(small) as (engine, cache):
        retrieve(engine, cache, small, on_drained=fail).wait(WAIT_S)
        retrieve(engine, cache, small, on_drained=drained.set)
        assert drained.wait(WAIT_S)
    assert "the lease was released twice" in caplog.text


def _python(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_forked_child_leaves_its_parents_engine_alone() -> None:
    """The child waited for ever for threads that only its parent has."""
    said = _python("""
import os, signal, sys
from lamella.cuda_ext.engine import TransferEngine
from lamella.reference.plan import Direction
with TransferEngine("cpu", num_layers=1) as engine:
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            engine.lane(Direction.RETRIEVE)
        except RuntimeError as refused:
            print(refused, flush=True)
        engine.close()
        sys.exit(7)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), engine.lane(Direction.RETRIEVE).live_transfers)
""")
    assert "which forked this one: create another here" in said
    assert said.endswith("\n7 0\n")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_engine_without_a_thread_to_be_had_takes_nothing() -> None:
    said = _python("""
import os, threading
from lamella.cuda_ext.engine import TransferEngine
def start(self):
    raise RuntimeError("can't start new thread")
threads = lambda: len(os.listdir("/proc/self/task"))
before, threading.Thread.start = threads(), start
for _ in range(3):
    try:
        TransferEngine("cpu", num_layers=1)
    except RuntimeError as refused:
        print(refused, end=" ")
    print(threads() - before)
""")
    assert said == "can't start new thread 0\n" * 3
