"""Two ranks, one of each transfer side, and a server, each killed at any moment, against a model of what may be true.

The machine is seeded and not Hypothesis's: what can be done next depends on when processes answer, which a shrinker
cannot repeat. It plays the engines: it hands out blocks, looks up, retrieves, steps, aborts, preempts and uses request
ids again, while another's stores push objects out and leases run out. After every rule, whatever the processes do:

XFER-1  a retrieve that ended well left exactly its bytes, and blocks that nobody was given are as they were
XFER-2  objects of a retrieve in flight are not written over, however much is stored meanwhile
REL-1   a request is reported received once
REL-2   behind each wait of each step, every released retrieve holds the layer's bytes
SAFE-1  blocks whose end was reported are never written again
SAFE-2  ids, arrival slots and leases that are used again show nothing of their former use
SAFE-3  what could not be waited for is reported by block in the same step
SAFE-5  every command is answered within its bound; what is dead costs failures, never a hang; nothing stays behind
"""

from __future__ import annotations

import itertools
import os
import random
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lamella.server.connection import Connection, ServerLostError
from lamella.server.protocol import Stats, StatsReport, TransferSide
from rank_driver import CHUNK, ServerProcess
from rank_process import BLOCKS, BLOCKS_A_CHUNK, GRANTED, LAYERS, RankProcess
from waiting import wait_until

PROMPTS, MOST_CHUNKS = 3, 4
LEASE_S = 2
SIDES = (TransferSide.WORKER, TransferSide.SERVER)


class Fleet:
    """The processes, which outlive an example: only what was killed is started anew."""

    def __init__(self, fault: str = "") -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="lamella-fleet-")) / "s"
        self._fault = fault
        self.ranks: list[RankProcess] = []
        self.server = ServerProcess(self.folder, "--memory", "64KiB", "--lease", f"{LEASE_S}s")
        try:
            for side in SIDES:
                self.ranks.append(RankProcess(self.folder, side, fault))
        except BaseException:
            self.close()
            raise
        self.bases = itertools.count(1000, 1000)

    def restart_rank(self, index: int) -> None:
        self.ranks[index].kill()
        self.ranks[index] = RankProcess(self.folder, SIDES[index], self._fault)

    def restart_server(self) -> None:
        before = [rank.ask("state")["epoch"] for rank in self.ranks]
        self.server.kill()
        self.server.start()
        for rank, epoch in zip(self.ranks, before, strict=True):
            end = time.monotonic() + 20
            while rank.ask("state")["epoch"] <= epoch:
                assert time.monotonic() < end, "SAFE-5: not back after a restart"
                time.sleep(0.05)

    def figures(self) -> dict[str, float]:
        with Connection(self.folder, timeout_s=2) as connection:
            return connection.call(Stats(), StatsReport).figures

    def close(self) -> None:
        for rank in self.ranks:
            rank.stop()
        self.server.stop()


FLEETS: dict[str, Fleet] = {}


def _fleet(fault: str) -> Fleet:
    if fault not in FLEETS:
        FLEETS[fault] = Fleet(fault)
    return FLEETS[fault]


@dataclass
class Load:
    """A retrieve as the model knows it."""

    rank: int
    number: int
    request: str
    tokens: tuple[int, int]
    table: list[int]
    received: bool = False
    aborted: bool = False
    failed: bool = False
    expired: bool = False


@dataclass
class Engine:
    """One rank's blocks."""

    free: list[int] = field(default_factory=lambda: list(range(1, BLOCKS)))
    loads: dict[int, Load] = field(default_factory=dict)
    lookups: dict[int, tuple[tuple[int, int], int, float]] = field(default_factory=dict)


class Machine:
    """One run of some steps; every choice is the seed's."""

    def __init__(self, seed: int, fault: str = "") -> None:
        self.random = random.Random(seed)
        self.fleet = _fleet(fault)
        self.base = next(self.fleet.bases)
        self.engines = [Engine(), Engine()]
        self.stored = [0] * PROMPTS  # chunks that were ever stored, by anybody
        self.names = itertools.count()
        self.log: list[str] = []
        for rank in self.fleet.ranks:
            rank.ask("poison", table=list(range(BLOCKS)))

    def run(self, steps: int) -> None:
        """Raises AssertionError, with what was done, where something does not hold."""
        weights = {
            self.store: 3.0,
            self.fill_the_pool: 1.5,
            self.look_up: 2.0,
            self.retrieve: 8.0,
            self.grant: 8.0,
            self.poll: 4.0,
            self.abort: 1.0,
            self.step: 7.0,
            self.let_leases_run_out: 0.3,
            self.kill_a_rank: 0.3,
            self.kill_the_server: 0.3,
        }
        try:
            for _ in range(steps):
                (chosen,) = self.random.choices(list(weights), list(weights.values()))
                self.log.append(chosen.__name__)
                chosen()
                self.blocks_that_are_nobodys_are_as_they_were()
            self.log.append("rest")
            self.come_to_rest()
        except (AssertionError, TimeoutError, RuntimeError) as broken:
            raise AssertionError(f"{broken}; after: {', '.join(self.log)}") from broken

    def _index(self) -> int:
        return self.random.randrange(2)

    def _prompt(self) -> tuple[int, int]:
        return self.random.randrange(PROMPTS), self.random.randint(1, MOST_CHUNKS)

    def _tokens(self, prompt: int, chunks: int) -> tuple[int, int]:
        return self.base + 100 * prompt, chunks * CHUNK

    # ---- rules

    def store(self) -> None:
        self.store_prompt(self._index(), *self._prompt())

    def store_prompt(self, index: int, prompt: int, chunks: int) -> None:
        engine, rank = self.engines[index], self.fleet.ranks[index]
        if len(engine.free) < chunks * BLOCKS_A_CHUNK:
            return
        table = engine.free[: chunks * BLOCKS_A_CHUNK]
        answer = rank.ask("store", tokens=self._tokens(prompt, chunks), table=table)
        self.stored[prompt] = max(self.stored[prompt], chunks)
        self._take_in(index, answer["report"])

    def fill_the_pool(self) -> None:
        """Others' objects push out what is not held."""
        self.store_others(self._index(), self.random.randint(1, 3))

    def store_others(self, index: int, count: int) -> None:
        for _ in range(count):
            table = self.engines[index].free[: 4 * BLOCKS_A_CHUNK]
            if len(table) < 4 * BLOCKS_A_CHUNK:
                return
            other = next(self.fleet.bases)
            answer = self.fleet.ranks[index].ask("store", tokens=(other, 4 * CHUNK), table=table)
            self._take_in(index, answer["report"])

    def look_up(self) -> None:
        self.look_up_prompt(self._index(), *self._prompt())

    def look_up_prompt(self, index: int, prompt: int, chunks: int) -> None:
        engine, name = self.engines[index], next(self.names)
        tokens = self._tokens(prompt, chunks)
        found = self.fleet.ranks[index].ask("lookup", number=name, tokens=tokens)
        assert found <= min(chunks, self.stored[prompt]), "a hit on what nobody stored"
        engine.lookups[name] = ((tokens[0], found * CHUNK), found, time.monotonic())

    def retrieve(self) -> None:
        open_lookups = [(index, name) for index, engine in enumerate(self.engines) for name in engine.lookups]
        if not open_lookups:
            self.look_up()
            return
        self.retrieve_looked_up(*self.random.choice(open_lookups), f"r{self.random.randrange(3)}")

    def retrieve_looked_up(self, index: int, name: int, request: str) -> None:
        engine, rank = self.engines[index], self.fleet.ranks[index]
        tokens, found, since = engine.lookups.pop(name)
        busy = {load.request for load in engine.loads.values()}
        size = found * BLOCKS_A_CHUNK
        if not found or request in busy or len(engine.free) < size:
            rank.ask("give_back", number=name)
            return
        table, engine.free = engine.free[:size], engine.free[size:]
        expired = time.monotonic() - since > LEASE_S + 0.6  # the server looks four times a second
        number = rank.ask("retrieve", number=name, request=request, table=table, num_chunks=found)
        engine.loads[number] = Load(index, number, request, tokens, table, expired=expired)

    def let_leases_run_out(self) -> None:
        if not any(engine.lookups for engine in self.engines):
            return
        time.sleep(LEASE_S + 0.7)

    def grant(self) -> None:
        self.fleet.ranks[self._index()].ask("grant", windows=self.random.choice((1, 2, 3, 5)))
        self.poll()

    def poll(self) -> None:
        self.poll_rank(self._index())

    def poll_rank(self, index: int) -> None:
        self._take_in(index, self.fleet.ranks[index].ask("poll"))

    def abort(self) -> None:
        """Abort, or preemption: the request's blocks stay its own until the end is reported."""
        loads = [load for engine in self.engines for load in engine.loads.values()]
        if not loads:
            return
        load = self.random.choice(loads)
        self.fleet.ranks[load.rank].ask("abort", number=load.number)
        load.aborted = True

    def step(self) -> None:
        self.step_rank(self._index(), self.random.random() < 0.6)

    def step_rank(self, index: int, frozen: bool) -> None:
        engine, rank = self.engines[index], self.fleet.ranks[index]
        if not frozen:
            rank.ask("grant", windows=GRANTED)
        readable = [load for load in engine.loads.values() if load.received and not load.aborted]
        loads = [{"number": load.number, "tokens": load.tokens, "table": load.table} for load in readable]
        held = sorted({block for load in readable for block in load.table})
        answer = rank.ask("step", held=held, loads=loads)
        errors = set(answer["errors"])
        for load in readable:
            if load.number in answer["wrong"] or load.failed:
                assert set(load.table) <= errors, f"REL-2, SAFE-3: {load} was read before it landed: {answer}"
                load.failed = True
            elif errors & set(load.table):
                load.failed = True
        self._take_in(index, answer["report"])

    def kill_a_rank(self) -> None:
        index = self._index()
        pid = self.fleet.ranks[index].pid
        self.fleet.restart_rank(index)
        self.engines[index] = Engine()
        end = time.monotonic() + 6
        while any(f"-{pid}-" in name for name in os.listdir("/dev/shm")):
            assert time.monotonic() < end, "SAFE-5: a killed rank's shared memory stays"
            time.sleep(0.05)

    def kill_the_server(self) -> None:
        self.fleet.restart_server()
        self.stored = [0] * PROMPTS
        for engine in self.engines:
            for load in engine.loads.values():
                load.expired = False  # it may end either way: its own engine's copy goes on
            engine.lookups = {name: (tokens, found, -1e9) for name, (tokens, found, _) in engine.lookups.items()}

    # ---- what must hold

    def _take_in(self, index: int, report: Any) -> None:
        engine, rank = self.engines[index], self.fleet.ranks[index]
        by_request = {load.request: load for load in engine.loads.values()}
        for request in report["received"]:
            assert request in by_request, f"REL-1: {request} was reported again, or was nobody"
            load = by_request[request]
            assert not load.received, f"REL-1: {load} was reported twice"
            load.received = True
            load.failed = load.failed or request in report["failed"]
        for number, ok in report["loads"].items():
            load = engine.loads.pop(int(number))
            assert load.received, f"REL-1: {load} ended and nobody was told"
            if ok and not load.aborted:
                assert not load.expired, f"SRV-6: {load} had lost its lease"
                assert rank.ask("right", tokens=load.tokens, table=load.table) == list(range(LAYERS)), f"XFER-1: {load}"
            rank.ask("poison", table=load.table)
            engine.free = load.table + engine.free  # used again at once
            rank.ask("rewrite", blocks=load.table)

    def blocks_that_are_nobodys_are_as_they_were(self) -> None:
        for engine, rank in zip(self.engines, self.fleet.ranks, strict=True):
            assert rank.ask("poisoned", table=engine.free), "SAFE-1, XFER-1: a block that is nobody's was written"

    def come_to_rest(self) -> None:
        """Everything comes to rest, and nothing is held: no slot, no lease, no part."""
        for index, (engine, rank) in enumerate(zip(self.engines, self.fleet.ranks, strict=True)):
            rank.ask("grant", windows=GRANTED)
            for name in engine.lookups:
                rank.ask("give_back", number=name)
            end = time.monotonic() + 8
            while engine.loads:
                assert time.monotonic() < end, f"SAFE-5: {engine.loads} never ended"
                self._take_in(index, rank.ask("poll"))
            wait_until(lambda rank=rank: rank.ask("state")["free"] == 3, "SAFE-5: no arrival slot is lost", 2)
            state = rank.ask("state")
            assert (state["open"], state["side"]) == (0, SIDES[index].value)
            self.blocks_that_are_nobodys_are_as_they_were()
        end = time.monotonic() + 1.5  # less than a lease: nothing may be left for its clock to end
        while held := self._held():
            assert time.monotonic() < end, f"SRV-2: {held}"
            time.sleep(0.05)

    def _held(self) -> dict[str, float]:
        try:
            figures = self.fleet.figures()
        except ServerLostError:
            return {"no answer": 1}
        return {name: value for name, value in figures.items() if value and name.startswith("lamella_server_parts{")}
