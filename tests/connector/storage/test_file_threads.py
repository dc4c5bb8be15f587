"""A file tier's threads and open files where the system gives out or the tier is closed: no read outlives its call."""

import errno
import os
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from file_disk import LAST, LAYER, SIZE, WAIT_S, WHOLE, Disk, Kept
from lamella.connector.storage.file_tier import FileTier
from lamella.connector.storage.object_format import PAGE_BYTES
from lamella.connector.storage.open_files import OpenFiles
from lamella.connector.storage.tier import DamagedObjectError, Leading
from lamella.reference.layout import ByteRange
from tier_objects import content, key


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    return Kept(tmp_path, monkeypatch)


def refuse_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)


def test_a_process_that_may_start_no_thread_reads_on_the_callers(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    kept.disk.refused["cached read"] = errno.EAGAIN
    refuse_threads(monkeypatch)
    assert kept.read() == (Leading(6), 6)
    assert kept.disk.readers == {threading.current_thread().name}


def test_no_read_outlives_its_call_where_the_system_gives_one_thread_and_then_no_more(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool that cannot start a thread has the work in its queue all the same, and another thread comes to it."""
    kept.disk.refused["cached read"] = errno.EAGAIN
    busy, let_go, theirs, ours = threading.Event(), threading.Event(), threading.Event(), threading.Event()
    kept.tier._reader._threads.submit(lambda: (busy.set(), let_go.wait(WAIT_S)))
    assert busy.wait(WAIT_S)
    refuse_threads(monkeypatch)
    inner, ended = kept.disk.preadv, []

    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        if flags or offset < PAGE_BYTES:
            return inner(descriptor, buffers, offset, flags)
        if threading.current_thread() is threading.main_thread():
            let_go.set()  # the busy thread finds what this call has left in the queue
            theirs.wait(WAIT_S)
            ours.set()
        else:
            theirs.set()
            ours.wait(WAIT_S)
            threading.Event().wait(0.2)
            ended.append(offset)
        return inner(descriptor, buffers, offset, flags)

    kept.disk.preadv = preadv  # type: ignore[method-assign]
    assert kept.read() == (Leading(6), 6), "each object is read when the call returns, whoever reads it"
    count = len(ended)
    assert count >= 1
    threading.Event().wait(0.3)
    assert len(ended) == count


def test_what_a_call_left_in_a_queue_holds_no_buffer(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    kept.disk.refused["cached read"] = errno.EAGAIN
    refuse_threads(monkeypatch)
    buffers = [bytearray(SIZE) for _ in kept.keys]
    views = [[memoryview(buffer)] for buffer in buffers]
    assert kept.tier.get_leading(kept.keys, WHOLE, views) == Leading(6)
    del views
    for buffer in buffers:
        buffer.append(0)  # BufferError while a view of it is alive


@pytest.mark.parametrize("fault", [ZeroDivisionError, KeyboardInterrupt])
def test_a_fault_of_a_reading_thread_is_its_callers_even_behind_an_objects_own(
    fault: type[BaseException], kept: Kept
) -> None:
    kept.disk.refused["cached read"] = errno.EAGAIN
    failed = threading.Event()
    inner = kept.disk.preadv

    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        if flags or offset < PAGE_BYTES:
            return inner(descriptor, buffers, offset, flags)
        if kept.disk.open_now[descriptor] == kept.place(0):
            failed.wait(WAIT_S)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        failed.set()
        raise fault

    kept.disk.preadv = preadv  # type: ignore[method-assign]
    with pytest.raises(fault):
        kept.read()
    assert kept.disk.open_now == {}


# ---- closing


def test_a_closed_tier_leaves_no_file_open_when_it_is_read_again(kept: Kept) -> None:
    kept.read(LAYER)
    kept.tier.close()
    assert kept.disk.open_now == {}
    assert kept.read(LAYER) == (Leading(6), 6)
    assert kept.disk.open_now == {}
    kept.tier.close()


def test_a_tier_that_is_closed_during_a_read_ends_it_whole_and_leaves_no_file_open(kept: Kept) -> None:
    kept.disk.refused["cached read"] = errno.EAGAIN
    inner = kept.disk.preadv
    calls: list[Callable[[], None]] = [kept.tier.close]

    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        if not flags and offset >= PAGE_BYTES and calls:
            calls.pop()()
        return inner(descriptor, buffers, offset, flags)

    kept.disk.preadv = preadv  # type: ignore[method-assign]
    assert kept.read(LAYER) == (Leading(6), 6)
    assert calls == []
    assert kept.disk.open_now == {}


def test_making_room_for_descriptors_does_not_end_the_keeping_of_files(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.read(LAYER)
    kept.disk.most_open = 6
    more = [key(number) for number in range(6, 9)]
    other = FileTier(Path(kept.tier.name.removeprefix("file:")), SIZE, (SIZE // 4,) * 4)
    kept.disk.most_open = None
    for number, one in enumerate(more, 6):
        other.put(one, memoryview(content(number, SIZE)))
    kept.disk.most_open = 6
    buffers = [[memoryview(bytearray(one.num_bytes)) for one in LAYER] for _ in more]
    assert kept.tier.get_leading(more, LAYER, buffers) == Leading(3)
    assert len(kept.disk.open_now) == 3, "those of before made room, these are kept"


# ---- what a forked process inherits


def test_a_forked_process_reads_by_itself_what_its_parent_has_open(tmp_path: Path) -> None:
    """Its copy of the pool has no thread; its copies of the descriptors are its own."""
    tier = FileTier(tmp_path / "kv", SIZE, (SIZE // 4,) * 4)
    keys = [key(number) for number in range(6)]
    for number, one in enumerate(keys):
        tier.put(one, memoryview(content(number, SIZE)))
    cut = [ByteRange(1, 10)]  # read by threads wherever it lies
    wanted = [content(number, SIZE)[1:11] for number in range(6)]

    def read() -> bool:
        buffers = [bytearray(10) for _ in keys]
        done = tier.get_leading(keys, cut, [[memoryview(buffer)] for buffer in buffers])
        return done == Leading(6) and buffers == wanted

    assert read()
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if all(read() for _ in range(10)) else 1)
        finally:
            os._exit(2)
    assert read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert read()
    tier.close()


def test_files_that_are_given_twice_or_beyond_the_limit_are_closed(kept: Kept) -> None:
    kept.keys = [*kept.keys[:3], *kept.keys[:3]]
    kept.read(LAYER)
    assert sorted(kept.disk.open_now.values()) == sorted(kept.place(number) for number in range(3))
    kept.tier._held.close()
    held = OpenFiles(most=0)
    assert held.take(kept.keys) == {}
    assert kept.disk.open_now == {}
    assert kept.read(LAST)[0] == Leading(6)


# ---- what is said of a damaged file


@pytest.mark.parametrize(
    ("meanwhile", "said"),
    [("nothing", "it was removed"), ("removed", "it is gone already"), ("replaced", "another file has replaced it")],
)
def test_the_log_says_what_became_of_a_damaged_file(
    meanwhile: str, said: str, kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    kept.damage(0, 0)
    place, inner = Path(kept.place(0)), kept.disk.preadv

    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        if kept.disk.open_now.get(descriptor) == str(place) and offset >= PAGE_BYTES:
            if meanwhile == "removed":
                place.unlink(missing_ok=True)
            elif meanwhile == "replaced":
                place.with_suffix(".new").write_bytes(b"another process's")
                place.with_suffix(".new").rename(place)
        return inner(descriptor, buffers, offset, flags)

    kept.disk.preadv = preadv  # type: ignore[method-assign]
    assert kept.read()[0].num_objects == 0
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.endswith(f"is damaged in run 0: its checksum differs; {said}")
    assert place.exists() == (meanwhile == "replaced"), "what another process has put is left alone"


def test_a_damaged_file_of_a_folder_that_cannot_be_written_says_so(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    kept.damage(0, 0)
    monkeypatch.setattr(Path, "unlink", refuse)
    assert kept.read()[0].num_objects == 0
    (message,) = [record.getMessage() for record in caplog.records]
    assert "its checksum differs; it cannot be removed: [Errno 13]" in message


# ---- an open file is looked at before each slice


def test_a_file_cut_off_behind_the_slice_is_damaged_whatever_its_time_of_change_says(kept: Kept) -> None:
    kept.read(LAYER)
    before = os.stat(kept.place(0))
    os.truncate(kept.place(0), PAGE_BYTES + SIZE - 1)
    os.utime(kept.place(0), ns=(before.st_atime_ns, before.st_mtime_ns))
    read, _ = kept.read(LAYER)
    assert (read.num_objects, "cut off" in str(read.error)) == (0, True)
    assert not kept.is_there(0)


# ---- more than one read an object


@pytest.mark.parametrize("is_cached", [True, False], ids=["cached", "awaited"])
def test_runs_of_several_reads_are_whole_and_verified_to_their_last_byte(
    is_cached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = (3 << 20, (2 << 20) + 5, 7, 1 << 20)
    size = sum(runs)
    data = random.Random(1).randbytes(size)
    disk = Disk(monkeypatch)
    tier = FileTier(tmp_path / "kv", size, runs)
    tier.put(key(0), memoryview(data))
    if not is_cached:
        disk.refused["cached read"] = errno.EAGAIN
    for ranges in ([ByteRange(0, size)], [ByteRange(0, runs[0])], [ByteRange(runs[0], runs[1] + 7)]):
        buffers = [bytearray(one.num_bytes) for one in ranges]
        tier.get_ranges(key(0), ranges, [memoryview(buffer) for buffer in buffers])
        assert buffers == [data[one.offset : one.offset + one.num_bytes] for one in ranges]
        assert bool(disk.readers) != is_cached
    with open(tier.path_of(key(0)), "r+b") as file:
        file.seek(PAGE_BYTES + runs[0] - 1)
        file.write(bytes([data[runs[0] - 1] ^ 1]))
    buffer = bytearray(runs[0])
    with pytest.raises(DamagedObjectError, match="damaged in run 0"):
        tier.get_ranges(key(0), [ByteRange(0, runs[0])], [memoryview(buffer)])


def test_after_an_error_no_further_object_is_read(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_threads(monkeypatch)
    kept.disk.refused["cached read"] = errno.EAGAIN
    kept.damage(1, SIZE - 1)
    before = kept.disk.read_bytes
    assert kept.read()[0].num_objects == 1
    assert kept.disk.read_bytes - before == 2 * SIZE + len(kept.keys) * PAGE_BYTES
