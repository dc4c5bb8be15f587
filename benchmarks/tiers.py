#!/usr/bin/env python3
"""Storage tiers against the plain calls of what they stand on, for the same ranges of the same objects.

  tiers.py [OUT.json] [--objects 8] [--repeats 9] [--folder /tmp] [--only files redis throttled s3]

Objects are 32 MiB: 256 tokens of Llama-3.1-8B's KV in bf16, a layer two runs of 512 KiB. The two arms take turns, so
that a drift of the machine meets both; the figure is the median of the repeats' ratios, time of the plain calls over
time of the tier, with least and most beside it. Every arm's first turn is left out.

- files: `os.preadv` of the ranges into the same buffers, files opened beforehand. Warm: both arms find everything in
  the page cache. Cold: the files are dropped from the page cache before either arm's turn (`posix_fadvise`), which
  reaches the disk only as far as nothing below the guest caches. The tier checks every byte's checksum, the plain arm
  none. The plain arm is one thread; so is the tier's, but for what it has to wait for, which up to four threads read.
- redis: a loop of the client's own `getrange`, one a range; what it returns is left as it is. The tier asks for a slice
  of all objects together, checks, and copies into the caller's buffers. Always warm: a server holds values in memory.
- s3: a loop of the client's own `get_range`, one a range, against moto, a server for tests in Python: what it gives is
  the server's rate, so there is no target, and it runs only if asked for. Needs `pip install 'moto[server]'`.
- throttled: a tier that takes a set time a byte; when the first layer is there, against the whole.

Exit code 1 if a median misses its target: 0.8 of plain calls; the first layer within 1.3/L of the whole's time.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from result_file import write_json

from lamella.connector.slice_objects import slice_ranges
from lamella.connector.storage.file_tier import FileTier
from lamella.connector.storage.layer_buffers import LayerBuffers
from lamella.connector.storage.object_format import layer_runs
from lamella.connector.storage.redis_tier import RedisTier
from lamella.connector.storage.storage_manager import StorageManager
from lamella.connector.storage.tier import Leading, Tier
from lamella.cuda_ext.device import Device
from lamella.cuda_ext.pool import HostPool
from lamella.cuda_ext.provenance import provenance_of
from lamella.reference.geometry import KVGeometry
from lamella.reference.keys import ChunkKey
from lamella.reference.layout import ByteRange, ObjectLayout
from lamella.reference.slices import plan_slices

SCHEMA_VERSION = 1
CHECKOUT = Path(__file__).parents[1]
NUM_LAYERS = 32
LAYOUT = ObjectLayout.single(KVGeometry(NUM_LAYERS, 2, 8, 128, 2, 256), 16)
PLAIN_SHARE = 0.8
FIRST_LAYER_SHARE = 1.3
WIDTHS = (1, 4, NUM_LAYERS)


@dataclass(frozen=True, slots=True)
class Row:
    """What one comparison came to; times are of a pass over every object, one for each repeat."""

    tier: str
    cache: str
    width: int
    num_bytes: int
    tier_ns: list[int]
    plain_ns: list[int]

    @property
    def ratios(self) -> list[float]:
        return [plain / own for plain, own in zip(self.plain_ns, self.tier_ns, strict=True)]

    @property
    def median(self) -> float:
        return statistics.median(self.ratios)


class Buffers:
    """Memory that a pass reads into, written once beforehand."""

    def __init__(self, objects: int) -> None:
        self.memory = np.full((objects, LAYOUT.object_bytes), 0xA5, np.uint8)

    def of(self, ranges: Sequence[ByteRange]) -> list[list[memoryview]]:
        return [
            [memoryview(row)[wanted.offset : wanted.offset + wanted.num_bytes] for wanted in ranges]
            for row in self.memory
        ]


def keys_of(count: int) -> tuple[ChunkKey, ...]:
    return tuple(ChunkKey(b"b" * 32, number.to_bytes(32, "big"), 256) for number in range(count))


def fill(tier: Tier, keys: Sequence[ChunkKey]) -> list[bytes]:
    """The tier holds an object of random bytes for each key."""
    random = np.random.default_rng(1)
    contents = [random.bytes(LAYOUT.object_bytes) for _ in keys]
    for key, whole in zip(keys, contents, strict=True):
        tier.put(key, memoryview(whole))
    return contents


def take_turns(
    repeats: int, own: Callable[[], None], plain: Callable[[], None], before: Callable[[], None]
) -> tuple[list[int], list[int]]:
    times: dict[Callable[[], None], list[int]] = {own: [], plain: []}
    for repeat in range(repeats + 1):
        for arm in (own, plain) if repeat % 2 else (plain, own):
            before()
            start = time.perf_counter_ns()
            arm()
            times[arm].append(time.perf_counter_ns() - start)
    return times[own][1:], times[plain][1:]


def check(buffers: Buffers, contents: Sequence[bytes]) -> None:
    for row, whole in zip(buffers.memory, contents, strict=True):
        if row.tobytes() != whole:
            raise SystemExit("a tier left wrong bytes")


def read_by_slices(tier: Tier, keys: Sequence[ChunkKey], buffers: Buffers, width: int) -> Callable[[], None]:
    """A pass as a retrieve makes it: slice by slice, each of every object."""
    parts = [slice_ranges(LAYOUT, part) for part in plan_slices(NUM_LAYERS, width)]
    work = [(ranges, buffers.of(ranges)) for ranges in parts]

    def run() -> None:
        for ranges, into in work:
            read = tier.get_leading(keys, ranges, into)
            if read.error is not None:
                raise read.error

    return run


def measure_files(args: argparse.Namespace) -> Iterator[Row]:
    keys = keys_of(args.objects)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        tier = FileTier(Path(folder) / "kv", LAYOUT.object_bytes, layer_runs(LAYOUT))
        contents = fill(tier, keys)
        files = [os.open(tier.path_of(key), os.O_RDONLY) for key in keys]
        start = tier.format.header_bytes
        buffers, plain_buffers = Buffers(args.objects), Buffers(args.objects)

        def drop() -> None:
            for file in files:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)

        for width in WIDTHS:
            own = read_by_slices(tier, keys, buffers, width)
            work = [
                (ranges, plain_buffers.of(ranges))
                for ranges in (slice_ranges(LAYOUT, part) for part in plan_slices(NUM_LAYERS, width))
            ]

            def plain(work: list[tuple[tuple[ByteRange, ...], list[list[memoryview]]]] = work) -> None:
                for ranges, into in work:
                    for file, views in zip(files, into, strict=True):
                        for wanted, view in zip(ranges, views, strict=True):
                            if os.preadv(file, [view], start + wanted.offset) != wanted.num_bytes:
                                raise SystemExit("a plain read came short")

            for cache, before in (("warm", lambda: None), ("cold", drop)):
                times = take_turns(args.repeats, own, plain, before)
                check(buffers, contents)
                check(plain_buffers, contents)
                yield Row("file", cache, width, args.objects * LAYOUT.object_bytes, *times)
        for file in files:
            os.close(file)


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        for line in server.stdout:
            if b"eady to accept connections" in line:
                break
        try:
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            server.kill()


def measure_redis(args: argparse.Namespace) -> Iterator[Row]:
    import redis

    keys = keys_of(args.objects)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder, redis_server(Path(folder)) as url:
        tier = RedisTier(url, LAYOUT.object_bytes, layer_runs(LAYOUT), timeout_s=60)
        contents = fill(tier, keys)
        names, start = [tier.name_of(key) for key in keys], tier.format.header_bytes
        buffers = Buffers(args.objects)
        with redis.Redis.from_url(url) as client:
            for width in WIDTHS:
                own = read_by_slices(tier, keys, buffers, width)
                parts = [slice_ranges(LAYOUT, part) for part in plan_slices(NUM_LAYERS, width)]

                def plain(parts: list[tuple[ByteRange, ...]] = parts) -> None:
                    for ranges in parts:
                        for name in names:
                            for wanted in ranges:
                                first = start + wanted.offset
                                client.getrange(name, first, first + wanted.num_bytes - 1)

                times = take_turns(args.repeats, own, plain, lambda: None)
                check(buffers, contents)
                yield Row("redis", "warm", width, args.objects * LAYOUT.object_bytes, *times)
        tier.close()


@contextmanager
def s3_server() -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    os.environ |= {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any"}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            deadline = time.monotonic() + 60
            while True:
                try:
                    urllib.request.urlopen(
                        urllib.request.Request(f"{address}/kv-cache", method="PUT"), timeout=5
                    ).close()
                    break
                except OSError:
                    if time.monotonic() > deadline or server.poll() is not None:
                        raise SystemExit("moto did not start: pip install 'moto[server]'") from None
                    time.sleep(0.1)
            yield address
        finally:
            server.kill()


def measure_s3(args: argparse.Namespace) -> Iterator[Row]:
    import obstore
    from obstore.store import S3Store

    from lamella.connector.storage.s3_tier import S3Tier

    keys = keys_of(args.objects)
    with s3_server() as endpoint:
        tier = S3Tier("s3://kv-cache", LAYOUT.object_bytes, layer_runs(LAYOUT), endpoint=endpoint, timeout_s=60)
        contents = fill(tier, keys)
        paths, start = [tier.path_of(key) for key in keys], tier.format.header_bytes
        config: Any = {"endpoint": endpoint}
        store = S3Store("kv-cache", client_options={"allow_http": True}, config=config)
        buffers = Buffers(args.objects)
        for width in WIDTHS:
            own = read_by_slices(tier, keys, buffers, width)
            parts = [slice_ranges(LAYOUT, part) for part in plan_slices(NUM_LAYERS, width)]

            def plain(parts: list[tuple[ByteRange, ...]] = parts) -> None:
                for ranges in parts:
                    for path in paths:
                        for wanted in ranges:
                            obstore.get_range(store, path, start=start + wanted.offset, length=wanted.num_bytes)

            times = take_turns(args.repeats, own, plain, lambda: None)
            check(buffers, contents)
            yield Row("s3", "moto", width, args.objects * LAYOUT.object_bytes, *times)
        tier.close()


class ThrottledTier:
    """A file tier whose answers take a set time a byte."""

    def __init__(self, tier: FileTier, bytes_per_s: float) -> None:
        self._tier = tier
        self._bytes_per_s = bytes_per_s
        self.name = "throttled"
        self.exists, self.put, self.delete, self.close = tier.exists, tier.put, tier.delete, tier.close
        self.get_ranges = tier.get_ranges

    def get_leading(
        self, keys: Sequence[ChunkKey], ranges: Sequence[ByteRange], into: Sequence[Sequence[memoryview]]
    ) -> Leading:
        due_s = time.monotonic() + len(keys) * sum(wanted.num_bytes for wanted in ranges) / self._bytes_per_s
        read = self._tier.get_leading(keys, ranges, into)
        time.sleep(max(0.0, due_s - time.monotonic()))
        return read


def measure_first_layer(args: argparse.Namespace) -> dict[str, Any]:
    """When the first layer of a prefix is there, in parts of when the last is; and the same for whole objects."""
    keys = keys_of(4)
    total = len(keys) * LAYOUT.object_bytes
    shares, whole_s = [], []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        files = FileTier(Path(folder) / "kv", LAYOUT.object_bytes, layer_runs(LAYOUT))
        fill(files, keys)
        pool, buffers = HostPool(LAYOUT, 1), LayerBuffers(LAYOUT.object_bytes, len(keys))
        manager = StorageManager(pool, [ThrottledTier(files, total / 2.0)], buffers, timeout_s=60)
        for width in [1] * args.repeats + [NUM_LAYERS]:
            held = manager.hold_prefix(keys)
            start, arrivals = time.perf_counter(), []
            for future in manager.layerwise_batched_get(held, plan_slices(NUM_LAYERS, width)):
                found = future.result(60)
                arrivals.append(time.perf_counter() - start)
                if len(arrivals) == found.part.first_layer + 1:
                    for source in found.sources:
                        source.release()
            held.release()
            if width == 1:
                shares.append(arrivals[0] / arrivals[-1])
                whole_s.append(arrivals[-1])
            else:
                chunk_major_s = arrivals[0]
        manager.close()
        buffers.close()
        pool.close()
    return {
        "layers": NUM_LAYERS,
        "num_bytes": total,
        "bytes_per_s": total / 2.0,
        "first_layer_share": shares,
        "first_layer_share_times_layers_median": round(statistics.median(shares) * NUM_LAYERS, 3),
        "whole_s": whole_s,
        "first_layer_of_whole_objects_s": chunk_major_s,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--objects", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--only", nargs="+", choices=["files", "redis", "throttled", "s3"])
    args = parser.parse_args()
    wanted = args.only or ["files", "redis", "throttled"]
    if "redis" in wanted and shutil.which("redis-server") is None:
        raise SystemExit("redis-server is not installed: apt-get install redis-server, or --only files throttled")
    before, rows, missed = os.getloadavg(), [], False
    print(f"{'tier':<8}{'cache':<7}{'width':>5}{'GB/s':>8}{'plain':>8}{'ratio':>7}  spread")
    for name, measure in (("files", measure_files), ("redis", measure_redis), ("s3", measure_s3)):
        for row in measure(args) if name in wanted else ():
            rows.append(row)
            own, plain = (row.num_bytes / statistics.median(ns) for ns in (row.tier_ns, row.plain_ns))
            below = row.tier != "s3" and row.median < PLAIN_SHARE
            missed |= below
            print(
                f"{row.tier:<8}{row.cache:<7}{row.width:>5}{own:>8.2f}{plain:>8.2f}{row.median:>7.2f}  "
                f"{min(row.ratios):.2f} .. {max(row.ratios):.2f}{f'  below {PLAIN_SHARE}' if below else ''}",
                flush=True,
            )
    first = measure_first_layer(args) if "throttled" in wanted else None
    if first is not None:
        share = first["first_layer_share_times_layers_median"]
        late = share > FIRST_LAYER_SHARE
        missed |= late
        print(
            f"first of {NUM_LAYERS} layers after {share:.2f}/L of the whole"
            f"{f', more than {FIRST_LAYER_SHARE}/L' if late else ''}; with whole objects after "
            f"{first['first_layer_of_whole_objects_s']:.2f} s of {statistics.median(first['whole_s']):.2f} s"
        )
    if args.out:
        document = {
            "schema_version": SCHEMA_VERSION,
            "provenance": asdict(provenance_of(Device("cpu"), sys.argv, CHECKOUT)),
            "load_average": {"before": before, "after": os.getloadavg()},
            "folder": str(args.folder),
            "rows": [{**asdict(row), "ratio_median": round(row.median, 3)} for row in rows],
            "throttled": first,
        }
        write_json(args.out, document)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
