"""A cache server's service on a clock of the test's own, and real server processes."""

from __future__ import annotations

import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import msgspec
import pytest

import lamella
from lamella.reference.geometry import KVGeometry, ObjectForm
from lamella.reference.keys import ChunkKey, KeySpace, chunk_keys
from lamella.reference.layout import ObjectLayout
from lamella.server.client import CacheSession
from lamella.server.connection import Connection
from lamella.server.frames import RefusedError, Request, allocation, pack_prefixes
from lamella.server.handlers import Peer
from lamella.server.mover import Movement
from lamella.server.protocol import (
    Abort,
    Ended,
    Found,
    Lookup,
    Message,
    Phase,
    Ping,
    Pong,
    Register,
    Registered,
    Release,
    Retrieve,
    Retrieved,
    Role,
    Stats,
    StatsReport,
    Store,
    Stored,
    TransferSide,
)
from lamella.server.service import CacheService
from lamella.server.settings import ServerSettings
from lamella.server.shapes import send_groups, send_space
from lamella.server.wire import EVERY_RANK, Code, Kind

WAIT_S = 60.0
CHUNK = 4
LOCAL = Peer(is_local=True)
MISS = Found(0, 0, (), False)


def layout_of(num_layers: int = 2, form: ObjectForm = ObjectForm.TOKEN) -> ObjectLayout:
    """Objects of 64 bytes a layer: [2, L, 4, 4] of 2 bytes."""
    return ObjectLayout.single(KVGeometry(num_layers, 2, 1, 4, 2, CHUNK), CHUNK, form)


def space_of(
    layers: tuple[int, int] = (0, 2), *, rank: int = 0, ranks: int = 1, salt: bytes = b"", model: str = "m"
) -> KeySpace:
    return KeySpace(model, "bfloat16", ObjectForm.TOKEN, "THD", CHUNK, rank, ranks, layers, salt)


def tokens(*document: int) -> list[int]:
    """A chunk of equal tokens for each number."""
    return [token for token in document for _ in range(CHUNK)]


def registration(
    engine: str = "engine",
    *,
    role: Role = Role.RANK,
    rank: int = 0,
    num_ranks: int = 1,
    space: KeySpace | None = None,
    chunk_bytes: int | None = None,
    alive: str = "",
    **others: Any,
) -> Register:
    """What a rank, or a scheduler, says of itself; `others` replace fields."""
    found = space or space_of()
    layout = layout_of(found.layers[1] - found.layers[0])
    message = Register(
        lamella.__version__,
        engine,
        role,
        rank,
        num_ranks,
        None if role is Role.SCHEDULER else send_space(found),
        () if role is Role.SCHEDULER else send_groups(layout),
        (layout.object_bytes * num_ranks) if chunk_bytes is None else chunk_bytes,
        TransferSide.WORKER,
        "",
        (),
        (),
        None,
        alive,
    )
    return msgspec.structs.replace(message, **others)


class Bench:
    """A service whose clock, processes and random numbers are the test's; nothing runs but what is asked for."""

    def __init__(
        self,
        folder: Path,
        *,
        num_slots: int = 4,
        chunk_bytes: int | None = None,
        movement: Movement | None = None,
        **settings: Any,
    ) -> None:
        self.now_ns = 0
        self.living: set[str] = set()
        self._marks = itertools.count()
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        object_bytes = chunk_bytes or layout_of().object_bytes
        chosen = {"pool_bytes": num_slots * object_bytes} | settings
        self.service = CacheService(
            ServerSettings(folder, **chosen),
            self._jobs.put,
            movement=movement,
            clock_ns=lambda: self.now_ns,
            draw=itertools.count(1).__next__,
            alive=lambda mark: mark in self.living,
        )

    def ask(self, message: Message, peer: Peer = LOCAL) -> Any:
        """The answer, for which the service's other threads are waited."""
        kind = next(kind for kind in Kind if kind.name == type(message).__name__.upper())
        answer = self.service.handlers.answer(Request(kind, 1, message), peer)
        if isinstance(answer, Future):
            self.settle(answer)
            return answer.result()
        return answer

    def begin(self, message: Message, peer: Peer = LOCAL) -> Future[Any]:
        """As `ask`, for an answer that comes later."""
        kind = next(kind for kind in Kind if kind.name == type(message).__name__.upper())
        answer = self.service.handlers.answer(Request(kind, 1, message), peer)
        assert isinstance(answer, Future)
        return answer

    def run_jobs(self) -> None:
        """What other threads have brought back is settled."""
        while not self._jobs.empty():
            self._jobs.get()()

    def settle(self, answer: Future[Any]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not answer.done():
            self._jobs.get(timeout=max(0.001, deadline - time.monotonic()))()

    def rank(self, *, ready: int = -1, **registered: Any) -> Client:
        """A rank in a process of its own."""
        client = self.scheduler(role=Role.RANK, **registered)
        client.ping(ready)
        return client

    def scheduler(self, **registered: Any) -> Client:
        mark = f"alive-{next(self._marks)}"
        self.living.add(mark)
        message = registration(alive=mark, **({"role": Role.SCHEDULER} | registered))
        answer: Registered = self.ask(message)
        return Client(self, mark, message, answer)

    def pass_s(self, seconds: float) -> None:
        """So much time passes, and the server looks around."""
        self.now_ns += int(seconds * 1e9)
        self.service.tick()

    @property
    def pools(self) -> list[Any]:
        return [place.pool for place in self.service.places.all()]

    def occupancy(self) -> tuple[int, int, int, int]:
        """(free, writing, ready, pins) over every pool."""
        found = [pool.report().occupancy for pool in self.pools]
        return tuple(sum(getattr(one, name) for one in found) for name in ("free", "writing", "ready", "pins"))  # type: ignore[return-value]

    def close(self) -> None:
        self.service.close(WAIT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Client:
    """One registered process of a `Bench`."""

    def __init__(self, bench: Bench, mark: str, message: Register, registered: Registered) -> None:
        self.bench = bench
        self.mark = mark
        self.rank = message.rank
        self.registered = registered
        self.session = registered.session
        self.space = space_of() if message.space is None else None

    def ping(self, ready: int = -1) -> Pong:
        return self.bench.ask(Ping(self.session, ready))

    def lookup(
        self, keys: Sequence[ChunkKey], first_wanted: int = 0, rank: int = EVERY_RANK, use_tiers: bool = True
    ) -> Found:
        last = keys[-1].num_tokens if keys else 0
        return self.bench.ask(Lookup(self.session, pack_prefixes(keys), last, first_wanted, rank, use_tiers))

    def retrieve(self, lease: int, rank: int | None = None) -> Retrieved:
        where = self.rank if rank is None else rank
        return self.bench.ask(Retrieve(self.session, lease, where, "r", (), 0, 0, -1, None, None, 0))

    def allocate(self, keys: Sequence[ChunkKey], first_chunk: int = 0, rank: int = EVERY_RANK) -> Stored:
        return self.bench.ask(allocation(self.session, keys, first_chunk, rank))

    def commit(self, lease: int, rank: int | None = None) -> Stored:
        where = self.rank if rank is None else rank
        return self.bench.ask(Store(self.session, Phase.COMMIT, lease, b"", 0, 0, b"", where, "", (), 0, 0, -1, None))

    def store(self, keys: Sequence[ChunkKey]) -> Stored:
        """Allocated and committed, one rank's engine."""
        stored = self.allocate(keys)
        if stored.lease:
            self.commit(stored.lease)
        return stored

    def release(self, lease: int, rank: int = EVERY_RANK) -> bool:
        return bool(self.bench.ask(Release(self.session, lease, rank)).held)

    def abort(self, lease: int, rank: int = EVERY_RANK) -> bool:
        answer: Ended = self.bench.ask(Abort(self.session, lease, rank))
        return answer.held

    def die(self) -> None:
        """kill -9; the server finds out at its next look."""
        self.bench.living.discard(self.mark)


def keys_of(*document: int, space: KeySpace | None = None) -> tuple[ChunkKey, ...]:
    """Keys of a document, one chunk a number, as an engine's scheduler makes them."""
    return chunk_keys(space or space_of(), tokens(*document))


@contextmanager
def refused(code: Code, says: str) -> Iterator[None]:
    """What is asked within is refused with this code, in words that match `says`."""
    with pytest.raises(RefusedError, match=says) as found:
        yield
    assert found.value.code is code


class ServerProcess:
    """A real `lamella serve`, with its log lines."""

    def __init__(self, folder: Path, *options: str, memory: str = "1MiB") -> None:
        self.folder = folder / "serve"
        self.log = folder / "serve.log"
        self.pids: list[int] = []
        folder.mkdir(exist_ok=True)
        command = ["serve", "--folder", str(self.folder), "--memory", memory, *options]
        if "--http" not in options:
            command += ["--http", "off"]
        self._command = [sys.executable, "-c", "from lamella.cli.main import main; main()", *command]
        self.start()

    def start(self) -> None:
        self._from = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)
        self.pids.append(self.process.pid)

    def memories(self) -> list[Path]:
        """Shared memory that the process, or one before it, has left under a name."""
        return [path for pid in self.pids for path in Path("/dev/shm").glob(f"lamella-{pid}-*")]

    def lines(self) -> list[dict[str, Any]]:
        """What it has logged since its last start."""
        text = self.log.read_bytes()[self._from :].decode()
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    def wait_serving(self) -> dict[str, Any]:
        """Its first line, once it serves."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            for line in self.lines():
                if line["message"] == "serving":
                    return line
            if self.process.poll() is not None:
                break
            time.sleep(0.01)
        raise AssertionError(f"the server did not start: {self.log.read_text()}")

    def kill(self) -> None:
        """kill -9, and its end."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(WAIT_S)

    def stop(self) -> int:
        """SIGTERM, and its exit code."""
        self.process.terminate()
        return self.process.wait(WAIT_S)


@contextmanager
def server_process(folder: Path, *options: str, memory: str = "1MiB") -> Iterator[ServerProcess]:
    """A server that serves, and is gone afterwards."""
    server = ServerProcess(folder, *options, memory=memory)
    try:
        server.wait_serving()
        yield server
    finally:
        if server.process.poll() is None:
            server.kill()


def connect(server: ServerProcess, message: Register | None = None, **others: Any) -> CacheSession:
    """A session with a bound that a busy machine keeps."""
    return CacheSession(server.folder, message or registration(), **({"timeout_s": 15.0} | others))


def figure(server: ServerProcess, name: str) -> float:
    """One of the figures that the server tells whoever asks."""
    with Connection(server.folder, timeout_s=15.0) as connection:
        return connection.call(Stats(), StatsReport).figures[name]
