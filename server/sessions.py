"""Who is registered: sessions by number, and each engine's ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lamella.server.protocol import Role, TransferSide

if TYPE_CHECKING:
    from lamella.server.mover import Mover
    from lamella.server.places import Place


@dataclass(slots=True, eq=False)
class Session:
    """One registration.

    Attributes:
        number: what the peer calls itself by; drawn at random.
        turn: which registration of this server's it came of, counted as they were asked for.
        engine, role, rank, num_ranks, transfer_side: as registered.
        alive: its process's mark; "" where only its messages tell.
        heard_ns: when it was last heard.
        ready_slots: slots from 0 on that its device reaches; -1: it maps none.
        space: digest of its key space, salt included; b"" of a scheduler.
        place: where its objects are; None of a scheduler.
        mover: what moves its bytes where the server does.
    """

    number: int
    turn: int
    engine: str
    role: Role
    rank: int
    num_ranks: int
    transfer_side: TransferSide
    alive: str
    heard_ns: int
    ready_slots: int
    space: bytes
    place: Place | None
    mover: Mover | None


class SessionBook:
    """Every session of a server. Not thread-safe.

    Args:
        clock_ns: a monotonic clock.
        is_alive: whether the process of a mark lives.
        silent_ns: how long a peer without a mark may say nothing.
    """

    def __init__(self, clock_ns: Callable[[], int], is_alive: Callable[[str], bool], silent_ns: int) -> None:
        self._clock_ns = clock_ns
        self._is_alive = is_alive
        self._silent_ns = silent_ns
        self._sessions: dict[int, Session] = {}
        self._ranks: dict[tuple[str, int], Session] = {}

    def __len__(self) -> int:
        """Sessions."""
        return len(self._sessions)

    def add(self, session: Session) -> None:
        """The session is known; it is its engine's rank from now on, in place of an earlier one."""
        self._sessions[session.number] = session
        if session.role is Role.RANK:
            self._ranks[session.engine, session.rank] = session

    def heard(self, number: int) -> Session | None:
        """The session, which is heard now; None if there is none."""
        found = self._sessions.get(number)
        if found is not None:
            found.heard_ns = self._clock_ns()
        return found

    def remove(self, session: Session) -> None:
        """The session is not known any more."""
        del self._sessions[session.number]
        if self._ranks.get((session.engine, session.rank)) is session:
            del self._ranks[session.engine, session.rank]

    def ranks(self, engine: str, num_ranks: int) -> tuple[Session, ...] | None:
        """An engine's ranks in order; None if one is not registered."""
        found = tuple(self._ranks.get((engine, rank)) for rank in range(num_ranks))
        return None if None in found else found  # type: ignore[return-value]

    def rank(self, engine: str, rank: int) -> Session | None:
        """One of an engine's ranks."""
        return self._ranks.get((engine, rank))

    def of_mark(self, alive: str) -> tuple[Session, ...]:
        """The sessions of one process's mark; none of "", which is nobody's."""
        return tuple(session for session in self._sessions.values() if alive and session.alive == alive)

    def dead(self) -> tuple[Session, ...]:
        """Sessions whose process is gone or has fallen silent; the caller removes them."""
        now_ns = self._clock_ns()
        return tuple(
            session
            for session in self._sessions.values()
            if (not self._is_alive(session.alive) if session.alive else now_ns - session.heard_ns > self._silent_ns)
        )

    def all(self) -> tuple[Session, ...]:
        """Every session."""
        return tuple(self._sessions.values())
