"""Who may speak to a server: folders, marks of live processes, the lock of the only server."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lamella.server.endpoint import (
    AliveMark,
    CurveKeys,
    ServerLock,
    check_folder,
    default_folder,
    ipc_endpoint,
    is_alive,
    make_folder,
    reclaim_marks,
)
from server_driver import WAIT_S
from waiting import wait_until

MARKED = """
import sys, time
from pathlib import Path
from lamella.server.endpoint import AliveMark
mark = AliveMark(Path(sys.argv[1]))
print(mark.name, flush=True)
time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "serve"
    make_folder(made)
    return made


def test_a_folder_is_made_for_its_owner_alone_and_anything_else_is_refused(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    for mode in (0o750, 0o701, 0o777):
        (tmp_path / "a" / "b").chmod(mode)
        for check in (make_folder, check_folder):
            with pytest.raises(PermissionError, match=f"mode 0700.*mode {mode:04o}: chmod 700"):
                check(tmp_path / "a" / "b")
    with pytest.raises(FileNotFoundError):
        check_folder(tmp_path / "none")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_refused(folder: Path) -> None:
    os.chown(folder, 65534, 65534)
    with pytest.raises(PermissionError, match="got owner 65534"):
        check_folder(folder)


def test_a_link_to_a_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(PermissionError, match="must be a folder of user"):
        check_folder(tmp_path / "link")


def test_a_socket_s_path_has_a_length(tmp_path: Path) -> None:
    assert ipc_endpoint(Path("/run/lamella")) == "ipc:///run/lamella/server.sock"
    with pytest.raises(ValueError, match="may have 107 bytes"):
        ipc_endpoint(tmp_path / ("x" * 120))


def test_the_folder_is_found_where_the_system_keeps_such_things(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert default_folder() == Path("/run/user/7/lamella")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert default_folder() == Path(f"/tmp/lamella-{os.geteuid()}")


def test_a_folder_has_one_server_and_the_second_is_told_its_pid(folder: Path) -> None:
    lock = ServerLock(folder)
    with pytest.raises(RuntimeError, match=rf"a server \(pid {os.getpid()}\) serves .* already"):
        ServerLock(folder)
    lock.close()
    lock.close()
    ServerLock(folder).close()


def test_a_mark_lives_with_its_holder_and_is_removed_after_it(folder: Path) -> None:
    mark = AliveMark(folder)
    assert is_alive(folder, mark.name)
    assert (folder / mark.name).stat().st_mode & 0o777 == 0o600
    mark.close()
    mark.close()
    assert not is_alive(folder, mark.name)
    assert list(folder.iterdir()) == []


@pytest.mark.known_fault(46)
def test_a_killed_process_is_dead_at_once_and_leaves_no_mark(folder: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", MARKED, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        name = process.stdout.readline().strip()
        assert is_alive(folder, name)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(WAIT_S)
    wait_until(lambda: not is_alive(folder, name), "the mark is nobody's")
    assert list(folder.iterdir()) == []


def test_a_forked_child_does_not_keep_its_parent_alive(folder: Path) -> None:
    code = f"""
import os, sys, time
from pathlib import Path
from lamella.server.endpoint import AliveMark
mark = AliveMark(Path({str(folder)!r}))
child = os.fork()
if child == 0:
    os.close(1)
    time.sleep(60)
    os._exit(0)
print(mark.name, child, flush=True)
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=WAIT_S, check=True)
    name, child = done.stdout.split()
    try:
        wait_until(lambda: not is_alive(folder, name), "the parent is gone, whatever its child does")
    finally:
        os.kill(int(child), signal.SIGKILL)


def test_marks_of_the_dead_are_removed_and_nothing_else(folder: Path) -> None:
    living = AliveMark(folder)
    (folder / "alive-1-0123456789abcdef").touch(0o600)
    (folder / "alive-notes.txt").touch()
    assert reclaim_marks(folder) == 1
    assert {path.name for path in folder.iterdir()} == {living.name, "alive-notes.txt"}
    living.close()


def test_a_mark_that_is_swept_away_before_it_is_locked_is_made_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, swept = fcntl.flock, []

    def flock(fd: int, how: int) -> None:
        if not swept:
            swept.append(True)
            (path,) = folder.iterdir()
            path.unlink()
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    mark = AliveMark(folder)
    monkeypatch.undo()
    assert is_alive(folder, mark.name)
    mark.close()


@pytest.mark.parametrize("name", ["", "../serve.lock", "alive-1-xyz", "alive-1-0123456789abcdef/../x", "server.sock"])
def test_a_name_that_is_none_of_a_mark_is_refused(name: str, folder: Path) -> None:
    with pytest.raises(ValueError, match="not the name of a client's file"):
        is_alive(folder, name)


def test_keys_are_read_from_their_files_and_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    import zmq.auth

    public, secret = zmq.auth.create_certificates(tmp_path, "client")
    server, _ = zmq.auth.create_certificates(tmp_path, "server")
    os.chmod(secret, 0o600)
    keys = CurveKeys.load(Path(secret), Path(server))
    assert (len(keys.public), len(keys.secret), len(keys.server)) == (40, 40, 40)
    assert keys.secret.decode() not in repr(keys)
    os.chmod(secret, 0o640)
    with pytest.raises(PermissionError, match="its owner's alone, got mode 0640"):
        CurveKeys.load(Path(secret))
    os.chmod(public, 0o600)
    with pytest.raises(ValueError, match="has no secret key"):
        CurveKeys.load(Path(public))
