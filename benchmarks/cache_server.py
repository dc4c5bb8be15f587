"""How fast a cache server answers: `lamella serve` in a process of its own, asked over its socket.

    python benchmarks/cache_server.py [--json FILE]

Prints medians and 99th percentiles of what a client waits for each message, and how long the server took to start.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from result_file import write_json

import lamella
from lamella.reference.geometry import KVGeometry, ObjectForm
from lamella.reference.keys import KeySpace, chunk_keys
from lamella.reference.layout import ObjectLayout
from lamella.server.client import CacheSession
from lamella.server.protocol import Register, Role, TransferSide
from lamella.server.shapes import send_groups, send_space

CHUNK = 16
MEMORY = "64MiB"


def registration(rank: int, num_ranks: int) -> Register:
    layout = ObjectLayout.single(KVGeometry(2, 2, 1, 8, 2, CHUNK), CHUNK)
    space = KeySpace("benchmark", "bfloat16", ObjectForm.TOKEN, "THD", CHUNK, rank, num_ranks, (0, 2))
    return Register(
        lamella.__version__,
        f"engine of {num_ranks}",
        Role.RANK,
        rank,
        num_ranks,
        send_space(space),
        send_groups(layout),
        layout.object_bytes * num_ranks,
        TransferSide.WORKER,
        "",
        (),
        (),
        None,
        "",
    )


def timed(repeats: int, call: Callable[[], object], after: Callable[[Any], object] = lambda found: None) -> list[float]:
    """Milliseconds of each call; what comes `after` is not timed."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter_ns()
        found = call()
        times.append((time.perf_counter_ns() - began) / 1e6)
        after(found)
    return sorted(times)


def measure(folder: Path, repeats: int) -> dict[str, dict[str, float]]:
    rows: dict[str, dict[str, float]] = {}

    def add(name: str, times: list[float]) -> None:
        rows[name] = {
            "p50_ms": round(statistics.median(times), 4),
            "p99_ms": round(times[int(len(times) * 0.99)], 4),
            "fastest_ms": round(times[0], 4),
        }

    for num_ranks in (1, 2, 4):
        ranks = [CacheSession(folder, registration(rank, num_ranks)) for rank in range(num_ranks)]
        space = KeySpace("benchmark", "bfloat16", ObjectForm.TOKEN, "THD", CHUNK, 0, num_ranks, (0, 2))
        keys = chunk_keys(space, list(range(512 * CHUNK)))
        lease = ranks[0].allocate(keys).lease
        for rank, session in enumerate(ranks):
            session.commit(lease, rank)
        first = ranks[0]
        for count in (32, 512):
            times = timed(repeats, lambda: first.lookup(keys[:count]), lambda found: first.release(found.lease))  # noqa: B023
            add(f"lookup of {count} chunks, {num_ranks} ranks", times)
        if num_ranks == 1:
            leases = [first.lookup(keys[:32]).lease for _ in range(repeats)]
            add("retrieve, worker side", timed(repeats, lambda: first.retrieve(leases.pop(), 0)))  # noqa: B023
            add("stats", timed(repeats, first.stats))
        for session in ranks:
            session.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "serve"
        began = time.monotonic()
        command = [sys.executable, "-c", "from lamella.cli.main import main; main()", "serve", "--folder", str(folder)]
        command += ["--memory", MEMORY, "--models", "3", "--http", "off", "--log-level", "warning"]
        server = subprocess.Popen(command)
        try:
            while not (folder / "server.sock").exists():
                time.sleep(0.005)
            start_s = time.monotonic() - began
            rows = measure(folder, chosen.repeats)
        finally:
            server.terminate()
            server.wait(30)
    print(f"{'start, to its socket':36s}     {start_s:7.3f} s")
    for name, row in rows.items():
        print(
            f"{name:36s} p50 {row['p50_ms']:7.3f} ms  p99 {row['p99_ms']:7.3f} ms  fastest {row['fastest_ms']:7.3f} ms"
        )
    if chosen.json is not None:
        report = {
            "lamella": lamella.__version__,
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "processor": platform.processor() or platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "load_average": os.getloadavg()[0],
            "python": platform.python_version(),
            "repeats": chosen.repeats,
            "start_s": round(start_s, 3),
            "rows": rows,
        }
        write_json(chosen.json, report)


if __name__ == "__main__":
    main()
