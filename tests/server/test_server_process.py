"""A real server process and real clients: start and stop, kill -9 of either, strangers, and nothing left behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.auth

import lamella
from lamella.cuda_ext.registration import NoRegistrar
from lamella.cuda_ext.shared_memory import HostMemory, reclaim_stale
from lamella.cuda_ext.slots import SlotMemory
from lamella.server.client import MISS, CacheSession, Epoch
from lamella.server.connection import Connection, ServerLostError
from lamella.server.endpoint import CurveKeys, ipc_endpoint
from lamella.server.frames import RefusedError, decode_answer, encode
from lamella.server.protocol import Found, Ping, Pong, Register, Registered, Role, Stats, StatsReport
from lamella.server.wire import HEADER, MAGIC, MAX_MESSAGE_BYTES, PROTOCOL_VERSION, Code, Kind
from server_driver import (
    ServerProcess,
    keys_of,
    layout_of,
    registration,
    server_process,
    wait_until,
)

OBJECT = layout_of().object_bytes


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with server_process(tmp_path) as running:
        yield running
        if running.process.poll() is None:
            running.stop()
    assert running.memories() == [], "no shared memory stays behind"


def connect(server: ServerProcess, message: Register | None = None, **others: Any) -> CacheSession:
    """A session with a bound that a busy machine keeps."""
    return CacheSession(server.folder, message or registration(), **({"timeout_s": 15.0} | others))


def client_code(body: str) -> str:
    return (
        "import sys, time\nfrom pathlib import Path\nsys.path[:0] = " + repr([str(Path(__file__).parents[1])]) + "\n"
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


def figure(server: ServerProcess, name: str) -> float:
    with Connection(server.folder, timeout_s=15.0) as connection:
        return connection.call(Stats(), StatsReport).figures[name]


def slots(server: ServerProcess, state: str) -> float:
    return figure(server, f"lamella_server_slots{{place=m rank 0 of 1 layers 0-1,state={state}}}")


# ---- a life


def test_a_server_starts_in_less_than_two_seconds_and_bytes_cross_its_memory(tmp_path: Path) -> None:
    with server_process(tmp_path, memory="1GiB") as server:
        ticks = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        assert sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK") < 2.0, "of processor time, whatever else is running"
        session = connect(server)
        shared = session.epoch.shared
        assert shared is not None
        assert shared.path.stat().st_mode & 0o777 == 0o600
        memory = SlotMemory.attach(shared, NoRegistrar())
        stored = session.allocate(keys_of(1, 2))
        for slot in stored.places[0].slots:
            with memory.buffer(slot) as view:
                view[:] = bytes([slot + 1]) * OBJECT
        session.commit(stored.lease, 0)
        other = connect(server, registration("another engine"))
        found = other.lookup(keys_of(1, 2, 3))
        assert (found.num_chunks, found.slots) == (2, ((0, 1),))
        assert other.retrieve(found.lease, 0).path == "worker"
        with memory.buffer(found.slots[0][1]) as view:
            assert view == b"\x02" * OBJECT
        assert other.release(found.lease)
        other.close()
        session.close()
        memory.close()
        assert server.stop() == 0


def test_a_second_server_in_the_folder_is_refused_and_the_first_goes_on(server: ServerProcess) -> None:
    second = ServerProcess(server.folder.parent)
    second.process.wait(20)
    assert second.process.returncode == 2
    assert f"a server (pid {server.process.pid}) serves" in " ".join(second.log.read_text().split())
    assert figure(server, "lamella_server_sessions") == 0


@pytest.mark.known_fault(46)
def test_a_killed_client_s_locks_and_slots_come_back(server: ServerProcess) -> None:
    client = start_client(
        server,
        """
        stored = session.allocate(keys_of(1, 2))
        session.commit(stored.lease, 0)
        session.retrieve(session.lookup(keys_of(1, 2)).lease, 0)
        session.allocate(keys_of(5))
        print("ready", flush=True)
        time.sleep(60)
        """,
    )
    assert (slots(server, "pinned"), slots(server, "writing")) == (2, 1)
    end(client)
    wait_until(lambda: figure(server, "lamella_server_sessions") == 0, "the session has ended")
    assert slots(server, "pinned") == 0, "what it read is free at once"
    wait_until(lambda: slots(server, "writing") == 0, "what it wrote is free after the grace time")
    assert slots(server, "ready") == 2
    assert [path for path in server.folder.iterdir() if path.name.startswith("alive-")] == []


@pytest.mark.known_fault(47)
def test_a_killed_server_is_a_miss_and_its_successor_is_found_and_nothing_stale_stands_in_its_way(
    tmp_path: Path,
) -> None:
    epochs: list[Epoch] = []
    with server_process(tmp_path) as server:
        session = connect(server, timeout_s=1.5, on_epoch=epochs.append)
        session.commit(session.allocate(keys_of(1)).lease, 0)
        lease = session.lookup(keys_of(1)).lease
        first = epochs[0].shared
        assert first is not None
        server.kill()
        began = time.monotonic()
        assert session.lookup(keys_of(1)) == MISS
        assert time.monotonic() - began < 5.0, "within the bound"
        with pytest.raises(ServerLostError):
            session.retrieve(lease, 0)
        assert not session.release(lease)
        server.start()
        server.wait_serving()
        wait_until(lambda: len(epochs) == 2 and not session.is_lost, "it registers anew by itself")
        wait_until(lambda: session.lookup(keys_of(1)).num_chunks == 0, "the new server knows nothing of the old")
        with pytest.raises(RefusedError, match="look it up again"):
            session.retrieve(lease, 0)
        second = epochs[1].shared
        assert second is not None
        assert not first.path.exists(), "the stale name is gone"
        session.commit(session.allocate(keys_of(1)).lease, 0)
        assert session.lookup(keys_of(1)).num_chunks == 1
        session.close()
        server.stop()
    assert server.memories() == []


def test_attaching_does_not_unlink_and_the_server_s_end_does(server: ServerProcess) -> None:
    with_session = connect(server)
    shared = with_session.epoch.shared
    assert shared is not None
    HostMemory.attach(shared.path, shared.shape.total_bytes).close()
    assert shared.path.exists()
    with_session.close()
    server.stop()
    assert not shared.path.exists()


def test_sigterm_waits_for_a_transfer_and_a_second_one_does_not(tmp_path: Path) -> None:
    for times in (1, 2):
        with server_process(tmp_path / str(times)) as server:
            session = connect(server)
            session.commit(session.allocate(keys_of(1)).lease, 0)
            lease = session.lookup(keys_of(1)).lease
            session.retrieve(lease, 0)
            server.process.terminate()
            wait_until(lambda: any("draining" in line["message"] for line in server.lines()), "it drains")
            assert session.lookup(keys_of(1)) == MISS
            time.sleep(0.3)
            assert server.process.poll() is None, "the transfer is under way"
            if times == 1:
                assert session.release(lease)
            else:
                server.process.terminate()
            assert server.process.wait(10) == 0
            session.close()


def test_log_lines_are_json_with_a_time_and_a_level(server: ServerProcess) -> None:
    connect(server, registration("named engine")).close()
    wait_until(lambda: len(server.lines()) >= 3, "registered and gone are said")
    assert all({"time", "level", "logger", "message"} <= set(line) for line in server.lines())
    assert any("engine named engine: rank 0 is registered" in line["message"] for line in server.lines())


def test_health_and_figures_are_pages(tmp_path: Path) -> None:
    def page(port: str, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://{port}{path}", timeout=5) as found:
                return found.status, found.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    with server_process(tmp_path, "--http", "127.0.0.1:0") as server:
        at = server.wait_serving()["http"]
        assert page(at, "/healthz") == (200, "serving\n")
        session = connect(server)
        session.commit(session.allocate(keys_of(1)).lease, 0)
        session.retrieve(session.lookup(keys_of(1)).lease, 0)
        wait_until(lambda: 'lamella_server_parts{state="moving"} 1.0' in page(at, "/metrics")[1], "it is shown")
        assert page(at, "/other")[0] == 404
        server.process.terminate()
        wait_until(lambda: page(at, "/healthz") == (503, "draining\n"), "a server that drains is not healthy")
        session.close()


# ---- strangers


def test_bytes_that_are_no_message_are_answered_and_the_server_goes_on(server: ServerProcess) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(ipc_endpoint(server.folder))
        for frames, code in (
            ([b"GET / HTTP/1.1\r\n\r\n"], Code.MALFORMED),
            ([b""], Code.MALFORMED),
            ([b"a", b"b", b"c"], Code.MALFORMED),
            ([HEADER.pack(MAGIC, PROTOCOL_VERSION + 1, Kind.PING, 3)], Code.VERSION),
            ([HEADER.pack(MAGIC, PROTOCOL_VERSION, 99, 3)], Code.UNKNOWN_KIND),
            ([HEADER.pack(MAGIC, PROTOCOL_VERSION, Kind.LOOKUP, 3) + os.urandom(5000)], Code.MALFORMED),
        ):
            socket.send_multipart(frames)
            assert socket.poll(5000)
            with pytest.raises(RefusedError) as refused:
                decode_answer(socket.recv_multipart(), Found)
            assert refused.value.code is code
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(ipc_endpoint(server.folder))
        socket.send(bytes(MAX_MESSAGE_BYTES + 1))  # libzmq closes the connection before it takes it in
        assert not socket.poll(300)
    assert figure(server, "lamella_server_refusals_total{code=malformed}") == 4


def test_another_version_is_refused_before_anything_else(server: ServerProcess) -> None:
    with pytest.raises(RefusedError, match=f"the server is lamella {lamella.__version__}, the client lamella 0.0.7"):
        CacheSession(server.folder, registration(lamella_version="0.0.7"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
@pytest.mark.parametrize("opened", [False, True], ids=["closed folder", "opened folder"])
def test_another_user_cannot_connect_even_where_the_folder_was_opened_to_him(
    opened: bool, server: ServerProcess
) -> None:
    code = """
import os, sys
import zmq
from lamella.server.frames import encode
from lamella.server.protocol import Ping
os.setgroups([]); os.setgid(65534); os.setuid(65534)
with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
    socket.linger = 0
    socket.connect(sys.argv[1])
    socket.send(encode(1, Ping(1, -1)))
    print("answered" if socket.poll(1500) else "not answered")
"""
    if opened:
        for path in server.folder.parents:
            if path.stat().st_uid == 0 and path != Path("/") and "pytest" in str(path):
                path.chmod(0o755)
        server.folder.chmod(0o755)
        (server.folder / "server.sock").chmod(0o777)
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, ipc_endpoint(server.folder)],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )
    assert done.stdout == "not answered\n", done.stderr
    server.folder.chmod(0o700)
    assert figure(server, "lamella_server_sessions") == 0


def test_tcp_lets_in_whoever_has_a_key_that_is_known_and_nobody_else(tmp_path: Path) -> None:
    for name in ("server", "known", "stranger"):
        _public, secret = zmq.auth.create_certificates(tmp_path, name)
        os.chmod(secret, 0o600)
    (tmp_path / "clients").mkdir()
    (tmp_path / "clients" / "known.key").write_bytes((tmp_path / "known.key").read_bytes())
    with zmq.Context() as context, context.socket(zmq.ROUTER) as probe:
        port = probe.bind_to_random_port("tcp://127.0.0.1")
    address = f"tcp://127.0.0.1:{port}"
    options = ("--tcp", address, "--tcp-key", str(tmp_path / "server.key_secret"))
    with server_process(tmp_path, *options, "--tcp-clients", str(tmp_path / "clients")) as server:

        def keys(name: str) -> CurveKeys:
            return CurveKeys.load(tmp_path / f"{name}.key_secret", tmp_path / "server.key")

        with Connection(address, keys=keys("known"), timeout_s=15.0) as connection:
            registered = connection.call(registration(role=Role.SCHEDULER), Registered)
            assert connection.call(Ping(registered.session, -1), Pong).known
        with Connection(address, keys=keys("stranger"), timeout_s=1.0) as connection, pytest.raises(ServerLostError):
            connection.call(Stats(), StatsReport)
        with pytest.raises(ValueError, match="TCP needs this client's keys"):
            Connection(address)
        with zmq.Context() as context, context.socket(zmq.DEALER) as bare:
            bare.linger = 0
            bare.connect(address)
            bare.send(encode(1, Ping(1, -1)))
            assert not bare.poll(1000), "without keys there is no connection"
        assert server.stop() == 0


# ---- clients


def test_no_server_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        CacheSession(tmp_path / "none", registration())
    (tmp_path / "empty").mkdir(mode=0o700)
    with pytest.raises(ServerLostError, match="no server answers there"):
        CacheSession(tmp_path / "empty", registration(), timeout_s=0.3)
    assert list((tmp_path / "empty").iterdir()) == [], "and no mark stays behind"


def test_a_server_that_hangs_costs_the_bound_and_then_nothing(server: ServerProcess) -> None:
    session = CacheSession(server.folder, registration(), timeout_s=0.7)
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        assert session.lookup(keys_of(1)) == MISS
        assert 0.6 < time.monotonic() - began < 5.0
        began = time.monotonic()
        assert session.lookup(keys_of(1)) == MISS
        assert time.monotonic() - began < 0.6, "a server that is lost is not asked again by this thread"
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
    wait_until(lambda: _stores(session), "it is back")
    session.close()


def _stores(session: CacheSession) -> bool:
    try:
        stored = session.allocate(keys_of(1))
    except ServerLostError:
        return False
    session.commit(stored.lease, 0)
    return session.lookup(keys_of(1)).num_chunks == 1


def test_several_requests_are_under_way_on_one_connection(server: ServerProcess) -> None:
    with Connection(server.folder) as connection:
        futures = [connection.request(Stats()) for _ in range(20)]
        wait_until(lambda: connection.poll(0.05) or all(future.done() for future in futures), "all are answered")
        assert {future.result().lamella_version for future in futures} == {lamella.__version__}
        assert connection.num_open == 0
        late = connection.request(Stats())
        connection.forget(late)
        assert connection.call(Stats(), StatsReport).draining is False, "an answer that nobody waits for is dropped"


def _can_unshare() -> bool:
    return subprocess.run(["unshare", "-m", "-p", "-i", "-f", "true"], capture_output=True).returncode == 0


@pytest.mark.known_fault(89)
@pytest.mark.skipif(
    not shutil.which("unshare") or not _can_unshare(), reason="this user may make no namespaces of processes and IPC"
)
def test_a_client_with_processes_and_ipc_of_its_own_needs_the_folder_and_the_memory_and_no_more(
    server: ServerProcess,
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
            str(server.folder),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert client.stdout is not None
    try:
        assert client.stdout.readline() == "pid 1\n", "the first process of its own namespace"
        ours = connect(server, registration("outside"))
        memory = SlotMemory.attach(ours.epoch.shared or pytest.fail("no memory"), NoRegistrar())
        found = ours.lookup(keys_of(1))
        with memory.buffer(found.slots[0][0]) as view:
            assert view == bytes([7]) * OBJECT
        memory.close()
        ours.close()
        assert slots(server, "pinned") == 1
    finally:
        end(client)
    wait_until(lambda: slots(server, "pinned") == 0, "what it held is free, whatever its pid was")


def test_a_server_that_is_killed_while_it_is_asked_costs_no_time_out(server: ServerProcess) -> None:
    session = connect(server, timeout_s=60.0)
    assert session.lookup(keys_of(1)) == MISS
    os.kill(server.process.pid, signal.SIGSTOP)
    killer = threading.Timer(0.3, server.kill)
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
