"""Small objects for the tests of tiers, and every kind of tier for them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cache_driver import MemoryTier
from lamella.connector.storage import file_reads, file_tier, open_files
from lamella.connector.storage.circuit import CircuitBreaker, GuardedTier
from lamella.connector.storage.file_tier import FileTier
from lamella.connector.storage.metrics import MeteredTier
from lamella.connector.storage.redis_tier import RedisTier
from lamella.connector.storage.s3_tier import S3Tier
from lamella.connector.storage.tier import Tier
from lamella.reference.keys import ChunkKey
from lamella.reference.layout import ByteRange

SIZE = 64
RUNS = (8, 8, 16, 32)
WHOLE = [ByteRange(0, SIZE)]
TIERS = ("memory", "file", "guarded", "metered", "redis", "cluster", "s3")
_prefixes = itertools.count()


def key(number: int, num_tokens: int = 4, space: bytes = b"s" * 32) -> ChunkKey:
    return ChunkKey(space, number.to_bytes(32, "big"), num_tokens)


def content(number: int, size: int = SIZE) -> bytes:
    return bytes((number * 31 + place) % 251 for place in range(size))


def read(tier: Tier, number: int, ranges: Sequence[ByteRange] | None = None) -> bytes:
    ranges = WHOLE if ranges is None else ranges
    buffers = [bytearray(wanted.num_bytes) for wanted in ranges]
    tier.get_ranges(key(number), ranges, [memoryview(buffer) for buffer in buffers])
    return b"".join(buffers)


def put(tier: Tier, number: int) -> None:
    tier.put(key(number), memoryview(content(number)))


def make_tier(
    kind: str,
    folder: Path,
    fixture: Callable[[str], Any],
    size: int = SIZE,
    runs: Sequence[int] = RUNS,
    **options: Any,
) -> Tier:
    """An empty tier of the kind; `fixture` gives the running servers by name."""
    if kind == "file":
        return FileTier(folder / "kv", size, runs, **options)
    if kind in ("redis", "cluster"):
        server = fixture(kind)
        nodes = server if kind == "cluster" else [server]
        namespace = f"test-{next(_prefixes)}"
        return RedisTier(nodes[0].url, size, runs, cluster=kind == "cluster", namespace=namespace, **options)
    if kind == "s3":
        return S3Tier(f"s3://kv-cache/test-{next(_prefixes)}", size, runs, endpoint=fixture("s3"), **options)
    memory = MemoryTier(size)
    if kind == "guarded":
        return GuardedTier(memory, CircuitBreaker("memory", 1, 0, lambda: 0))
    return MeteredTier(memory) if kind == "metered" else memory


class FaultyOs:
    """What the file tier sees of the operating system: calls can be refused by name, and reads are counted.

    Args:
        patching: puts it in the place of `os` for as long as the caller's patches last.
    """

    def __init__(self, patching: pytest.MonkeyPatch) -> None:
        for module in (file_tier, file_reads, open_files):
            patching.setattr(module, "os", self)
        self.refused: dict[str, int] = {}
        """Error numbers by the call's name, "cached read" for reads that may not wait; a refused write first takes
        half of what it is given."""
        self.read_bytes = 0

    def __getattr__(self, name: str) -> Any:
        code = self.refused.get(name)
        if code is None:
            return getattr(os, name)

        def refuse(*_: object, **__: object) -> Any:
            raise OSError(code, os.strerror(code))

        return refuse

    def write(self, descriptor: int, data: memoryview) -> int:
        code = self.refused.get("write")
        if code is None:
            return os.write(descriptor, data)
        if data.nbytes > 1:
            return os.write(descriptor, data[: data.nbytes // 2])
        raise OSError(code, os.strerror(code))

    def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        code = self.refused.get("preadv")
        if code is None and flags & os.RWF_NOWAIT:
            code = self.refused.get("cached read")
        if code is not None:
            raise OSError(code, os.strerror(code))
        count = os.preadv(descriptor, buffers, offset, flags)
        self.read_bytes += count
        return count
