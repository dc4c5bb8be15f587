"""What both transfer sides need: orders with a lease, a line to the server, fences, arrival slots; and what a side is.

    worker (default)  `worker_side`: this process maps the server's slots, registers them with its device, and its own
                      engine moves; RETRIEVE only says so, and the copy begins while that is on its way
    server            `server_side`: the server opened this rank's caches and moves; the arrival board tells how far

Arrival slots and fence events are made and exported once and used again. Without a slot a retrieve runs chunk-major,
and the reason is said once: that costs the overlap, never correctness.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from lamella.connector.at_once import AtOnce
from lamella.connector.step_orders import BlockTables, LoadOrder, StoreOrder
from lamella.cuda_ext.arrival_board import ArrivalSlot, BoardPlace, LayerArrivalPool
from lamella.cuda_ext.peer_memory import PeerEvent
from lamella.cuda_ext.transfer import Arriving
from lamella.reference.slices import Slice, plan_slices
from lamella.server.connection import Connection, ServerLostError
from lamella.server.peer_watch import ServerWatch
from lamella.server.protocol import Abort, Message, Phase, Store

_log = logging.getLogger(__name__)
_MARGIN_NS: Final = 1_000_000_000
_known_slices = lru_cache(maxsize=64)(plan_slices)  # the same few widths, once a load


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedLoad(LoadOrder):
    """One rank's load of what a lookup locked.

    Attributes:
        lease: of the lookup.
        server: whose slots these are.
        locked_until_ns: until when the lookup's lock holds without a transfer (`time.monotonic_ns`).
        layers_per_slice: of this load; None: the worker's.
        (others): as `LoadOrder`; `slots` are this rank's.
    """

    lease: int
    server: int
    locked_until_ns: int
    layers_per_slice: int | tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedStore(StoreOrder):
    """One rank's store into what was allocated for it.

    Attributes:
        lease: of the allocation.
        server: whose slots these are.
        rank: whose slots.
        (others): as `StoreOrder`; `slots` are this rank's.
    """

    lease: int
    server: int
    rank: int


class Line:
    """What this rank asks of the server without waiting: one socket, answers taken in by whoever looks.

    Args:
        connection: its own; nothing else is called on it.
        session: number of the session now, as each message carries it.
    """

    def __init__(self, connection: Connection, session: Callable[[], int]) -> None:
        self._connection = connection
        self._session = session

    @property
    def session(self) -> int:
        """The session's number now; 0, which no server knows, where there is none."""
        try:
            return self._session()
        except RuntimeError:  # lost, or closed
            return 0

    def ask(self, message: Message) -> Future[Any]:
        """The message is on its way; where there is no server, the future says so."""
        try:
            return self._connection.request(message)
        except (ServerLostError, ValueError) as error:
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed

    def look(self, timeout_s: float = 0.0) -> None:
        """Answers that have come are in their futures; waits for one, if so many seconds are given."""
        if self._connection.num_open:
            self._connection.poll(timeout_s)

    def close(self) -> None:
        """What was not answered fails."""
        self._connection.close()


FenceEvent = tuple[PeerEvent, bytes]
"""An event of the engine's stream, with its exported handle."""


class Fences:
    """Events that put a copy behind the engine's stream (XFER-3), made once, exported once and used again. Thread-safe.

    Args:
        device: whose stream; on the CPU device nothing runs behind the caller's back, and there are none.
        stream: the stream that computes now.
    """

    def __init__(self, device: str, stream: Callable[[], int]) -> None:
        self._device = device
        self._stream = stream
        self._lock = threading.Lock()
        self._free: list[FenceEvent] = []
        self._closed = False

    def record(self) -> FenceEvent | None:
        """An event behind all that the stream was given so far, with its exported handle; None on the CPU device."""
        if not self._device.startswith("cuda"):
            return None
        with self._lock:
            taken = self._free.pop() if self._free else None
        if taken is None:
            event = PeerEvent(self._device)
            taken = event, event.export()
        taken[0].record(self._stream())
        return taken

    def give(self, taken: FenceEvent | None) -> None:
        """Nobody waits for the event any more."""
        if taken is None:
            return
        with self._lock:
            if not self._closed:
                self._free.append(taken)
                return
        taken[0].close()

    def close(self) -> None:
        """Free events are gone; those in use go when they are given back."""
        with self._lock:
            self._closed, free = True, self._free
            self._free = []
        for event, _handle in free:
            event.close()


class Cut(NamedTuple):
    """How one load moves.

    Attributes:
        slices: its units, in order.
        layers_per_slice: what cut them; 0: chunk-major.
        slot: where they are counted; None when chunk-major.
    """

    slices: tuple[Slice, ...]
    layers_per_slice: int | tuple[int, ...]
    slot: ArrivalSlot | None


@dataclass(frozen=True, slots=True)
class Moves:
    """What both sides need to move this rank's bytes.

    Attributes:
        rank: of the engine.
        num_layers: of the stage.
        layers_per_slice: width or schedule of a load that names none; 0: chunk-major.
        pool: arrival slots.
        line: to the server.
        fences: of the engine's stream.
        watch: the server that this registration is with.
        tables: a request's block tables by KV cache group, as kernel groups read them.
        null_block: block id that stands for none.
        timeout_s: a transfer that has not ended by then fails.
    """

    rank: int
    num_layers: int
    layers_per_slice: int | tuple[int, ...]
    pool: LayerArrivalPool
    line: Line
    fences: Fences
    watch: Callable[[], ServerWatch]
    tables: Callable[[BlockTables], Sequence[Sequence[int]]]
    null_block: int | None
    timeout_s: float

    def cut(self, order: LeasedLoad) -> Cut:
        """How a load moves: chunk-major without a width or an arrival slot, the reason said once."""
        width = self.layers_per_slice if order.layers_per_slice is None else order.layers_per_slice
        slot = self.pool.take() if width else None
        if slot is not None:
            return Cut(_known_slices(self.num_layers, width), width, slot)
        if width:
            reason, first = self.pool.why_none()
            if first:
                _log.warning("retrieves run chunk-major: %s", reason)
        return Cut(_known_slices(self.num_layers, self.num_layers), 0, None)

    def place(self, slot: ArrivalSlot | None) -> str | None:
        """A slot as it is sent."""
        path = self.pool.board.path
        if slot is None or path is None:
            return None
        return str(BoardPlace(path, self.pool.board.num_entries, slot.entry, slot.generation))

    def give(self, slot: ArrivalSlot | None) -> None:
        """The slot's retrieve has ended."""
        if slot is not None:
            self.pool.give(slot)

    def packed(self, blocks: BlockTables) -> tuple[bytes, ...]:
        """Block tables as they are sent."""
        return tuple(np.asarray(table, dtype="<i4").tobytes() for table in self.tables(blocks))

    def commit_message(self, order: LeasedStore, blocks: tuple[bytes, ...], events: tuple[bytes, ...] | None) -> Store:
        """Says that this rank's bytes are in their slots, or asks the server to put them there."""
        return Store(
            self.line.session,
            Phase.COMMIT,
            order.lease,
            b"",
            0,
            0,
            b"",
            self.rank,
            order.request,
            blocks,
            order.num_tokens,
            order.skip_tokens,
            self.sent_null_block,
            events,
        )

    @property
    def sent_null_block(self) -> int:
        """The null block as it is sent."""
        return -1 if self.null_block is None else self.null_block

    def pending(self, order: LeasedLoad, begin: Callable[[LeasedLoad, FenceEvent | None], Arriving]) -> PendingLoad:
        """A load behind what the stream was given so far."""
        event = self.fences.record()

        def drop() -> None:
            self.fences.give(event)
            self.line.ask(self.abort_message(order.lease))

        return PendingLoad(lambda: begin(order, event), drop, is_safe_ahead(order))

    def abort_message(self, lease: int) -> Abort:
        """Gives this rank's part up."""
        return Abort(self.line.session, lease, self.rank)


def is_safe_ahead(order: LeasedLoad) -> bool:
    """Whether a copy may begin before the server has granted it: the lookup's lock holds for long enough."""
    return time.monotonic_ns() < order.locked_until_ns - _MARGIN_NS


class PendingLoad:
    """A load that waits for its turn: called, it begins; given up before that, it gives back what it holds.

    Args:
        begin: begins it.
        drop: gives back its fence and its part of the lease.
        is_prompt: it begins without waiting for the server.
    """

    def __init__(self, begin: Callable[[], Arriving], drop: Callable[[], object], is_prompt: bool) -> None:
        self._begin = begin
        self._drop = drop
        self._begun = False
        self.is_prompt = is_prompt

    def __call__(self) -> Arriving:
        """It is on its way."""
        self._begun = True
        return self._begin()

    def end(self) -> None:
        """It has ended, or never will begin; called once."""
        if not self._begun:
            self._drop()


class Beginning(AtOnce):
    """Begins loads at once, on the caller's thread, but those that must first wait for the server, on its own."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lamella-submit")

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As `Executor.submit`."""
        is_prompt = isinstance(fn, PendingLoad) and fn.is_prompt
        return super().submit(fn, *args, **kwargs) if is_prompt else self._thread.submit(fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As `Executor.shutdown`."""
        self._thread.shutdown(wait, cancel_futures=cancel_futures)


class Side(Protocol):
    """Moves one rank's loads and stores."""

    def load(self, order: LeasedLoad) -> PendingLoad:
        """Called on the model runner's thread, with what has been enqueued so far before it (XFER-3); what it returns
        begins the load, and may be called on another thread.
        """  # noqa: D205 - one sentence more than a line

    def store(self, order: LeasedStore, parts: Sequence[Slice]) -> Arriving:
        """Some layers of a store are on their way, behind what has been enqueued so far."""

    def commit(self, order: LeasedStore, ok: bool) -> Future[Any]:
        """Every layer of the store has ended, well or not; the future says when its objects can be read."""

    def close(self) -> None:
        """Nothing of this side is in flight any more."""
