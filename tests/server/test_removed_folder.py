"""A server whose folder is removed ends in order: nobody can find it, and who lives cannot be told any more."""

from __future__ import annotations

import shutil
from pathlib import Path

from server_driver import WAIT_S, ServerProcess, connect, keys_of, server_process
from waiting import wait_until


def test_a_server_without_its_folder_says_so_and_stops_and_leaves_no_memory(tmp_path: Path) -> None:
    with server_process(tmp_path) as server:
        session = connect(server)
        session.allocate(keys_of(1, 2))
        assert server.memories()
        shutil.rmtree(server.folder)
        assert server.process.wait(WAIT_S) == 1
        said = [line["message"] for line in server.lines()]
        assert [one for one in said if "was removed, so that no engine finds this server" in one]
        assert said[-1] == "stopped"
        assert "Traceback" not in server.log.read_text()
        wait_until(lambda: not server.memories(), "the memory's names are gone")
        session.close()


def test_it_takes_nothing_from_a_server_in_a_folder_of_the_same_name(tmp_path: Path) -> None:
    with server_process(tmp_path) as first:
        first.folder.rename(tmp_path / "moved")  # as removed, and a second one is made at once
        second = ServerProcess(tmp_path)
        try:
            second.wait_serving()
            assert first.process.wait(WAIT_S) == 1
            session = connect(second)
            assert session.lookup(keys_of(1)).num_chunks == 0
            session.close()
        finally:
            assert second.stop() == 0
