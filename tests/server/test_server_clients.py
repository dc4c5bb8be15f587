"""Clients of a real server process: what a lost or slow server costs them, and client processes that are killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

import lamella
from child_process import SUPPORT
from lamella.cuda_ext.registration import NoRegistrar
from lamella.cuda_ext.shared_memory import reclaim_stale
from lamella.cuda_ext.slots import SlotMemory
from lamella.server.client import MISS, CacheSession, Epoch
from lamella.server.connection import Connection, ServerLostError
from lamella.server.protocol import Stats, StatsReport
from server_driver import (
    ServerProcess,
    connect,
    figure,
    keys_of,
    layout_of,
    registration,
    server_process,
)
from waiting import wait_until

# ---- a session whose server is gone, slow or another


def test_no_server_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        CacheSession(tmp_path / "none", registration())
    (tmp_path / "empty").mkdir(mode=0o700)
    with pytest.raises(ServerLostError, match="no server answers there"):
        CacheSession(tmp_path / "empty", registration(), timeout_s=0.3)
    assert list((tmp_path / "empty").iterdir()) == [], "and no mark stays behind"


def test_a_server_that_hangs_costs_the_bound_and_then_nothing(tidy_server: ServerProcess) -> None:
    session = CacheSession(tidy_server.folder, registration(), timeout_s=0.7)
    os.kill(tidy_server.process.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        assert session.lookup(keys_of(1)) == MISS
        assert 0.6 < time.monotonic() - began < 5.0
        began = time.monotonic()
        assert session.lookup(keys_of(1)) == MISS
        assert time.monotonic() - began < 0.6, "a server that is lost is not asked again by this thread"
    finally:
        os.kill(tidy_server.process.pid, signal.SIGCONT)
    wait_until(lambda: _stores(session), "it is back")
    session.close()


def _stores(session: CacheSession) -> bool:
    try:
        stored = session.allocate(keys_of(1))
    except ServerLostError:
        return False
    session.commit(stored.lease, 0)
    return session.lookup(keys_of(1)).num_chunks == 1


def test_a_server_that_is_killed_while_it_is_asked_costs_no_time_out(tidy_server: ServerProcess) -> None:
    session = connect(tidy_server, timeout_s=60.0)
    assert session.lookup(keys_of(1)) == MISS
    os.kill(tidy_server.process.pid, signal.SIGSTOP)
    killer = threading.Timer(0.3, tidy_server.kill)
    began = time.monotonic()
    killer.start()
    assert session.lookup(keys_of(1)) == MISS
    assert time.monotonic() - began < 20.0
    assert session.is_lost
    killer.join()
    session.close()
    reclaim_stale()


def test_slots_are_never_given_in_the_memory_of_another_server(tmp_path: Path) -> None:
    """SRV-6: whoever writes names the registration whose memory he has attached."""
    with server_process(tmp_path) as server:
        epochs: list[Epoch] = []
        session = connect(server, timeout_s=3.0, on_epoch=epochs.append)
        session.commit(session.allocate(keys_of(1), epoch=epochs[0]).lease, 0)
        server.kill()
        server.start()
        server.wait_serving()
        wait_until(lambda: len(epochs) == 2 and not session.is_lost, "it registers anew")
        with pytest.raises(ServerLostError, match="attach the new ones"):
            session.allocate(keys_of(1), epoch=epochs[0])
        assert session.lookup(keys_of(1), epoch=epochs[0]) == MISS
        assert session.allocate(keys_of(1), epoch=epochs[1]).lease != 0
        session.close()


def test_several_requests_are_under_way_on_one_connection(tidy_server: ServerProcess) -> None:
    with Connection(tidy_server.folder) as connection:
        futures = [connection.request(Stats()) for _ in range(20)]
        wait_until(lambda: connection.poll(0.05) or all(future.done() for future in futures), "all are answered")
        assert {future.result().lamella_version for future in futures} == {lamella.__version__}
        assert connection.num_open == 0
        late = connection.request(Stats())
        connection.forget(late)
        assert connection.call(Stats(), StatsReport).draining is False, "an answer that nobody waits for is dropped"


# ---- client processes


def client_code(body: str) -> str:
    return (
        "import sys, time\nfrom pathlib import Path\nsys.path[:0] = " + repr([str(SUPPORT)]) + "\n"
        "from server_driver import keys_of, registration\nfrom lamella.server.client import CacheSession\n"
        "session = CacheSession(Path(sys.argv[1]), registration(), timeout_s=15.0)\n" + textwrap.dedent(body)
    )


def start_client(server: ServerProcess, body: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", client_code(body), str(server.folder)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    process.kill()
    process.wait()
    process.stdout.close()


def slots(server: ServerProcess, state: str) -> float:
    return figure(server, f"lamella_server_slots{{place=m rank 0 of 1 layers 0-1,state={state}}}")


@pytest.mark.known_fault(46)
def test_a_killed_client_s_locks_and_slots_come_back(tidy_server: ServerProcess) -> None:
    client = start_client(
        tidy_server,
        """
        stored = session.allocate(keys_of(1, 2))
        session.commit(stored.lease, 0)
        session.retrieve(session.lookup(keys_of(1, 2)).lease, 0)
        session.allocate(keys_of(5))
        print("ready", flush=True)
        time.sleep(60)
        """,
    )
    assert (slots(tidy_server, "pinned"), slots(tidy_server, "writing")) == (2, 1)
    end(client)
    wait_until(lambda: figure(tidy_server, "lamella_server_sessions") == 0, "the session has ended")
    assert slots(tidy_server, "pinned") == 0, "what it read is free at once"
    wait_until(lambda: slots(tidy_server, "writing") == 0, "what it wrote is free after the grace time")
    assert slots(tidy_server, "ready") == 2
    assert [path for path in tidy_server.folder.iterdir() if path.name.startswith("alive-")] == []


def _can_unshare() -> bool:
    return subprocess.run(["unshare", "-m", "-p", "-i", "-f", "true"], capture_output=True).returncode == 0


@pytest.mark.known_fault(89)
@pytest.mark.skipif(
    not shutil.which("unshare") or not _can_unshare(), reason="this user may make no namespaces of processes and IPC"
)
def test_a_client_with_processes_and_ipc_of_its_own_needs_the_folder_and_the_memory_and_no_more(
    tidy_server: ServerProcess,
) -> None:
    """As in a container without hostIPC and hostPID: neither side asks for the other's pid or for anything of IPC."""
    body = """
        import os
        from lamella.cuda_ext.registration import NoRegistrar
        from lamella.cuda_ext.slots import SlotMemory
        memory = SlotMemory.attach(session.epoch.shared, NoRegistrar())
        stored = session.allocate(keys_of(1))
        with memory.buffer(stored.places[0].slots[0]) as view:
            view[:] = bytes([7]) * len(view)
        session.commit(stored.lease, 0)
        session.retrieve(session.lookup(keys_of(1)).lease, 0)
        print("pid", os.getpid(), flush=True)
        time.sleep(60)
        """
    client = subprocess.Popen(
        [
            "unshare",
            "-m",
            "-p",
            "-i",
            "-f",
            "--kill-child",
            sys.executable,
            "-c",
            client_code(body),
            str(tidy_server.folder),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert client.stdout is not None
    try:
        assert client.stdout.readline() == "pid 1\n", "the first process of its own namespace"
        ours = connect(tidy_server, registration("outside"))
        memory = SlotMemory.attach(ours.epoch.shared or pytest.fail("no memory"), NoRegistrar())
        found = ours.lookup(keys_of(1))
        with memory.buffer(found.slots[0][0]) as view:
            assert view == bytes([7]) * layout_of().object_bytes
        memory.close()
        ours.close()
        assert slots(tidy_server, "pinned") == 1
    finally:
        end(client)
    wait_until(lambda: slots(tidy_server, "pinned") == 0, "what it held is free, whatever its pid was")
