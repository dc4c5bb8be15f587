#!/usr/bin/env python3
"""Two ranks fed by one cache server: from the request to the slower rank's last layer, against both ranks' raw copies.

  server_two_ranks.py [OUT.json] [--devices cuda:0 cuda:1] [--mib 512] [--repeats 9] [--layers 32]

A process a rank and `lamella serve` in one more, as an engine with tensor parallelism 2 has them; each rank holds half
of the heads of Llama-3.1-8B's KV and moves its own half out of the server's memory. Both store their halves first.
Then, at one barrier a turn:

- raw pinned copies of both halves at once, of the same bytes;
- rank 0 looks the prompt up, which locks it on both ranks, and passes the answer on; both retrieve. Times are from
  before the look-up until the last layer has landed on the slower rank, by the host's one clock.

Both ranks' bytes are checked in the first turn and the last of each width against copies that the server never saw.
The figure is that time over the slower rank's raw copy of the same turn. Exit code 1: a median at width 1 above 1.05.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parent))

from result_file import write_json
from two_gpus import BARRIER_S, CHECKOUT, GOAL, RANK_SHAPE

from lamella.cuda_ext.bench_cases import BenchMemory, BenchShape
from lamella.cuda_ext.device import Device, ProbeMethod, RawCopy
from lamella.cuda_ext.engine import TransferEngine
from lamella.cuda_ext.provenance import provenance_of
from lamella.cuda_ext.shared_memory import HostMemory
from lamella.reference.keys import KeySpace, chunk_keys
from lamella.reference.plan import Direction
from lamella.server.rank import RankCaches, RankOfEngine
from lamella.server.sequences import Locked
from lamella.server.worker import Worker

SCHEMA_VERSION: Final = 1
WIDTHS: Final = (1, 8, 32)
WARM_UP: Final = 2
TIMEOUT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Asked:
    """What every rank must know."""

    folder: Path
    devices: tuple[str, str]
    shape: BenchShape
    num_bytes: int
    repeats: int


class Rank:
    """One rank: its blocks, its own copy of the bytes, and its worker; close it."""

    def __init__(self, number: int, asked: Asked) -> None:
        self.number, shape = number, asked.shape
        self._device = Device(asked.devices[number])
        self._shape = shape
        with contextlib.ExitStack() as stack:
            tokens = shape.tokens_of(asked.num_bytes)
            # bytes and block ids of its own: what is meant for the other rank would be seen
            self.memory = stack.enter_context(BenchMemory(self._device, shape, tokens, seed=number + 1))
            size = -(-self.memory.num_bytes // 4096) * 4096
            self._raw = stack.enter_context(contextlib.closing(HostMemory.anonymous(size)))
            registrar = self._device.registrar()
            registrar.register(self._raw.address, size)
            stack.callback(registrar.unregister, self._raw.address, size)
            spaces = [
                KeySpace(
                    "two ranks", "bfloat16", shape.form, shape.memory, shape.geometry.chunk_tokens, rank, 2,
                    (0, shape.geometry.num_layers),
                )
                for rank in range(2)
            ]  # fmt: skip
            self.keys = chunk_keys(spaces[0], range(tokens))  # as the scheduler names chunks
            self.worker = stack.enter_context(
                Worker(
                    asked.folder,
                    RankOfEngine("two-ranks", spaces[number], number, 2),
                    RankCaches(shape.layout, self.memory.engines, self._device.name),
                )
            )
            self._stack = stack.pop_all()

    def store(self) -> None:
        """This rank's half is on the server.

        Raises:
            RuntimeError: there is no room, or it did not get there.
        """
        self.memory.poison()
        with TransferEngine(self._device.name, num_layers=self._shape.geometry.num_layers) as engine:
            cache = engine.register_cache(self._shape.layout, self.memory.engines)
            request = self.memory.request
            engine.retrieve(cache, self.memory.objects, request.block_ids, request.num_tokens).wait(TIMEOUT_S)
        stored, until = 0, time.monotonic() + TIMEOUT_S
        while stored < len(self.keys):  # the server's memory becomes ready piece by piece
            orders = self.worker.allocate("two", self.keys, (self.memory.block_ids,), 0, self.number)
            for order in orders:
                self.worker.begin_store(order)
            self.worker.begin_step(num_tokens=1)
            self.worker.step_computed()
            readable = dict[int, bool]()
            while not {order.number for order in orders} <= set(readable):
                readable.update(self.worker.poll().readable)
                if time.monotonic() > until:
                    raise RuntimeError(f"rank {self.number}: stores are not readable after {TIMEOUT_S:g} s")
            stored += sum(len(order.slots) for order in orders if readable[order.number])
            if not orders:
                time.sleep(0.05)
            if time.monotonic() > until:
                raise RuntimeError(f"the server had room for {stored} of {len(self.keys)} chunks of rank {self.number}")

    def lookup(self) -> Locked:
        """The whole prompt, locked on both ranks.

        Raises:
            RuntimeError: less of it is there.
        """
        locked = self.worker.lookup(self.keys)
        if locked.num_chunks != len(self.keys):
            raise RuntimeError(f"{locked.num_chunks} of {len(self.keys)} chunks are there")
        return locked

    def retrieve(self, locked: Locked, width: int) -> list[int]:
        """When each slice has landed here, by `monotonic_ns`.

        Raises:
            RuntimeError: it failed, or did not end.
        """
        memory, worker = self.memory, self.worker
        number = worker.retrieve("two", locked, (memory.block_ids,), memory.num_tokens, layers_per_slice=width)
        load = worker.loads.find(number)
        assert load is not None, "its end was not polled yet"
        until = time.monotonic() + TIMEOUT_S
        while number not in (report := worker.poll()).loads:
            if time.monotonic() > until:
                raise RuntimeError(f"rank {self.number}: the retrieve has not ended after {TIMEOUT_S:g} s")
        if not report.loads[number].ok or load.transfer is None:
            raise RuntimeError(f"rank {self.number}: the retrieve failed: {load.failed}")
        return list(load.transfer.timestamps_ns().landed_ns)

    def raw(self) -> int:
        """Nanoseconds of one pinned copy of as many bytes into the blocks."""
        memory = self.memory
        copy = RawCopy(
            Direction.RETRIEVE, ProbeMethod.WHOLE, self._raw.address, memory.cache_address, 1, memory.num_bytes
        )
        return self._device.copy(copy)[0].copy_ns

    def close(self) -> None:
        """It has left the server."""
        self._stack.close()


def run_rank(number: int, asked: Asked, barrier: threading.Barrier, other: Connection, results: Any) -> None:
    """One rank's process; its times by width go to `results`, or why there are none."""
    try:
        with contextlib.closing(Rank(number, asked)) as rank:
            results.put((number, _measure(rank, asked, barrier, other)))
    except BaseException as error:
        barrier.abort()
        results.put((number, f"{type(error).__name__}: {error}"))
        raise


def _measure(rank: Rank, asked: Asked, barrier: threading.Barrier, other: Connection) -> dict[str, list[list[int]]]:
    """For each width one `[raw, begun, looked up, slices' landings...]` a turn, in ns; rank 1 begins with rank 0."""
    rank.store()
    taken: dict[str, list[list[int]]] = {}
    widths = [width for width in WIDTHS if width <= asked.shape.geometry.num_layers]
    turns = WARM_UP + asked.repeats
    for width in widths:
        rows = taken[str(width)] = []
        for turn in range(turns):
            barrier.wait(BARRIER_S)
            raw_ns = rank.raw()
            rank.memory.poison()
            barrier.wait(BARRIER_S)
            begun_ns = time.monotonic_ns()
            if rank.number == 0:
                locked = rank.lookup()
                other.send(locked)
            else:
                if not other.poll(BARRIER_S):
                    raise TimeoutError(f"rank 0 has looked nothing up within {BARRIER_S:g} s")
                locked = other.recv()
            asked_ns = time.monotonic_ns()
            landed_ns = rank.retrieve(locked, width)
            if turn in (0, turns - 1):
                rank.memory.check(Direction.RETRIEVE)
            if turn >= WARM_UP:
                rows.append([raw_ns, begun_ns, asked_ns, *landed_ns])
    barrier.wait(BARRIER_S)
    return taken


def summary(ranks: Sequence[dict[str, list[list[int]]]]) -> dict[str, dict[str, float]]:
    """By width: the request's time over the slower raw copy (median, least, most), and medians in ms."""
    figures = {}
    for width in ranks[0]:
        turns = list(zip(*(rank[width] for rank in ranks), strict=True))
        begun = [turn[0][1] for turn in turns]  # rank 0 asks for both
        slower_raw = [max(rank[0] for rank in turn) for turn in turns]
        lasts = [[rank[-1] - at for rank in turn] for turn, at in zip(turns, begun, strict=True)]
        ratios = [max(last) / raw for last, raw in zip(lasts, slower_raw, strict=True)]
        middle = statistics.median
        figures[width] = {
            "over_raw_median": middle(ratios),
            "over_raw_least": min(ratios),
            "over_raw_most": max(ratios),
            "slower_last_layer_ms": middle(map(max, lasts)) / 1e6,
            "rank_0_last_layer_ms": middle(last[0] for last in lasts) / 1e6,
            "rank_1_last_layer_ms": middle(last[1] for last in lasts) / 1e6,
            "slower_first_layer_ms": middle(
                max(rank[3] for rank in turn) - at for turn, at in zip(turns, begun, strict=True)
            )
            / 1e6,
            "lookup_ms": middle(turn[0][2] - at for turn, at in zip(turns, begun, strict=True)) / 1e6,
            "slower_raw_ms": middle(slower_raw) / 1e6,
        }
    return figures


@contextlib.contextmanager
def serving(folder: Path, num_bytes: int) -> Iterator[None]:
    """A cache server with that much memory is there meanwhile."""
    command = [sys.executable, "-c", "from lamella.cli.main import main; main()", "serve"]
    command += ["--folder", str(folder), "--memory", f"{-(-num_bytes >> 20)}MiB", "--http", "off"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + TIMEOUT_S
        while not (folder / "server.sock").exists():
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the server did not start: exit code {process.poll()}")
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        try:
            process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(TIMEOUT_S)


def measure(asked: Asked) -> list[dict[str, list[list[int]]]]:
    """Both ranks' times.

    Raises:
        RuntimeError: a rank has none, with its reason.
    """
    context = multiprocessing.get_context("spawn")
    barrier, results, ends = context.Barrier(2), context.Queue(), context.Pipe()
    processes = [
        context.Process(target=run_rank, args=(number, asked, barrier, ends[number], results)) for number in range(2)
    ]
    for process in processes:
        process.start()
    try:
        found = dict(results.get(timeout=2 * BARRIER_S) for _ in processes)
    finally:
        for process in processes:
            process.join(TIMEOUT_S)
            if process.is_alive():
                process.kill()
    failed = {number: times for number, times in found.items() if isinstance(times, str)}
    if failed:
        raise RuntimeError(f"no figure: {failed}")
    return [found[0], found[1]]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the figures; 0 where width 1 reaches the goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, help="JSON file for the result")
    parser.add_argument("--devices", nargs=2, default=["cuda:0", "cuda:1"])
    parser.add_argument("--mib", type=int, default=512, help="a rank's half, MiB")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--layers", type=int, default=RANK_SHAPE.geometry.num_layers, help="of the shape")
    options = parser.parse_args(argv)
    shape = replace(RANK_SHAPE, geometry=replace(RANK_SHAPE.geometry, num_layers=options.layers))
    with tempfile.TemporaryDirectory(prefix="two-ranks-") as name:
        folder = Path(name) / "server"
        folder.mkdir(mode=0o700)
        asked = Asked(folder, tuple(options.devices), shape, options.mib << 20, options.repeats)
        with serving(folder, 2 * asked.num_bytes + (256 << 20)):
            ranks = measure(asked)
    figures = summary(ranks)
    print(f"{options.mib} MiB a rank on {' and '.join(options.devices)}; from the request, look-up included")
    for width, row in figures.items():
        print(
            f"width {width:>2}: slower rank's last layer {row['slower_last_layer_ms']:.2f} ms = "
            f"{row['over_raw_median']:.3f} x slower raw copy ({row['over_raw_least']:.3f} .. "
            f"{row['over_raw_most']:.3f}); ranks {row['rank_0_last_layer_ms']:.2f} and "
            f"{row['rank_1_last_layer_ms']:.2f} ms, first layer {row['slower_first_layer_ms']:.2f} ms"
        )
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        whole = {
            "schema_version": SCHEMA_VERSION,
            "kind": "server-two-ranks",
            "provenance": [asdict(provenance_of(Device(name), sys.argv, CHECKOUT)) for name in options.devices],
            "shape": shape.name,
            "bytes_each": options.mib << 20,
            "host_cores": os.cpu_count(),
            "summary": figures,
            "columns": ["raw_ns", "begun_ns", "looked_up_ns", "landed_ns of each slice"],
            "turns": ranks,
        }
        write_json(options.out, whole)
    return 0 if figures["1"]["over_raw_median"] <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
