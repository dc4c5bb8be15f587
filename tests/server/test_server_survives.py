"""What one peer, or a moment, must not cost the others: an answer too large for a frame, a registration that takes long
or comes twice, a watcher's look at the lock, a keeping thread that meets an error nobody thought of."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lamella.cuda_ext.registration import NoRegistrar
from lamella.server import frames, lending
from lamella.server.client import Epoch
from lamella.server.connection import Connection
from lamella.server.endpoint import LOCK, ServerLock, make_folder
from lamella.server.frames import RefusedError
from lamella.server.loop import CacheServer
from lamella.server.mover import Movement
from lamella.server.protocol import Stats, StatsReport, TransferSide
from lamella.server.settings import ServerSettings
from lamella.server.wire import Code
from server_driver import WAIT_S, Bench, Client, ServerProcess, connect, keys_of, refused, registration, space_of
from waiting import wait_until

# ---- answers


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Of a server in this process, on a thread."""
    server = CacheServer(ServerSettings(tmp_path / "s", pool_bytes=1 << 20, drain_s=1.0))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    yield tmp_path / "s"
    server.stop()
    thread.join(WAIT_S)


def test_an_answer_that_no_frame_can_hold_is_refused_and_the_server_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Connection(folder, timeout_s=WAIT_S) as connection:
        with monkeypatch.context() as small:
            small.setattr(frames, "MAX_MESSAGE_BYTES", 512)  # the figures have some kilobytes
            with pytest.raises(RefusedError, match="a message may have 512 bytes, this StatsReport has") as found:
                connection.call(Stats(), StatsReport)
            assert found.value.code is Code.INTERNAL
        assert connection.call(Stats(), StatsReport).draining is False


def test_a_look_up_and_a_store_name_no_more_slots_than_an_answer_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lending, "MOST_SLOTS", 6)  # three a rank
    with Bench(tmp_path, num_slots=16) as bench:
        first, second = (
            bench.rank(num_ranks=2, rank=rank, space=space_of(rank=rank, ranks=2), chunk_bytes=256) for rank in (0, 1)
        )
        document = range(1, 9)
        stored = first.allocate(keys_of(*document))
        assert [places.chunks for places in stored.places] == [(0, 1, 2)] * 2
        for rank in (first, second):
            rank.commit(stored.lease)
        rest = first.allocate(keys_of(*document), first_chunk=3)
        assert [places.chunks for places in rest.places] == [(3, 4, 5)] * 2
        found = first.lookup(keys_of(*document))
        assert (found.num_chunks, [len(row) for row in found.slots], found.pending) == (3, [3, 3], False)


# ---- registrations


class SlowMovement:
    """A server's movement whose caches are opened when a test says so."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.gates: list[threading.Event] = []
        self.closed = 0

    def open(self, *_: Any) -> Any:
        gate = threading.Event()
        self.gates.append(gate)
        self.entered.release()
        assert gate.wait(WAIT_S)
        return self

    def close(self, timeout_s: float = 10.0) -> None:
        self.closed += 1

    def rouse(self) -> None:
        """Nothing."""


def _slow_bench(folder: Path, **settings: Any) -> tuple[Bench, SlowMovement]:
    slow = SlowMovement()
    return Bench(folder, movement=Movement(NoRegistrar(), slow.open), **settings), slow


def test_a_model_whose_rank_is_being_registered_does_not_leave_for_another(tmp_path: Path) -> None:
    """Its memory was taken while its caches were being opened; the rank was never answered."""
    bench, slow = _slow_bench(tmp_path)
    with bench:
        bench.living |= {"alive-a", "alive-b"}
        message = registration(
            engine="a", alive="alive-a", space=space_of(model="a"), transfer_side=TransferSide.SERVER
        )
        answer = bench.begin(message)
        assert slow.entered.acquire(timeout=WAIT_S)
        with refused(Code.REFUSED, "all of them have engines"):
            bench.ask(registration(engine="b", alive="alive-b", space=space_of(model="b")))
        slow.gates[0].set()
        bench.settle(answer)
        one = Client(bench, "alive-a", message, answer.result())
        assert one.allocate(keys_of(1, space=space_of(model="a"))).lease != 0


def test_a_process_that_registers_anew_leaves_no_session_behind_and_keeps_what_is_in_flight(tmp_path: Path) -> None:
    with Bench(tmp_path, num_slots=4, max_sessions=2) as bench:
        rank = bench.rank()
        rank.store(keys_of(1, 2))
        read, written = rank.lookup(keys_of(1)), rank.allocate(keys_of(1, 3), first_chunk=1)
        rank.retrieve(read.lease)
        for _ in range(5):
            message = registration(alive=rank.mark)
            anew = Client(bench, rank.mark, message, bench.ask(message))
            anew.ping()
        assert len(bench.service.sessions) == 1
        with refused(Code.UNKNOWN_SESSION, "register again"):
            rank.lookup(keys_of(1))
        assert bench.occupancy()[3] == 1, "the copy goes on reading"
        assert anew.release(read.lease)
        anew.commit(written.lease)
        assert anew.lookup(keys_of(1, 3)).num_chunks == 2
        rank.die()
        bench.pass_s(1.0)
        assert len(bench.service.sessions) == 0
        assert bench.occupancy()[3] == 0


def test_the_registration_that_was_asked_for_last_is_the_one_that_counts(tmp_path: Path) -> None:
    """The client has given up on the first, whose caches took longer."""
    bench, slow = _slow_bench(tmp_path)
    with bench:
        bench.living.add("alive-a")
        message = registration(alive="alive-a", transfer_side=TransferSide.SERVER)
        answers = []
        for _ in range(2):
            answers.append(bench.begin(message))
            assert slow.entered.acquire(timeout=WAIT_S)
        slow.gates[1].set()
        bench.settle(answers[1])
        slow.gates[0].set()
        with refused(Code.REFUSED, "registered once more meanwhile"):
            bench.settle(answers[0])
            answers[0].result()
        assert [session.number for session in bench.service.sessions.all()] == [answers[1].result().session]
        wait_until(lambda: slow.closed == 1, "what was opened for the first is closed")


# ---- the folder's lock


def test_a_server_starts_while_a_client_looks_whether_the_last_one_lives(tmp_path: Path) -> None:
    """The look holds the lock for a moment, ten times a second and client: a restart under load met it."""
    make_folder(tmp_path / "s")
    ServerLock(tmp_path / "s").close()
    fd = os.open(tmp_path / "s" / LOCK, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    threading.Timer(0.1, os.close, (fd,)).start()
    lock = ServerLock(tmp_path / "s")
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=f"pid {os.getpid()}"):
        ServerLock(tmp_path / "s")
    assert time.monotonic() - began < 5.0
    lock.close()


# ---- the session's thread


def test_a_session_outlives_any_error_of_attaching_the_new_memory(tidy_server: ServerProcess) -> None:
    """Such as no descriptor left: the thread ended, and everything was a miss for good."""
    epochs: list[Epoch] = []

    def attach(epoch: Epoch) -> None:
        epochs.append(epoch)
        if len(epochs) == 2:
            raise RuntimeError("views of this memory are still alive")

    session = connect(tidy_server, timeout_s=3.0, on_epoch=attach)
    tidy_server.kill()
    tidy_server.start()
    tidy_server.wait_serving()
    wait_until(lambda: len(epochs) == 3 and not session.is_lost, "it registers anew, once more")
    assert session.allocate(keys_of(1)).lease != 0
    session.close()


def test_two_sessions_of_one_process_are_two(tidy_server: ServerProcess) -> None:
    """Each has a mark of its own: only a session's own registration takes its place."""
    one, other = connect(tidy_server, registration(engine="a")), connect(tidy_server, registration(engine="b"))
    wait_until(lambda: one.allocate(keys_of(1)).lease != 0, "the first is known")
    assert other.allocate(keys_of(2)).lease != 0
    one.close()
    other.close()


def test_a_registration_without_a_mark_takes_nobodys_place(tmp_path: Path) -> None:
    """Over TCP there are no marks."""
    from lamella.server.handlers import Peer

    with Bench(tmp_path) as bench:
        far = Peer(is_local=False)
        for engine in ("a", "b"):
            bench.ask(msgspec.structs.replace(registration(engine=engine), alive=""), far)
        assert len(bench.service.sessions) == 2
