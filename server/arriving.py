"""Retrieves across processes, as the one who waits sees them: `lamella.cuda_ext.transfer.Arriving`, twice.

`GrantedTransfer` is moved by this process's engine. It begins before the server has answered, because the lookup's lock
still holds, and nothing of it counts until the answer is there: a grant that is refused fails the whole of it.
`BoardTransfer` is moved by the server; the board tells how far it is, and the answer how it ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final

from lamella.cuda_ext._engine_library import TransferStopped
from lamella.cuda_ext.arrival_board import Arrival, ArrivalSlot, End, LayerArrivalBoard
from lamella.cuda_ext.transfer import CopyMethod, Progress, SliceTimes, Transfer, TransferState
from lamella.reference.slices import Slice

_FIRST_LOOK_S: Final = 20e-6
_LAST_LOOK_S: Final = 200e-6
_STATES: Final = {
    End.LANDED: TransferState.LANDED,
    End.CANCELLED: TransferState.CANCELLED,
    End.FAILED: TransferState.FAILED,
}
_GONE: Final = "the cache server is gone"


def why_refused(answer: Future[Any]) -> str | None:
    """Why a request that was answered was refused; None if it was granted, or is not answered yet."""
    if not answer.done():
        return None
    if answer.cancelled():
        return "it was given up before the server answered"
    error = answer.exception()
    return None if error is None else str(error) or type(error).__name__


class GrantedTransfer:
    """A transfer of this process's engine that counts once the server has granted it.

    Args:
        transfer: begun under a lock that outlives the answer's way.
        grant: the server's answer.
        peer_gone: whether the server's process has ended for certain.
        look: takes in answers that have come.
        timeout_s: a grant that has not come by then is refused (SAFE-5).
    """

    def __init__(
        self,
        transfer: Transfer,
        grant: Future[Any],
        *,
        peer_gone: Callable[[], bool],
        look: Callable[[], object],
        timeout_s: float,
    ) -> None:
        self._transfer = transfer
        self._grant = grant
        self._peer_gone = peer_gone
        self._take_answers = look
        self._until = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._refused: str | None = None
        self.granted_ns = 0
        """When the grant was first seen (`time.monotonic_ns`); 0: not yet."""

    @property
    def slices(self) -> Sequence[Slice]:
        """The units in which it moves, in order."""
        return self._transfer.slices

    @property
    def num_slices(self) -> int:
        """Units in which it moves."""
        return self._transfer.num_slices

    @property
    def num_bytes(self) -> int:
        """As `Transfer.num_bytes`."""
        return self._transfer.num_bytes

    def _granted(self) -> bool | None:
        """Whether the server granted it; None: it has not said. False is for good, whatever is said later."""
        if self._refused is None and not self._grant.done():
            self._take_answers()
        if self._refused is None and self._grant.done():
            self._refused = why_refused(self._grant)
            if self._refused is None:
                self.granted_ns = self.granted_ns or time.monotonic_ns()
                return True
        elif self._refused is None and self._peer_gone():
            self._refused = _GONE
        elif self._refused is None and time.monotonic() > self._until:
            self._refused = f"no answer within {self._timeout_s:g} s"
        if self._refused is None:
            return None
        self._transfer.cancel()
        return False

    def _judge(self, moved: TransferState, granted: bool | None) -> TransferState:
        if not moved.is_final:
            return moved
        if granted is None:
            return TransferState.RUNNING
        return moved if granted else TransferState.FAILED

    @property
    def state(self) -> TransferState:
        """Where it is; final only once the server has answered, or will not."""
        return self._judge(self._transfer.state, self._granted())

    @property
    def error(self) -> str:
        """Why it failed or was cancelled; "" otherwise."""
        if self._granted() is False:
            return f"the server did not grant it: {self._refused}"
        return self._transfer.error

    def query(self) -> Progress:
        """Its progress; nothing has landed before the grant."""
        granted = self._granted()
        progress = self._transfer.query()
        return progress._replace(state=self._judge(progress.state, granted), landed=progress.landed if granted else 0)

    def wait_layer(self, layer: int, stream: int = 0, timeout_s: float = 30.0) -> int:
        """As `Transfer.wait_layer`, and granted.

        Raises:
            TimeoutError: not within the bound.
            TransferStopped: refused, failed or cancelled.
        """
        begun = time.monotonic()
        while (granted := self._granted()) is None:
            if time.monotonic() - begun > timeout_s:
                raise TimeoutError(f"the server has not granted the transfer within {timeout_s:g} s")
            time.sleep(_FIRST_LOOK_S)
        if not granted:
            raise TransferStopped(self.error)
        waited_s = time.monotonic() - begun
        return int(waited_s * 1e9) + self._transfer.wait_layer(layer, stream, max(0.0, timeout_s - waited_s))

    def wait_final(self, timeout_s: float) -> TransferState:
        """The state it ended in.

        Raises:
            TimeoutError: it is not final within the bound.
        """
        begun = time.monotonic()
        moved = self._transfer.wait_final(timeout_s)
        while (granted := self._granted()) is None:
            if time.monotonic() - begun > timeout_s:
                raise TimeoutError(f"the server has not granted the transfer within {timeout_s:g} s")
            time.sleep(_LAST_LOOK_S)
        return self._judge(moved, granted)

    def timestamps_ns(self) -> SliceTimes:
        """As `Transfer.timestamps_ns`."""
        return self._transfer.timestamps_ns()

    def cancel(self) -> None:
        """As `Transfer.cancel`."""
        self._transfer.cancel()


class BoardTransfer:
    """A retrieve that the server moves.

    Waiting for a layer is waiting on the host until its slice has landed, so that kernels launched later see it.

    Args:
        slices: the units in which it moves, in order.
        answer: the server's, which comes when nothing of it is in flight any more.
        board: where it is counted; read while `slot` is given.
        slot: its use of an entry; None: chunk-major, and only the answer tells.
        stop: asks the server to stop it.
        peer_gone: whether the server's process has ended for certain, and with it every copy of its.
        look: takes in answers that have come.
        on_final: called once, when nothing of it is in flight.
    """

    def __init__(
        self,
        slices: Sequence[Slice],
        answer: Future[Any],
        board: LayerArrivalBoard,
        slot: ArrivalSlot | None,
        *,
        stop: Callable[[], object],
        peer_gone: Callable[[], bool],
        look: Callable[[], object],
        on_final: Callable[[], object],
    ) -> None:
        self._slices = tuple(slices)
        self._answer = answer
        self._board = board
        self._slot = slot
        self._stop = stop
        self._peer_gone = peer_gone
        self._take_answers = look
        self._on_final = on_final
        self._lock = threading.Lock()
        self._final: tuple[TransferState, str] | None = None
        self._last = Arrival(0, 0, None)
        self._submitted_ns = time.monotonic_ns()
        self._started_ns = 0
        self._recorded_ns = [0] * len(self._slices)
        self._landed_ns = [0] * len(self._slices)

    @property
    def slices(self) -> Sequence[Slice]:
        """The units in which it moves, in order."""
        return self._slices

    @property
    def num_slices(self) -> int:
        """Units in which it moves."""
        return len(self._slices)

    @property
    def num_bytes(self) -> int:
        """Bytes it moved; 0 before the server has answered."""
        landed = self._answer.done() and why_refused(self._answer) is None
        return int(self._answer.result().num_bytes) if landed else 0

    @property
    def state(self) -> TransferState:
        """Where it is now."""
        return self.query().state

    @property
    def error(self) -> str:
        """Why it failed or was cancelled; "" otherwise."""
        self.query()
        return self._final[1] if self._final is not None else ""

    def query(self) -> Progress:
        """Its progress as the board and the answer have it; never blocks."""
        self._take_answers()
        with self._lock:
            answered, now_ns = self._answer.done(), time.monotonic_ns()  # before the board: what it covers is there
            if self._final is None:
                self._look(now_ns)
                self._settle(answered, now_ns)
        moved = TransferState.RUNNING if self._last.recorded else TransferState.QUEUED
        return Progress(
            self._final[0] if self._final is not None else moved,
            self._last.recorded,
            self._last.landed,
            CopyMethod.DIRECT_BATCH,
            0,
            self._submitted_ns,
            self._started_ns,
        )

    def _look(self, now_ns: int) -> None:
        if self._slot is None:
            return
        seen = self._board.read(*self._slot)
        for times, before, after in (
            (self._recorded_ns, self._last.recorded, seen.recorded),
            (self._landed_ns, self._last.landed, seen.landed),
        ):
            times[before:after] = [now_ns] * (after - before)
        if seen.recorded and not self._started_ns:
            self._started_ns = now_ns
        self._last = seen

    def _settle(self, answered: bool, now_ns: int) -> None:
        refused = why_refused(self._answer) if answered else None
        if self._last.end is not None and answered:
            self._end(_STATES[self._last.end], refused or "")
        elif answered and refused is None:  # chunk-major
            self._landed_ns = [stamp or now_ns for stamp in self._landed_ns]
            self._started_ns = self._started_ns or self._submitted_ns
            self._last = Arrival(len(self._slices), len(self._slices), End.LANDED)
            self._end(TransferState.LANDED, "")
        elif answered:
            self._end(TransferState.FAILED, refused or "the server refused")
        elif self._peer_gone():
            self._end(TransferState.FAILED, _GONE)

    def _end(self, state: TransferState, reason: str) -> None:
        if state is not TransferState.LANDED:
            reason = reason or f"the server's move was {state.name.lower()}"
        self._final = state, reason
        self._on_final()

    def wait_layer(self, layer: int, stream: int = 0, timeout_s: float = 30.0) -> int:
        """The layer's slice has landed; returns the waiting time in ns.

        Raises:
            ValueError: no such layer.
            TimeoutError: it has not within the bound.
            TransferStopped: it failed or was cancelled before.
        """
        ends = [part.end_layer for part in self._slices]
        if not self._slices[0].first_layer <= layer < ends[-1]:
            raise ValueError(f"layer must be between {self._slices[0].first_layer} and {ends[-1] - 1}, got {layer}")
        needed = sum(end <= layer for end in ends) + 1
        begun_ns = time.monotonic_ns()
        pause_s = _FIRST_LOOK_S
        while True:
            progress = self.query()
            if progress.landed >= needed:
                return time.monotonic_ns() - begun_ns
            if progress.state.is_final:
                raise TransferStopped(self.error)
            if time.monotonic_ns() - begun_ns > timeout_s * 1e9:
                raise TimeoutError(f"slice {needed - 1} has not landed within {timeout_s:g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_LOOK_S)

    def wait_final(self, timeout_s: float) -> TransferState:
        """The state it ended in.

        Raises:
            TimeoutError: it is not final within the bound.
        """
        begun_ns = time.monotonic_ns()
        while not (state := self.state).is_final:
            if time.monotonic_ns() - begun_ns > timeout_s * 1e9:
                raise TimeoutError(f"the server's move is not final after {timeout_s:g} s")
            time.sleep(_LAST_LOOK_S)
        return state

    def timestamps_ns(self) -> SliceTimes:
        """When each slice was first seen recorded and landed."""
        return SliceTimes(tuple(self._recorded_ns), tuple(self._landed_ns))

    def cancel(self) -> None:
        """The server stops it; final once what is in flight has drained. A final one stays as it is."""
        if self._final is None:
            self._stop()
