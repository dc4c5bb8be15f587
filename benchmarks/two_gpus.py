#!/usr/bin/env python3
"""Two ranks' retrieves against both ranks' raw copies: what tensor parallelism 2 asks of one host's memory and links.

  two_gpus.py [OUT.json] [--devices cuda:0 cuda:1] [--mib 512] [--repeats 11]

A process a rank, as an engine has them. Each rank moves its half of the heads of Llama-3.1-8B's KV (hidden 512 of
1,024, packed blocks); bytes are checked on both ranks first. Rounds take turns, each begun by both at one barrier:

- raw copies by one rank alone, and by both at once: whether the links are independent;
- retrieves by both at once, widths 1, 8 and all layers, from the call to the last landing.

The figure is the slower rank's retrieve over the slower rank's raw copy of the same round: a request runs when the
slower rank has landed. Exit code 1 if the median at width 1 is above 1.05.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from result_file import write_json

from lamella.cuda_ext.bench_cases import BenchShape
from lamella.cuda_ext.bench_transfer import BenchSettings, TransferBench
from lamella.cuda_ext.device import Device
from lamella.cuda_ext.provenance import provenance_of
from lamella.reference.geometry import KVGeometry
from lamella.reference.plan import Direction

SCHEMA_VERSION = 1
CHECKOUT = Path(__file__).parents[1]
RANK_SHAPE = BenchShape("packed NHD, 4 of 8 heads (TP 2)", KVGeometry(32, 1, 4, 256, 2, 256), "NHTD", "NTHD", 16)
WIDTHS = (1, 8, 32)
GOAL = 1.05
BARRIER_S = 120.0
ALONE, TOGETHER = ("raw, rank 0 alone", "raw, rank 1 alone"), "raw, both"
"""Names of the rounds; a retrieve's is its width."""


def rank(
    number: int, devices: Sequence[str], num_bytes: int, repeats: int, barrier: threading.Barrier, results: Any
) -> None:
    """One rank's process: its times in nanoseconds by round."""
    try:
        results.put((number, _measure(number, devices, num_bytes, repeats, barrier)))
    except BaseException as error:
        barrier.abort()
        results.put((number, f"{type(error).__name__}: {error}"))
        raise


def _measure(
    number: int, devices: Sequence[str], num_bytes: int, repeats: int, barrier: threading.Barrier
) -> dict[str, list[int]]:
    settings = BenchSettings(repeats=repeats, warm_up=2)
    with TransferBench(Device(devices[number]), RANK_SHAPE, num_bytes, settings) as bench:
        for width in WIDTHS:
            bench.check(Direction.RETRIEVE, width)
        rounds = (*ALONE, TOGETHER, *(f"retrieve, width {width}" for width in WIDTHS))
        taken: dict[str, list[int]] = {name: [] for name in rounds}
        for turn in range(settings.warm_up + repeats):
            for name in rounds if turn % 2 else reversed(rounds):
                barrier.wait(BARRIER_S)
                if name in ALONE and name != ALONE[number]:
                    continue
                if name.startswith("raw"):
                    time_ns = bench.raw(Direction.RETRIEVE)
                else:
                    time_ns = bench.retrieve_once(int(name.rsplit(" ", 1)[1]))
                if turn >= settings.warm_up:
                    taken[name].append(time_ns)
        return taken


def summary(ranks: Sequence[dict[str, list[int]]]) -> dict[str, Any]:
    """Ratios of the slower ranks, median with least and most: `{"median", "least", "most"}` each."""
    slower_raw = [max(times) for times in zip(*(times[TOGETHER] for times in ranks), strict=True)]
    figures = {}
    for number, times in enumerate(ranks):
        alone = statistics.median(times[ALONE[number]])
        figures[f"raw together over alone, rank {number}"] = _spread([time / alone for time in times[TOGETHER]])
    for width in WIDTHS:
        name = f"retrieve, width {width}"
        slower = [max(times) for times in zip(*(times[name] for times in ranks), strict=True)]
        figures[f"{name}, over raw"] = _spread([own / raw for own, raw in zip(slower, slower_raw, strict=True)])
    return figures


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, help="JSON file for the result")
    parser.add_argument("--devices", nargs=2, default=["cuda:0", "cuda:1"])
    parser.add_argument("--mib", type=int, default=512, help="a rank's half, MiB")
    parser.add_argument("--repeats", type=int, default=11)
    options = parser.parse_args(argv)

    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    processes = [
        context.Process(
            target=rank, args=(number, options.devices, options.mib << 20, options.repeats, barrier, results)
        )
        for number in range(2)
    ]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=600) for _ in processes)
    for process in processes:
        process.join(60)
    failed = {number: times for number, times in found.items() if isinstance(times, str)}
    if failed:
        print(f"no figure: {failed}", file=sys.stderr)
        return 2
    ranks = [found[0], found[1]]
    figures = summary(ranks)
    for name, spread in figures.items():
        print(f"{name:36} {spread['median']:.3f}  ({spread['least']:.3f} .. {spread['most']:.3f})")
    gbps = [options.mib * (1 << 20) / statistics.median(times[TOGETHER]) for times in ranks]
    print(f"both at once: {gbps[0]:.1f} and {gbps[1]:.1f} GB/s")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        whole = {
            "schema_version": SCHEMA_VERSION,
            "kind": "two-gpus",
            "provenance": [asdict(provenance_of(Device(name), sys.argv, CHECKOUT)) for name in options.devices],
            "shape": RANK_SHAPE.name,
            "bytes_each": options.mib << 20,
            "summary": figures,
            "times_ns": ranks,
        }
        write_json(options.out, whole)
    return 0 if figures["retrieve, width 1, over raw"]["median"] <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
