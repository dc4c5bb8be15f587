"""Load on a cache server, with clients killed in the middle, and a count of what is left of it.

    python benchmarks/cache_server_load.py [--retrieves 10000] [--clients 8] [--kill-every 500] [--json FILE]

Each client is a process that stores and retrieves documents it has not stored itself, copies its slots out by hand and
compares every byte; one retrieve in a hundred is aborted. Every so many retrieves one client is killed (SIGKILL), and
another takes its place. In the end nothing may be locked, written or left behind, and the server's memory is what it
was after its first tenth.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import lamella

sys.path.insert(0, str(Path(__file__).parent))

from result_file import write_json

from lamella.cuda_ext.registration import NoRegistrar
from lamella.cuda_ext.slots import SlotMemory
from lamella.reference.geometry import KVGeometry, ObjectForm
from lamella.reference.keys import ChunkKey, KeySpace, chunk_keys
from lamella.reference.layout import ObjectLayout
from lamella.server.client import CacheSession, Epoch
from lamella.server.connection import Connection, ServerLostError
from lamella.server.frames import RefusedError
from lamella.server.protocol import Found, Register, Role, Stats, StatsReport, TransferSide
from lamella.server.shapes import send_groups, send_space
from lamella.server.wire import Code

CHUNK, NUM_SLOTS, NUM_DOCUMENTS, MAX_CHUNKS = 16, 48, 40, 6
LAYOUT = ObjectLayout.single(KVGeometry(4, 2, 2, 16, 2, CHUNK), CHUNK)
SPACE = KeySpace("load", "bfloat16", ObjectForm.TOKEN, "THD", CHUNK, 0, 1, (0, 4))


def keys_of_document(number: int) -> tuple[ChunkKey, ...]:
    """1 .. MAX_CHUNKS chunks; documents begin alike in twos."""
    length = 1 + number % MAX_CHUNKS
    return chunk_keys(SPACE, [number // 2 + chunk for chunk in range(length) for _token in range(CHUNK)])


def content(key: ChunkKey) -> np.ndarray[Any, np.dtype[np.uint8]]:
    seed = int.from_bytes(key.prefix[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, LAYOUT.object_bytes, np.uint8)


# ---- a client


def client(folder: Path, name: str, seed: int, timeout_s: float) -> None:
    """Runs until it is killed; says one line a retrieve."""
    chance = random.Random(seed)
    space, groups = send_space(SPACE), send_groups(LAYOUT)
    bytes_a_chunk = LAYOUT.object_bytes
    message = Register(
        *(lamella.__version__, name, Role.RANK, 0, 1, space, groups, bytes_a_chunk),
        *(TransferSide.WORKER, "", (), (), None, ""),
    )
    attached: list[tuple[Epoch, SlotMemory]] = []

    def attach(epoch: Epoch) -> None:
        assert epoch.shared is not None, "a rank has memory"
        attached.append((epoch, SlotMemory.attach(epoch.shared, NoRegistrar())))

    session: CacheSession | None = None
    while session is None:
        try:
            session = CacheSession(folder, message, timeout_s=timeout_s, on_epoch=attach)
        except ServerLostError:  # it is being started anew
            continue
    while True:
        keys = keys_of_document(chance.randrange(NUM_DOCUMENTS))
        epoch, memory = attached[-1]
        try:
            found = session.lookup(keys, epoch=epoch)
            if found.num_chunks == len(keys):
                print(retrieve(session, memory, keys, found, chance), flush=True)
                continue
            session.release(found.lease)
            store(session, memory, keys, epoch)
        except ServerLostError:
            print("lost", flush=True)
            time.sleep(0.05)
        except RefusedError as refused:
            if refused.code not in (Code.UNKNOWN_LEASE, Code.DRAINING):
                raise
            print("lost", flush=True)


def store(session: CacheSession, memory: SlotMemory, keys: tuple[ChunkKey, ...], epoch: Epoch) -> None:
    stored = session.allocate(keys, epoch=epoch)
    if not stored.lease:
        return
    (place,) = stored.places
    for chunk, slot in zip(place.chunks, place.slots, strict=True):
        with memory.buffer(slot) as view:
            view[:] = content(keys[chunk]).tobytes()
    session.commit(stored.lease, 0)


def retrieve(
    session: CacheSession, memory: SlotMemory, keys: tuple[ChunkKey, ...], found: Found, chance: random.Random
) -> str:
    answer = session.retrieve(found.lease, 0)
    if chance.random() < 0.01:
        session.abort(found.lease, 0)
        return "aborted"
    for key, slot in zip(keys, answer.slots, strict=True):
        with memory.buffer(slot) as view:
            if not np.array_equal(np.frombuffer(view, np.uint8), content(key)):
                return "wrong"
    held = session.release(found.lease, 0)
    return "right" if held or session.is_lost else "wrong: its lease had ended"


# ---- the others


class Clients:
    """So many client processes, whose lines are counted."""

    def __init__(self, folder: Path, count: int, timeout_s: float) -> None:
        self._folder = folder
        self._timeout_s = timeout_s
        self._started = 0
        self._rest: dict[int, bytes] = {}  # of lines that have not come whole
        self.outcomes: dict[str, int] = {}
        self._processes = [self._start() for _ in range(count)]

    def _start(self) -> subprocess.Popen[bytes]:
        self._started += 1
        command = [sys.executable, __file__, "--client", str(self._folder), str(self._started), str(self._timeout_s)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        return process

    def look(self) -> int:
        """Retrieves so far, those without a server apart."""
        for process in self._processes:
            assert process.stdout is not None
            *lines, rest = (self._rest.get(process.pid, b"") + (process.stdout.read() or b"")).split(b"\n")
            self._rest[process.pid] = rest
            for line in lines:
                self.outcomes[line.decode()] = self.outcomes.get(line.decode(), 0) + 1
            if process.poll() is not None:
                raise RuntimeError(f"a client ended by itself with {process.returncode}")
        return sum(count for outcome, count in self.outcomes.items() if outcome != "lost")

    def kill_one(self, chance: random.Random) -> None:
        at = chance.randrange(len(self._processes))
        self._kill(self._processes[at])
        self._processes[at] = self._start()

    def kill_all(self) -> None:
        for process in self._processes:
            self._kill(process)

    @staticmethod
    def _kill(process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()


def resident_kib(pid: int) -> int:
    """Of the process's own: what it shares with others, the pool, is apart."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0])


def start_server(folder: Path) -> subprocess.Popen[bytes]:
    memory = f"{NUM_SLOTS * LAYOUT.object_bytes}B"
    options = ["--folder", str(folder), "--memory", memory, "--http", "off", "--log-level", "error"]
    return subprocess.Popen([sys.executable, "-c", "from lamella.cli.main import main; main()", "serve", *options])


def run(
    folder: Path, retrieves: int, num_clients: int, kill_every: int, seed: int, kill_server_every: int = 0
) -> dict[str, Any]:
    """What happened and what is left. 0: the server is left alone."""
    server = start_server(folder)
    chance = random.Random(seed)
    killed, servers, resident_early = 0, 1, 0
    began = time.monotonic()
    try:
        while not (folder / "server.sock").exists():
            time.sleep(0.01)
        clients = Clients(folder, num_clients, 3.0 if kill_server_every else 30.0)
        try:
            while (done := clients.look()) < retrieves:
                if done >= retrieves // 10 and not resident_early:
                    resident_early = resident_kib(server.pid)
                if done >= kill_every * (killed + 1):
                    clients.kill_one(chance)
                    killed += 1
                if kill_server_every and done >= kill_server_every * servers:
                    server.kill()
                    server.wait()
                    server = start_server(folder)
                    servers += 1
                time.sleep(0.005)
        finally:
            clients.kill_all()
        seconds = time.monotonic() - began
        figures = settled(folder)
        place = "place=load rank 0 of 1 layers 0-3"
        return {
            "outcomes": clients.outcomes,
            "killed": killed + num_clients,
            "servers": servers,
            "seconds": round(seconds, 1),
            "evicted_objects": figures["lamella_server_evicted_objects_total"],
            "reaped_sessions": figures["lamella_server_reaped_sessions_total"],
            "reaped_parts": figures["lamella_server_reaped_parts_total"],
            "sessions_left": figures["lamella_server_sessions"],
            "pinned_left": figures[f"lamella_server_slots{{{place},state=pinned}}"],
            "writing_left": figures[f"lamella_server_slots{{{place},state=writing}}"],
            "slots": sum(figures[f"lamella_server_slots{{{place},state={state}}}"] for state in ("free", "ready")),
            "marks_left": len(list(folder.glob("alive-*"))),
            "resident_kib_early": resident_early,
            "resident_kib_end": resident_kib(server.pid),
            "memories": len(list(Path("/dev/shm").glob(f"lamella-{server.pid}-*"))),
        }
    finally:
        server.terminate()
        server.wait(60)


def settled(folder: Path) -> dict[str, float]:
    """The figures once the last client's end was noticed and its grace time is over."""
    deadline = time.monotonic() + 30.0
    with Connection(folder, timeout_s=30.0) as connection:
        while True:
            figures = connection.call(Stats(), StatsReport).figures
            open_parts = sum(count for name, count in figures.items() if name.startswith("lamella_server_parts{"))
            left = figures["lamella_server_sessions"] + open_parts + len(list(folder.glob("alive-*")))
            if left == 0 or time.monotonic() > deadline:
                return figures
            time.sleep(0.1)


def main() -> None:
    if sys.argv[1:2] == ["--client"]:
        client(Path(sys.argv[2]), f"client {sys.argv[3]}", int(sys.argv[3]), float(sys.argv[4]))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--retrieves", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--kill-every", type=int, default=500)
    parser.add_argument("--kill-server-every", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        report = run(
            Path(made) / "serve",
            chosen.retrieves,
            chosen.clients,
            chosen.kill_every,
            chosen.seed,
            chosen.kill_server_every,
        )
    for name, value in report.items():
        print(f"{name:20s} {value}")
    if chosen.json is not None:
        write_json(chosen.json, report)


if __name__ == "__main__":
    main()
