"""A rank in a process of its own, told what to do line by line so that it can be killed; and faults for it."""

from __future__ import annotations

import json
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from lamella.connector.safety_rules import ALL_RULES
from lamella.cuda_ext import arrival_board
from lamella.reference.plan import Direction
from lamella.server import moves, worker_side
from lamella.server.arriving import BoardTransfer, GrantedTransfer
from lamella.server.connection import ServerLostError
from lamella.server.protocol import Release, TransferSide
from lamella.server.rank import Report
from lamella.server.worker import Worker
from rank_driver import BLOCK, CHUNK, RankMemory, join, keys_of

BOUND_S = 8.0
"""Every command is answered within this (SAFE-5); a rank's own bounds are far below."""

LAYERS, BLOCKS = 4, 96
GRANTED = 10**6


class RankProcess:
    """The parent's end."""

    def __init__(self, folder: Path, side: TransferSide, fault: str = "") -> None:
        command = [sys.executable, str(Path(__file__)), str(folder), side.value, fault]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.pid = self._child.pid
        try:
            self.ask("state", bound_s=30)
        except BaseException:
            self.kill()
            raise

    def ask(self, do: str, bound_s: float = BOUND_S, **arguments: Any) -> Any:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._child.stdin.flush()
        with selectors.PollSelector() as selector:  # `select` refuses descriptors from 1024 on
            selector.register(self._child.stdout, selectors.EVENT_READ)
            ready = selector.select(bound_s)
        if not ready:
            raise TimeoutError(f"SAFE-5: {do} {arguments} was not answered within {bound_s} s")
        answer = json.loads(self._child.stdout.readline() or '{"died": true}')
        if "error" in answer or "died" in answer:
            raise RuntimeError(f"{do} {arguments}: {answer}")
        return answer["is"]

    def kill(self) -> None:
        self._child.send_signal(signal.SIGKILL)
        self._child.wait(10)
        self._close()

    def stop(self) -> None:
        if self._child.poll() is None:
            assert self._child.stdin is not None
            self._child.stdin.close()
            try:
                self._child.wait(20)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait(10)
        self._close()

    def _close(self) -> None:
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()


class Rank:
    """The child's end: each method is a command."""

    def __init__(self, folder: Path, side: TransferSide, fault: str) -> None:
        self.memory = RankMemory(num_layers=LAYERS, num_blocks=BLOCKS)
        self.paced = side is TransferSide.WORKER
        options: dict[str, Any] = {"window_bytes": 512, "staging_bytes": 2048, "in_flight_bytes": 1024}
        rules = ALL_RULES
        if fault == "no_wait":
            rules = replace(ALL_RULES, wait_for_released=False)
        if fault == "errors_forgotten":
            rules = replace(ALL_RULES, report_in_same_step=False)
        bound_s = 60.0 if fault == "no_bound" else 0.3
        self.worker = join(
            folder,
            self.memory,
            transfer_side=side,
            engine=f"engine-{side.value}",
            num_arrival_slots=3,
            wait_timeout_s=bound_s,
            load_timeout_s=60.0 if fault == "no_bound" else 4.0,
            call_timeout_s=0.5,
            rules=rules,
            engine_options=options | {"paced": self.paced},
        )
        plant(fault, self.worker)
        self.locked: dict[int, Any] = {}
        if self.paced:
            assert self.worker.engine is not None
            self.worker.engine.grant(Direction.STORE, GRANTED)

    def _keys(self, tokens: tuple[int, int]) -> Any:
        return keys_of(self.memory, range(tokens[0], tokens[0] + tokens[1]))

    def state(self) -> Any:
        worker = self.worker
        return {
            "free": worker.arrivals.num_free,
            "open": worker.num_open,
            "epoch": worker.session.epoch.number if worker.is_connected else 0,
            "side": worker.transfer_side.value,
        }

    def store(self, tokens: tuple[int, int], table: list[int]) -> Any:
        """What became of it: kept, none (no room, nothing new, no server), failed."""
        keys = self._keys(tokens)
        self.memory.fill(keys, table)
        numbers = set(self.worker.store("store", keys, (tuple(table),)))
        self.worker.begin_step(num_tokens=1)
        for layer in range(LAYERS):
            self.worker.layer_computed(layer)
        self.worker.step_computed()
        done: dict[int, bool] = {}
        end = time.monotonic() + 4
        early = Report()
        while not numbers <= set(done) and time.monotonic() < end:
            report = self.worker.poll()
            done.update(report.readable)
            early.received |= report.received
            early.failed |= report.failed
            early.loads.update(report.loads)
            time.sleep(0.0005)
        self._poison(table)
        kept = "none" if not numbers else "kept" if all(done.get(n) for n in numbers) else "failed"
        return {"kept": kept, "report": _report(early)}

    def lookup(self, number: int, tokens: tuple[int, int]) -> Any:
        locked = self.worker.lookup(self._keys(tokens))
        self.locked[number] = locked
        return locked.num_chunks

    def give_back(self, number: int, keep: bool = False) -> Any:
        self.worker.give_back(self.locked[number] if keep else self.locked.pop(number))

    def retrieve(self, number: int, request: str, table: list[int], num_chunks: int) -> Any:
        return self.worker.retrieve(request, self.locked.pop(number), (tuple(table),), num_chunks * CHUNK)

    def grant(self, windows: int) -> Any:
        """So many windows may move, `GRANTED`: all there are; one by one, so that none is left for a later load."""
        if not self.paced:
            return
        engine = self.worker.engine
        assert engine is not None
        for _ in range(min(windows, 500)):
            if not engine.lane(Direction.RETRIEVE).live_transfers:
                return
            engine.grant(Direction.RETRIEVE, 1)
            time.sleep(0.0005)

    def abort(self, number: int) -> Any:
        self.worker.abort(number)

    def poll(self) -> Any:
        return _report(self.worker.poll())

    def step(self, held: list[int], loads: list[dict[str, Any]]) -> Any:
        """Which loads had a layer that was not right behind its wait, and which blocks the step reported."""
        self.worker.begin_step(num_tokens=1, held_blocks=frozenset(held))
        wrong: set[int] = set()
        for layer in range(LAYERS):
            self.worker.wait_layer(layer)
            for load in loads:
                if layer not in self.memory.right_layers(self._keys(load["tokens"]), load["table"]):
                    wrong.add(load["number"])
        self.worker.step_computed()
        report = _report(self.worker.poll())
        return {"wrong": sorted(wrong), "errors": sorted(self.worker.errors()), "report": report}

    def rewrite(self, blocks: list[int]) -> Any:
        self.worker.begin_step(num_tokens=1, rewritten_blocks=frozenset(blocks))
        return _report(self.worker.poll())

    def right(self, tokens: tuple[int, int], table: list[int]) -> Any:
        return self.memory.right_layers(self._keys(tokens), table)

    def poison(self, table: list[int]) -> Any:
        self._poison(table)

    def poisoned(self, table: list[int]) -> Any:
        return bool((self.memory.cache[:, :, table] == 0xA5A5).all())

    def _poison(self, table: list[int]) -> None:
        self.memory.cache[:, :, list(table)] = 0xA5A5


def plant(fault: str, worker: Worker) -> None:
    """One thing done wrong."""
    if fault == "reported_twice":
        poll, seen = worker.loads.poll, set[str]()

        def again() -> Any:
            polled = poll()
            polled.received |= {request for request in seen if request not in polled.received}
            seen.clear()
            seen.update(polled.received)
            return polled

        worker.loads.poll = again  # type: ignore[method-assign]
    elif fault == "ended_before_drained":
        cancel = worker.loads.cancel

        def cancel_and_forget(number: int) -> None:
            load = worker.loads.find(number)
            cancel(number)
            if load is not None:
                load.landed = True

        worker.loads.cancel = cancel_and_forget  # type: ignore[method-assign]
    elif fault == "generation_ignored":
        arrival_board._of = lambda word, generation: word & 0xFFFFFFFF
    elif fault == "unlocked_at_once":
        load_on = worker_side.WorkerSide._load

        def unlock(self: Any, order: Any, event: Any, tell: Any, *rest: Any) -> Any:
            found = load_on(self, order, event, tell, *rest)
            tell(Release(self._moves.line.session, order.lease, self._moves.rank))
            return found

        worker_side.WorkerSide._load = unlock  # type: ignore[method-assign]
    elif fault == "refusal_ignored":
        GrantedTransfer._granted = lambda self: True  # type: ignore[method-assign]
    elif fault == "slot_leaked":
        moves.Moves.give = lambda self, slot: None  # type: ignore[method-assign]
    elif fault == "lease_leaked":
        ask = moves.Line.ask
        moves.Line.ask = lambda self, message: (  # type: ignore[method-assign]
            ask(self, message) if not isinstance(message, Release) else _nothing()
        )
    elif fault == "landed_when_recorded":
        read = arrival_board.LayerArrivalBoard.read
        arrival_board.LayerArrivalBoard.read = lambda self, entry, generation: (  # type: ignore[method-assign]
            lambda seen: seen._replace(landed=LAYERS, recorded=LAYERS)
        )(read(self, entry, generation))
        BoardTransfer.wait_layer = lambda self, *_: 0  # type: ignore[method-assign]


def _nothing() -> Any:
    from concurrent.futures import Future

    return Future()


def _report(report: Report) -> Any:
    return {
        "received": sorted(report.received),
        "failed": sorted(report.failed),
        "loads": {str(number): end.ok for number, end in report.loads.items()},
    }


def main(folder: Path, side: TransferSide, fault: str) -> None:
    rank = Rank(folder, side, fault)
    for line in sys.stdin:
        asked = json.loads(line)
        do: Callable[..., Any] = getattr(rank, asked.pop("do"))
        try:
            answer = {"is": do(**asked)}
        except (ServerLostError, RuntimeError, ValueError, KeyError) as error:
            answer = {"error": repr(error)}
        print(json.dumps(answer), flush=True)
    rank.grant(GRANTED)
    rank.worker.close()
    rank.memory.close()


BLOCKS_A_CHUNK = CHUNK // BLOCK

if __name__ == "__main__":
    main(Path(sys.argv[1]), TransferSide(sys.argv[2]), sys.argv[3])
