"""How a process speaks to the cache server: one connection a thread, one session a rank or scheduler.

    Connection     frames on a socket; `call` waits, `request` does not and is answered at a later `poll`
    CacheSession   registered, kept alive by a thread of its own, registered again when the server was restarted

A server that is not there costs a miss or a failed load, never a hang: every wait has a bound (SAFE-5).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import zmq

from lamella.cuda_ext.slots import SharedSlots, SlotShape
from lamella.reference.keys import ChunkKey
from lamella.server.connection import Connection, ServerLostError
from lamella.server.endpoint import AliveMark, check_folder
from lamella.server.frames import RefusedError, allocation, pack_prefixes
from lamella.server.protocol import (
    Abort,
    Ended,
    Found,
    Lookup,
    Message,
    Phase,
    Ping,
    Pong,
    Register,
    Registered,
    Release,
    Retrieve,
    Retrieved,
    Stats,
    StatsReport,
    Store,
    Stored,
)
from lamella.server.wire import EVERY_RANK, Code, Events, Tables, Width

_log = logging.getLogger(__name__)
_Answer = TypeVar("_Answer", bound=Message)

_REGISTER_S: Final = 10.0
"""Least bound of a registration, for which a server makes memory."""
_SOON_S: Final = 0.25
"""Until the next try to register, or to tell of more slots while they become ready."""

MISS = Found(lease=0, num_chunks=0, slots=(), pending=False)


@dataclass(frozen=True, slots=True)
class Epoch:
    """One registration: what it brought holds until the next."""

    number: int
    registered: Registered

    @property
    def server(self) -> int:
        """Which server it is with: this rank's slots are the same under every registration with one server."""
        return self.registered.server

    @property
    def shared(self) -> SharedSlots | None:
        """How to attach this rank's slots; None for a scheduler."""
        pool = self.registered.pool
        if pool is None:
            return None
        return SharedSlots(Path(pool.path), SlotShape(pool.object_bytes, pool.num_slots, pool.target_piece_bytes))


class CacheSession:
    """A rank or scheduler, registered with the server for as long as both live. Thread-safe.

    Args:
        where: the server's folder.
        register: the registration, its `alive` left empty.
        timeout_s: bound of each call.
        ready_slots: how many slots this process's device can reach now, asked again with each ping; -1: all of them.
        on_epoch: called with each registration, from the constructor and then from the keeping thread: attach the new
            slots, let go of the old. What it raises makes the session lost until it succeeds.

    Raises:
        ServerLostError: no server within the bound.
        RefusedError: it refuses this registration.
        FileNotFoundError, PermissionError: as `Connection`.
    """

    def __init__(
        self,
        where: Path,
        register: Register,
        *,
        timeout_s: float = 2.0,
        ready_slots: Callable[[], int] = lambda: -1,
        on_epoch: Callable[[Epoch], None] = lambda epoch: None,
    ) -> None:
        check_folder(where)
        self._mark = AliveMark(where)
        self._register = msgspec.structs.replace(register, alive=self._mark.name)
        self._ready_slots = ready_slots
        self._on_epoch = on_epoch
        self._timeout_s = timeout_s
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._where = where
        self._epoch: Epoch | None = None
        self._lost = ""
        self._stopping = threading.Event()
        self._woken = threading.Event()
        self._threads = threading.local()
        self._connections: list[Connection] = []
        self._connections_lock = threading.Lock()
        try:
            self._begin()
        except BaseException:
            self._close_sockets()
            self._mark.close()
            raise
        self._thread = threading.Thread(target=self._keep, name="lamella-session", daemon=True)
        self._thread.start()

    @property
    def connection(self) -> Connection:
        """The calling thread's own, made anew with each registration.

        One that a server's end has cut would take a while to notice the next server, and be taken for its loss.
        """
        number = self._epoch.number if self._epoch is not None else 0
        found: tuple[int, Connection] | None = getattr(self._threads, "found", None)
        if found is not None and found[0] == number:
            return found[1]
        made = self._open()
        self._threads.found = (number, made)
        if found is not None:
            found[1].close()
        return made

    @property
    def epoch(self) -> Epoch:
        """The registration in force.

        Raises:
            ServerLostError: there is none now; the keeping thread tries again.
        """
        found = self._epoch
        if found is None or self._lost:
            raise ServerLostError(self._lost or "not registered")
        return found

    @property
    def is_lost(self) -> bool:
        """Whether there is no server, or none that knows this session, as far as this process has seen."""
        return bool(self._lost)

    def lookup(
        self,
        keys: Sequence[ChunkKey],
        *,
        first_wanted: int = 0,
        rank: int = EVERY_RANK,
        use_tiers: bool = True,
        epoch: Epoch | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> Found:
        """What of `keys` is there, locked; a miss where the server is lost or draining.

        Args:
            epoch: the registration whose slots the caller has attached; under another it is a miss. None: the present.
            meanwhile: as `Connection.call`.
        """
        if not keys:
            return MISS
        try:
            session = self._session_of(epoch)
            message = Lookup(session, pack_prefixes(keys), keys[-1].num_tokens, first_wanted, rank, use_tiers)
            return self.call(message, Found, meanwhile=meanwhile)
        except ServerLostError:
            return MISS
        except RefusedError as refused:
            if refused.code is Code.DRAINING:
                return MISS
            raise

    def retrieve(
        self,
        lease: int,
        rank: int,
        request: str = "",
        blocks: Tables = (),
        num_tokens: int = 0,
        skip_tokens: int = 0,
        null_block: int | None = None,
        board: str | None = None,
        events: Events | None = None,
        layers_per_slice: Width = 0,
        timeout_s: float | None = None,
    ) -> Retrieved:
        """The part is this transfer's, see `Retrieve`; the server side's call lasts as long as the transfer.

        Raises:
            ServerLostError: no answer: the slots may not be touched.
            RefusedError: the lease has ended (`Code.UNKNOWN_LEASE`), or the transfer failed.
        """
        null = -1 if null_block is None else null_block
        size = num_tokens, skip_tokens, null
        message = Retrieve(self._session, lease, rank, request, blocks, *size, board, events, layers_per_slice)
        return self.call(message, Retrieved, timeout_s)

    def allocate(
        self,
        keys: Sequence[ChunkKey],
        *,
        first_chunk: int = 0,
        rank: int = EVERY_RANK,
        epoch: Epoch | None = None,
    ) -> Stored:
        """Slots for those chunks that are not there yet, in the memory of `epoch` (None: of the present one).

        Whoever writes into slots names the registration whose memory he has attached: under another, the same numbers
        are others' slots.

        Args:
            keys, first_chunk, rank: as `allocation`.

        Raises:
            ServerLostError, RefusedError: nothing was allocated.
        """
        return self.call(allocation(self._session_of(epoch), keys, first_chunk, rank), Stored)

    def commit(
        self,
        lease: int,
        rank: int,
        request: str = "",
        blocks: Tables = (),
        num_tokens: int = 0,
        skip_tokens: int = 0,
        null_block: int | None = None,
        events: Events | None = None,
        timeout_s: float | None = None,
    ) -> Stored:
        """This rank's bytes are in its slots, or are put there now by a server that moves them: they are readable.

        Raises:
            ServerLostError, RefusedError: they are not.
        """
        null = -1 if null_block is None else null_block
        session, size = self._session, (num_tokens, skip_tokens, null)
        message = Store(session, Phase.COMMIT, lease, b"", 0, 0, b"", rank, request, blocks, *size, events)
        return self.call(message, Stored, timeout_s)

    def release(self, lease: int, rank: int = EVERY_RANK) -> bool:
        """The part was read to its end; whether it was held. A lost server has let go by itself."""
        return self._end(Release(self._session_or_0, lease, rank))

    def abort(self, lease: int, rank: int = EVERY_RANK) -> bool:
        """The part is given up; whether it was held. A lost server has let go by itself."""
        return self._end(Abort(self._session_or_0, lease, rank))

    def stats(self) -> StatsReport:
        """Figures of the server.

        Raises:
            ServerLostError: no answer.
        """
        return self.connection.call(Stats(), StatsReport)

    def call(
        self,
        message: Message,
        answer: type[_Answer],
        timeout_s: float | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> _Answer:
        """As `Connection.call`, on this thread's connection.

        A session that the server does not know is lost, and so is a server that has come back as another version.

        Raises:
            ServerLostError, RefusedError: as `Connection.call`.
        """
        try:
            return self.connection.call(message, answer, timeout_s, meanwhile)
        except ServerLostError as lost:
            self._lose(str(lost))
            raise
        except RefusedError as refused:
            if refused.code in (Code.UNKNOWN_SESSION, Code.VERSION):
                self._lose(str(refused))
                raise ServerLostError(str(refused)) from None
            raise

    def close(self) -> None:
        """The server lets go of everything of this session. A second call does nothing."""
        self._stopping.set()
        self._woken.set()
        self._give_up("the session is closed")
        self._thread.join()
        self._mark.close()
        self._close_sockets()

    @property
    def _session(self) -> int:
        return self.epoch.registered.session

    def _session_of(self, epoch: Epoch | None) -> int:
        present = self.epoch
        if epoch is not None and epoch.number != present.number:
            raise ServerLostError("the server was another when these slots were attached: attach the new ones")
        return present.registered.session

    @property
    def _session_or_0(self) -> int:
        return self._epoch.registered.session if self._epoch is not None else 0

    def _end(self, message: Release | Abort) -> bool:
        try:
            return self.call(message, Ended).held
        except ServerLostError:
            return False

    def _lose(self, reason: str) -> None:
        if not self._lost:
            _log.warning("the cache server is lost (%s); everything is a miss until it is back", reason)
            self._lost = reason
            self._give_up(reason)
        self._woken.set()

    def _open(self) -> Connection:
        made = Connection(self._where, timeout_s=self._timeout_s, context=self._context)
        with self._connections_lock:
            self._connections = [one for one in self._connections if not one.closed]
            self._connections.append(made)
        return made

    def _give_up(self, reason: str) -> None:
        """Nobody waits any longer for the server that was."""
        with self._connections_lock:
            for connection in self._connections:
                connection.give_up(reason)

    def _begin(self) -> None:
        bound_s = max(self._timeout_s, _REGISTER_S)
        with self._open() as connection:
            registered = connection.call(self._register, Registered, bound_s)
            epoch = Epoch(1 if self._epoch is None else self._epoch.number + 1, registered)
            self._on_epoch(epoch)
            # Slots are handed out from the first ping on.
            connection.call(Ping(registered.session, self._ready_slots()), Pong, bound_s)
        self._epoch, self._lost = epoch, ""

    def _keep(self) -> None:
        told = 0
        while not self._stopping.is_set():
            try:
                if self._lost:
                    self._begin()
                    _log.warning("the cache server is back: registered anew")
                before, told = told, self._ready_slots()
                pong = self.connection.call(Ping(self._session, told), Pong)
                growing = told == 0 or told > before
                if not pong.known:
                    self._lose("it does not know this session")
            except Exception as error:  # whatever it was (no descriptor left, `on_epoch`): the next try may succeed
                if not isinstance(error, ServerLostError | RefusedError | OSError | ValueError):
                    _log.exception("the session with the cache server could not be kept")
                self._lose(str(error) or type(error).__name__)
                growing = False
            wait_s = self._epoch.registered.ping_s if self._epoch is not None else 1.0
            self._woken.clear()
            self._woken.wait(min(wait_s, _SOON_S) if self._lost or growing else wait_s)

    def _close_sockets(self) -> None:
        with self._connections_lock:
            connections, self._connections = self._connections, []
        for connection in connections:
            connection.close()
        self._context.term()
