#!/usr/bin/env python3
"""How fast the model is: a regime map of 10,050 cells, and traces replayed arm by arm, by the wall clock.

    model_speed.py OUT.json [--workers 2] [--trace FILE ...]

The map has all the usual strategies in each cell, in so many processes; a replay has one arm after another in this
process, routing included, decoding included. The load of the machine is written beside the times.
"""

from __future__ import annotations

import argparse
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from result_file import write_json

from lamella.sim.parallel import Runner, Running
from lamella.sim.profiles import load_profile
from lamella.sim.regimes import compute_map, plan_map, reachable_ratios
from lamella.sim.replay import ARMS, run_arm
from lamella.sim.routing import PoolSizes, choose_instances
from lamella.sim.strategies import CANDIDATES, Device
from lamella.sim.workload import load_trace

CONCURRENCIES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
HIT_TOKENS = 15_360
CELLS = 10_050
POOL_GIB = 256


def time_map(device: Device, workers: int) -> dict[str, Any]:
    """The map, in so many processes."""
    ratios = reachable_ratios(device, HIT_TOKENS, CELLS // len(CONCURRENCIES) + 200)
    plan = plan_map(device, HIT_TOKENS, CONCURRENCIES, ratios, CANDIDATES)
    plan = plan._replace(regimes=plan.regimes[:CELLS])
    load, begin = os.getloadavg()[0], time.perf_counter()
    computed = compute_map(plan, Running(Runner.PROCESSES, workers))
    seconds = time.perf_counter() - begin
    return {
        "cells": len(computed.cells),
        "strategies": len(plan.strategies),
        "workers": workers,
        "seconds": seconds,
        "load": load,
    }


def time_trace(device: Device, path: Path) -> list[dict[str, Any]]:
    """Every arm over the trace; each time has the routing in it."""
    begin = time.perf_counter()
    routing = choose_instances(load_trace(path), device, PoolSizes(POOL_GIB << 30, 0))
    routed_s = time.perf_counter() - begin
    rows = []
    for strategy in ARMS:
        load, begin = os.getloadavg()[0], time.perf_counter()
        run_arm(strategy, routing, device)
        seconds = time.perf_counter() - begin + routed_s
        rows.append(
            {
                "trace": path.name,
                "arm": str(strategy),
                "instances": routing.num_instances,
                "span_s": routing.span_ns / 1e9,
                "seconds": seconds,
                "times_real_time": routing.span_ns / 1e9 / seconds,
                "load": load,
            }
        )
    return rows


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--trace", type=Path, action="append", default=[], help="Mooncake's JSON lines; repeat it")
    asked = parser.parse_args()
    device = Device(load_profile())
    found = {
        "kind": "lamella.model_speed",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "map": time_map(device, asked.workers),
        "replays": [row for path in asked.trace for row in time_trace(device, path)],
    }
    write_json(asked.out, found)
    print(f"map: {found['map']}")
    for row in found["replays"]:
        print(f"{row['trace']} {row['arm']}: {row['seconds']:.2f} s, {row['times_real_time']:,.0f} times real time")


if __name__ == "__main__":
    main()
