"""The transfer side `worker`: this process maps the server's slots, and its own engine moves the bytes.

A copy begins as soon as it is ordered, under the lock that the lookup took; RETRIEVE, which makes the lock the
transfer's own, follows at once, and nothing counts as landed before its answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final

from lamella.cuda_ext._execution import HostObjects
from lamella.cuda_ext.arrival import AfterEvent, Fence
from lamella.cuda_ext.engine import RegisteredCache, TransferEngine
from lamella.cuda_ext.registration import Registrar
from lamella.cuda_ext.slots import SharedSlots, SlotMemory
from lamella.cuda_ext.transfer import Arriving
from lamella.reference.plan import Direction
from lamella.reference.slices import Slice
from lamella.server.arriving import GrantedTransfer
from lamella.server.connection import ServerLostError
from lamella.server.moves import FenceEvent, LeasedLoad, LeasedStore, Line, Moves, PendingLoad, is_safe_ahead
from lamella.server.protocol import Message, Release, Retrieve

_FOREVER_NS: Final = 1 << 62


class WorkerSide:
    """This process moves.

    Args:
        moves: what both sides need.
        engine, cache: the transfer engine and this rank's caches, known to it.
        registrar: makes host memory reachable for the device.
    """

    def __init__(self, moves: Moves, engine: TransferEngine, cache: RegisteredCache, registrar: Registrar) -> None:
        self._moves = moves
        self._engine = engine
        self._cache = cache
        self._registrar = registrar
        self._lock = threading.Lock()
        self._server = 0
        self._attached: _Attached | None = None
        self._left: set[_Attached] = set()  # of earlier servers, for transfers under way
        self._no_blocks = tuple(() for _ in cache.layout.groups)

    def attach(self, server: int, shared: SharedSlots) -> None:
        """The slots that this server lends are mapped; those of an earlier one go with their last transfer.

        Raises:
            OSError, ValueError: as `SlotMemory.attach`.
        """
        old = self._attached
        if old is not None and old.shared == shared:  # registered anew with the same server
            self._server = server
            return
        attached = _Attached(SlotMemory.attach(shared, self._registrar), shared)
        with self._lock:
            self._server, self._attached = server, attached
            if old is not None:
                self._left.add(old)
        if old is not None:
            self._drop_unused(old)

    @property
    def ready_slots(self) -> int:
        """Slots from 0 on that this process's device reaches."""
        attached = self._attached
        return attached.memory.ready_slots if attached is not None else 0

    def load(self, order: LeasedLoad) -> PendingLoad:
        """As `Side.load`."""
        tell = self._moves.line.ask
        return self._moves.pending(order, lambda order, event: self._load(order, event, tell))

    def load_nothing(self) -> PendingLoad:
        """A load of no bytes, of which the server is told nothing: begun, it has walked the way of one.

        Between loads an engine computes, and by the next one the lane sleeps and the code has left the caches. It is
        begun while a lookup is answered by other cores; where there are but two, the lookup pays for it.
        """
        order = LeasedLoad(
            -1,
            "",
            (),
            0,
            self._no_blocks,
            0,
            0,
            False,
            lease=0,
            server=self._server,
            locked_until_ns=_FOREVER_NS,
            layers_per_slice=0,
        )
        fences = self._moves.fences
        fences.give(fences.record())  # not waited for: what the engine computes would hold the lane up
        return PendingLoad(lambda: self._load(order, None, lambda _: Future()), lambda: None, True)

    def _load(
        self, order: LeasedLoad, event: FenceEvent | None, tell: Callable[[Message], Future[Any]]
    ) -> GrantedTransfer:
        moves = self._moves
        slices, width, slot = moves.cut(order)

        def ended() -> None:
            moves.fences.give(event)
            moves.give(slot)

        try:
            attached = self._hold(order.server)
        except BaseException:
            ended()
            raise

        def drained() -> None:
            ended()
            self._let_go(attached)
            over.happened()

        def ask() -> Future[Any]:
            return tell(
                Retrieve(
                    moves.line.session,
                    order.lease,
                    moves.rank,
                    order.request,
                    (),
                    order.num_tokens,
                    order.skip_tokens,
                    -1,
                    moves.place(slot),
                    (event[1],) if event is not None and slot is not None else None,
                    width,
                )
            )

        over = _Both(lambda: tell(Release(moves.line.session, order.lease, moves.rank)))
        begun, watch = time.monotonic(), moves.watch()
        answer: Future[Any] | None = None
        try:
            if not is_safe_ahead(order):
                answer = ask()
                _await(answer, moves.line, moves.timeout_s)
            transfer = self._engine.submit(
                self._cache,
                Direction.RETRIEVE,
                attached.objects(order.first_chunk, order.slots),
                moves.tables(order.blocks),
                order.num_tokens,
                slices=slices,
                skip_tokens=order.skip_tokens,
                null_block=moves.null_block,
                fence=_behind(event),
                on_drained=drained,
                deadline_s=moves.timeout_s,
                board=moves.pool.board.address(slot.entry) if slot is not None else 0,
                generation=slot.generation if slot is not None else 0,
            )
        except BaseException:
            drained()
            over.happened()
            raise
        if answer is None:
            answer = ask()
        over.happened()
        return GrantedTransfer(
            transfer,
            answer,
            peer_gone=lambda: watch.gone_since(begun),
            look=moves.line.look,
            timeout_s=moves.timeout_s,
        )

    def store(self, order: LeasedStore, parts: Sequence[Slice]) -> Arriving:
        """As `Side.store`."""
        event = self._moves.fences.record()
        try:
            attached = self._hold(order.server)
        except BaseException:
            self._moves.fences.give(event)
            raise

        def drained() -> None:
            self._moves.fences.give(event)
            self._let_go(attached)

        try:
            return self._engine.submit(
                self._cache,
                Direction.STORE,
                attached.objects(order.first_chunk, order.slots),
                self._moves.tables(order.blocks),
                order.num_tokens,
                slices=parts,
                skip_tokens=order.skip_tokens,
                null_block=self._moves.null_block,
                fence=_behind(event),
                on_drained=drained,
            )
        except BaseException:
            drained()
            raise

    def commit(self, order: LeasedStore, ok: bool) -> Future[Any]:
        """As `Side.commit`."""
        line = self._moves.line
        if not ok:
            return line.ask(self._moves.abort_message(order.lease))
        return line.ask(self._moves.commit_message(order, (), None))

    def close(self) -> None:
        """As `Side.close`; the engine is closed, so every slot is let go of."""
        with self._lock:
            attached, self._attached = self._attached, None
            left, self._left = self._left, set()
        for one in (*left, *filter(None, [attached])):
            one.memory.close()

    def _hold(self, server: int) -> _Attached:
        with self._lock:
            attached = self._attached
            if attached is None or server != self._server:
                raise ServerLostError("these slots are of an earlier server: look up again")
            attached.users += 1
            return attached

    def _let_go(self, attached: _Attached) -> None:
        with self._lock:
            attached.users -= 1
        self._drop_unused(attached)

    def _drop_unused(self, attached: _Attached) -> None:
        with self._lock:
            if attached not in self._left or attached.users:
                return
            self._left.remove(attached)
        attached.memory.close()


class _Both:
    """Calls `then` when two things have happened, on the thread of the later: RELEASE never overtakes its RETRIEVE."""

    def __init__(self, then: Callable[[], object]) -> None:
        self._then = then
        self._is_last = [True, False]

    def happened(self) -> None:
        """One of them has; called twice."""
        if self._is_last.pop():  # atomic, and taken from the end
            self._then()


class _Attached:
    """A registration's slots, mapped here, and how many transfers use them."""

    def __init__(self, memory: SlotMemory, shared: SharedSlots) -> None:
        self.memory = memory
        self.shared = shared
        self.users = 0

    def objects(self, first_chunk: int, slots: Sequence[int]) -> HostObjects:
        memory = self.memory
        return HostObjects((0,) * first_chunk + memory.addresses(slots), memory.piece_bytes, memory.base)


def _behind(event: FenceEvent | None) -> Fence | None:
    return AfterEvent(event[0].address) if event is not None else None


def _await(answer: Future[Any], line: Line, timeout_s: float) -> None:
    until = time.monotonic() + timeout_s
    while not answer.done():
        if time.monotonic() > until:
            raise TimeoutError(f"the server has not granted the transfer within {timeout_s:g} s")
        line.look()
        time.sleep(20e-6)
    answer.result()
