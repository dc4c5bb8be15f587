"""The life of a real server process: start and stop, kill -9, health and figures, and nothing left behind."""

from __future__ import annotations

import os
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from lamella.cuda_ext.registration import NoRegistrar
from lamella.cuda_ext.shared_memory import HostMemory
from lamella.cuda_ext.slots import SlotMemory
from lamella.server.client import MISS, Epoch
from lamella.server.connection import ServerLostError
from lamella.server.frames import RefusedError
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
                view[:] = bytes([slot + 1]) * layout_of().object_bytes
        session.commit(stored.lease, 0)
        other = connect(server, registration("another engine"))
        found = other.lookup(keys_of(1, 2, 3))
        assert (found.num_chunks, found.slots) == (2, ((0, 1),))
        assert other.retrieve(found.lease, 0).path == "worker"
        with memory.buffer(found.slots[0][1]) as view:
            assert view == b"\x02" * layout_of().object_bytes
        assert other.release(found.lease)
        other.close()
        session.close()
        memory.close()
        assert server.stop() == 0


def test_a_second_server_in_the_folder_is_refused_and_the_first_goes_on(tidy_server: ServerProcess) -> None:
    second = ServerProcess(tidy_server.folder.parent)
    second.process.wait(20)
    assert second.process.returncode == 2
    assert f"a server (pid {tidy_server.process.pid}) serves" in " ".join(second.log.read_text().split())
    assert figure(tidy_server, "lamella_server_sessions") == 0


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


def test_attaching_does_not_unlink_and_the_server_s_end_does(tidy_server: ServerProcess) -> None:
    with_session = connect(tidy_server)
    shared = with_session.epoch.shared
    assert shared is not None
    HostMemory.attach(shared.path, shared.shape.total_bytes).close()
    assert shared.path.exists()
    with_session.close()
    tidy_server.stop()
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


def test_log_lines_are_json_with_a_time_and_a_level(tidy_server: ServerProcess) -> None:
    connect(tidy_server, registration("named engine")).close()
    wait_until(lambda: len(tidy_server.lines()) >= 3, "registered and gone are said")
    assert all({"time", "level", "logger", "message"} <= set(line) for line in tidy_server.lines())
    assert any("engine named engine: rank 0 is registered" in line["message"] for line in tidy_server.lines())


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
