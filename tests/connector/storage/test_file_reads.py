"""How the file tier reads: what is cached at once, what is not by several threads, and no byte that is not verified."""

import errno
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from file_disk import KIB, LAST, LAYER, RUNS, SIZE, WAIT_S, WHOLE, Kept
from lamella.connector.storage.file_tier import FileTier
from lamella.connector.storage.object_format import PAGE_BYTES
from lamella.connector.storage.open_files import OpenFiles
from lamella.connector.storage.tier import DamagedObjectError, Leading, TierError
from lamella.reference.layout import ByteRange
from tier_objects import content, key
from waiting import wait_until


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    return Kept(tmp_path, monkeypatch)


# ---- cached or not


def test_what_is_cached_is_read_on_the_callers_thread_without_waiting(kept: Kept) -> None:
    assert kept.read() == (Leading(6), 6)
    assert kept.disk.readers == set()


def test_what_is_not_cached_is_read_by_four_threads_at_once(kept: Kept) -> None:
    kept.disk.cached_bytes = {kept.place(number): 0 for number in range(4)}
    kept.keys = kept.keys[:4]
    kept.disk.together = threading.Barrier(4)  # each read waits until four threads are reading
    assert kept.read(WHOLE) == (Leading(4), 4)
    assert len(kept.disk.readers) == 4
    assert threading.current_thread().name in kept.disk.readers


def test_objects_up_to_the_first_uncached_one_are_read_without_waiting(kept: Kept) -> None:
    kept.disk.cached_bytes = {kept.place(5): 0}
    assert kept.read() == (Leading(6), 6)
    assert kept.disk.readers == {threading.current_thread().name}


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EOPNOTSUPP])
def test_a_file_system_that_cannot_tell_is_waited_for(code: int, kept: Kept) -> None:
    kept.disk.refused["cached read"] = code
    assert kept.read() == (Leading(6), 6)
    assert kept.read(LAYER) == (Leading(6), 6)


def test_ranges_that_cut_runs_are_read_and_verified_by_whole_runs(kept: Kept) -> None:
    cut = [ByteRange(1, 10), ByteRange(5 * KIB, 6 * KIB)]
    assert kept.read(cut) == (Leading(6), 6)
    kept.damage(2, 4 * KIB)  # a byte outside both ranges, in a run that one of them cuts
    read, right = kept.read(cut)
    assert (read.num_objects, right >= 2) == (2, True)
    assert "damaged in run 1" in str(read.error)


def test_a_closed_tier_still_reads_on_its_callers_thread(kept: Kept) -> None:
    kept.tier.close()
    kept.disk.refused["cached read"] = errno.EAGAIN
    assert kept.read() == (Leading(6), 6)
    assert kept.disk.readers == {threading.current_thread().name}


@given(
    cached_bytes=st.dictionaries(st.integers(0, 5), st.sampled_from([0, 1, 4 * KIB, SIZE - 1])),
    damaged=st.dictionaries(st.integers(0, 5), st.integers(0, SIZE - 1)),
    ranges=st.sampled_from([WHOLE, LAYER, LAST, [ByteRange(3, 4 * KIB)]]),
)
def test_whatever_is_cached_or_damaged_the_bytes_before_the_first_damage_come_and_no_others(
    cached_bytes: dict[int, int],
    damaged: dict[int, int],
    ranges: list[ByteRange],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with pytest.MonkeyPatch.context() as patching:
        kept = Kept(tmp_path_factory.mktemp("reads"), patching)
        for number, offset in damaged.items():
            kept.damage(number, offset)
        kept.disk.cached_bytes = {kept.place(number): there for number, there in cached_bytes.items()}

        def is_hit(number: int) -> bool:
            """Whether the damage lies in a run that is read."""
            run = damaged[number] // (4 * KIB)
            return any(
                one.offset // (4 * KIB) <= run <= (one.offset + one.num_bytes - 1) // (4 * KIB) for one in ranges
            )

        first = min((number for number in damaged if is_hit(number)), default=6)
        read, right = kept.read(ranges)
        assert read.num_objects == first
        assert right >= first
        assert isinstance(read.error, DamagedObjectError) == (first < 6)
        if first < 6:
            assert f"damaged in run {damaged[first] // (4 * KIB)}" in str(read.error)
            assert not kept.is_there(first)
        kept.tier.close()
        assert kept.disk.open_now == {}


def test_one_threads_refused_read_ends_the_others_and_none_reads_on_afterwards(kept: Kept) -> None:
    kept.disk.cached_bytes = {kept.place(number): 0 for number in range(6)}
    refused, reading, let_go = threading.Event(), threading.Event(), threading.Event()
    inner = kept.disk.preadv
    ended: list[str] = []

    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        if flags or offset < PAGE_BYTES:
            return inner(descriptor, buffers, offset, flags)
        if kept.disk.open_now[descriptor] == kept.place(1):
            reading.wait(WAIT_S)
            refused.set()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if kept.disk.open_now[descriptor] == kept.place(2):
            reading.set()
            refused.wait(WAIT_S)
            let_go.wait(0.2)
            ended.append("2")
        return inner(descriptor, buffers, offset, flags)

    kept.disk.preadv = preadv  # type: ignore[method-assign]
    read, right = kept.read()
    assert (read.num_objects, right >= 1, ended) == (1, True, ["2"]), "a buffer is the caller's only when nobody reads"
    assert isinstance(read.error, TierError)
    assert "EIO" in str(read.error)
    assert kept.is_there(1)


def test_a_thread_of_ours_that_fails_otherwise_is_not_taken_for_a_miss(kept: Kept) -> None:
    kept.disk.cached_bytes = {kept.place(number): 0 for number in range(6)}
    inner = kept.disk.preadv

    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        if not flags and threading.current_thread() is not threading.main_thread():
            raise ZeroDivisionError
        return inner(descriptor, buffers, offset, flags)

    kept.disk.preadv = preadv  # type: ignore[method-assign]
    for _ in range(50):
        try:
            kept.read()
        except ZeroDivisionError:
            return
    raise AssertionError("no other thread ever read")


def test_a_caller_that_is_interrupted_gets_its_buffers_back_only_when_nobody_reads(kept: Kept) -> None:
    kept.disk.cached_bytes = {kept.place(number): 0 for number in range(6)}
    reading = threading.Event()
    ended: list[str] = []
    inner = kept.disk.preadv

    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        if flags or offset < PAGE_BYTES:
            return inner(descriptor, buffers, offset, flags)
        if threading.current_thread() is threading.main_thread():
            reading.wait(WAIT_S)
            raise KeyboardInterrupt
        reading.set()
        threading.Event().wait(0.2)
        ended.append(threading.current_thread().name)
        return inner(descriptor, buffers, offset, flags)

    kept.disk.preadv = preadv  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        kept.read()
    count = len(ended)
    assert 1 <= count <= 3
    assert kept.disk.open_now == {}
    threading.Event().wait(0.4)
    assert len(ended) == count, "no object was taken after the caller had gone"


# ---- files that stay open from slice to slice


def test_a_load_opens_its_files_once_and_its_last_slice_closes_them(kept: Kept) -> None:
    assert kept.read(LAYER) == (Leading(6), 6)
    assert len(kept.disk.open_now) == 6
    assert kept.read(LAYER) == (Leading(6), 6)
    assert kept.read(LAST) == (Leading(6), 6)
    assert len(kept.disk.opened) == 6
    assert kept.disk.open_now == {}


def test_an_object_removed_between_two_slices_is_a_miss(kept: Kept) -> None:
    kept.read(LAYER)
    Path(kept.place(3)).unlink()
    read, right = kept.read(LAYER)
    assert (read.num_objects, right) == (3, 3)
    assert isinstance(read.error, KeyError)
    assert kept.disk.open_now == {}, "neither its file nor the others'"


def test_an_object_put_anew_between_two_slices_is_served_with_its_new_bytes(kept: Kept) -> None:
    kept.read(LAYER)
    other = FileTier(Path(kept.tier.name.removeprefix("file:")), SIZE, RUNS)
    other.delete(key(0))
    other.put(key(0), memoryview(content(50, SIZE)))
    buffer = bytearray(4 * KIB)
    kept.tier.get_ranges(key(0), [ByteRange(0, 4 * KIB)], [memoryview(buffer)])
    assert buffer == content(50, SIZE)[: 4 * KIB]


def test_a_file_whose_whole_object_was_replaced_in_place_is_served_with_its_new_bytes(kept: Kept) -> None:
    kept.read(LAYER)
    other = FileTier(Path(kept.place(0)).parents[4] / "other", SIZE, RUNS)
    other.put(key(0), memoryview(content(50, SIZE)))
    with open(kept.place(0), "r+b") as file:
        file.write(other.path_of(key(0)).read_bytes())
    buffer = bytearray(4 * KIB)
    kept.tier.get_ranges(key(0), [ByteRange(0, 4 * KIB)], [memoryview(buffer)])
    assert buffer == content(50, SIZE)[: 4 * KIB]


def test_an_object_written_over_or_cut_off_between_two_slices_is_damaged(kept: Kept) -> None:
    kept.read(LAYER)
    kept.damage(1, 0)
    os.truncate(kept.place(0), PAGE_BYTES + SIZE - 1)
    read, _ = kept.read(LAYER)
    assert (read.num_objects, isinstance(read.error, DamagedObjectError)) == (0, True)
    kept.keys = kept.keys[1:]
    read, _ = kept.read(LAYER)
    assert (read.num_objects, isinstance(read.error, DamagedObjectError)) == (0, True)
    assert not kept.is_there(0)


def test_an_object_that_expires_between_two_slices_is_a_miss(tmp_path: Path) -> None:
    now_ns = 1_700_000_000_000_000_000
    tier = FileTier(tmp_path / "kv", SIZE, RUNS, ttl_s=60, clock_ns=lambda: now_ns)
    tier.put(key(0), memoryview(content(0, SIZE)))
    buffers = [memoryview(bytearray(4 * KIB)) for _ in LAYER]
    tier.get_ranges(key(0), LAYER, buffers)
    now_ns += 61_000_000_000
    with pytest.raises(KeyError, match="outlived"):
        tier.get_ranges(key(0), LAYER, buffers)


def test_deleting_an_object_closes_its_file(kept: Kept) -> None:
    kept.read(LAYER)
    kept.tier.delete(kept.keys[2])
    assert kept.place(2) not in kept.disk.open_now.values()
    assert len(kept.disk.open_now) == 5


@pytest.mark.parametrize("asked", ["exists", "put", "get"])
def test_what_a_load_that_was_given_up_left_open_is_closed_later(
    asked: str, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(kept.tier, "_held", OpenFiles(idle_s=2, clock_s=lambda: now_s))
    kept.read(LAYER)
    now_s += 1.9
    kept.tier.exists(kept.keys)
    assert len(kept.disk.open_now) == 6
    now_s += 0.2
    if asked == "exists":
        kept.tier.exists(kept.keys)
    elif asked == "put":
        kept.tier.put(key(9), memoryview(content(9, SIZE)))
    else:
        kept.tier.get_ranges(key(0), [ByteRange(12 * KIB, 4 * KIB)], [memoryview(bytearray(4 * KIB))])
    assert kept.disk.open_now == {}


def wait_until_closed(kept: Kept) -> None:
    wait_until(lambda: kept.disk.open_now == {}, "no file is open", WAIT_S)


def test_removed_files_do_not_keep_their_bytes_on_the_disk_of_an_idle_tier(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept.tier, "_held", OpenFiles(idle_s=0.05))
    for _ in range(2):  # also those that are given once the first have been closed
        kept.read(LAYER)
        wait_until_closed(kept)
    kept.read(LAYER)
    for number in range(6):
        Path(kept.place(number)).unlink()  # as another process does, which cannot tell this one
    wait_until_closed(kept)


def test_a_file_that_a_load_came_back_for_is_kept_for_as_long_again(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    held = OpenFiles(idle_s=0.2, clock_s=lambda: now_s)
    monkeypatch.setattr(kept.tier, "_held", held)
    kept.read(LAYER)
    now_s += 0.15
    kept.tier.get_ranges(key(0), LAYER, [memoryview(bytearray(4 * KIB)) for _ in LAYER])
    now_s += 0.1
    held._close_later()
    assert set(kept.disk.open_now.values()) == {kept.place(0)}
    now_s += 0.11
    wait_until_closed(kept)


def test_where_no_thread_can_be_had_files_are_closed_by_the_next_call(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Timer, "start", refuse)
    monkeypatch.setattr(kept.tier, "_held", OpenFiles(idle_s=0.01))
    assert kept.read(LAYER) == (Leading(6), 6)
    assert len(kept.disk.open_now) == 6
    time.sleep(0.02)
    kept.tier.exists(kept.keys)
    assert kept.disk.open_now == {}


def test_a_closed_tier_leaves_no_thread_that_looks(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept.tier, "_held", OpenFiles(idle_s=3600))
    before = {one for one in threading.enumerate() if isinstance(one, threading.Timer)}
    kept.read(LAYER)
    (mine,) = {one for one in threading.enumerate() if isinstance(one, threading.Timer)} - before
    kept.tier.close()
    mine.join(WAIT_S)
    assert not mine.is_alive()


def test_no_more_files_stay_open_than_allowed(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept.tier, "_held", OpenFiles(most=4))
    for _ in range(3):
        assert kept.read(LAYER) == (Leading(6), 6)
        assert len(kept.disk.open_now) == 4
    assert len(kept.disk.opened) == 6 + 2 + 2, "four are kept, not each pushed out by the next"


@pytest.mark.parametrize("most", [1, 4])
def test_a_process_that_may_open_no_more_reads_a_few_files_at_a_time(most: int, kept: Kept) -> None:
    kept.disk.most_open = most
    assert kept.read(LAYER) == (Leading(6), 6)
    assert kept.read(LAST) == (Leading(6), 6)
    kept.disk.most_open = 0
    read, _ = kept.read(LAYER)
    assert (read.num_objects, "EMFILE" in str(read.error)) == (0, True)


def test_two_loads_of_one_prefix_never_read_one_descriptor(kept: Kept) -> None:
    """A descriptor that one load closes can be another file's in the next moment."""
    wrong: list[object] = []

    def load() -> None:
        for ranges in [LAYER, [ByteRange(0, 4 * KIB)], LAYER, LAST] * 40:
            outcome = kept.read(ranges)
            if outcome != (Leading(6), 6):
                wrong.append(outcome)

    loads = [threading.Thread(target=load) for _ in range(3)]
    for one in loads:
        one.start()
    for one in loads:
        one.join()
    assert wrong == []
    kept.tier.close()
    assert kept.disk.open_now == {}
