"""Order policies: whose slice the link carries next.

A policy turns a submission into one sort key a slice, once, **at submission**. From then on nothing is decided: the
owner of a link (the native copy thread, the simulator's link, the recursion) takes the smallest key among the next
slices of the submitted requests, and breaks a tie by (sequence, slice index). So no policy code runs on the hot path,
and what was simulated is what is deployed.

Contracts, whatever the policy: ORD-1, ORD-2, ORD-3 of `lamella.reference`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Protocol

LARGEST_KEY: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Submission:
    """A request's load as its order policy sees it, at the instant it reaches the link.

    Attributes:
        sequence: how many submissions came before on this link; it breaks every tie, so it must be unique.
        arrival_ns: when the load was submitted.
        slice_bytes: bytes of each slice, in slice order; empty for a request with nothing to load.
        deadline_ns: when the request's first token is due, None if nobody said.
        round: the link's service round at this instant: the round of the slice it began last, 0 on a fresh link. The
            slice `s` of a submission belongs to round `round + s`. Only round robin reads it.
    """

    sequence: int
    arrival_ns: int
    slice_bytes: tuple[int, ...]
    deadline_ns: int | None = None
    round: int = 0


def ahead_of_batch(joins: Sequence[bool]) -> int:
    """How many loads of one step begin before its batch is prepared: up to the last that joins, so none is overtaken.

    Args:
        joins: of each, in the order in which they were asked for: whether its request joins the step.

    >>> ahead_of_batch([False, True, False]), ahead_of_batch([False])
    (2, 0)
    """
    return max((place for place, one in enumerate(joins, 1) if one), default=0)


class OrderPolicy(Protocol):
    """Keys for the slices of a submission; smaller leaves earlier."""

    @property
    def name(self) -> str:
        """The policy's name, as `parse_order` reads it."""

    def keys(self, submission: Submission) -> tuple[int, ...]:
        """One key a slice, in slice order, each within a signed 64-bit integer."""


@dataclass(frozen=True, slots=True)
class Fifo:
    """One request after another, in the order of submission.

    >>> Fifo().keys(Submission(sequence=7, arrival_ns=0, slice_bytes=(10, 10)))
    (7, 7)
    """

    name: ClassVar[str] = "fifo"

    def keys(self, submission: Submission) -> tuple[int, ...]:
        """The sequence number, for every slice."""
        return (submission.sequence,) * len(submission.slice_bytes)


@dataclass(frozen=True, slots=True)
class ShortestRemaining:
    """The request that has the fewest bytes left goes first; a newcomer with less to load passes at the next slice.

    Source: shortest remaining processing time (Schrage 1968), in bytes because a link's time is proportional to them.

    >>> ShortestRemaining().keys(Submission(sequence=0, arrival_ns=0, slice_bytes=(10, 20, 30)))
    (60, 50, 30)
    """

    name: ClassVar[str] = "shortest_remaining"

    def keys(self, submission: Submission) -> tuple[int, ...]:
        """The bytes from each slice on to the last."""
        remaining = sum(submission.slice_bytes)
        keys: list[int] = []
        for slice_bytes in submission.slice_bytes:
            keys.append(remaining)
            remaining -= slice_bytes
        return tuple(keys)


@dataclass(frozen=True, slots=True)
class Deadline:
    """The earliest deadline goes first; a request without one goes after all that have one.

    >>> Deadline().keys(Submission(sequence=0, arrival_ns=0, slice_bytes=(10, 10), deadline_ns=500))
    (500, 500)
    """

    name: ClassVar[str] = "deadline"

    def keys(self, submission: Submission) -> tuple[int, ...]:
        """The deadline, for every slice."""
        due = LARGEST_KEY if submission.deadline_ns is None else submission.deadline_ns
        return (due,) * len(submission.slice_bytes)


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """Every request in flight gets one slice a round: the control arm, known to lose above one request at a time.

    A newcomer starts in the link's current round. Counted from round 0 it would be served alone until it had caught up
    with the others, which is last-come-first-served and not interleaving.

    Source: start-time fair queueing (Goyal, Vin, Cheng 1996), with the current round as start tag and a slice as unit.

    >>> RoundRobin().keys(Submission(sequence=3, arrival_ns=0, slice_bytes=(10, 10, 10), round=4))
    (4, 5, 6)
    """

    name: ClassVar[str] = "round_robin"

    def keys(self, submission: Submission) -> tuple[int, ...]:
        """The round each slice belongs to."""
        return tuple(range(submission.round, submission.round + len(submission.slice_bytes)))


ORDERS: Final[dict[str, OrderPolicy]] = {
    policy.name: policy for policy in (Fifo(), ShortestRemaining(), Deadline(), RoundRobin())
}


_CHECKED: Final = frozenset(map(type, ORDERS.values()))
"""Their keys fit by a law that is tested, so a simulation of thousands of loads does not look at each."""


def slice_keys(order: OrderPolicy, submission: Submission) -> tuple[int, ...]:
    """The policy's keys of the submission, one a slice; for the model's links.

    Raises:
        TypeError: a policy of somebody's own gave what is no sequence of whole numbers.
        ValueError: it gave too few keys, too many, or one beyond 64 bits.
    """
    keys = order.keys(submission)
    if type(order) in _CHECKED:
        return keys
    wrong: type[Exception] = ValueError
    try:
        found = tuple(keys)
        if len(array("q", found)) == len(submission.slice_bytes):
            return found
    except TypeError:
        wrong = TypeError
    except OverflowError:
        pass
    name = getattr(order, "name", type(order).__name__)
    raise wrong(
        f"order policy {name!r} must give a tuple of {len(submission.slice_bytes)} keys, one for each of "
        f"submission.slice_bytes, each a whole number of 64 bits; its keys() gave {keys!r}"
    )


def parse_order(text: str) -> OrderPolicy:
    """The order policy of that name.

    Raises:
        ValueError: no policy has that name.

    >>> parse_order("fifo")
    Fifo()
    """
    try:
        return ORDERS[text]
    except KeyError:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}; got {text!r}") from None
