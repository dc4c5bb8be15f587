"""Ranks of small engines on a real cache server process, with bytes that follow from the chunk's key."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from lamella.cuda_ext.engine import TransferEngine
from lamella.cuda_ext.shared_memory import HostMemory
from lamella.cuda_ext.transfer import Arriving
from lamella.reference.geometry import KVGeometry, ObjectForm
from lamella.reference.keys import ChunkKey, KeySpace, chunk_keys
from lamella.reference.layout import EngineLayout, ObjectLayout, TensorView, engine_layout
from lamella.reference.plan import Direction
from lamella.server.connection import ServerLostError
from lamella.server.protocol import TransferSide
from lamella.server.rank import RankCaches, RankOfEngine, Report
from lamella.server.sequences import Locked
from lamella.server.worker import Worker

WAIT_S = 20.0
POISON = 0xA5
HERE, THERE = range(16), tuple(range(20, 36))[::-1]
"""Block tables: of what is stored, and of where it is to go."""
CHUNK, BLOCK, HEADS, DIM = 8, 4, 2, 8
PACED: dict[str, Any] = {
    "engine_options": {"paced": True, "window_bytes": 2048, "staging_bytes": 8192, "in_flight_bytes": 4096}
}
"""Of `join`: windows move when a test grants them, and a layer of `RankMemory` is two."""


class ServerProcess:
    """`lamella serve` in a folder of its own."""

    def __init__(self, folder: Path, *options: str, device: str = "cpu") -> None:
        self.folder = folder
        self._options = ("--device", device, *options)
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-c", "from lamella.cli.main import main; main()", "serve"]
        command += ["--folder", str(self.folder), "--http", "off", *self._options]
        with open(f"{self.folder}.log", "ab") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)

    def kill(self) -> None:
        """kill -9, and its end."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(WAIT_S)

    def stop(self) -> int:
        self.process.terminate()
        try:
            self.process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        return self.process.returncode


@contextmanager
def serving(folder: Path, *options: str, device: str = "cpu") -> Iterator[ServerProcess]:
    server = ServerProcess(folder, *options, device=device)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()


class RankMemory:
    """A rank's paged cache `[layers][2, NB, 4, H, 8]` in shared memory, and what belongs into it."""

    def __init__(
        self,
        *,
        num_layers: int = 32,
        num_blocks: int = 64,
        heads: int = HEADS,
        form: ObjectForm = ObjectForm.TOKEN,
        space: KeySpace | None = None,
        first_layer: int = 0,
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> None:
        self.space = space or KeySpace(
            "small",
            "uint16",
            form,
            "THD",
            CHUNK,
            tp_rank,
            tp_size,
            (first_layer, first_layer + num_layers),
        )
        self.geometry = KVGeometry(num_layers, 2, heads, DIM, 2, CHUNK)
        self.layout = ObjectLayout.single(self.geometry, BLOCK, form)
        shape = (num_layers, 2, num_blocks, BLOCK, heads, DIM)
        self.num_blocks = num_blocks
        self._memory = HostMemory.create(int(np.prod(shape)) * 2)
        self.cache: NDArray[np.uint16] = np.frombuffer(self._memory.buffer, np.uint16).reshape(shape)
        self.engines: tuple[EngineLayout, ...] = (
            engine_layout("KNTHD", [TensorView(one.ctypes.data, one.shape, one.strides, 2) for one in self.cache]),
        )
        self._wanted: dict[bytes, NDArray[np.uint16]] = {}
        self.poison()

    @property
    def caches(self) -> RankCaches:
        assert self._memory.path is not None
        place = (self._memory.path, self._memory.address, self._memory.num_bytes)
        return RankCaches(self.layout, self.engines, "cpu", (place,))

    def poison(self) -> None:
        self.cache[:] = POISON << 8 | POISON

    def wanted(self, key: ChunkKey) -> NDArray[np.uint16]:
        """`[L, 2, T, H, D]`: what this rank's chunk of that prefix holds; never a byte of the poison."""
        known = self._wanted.get(key.prefix)
        if known is not None:
            return known
        seed = int.from_bytes(key.prefix[:8], "little") ^ (self.space.tp_rank << 7) ^ self.space.layers[0]
        values = np.random.default_rng(seed).integers(
            0, 0xA0A0, (self.geometry.num_layers, 2, CHUNK, self.geometry.num_heads, DIM), np.uint16
        )
        if len(self._wanted) > 4096:
            self._wanted.clear()
        self._wanted[key.prefix] = values & 0x9F9F
        return self._wanted[key.prefix]

    def fill(self, keys: Sequence[ChunkKey], table: Sequence[int]) -> None:
        """The blocks of `table` hold these chunks, from token 0 on."""
        for chunk, key in enumerate(keys):
            for part in range(CHUNK // BLOCK):
                block = table[chunk * (CHUNK // BLOCK) + part]
                self.cache[:, :, block] = self.wanted(key)[:, :, part * BLOCK : (part + 1) * BLOCK]

    def right_layers(self, keys: Sequence[ChunkKey], table: Sequence[int], skip_chunks: int = 0) -> list[int]:
        """Layers in which every block of the chunks from `skip_chunks` on holds its bytes."""
        good = np.ones(self.geometry.num_layers, bool)
        for chunk in range(skip_chunks, len(keys)):
            wanted = self.wanted(keys[chunk])
            for part in range(CHUNK // BLOCK):
                block = table[chunk * (CHUNK // BLOCK) + part]
                same = self.cache[:, :, block] == wanted[:, :, part * BLOCK : (part + 1) * BLOCK]
                good &= same.all(axis=(1, 2, 3, 4))
        return np.flatnonzero(good).tolist()

    def is_poisoned_outside(self, table: Sequence[int]) -> bool:
        """Whether no other block was touched."""
        others = np.delete(self.cache, list(table), axis=2)
        return bool((others == POISON << 8 | POISON).all())

    def close(self) -> None:
        del self.cache
        self._memory.close()


def keys_of(memory: RankMemory, tokens: Sequence[int], salt: bytes = b"") -> tuple[ChunkKey, ...]:
    """Keys in the engine's space: that of rank 0, whatever the rank."""
    space = memory.space
    layers = (0, 1)
    return chunk_keys(replace(space, tp_rank=0, layers=layers, salt=salt), tokens)


def join(folder: Path, memory: RankMemory, *, rank: int = 0, num_ranks: int = 1, **options: Any) -> Worker:
    """A worker, once the server is there."""
    options.setdefault("engine", "engine")
    engine = options.pop("engine")
    chunk_bytes = options.pop("chunk_bytes", 0)
    until = time.monotonic() + WAIT_S
    of = RankOfEngine(engine, memory.space, rank, num_ranks, chunk_bytes)
    while True:
        try:
            return Worker(folder, of, memory.caches, **options)
        except (ServerLostError, FileNotFoundError):  # it is starting
            if time.monotonic() > until:
                print(Path(f"{folder}.log").read_text(encoding="utf-8")[-3000:], file=sys.stderr)
                raise
            time.sleep(0.02)


def until(worker: Worker, found: Callable[[Report], bool], timeout_s: float = WAIT_S) -> list[Report]:
    """Polls as an idle engine does, until a report says so."""
    reports = []
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        worker.begin_step()
        reports.append(worker.poll())
        if found(reports[-1]):
            return reports
        time.sleep(0.0005)
    raise TimeoutError(f"nothing of the kind within {timeout_s} s: {[r for r in reports if r != Report()]}")


def engine_of(worker: Worker) -> TransferEngine:
    """The engine in the worker's process; there is one where the worker itself moves the bytes."""
    assert worker.engine is not None
    return worker.engine


def store(worker: Worker, memory: RankMemory, keys: Sequence[ChunkKey], table: Sequence[int]) -> None:
    """These chunks can be read by others."""
    memory.fill(keys, table)
    numbers = set(worker.store("store", keys, (tuple(table),)))
    if not numbers:
        raise RuntimeError("nothing was allocated")
    worker.begin_step(num_tokens=len(keys) * CHUNK)
    for layer in range(memory.geometry.num_layers):
        worker.layer_computed(layer)
    worker.step_computed()
    done: dict[int, bool] = {}
    until(worker, lambda report: bool(done.update(report.readable)) or numbers <= set(done))
    if not all(done.values()):
        raise RuntimeError(f"a store was given up: {done}")


def load(
    worker: Worker, keys: Sequence[ChunkKey], table: Sequence[int], request: str = "r", skip_chunks: int = 0
) -> tuple[int, Locked]:
    """A retrieve of all of these chunks has begun."""
    locked = worker.lookup(keys, first_wanted=skip_chunks)
    if locked.num_chunks != len(keys):
        raise RuntimeError(f"{locked.num_chunks} of {len(keys)} chunks are there")
    tokens = len(keys) * CHUNK
    return worker.retrieve(request, locked, (tuple(table),), tokens, skip_tokens=skip_chunks * CHUNK), locked


def stored_here(worker: Worker, memory: RankMemory, engine: TransferEngine) -> tuple[ChunkKey, ...]:
    """Eight chunks of `HERE` are stored by an engine that is `PACED`, and the cache holds nothing of them any more."""
    keys = keys_of(memory, range(64))
    engine.grant(Direction.STORE, 10**6)
    store(worker, memory, keys, HERE)
    memory.poison()
    return keys


def caught(
    worker: Worker, server: ServerProcess, memory: RankMemory, keys: Sequence[ChunkKey], there: Sequence[int]
) -> tuple[int, Arriving, int]:
    """A load that the server moves, the server stopped in the middle of it: its number, itself, layers landed by then.

    A busy machine lets a whole load pass between two looks, so it is tried until one is caught.
    """
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        memory.poison()
        number, _locked = load(worker, keys, there)
        reports = until(worker, lambda report: "r" in report.received)
        if number in reports[-1].loads:  # it landed whole between two looks
            continue
        os.kill(server.process.pid, signal.SIGSTOP)
        transfer = transfer_of(worker, number)
        landed = transfer.query().landed
        if 1 <= landed < transfer.num_slices:
            return number, transfer, landed
        os.kill(server.process.pid, signal.SIGCONT)
        until(worker, lambda report, wanted=number: wanted in report.loads)
    raise TimeoutError(f"the server was not caught in the middle of a load within {WAIT_S:g} s")


class Released(NamedTuple):
    """A load on its way whose request may run.

    Attributes:
        engine: moves `PACED`.
        keys: what is loaded, from `HERE` to `THERE`.
        number: the load's.
        locked: as `load` has it.
    """

    engine: TransferEngine
    keys: tuple[ChunkKey, ...]
    number: int
    locked: Locked


def released(worker: Worker, memory: RankMemory, windows: int = 2) -> Released:
    """What was stored here is on its way back, so many windows of it may move, and its request "r" was let run."""
    engine = engine_of(worker)
    keys = stored_here(worker, memory, engine)
    number, locked = load(worker, keys, THERE)
    engine.grant(Direction.RETRIEVE, windows)
    until(worker, lambda report: "r" in report.received)
    return Released(engine, keys, number, locked)


def transfer_of(worker: Worker, number: int) -> Arriving:
    """The transfer of a load that has begun."""
    begun = worker.loads.find(number)
    assert begun is not None
    assert begun.transfer is not None
    return begun.transfer


def settled(worker: Worker, *states: str) -> None:
    """Nothing is held at the server in these states, soon."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        worker.poll()
        figures = worker.session.stats().figures
        held = {name: value for name, value in figures.items() if any(state in name for state in states) and value}
        if not held:
            return
        time.sleep(0.02)
    raise AssertionError(held)


BOTH_SIDES = tuple(TransferSide)
both_sides = pytest.mark.parametrize("side", BOTH_SIDES, ids=lambda side: side.value)
