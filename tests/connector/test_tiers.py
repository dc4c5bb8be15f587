"""What every tier promises (TIER-1 to TIER-3), and what the file tier does beyond: crashes, strangers, damage."""

import fcntl
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_driver import MemoryTier
from lamella.connector.storage.circuit import CircuitBreaker, GuardedTier
from lamella.connector.storage.file_tier import HEADER_BYTES, FileTier
from lamella.connector.storage.tier import Tier, TierError
from lamella.reference.keys import ChunkKey
from lamella.reference.layout import ByteRange

SIZE = 64
WHOLE = [ByteRange(0, SIZE)]
MakeTier = Callable[[], Tier]


def key(number: int, num_tokens: int = 4) -> ChunkKey:
    return ChunkKey(b"s" * 32, number.to_bytes(32, "big"), num_tokens)


def content(number: int) -> bytes:
    return bytes((number * 31 + place) % 251 for place in range(SIZE))


def read(tier: Tier, number: int, ranges: list[ByteRange] | None = None) -> bytes:
    ranges = WHOLE if ranges is None else ranges
    buffers = [bytearray(wanted.num_bytes) for wanted in ranges]
    tier.get_ranges(key(number), ranges, [memoryview(buffer) for buffer in buffers])
    return b"".join(buffers)


@pytest.fixture(params=["memory", "file", "guarded"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Tier:
    if request.param == "file":
        return FileTier(tmp_path / "kv", SIZE)
    memory = MemoryTier(SIZE)
    return memory if request.param == "memory" else GuardedTier(memory, CircuitBreaker("memory", 1, 0, lambda: 0))


# ---- laws of every tier


def test_what_was_put_is_there_and_nothing_else(tier: Tier) -> None:
    assert tier.exists([key(1), key(2)]) == (False, False)
    tier.put(key(1), memoryview(content(1)))
    assert tier.exists([key(2), key(1)]) == (False, True)
    assert tier.exists([key(1)._replace(num_tokens=3)]) == (False,), "a shorter chunk is another object"
    assert read(tier, 1) == content(1)


def test_putting_again_changes_nothing(tier: Tier) -> None:
    tier.put(key(1), memoryview(content(1)))
    tier.put(key(1), memoryview(content(2)))
    assert read(tier, 1) == content(1)


def test_a_missing_object_is_a_key_error_and_deleting_it_is_false(tier: Tier) -> None:
    with pytest.raises(KeyError):
        read(tier, 1)
    assert tier.delete(key(1)) is False
    tier.put(key(1), memoryview(content(1)))
    assert tier.delete(key(1)) is True
    assert tier.exists([key(1)]) == (False,)


@pytest.mark.parametrize(
    ("wanted", "num_bytes"),
    [(ByteRange(SIZE - 1, 2), 2), (ByteRange(-1, 1), 1), (ByteRange(0, 0), 0), (ByteRange(0, 4), 3)],
)
def test_a_range_outside_or_a_buffer_of_another_length_is_refused(
    tier: Tier, wanted: ByteRange, num_bytes: int
) -> None:
    tier.put(key(1), memoryview(content(1)))
    with pytest.raises(ValueError, match=r"outside an object|holds 3 bytes"):
        tier.get_ranges(key(1), [wanted], [memoryview(bytearray(num_bytes))])
    with pytest.raises(ValueError, match="1 ranges and 0 buffers"):
        tier.get_ranges(key(1), WHOLE, [])


def test_data_of_another_length_is_refused(tier: Tier) -> None:
    with pytest.raises(ValueError, match="64 bytes, got 3"):
        tier.put(key(1), memoryview(b"abc"))


def test_closing_twice_does_nothing(tier: Tier) -> None:
    tier.close()
    tier.close()


@given(
    ranges=st.lists(
        st.integers(0, SIZE - 1).flatmap(
            lambda start: st.integers(1, SIZE - start).map(lambda count: ByteRange(start, count))
        ),
        max_size=6,
    )
)
def test_ranges_are_the_objects_bytes_in_any_order_and_overlap(
    ranges: list[ByteRange], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "ranges"
    for one in (MemoryTier(SIZE), FileTier(folder, SIZE)):
        one.put(key(1), memoryview(content(1)))
        expected = b"".join(content(1)[wanted.offset : wanted.offset + wanted.num_bytes] for wanted in ranges)
        assert read(one, 1, ranges) == expected


# ---- the file tier's own


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
        tier.put(key(1), memoryview(content(1)))
    finally:
        os.umask(before)
    for path in [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ValueError, match=r"open to others \(mode 0755\): chmod 700"):
        FileTier(tmp_path, SIZE)


def test_payloads_begin_at_a_page(tmp_path: Path) -> None:
    tier = FileTier(tmp_path / "kv", SIZE)
    tier.put(key(1), memoryview(content(1)))
    assert tier.path_of(key(1)).read_bytes()[HEADER_BYTES:] == content(1)


KILLED_WRITER = """
import os, sys
from pathlib import Path
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
    tier.put(key(1), memoryview(content(1)))
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


def damage_version(data: bytearray) -> None:
    data[8] = 9


def damage_magic(data: bytearray) -> None:
    data[0] ^= 1


def damage_header(data: bytearray) -> None:
    data[40] ^= 1


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (damage_version, "format version 9, this program reads 1"),
        (damage_magic, "not an object of this tier"),
        (damage_header, "damaged header"),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_refused_with_its_path(
    damage: Callable[[bytearray], None], reason: str, tmp_path: Path
) -> None:
    tier = FileTier(tmp_path / "kv", SIZE)
    tier.put(key(1), memoryview(content(1)))
    path = tier.path_of(key(1))
    data = bytearray(path.read_bytes())
    damage(data)
    path.write_bytes(data)
    with pytest.raises(TierError, match=reason) as refused:
        read(tier, 1)
    assert str(path) in str(refused.value)


def test_an_object_under_another_objects_name_is_refused(tmp_path: Path) -> None:
    tier = FileTier(tmp_path / "kv", SIZE)
    for number in (1, 2):
        tier.put(key(number), memoryview(content(number)))
    tier.path_of(key(2)).replace(tier.path_of(key(1)))
    with pytest.raises(TierError, match="another key than its name says"):
        read(tier, 1)


def test_a_file_that_was_cut_off_is_absent(tmp_path: Path) -> None:
    tier = FileTier(tmp_path / "kv", SIZE)
    tier.put(key(1), memoryview(content(1)))
    path = tier.path_of(key(1))
    os.truncate(path, HEADER_BYTES + SIZE - 1)
    assert tier.exists([key(1)]) == (False,)
    with pytest.raises(TierError, match=f"ends at byte {HEADER_BYTES + SIZE - 1}"):
        read(tier, 1)
    tier.put(key(1), memoryview(content(1)))
    assert read(tier, 1) == content(1)


def test_objects_of_another_size_are_refused_with_both_sizes(tmp_path: Path) -> None:
    FileTier(tmp_path / "kv", SIZE).put(key(1), memoryview(content(1)))
    other = FileTier(tmp_path / "kv", 2 * SIZE)
    assert other.exists([key(1)]) == (False,)
    with pytest.raises(TierError, match="an object of 64 bytes, the layout says 128"):
        read(other, 1)


def test_a_disk_that_refuses_is_a_tier_error_with_the_path_and_the_code(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    tier = FileTier(folder, SIZE)
    (folder / (b"s" * 32).hex()).write_text("a file where a folder has to be")
    with pytest.raises(TierError, match=r"cannot (keep|look for) .*ENOTDIR"):
        tier.put(key(1), memoryview(content(1)))
