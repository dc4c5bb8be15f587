"""Processes killed at any moment leave no file in `/dev/shm` (SHM-1).

Whoever makes shared memory removes what is stale, so these tests mean most on a machine that runs nothing else.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from child_process import environment
from lamella.server.protocol import TransferSide
from rank_driver import BOTH_SIDES, RankMemory, ServerProcess, join, serving

SWEPT_S = 6.0
"""The server looks once a second; a busy machine takes its time."""

MAKER = """
import os, subprocess, sys
from lamella.cuda_ext.shared_memory import HostMemory
memory = HostMemory.create(4096)
os.set_inheritable(memory.fd, True)
other = subprocess.Popen(["sleep", "60"], close_fds=False) if sys.argv[1:] else None
print(os.getpid(), other.pid if other else 0, flush=True)
sys.stdin.read()
"""

RANKS = """
import os, random, signal, sys, time
from pathlib import Path
from lamella.server.protocol import TransferSide
from rank_driver import HERE, RankMemory, join, keys_of

folder, side, seed, kills = Path(sys.argv[1]), TransferSide(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
moments = random.Random(seed)
for _ in range(kills):
    pid = os.fork()
    if pid == 0:
        memory = RankMemory()
        keys = keys_of(memory, range(64))
        while True:
            with join(folder, memory, transfer_side=side) as worker:
                for _step in range(20):
                    worker.store("s", keys, (HERE,))
                    worker.begin_step(num_tokens=1)
                    worker.step_computed()
                    worker.poll()
                    worker.give_back(worker.lookup(keys))
    time.sleep(moments.expovariate(8))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    print(pid, flush=True)
"""


def left_by(*pids: int) -> list[str]:
    return [name for name in os.listdir("/dev/shm") if any(name.startswith(f"lamella-{pid}-") for pid in pids)]


def wait_nothing_left(*pids: int) -> None:
    end = time.monotonic() + SWEPT_S
    while left := left_by(*pids):
        assert time.monotonic() < end, f"SHM-1: {left} stay"
        time.sleep(0.05)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with serving(tmp_path / "s", "--memory", "1MiB") as running:
        memory = RankMemory()
        join(running.folder, memory).close()  # it serves
        memory.close()
        yield running


def made_by_another(*held_too: str) -> tuple[subprocess.Popen[str], int]:
    """A process with a memory of 4096 bytes, and the pid of one that holds it too."""
    maker = subprocess.Popen(
        [sys.executable, "-c", MAKER, *held_too], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert maker.stdout is not None
    _pid, other = maker.stdout.readline().split()
    assert len(left_by(maker.pid)) == 1
    return maker, int(other)


def end(maker: subprocess.Popen[str]) -> None:
    with maker:
        maker.kill()


def test_a_memory_of_a_process_killed_before_it_registered_is_removed(server: ServerProcess) -> None:
    maker, _nobody = made_by_another()
    time.sleep(2.5)
    assert left_by(maker.pid), "what is held is left alone"
    end(maker)
    wait_nothing_left(maker.pid)


def test_a_server_that_ends_right_after_a_process_was_killed_leaves_nothing_of_it(server: ServerProcess) -> None:
    """Its next look a second later never comes, and nobody else may be there to look."""
    maker, _nobody = made_by_another()
    end(maker)
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(20)
    assert left_by(maker.pid) == []


@pytest.mark.known_fault(46)
def test_a_memory_that_is_let_go_of_after_its_maker_was_found_dead_is_removed(server: ServerProcess) -> None:
    """A process that dies lets go of its mark before its memory, and of a GPU's memory between the two."""
    maker, other = made_by_another("held")
    end(maker)
    time.sleep(2.5)
    assert left_by(maker.pid)
    os.kill(other, signal.SIGKILL)
    wait_nothing_left(maker.pid)


@pytest.mark.parametrize("side", BOTH_SIDES, ids=lambda side: side.value)
def test_ranks_killed_at_random_moments_leave_no_file(server: ServerProcess, side: TransferSide) -> None:
    seed = random.SystemRandom().randrange(10**6)
    command = [sys.executable, "-c", RANKS, str(server.folder), side.value, str(seed), "25"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment(), timeout=60, check=True)
    pids = [int(line) for line in done.stdout.split()]
    assert len(pids) == 25
    print(f"seed {seed}")
    wait_nothing_left(*pids)


def test_server_and_rank_killed_together_leave_what_the_next_server_removes(server: ServerProcess) -> None:
    """Nobody was left to remove it; the next one does so by starting, before a rank asks it for memory."""
    maker, _nobody = made_by_another()
    pid = server.process.pid
    assert left_by(pid), "its pool"
    server.kill()
    end(maker)
    server.start()
    wait_nothing_left(maker.pid, pid)


def test_a_rank_that_moves_its_own_bytes_has_no_name_that_could_stay(server: ServerProcess) -> None:
    memory = RankMemory()
    before = left_by(os.getpid())
    with join(server.folder, memory):
        assert left_by(os.getpid()) == before
    with join(server.folder, memory, transfer_side=TransferSide.SERVER):
        assert len(left_by(os.getpid())) == len(before) + 1, "its board, which the server opens"
    assert left_by(os.getpid()) == before
    memory.close()
