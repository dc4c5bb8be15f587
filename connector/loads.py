"""The life of loads and stores as the scheduler side keeps it: who is reported, who is held, and when blocks go.

    load:  begin ──► LOADING ──received on all ranks──► RELEASED ──ended on all ranks──► gone
                        └──────────────ended on all ranks (synchronous loads)──────────► gone
    store: begin ──► ended on all ranks ──► gone

    request ends ──► nothing of it is open: its blocks are free at once
                └──► held ──the last of it ended──► freed, reported once

Pure state, no engine: a rule-based machine runs it against a plain model. Contracts:

- REL-1 a load passes "received" on exactly once, by a report or ahead of it, and never after its request has ended.
- SAFE-1 a held request is freed once, and only when nothing of it is in flight on any rank.
- SAFE-6 work has ended when it has on every rank, and it ended well only if it did on each.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from lamella.connector.safety_rules import ALL_RULES, SafetyRules
from lamella.connector.step_orders import Ended, LoadOrder, StoreOrder
from lamella.reference.keys import ChunkKey

_log = logging.getLogger(__name__)
_BY_ITSELF: Final = {"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION"}


def ended_by_itself(request: Any) -> bool:
    """Whether a vLLM request has given its last token: its steps have waited for its load, which has landed then.

    The report of that comes behind the token, so the load may look as if it were in flight.
    """
    return getattr(getattr(request, "status", None), "name", "") in _BY_ITSELF


class Kind(enum.Enum):
    """What is in flight."""

    LOAD = "load"
    STORE = "store"


@dataclass(slots=True)
class Work:
    """One load or store in flight.

    Attributes:
        number: the scheduler side's, unique among loads and stores.
        request: whose.
        kind: load or store.
        num_bytes: it moves on one rank.
        waits_for_report: a load whose request is parked until it is reported received.
        released: it was reported received, or let run ahead of that.
        failed: a rank has said that it failed there; others may still load.
    """

    number: int
    request: str
    kind: Kind
    num_bytes: int
    waits_for_report: bool = False
    released: bool = False
    failed: bool = False
    _ended: Ended = field(default_factory=lambda: Ended(0, True))


@dataclass(slots=True)
class OpenLoad:
    """What the scheduler side must know of a load in flight.

    Attributes:
        order: as the workers have it.
        keys: of its chunks.
        blocks: it writes.
        cancelled: nobody reads it any more.
    """

    order: LoadOrder
    keys: tuple[ChunkKey, ...]
    blocks: frozenset[int]
    cancelled: bool = False


@dataclass(slots=True)
class OpenStore:
    """The same of a store, which reads its blocks."""

    order: StoreOrder
    blocks: frozenset[int]


class WorkBook:
    """Loads and stores in flight, and the requests that wait for them.

    Args:
        num_ranks: that work on each of them.
        rules: all of them, outside tests.

    Raises:
        ValueError: num_ranks < 1.

    >>> book = WorkBook(num_ranks=1)
    >>> book.begin(Work(0, "a", Kind.LOAD, 100, waits_for_report=True))
    >>> book.received(["a"]), book.request_ended("a")
    ({'a'}, True)
    >>> book.ended(0, Ended(1, True)).number, book.take_freed(), book.take_freed()
    (0, {'a'}, set())
    """

    def __init__(self, num_ranks: int, rules: SafetyRules = ALL_RULES) -> None:
        if num_ranks < 1:
            raise ValueError(f"num_ranks must be at least 1, got {num_ranks}")
        self._num_ranks = num_ranks
        self._rules = rules
        self._open: dict[int, Work] = {}
        self._of_request: dict[str, set[int]] = {}
        self._parked: dict[str, int] = {}  # request -> the load whose report it waits for
        self._ahead: dict[str, int] = {}  # request -> the load that was released before its report came
        self._held: set[str] = set()
        self._freed: set[str] = set()

    def begin(self, work: Work) -> None:
        """The work is in flight.

        Raises:
            RuntimeError: a number in use, a request that has ended, or one that is parked already or is still to be
                reported received.
        """
        if work.number in self._open:
            raise RuntimeError(f"work {work.number} is in flight already")
        if work.request in self._held:
            raise RuntimeError(f"request {work.request} has ended; nothing can begin for it")
        if work.waits_for_report:
            if work.request in self._ahead:
                raise RuntimeError(
                    f"request {work.request} is still to be reported for load {self._ahead[work.request]}"
                )
            if work.request in self._parked:
                raise RuntimeError(f"request {work.request} waits for load {self._parked[work.request]} already")
            self._parked[work.request] = work.number
        self._open[work.number] = work
        self._of_request.setdefault(work.request, set()).add(work.number)

    def received(self, requests: Iterable[str]) -> set[str]:
        """Those of the reported requests to pass on: parked, and not ended meanwhile."""
        passed: set[str] = set()
        for request in requests:
            if self._ahead.pop(request, None) is not None:
                continue  # passed on when it was released
            number = self._parked.pop(request, None)
            if not self._rules.report_once:
                passed.add(request)
            elif number is None:
                _log.error("request %s was reported received without a load that waits for it; not passed on", request)
            elif request not in self._held or not self._rules.hold_on_abort:
                passed.add(request)
            if number in self._open and request in passed:
                self._open[number].released = True
        return passed

    def release(self, request: str) -> int | None:
        """The load of a parked request, which runs from now on, before the ranks report it.

        Their report is still to come and passed on no more. Until it has come, nothing is loaded for the request.

        None, and nothing has happened: its load has ended, or has failed on a rank (an engine that computes the request
        anew may give its blocks away at once, and other ranks still write them), or the request has ended.
        """
        work = self._open.get(self._parked.get(request, -1))
        if request in self._held or work is None or work.failed:
            return None
        self._ahead[request] = self._parked.pop(request)
        work.released = True
        return work.number

    def failed(self, number: int) -> None:
        """A rank has said that the load has failed there; it ends when it has on every rank."""
        if number in self._open:
            self._open[number].failed = True

    def awaits_report(self, request: str) -> bool:
        """Whether a load of the request was released ahead of a report that has not come."""
        return request in self._ahead

    def ended(self, number: int, end: Ended) -> Work | None:
        """The work that has now ended on every rank; None while ranks are missing.

        Raises:
            RuntimeError: a number that is not in flight, or more ranks than there are.
        """
        work = self._open.get(number)
        if work is None:
            if not self._rules.free_on_minimum:
                return None
            raise RuntimeError(f"work {number} ended twice, or never began")
        work._ended = work._ended.merged(end)
        if work._ended.ranks > self._num_ranks:
            raise RuntimeError(f"work {number} ended on {work._ended.ranks} of {self._num_ranks} ranks")
        if work._ended.ranks < self._num_ranks and self._rules.free_on_minimum:
            return None
        del self._open[number]
        mine = self._of_request[work.request]
        mine.discard(number)
        if not mine:
            del self._of_request[work.request]
            if work.request in self._held:
                self._held.discard(work.request)
                self._freed.add(work.request)
        return work

    def ended_well(self, work: Work) -> bool:
        """Whether ended work ended well on every rank."""
        return work._ended.ok

    def request_ended(self, request: str) -> bool:
        """Whether the request's blocks must be held; they are until `take_freed` names it."""
        if not self._rules.hold_on_abort:
            return False
        if request not in self._of_request:
            self._parked.pop(request, None)
            return False
        self._held.add(request)
        return True

    def take_freed(self) -> set[str]:
        """Held requests of which nothing is in flight any more; each is named once."""
        freed, self._freed = self._freed, set()
        return freed

    def is_held(self, request: str) -> bool:
        """Whether the request has ended and its blocks are held."""
        return request in self._held

    def open_of(self, request: str) -> tuple[Work, ...]:
        """What is in flight for the request, oldest first."""
        return tuple(self._open[number] for number in sorted(self._of_request.get(request, ())))

    def open_loads(self) -> tuple[Work, ...]:
        """Loads in flight, oldest first."""
        return tuple(work for work in self._open.values() if work.kind is Kind.LOAD)

    @property
    def num_open(self) -> int:
        """Loads and stores in flight."""
        return len(self._open)

    @property
    def num_held(self) -> int:
        """Ended requests whose blocks are held."""
        return len(self._held)
