"""What each message does: who is registered, what is kept for whom, and what ends with whom.

Everything here runs on one thread, the loop's, but for what takes long: memory is made and caches are mapped on a
thread, and their end is brought back by `later`. It knows no socket, so its tests need none.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import lamella
from lamella.cuda_ext.registration import LockRegistrar, NoRegistrar
from lamella.cuda_ext.shared_memory import reclaim_stale
from lamella.reference.layout import ObjectLayout
from lamella.server.endpoint import is_alive, reclaim_marks
from lamella.server.frames import RefusedError
from lamella.server.handlers import Handlers, Peer
from lamella.server.leases import LeaseBook, PartState
from lamella.server.lending import Lending, Loan
from lamella.server.metrics import Held, ServerMetrics
from lamella.server.mover import Movement, Mover
from lamella.server.places import Place, Places, is_made
from lamella.server.protocol import (
    Abort,
    Ended,
    Found,
    Lookup,
    Phase,
    Ping,
    Pong,
    PoolShape,
    Register,
    Registered,
    Release,
    Retrieve,
    Retrieved,
    Role,
    Stats,
    StatsReport,
    Store,
    Stored,
    TransferSide,
)
from lamella.server.sessions import Session, SessionBook
from lamella.server.settings import ServerSettings
from lamella.server.shapes import read_layout, read_space
from lamella.server.wire import Code, Kind

_log = logging.getLogger(__name__)
_NS: Final = 1_000_000_000


class CacheService:
    """Every rule of the server.

    Args:
        settings: the server's.
        later: runs a function on the loop's thread, soon; called from any thread.
        movement: what this server moves bytes with; None: it moves none.
        clock_ns: a monotonic clock.
        draw: numbers of sessions and leases; no two servers draw the same (SRV-6).
        alive: whether the process of a mark lives.
    """

    def __init__(
        self,
        settings: ServerSettings,
        later: Callable[[Callable[[], None]], None],
        *,
        movement: Movement | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        draw: Callable[[], int] = lambda: secrets.randbits(62) + 1,
        alive: Callable[[str], bool] | None = None,
    ) -> None:
        self.settings = settings
        self.metrics = ServerMetrics()
        self.draining = False
        self.number = secrets.randbits(62) + 1
        """Of this server: another one, and the next one here, has another."""
        self._later = later
        self._movement = movement
        self._clock_ns = clock_ns
        self._draw = draw
        self._began_ns = clock_ns()
        self._is_alive = alive or (lambda mark: is_alive(settings.folder, mark))
        self.leases: LeaseBook[Loan] = LeaseBook(
            clock_ns, draw, int(settings.lease_s * _NS), int(settings.grace_s * _NS)
        )
        self.sessions = SessionBook(clock_ns, self._is_alive, int(settings.silent_s * _NS))
        plain = LockRegistrar() if settings.lock_memory else NoRegistrar()
        self.places = Places(settings, plain if movement is None else movement.registrar, self._is_used)
        self.lending = Lending(self.leases, self.sessions, self.metrics, later)
        self._mapping = ThreadPoolExecutor(2, thread_name_prefix="lamella-map")
        self._sweeping: Future[None] | None = None
        self._registering: list[Future[Place]] = []  # of ranks that have no session yet
        self._registrations = itertools.count(1)
        self._held = Held(0, {}, ())
        self.metrics.show(lambda: self._held)
        self.handlers = Handlers()
        self.handlers.enter(Kind.REGISTER, self.register)
        self.handlers.enter(Kind.LOOKUP, self.lookup)
        self.handlers.enter(Kind.RETRIEVE, self.retrieve)
        self.handlers.enter(Kind.STORE, self.store)
        self.handlers.enter(Kind.RELEASE, self.release)
        self.handlers.enter(Kind.ABORT, self.abort)
        self.handlers.enter(Kind.STATS, self.stats)
        self.handlers.enter(Kind.PING, self.ping)
        self.handlers.check_complete()
        self.look()

    # ---- who is there

    def register(self, message: Register, peer: Peer) -> Registered | Future[Registered]:
        """The peer has a session once its memory is there."""
        self._refuse_while_draining()
        if message.lamella_version != lamella.__version__:
            raise RefusedError(
                Code.VERSION,
                f"the server is lamella {lamella.__version__}, the client lamella {message.lamella_version}: install "
                "the same version on both",
            )
        if len(self.sessions) >= self.settings.max_sessions:
            raise RefusedError(Code.REFUSED, f"{len(self.sessions)} peers are registered, which is the limit")
        if message.rank >= message.num_ranks:
            raise RefusedError(Code.REFUSED, f"rank must be between 0 and {message.num_ranks - 1}, got {message.rank}")
        self._check_mark(message, peer)
        turn = next(self._registrations)
        if message.role is Role.SCHEDULER:
            return self._registered(turn, message, b"", None, None)
        if message.space is None:
            raise RefusedError(Code.REFUSED, "a rank registers with its key space")
        try:
            space = read_space(message.space)
            layout = read_layout(message.groups, space.form)
            described = (layout.chunk_tokens, layout.num_layers)
            said = (space.chunk_tokens, space.layers[1] - space.layers[0])
            if described != said:
                raise ValueError(f"the key space says (chunk tokens, layers) {said}, the objects have {described}")
            place = self.places.open(space, layout, message.chunk_bytes)
        except ValueError as refused:
            raise RefusedError(Code.REFUSED, str(refused)) from None
        if message.transfer_side is TransferSide.SERVER and self._movement is None:
            raise RefusedError(
                Code.REFUSED, "this server moves no bytes: start it with --device, or let the worker move them"
            )
        return self._when_mapped(turn, message, space.digest(), layout, place)

    def _check_mark(self, message: Register, peer: Peer) -> None:
        try:
            if peer.is_local and not self._is_alive(message.alive):
                raise ValueError("nobody holds it")
            if not peer.is_local and message.alive:
                raise ValueError("a peer over TCP has none")
        except ValueError as wrong:
            raise RefusedError(
                Code.REFUSED, f"the mark {message.alive!r} is not that of a live process: {wrong}"
            ) from None

    def _when_mapped(
        self, turn: int, message: Register, space: bytes, layout: ObjectLayout, place: Future[Place]
    ) -> Future[Registered]:
        answer: Future[Registered] = Future()
        self._registering.append(place)

        def map_caches() -> None:
            mover: Mover | None = None
            made: Place | None = None
            wrong: Exception | None = None
            try:
                made = place.result()
                if message.transfer_side is TransferSide.SERVER:
                    assert self._movement is not None, "looked at before"
                    mover = self._movement.open(message, layout)
            except Exception as error:
                wrong = error
            self._later(lambda: finish(made, mover, wrong))

        def finish(made: Place | None, mover: Mover | None, wrong: Exception | None) -> None:
            self._registering.remove(place)
            try:
                if wrong is not None:
                    raise wrong
                self._refuse_while_draining()
                answer.set_result(self._registered(turn, message, space, made, mover))
            except Exception as error:
                if mover is not None:
                    self._mapping.submit(_close_mover, mover)
                answer.set_exception(
                    error if isinstance(error, RefusedError) else RefusedError(Code.REFUSED, f"{error}")
                )

        self._mapping.submit(map_caches)
        return answer

    def _registered(
        self, turn: int, message: Register, space: bytes, place: Place | None, mover: Mover | None
    ) -> Registered:
        earlier = self.sessions.of_mark(message.alive)
        if any(one.turn > turn for one in earlier):
            raise RefusedError(Code.REFUSED, "this process has registered once more meanwhile")
        pool: PoolShape | None = None
        if place is not None:
            shared = place.pool.shared()
            shape = shared.shape
            pool = PoolShape(str(shared.path), shape.object_bytes, shape.num_slots, shape.target_piece_bytes)
        worker = place is not None and message.transfer_side is TransferSide.WORKER
        session = Session(
            self._draw(),
            turn,
            message.engine,
            message.role,
            message.rank,
            message.num_ranks,
            message.transfer_side,
            message.alive,
            self._clock_ns(),
            0 if worker else -1,
            space,
            place,
            mover,
        )
        for one in earlier:
            self._replace(one, session)
        self.sessions.add(session)
        where = place.label if place is not None else "no memory"
        _log.info("engine %s: %s %d is registered (%s)", session.engine, session.role.value, session.rank, where)
        return Registered(
            lamella.__version__, self.number, session.number, pool, self.settings.lease_s, self.settings.ping_s
        )

    def ping(self, message: Ping, peer: Peer) -> Pong:
        """The peer was heard."""
        session = self.sessions.heard(message.session)
        if session is None:
            return Pong(False, self.draining, 0)
        if session.place is not None:
            session.ready_slots = message.ready_slots
        return Pong(True, self.draining, session.place.ready_slots if session.place is not None else 0)

    def stats(self, message: Stats, peer: Peer) -> StatsReport:
        """The server's figures."""
        self.look()
        uptime_s = (self._clock_ns() - self._began_ns) / _NS
        return StatsReport(lamella.__version__, uptime_s, self.draining, self.metrics.figures())

    # ---- what is there

    def lookup(self, message: Lookup, peer: Peer) -> Found:
        """See `Lending.lookup`."""
        self._refuse_while_draining()
        return self.lending.lookup(self._session(message.session), message)

    def retrieve(self, message: Retrieve, peer: Peer) -> Retrieved | Future[Retrieved]:
        """See `Lending.retrieve`; what was locked before a drain began may still be retrieved."""
        return self.lending.retrieve(self._session(message.session), message)

    def store(self, message: Store, peer: Peer) -> Stored | Future[Stored]:
        """See `Lending.allocate` and `Lending.commit`."""
        session = self._session(message.session)
        if message.phase is Phase.COMMIT:
            return self.lending.commit(session, message)
        self._refuse_while_draining()
        return self.lending.allocate(session, message)

    def release(self, message: Release, peer: Peer) -> Ended:
        """See `Lending.release`."""
        return self.lending.release(self._session(message.session), message)

    def abort(self, message: Abort, peer: Peer) -> Ended | Future[Ended]:
        """See `Lending.abort`."""
        return self.lending.abort(self._session(message.session), message)

    # ---- time passes

    def tick(self) -> None:
        """What is over by now is ended: leases that nobody used, sessions whose process is gone (SRV-2)."""
        expired = self.leases.expired()
        if expired:
            self.metrics.expired_parts.inc(sum(part.state is PartState.LOCKED for part in expired))
            self.lending.end_parts(expired)
        for session in self.sessions.dead():
            self._end_session(session)
        self.look()

    def sweep(self) -> None:
        """Marks and memories that no process holds any more are removed, the memories on a thread.

        That a session ended is no moment for it: a process that dies lets go of its mark before its memory, by as long
        as its device takes; and one that was killed before it registered never had a session.
        """
        reclaim_marks(self.settings.folder)
        if self._sweeping is None or self._sweeping.done():
            self._sweeping = self._mapping.submit(_remove_stale_memories)

    def look(self) -> None:
        """What is held now is what the figures show."""
        parts = dict.fromkeys(PartState, 0)
        for part in self.leases.all():
            parts[part.state] += 1
        self._held = Held(len(self.sessions), parts, self.places.all())

    def _end_session(self, session: Session) -> None:
        self.sessions.remove(session)
        parts = self.leases.session_ended(session.number)
        self.metrics.reaped_sessions.inc()
        self.metrics.reaped_parts.inc(len(parts))
        self.lending.end_parts(parts)
        if session.mover is not None:
            self._mapping.submit(_close_mover, session.mover)
        who = session.engine, session.role.value, session.rank
        if parts:
            _log.warning("engine %s: %s %d is gone; %d parts that it held are free", *who, len(parts))
        else:
            _log.info("engine %s: %s %d is gone", *who)

    def _replace(self, old: Session, new: Session) -> None:
        """The process has registered anew, so it has forgotten its earlier session, but not what it has in flight."""
        self.sessions.remove(old)
        self.leases.hand_on(old.number, new.number)
        if old.mover is not None:
            self._mapping.submit(_close_mover, old.mover)

    def _is_used(self, place: Place) -> bool:
        return (
            any(session.place is place for session in self.sessions.all())
            or any(is_made(one) and one.result() is place for one in self._registering)
            or any(part.held.place is place for part in self.leases.all())
        )

    # ---- the end

    def drain(self) -> None:
        """Nothing new begins from now on; what has begun may end."""
        self.draining = True

    def close(self, timeout_s: float) -> None:
        """Everything was let go of: the server's own moves have stopped, tiers were given what they can keep.

        Called when no message will come any more.
        """
        movers = [session.mover for session in self.sessions.all() if session.mover is not None]
        for mover in movers:
            _close_mover(mover)
        self._mapping.shutdown(wait=True)
        _remove_stale_memories()  # of ranks that died since the last sweep: nobody may come who would look
        self.lending.end_parts(self.leases.all())
        for place in self.places.all():
            try:
                place.flush(timeout_s)
            except TimeoutError as late:
                _log.error("%s: %s", place.label, late)
        self.places.close()

    def _session(self, number: int) -> Session:
        found = self.sessions.heard(number)
        if found is None:
            raise RefusedError(Code.UNKNOWN_SESSION, "this session is not known (any more): register again")
        return found

    def _refuse_while_draining(self) -> None:
        if self.draining:
            raise RefusedError(Code.DRAINING, "the server is stopping")


def _close_mover(mover: Mover) -> None:
    try:
        mover.close()
    except (TimeoutError, OSError, RuntimeError):
        _log.exception("a rank's caches could not be closed")


def _remove_stale_memories() -> None:
    for path in reclaim_stale():
        _log.info("%s was left behind and is removed", path)
