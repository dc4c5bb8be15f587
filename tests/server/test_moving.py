"""Moves of the server's own: answered when they have ended, stopped before they are given up, and never cut short."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import Mock, create_autospec

import pytest

from lamella.cuda_ext.arrival_board import BoardPlace
from lamella.cuda_ext.registration import NoRegistrar
from lamella.cuda_ext.transfer import Transfer, TransferState
from lamella.server.cache_mover import CacheMover, Moved
from lamella.server.frames import RefusedError
from lamella.server.mover import Movement
from lamella.server.protocol import Abort, Found, Phase, Retrieve, Store, TransferSide
from lamella.server.wire import Code
from server_driver import Bench, Client, keys_of, layout_of
from waiting import wait_until

LANDED = Moved(TransferState.LANDED, "", "layer-major", 256, 1000)
STOPPED = Moved(TransferState.CANCELLED, "it was cancelled", "layer-major", 256, 1000)
BOARD = str(BoardPlace(Path("/dev/shm/board"), 4, 1, 7))


class Moving:
    """A bench whose server moves bytes with a double of `CacheMover`, held to its signature."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.mover: Mock = create_autospec(CacheMover, instance=True)
        self.move: Mock = create_autospec(Transfer, instance=True)
        self.mover.retrieve.return_value = self.move
        self.mover.store.return_value = self.move
        self.bench = Bench(
            folder, movement=Movement(NoRegistrar(), lambda register, layout: self.mover), grace_s=1.0, **settings
        )
        self.engine: Client = self.bench.rank(transfer_side=TransferSide.SERVER)

    def retrieve(self, lease: int, **others: Any) -> Future[Any]:
        fields = {"board": BOARD, "events": (b"event",), "layers_per_slice": 1} | others
        message = Retrieve(
            self.engine.session,
            lease,
            0,
            "r",
            (b"\x01\0\0\0",),
            4,
            0,
            -1,
            fields["board"],
            fields["events"],
            fields["layers_per_slice"],
        )
        return self.bench.begin(message)

    def commit(self, lease: int) -> Future[Any]:
        return self.bench.begin(
            Store(self.engine.session, Phase.COMMIT, lease, b"", 0, 0, b"", 0, "r", (b"\0" * 4,), 4, 0, -1, (b"event",))
        )

    def end(self, moved: Moved, of: str = "retrieve") -> None:
        """The mover says, from a thread of its own, that the move has ended."""
        on_end: Callable[[Moved], None] = getattr(self.mover, of).call_args.kwargs["on_end"]
        on_end(moved)
        self.bench.run_jobs()

    def stored(self, *document: int) -> int:
        """Chunks stored and looked up."""
        lease = self.engine.allocate(keys_of(*document)).lease
        answer = self.commit(lease)
        self.end(LANDED, "store")
        assert answer.result(0).path == "layer-major"
        return self.engine.lookup(keys_of(*document)).lease


@pytest.fixture
def moving(tmp_path: Path) -> Any:
    made = Moving(tmp_path)
    yield made
    made.bench.close()


def test_a_retrieve_is_answered_when_every_layer_has_landed_and_its_part_has_ended(moving: Moving) -> None:
    lease = moving.stored(1, 2)
    answer = moving.retrieve(lease)
    assert not answer.done()
    call = moving.mover.retrieve.call_args
    assert call.kwargs["width"] == 1
    assert call.kwargs["board"] == BoardPlace.parse(BOARD)
    assert call.kwargs["events"] == (b"event",), "the handle as it was exported"
    assert call.kwargs["null_block"] is None
    objects, tables, num_tokens = call.args
    pool = moving.bench.pools[0]
    assert list(objects.addresses) == list(pool.memory.addresses((0, 1)))
    assert (tables, num_tokens) == ((b"\x01\0\0\0",), 4)
    moving.end(LANDED)
    assert (answer.result(0).path, answer.result(0).num_bytes) == ("layer-major", 256)
    assert moving.bench.occupancy() == (2, 0, 2, 0)


def test_a_chunk_major_retrieve_has_placeholders_and_no_board(moving: Moving) -> None:
    lease = moving.stored(1)
    moving.retrieve(lease, board=None, events=None, layers_per_slice=0)
    call = moving.mover.retrieve.call_args
    assert (call.kwargs["board"], call.kwargs["events"], call.kwargs["width"]) == (None, (), 0)
    moving.end(LANDED)


def test_a_move_that_fails_is_said_and_gives_its_locks_back(moving: Moving) -> None:
    answer = moving.retrieve(moving.stored(1))
    moving.end(Moved(TransferState.FAILED, "the device fell off", "layer-major", 0, 0))
    with pytest.raises(RefusedError, match="the device fell off") as refused:
        answer.result(0)
    assert refused.value.code is Code.FAILED
    assert moving.bench.occupancy()[3] == 0


def test_a_store_that_fails_leaves_nothing_to_be_read(moving: Moving) -> None:
    lease = moving.engine.allocate(keys_of(1)).lease
    answer = moving.commit(lease)
    assert moving.engine.lookup(keys_of(1)).num_chunks == 0, "not before its bytes are there"
    moving.end(Moved(TransferState.FAILED, "broken", "chunk-major", 0, 0), "store")
    with pytest.raises(RefusedError, match="broken"):
        answer.result(0)
    assert moving.engine.lookup(keys_of(1)) == Found(0, 0, (), False)
    assert moving.bench.occupancy() == (4, 0, 0, 0)


def test_a_move_that_does_not_begin_leaves_the_lock_for_another_try(moving: Moving) -> None:
    lease = moving.stored(1)
    moving.mover.retrieve.side_effect = ValueError("a block id is out of range")
    with pytest.raises(RefusedError, match="a block id is out of range"):
        moving.retrieve(lease)
    moving.mover.retrieve.side_effect = None
    moving.retrieve(lease)
    moving.end(LANDED)
    assert moving.bench.occupancy()[3] == 0


def test_what_the_server_moves_is_ended_by_nobody_else(moving: Moving) -> None:
    lease = moving.stored(1)
    moving.retrieve(lease)
    with pytest.raises(RefusedError, match="moved by the server"):
        moving.engine.release(lease)
    with pytest.raises(RefusedError, match="is moving, not locked"):
        moving.retrieve(lease)
    moving.bench.pass_s(1e6)
    assert moving.bench.occupancy()[3] == 1
    writing = moving.engine.allocate(keys_of(5)).lease
    moving.commit(writing)
    with pytest.raises(RefusedError, match="is being moved: there is nothing to commit"):
        moving.commit(writing)
    moving.end(LANDED)
    moving.end(LANDED, "store")


def test_an_abort_is_answered_once_nothing_of_it_moves(moving: Moving) -> None:
    lease = moving.stored(1)
    answer = moving.retrieve(lease)
    aborted = moving.bench.begin(Abort(moving.engine.session, lease, 0))
    moving.move.cancel.assert_called_once()
    assert not aborted.done()
    assert moving.bench.occupancy()[3] == 1, "its copies may still read"
    with pytest.raises(RefusedError, match="is being aborted already"):
        moving.bench.begin(Abort(moving.engine.session, lease, 0))
    moving.end(STOPPED)
    assert aborted.result(0).held
    with pytest.raises(RefusedError, match="it was cancelled"):
        answer.result(0)
    assert moving.bench.occupancy()[3] == 0


@pytest.mark.known_fault(46)
def test_a_killed_engine_s_caches_are_unmapped_and_its_slots_wait_for_the_last_copy(moving: Moving) -> None:
    lease = moving.engine.allocate(keys_of(1)).lease
    moving.commit(lease)
    moving.engine.die()
    moving.bench.pass_s(0.25)
    wait_until(lambda: moving.mover.close.called, "the rank's memory is unmapped")
    moving.bench.pass_s(1e6)
    assert moving.bench.occupancy() == (3, 1, 0, 0), "a copy of the server's own may still write there"
    moving.end(STOPPED, "store")
    assert moving.bench.occupancy() == (4, 0, 0, 0)


def test_caches_that_cannot_be_opened_refuse_the_registration_with_the_reason(tmp_path: Path) -> None:
    def fails(register: Any, layout: Any) -> Any:
        raise ValueError("the objects' runs do not match the blocks")

    with Bench(tmp_path, movement=Movement(NoRegistrar(), fails)) as bench:
        with pytest.raises(RefusedError, match="the objects' runs do not match the blocks"):
            bench.rank(transfer_side=TransferSide.SERVER)
        assert bench.rank(engine="other").ping().known
        assert layout_of() == bench.service.places.all()[0].layout
