"""One rank on a cache server: its session, its arrival board, its line, and the transfer side that moves its bytes.

Who orders, who waits and who is told stands elsewhere: `lamella.server.worker` for engines that call a worker,
`lamella.server.engine_mover` for the vLLM connector.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from lamella.cuda_ext.arrival_board import LayerArrivalBoard, LayerArrivalPool
from lamella.cuda_ext.device import Device
from lamella.cuda_ext.engine import TransferEngine
from lamella.cuda_ext.peer_memory import ExportedCaches, export_caches
from lamella.server.client import CacheSession, Epoch
from lamella.server.connection import Connection
from lamella.server.frames import RefusedError
from lamella.server.moves import Beginning, Fences, LeasedLoad, Line, Moves, PendingLoad, Side
from lamella.server.peer_watch import ServerWatch
from lamella.server.protocol import TransferSide
from lamella.server.rank import RankCaches, RankOfEngine, register_message
from lamella.server.server_side import ServerSide
from lamella.server.wire import Code
from lamella.server.worker_side import WorkerSide

_log = logging.getLogger(__name__)


class RankMover:
    """See the module. For the engine's thread alone.

    Args:
        folder: the server's.
        of: which rank this is.
        caches: its paged caches.
        transfer_side: whose process moves the bytes; this one, the reason said, where the server cannot.
        layers_per_slice: width or schedule of a load that names none; 0: chunk-major.
        num_arrival_slots: loads that can be layer-major at the same time.
        load_timeout_s: a load that has not ended by then fails.
        call_timeout_s: bound of a call to the server.
        stream: the stream that computes now, as `cudaStream_t`.
        engine_options: for the transfer engine.

    Raises:
        ServerLostError, RefusedError, OSError, ValueError: no server, or it refuses this rank.
        LibraryMissingError, RuntimeError: no native library, or no device.
    """

    def __init__(
        self,
        folder: Path,
        of: RankOfEngine,
        caches: RankCaches,
        *,
        transfer_side: TransferSide,
        layers_per_slice: int | tuple[int, ...],
        num_arrival_slots: int,
        load_timeout_s: float,
        call_timeout_s: float,
        stream: Callable[[], int],
        engine_options: Mapping[str, Any] | None = None,
    ) -> None:
        layout = caches.layout
        self._folder = folder
        self._caches = caches
        self._call_timeout_s = call_timeout_s
        self._pending: dict[int, PendingLoad] = {}
        self._session: CacheSession | None = None
        self._watch: ServerWatch
        self._worker_side: WorkerSide | None = None
        self.engine: TransferEngine | None = None
        """This process's own, where it moves the bytes."""
        self.executor: Executor = Beginning()
        """Begins loads."""
        # first of all: where there is no server nothing was made that must be given back
        self.line = Line(Connection(folder, timeout_s=call_timeout_s), lambda: self.session.epoch.registered.session)
        """To the server."""
        try:
            make = LayerArrivalBoard.create if transfer_side is TransferSide.SERVER else LayerArrivalBoard.private
            self._board = make(num_arrival_slots)
        except BaseException:
            self.line.close()
            raise
        self.arrivals = LayerArrivalPool(self._board)
        """Entries of this rank's board."""
        moves = self._moves = Moves(
            rank=of.rank,
            num_layers=layout.num_layers,
            layers_per_slice=layers_per_slice,
            pool=self.arrivals,
            line=self.line,
            fences=Fences(caches.device, stream),
            watch=lambda: self._watch,
            tables=caches.tables,
            null_block=caches.null_block,
            timeout_s=load_timeout_s,
        )
        options = {"num_layers": layout.num_layers, "deadline_s": load_timeout_s, **(engine_options or {})}
        self.transfer_side = transfer_side
        self.side: Side
        try:
            if transfer_side is TransferSide.SERVER and not self._serve_from_server(of):
                self.transfer_side = TransferSide.WORKER
                self._board.unlink()
            if self.transfer_side is TransferSide.WORKER:
                self.engine = TransferEngine(caches.device, **options)
                cache = self.engine.register_cache(layout, caches.engines)
                self.side = self._worker_side = WorkerSide(moves, self.engine, cache, Device(caches.device).registrar())
                self._session = self._register(of, None)
            else:
                self.side = ServerSide(moves)
        except BaseException:
            self.close()
            raise

    def _serve_from_server(self, of: RankOfEngine) -> bool:
        """Whether the server could open the caches; the reason is said where it could not."""
        caches = self._caches
        try:
            self._session = self._register(of, export_caches(caches.device, caches.engines, caches.shared))
        except (RefusedError, OSError, ValueError) as refused:
            if isinstance(refused, RefusedError) and refused.code not in (Code.REFUSED, Code.FAILED):
                raise
            _log.warning("this process moves the bytes, not the server: %s", refused)
            return False
        return True

    def _register(self, of: RankOfEngine, exported: ExportedCaches | None) -> CacheSession:
        side = self._worker_side
        return CacheSession(
            self._folder,
            register_message(of, self._caches.layout, exported, self._board),
            timeout_s=self._call_timeout_s,
            ready_slots=(lambda: side.ready_slots) if side is not None else lambda: -1,
            on_epoch=self._begin_epoch,
        )

    def _begin_epoch(self, epoch: Epoch) -> None:
        self._watch = ServerWatch(self._folder)
        if self._worker_side is not None and epoch.shared is not None:
            self._worker_side.attach(epoch.server, epoch.shared)

    @property
    def session(self) -> CacheSession:
        """With the server.

        Raises:
            RuntimeError: it is closed.
        """
        if self._session is None:
            raise RuntimeError("this rank has no session: it is closed")
        return self._session

    @property
    def ready_slots(self) -> int:
        """Slots from 0 on that this process's device reaches; -1: it needs to reach none."""
        return self._worker_side.ready_slots if self._worker_side is not None else -1

    def load(self, order: LeasedLoad) -> PendingLoad:
        """The load, behind what the stream was given so far; begun by `executor`."""
        pending = self._pending[order.number] = self.side.load(order)
        return pending

    def rouse(self) -> None:
        """A load that is ordered soon begins sooner; called while something else is waited for anyway."""
        if self._worker_side is not None:
            self.executor.submit(self._worker_side.load_nothing())

    def loads_ended(self, numbers: Iterable[int]) -> None:
        """Of these loads nothing is in flight; those that never began give back what they held."""
        for number in numbers:
            pending = self._pending.pop(number, None)
            if pending is not None:
                pending.end()

    def look(self) -> None:
        """The server's answers that have come are taken in."""
        self.line.look()

    @property
    def is_connected(self) -> bool:
        """Whether the server is there; without it everything is a miss."""
        return self.line.session != 0

    def close(self) -> None:
        """Nothing of this rank is in flight, the server has let go of it, and its memory is unmapped."""
        self.executor.shutdown(wait=True, cancel_futures=True)
        if self.engine is not None:
            self.engine.close()
        if self._session is not None:
            self._session.close()
        if self._worker_side is not None:
            self._worker_side.close()
        self.line.close()
        self._moves.fences.close()
        self._board.close()
