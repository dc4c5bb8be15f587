"""The server's own hands: one rank's caches opened in this process, and an engine that moves objects into them.

    RETRIEVE ─► submit ─► slices land ─► a watcher counts them on the rank's arrival board ─► end on the board, then
                                                                                              the answer (`on_end`)

Another process's kernels hold up this process's by a time slice, while copy engines do not wait (measured on an H200).
So only copy engines move bytes here: objects in block form, or in a token form whose runs match the engine's blocks.
`allow_kernels` is the control arm of that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from lamella.cuda_ext._engine_library import TransferStopped
from lamella.cuda_ext._execution import HostObjects
from lamella.cuda_ext.arrival import AfterEvent
from lamella.cuda_ext.arrival_board import BoardPlace, End, LayerArrivalBoard
from lamella.cuda_ext.engine import TransferEngine
from lamella.cuda_ext.peer_memory import ExportedCaches, OpenedCaches, PeerEvent
from lamella.cuda_ext.transfer import CopyMethod, Transfer, TransferState
from lamella.reference.layout import ObjectLayout
from lamella.reference.plan import Direction
from lamella.reference.slices import plan_slices

_log = logging.getLogger(__name__)
_LOOK_S: Final = 5.0
_ENDS: Final = {
    TransferState.LANDED: End.LANDED,
    TransferState.CANCELLED: End.CANCELLED,
    TransferState.FAILED: End.FAILED,
}
CHUNK_MAJOR: Final = "chunk-major"
LAYER_MAJOR: Final = "layer-major"


class Moved(NamedTuple):
    """How a move ended; nothing of it is in flight.

    Attributes:
        state: landed, cancelled or failed.
        reason: why it did not land; "" where it did.
        path: `"layer-major"` or `"chunk-major"`.
        num_bytes: that it moves in all.
        duration_ns: from its submission on.
    """

    state: TransferState
    reason: str
    path: str
    num_bytes: int
    duration_ns: int


class CacheMover:
    """Moves between a pool's objects and one rank's caches, from the server's process.

    Args:
        caches: as the rank exported them.
        layout: of its objects.
        device: the caches' device as this process numbers it; by default the rank's number.
        allow_kernels: also move what needs a kernel.
        max_moves: that are watched at the same time; more wait for a watcher, though they move.
        engine_options: for `TransferEngine`.

    Raises:
        ValueError: objects whose runs do not match the blocks, or caches that do not fit the objects.
        OSError: the caches cannot be opened here.
        LibraryMissingError, RuntimeError: no native library, or no device.
    """

    def __init__(
        self,
        caches: ExportedCaches,
        layout: ObjectLayout,
        *,
        device: str | None = None,
        allow_kernels: bool = False,
        max_moves: int = 64,
        engine_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._layout = layout
        self._method = CopyMethod.AUTO if allow_kernels else CopyMethod.DIRECT_BATCH
        self._lock = threading.Lock()
        self._boards: dict[Path, LayerArrivalBoard] = {}
        self._events: dict[bytes, PeerEvent] = {}
        self._moves: set[Transfer] = set()
        self._closed = False
        self._opened = OpenedCaches(caches, device)
        try:
            options: dict[str, Any] = {"num_layers": layout.num_layers, "avoid_kernels": not allow_kernels}
            self.engine = TransferEngine(self._opened.device, **(options | dict(engine_options or {})))
        except BaseException:
            self._opened.close()
            raise
        try:
            self._cache = self.engine.register_cache(layout, self._opened.engines)
            self._refuse_kernels()
        except BaseException:
            self.engine.close()
            self._opened.close()
            raise
        self._watchers = ThreadPoolExecutor(max_moves, thread_name_prefix="lamella-board")

    def _refuse_kernels(self) -> None:
        """A transfer of nothing is refused if its method cannot move these blocks."""
        try:
            self._move_nothing().wait(_LOOK_S)
        except ValueError as refused:
            raise ValueError(
                f"the server moves bytes by copy engines alone, and {refused}; take objects in block form, or the "
                "transfer side 'worker'"
            ) from refused

    def _move_nothing(self) -> Transfer:
        nothing: list[tuple[int, ...]] = [() for _ in self._layout.groups]
        whole = self._layout.num_layers
        return self.engine.retrieve(self._cache, HostObjects(()), nothing, 0, width=whole, method=self._method)

    # ---- moves

    def rouse(self) -> None:
        """As `WorkerSide.load_nothing`, unless something moves."""
        with self._lock, suppress(TransferStopped):
            if not self._moves and not self._closed:
                self._move_nothing()

    def retrieve(
        self,
        objects: HostObjects,
        tables: Sequence[bytes | NDArray[np.int32]],
        num_tokens: int,
        *,
        on_end: Callable[[Moved], object],
        width: int | Sequence[int] = 0,
        board: BoardPlace | None = None,
        **options: Any,
    ) -> Transfer:
        """Objects are on their way into blocks; layer-major with a board and a width, chunk-major without.

        Args:
            objects: by absolute chunk; they stay until `on_end`.
            tables: block ids a kernel group, 32-bit little-endian.
            num_tokens: as for `TransferEngine.submit`.
            on_end: called once, from another thread, when nothing of it is in flight any more.
            width: layers per slice, or a schedule.
            board: where its slices are counted.
            options: `skip_tokens`, `null_block`, `events`, `deadline_s`.

        Raises:
            ValueError, TransferStopped: as `TransferEngine.submit`; `on_end` is not called then.
            OSError: the board or an event cannot be opened.
        """
        layerwise = board is not None and width != 0
        slices = plan_slices(self._layout.num_layers, width if layerwise else self._layout.num_layers)
        attached = self._board(board) if board is not None else None
        count: dict[str, Any] = {}
        if attached is not None and board is not None:
            count = {"board": attached.address(board.entry), "generation": board.generation}
        transfer = self._submit(Direction.RETRIEVE, objects, tables, num_tokens, slices=slices, **count, **options)
        self._watch(transfer, attached, board, LAYER_MAJOR if layerwise else CHUNK_MAJOR, on_end)
        return transfer

    def store(
        self,
        objects: HostObjects,
        tables: Sequence[bytes | NDArray[np.int32]],
        num_tokens: int,
        *,
        on_end: Callable[[Moved], object],
        **options: Any,
    ) -> Transfer:
        """Blocks are on their way into objects; as `retrieve`."""
        transfer = self._submit(Direction.STORE, objects, tables, num_tokens, **options)
        self._watch(transfer, None, None, CHUNK_MAJOR, on_end)
        return transfer

    def _submit(
        self,
        direction: Direction,
        objects: HostObjects,
        tables: Sequence[bytes | NDArray[np.int32]],
        num_tokens: int,
        *,
        events: Sequence[bytes] = (),
        **options: Any,
    ) -> Transfer:
        ids: list[Any] = [np.frombuffer(table, "<i4") if isinstance(table, bytes) else table for table in tables]
        opened = [self._event(handle) for handle in events]
        if len(opened) > 1:
            raise ValueError(f"a move is behind one event of its engine's stream, got {len(opened)}")
        fence = AfterEvent(opened[0].address) if opened else None
        with self._lock:
            if self._closed:
                raise TransferStopped("the rank's caches are closed here")
            transfer = self.engine.submit(
                self._cache, direction, objects, ids, num_tokens, method=self._method, fence=fence, **options
            )
            self._moves.add(transfer)
        return transfer

    def _watch(
        self,
        transfer: Transfer,
        board: LayerArrivalBoard | None,
        place: BoardPlace | None,
        path: str,
        on_end: Callable[[Moved], object],
    ) -> None:
        begun_ns = time.monotonic_ns()

        def watch() -> None:
            landed = 0
            while landed < transfer.num_slices:
                try:
                    transfer.wait_landed(landed + 1, _LOOK_S)
                except TimeoutError:
                    continue
                except TransferStopped:
                    break
                landed = transfer.landed()
                if board is not None and place is not None:
                    board.publish_landed(place.entry, place.generation, landed)
            state = _final(transfer)
            with self._lock:
                self._moves.discard(transfer)
            if board is not None and place is not None:
                board.publish_end(place.entry, place.generation, _ENDS[state])
            reason = transfer.error or ("" if state is TransferState.LANDED else f"it was {state.name.lower()}")
            on_end(Moved(state, reason, path, transfer.num_bytes, time.monotonic_ns() - begun_ns))

        self._watchers.submit(watch)

    # ---- what the rank exported

    def _board(self, place: BoardPlace) -> LayerArrivalBoard:
        with self._lock:
            found = self._boards.get(place.path)
            if found is None:
                found = self._boards[place.path] = LayerArrivalBoard.attach(place.path, place.num_entries)
            return found

    def attach_board(self, place: BoardPlace) -> None:
        """The board is mapped here, so that its owner can unlink its name.

        Raises:
            OSError, ValueError: as `LayerArrivalBoard.attach`.
        """
        self._board(place)

    def _event(self, handle: bytes) -> PeerEvent:
        with self._lock:
            found = self._events.get(handle)
            if found is None:
                found = self._events[handle] = PeerEvent(self._opened.device, handle)
            return found

    # ---- the end

    def close(self, timeout_s: float = 10.0) -> None:
        """Moves in flight were cancelled and have drained, and the rank's memory is unmapped. A second call does
        nothing.

        Raises:
            TimeoutError: the device did not let go within the bound; the memory stays mapped.
        """  # noqa: D205 - one sentence more than a line
        with self._lock:
            if self._closed:
                return
            self._closed = True
            moves = list(self._moves)
        for transfer in moves:
            transfer.cancel()
        self.engine.close(timeout_s)
        self._watchers.shutdown(wait=True)
        for board in self._boards.values():
            board.close()
        for event in self._events.values():
            event.close()
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _final(transfer: Transfer) -> TransferState:
    while True:
        try:
            return transfer.wait_final(_LOOK_S)
        except TimeoutError:
            _log.warning("layers %s of a transfer do not drain", [tuple(part) for part in transfer.slices])
