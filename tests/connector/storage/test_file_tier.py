"""What the file tier does beyond what every tier promises: crashes, strangers, damage, limits."""

import errno
import fcntl
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella.connector.storage.circuit import CircuitBreaker, GuardedTier
from lamella.connector.storage.file_tier import FileTier
from lamella.connector.storage.object_format import PAGE_BYTES
from lamella.connector.storage.tier import DamagedObjectError, TierError
from lamella.reference.layout import ByteRange
from tier_objects import RUNS, SIZE, FaultyOs, content, key, put, read

HEADER = PAGE_BYTES


def test_another_process_finds_what_this_one_put(tmp_path: Path) -> None:
    FileTier(tmp_path / "kv", SIZE).put(key(7), memoryview(content(7)))
    program = (
        "import sys; from pathlib import Path; from lamella.connector.storage.file_tier import FileTier\n"
        "from lamella.reference.keys import ChunkKey; from lamella.reference.layout import ByteRange\n"
        f"tier = FileTier(Path(sys.argv[1]), {SIZE}); found = bytearray({SIZE})\n"
        f"key = ChunkKey({b's' * 32!r}, (7).to_bytes(32, 'big'), 4)\n"
        f"tier.get_ranges(key, [ByteRange(0, {SIZE})], [memoryview(found)])\n"
        "sys.stdout.buffer.write(found)"
    )
    result = subprocess.run([sys.executable, "-c", program, str(tmp_path / "kv")], capture_output=True, check=True)
    assert result.stdout == content(7)


def test_files_and_folders_are_their_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        tier = FileTier(tmp_path / "kv", SIZE)
        put(tier, 1)
    finally:
        os.umask(before)
    for path in [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ValueError, match=r"open to others \(mode 0755\): chmod 700"):
        FileTier(tmp_path, SIZE)


def test_a_folder_that_is_not_a_path_is_refused_with_what_to_pass(tmp_path: Path) -> None:
    folder = str(tmp_path / "kv")
    with pytest.raises(TypeError, match=rf"folder must be a pathlib.Path, got '{folder}': pass Path\('{folder}'\)"):
        FileTier(folder, SIZE)  # type: ignore[arg-type]


def test_a_folder_that_cannot_be_made_is_refused_with_its_name_the_code_and_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TierError, match=rf"cannot use {tmp_path}/file/kv as a file tier, give a folder .*ENOTDIR"):
        FileTier(tmp_path / "file" / "kv", SIZE)


def test_payloads_begin_at_a_page(tmp_path: Path) -> None:
    tier = FileTier(tmp_path / "kv", SIZE)
    put(tier, 1)
    assert tier.path_of(key(1)).read_bytes()[HEADER:] == content(1)


KILLED_WRITER = """
import os, sys
from pathlib import Path
from lamella.connector.storage.circuit import CircuitBreaker, GuardedTier
from lamella.connector.storage.file_tier import FileTier
from lamella.reference.keys import ChunkKey
moment = sys.argv[2]
real = getattr(os, moment) if hasattr(os, moment) else None
def die(*arguments, **options):
    os.kill(os.getpid(), 9)
if moment == "rename":
    Path.rename = die
else:
    setattr(os, moment, die)
FileTier(Path(sys.argv[1]), {size}).put(ChunkKey({space!r}, (1).to_bytes(32, "big"), 4), memoryview(bytes({size})))
"""


@pytest.mark.parametrize("moment", ["write", "fsync", "rename"])
def test_a_writer_killed_before_the_rename_leaves_nothing_that_is_found(moment: str, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    program = KILLED_WRITER.format(size=SIZE, space=b"s" * 32)
    done = subprocess.run([sys.executable, "-c", program, str(folder), moment], check=False, capture_output=True)
    assert done.returncode == -9, done.stderr.decode()
    leftovers = list(folder.rglob("*.unfinished"))
    assert len(leftovers) == 1
    tier = FileTier(folder, SIZE)
    assert list(folder.rglob("*.unfinished")) == [], "the next one to open the folder clears up"
    assert tier.exists([key(1)]) == (False,)
    put(tier, 1)
    assert read(tier, 1) == content(1)


def test_what_a_living_writer_has_not_finished_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    FileTier(folder, SIZE).put(key(1), memoryview(content(1)))
    unfinished = next(folder.rglob("*.kv")).parent / "1.unfinished"
    with unfinished.open("wb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        FileTier(folder, SIZE)
        assert unfinished.exists()
    FileTier(folder, SIZE)
    assert not unfinished.exists()


# ---- damage: a miss, never wrong bytes (TIER-4)


def damaged(tier: FileTier, number: int, change: Callable[[bytearray], None]) -> Path:
    path = tier.path_of(key(number))
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)
    return path


def flip(place: int) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        data[place] ^= 1

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (flip(8), "format version 3, this program reads 2"),
        (flip(0), "not an object of Lamella's"),
        (flip(40), "a damaged header"),
        (flip(100), "a damaged header"),
        (flip(HEADER), "damaged in run 0"),
        (flip(HEADER + SIZE - 1), "damaged in run 3"),
    ],
)
def test_a_damaged_file_is_refused_removed_and_can_be_put_again(
    change: Callable[[bytearray], None], reason: str, tmp_path: Path
) -> None:
    tier = FileTier(tmp_path / "kv", SIZE, RUNS)
    put(tier, 1)
    path = damaged(tier, 1, change)
    with pytest.raises(DamagedObjectError, match=reason) as refused:
        read(tier, 1)
    assert str(path) in str(refused.value)
    assert tier.exists([key(1)]) == (False,)
    put(tier, 1)
    assert read(tier, 1) == content(1)


def test_damage_outside_a_slice_does_not_hinder_it(tmp_path: Path) -> None:
    tier = FileTier(tmp_path / "kv", SIZE, RUNS)
    put(tier, 1)
    damaged(tier, 1, flip(HEADER + SIZE - 1))
    assert read(tier, 1, [ByteRange(0, 16)]) == content(1)[:16]
    with pytest.raises(DamagedObjectError):
        read(tier, 1, [ByteRange(0, 16), ByteRange(32, 1)])  # a byte of the damaged run, though a sound one


@given(place=st.integers(0, HEADER + SIZE - 1), bit=st.integers(0, 7))
def test_no_single_changed_bit_is_ever_served(place: int, bit: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    tier = FileTier(tmp_path_factory.getbasetemp() / "bits", SIZE, RUNS)
    put(tier, 1)
    data = bytearray(tier.path_of(key(1)).read_bytes())
    data[place] ^= 1 << bit
    tier.path_of(key(1)).write_bytes(data)
    try:
        assert read(FileTier(tmp_path_factory.getbasetemp() / "bits", SIZE, RUNS), 1) == content(1)
        padding = 104 + 8 * len(RUNS) + 32 <= place < HEADER
        assert padding, "only the padding behind the header may change unnoticed"
    except DamagedObjectError:
        put(tier, 1)


def test_an_object_under_another_objects_name_is_refused(tmp_path: Path) -> None:
    tier = FileTier(tmp_path / "kv", SIZE)
    for number in (1, 2):
        put(tier, number)
    tier.path_of(key(2)).replace(tier.path_of(key(1)))
    with pytest.raises(DamagedObjectError, match="another key than its name says"):
        read(tier, 1)


def test_an_object_of_another_layout_under_this_layouts_name_is_refused(tmp_path: Path) -> None:
    tier, other = FileTier(tmp_path / "kv", SIZE), FileTier(tmp_path / "kv", SIZE, RUNS)
    put(tier, 1)
    put(other, 1)
    tier.path_of(key(1)).replace(other.path_of(key(1)))
    with pytest.raises(DamagedObjectError, match="64 bytes in 1 runs, the layout says 64 in 4"):
        read(other, 1)


def test_a_file_that_was_cut_off_is_absent(tmp_path: Path) -> None:
    tier = FileTier(tmp_path / "kv", SIZE)
    put(tier, 1)
    os.truncate(tier.path_of(key(1)), HEADER + SIZE - 1)
    assert tier.exists([key(1)]) == (False,)
    with pytest.raises(DamagedObjectError, match=f"ends at byte {HEADER + SIZE - 1}"):
        read(tier, 1)
    put(tier, 1)
    assert read(tier, 1) == content(1)


def test_an_object_that_was_put_anew_with_other_bytes_is_served_with_them(tmp_path: Path) -> None:
    tier = FileTier(tmp_path / "kv", SIZE, RUNS)
    put(tier, 1)
    assert read(tier, 1) == content(1)
    other = FileTier(tmp_path / "kv", SIZE, RUNS)
    other.delete(key(1))
    other.put(key(1), memoryview(content(2)))
    assert read(tier, 1) == content(2), "a header that was read before is not this file's"


def test_a_link_in_an_objects_place_is_not_followed(tmp_path: Path) -> None:
    tier = FileTier(tmp_path / "kv", SIZE)
    put(tier, 1)
    elsewhere = tier.path_of(key(1)).rename(tmp_path / "elsewhere")
    tier.path_of(key(1)).symlink_to(elsewhere)
    with pytest.raises(TierError, match="ELOOP"):
        read(tier, 1)


# ---- a disk that refuses


def test_a_disk_that_refuses_is_a_tier_error_with_the_path_and_the_code(tmp_path: Path) -> None:
    tier = FileTier(tmp_path / "kv", SIZE)
    (tmp_path / "kv" / tier.format.tag).write_text("a file where a folder has to be")
    with pytest.raises(TierError, match=r"cannot (keep|look for) .*ENOTDIR"):
        put(tier, 1)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FaultyOs:
    return FaultyOs(monkeypatch)


@pytest.mark.parametrize(
    ("operation", "code"),
    [("write", errno.ENOSPC), ("write", errno.EIO), ("fsync", errno.EIO), ("open", errno.EACCES)],
)
def test_a_put_that_the_disk_refuses_leaves_nothing(operation: str, code: int, tmp_path: Path, disk: FaultyOs) -> None:
    tier = FileTier(tmp_path / "kv", SIZE, max_bytes=1 << 20)
    disk.refused[operation] = code
    with pytest.raises(TierError, match=errno.errorcode[code]):
        put(tier, 1)
    disk.refused.clear()
    assert [path for path in (tmp_path / "kv").rglob("*") if path.is_file()] == []
    assert tier.used_bytes == 0
    put(tier, 1)
    assert read(tier, 1) == content(1)


@pytest.mark.parametrize(
    ("operation", "code"), [("preadv", errno.EIO), ("open", errno.EACCES), ("preadv", errno.ETIMEDOUT)]
)
def test_a_read_that_the_disk_refuses_is_a_tier_error_and_removes_nothing(
    operation: str, code: int, tmp_path: Path, disk: FaultyOs
) -> None:
    tier = FileTier(tmp_path / "kv", SIZE)
    put(tier, 1)
    disk.refused[operation] = code
    with pytest.raises(TierError, match=errno.errorcode[code]):
        read(tier, 1)
    disk.refused.clear()
    assert read(tier, 1) == content(1)


@pytest.mark.parametrize(("code", "is_read"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EIO, False)])
def test_a_full_disk_goes_on_serving_what_it_holds_and_a_broken_one_is_left_alone(
    code: int, is_read: bool, tmp_path: Path, disk: FaultyOs
) -> None:
    """Three puts in a row that found no room took the whole tier away for half a minute, again and again."""
    tier = FileTier(tmp_path / "kv", SIZE)
    guarded = GuardedTier(tier, CircuitBreaker("kv", 3, 30_000_000_000, lambda: 0))
    put(tier, 1)
    disk.refused["write"] = code
    for number in range(2, 6):
        with pytest.raises(TierError):
            guarded.put(key(number), memoryview(content(number)))
    assert guarded.breaker.allows() is is_read
    if is_read:
        assert guarded.exists([key(1)]) == (True,)
        assert read(tier, 1) == content(1)


# ---- how much, and for how long


class Clock:
    """A wall clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now_ns = 1_700_000_000_000_000_000

    def __call__(self) -> int:
        self.now_ns += 1000
        return self.now_ns

    def move(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)


FILE = HEADER + SIZE


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_the_least_recently_used_objects_make_room_and_the_limit_holds(tmp_path: Path) -> None:
    clock = Clock()
    tier = FileTier(tmp_path / "kv", SIZE, max_bytes=10 * FILE, clock_ns=clock)
    for number in range(10):
        put(tier, number)
        clock.move(100)
    assert read(tier, 0) == content(0)  # used again, so 1 is the oldest
    clock.move(100)
    put(tier, 10)
    there = tier.exists([key(number) for number in range(11)])
    assert there[0]
    assert not there[1]
    assert there[10]
    for number in range(11, 40):
        put(tier, number)
        assert on_disk(tmp_path / "kv") <= 10 * FILE
    assert tier.used_bytes == on_disk(tmp_path / "kv")


def test_a_tier_that_is_opened_counts_what_is_there(tmp_path: Path) -> None:
    for number in range(5):
        put(FileTier(tmp_path / "kv", SIZE), number)
    assert FileTier(tmp_path / "kv", SIZE, max_bytes=10 * FILE).used_bytes == 5 * FILE
    small = FileTier(tmp_path / "kv", SIZE, max_bytes=3 * FILE)
    assert on_disk(tmp_path / "kv") <= 3 * FILE
    assert small.used_bytes == on_disk(tmp_path / "kv")


def test_another_processes_objects_are_counted_before_the_limit_is_passed_by_much(tmp_path: Path) -> None:
    one = FileTier(tmp_path / "kv", SIZE, max_bytes=32 * FILE)
    two = FileTier(tmp_path / "kv", SIZE, max_bytes=32 * FILE)
    for number in range(100):
        put(one if number % 2 else two, number)
        assert on_disk(tmp_path / "kv") <= (32 + 2 * 32 // 16) * FILE


def test_a_file_that_can_never_fit_is_refused(tmp_path: Path) -> None:
    tier = FileTier(tmp_path / "kv", SIZE, max_bytes=FILE - 1)
    with pytest.raises(TierError, match="never be kept below a limit of"):
        put(tier, 1)


def test_an_object_that_outlived_its_time_is_a_miss_and_is_replaced(tmp_path: Path) -> None:
    clock = Clock()
    tier = FileTier(tmp_path / "kv", SIZE, ttl_s=60, clock_ns=clock)
    put(tier, 1)
    clock.move(59)
    assert read(tier, 1) == content(1)
    clock.move(2)
    assert tier.exists([key(1)]) == (False,), "reading does not lengthen its life"
    with pytest.raises(KeyError, match="outlived"):
        read(tier, 1)
    put(tier, 1)
    assert read(tier, 1) == content(1)
    clock.move(61)
    FileTier(tmp_path / "kv", SIZE, ttl_s=60, clock_ns=clock)
    assert on_disk(tmp_path / "kv") == 0, "opening the folder clears up"


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_bytes": 0}, "max_bytes must be at least 1, got 0"),
        ({"max_bytes": float("nan")}, "max_bytes must be a whole number"),
        ({"max_bytes": float("inf")}, "max_bytes must be a whole number"),
        ({"ttl_s": 0}, "ttl_s must be between 0.001 and 1,000,000,000 s, got 0"),
        ({"ttl_s": float("nan")}, "ttl_s must be between .* got nan"),
        ({"ttl_s": 1e300}, "ttl_s must be between"),
        ({"ttl_s": 10**400}, "ttl_s must be between"),
    ],
)
def test_limits_that_cannot_be_are_refused(limits: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises((TypeError, ValueError), match=reason):
        FileTier(tmp_path / "kv", SIZE, **limits)
