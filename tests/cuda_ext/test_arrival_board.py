"""The arrival board: one writer, one reader, a generation on every word, nothing left behind by either."""

import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import pairwise

import pytest

from engine_driver import ENGINE_MISSING, SmallCache, retrieve, small_engine
from lamella.cuda_ext.arrival_board import (
    LINE_BYTES,
    Arrival,
    ArrivalSlot,
    End,
    LayerArrivalBoard,
    LayerArrivalPool,
    layers_landed,
)
from lamella.reference.plan import Direction

NOTHING = Arrival(0, 0, None)


@pytest.fixture
def board() -> Iterator[LayerArrivalBoard]:
    with LayerArrivalBoard.create(4) as made:
        yield made


def _child(code: str, *arguments: object) -> subprocess.Popen[str]:
    program = "import sys\nfrom pathlib import Path\nfrom lamella.cuda_ext.arrival_board import *\n" + code
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def _line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


ATTACH = "board = LayerArrivalBoard.attach(Path(sys.argv[1]), 4)\n"


def test_what_one_process_publishes_another_reads(board: LayerArrivalBoard) -> None:
    code = ATTACH + "board.publish_recorded(2, 7, 3); board.publish_landed(2, 7, 2); print('done', flush=True)"
    with _child(code, board.path) as child:
        assert _line(child) == "done"
    assert board.read(2, 7) == Arrival(3, 2, None)
    assert board.read(1, 7) == NOTHING, "entries do not touch one another"


@pytest.mark.known_fault(22)
def test_a_late_word_of_an_earlier_use_counts_for_nothing(board: LayerArrivalBoard) -> None:
    """SAFE-2."""
    board.publish_landed(0, 5, 4)
    board.publish_end(0, 5, End.LANDED)
    assert board.read(0, 5) == Arrival(4, 4, End.LANDED)
    assert board.read(0, 6) == NOTHING


def test_entries_lie_a_cache_line_apart_and_aligned(board: LayerArrivalBoard) -> None:
    addresses = [board.address(entry) for entry in range(4)]
    assert [address % LINE_BYTES for address in addresses] == [0, 0, 0, 0]
    assert [later - earlier for earlier, later in pairwise(addresses)] == [LINE_BYTES] * 3


def test_the_file_is_its_owners_alone_and_goes_with_the_board() -> None:
    board = LayerArrivalBoard.create(1)
    path = board.path
    assert path is not None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    board.close()
    assert not path.exists()
    with pytest.raises(RuntimeError, match="closed"):
        board.read(0, 1)


def test_a_private_board_counts_and_has_no_name() -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    with LayerArrivalBoard.private(3) as board:
        assert board.path is None
        assert sorted(os.listdir("/proc/self/fd")) == before
        board.publish_landed(2, 9, 4)
        assert board.read(2, 9) == Arrival(4, 4, None)
        assert board.address(2) % LINE_BYTES == 0
    with pytest.raises(ValueError, match="num_entries must be at least 1, got 0"):
        LayerArrivalBoard.private(0)


def test_attaching_never_unlinks(board: LayerArrivalBoard) -> None:
    assert board.path is not None
    with LayerArrivalBoard.attach(board.path, 4):
        pass
    assert board.path.exists()


def test_a_writer_killed_at_once_leaves_its_words_and_no_file(board: LayerArrivalBoard) -> None:
    with _child(
        ATTACH + "board.publish_landed(0, 1, 2); print('up', flush=True); sys.stdin.read()", board.path
    ) as child:
        assert _line(child) == "up"
        board.unlink()
        os.kill(child.pid, signal.SIGKILL)
    assert board.read(0, 1).landed == 2
    assert board.path is None


@pytest.mark.known_fault(47)
def test_a_reader_killed_before_its_writer_came_leaves_a_name_that_the_next_board_removes() -> None:
    code = "board = LayerArrivalBoard.create(4); print(board.path, flush=True); sys.stdin.read()"
    with _child(code) as child:
        path = _line(child)
        os.kill(child.pid, signal.SIGKILL)
    with LayerArrivalBoard.create(1) as board:
        assert not os.path.exists(path)
        assert board.path is not None


@pytest.mark.parametrize("entry", [-1, 4])
def test_an_entry_that_is_not_there_is_named(board: LayerArrivalBoard, entry: int) -> None:
    for use in (board.address, lambda e: board.read(e, 1), lambda e: board.publish_end(e, 1, End.FAILED)):
        with pytest.raises(ValueError, match=f"between 0 and 3, got {entry}"):
            use(entry)


def test_counts_never_fall_and_landed_never_passes_recorded_while_another_thread_writes(
    board: LayerArrivalBoard,
) -> None:
    """ARR-1, for whoever reads between any two words of the writer."""

    def write() -> None:
        for count in range(1, 3000):
            board.publish_recorded(0, 9, count)
            board.publish_landed(0, 9, count)
        board.publish_end(0, 9, End.LANDED)

    writer = threading.Thread(target=write)
    writer.start()
    before = NOTHING
    while before.end is None:
        now = board.read(0, 9)
        assert now.landed <= now.recorded
        assert now.landed >= before.landed
        assert now.recorded >= before.recorded
        before = now
    writer.join()
    assert before == Arrival(2999, 2999, End.LANDED), "an end is seen only with all that it covers"


@pytest.mark.skipif(ENGINE_MISSING is not None, reason=str(ENGINE_MISSING))
def test_the_native_engine_raises_the_count_after_each_slice(board: LayerArrivalBoard) -> None:
    small = SmallCache()
    with small_engine(small, paced=True) as (engine, cache):
        pool = LayerArrivalPool(board)
        slot = pool.take()
        assert slot is not None
        assert board.read(*slot) == NOTHING
        transfer = retrieve(engine, cache, small, width=2, board=board.address(slot.entry), generation=slot.generation)
        engine.grant(Direction.RETRIEVE, 1000)
        transfer.wait(20)
        assert board.read(*slot).recorded == 3
        assert board.read(slot.entry, slot.generation + 1) == NOTHING


# ---- the pool


def test_an_entry_serves_one_retrieve_at_a_time_each_under_a_newer_generation(board: LayerArrivalBoard) -> None:
    pool = LayerArrivalPool(board)
    first = [pool.take() for _ in range(4)]
    assert pool.take() is None
    assert {slot.entry for slot in first if slot} == {0, 1, 2, 3}
    assert first[0] is not None
    pool.give(first[0])
    again = pool.take()
    assert again == ArrivalSlot(first[0].entry, first[0].generation + 1)


def test_an_empty_pool_says_so_once(board: LayerArrivalBoard) -> None:
    pool = LayerArrivalPool(board)
    slots = [pool.take() for _ in range(4)]
    reason, first = pool.why_none()
    assert "all 4 arrival slots are in use" in reason
    assert first
    assert pool.why_none() == (reason, False)
    assert slots[0] is not None
    pool.give(slots[0])
    assert pool.num_free == 1


def test_a_pool_without_a_way_to_signal_hands_out_nothing(board: LayerArrivalBoard) -> None:
    pool = LayerArrivalPool(board, "no layers are registered")
    assert pool.take() is None
    assert pool.why_none() == ("no layers are registered", True)


@pytest.mark.known_fault(40)
def test_a_slot_given_back_twice_is_refused(board: LayerArrivalBoard) -> None:
    pool = LayerArrivalPool(board)
    slot = pool.take()
    assert slot is not None
    pool.give(slot)
    with pytest.raises(RuntimeError, match="given back before"):
        pool.give(slot)
    assert pool.take() is not None
    with pytest.raises(RuntimeError, match="given back before"):
        pool.give(slot)  # its entry is another retrieve's by now


def test_layers_landed_counts_layers_not_slices() -> None:
    assert [layers_landed(Arrival(3, landed, None), (1, 2, 4)) for landed in range(4)] == [0, 1, 2, 4]
