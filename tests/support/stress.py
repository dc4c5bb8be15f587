"""Seeded stress of pool and engine: loads, stores, aborts, dropped handles, engines closed in mid-flight, kills.

Every landed transfer is checked against known bytes. What is lost or leaked is counted from outside, not by our own
counters: device memory, `/dev/shm`, resident memory, descriptors and threads, once warmed up and at the end.

    python tests/support/stress.py --device cuda:0 --seconds 240 --seed 1 --json stress.json
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from footprint import Footprint, footprint
from lamella.cuda_ext.arrival import Carrier
from lamella.cuda_ext.bench_cases import BLOCK_SHAPE, MAIN_SHAPES
from lamella.cuda_ext.device import Device
from lamella.cuda_ext.engine import TransferEngine
from lamella.cuda_ext.executors import HostObjects
from lamella.cuda_ext.pool import Backing, HostPool, PinnedObjects, Reservation
from lamella.cuda_ext.transfer import CopyMethod, Transfer, TransferState
from lamella.reference.geometry import ObjectForm
from lamella.reference.plan import Direction
from stress_cell import OBJECTS, Cell

TIMEOUT_S = 60.0
MOST_IN_FLIGHT = 8
METHODS = (CopyMethod.AUTO, CopyMethod.STAGED_BATCH, CopyMethod.STAGED_2D, CopyMethod.GATHER)


@dataclass(frozen=True, slots=True)
class StressReport:
    """How a run ended. `kinds` counts what was done; `problems` is empty after a good run."""

    device: str
    seed: int
    seconds: float
    kinds: dict[str, int]
    before: Footprint
    after: Footprint
    problems: list[str]


@dataclass(slots=True)
class Flight:
    """A transfer that the run still looks after."""

    cell: Cell
    transfer: Transfer
    direction: Direction
    blocks: list[int]
    made_of: list[int]
    skip_tokens: int
    mark: int
    reservation: Reservation | None = None


@dataclass(slots=True)
class Stress:
    device: Device
    seed: int
    random: random.Random = field(init=False)
    kinds: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    flights: list[Flight] = field(default_factory=list)
    drained: Counter[int] = field(default_factory=Counter)
    orphans: dict[int, tuple[Cell, list[int]]] = field(default_factory=dict)
    submitted: int = 0
    cells: list[Cell] = field(init=False)
    engine: TransferEngine = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        packed, classic = MAIN_SHAPES
        shapes = (
            packed,
            classic,
            replace(packed, name="packed HND", memory="NHTD"),
            BLOCK_SHAPE,
            replace(classic, name="classic, block form", form=ObjectForm.BLOCK),
        )
        self.cells = [
            Cell(self.device, replace(shape, geometry=replace(shape.geometry, num_layers=6, chunk_tokens=64)), number)
            for number, shape in enumerate(shapes)
        ]
        self._new_engine()

    def _new_engine(self) -> None:
        self.engine = TransferEngine(
            self.device.name,
            num_layers=6,
            staging_bytes=8 << 20,
            window_bytes=1 << 20,
            carrier=self.random.choice(list(Carrier)),
            deadline_s=TIMEOUT_S,
        )
        self._caches = [self.engine.register_cache(cell.shape.layout, cell.engines) for cell in self.cells]

    _caches: list = field(init=False, default_factory=list)

    # ---- what can happen

    def fill(self) -> None:
        cell = self.random.choice(self.cells)
        wanted = [cell.key(number) for number in self.random.sample(range(60), self.random.randint(1, OBJECTS))]
        reservation = cell.pool.reserve(wanted)
        if reservation is None:
            return
        for key in reservation.evicted:
            cell.content.pop(key, None)
        if self.random.random() < 0.1:
            reservation.abandon()
            return
        for key, slot in zip(reservation.keys, reservation.slots, strict=True):
            cell.content[key] = self.random.getrandbits(40)
            cell.write_object(slot, cell.content[key])
        reservation.commit()

    def load(self) -> None:
        number = self.random.randrange(len(self.cells))
        cell = self.cells[number]
        ready = [key for key in cell.content if cell.pool.leading_hits([key])]
        if not ready or len(self.flights) >= MOST_IN_FLIGHT:
            return
        keys = self.random.sample(ready, min(len(ready), self.random.randint(1, OBJECTS)))
        needed = len(keys) * cell.shape.geometry.chunk_tokens // cell.shape.block_tokens
        if needed > len(cell.free_blocks):
            return
        lease = cell.pool.pin(keys)
        self._submit(number, Direction.RETRIEVE, lease.host_objects(), [cell.content[key] for key in keys], lease=lease)

    def save(self) -> None:
        """Blocks whose bytes are known go to new objects: those of a load that has just landed."""
        for flight in self.flights:
            if flight.direction is Direction.RETRIEVE and flight.transfer.state is TransferState.LANDED:
                if flight.skip_tokens:
                    continue
                number = self.cells.index(flight.cell)
                names = [flight.cell.key(100 + self.random.randrange(10**6)) for _ in flight.made_of]
                if len(set(names)) < len(names):
                    return
                reservation = flight.cell.pool.reserve(names)
                if reservation is None:
                    return
                for key in reservation.evicted:
                    flight.cell.content.pop(key, None)
                if len(reservation.keys) < len(names):
                    reservation.abandon()
                    return
                self.flights.remove(flight)
                self._submit(
                    number,
                    Direction.STORE,
                    reservation.host_objects(),
                    flight.made_of,
                    reservation=reservation,
                    blocks=flight.blocks,
                )
                return

    def _submit(
        self,
        number: int,
        direction: Direction,
        objects: HostObjects,
        made_of: list[int],
        *,
        lease: PinnedObjects | None = None,
        reservation: Reservation | None = None,
        blocks: list[int] | None = None,
    ) -> None:
        cell = self.cells[number]
        shape = cell.shape
        tokens = len(made_of) * shape.geometry.chunk_tokens
        if blocks is None:
            self.random.shuffle(cell.free_blocks)
            needed = tokens // shape.block_tokens
            blocks, cell.free_blocks = cell.free_blocks[:needed], cell.free_blocks[needed:]
        skip = 0
        if direction is Direction.RETRIEVE and self.random.random() < 0.3:
            skip = shape.block_tokens * self.random.randrange(tokens // shape.block_tokens)
        mark = self.submitted
        self.submitted += 1

        def on_drained() -> None:
            self.drained[mark] += 1
            if lease is not None:
                lease.release()  # XFER-2: the lease is the transfer's, whatever became of its handle

        transfer = self.engine.submit(
            self._caches[number],
            direction,
            objects,
            (blocks,),
            tokens,
            width=self.random.choice((1, 2, 3, 6, (1, 2))),
            skip_tokens=skip,
            method=self.random.choice(METHODS),
            on_drained=on_drained,
        )
        self.flights.append(Flight(cell, transfer, direction, blocks, made_of, skip, mark, reservation))
        self.kinds[direction.value] += 1

    def abort(self) -> None:
        if self.flights:
            self.random.choice(self.flights).transfer.cancel()
            self.kinds["abort"] += 1

    def drop(self) -> None:
        """Nobody keeps the handle; blocks and lease are free again when the engine says that nothing is in flight."""
        loads = [flight for flight in self.flights if flight.direction is Direction.RETRIEVE]
        if loads:
            flight = self.random.choice(loads)
            self.flights.remove(flight)
            self.orphans[flight.mark] = (flight.cell, flight.blocks)
            self.kinds["handle dropped"] += 1

    def collect_orphans(self) -> None:
        for mark in [mark for mark in self.orphans if self.drained[mark]]:
            cell, blocks = self.orphans.pop(mark)
            cell.free_blocks += blocks

    def settle(self) -> None:
        """What has ended is checked, and its blocks and objects are free for others."""
        self.collect_orphans()
        for flight in list(self.flights):
            state = flight.transfer.state
            if state.is_final and self.random.random() < 0.8:
                self.flights.remove(flight)
                self._end(flight, state)

    def _end(self, flight: Flight, state: TransferState) -> None:
        cell, layer = flight.cell, self.random.randrange(flight.cell.shape.geometry.num_layers)
        self.kinds[f"{flight.direction.value} {state.name.lower()}"] += 1
        if state is TransferState.FAILED:
            self.problems.append(f"a transfer failed: {flight.transfer.error}")
        loaded = flight.direction is Direction.RETRIEVE and state is TransferState.LANDED
        if loaded and not cell.blocks_are_right(flight.blocks, flight.made_of, layer, flight.skip_tokens):
            self.problems.append(f"{cell.shape.name}: layer {layer} wrong after a retrieve")
        if flight.reservation is not None:
            keys, slots = flight.reservation.keys, flight.reservation.slots
            if state is TransferState.LANDED:
                for slot, made_of in zip(slots, flight.made_of, strict=True):
                    if not cell.object_is_right(slot, made_of, layer):
                        self.problems.append(f"{cell.shape.name}: layer {layer} wrong after a store")
                flight.reservation.commit()
                cell.content.update(zip(keys, flight.made_of, strict=True))
            else:
                flight.reservation.abandon()
        cell.free_blocks += flight.blocks

    def restart(self) -> None:
        """The engine is closed with transfers in flight, and another takes its place."""
        self.engine.close(TIMEOUT_S)
        for flight in self.flights:
            if not flight.transfer.state.is_final:
                self.problems.append("a closed engine left a transfer that is not final")
            self._end(flight, flight.transfer.state)
        self.flights.clear()
        self._new_engine()
        self.kinds["engine closed in mid-flight"] += 1

    def kill_attacher(self) -> None:
        """Another process maps a pool, creates one of its own, and is killed."""
        shared = self.random.choice(self.cells).pool.shared()
        code = (
            "import sys; from pathlib import Path; from lamella.cuda_ext.shared_memory import HostMemory\n"
            "a = HostMemory.attach(Path(sys.argv[1]), int(sys.argv[2])); b = HostMemory.create(4096)\n"
            "print(b.path, flush=True); sys.stdin.read()"
        )
        arguments = [sys.executable, "-c", code, str(shared.path), str(shared.shape.total_bytes)]
        with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            left = Path(child.stdout.readline().strip())
            child.send_signal(signal.SIGKILL)
            child.wait()
        if not left.exists():
            self.kinds["killed attacher's file reclaimed by a neighbour"] += 1
        HostPool(self.cells[0].shape.layout, 1, backing=Backing.SHARED).close()
        if left.exists():
            self.problems.append(f"{left.name} of a killed process was not reclaimed")
        self.kinds["attacher killed"] += 1

    # ---- the run

    def step(self) -> None:
        actions: list[tuple[float, Callable[[], None]]] = [
            (3, self.fill), (10, self.load), (6, self.save), (2, self.abort), (0.5, self.drop), (8, self.settle),
            (0.05, self.restart), (0.01, self.kill_attacher),
        ]  # fmt: skip
        weights, choices = zip(*actions, strict=True)
        self.random.choices(choices, weights)[0]()

    def drain(self) -> None:
        for flight in self.flights:
            self._end(flight, flight.transfer.wait_final(TIMEOUT_S))
        self.flights.clear()
        self.restart()  # its reaper has then called every on_drained
        self.collect_orphans()
        if sorted(+self.drained) != list(range(self.submitted)) or set((+self.drained).values()) - {1}:
            lost = self.submitted - len(+self.drained)
            self.problems.append(f"{lost} of {self.submitted} transfers never drained, or some drained twice")
        for cell in self.cells:
            now = cell.pool.report().occupancy
            if (now.pins, now.writing) != (0, 0) or sorted(cell.free_blocks) != list(range(cell.num_blocks)):
                self.problems.append(
                    f"{cell.shape.name}: {now}, {len(cell.free_blocks)} of {cell.num_blocks} blocks free"
                )

    def close(self) -> None:
        self.engine.close(TIMEOUT_S)
        for cell in self.cells:
            cell.close()


def run_stress(device: Device, seconds: float, seed: int) -> StressReport:
    """Stress for that long, after a fifth of the time to warm up, and the report."""
    stress = Stress(device, seed)
    start = time.monotonic()
    stress.restart()
    stress.kill_attacher()
    while time.monotonic() < start + seconds / 5:
        stress.step()
    stress.drain()
    before = footprint(device)
    while time.monotonic() < start + seconds and len(stress.problems) < 10:
        stress.step()
    stress.drain()
    after = footprint(device)
    for name, allowed in (("rss_bytes", 48 << 20), ("device_bytes", 8 << 20), ("shared_files", 0), ("descriptors", 2)):
        grown = getattr(after, name) - getattr(before, name)
        if grown > allowed:
            stress.problems.append(f"{name} grew by {grown} from {getattr(before, name)}, allowed are {allowed}")
    if after.threads > before.threads:
        stress.problems.append(f"threads grew from {before.threads} to {after.threads}")
    report = StressReport(
        device.name, seed, round(time.monotonic() - start, 1), dict(stress.kinds), before, after, stress.problems
    )
    stress.close()
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = run_stress(Device(options.device), options.seconds, options.seed)
    text = json.dumps(asdict(report), indent=1)
    if options.json:
        options.json.write_text(text + "\n")
    print(text)
    return len(report.problems) > 0


if __name__ == "__main__":
    sys.exit(main())
