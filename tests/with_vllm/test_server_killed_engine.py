"""kill -9 of a real engine on a real cache server, while the server's objects are on their way into its blocks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from child_process import environment
from lamella.server.connection import Connection
from lamella.server.protocol import Stats, StatsReport
from rank_driver import ServerProcess, serving
from with_vllm.answers import Answer
from with_vllm.served_engines import HIT, on, until_served
from with_vllm.tiny_engine import prompt

P = prompt(500)
_START_S = 240.0


@contextmanager
def frozen_engine(server: ServerProcess, model: Path) -> Iterator[tuple[subprocess.Popen[str], Answer]]:
    """A process with an engine that stands still with a load in the air, and what it had computed."""
    program = str(Path(__file__).with_name("frozen_engine.py"))
    with open(f"{server.folder}.engine.log", "w+") as log:
        process = subprocess.Popen(
            [sys.executable, program, str(model), str(server.folder)],
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(),
        )
        try:
            end = time.monotonic() + _START_S
            said: list[str] = []
            while not said:
                running = process.poll() is None and time.monotonic() < end
                assert running, Path(log.name).read_text()[-3000:]
                time.sleep(0.1)
                said = [line for line in Path(log.name).read_text().splitlines() if line.startswith("FROZEN ")]
            found = json.loads(said[0].removeprefix("FROZEN "))
            yield process, Answer(**{name: tuple(one) if isinstance(one, list) else one for name, one in found.items()})
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


def names_of(pid: int) -> list[Path]:
    """Memories that this process made and that still have their names."""
    return sorted(Path("/dev/shm").glob(f"lamella-{pid}-*"))


def figures(server: ServerProcess) -> dict[str, float]:
    """What the server holds for somebody, added up over places."""
    with Connection(server.folder) as connection:
        said = connection.call(Stats(), StatsReport).figures
    wanted = {"sessions": "sessions"} | {f"parts{{state={state}}}": state for state in ("moving", "locked", "writing")}
    found = {short: said[f"lamella_server_{name}"] for name, short in wanted.items()}
    slots = {name: value for name, value in said.items() if name.startswith("lamella_server_slots")}
    return found | {"pinned": sum(value for name, value in slots.items() if name.endswith("state=pinned}"))}


def test_a_killed_engine_leaves_no_lock_no_slot_and_no_memory_and_the_next_one_hits(
    tiny_llama: Path, tmp_path: Path
) -> None:
    with serving(tmp_path / "s", "--memory", "64MiB") as server:
        until_served(server)
        with frozen_engine(server, tiny_llama) as (process, computed):
            held = figures(server)
            named = names_of(process.pid)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        assert (held["moving"], held["pinned"], held["sessions"]) == (1, HIT // 64, 2), held
        assert named == [], "a rank that moves its own bytes has nothing under a name that could stay"
        end = time.monotonic() + 30
        while any((left := figures(server)).values()) or names_of(process.pid):
            assert time.monotonic() < end, (left, names_of(process.pid))
            time.sleep(0.1)
        live = on(server, tiny_llama)
        try:
            loaded = live.generate(P)
        finally:
            live.close()
        assert (loaded.cached, loaded.same(computed)) == (HIT, True)
    assert names_of(server.process.pid) == names_of(os.getpid()) == []
