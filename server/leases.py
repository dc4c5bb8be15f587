"""Who holds which slots, and what ends that: pure bookkeeping with a clock of the caller's.

    read:   LOCKED ──RETRIEVE──► MOVING ──RELEASE, ABORT, the peer's death──► gone
               └──lease time over, RELEASE, ABORT, the peer's death──► gone
    write:  WRITING ──COMMIT, ABORT──► gone
               └──the peer's death──► QUARANTINED ──grace over──► gone

No clock ends what is being moved (SRV-1): only its end, or that of the process that moves it. What a dying process was
writing stays its own for a grace time longer, until its device has let go too.

A rule-based machine checks the book against a plain model.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Held = TypeVar("Held")


class PartState(enum.Enum):
    """See the module's picture."""

    LOCKED = "locked"
    MOVING = "moving"
    WRITING = "writing"
    QUARANTINED = "quarantined"


@dataclass(slots=True, eq=False)
class Part(Generic[Held]):
    """One rank's share of a lease.

    Attributes:
        lease, rank: it is found by.
        engine: whose sessions may use it.
        session: whose death ends it.
        held: the pool's lease or reservation.
        chunks: of the sequence, one a slot.
        until_ns: when the clock ends it; None: never.
        busy: the server itself is moving its bytes; then it ends when they have stopped.
    """

    lease: int
    rank: int
    engine: str
    session: int
    held: Held
    chunks: Sequence[int]
    state: PartState
    until_ns: int | None
    busy: bool = False

    @property
    def is_writing(self) -> bool:
        """Whether the slots are not readable yet."""
        return self.state in (PartState.WRITING, PartState.QUARANTINED)


@dataclass(slots=True)
class _Lease(Generic[Held]):
    parts: dict[int, Part[Held]] = field(default_factory=dict)


class LeaseBook(Generic[Held]):
    """Every lease of a server. Not thread-safe.

    Args:
        clock_ns: a monotonic clock.
        draw: a number that no earlier server's lease has: random.
        lease_ns: how long what was looked up waits for its retrieve.
        grace_ns: how long what a dead process was writing is left alone.
    """

    def __init__(self, clock_ns: Callable[[], int], draw: Callable[[], int], lease_ns: int, grace_ns: int) -> None:
        self._clock_ns = clock_ns
        self._draw = draw
        self._lease_ns = lease_ns
        self._grace_ns = grace_ns
        self._leases: dict[int, _Lease[Held]] = {}

    # ---- granted

    def lock(self, engine: str, session: int, shares: Sequence[tuple[int, Held, Sequence[int]]]) -> int:
        """A lease to read: each rank's (rank, held, chunks)."""
        until_ns = self._clock_ns() + self._lease_ns
        return self._grant(
            Part(0, rank, engine, session, held, chunks, PartState.LOCKED, until_ns) for rank, held, chunks in shares
        )

    def reserve(self, engine: str, shares: Sequence[tuple[int, int, Held, Sequence[int]]]) -> int:
        """A lease to write: each rank's (rank, the rank's own session, held, chunks)."""
        return self._grant(
            Part(0, rank, engine, session, held, chunks, PartState.WRITING, None)
            for rank, session, held, chunks in shares
        )

    def _grant(self, parts: Iterable[Part[Held]]) -> int:
        number = self._draw()
        lease: _Lease[Held] = _Lease()
        for part in parts:
            part.lease = number
            lease.parts[part.rank] = part
        self._leases[number] = lease
        return number

    # ---- used

    def part(self, lease: int, rank: int, engine: str) -> Part[Held]:
        """The part, if it has not ended and is this engine's.

        Raises:
            KeyError: it has, is another's, or never was (SRV-6).
        """
        found = self._leases[lease].parts[rank]
        if found.engine != engine or found.state is PartState.QUARANTINED:
            raise KeyError(lease)
        return found

    def parts(self, lease: int, engine: str) -> tuple[Part[Held], ...]:
        """Every part of a lease that has not ended; none of another engine's."""
        found = self._leases.get(lease)
        if found is None:
            return ()
        return tuple(
            part for part in found.parts.values() if part.engine == engine and part.state is not PartState.QUARANTINED
        )

    def begin(self, part: Part[Held], session: int) -> None:
        """The part is this session's transfer; no clock ends it from now on.

        Raises:
            RuntimeError: it is a transfer already, or is being written.
        """
        if part.state is not PartState.LOCKED:
            raise RuntimeError(f"the part of rank {part.rank} is {part.state.value}, not locked")
        part.state, part.session, part.until_ns = PartState.MOVING, session, None

    def undo_begin(self, part: Part[Held]) -> None:
        """The transfer did not begin: the part waits for another try, for a whole lease time."""
        part.state, part.until_ns = PartState.LOCKED, self._clock_ns() + self._lease_ns

    def hand_on(self, session: int, to: int) -> None:
        """Every part of a session is another's from now on, as it is."""
        for part in self.all():
            if part.session == session:
                part.session = to

    # ---- ended

    def end(self, part: Part[Held]) -> Held:
        """The part is gone; what it held is the caller's to give back."""
        lease = self._leases[part.lease]
        del lease.parts[part.rank]
        if not lease.parts:
            del self._leases[part.lease]
        return part.held

    def expired(self) -> tuple[Part[Held], ...]:
        """Parts whose time is over; the caller ends them."""
        now_ns = self._clock_ns()
        return tuple(part for part in self.all() if part.until_ns is not None and part.until_ns <= now_ns)

    def session_ended(self, session: int) -> tuple[Part[Held], ...]:
        """Parts that go with the session, for the caller to end; what it was writing is quarantined instead.

        Parts that the server is moving are left: they end when the move does.
        """
        ended = []
        for part in self.all():
            if part.session != session or part.busy:
                continue
            if part.state is PartState.WRITING:
                part.state, part.until_ns = PartState.QUARANTINED, self._clock_ns() + self._grace_ns
            elif part.state is not PartState.QUARANTINED:
                ended.append(part)
        return tuple(ended)

    def all(self) -> tuple[Part[Held], ...]:
        """Every part."""
        return tuple(part for lease in self._leases.values() for part in lease.parts.values())

    def count(self, *states: PartState) -> int:
        """Parts in these states; in any if none is given."""
        return sum(not states or part.state in states for part in self.all())
