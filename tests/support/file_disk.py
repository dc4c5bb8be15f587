"""A file tier's objects on a file system that a test controls: what of it is cached, what is open, who reads.

What the page cache holds is up to the operating system, so here `Disk` says it: a read that may not wait gives as many
bytes of an uncached file as the test wants.
"""

import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lamella.connector.storage.file_tier import FileTier
from lamella.connector.storage.object_format import PAGE_BYTES
from lamella.connector.storage.tier import Leading
from lamella.reference.layout import ByteRange
from tier_objects import FaultyOs, content, key

WAIT_S = 20.0
KIB = 1 << 10
SIZE = 16 * KIB
RUNS = (4 * KIB,) * 4
WHOLE = [ByteRange(0, SIZE)]
LAYER = [ByteRange(0, 4 * KIB), ByteRange(8 * KIB, 4 * KIB)]
"""A slice of one layer: two runs, the object's last byte not among them."""
LAST = [ByteRange(4 * KIB, 4 * KIB), ByteRange(12 * KIB, 4 * KIB)]


class Disk(FaultyOs):
    """A file system some of whose files are cached; it knows which are open and which threads read."""

    def __init__(self, patching: pytest.MonkeyPatch) -> None:
        super().__init__(patching)
        self.cached_bytes: dict[str, int] = {}
        """By place, of how much a read that may not wait gives at most; other files are cached."""
        self.opened: list[str] = []
        self.open_now: dict[int, str] = {}
        self.most_open: int | None = None
        self.readers: set[str] = set()
        """Names of the threads whose reads waited."""
        self.together = threading.Barrier(1)

    def open(self, place: str, flags: int, *options: Any) -> int:
        if self.most_open is not None and len(self.open_now) >= self.most_open:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        descriptor = os.open(place, flags, *options)
        if str(place).endswith(".kv"):
            self.opened.append(str(place))
            self.open_now[descriptor] = str(place)
        return descriptor

    def close(self, descriptor: int) -> None:
        self.open_now.pop(descriptor, None)
        os.close(descriptor)

    def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        place = self.open_now.get(descriptor)
        if place is not None and offset >= PAGE_BYTES:  # not the header
            if not flags & os.RWF_NOWAIT:
                self.readers.add(threading.current_thread().name)
                self.together.wait(WAIT_S)
            elif place in self.cached_bytes:
                there = self.cached_bytes[place] - (offset - PAGE_BYTES)
                if there <= 0:
                    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
                if there < buffers[0].nbytes:
                    return super().preadv(descriptor, (buffers[0][:there],), offset)
        return super().preadv(descriptor, buffers, offset, flags)


class Kept:
    """A tier with objects 0, 1, ... on a `Disk`."""

    def __init__(self, folder: Path, patching: pytest.MonkeyPatch, num_objects: int = 6) -> None:
        self.disk = Disk(patching)
        self.tier = FileTier(folder / "kv", SIZE, RUNS)
        self.keys = [key(number) for number in range(num_objects)]
        for number, one in enumerate(self.keys):
            self.tier.put(one, memoryview(content(number, SIZE)))
        self.disk.opened.clear()

    def place(self, number: int) -> str:
        return str(self.tier.path_of(self.keys[number]))

    def damage(self, number: int, offset: int) -> None:
        with open(self.place(number), "r+b") as file:
            file.seek(PAGE_BYTES + offset)
            file.write(bytes([content(number, SIZE)[offset] ^ 1]))

    def is_there(self, number: int) -> bool:
        return Path(self.place(number)).exists()

    def read(self, ranges: Sequence[ByteRange] = WHOLE) -> tuple[Leading, int]:
        """What came, and how many of the leading objects' buffers hold just their bytes."""
        buffers = [[bytearray(wanted.num_bytes) for wanted in ranges] for _ in self.keys]
        read = self.tier.get_leading(self.keys, ranges, [[memoryview(one) for one in row] for row in buffers])
        right = 0
        for number, row in enumerate(buffers):
            whole = content(number, SIZE)
            if row != [whole[wanted.offset : wanted.offset + wanted.num_bytes] for wanted in ranges]:
                break
            right += 1
        return read, right
