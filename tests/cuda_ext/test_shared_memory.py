"""Host memory: private, shared by name or descriptor, and never left behind."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from lamella.cuda_ext.shared_memory import PREFIX, HostMemory, reclaim_stale

PAGE = os.sysconf("SC_PAGESIZE")


def _child(code: str, *arguments: object) -> subprocess.Popen[str]:
    program = "from lamella.cuda_ext.shared_memory import *\nimport os, sys, time\nfrom pathlib import Path\n" + code
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )


def _first_line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{PREFIX}*"))


HOLD = "m = HostMemory.create(8192, Path(sys.argv[1])); print(m.path, flush=True); sys.stdin.read()"


def test_anonymous_memory_is_zero_writable_and_page_aligned() -> None:
    memory = HostMemory.anonymous(3 * PAGE)
    assert memory.address % PAGE == 0
    assert bytes(memory.buffer) == bytes(3 * PAGE)
    memory.buffer[5] = b"x"
    memory.populate(0, 3 * PAGE)
    assert memory.buffer[5] == b"x", "populating keeps what is there"
    assert (memory.path, memory.fd) == (None, None)
    memory.close()


def test_what_one_process_writes_another_reads() -> None:
    memory = HostMemory.create(PAGE)
    memory.buffer[0] = b"a"
    code = "m = HostMemory.attach(Path(sys.argv[1]), int(sys.argv[2])); m.buffer[1] = b'b'; print(m.buffer[0])"
    with _child(code, memory.path, PAGE) as child:
        assert _first_line(child) == "b'a'"
    assert memory.buffer[1] == b"b"
    assert memory.path is not None
    assert memory.path.exists(), "SHM-2: the one who attached has gone, and the name is still there"
    memory.close()


def test_the_file_is_for_its_owner_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        memory = HostMemory.create(PAGE, tmp_path)
    finally:
        os.umask(before)
    assert memory.path is not None
    assert stat.S_IMODE(memory.path.stat().st_mode) == 0o600
    memory.close()
    assert _files(tmp_path) == []


def test_a_file_that_others_may_open_is_not_attached(tmp_path: Path) -> None:
    memory = HostMemory.create(PAGE, tmp_path)
    assert memory.path is not None
    memory.path.chmod(0o660)
    with pytest.raises(PermissionError, match=r"mode 0600\), got owner \d+ and mode 0660"):
        HostMemory.attach(memory.path, PAGE)
    memory.close()


def test_a_file_of_another_size_is_not_attached(tmp_path: Path) -> None:
    memory = HostMemory.create(PAGE, tmp_path)
    assert memory.path is not None
    with pytest.raises(ValueError, match=f"must be a file of {2 * PAGE} bytes, got one of {PAGE}"):
        HostMemory.attach(memory.path, 2 * PAGE)
    memory.close()


def test_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(bytes(PAGE))
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic links"):
        HostMemory.attach(tmp_path / "link", PAGE)


def test_after_unlink_a_descriptor_still_attaches(tmp_path: Path) -> None:
    memory = HostMemory.create(PAGE, tmp_path)
    memory.unlink()
    assert _files(tmp_path) == []
    assert memory.fd is not None
    other = HostMemory.attach(memory.fd, PAGE)
    memory.buffer[9] = b"z"
    assert other.buffer[9] == b"z"
    other.close()
    memory.close()
    memory.close()


@pytest.mark.known_fault(46, 47)
def test_what_a_killed_process_left_is_reclaimed_by_the_next_creator(tmp_path: Path) -> None:
    with _child(HOLD, tmp_path) as child:
        left = Path(_first_line(child))
        assert left.exists()
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert left.exists(), "SIGKILL leaves the name"
        memory = HostMemory.create(PAGE, tmp_path)
        assert memory.path is not None
        assert _files(tmp_path) == [memory.path], "SHM-1"
        memory.close()


@pytest.mark.known_fault(47)
def test_what_a_living_process_holds_is_not_reclaimed(tmp_path: Path) -> None:
    with _child(HOLD, tmp_path) as child:
        held = Path(_first_line(child))
        assert reclaim_stale(tmp_path) == ()
        assert held.exists()
        child.communicate("")  # ends it in order: nothing is left
    assert _files(tmp_path) == []


@pytest.mark.known_fault(46)
def test_a_memory_that_only_an_attached_process_still_holds_is_not_stale(tmp_path: Path) -> None:
    with _child(HOLD, tmp_path) as creator:
        path = Path(_first_line(creator))
        attached = HostMemory.attach(path, 8192)
        creator.send_signal(signal.SIGKILL)
        creator.wait()
    assert reclaim_stale(tmp_path) == ()
    attached.close()
    assert reclaim_stale(tmp_path) == (path,)


def test_a_memory_that_is_dropped_leaves_no_name_behind(tmp_path: Path) -> None:
    HostMemory.create(PAGE, tmp_path)
    assert _files(tmp_path) == []


def test_a_forked_child_that_ends_does_not_take_the_name_away(tmp_path: Path) -> None:
    code = """
m = HostMemory.create(8192, Path(sys.argv[1]))
if os.fork() == 0: sys.exit()
os.wait(); print(m.path.exists(), flush=True)
"""
    with _child(code, tmp_path) as child:
        assert _first_line(child) == "True"


def test_closing_is_refused_while_a_view_is_alive() -> None:
    memory = HostMemory.anonymous(PAGE)
    view = memoryview(memory.buffer)
    with pytest.raises(RuntimeError, match="views of this memory are still alive"):
        memory.close()
    assert memory.address, "still usable"
    view.release()
    memory.close()
    with pytest.raises(RuntimeError, match="this memory is closed"):
        _ = memory.address


def test_a_folder_too_small_says_so_and_how_to_enlarge_it(tmp_path: Path) -> None:
    space = os.statvfs(tmp_path)
    with pytest.raises(OSError, match=r"bytes left and the pool needs \d+.*--shm-size"):
        HostMemory.create(2 * space.f_bavail * space.f_frsize, tmp_path)
    assert _files(tmp_path) == []


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="num_bytes must be at least 1, got 0"):
        HostMemory.anonymous(0)
