#!/usr/bin/env python3
"""The native executor on host memory against a plain memcpy of the same bytes by as many threads.

  cpu_executor.py [OUT.json] [--threads 2] [--megabytes 256] [--repeats 15]

For each layout, direction and method the two take turns (first the one, then the other, then the other first), so that
a drift of the machine meets both; the figure is the median of the repeats' ratios, time of memcpy over time of the
executor, with least and most beside it. Objects hold random bytes; before the timing, caches and objects are poisoned
and one transfer each way is checked byte for byte with NumPy indexing. Exit code 1 if a median misses its target.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from result_file import write_json

from lamella.cuda_ext.device import Device
from lamella.cuda_ext.executors import HostObjects, Method, NativeExecutor
from lamella.cuda_ext.provenance import provenance_of
from lamella.reference.geometry import KVGeometry
from lamella.reference.layout import LAYOUTS, ObjectLayout, TensorView, engine_layout
from lamella.reference.plan import Direction, TransferRequest, plan_layer_major

SCHEMA_VERSION = 1
CHECKOUT = Path(__file__).parents[1]
CHUNK_TOKENS, BLOCK_TOKENS, NUM_LAYERS = 256, 16, 32
POISON = 0xA5
STAGING_BYTES = 8 << 20  # two windows of 4 MiB: a window stays in the last-level cache, as one stays in HBM


class Case(NamedTuple):
    """One engine layout of Llama-3.1-8B's KV in bf16, and the share of memcpy each method has to reach."""

    layout: str
    kv: int
    head_dim: int
    run: str
    direct: float
    staged: float


CASES = (
    Case("kv-nb-bs-h-d", 2, 128, "32 KiB: a block's keys or values", 0.65, 0.35),
    Case("packed-nhd", 1, 256, "64 KiB: a block", 0.65, 0.35),
    Case("kv-nb-h-bs-d", 2, 128, "256 B: a head of a token", 0.45, 0.35),
    Case("packed-hnd", 1, 256, "512 B: keys and values of a head of a token", 0.45, 0.35),
)


@dataclass(frozen=True, slots=True)
class Row:
    """What one combination came to; ratios are memcpy's time over the executor's, one for each repeat."""

    layout: str
    run: str
    direction: str
    method: str
    width: int
    num_bytes: int
    executor_ns: list[int]
    memcpy_ns: list[int]
    target: float

    @property
    def ratios(self) -> list[float]:
        return [copy / own for copy, own in zip(self.memcpy_ns, self.executor_ns, strict=True)]

    @property
    def median(self) -> float:
        return statistics.median(self.ratios)


class Memory:
    """Objects in shuffled slots, and a paged cache of one tensor a layer whose blocks are shuffled."""

    def __init__(self, case: Case, num_bytes: int, random: np.random.Generator) -> None:
        self.geometry = KVGeometry(NUM_LAYERS, case.kv, 8, case.head_dim, 2, CHUNK_TOKENS)
        self.layout = ObjectLayout.single(self.geometry, BLOCK_TOKENS)
        self.num_chunks = max(1, num_bytes // self.geometry.object_bytes)
        self.num_bytes = self.num_chunks * self.geometry.object_bytes
        self.slots = random.permutation(self.num_chunks)
        self.host = random.integers(0, 255, self.num_bytes, dtype=np.uint8)  # never 255
        num_tokens = self.num_chunks * CHUNK_TOKENS
        num_blocks = num_tokens // BLOCK_TOKENS + 8
        self.ids = random.permutation(num_blocks)[: num_tokens // BLOCK_TOKENS]
        self.request = TransferRequest(num_tokens, (tuple(self.ids.tolist()),))
        axes = LAYOUTS[case.layout]
        sizes = {"K": case.kv, "N": num_blocks, "T": BLOCK_TOKENS, "H": 8, "D": case.head_dim}
        self.tensors = [np.zeros([sizes[axis] for axis in axes], dtype=np.uint16) for _ in range(NUM_LAYERS)]
        self.engine = engine_layout(axes, [TensorView(t.ctypes.data, t.shape, t.strides, 2) for t in self.tensors])
        self._order = [axes.index(axis) for axis in "KNTHD" if axis in axes]

    @property
    def objects(self) -> HostObjects:
        start, size = int(self.host.ctypes.data), self.geometry.object_bytes
        return HostObjects(tuple(start + int(slot) * size for slot in self.slots))

    def plane(self, layer: int, kv: int) -> NDArray[np.uint16]:
        """One layer's keys or values, `[N, T, H, D]`."""
        view = self.tensors[layer].transpose(self._order)
        return view if view.ndim == 4 else view[kv]

    def tokens(self, layer: int, kv: int) -> NDArray[np.uint16]:
        """The same, out of the objects in the request's order, `[blocks, T, H, D]`."""
        shape = (self.num_chunks, self.geometry.kv, NUM_LAYERS, -1, BLOCK_TOKENS, 8, self.geometry.head_dim)
        found: NDArray[np.uint16] = self.host.view(np.uint16).reshape(shape)[self.slots, kv, layer]
        return found.reshape(-1, *shape[4:])

    def check(self, move: Callable[[Direction], None]) -> None:
        """A retrieve into a poisoned cache, and a store into poisoned objects, leave exactly the right bytes."""
        before = self.host.copy()
        for tensor in self.tensors:
            tensor.view(np.uint8)[...] = POISON
        move(Direction.RETRIEVE)
        rest = np.setdiff1d(np.arange(self.engine.num_blocks), self.ids)
        for layer in range(NUM_LAYERS):
            for kv in range(self.geometry.kv):
                plane = self.plane(layer, kv)
                if not np.array_equal(plane[self.ids], self.tokens(layer, kv)):
                    raise SystemExit(f"layer {layer}, kv {kv}: the retrieve left wrong bytes")
                if not (plane[rest] == POISON * 257).all():
                    raise SystemExit(f"layer {layer}, kv {kv}: the retrieve wrote a block that it was not given")
        self.host[...] = 255
        move(Direction.STORE)
        if not np.array_equal(self.host, before):
            raise SystemExit("the store left wrong bytes")


class Memcpy:
    """memcpy of the objects' bytes, shared evenly by threads that wait for their call."""

    def __init__(self, threads: int, memory: Memory) -> None:
        self._pool, self._threads, self._source = ThreadPoolExecutor(threads), threads, memory.host
        self._target = np.full_like(memory.host, POISON)

    def __call__(self) -> None:
        size = len(self._source)
        cuts = [size * part // self._threads for part in range(self._threads + 1)]
        to, source = int(self._target.ctypes.data), int(self._source.ctypes.data)
        calls = [
            self._pool.submit(ctypes.memmove, to + start, source + start, end - start) for start, end in pairwise(cuts)
        ]
        for call in calls:
            call.result()


def timed_ns(call: Callable[[], None]) -> int:
    begin = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - begin


def measure(case: Case, width: int, args: argparse.Namespace) -> list[Row]:
    memory = Memory(case, args.megabytes << 20, np.random.default_rng(args.seed))
    executor = NativeExecutor(args.threads)
    plan = plan_layer_major(memory.layout, memory.request, width, STAGING_BYTES)
    memcpy = Memcpy(args.threads, memory)
    rows = []
    for method, target in ((Method.DIRECT, case.direct), (Method.STAGED, case.staged)):

        def move(direction: Direction, method: Method = method) -> None:
            executor.run(plan, [memory.engine], memory.objects, direction, method=method)

        memory.check(move)
        for direction in Direction:
            own: list[int] = []
            copies: list[int] = []
            arms: list[tuple[list[int], Callable[[], None]]] = [(own, partial(move, direction)), (copies, memcpy)]
            for repeat in range(args.repeats + 1):
                for times, call in arms if repeat % 2 else reversed(arms):
                    times.append(timed_ns(call))
            warm = (case.layout, case.run, direction.value, method.value, width, memory.num_bytes, own[1:], copies[1:])
            rows.append(Row(*warm, target))
    return rows


def report(rows: list[Row], args: argparse.Namespace) -> dict[str, Any]:
    keep = [
        {
            **asdict(row),
            "ratio_median": round(row.median, 3),
            "ratio_least": round(min(row.ratios), 3),
            "ratio_most": round(max(row.ratios), 3),
        }
        for row in rows
    ]
    return {
        "schema_version": SCHEMA_VERSION,
        "provenance": asdict(provenance_of(Device("cpu"), sys.argv, CHECKOUT)),
        "load_average": os.getloadavg(),
        "settings": {"threads": args.threads, "repeats": args.repeats, "staging_bytes": STAGING_BYTES},
        "rows": keep,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rows: list[Row] = []
    print(f"{'layout':<14}{'width':>6} {'direction':<10}{'method':<8}{'GB/s':>6}{'memcpy':>8}{'ratio':>7}  spread")
    for case in CASES:
        for width in (1, NUM_LAYERS):
            for row in measure(case, width, args):
                rows.append(row)
                own, copy = (row.num_bytes / statistics.median(ns) for ns in (row.executor_ns, row.memcpy_ns))
                verdict = "" if row.median >= row.target else f"  below {row.target}"
                print(
                    f"{row.layout:<14}{row.width:>6} {row.direction:<10}{row.method:<8}{own:>6.1f}{copy:>8.1f}"
                    f"{row.median:>7.2f}  {min(row.ratios):.2f} .. {max(row.ratios):.2f}{verdict}",
                    flush=True,
                )
    if args.out:
        write_json(args.out, report(rows, args))
    return int(any(row.median < row.target for row in rows))


if __name__ == "__main__":
    sys.exit(main())
