"""What the host does between a lookup and the first slice of a retrieve from a cache server, stage by stage.

    python benchmarks/server_stages.py [out.json] [--repeats 200] [--pause-ms 25]

One worker on the CPU device and a server process of its own; 32 layers, 512 blocks and 32 chunks of hardly any bytes,
so that the wire takes next to no time. Once without a pause between the retrieves and once with one, in which an engine
would compute: by then caches have gone cold and threads asleep, and everything takes several times as long. Times are
medians in microseconds: the lookup, and from the retrieve's call until it was handed to the engine, its first window
was issued, its first slice had landed and it was polled as released.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from result_file import write_json

from lamella.cuda_ext.bench_cases import BenchMemory, BenchShape
from lamella.cuda_ext.device import Device
from lamella.reference.geometry import KVGeometry, ObjectForm
from lamella.reference.keys import ChunkKey, KeySpace, chunk_keys
from lamella.server.rank import RankCaches, RankOfEngine
from lamella.server.worker import Worker

TOKENS, CHUNK, LAYERS = 8192, 256, 32
SHAPE = BenchShape("thin", KVGeometry(LAYERS, 1, 1, 8, 2, CHUNK), "NHTD", "NTHD", 16, ObjectForm.TOKEN)
SPACE = KeySpace("stages", "bfloat16", ObjectForm.TOKEN, "NTHD", CHUNK, 0, 1, (0, LAYERS))
WARM_UP = 20


@contextmanager
def served(folder: Path) -> Iterator[None]:
    """A server process in that folder."""
    command = [
        sys.executable,
        *(["-S"] if sys.flags.no_site else []),
        "-c",
        "from lamella.cli.main import main; main()",
    ]
    options = ["serve", "--folder", str(folder), "--memory", "64MiB", "--http", "off", "--device", "cpu"]
    server = subprocess.Popen([*command, *options], stderr=subprocess.DEVNULL)
    try:
        while not (folder / "server.sock").exists():
            time.sleep(0.05)
        yield
    finally:
        server.terminate()
        server.wait(30)


def retrieve(worker: Worker, memory: BenchMemory, keys: tuple[ChunkKey, ...]) -> dict[str, int]:
    """The stages of one retrieve, in nanoseconds."""
    before_ns = time.monotonic_ns()
    locked = worker.lookup(keys)
    asked_ns = time.monotonic_ns()
    number = worker.retrieve("stages", locked, (memory.block_ids,), TOKENS, layers_per_slice=1)
    load = worker.loads.find(number)
    released_ns = 0
    while True:
        report = worker.poll()
        if report.received:
            released_ns = time.monotonic_ns()
        if number in report.loads:
            break
    if not report.loads[number].ok or load is None or load.transfer is None:
        raise RuntimeError("the retrieve failed")
    progress = load.transfer.query()
    return {
        "lookup": asked_ns - before_ns,
        "submitted": progress.submitted_ns - asked_ns,
        "begun": progress.started_ns - asked_ns,
        "first_slice": load.transfer.timestamps_ns().landed_ns[0] - asked_ns,
        "released": released_ns - asked_ns,
    }


def measure(repeats: int, pause_s: float) -> dict[str, dict[str, float]]:
    """Medians in microseconds, by kind and stage."""
    found: dict[str, dict[str, float]] = {}
    with (
        tempfile.TemporaryDirectory() as made,
        served(Path(made) / "s"),
        BenchMemory(Device("cpu"), SHAPE, TOKENS) as memory,
    ):
        caches = RankCaches(SHAPE.layout, memory.engines, "cpu")
        with Worker(Path(made) / "s", RankOfEngine("stages", SPACE), caches) as worker:
            keys = tuple(chunk_keys(SPACE, range(TOKENS)))
            worker.store("stages", keys, (memory.block_ids,))
            worker.begin_step(num_tokens=1)
            worker.step_computed()
            while not worker.poll().readable:
                time.sleep(0.001)
            for kind, waits_s in (("without a pause", 0.0), ("after a pause", pause_s)):
                rows = []
                for repeat in range(WARM_UP + repeats):
                    time.sleep(waits_s)
                    row = retrieve(worker, memory, keys)
                    if repeat >= WARM_UP:
                        rows.append(row)
                found[kind] = {stage: statistics.median(row[stage] for row in rows) / 1e3 for stage in rows[0]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--pause-ms", type=float, default=25.0)
    options = parser.parse_args()
    found = measure(options.repeats, options.pause_ms / 1e3)
    for kind, stages in found.items():
        print(f"{kind:<16}", "  ".join(f"{stage} {us:.0f}" for stage, us in stages.items()))
    if options.out is not None:
        write_json(options.out, found)


if __name__ == "__main__":
    main()
