"""Lookups, retrieves and stores: which slots a peer may read or write, and until when.

Called by the loop's thread alone. The server's own moves end on other threads; `later` brings their ends here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Final, NamedTuple, TypeVar

from lamella.cuda_ext.arrival_board import BoardPlace
from lamella.cuda_ext.pool import PinnedObjects, Reservation
from lamella.cuda_ext.transfer import TransferState
from lamella.reference.keys import ChunkKey
from lamella.server.cache_mover import Moved
from lamella.server.frames import RefusedError, unpack_keys
from lamella.server.leases import LeaseBook, Part, PartState
from lamella.server.metrics import ServerMetrics
from lamella.server.mover import Move, Mover
from lamella.server.places import Place
from lamella.server.protocol import (
    Abort,
    Ended,
    Found,
    Lookup,
    Places,
    Release,
    Retrieve,
    Retrieved,
    Store,
    Stored,
    TransferSide,
)
from lamella.server.sessions import Session, SessionBook
from lamella.server.wire import EVERY_RANK, Code

_Answer = TypeVar("_Answer", Retrieved, Stored)

MOST_SLOTS: Final = 1 << 19
"""Slots that one answer names, on all ranks together, so that it fits a frame. Further chunks are no hits, and are not
stored: 16,384 chunks of an engine of 32 ranks."""


class Loan(NamedTuple):
    """Slots of a place, lent to a peer to read or to write."""

    place: Place
    held: PinnedObjects | Reservation

    def give_back(self, *, keep: bool) -> bool:
        """The slots are the place's again; whether something new is readable in them, which it is only if `keep`."""
        if isinstance(self.held, PinnedObjects):
            self.held.release()
            return False
        if not keep:
            self.held.abandon()
            return False
        for put in self.place.storage.batched_put(self.held):
            put.add_done_callback(_look_away)
        return True


def _look_away(put: Future[None]) -> None:
    put.exception()  # counted by the storage manager; nobody waits for it


class Lending:
    """See the module.

    Args:
        leases, sessions, metrics: of the server.
        later: runs a function on the loop's thread, soon.
    """

    def __init__(
        self,
        leases: LeaseBook[Loan],
        sessions: SessionBook,
        metrics: ServerMetrics,
        later: Callable[[Callable[[], None]], None],
    ) -> None:
        self._leases = leases
        self._sessions = sessions
        self._metrics = metrics
        self._later = later
        self._moves: dict[Part[Loan], Move] = {}
        self._stopped: dict[Part[Loan], Future[Ended]] = {}

    # ---- reading

    def lookup(self, session: Session, message: Lookup) -> Found:
        """What is there on every rank asked for, locked on each (SRV-3)."""
        ranks = self._ranks(session, message.rank)
        if ranks is None:  # an engine of which a rank is missing has nothing that it could use whole
            return Found(0, 0, (), False)
        keys = [_keys(rank, message.prefixes, message.last_tokens) for rank in ranks]
        first, end = message.first_wanted, len(keys[0])
        if first > end:
            raise RefusedError(Code.REFUSED, f"first_wanted must be at most {end}, the chunks named, got {first}")
        hits = end = min(end, first + MOST_SLOTS // len(ranks))
        keys = [named[:end] for named in keys]
        locked: list[PinnedObjects] = []
        for rank, named in zip(ranks, keys, strict=True):
            lease = _place(rank).pool.pin_leading(named[first:hits])
            hits = first + _reachable(rank, lease.slots)
            locked.append(lease)
        locked = [_shortened(_place(rank), lease, hits - first) for rank, lease in zip(ranks, locked, strict=True)]
        self._metrics.asked_chunks.inc(end - first)
        self._metrics.hit_chunks.inc(hits - first)
        asked = [
            _place(rank).fetching.want(named, hits)
            for rank, named in zip(ranks, keys, strict=True)
            if message.use_tiers
        ]
        pending = any(asked)
        if hits == first:
            return Found(0, hits, (), pending)
        chunks = range(first, hits)
        shares = [(rank.rank, Loan(_place(rank), lease), chunks) for rank, lease in zip(ranks, locked, strict=True)]
        number = self._leases.lock(session.engine, session.number, shares)
        for rank in ranks:
            if rank.mover is not None:  # once this is answered; its retrieve comes soon
                self._later(rank.mover.rouse)
        return Found(number, hits, tuple(lease.slots for lease in locked), pending)

    def retrieve(self, session: Session, message: Retrieve) -> Retrieved | Future[Retrieved]:
        """The part is a transfer from now on; the server's own is answered when it has ended."""
        part = self._part(session, message.lease, message.rank)
        try:
            self._leases.begin(part, session.number)
        except RuntimeError as misused:
            raise RefusedError(Code.REFUSED, str(misused)) from None
        first, slots = part.chunks[0], part.held.held.slots
        if session.transfer_side is TransferSide.WORKER:
            self._metrics.retrieves.labels("worker").inc()
            return Retrieved(first, slots, "worker", "", 0, 0)
        mover = _mover(session)
        try:
            answer = self._moved_by_server(
                part,
                lambda on_end: mover.retrieve(
                    part.held.held.host_objects(part.chunks),
                    message.blocks,
                    message.num_tokens,
                    on_end=on_end,
                    width=message.layers_per_slice,
                    board=BoardPlace.parse(message.board) if message.board is not None else None,
                    **_options(message),
                ),
                lambda moved: Retrieved(
                    first, slots, moved.path, moved.reason[:512], moved.num_bytes, moved.duration_ns
                ),
            )
        except RefusedError:
            self._leases.undo_begin(part)
            raise
        self._metrics.retrieves.labels("server").inc()
        return answer

    # ---- writing

    def allocate(self, session: Session, message: Store) -> Stored:
        """Slots on every rank asked for, or on none; nor where a rank's chunks could never be hit."""
        ranks = self._ranks(session, message.rank) or ()
        if bool(message.first_chunk) != bool(message.after):
            raise RefusedError(
                Code.REFUSED,
                f"chunks from {message.first_chunk} on are stored behind {message.after.hex() or 'nothing'}: chunk 0 "
                "alone has nothing before it, any other names the chunk before it",
            )
        heads = {rank.rank: _before(rank, message.after) for rank in ranks}
        if not all(_may_reach(_place(rank), heads[rank.rank]) for rank in ranks):
            self._metrics.no_head.inc()
            return Stored(0, (), False, True, "", 0, 0)
        most = MOST_SLOTS // max(1, len(ranks))
        asked = [(rank, _keys(rank, message.prefixes, message.last_tokens)[:most]) for rank in ranks]
        loans: dict[int, tuple[Session, Loan, tuple[int, ...]]] = {}
        for rank, keys in asked:
            try:
                reservation = _place(rank).storage.allocate(keys, heads[rank.rank])
            except ValueError as refused:
                _abandon(loan for _rank, loan, _chunks in loans.values())
                raise RefusedError(Code.REFUSED, str(refused)) from None
            if reservation is not None:
                self._metrics.evicted_objects.inc(len(reservation.evicted))
                chunk_of = {key: message.first_chunk + index for index, key in enumerate(keys)}
                chunks = tuple([chunk_of[key] for key in reservation.keys])
                loans[rank.rank] = rank, Loan(_place(rank), reservation), chunks
            if reservation is None or _reachable(rank, reservation.slots) < len(reservation.slots):
                _abandon(loan for _rank, loan, _chunks in loans.values())
                self._metrics.no_room.inc()
                return Stored(0, (), True, False, "", 0, 0)
        _abandon(loan for _rank, loan, chunks in loans.values() if not chunks)
        shares = [(number, rank.number, loan, chunks) for number, (rank, loan, chunks) in loans.items() if chunks]
        if not shares:
            return Stored(0, (), False, False, "", 0, 0)
        places = tuple(Places(number, chunks, loan.held.slots) for number, _owner, loan, chunks in shares)
        return Stored(self._leases.reserve(session.engine, shares), places, False, False, "", 0, 0)

    def commit(self, session: Session, message: Store) -> Stored | Future[Stored]:
        """The part's objects are readable; where the server moves them, once they have been moved."""
        part = self._part(session, message.lease, message.rank)
        if part.state is not PartState.WRITING or part.busy:
            state = "being moved" if part.busy else part.state.value
            raise RefusedError(Code.REFUSED, f"the part of rank {part.rank} is {state}: there is nothing to commit")
        if session.transfer_side is TransferSide.WORKER:
            self._close_part(part, keep=True)
            return Stored(0, (), False, False, "worker", 0, 0)
        mover = _mover(session)
        return self._moved_by_server(
            part,
            lambda on_end: mover.store(
                part.held.held.host_objects(part.chunks),
                message.blocks,
                message.num_tokens,
                on_end=on_end,
                **_options(message),
            ),
            lambda moved: Stored(0, (), False, False, moved.path, moved.num_bytes, moved.duration_ns),
        )

    def _moved_by_server(
        self,
        part: Part[Loan],
        begin: Callable[[Callable[[Moved], object]], Move],
        answer: Callable[[Moved], _Answer],
    ) -> Future[_Answer]:
        """The server moves the part from now on; answered when nothing of it is in flight and the part has ended.

        Args:
            part: to be moved.
            begin: begins, and calls what it is given at the end, on any thread.
            answer: to a move that has landed.

        Raises:
            RefusedError: it did not begin; the part is as it was.
        """
        answered: Future[_Answer] = Future()

        def ended(moved: Moved) -> None:
            landed = moved.state is TransferState.LANDED
            self._close_part(part, keep=landed or not part.is_writing)
            if landed:
                answered.set_result(answer(moved))
            else:
                answered.set_exception(RefusedError(Code.FAILED, moved.reason))

        try:
            self._moves[part] = begin(lambda moved: self._later(lambda: ended(moved)))
        except (ValueError, OSError, RuntimeError) as refused:
            raise RefusedError(Code.REFUSED, str(refused)) from None
        part.busy = True
        return answered

    # ---- ends

    def release(self, session: Session, message: Release) -> Ended:
        """Parts that were read are let go of."""
        parts = self._named(session, message.lease, message.rank)
        if any(part.is_writing or part.busy for part in parts):
            raise RefusedError(
                Code.REFUSED, "a part that is being written, or moved by the server, ends by COMMIT or ABORT"
            )
        for part in parts:
            self._close_part(part, keep=True)
        return Ended(bool(parts))

    def abort(self, session: Session, message: Abort) -> Ended | Future[Ended]:
        """Parts are let go of without effect; answered once the server moves nothing of them any more."""
        parts = self._named(session, message.lease, message.rank)
        moving = [part for part in parts if part.busy]
        if any(part in self._stopped for part in moving):
            raise RefusedError(Code.REFUSED, "this part is being aborted already")
        for part in parts:
            if not part.busy:
                self._close_part(part, keep=False)
                self._metrics.aborted_parts.inc()
        if not moving:
            return Ended(bool(parts))
        answer: Future[Ended] = Future()
        for part in moving:
            self._stopped[part] = answer
            self._metrics.aborted_parts.inc()
            self._moves[part].cancel()
        return answer

    def end_parts(self, parts: Sequence[Part[Loan]]) -> None:
        """Parts whose time, or whose process, is over."""
        for part in parts:
            self._close_part(part, keep=not part.is_writing)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is moved or written."""
        return not self._leases.count(PartState.MOVING, PartState.WRITING, PartState.QUARANTINED)

    def _close_part(self, part: Part[Loan], *, keep: bool) -> None:
        """The part is gone; what it wrote is readable if `keep`."""
        loan = self._leases.end(part)
        part.busy = False
        self._moves.pop(part, None)
        if loan.give_back(keep=keep):
            self._metrics.stored_objects.inc(len(loan.held.slots))
        stopped = self._stopped.pop(part, None)
        if stopped is not None and stopped not in self._stopped.values():  # the last of an abort's parts answers
            stopped.set_result(Ended(True))

    # ---- who may

    def _ranks(self, session: Session, rank: int) -> tuple[Session, ...] | None:
        """The ranks that a message speaks of; None if one of them is not registered."""
        if rank == EVERY_RANK:
            return self._sessions.ranks(session.engine, session.num_ranks)
        found = self._sessions.rank(session.engine, rank)
        return None if found is None else (found,)

    def _part(self, session: Session, lease: int, rank: int) -> Part[Loan]:
        """The part of the session's own rank."""
        if session.place is None or session.rank != rank:
            raise RefusedError(
                Code.REFUSED,
                f"a rank moves its own part: this session is {session.role.value} {session.rank}, the part rank {rank}",
            )
        try:
            return self._leases.part(lease, rank, session.engine)
        except KeyError:
            raise RefusedError(
                Code.UNKNOWN_LEASE, f"lease {lease:x} has no part of rank {rank} (any more): look it up again"
            ) from None

    def _named(self, session: Session, lease: int, rank: int) -> tuple[Part[Loan], ...]:
        parts = self._leases.parts(lease, session.engine)
        return tuple(part for part in parts if rank in (EVERY_RANK, part.rank))


def _mover(session: Session) -> Mover:
    assert session.mover is not None, "a rank whose bytes the server moves has a mover"
    return session.mover


def _options(message: Retrieve | Store) -> dict[str, Any]:
    null = None if message.null_block < 0 else message.null_block
    return {"skip_tokens": message.skip_tokens, "null_block": null, "events": message.events or ()}


def _place(rank: Session) -> Place:
    assert rank.place is not None, "a rank has a place"
    return rank.place


def _keys(rank: Session, prefixes: bytes, last_tokens: int) -> tuple[ChunkKey, ...]:
    """The keys in the rank's own space, tenant included (SRV-5)."""
    return unpack_keys(rank.space, prefixes, _place(rank).layout.chunk_tokens, last_tokens)


def _before(rank: Session, prefix: bytes) -> ChunkKey | None:
    """The key of the chunk before those that are stored."""
    found = unpack_keys(rank.space, prefix, _place(rank).layout.chunk_tokens, _place(rank).layout.chunk_tokens)
    return found[0] if found else None


def _may_reach(place: Place, head: ChunkKey | None) -> bool:
    """Whether a look-up may get as far as what comes behind `head`: it is there, or a tier may bring it back."""
    return bool(place.storage.tiers) or place.pool.is_whole(head)


def _reachable(rank: Session, slots: Sequence[int]) -> int:
    """How many of the slots, from the first on, the rank's device reaches already."""
    if rank.ready_slots < 0 or not slots or max(slots) < rank.ready_slots:
        return len(slots)
    return next(index for index, slot in enumerate(slots) if slot >= rank.ready_slots)


def _shortened(place: Place, lease: PinnedObjects, length: int) -> PinnedObjects:
    """A lease on the first objects alone; none of them is free in between."""
    if len(lease.keys) == length:
        return lease
    shorter = place.pool.pin(lease.keys[:length])
    lease.release()
    return shorter


def _abandon(loans: Iterable[Loan]) -> None:
    for loan in loans:
        loan.give_back(keep=False)
