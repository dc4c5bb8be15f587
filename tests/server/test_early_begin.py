"""A retrieve begins as soon as it is ordered: what is done before it, beside it and after it, and in which order."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from engine_driver import ENGINE_MISSING
from lamella.cuda_ext.engine import TransferEngine
from lamella.cuda_ext.transfer import Transfer
from lamella.reference.plan import Direction
from lamella.server.cache_mover import CacheMover
from lamella.server.connection import Connection, ServerLostError
from lamella.server.endpoint import make_folder
from lamella.server.moves import Line
from lamella.server.protocol import Message, Release, Retrieve, Stats, StatsReport, TransferSide
from lamella.server.rank import RankOfEngine, Report
from lamella.server.worker import Worker
from rank_driver import BOTH_SIDES, HERE, THERE, RankMemory, ServerProcess, engine_of, join, keys_of, load, store, until
from waiting import wait_until

pytestmark = pytest.mark.skipif(ENGINE_MISSING is not None, reason=str(ENGINE_MISSING))

WAIT_S = 20.0


def _windows(worker: Worker) -> int:
    return engine_of(worker).lane(Direction.RETRIEVE).windows


def _parts(worker: Worker) -> float:
    figures = worker.session.stats().figures
    return sum(value for name, value in figures.items() if name.startswith("lamella_server_parts"))


def test_a_release_never_overtakes_its_retrieve(
    server: ServerProcess, memory: RankMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SRV-6: the server knows nothing any more of a lease that was let go of; here the copy ends before it is named."""
    said: list[type[Message]] = []
    ask, submit = Line.ask, TransferEngine.submit

    def heard(self: Line, message: Message) -> Future[Any]:
        said.append(type(message))
        return ask(self, message)

    def until_drained(self: TransferEngine, *args: Any, **options: Any) -> Transfer:
        drained, done = options.get("on_drained"), threading.Event()
        if drained is not None:
            options["on_drained"] = lambda: (drained(), done.set())
        transfer = submit(self, *args, **options)
        assert drained is None or done.wait(WAIT_S)
        return transfer

    with join(server.folder, memory) as worker:
        keys = keys_of(memory, range(64))
        store(worker, memory, keys, HERE)
        memory.poison()
        monkeypatch.setattr(Line, "ask", heard)
        monkeypatch.setattr(TransferEngine, "submit", until_drained)
        number, _locked = load(worker, keys, THERE)
        reports = until(worker, lambda report: number in report.loads)
        assert reports[-1].loads[number].ok
        assert said == [Retrieve, Release]
        assert memory.right_layers(keys, THERE) == list(range(32))


def test_a_retrieve_that_cannot_be_ordered_gives_its_lock_back(
    server: ServerProcess, memory: RankMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = TransferEngine.submit

    def refuse(self: TransferEngine, *args: Any, **options: Any) -> Transfer:
        if not args[4]:  # tokens: what a lookup sends ahead
            return submit(self, *args, **options)
        raise ValueError("these blocks cannot be")

    with join(server.folder, memory) as worker:
        keys = keys_of(memory, range(64))
        store(worker, memory, keys, HERE)
        monkeypatch.setattr(TransferEngine, "submit", refuse)
        number, _locked = load(worker, keys, THERE)
        reports = until(worker, lambda report: number in report.loads)
        assert not reports[-1].loads[number].ok
        wait_until(lambda: worker.arrivals.num_free == 64, "its slot is free")
        wait_until(lambda: _parts(worker) == 0, "the server holds nothing for it")


def test_a_lookup_walks_the_way_of_a_load_once_and_only_where_nothing_is_loaded(
    server: ServerProcess, memory: RankMemory
) -> None:
    paced = {"paced": True, "window_bytes": 2048, "staging_bytes": 8192, "in_flight_bytes": 4096}
    with join(server.folder, memory, engine_options=paced) as worker:
        keys = keys_of(memory, range(64))
        before = _windows(worker)
        assert worker.lookup(keys).num_chunks == 0
        wait_until(lambda: _windows(worker) == before + 1, "one window without a byte")
        engine_of(worker).grant(Direction.STORE, 1 << 20)
        store(worker, memory, keys, HERE)
        memory.poison()
        number, _locked = load(worker, keys, THERE)
        engine_of(worker).grant(Direction.RETRIEVE, 4)  # two lookups, and a first slice of two windows
        until(worker, lambda report: "r" in report.received)
        worker.give_back(worker.lookup(keys))
        assert engine_of(worker).lane(Direction.RETRIEVE).live_transfers == 1, "a load is under way: nothing is cold"
        engine_of(worker).grant(Direction.RETRIEVE, 1 << 20)
        until(worker, lambda report: number in report.loads)
        assert memory.right_layers(keys, THERE) == list(range(32))
        assert memory.is_poisoned_outside(THERE)


def test_what_a_lookup_sends_ahead_holds_nothing_and_the_server_hears_nothing_of_it(
    server: ServerProcess, memory: RankMemory
) -> None:
    with join(server.folder, memory, num_arrival_slots=1) as worker:
        before, side = _windows(worker), worker.mover._worker_side
        assert side is not None
        attached = side._attached
        assert attached is not None
        taken: list[int] = []
        take = worker.arrivals.take
        worker.arrivals.take = lambda: (taken.append(1), take())[1]  # type: ignore[method-assign]
        worker.lookup(keys_of(memory, range(64)))
        wait_until(lambda: _windows(worker) == before + 1, "one window without a byte")
        wait_until(lambda: attached.users == 0, "the slots are let go of")
        assert not taken, "a load that follows at once finds the only arrival slot free"
        assert worker.poll() == Report()
        assert worker.loads.num_open == worker.mover.line._connection.num_open == 0
        figures = worker.session.stats().figures
        asked = {name for name, count in figures.items() if "requests" in name and count}
        assert not [name for name in asked if "retrieve" in name.lower() or "release" in name.lower()], asked
        assert [name for name in asked if "lookup" in name.lower()], asked
        assert not [name for name, count in figures.items() if "refusals" in name and count]


def test_a_lookup_of_a_worker_whose_engine_has_stopped_is_answered(server: ServerProcess, memory: RankMemory) -> None:
    with join(server.folder, memory) as worker:
        keys = keys_of(memory, range(64))
        store(worker, memory, keys, HERE)
        engine_of(worker).close()
        found = worker.lookup(keys)
        assert found.num_chunks == len(keys)
        worker.give_back(found)


def test_a_mover_that_is_closed_or_moving_is_not_roused(memory: RankMemory) -> None:
    from lamella.cuda_ext.peer_memory import export_caches

    caches = memory.caches
    mover = CacheMover(
        export_caches("cpu", caches.engines, caches.shared), caches.layout, allow_kernels=True
    )  # without kernels only runs that match the blocks
    before = mover.engine.lane(Direction.RETRIEVE).windows
    mover.rouse()
    wait_until(lambda: mover.engine.lane(Direction.RETRIEVE).windows == before + 1, "one window without a byte")
    mover._moves.add(mover._move_nothing())
    wait_until(lambda: mover.engine.lane(Direction.RETRIEVE).windows == before + 2, "that one too")
    mover.rouse()
    time.sleep(0.05)
    assert mover.engine.lane(Direction.RETRIEVE).windows == before + 2
    mover.close()
    mover.rouse()


@pytest.mark.parametrize("side", BOTH_SIDES, ids=lambda side: side.value)
def test_a_rank_that_finds_no_server_leaves_nothing_behind(
    memory: RankMemory, side: TransferSide, tmp_path: Path
) -> None:
    """An engine may try until one is there; each try held a board, its file and its descriptors for good."""

    def held() -> list[str]:
        names = sorted(str(one) for one in Path("/dev/shm").glob(f"lamella-{os.getpid()}-*"))
        for one in os.listdir("/proc/self/fd"):
            with suppress(FileNotFoundError):  # the listing's own
                names.append(os.readlink(f"/proc/self/fd/{one}"))
        return sorted(name for name in names if name.startswith("/dev/shm/lamella-"))

    before = held()
    empty = tmp_path / "empty"
    make_folder(empty)
    for folder, refused in ((tmp_path / "none", OSError), (empty, ServerLostError)):
        with pytest.raises(refused):
            Worker(folder, RankOfEngine("alone", memory.space), memory.caches, call_timeout_s=0.1, transfer_side=side)
        assert held() == before


def test_what_is_to_be_done_meanwhile_is_done_while_the_answer_is_on_its_way(server: ServerProcess) -> None:
    wait_until(lambda: (server.folder / "server.sock").exists(), "it serves")
    with Connection(server.folder) as connection:
        open_then: list[int] = []
        connection.call(Stats(), StatsReport, meanwhile=lambda: open_then.append(connection.num_open))
        assert open_then == [1]
        assert connection.num_open == 0


def test_a_connection_to_nobody_says_so_within_its_bound(tmp_path: Path) -> None:
    make_folder(tmp_path / "s")
    with Connection(tmp_path / "s", timeout_s=0.3) as connection:
        began = time.monotonic()
        with pytest.raises(ServerLostError, match="no server answers there"):
            connection.call(Stats(), StatsReport)
        assert 0.25 < time.monotonic() - began < 5.0
