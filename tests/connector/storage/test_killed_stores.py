"""A process killed while it stores leaves every object whole or absent, however large the objects are."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from lamella.connector.storage.file_tier import FileTier
from lamella.reference.layout import ByteRange
from tier_objects import key

MIB = 1 << 20

WRITER = """
import itertools, sys
from pathlib import Path
from lamella.connector.storage.file_tier import FileTier
from lamella.reference.keys import ChunkKey
folder, size, first = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
tier = FileTier(folder, size, (size // 8,) * 8)
for number in itertools.count(first):
    data = number.to_bytes(8, "big") * (size // 8)
    print(number, flush=True)
    tier.put(ChunkKey(b"s" * 32, number.to_bytes(32, "big"), 4), memoryview(data))
"""


def kill_in_a_store(folder: Path, size: int, first: int, delay_s: float) -> int:
    """The number of the object that was being stored, or had just been; the writer was killed `delay_s` into it."""
    command = [sys.executable, "-c", WRITER, str(folder), str(size), str(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        last = int(writer.stdout.readline())  # it begins to store
        try:
            writer.wait(delay_s)
        except subprocess.TimeoutExpired:
            writer.kill()
        for line in writer.stdout:
            last = int(line)
        assert writer.wait() == -9
    return last


def crash_often(folder: Path, size: int, kills: int, enough_partial: int, report: Path | None = None) -> None:
    """Kills writers until `kills` died, of which at least `enough_partial` left an unfinished file behind."""
    dice = random.Random(9)
    partial = whole = absent = first = 0
    longest_s = 0.4 * size / (64 * MIB)
    for kill in range(kills):
        last = kill_in_a_store(folder, size, first, dice.uniform(0.0, longest_s))
        leftovers = list(folder.rglob("*.unfinished"))
        partial += bool(leftovers) and 0 < leftovers[0].stat().st_size
        tier = FileTier(folder, size, (size // 8,) * 8)  # the restart
        assert list(folder.rglob("*.unfinished")) == []
        for number in range(first, last + 1):
            if not tier.exists([key(number)])[0]:
                assert number == last, "what was stored before is there"
                absent += 1
                continue
            into = memoryview(bytearray(size))
            tier.get_ranges(key(number), [ByteRange(0, size)], [into])
            assert into == number.to_bytes(8, "big") * (size // 8)
            whole += 1
            tier.delete(key(number))
        first = last + 1
        if kill + 1 == kills and partial < enough_partial:
            pytest.fail(f"only {partial} of {kills} kills hit a file that was being written")
    if report is not None:
        report.write_text(json.dumps({"kills": kills, "partial": partial, "whole": whole, "absent": absent}))


def test_a_few_kills_of_small_stores(tmp_path: Path) -> None:
    crash_often(tmp_path / "kv", 8 * MIB, kills=6, enough_partial=1)


@pytest.mark.slow
def test_a_hundred_kills_of_stores_of_64_mib(tmp_path: Path) -> None:
    crash_often(tmp_path / "kv", 64 * MIB, kills=100, enough_partial=30, report=tmp_path / "report.json")
    print((tmp_path / "report.json").read_text())
