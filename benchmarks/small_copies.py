#!/usr/bin/env python3
"""What an inference engine's own copies wait beside a transfer, and what letting them in costs the transfer.

  small_copies.py [OUT.json] [--device cuda:0] [--repeats 9]

For each carrier, `window_bytes` and `turn_bytes` of the transfer engine: a 1 GiB retrieve and a 1 GiB store at width 1,
against one raw pinned copy taken beside it; and, one after another on a stream of the default priority while such a
transfer runs, copies of 4 KiB, 64 KiB and 256 KiB in either direction. A copy that is served only after the transfer's
end shows as one wait as long as the transfer. Needs a GPU and torch.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from result_file import write_json

from lamella.cuda_ext.arrival import Carrier
from lamella.cuda_ext.bench_cases import MAIN_SHAPES
from lamella.cuda_ext.bench_transfer import BenchSettings, TransferBench
from lamella.cuda_ext.device import Device
from lamella.cuda_ext.engine import TransferEngine
from lamella.cuda_ext.provenance import provenance_of
from lamella.reference.plan import Direction

SCHEMA_VERSION = 1
CHECKOUT = Path(__file__).parents[1]
NUM_BYTES = 1 << 30
SIZES = (4 << 10, 64 << 10, 256 << 10)
TURNS_MIB = (0, 16, 32, 64)
WINDOWS_MIB = (8, 16)
WARM_UP = 2


class Waits(NamedTuple):
    """Copies of one size and direction beside one transfer, milliseconds."""

    transfer: str
    copy: str
    num_bytes: int
    count: int
    median_ms: float
    longest_ms: float


class Small:
    """Small copies on a stream as a model runner's."""

    def __init__(self, device: str) -> None:
        self._host: Any = torch.zeros(max(SIZES), dtype=torch.uint8).pin_memory()
        self._device: Any = torch.zeros(max(SIZES), dtype=torch.uint8, device=device)
        self._stream: Any = torch.cuda.Stream(device)

    def ms(self, direction: Direction, num_bytes: int) -> float:
        """Milliseconds from the call until it has been served."""
        begin_ns = time.monotonic_ns()
        with torch.cuda.stream(self._stream):
            if direction is Direction.RETRIEVE:
                self._device[:num_bytes].copy_(self._host[:num_bytes], non_blocking=True)
            else:
                self._host[:num_bytes].copy_(self._device[:num_bytes], non_blocking=True)
        self._stream.synchronize()
        return (time.monotonic_ns() - begin_ns) / 1e6


def waits(bench: TransferBench, engine: TransferEngine, small: Small) -> Iterator[Waits]:
    memory = bench.memory
    cache = engine.register_cache(memory.shape.layout, memory.engines)
    for transferred in Direction:
        for copied in Direction:
            for num_bytes in SIZES:
                transfer = engine.submit(
                    cache, transferred, memory.objects, (memory.block_ids,), memory.num_tokens, width=1
                )
                while transfer.query().landed == 0:
                    time.sleep(0)
                taken: list[float] = []
                while not transfer.state.is_final:
                    taken.append(small.ms(copied, num_bytes))
                transfer.wait(60.0)
                yield Waits(
                    transferred.value, copied.value, num_bytes, len(taken), statistics.median(taken), max(taken)
                )


def ratios(bench: TransferBench, engine: TransferEngine, repeats: int) -> dict[str, list[float]]:
    """Time of the transfer by the device's clock, first window to last landing, over a raw copy's of the same turn."""
    memory = bench.memory
    cache = engine.register_cache(memory.shape.layout, memory.engines)
    found: dict[str, list[float]] = {}
    for direction in Direction:
        for turn in range(WARM_UP + repeats):
            raw_ns = bench.raw(direction)
            transfer = engine.submit(cache, direction, memory.objects, (memory.block_ids,), memory.num_tokens, width=1)
            transfer.wait(60.0)
            own_ns = transfer.timestamps_ns().landed_ns[-1] - transfer.query().started_ns
            if turn >= WARM_UP:
                found.setdefault(direction.value, []).append(own_ns / raw_ns)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    device, rows = Device(args.device), []
    small = Small(args.device)
    with TransferBench(device, MAIN_SHAPES[0], NUM_BYTES, BenchSettings(), shuffled_slots=False) as bench:
        bench.check(Direction.RETRIEVE)
        for carrier, window, turn in product(Carrier, WINDOWS_MIB, TURNS_MIB):
            with TransferEngine(
                args.device, window_bytes=window << 20, turn_bytes=turn << 20, carrier=carrier, gather_factor=0
            ) as engine:
                taken = ratios(bench, engine, args.repeats)
                beside = list(waits(bench, engine, small))
            row = {"carrier": carrier.name.lower(), "window_mib": window, "turn_mib": turn}
            rows.append({**row, "ratio_to_raw": taken, "waits": beside})
            print(
                f"{carrier.name.lower()}, window {window:2} MiB, turn {turn:2} MiB: "
                + ", ".join(f"{name} {statistics.median(values):.3f}" for name, values in taken.items())
                + " of raw; longest wait ms "
                + ", ".join(
                    f"{one.transfer[0]}/{one.copy[0]}{one.num_bytes >> 10}K {one.longest_ms:.2f}" for one in beside
                ),
                flush=True,
            )
    if args.out:
        document = {
            "schema_version": SCHEMA_VERSION,
            "kind": "small-copies",
            "provenance": asdict(provenance_of(device, sys.argv, CHECKOUT)),
            "num_bytes": NUM_BYTES,
            "rows": [{**row, "waits": [one._asdict() for one in row["waits"]]} for row in rows],
        }
        write_json(args.out, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
