"""The book of loads and stores against a plain model, and the window that several ranks open."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lamella.connector.loads import Kind, Work, WorkBook
from lamella.connector.safety_rules import SafetyRules
from lamella.connector.step_orders import Ended

RANKS = 2
REQUESTS = [f"r{number}" for number in range(4)]


class BookMachine(RuleBasedStateMachine):
    """The model: what is open on which ranks, who is parked, who has ended, who was freed how often."""

    def __init__(self) -> None:
        super().__init__()
        self.book = WorkBook(RANKS)
        self.number = 0
        self.open: dict[int, tuple[str, set[int]]] = {}  # number -> (request, ranks on which it has ended)
        self.parked: dict[str, int] = {}
        self.ahead: set[str] = set()  # let run, and not reported yet
        self.failed: set[int] = set()
        self.over: set[str] = set()  # ended requests that are held
        self.passed: dict[str, int] = {}
        self.owed: set[str] = set()  # freed, and not named yet

    @rule(request=st.sampled_from(REQUESTS), kind=st.sampled_from(Kind), parks=st.booleans())
    def begin(self, request: str, kind: Kind, parks: bool) -> None:
        parks = parks and kind is Kind.LOAD
        work = Work(self.number, request, kind, 10, parks)
        if request in self.over or (parks and (request in self.parked or request in self.ahead)):
            with pytest.raises(RuntimeError):
                self.book.begin(work)
            return
        self.book.begin(work)
        self.open[self.number] = (request, set())
        if parks:
            self.parked[request] = self.number
            self.passed[request] = 0
        self.number += 1

    @rule(request=st.sampled_from(REQUESTS))
    def report(self, request: str) -> None:
        passed = self.book.received([request])
        expected = request in self.parked and request not in self.over
        assert passed == ({request} if expected else set())
        if expected:
            self.passed[request] += 1
        self.parked.pop(request, None)
        self.ahead.discard(request)

    @rule(request=st.sampled_from(REQUESTS))
    def let_run(self, request: str) -> None:
        number = self.parked.get(request)
        released = self.book.release(request)
        if number not in self.open or number in self.failed or request in self.over:
            assert released is None
            return
        assert released == number
        assert self.passed[request] == 0
        self.passed[request] += 1
        self.ahead.add(request)
        del self.parked[request]

    @rule(number=st.integers(0, 9))
    def fail(self, number: int) -> None:
        self.book.failed(number)
        if number in self.open:
            self.failed.add(number)

    @precondition(lambda self: self.open)
    @rule(pick=st.data(), rank=st.integers(0, RANKS - 1), ok=st.booleans())
    def end(self, pick: st.DataObject, rank: int, ok: bool) -> None:
        number = pick.draw(st.sampled_from(sorted(self.open)))
        request, ranks = self.open[number]
        if rank in ranks:
            return
        ranks.add(rank)
        work = self.book.ended(number, Ended(1, ok))
        assert (work is not None) == (len(ranks) == RANKS)
        if work is None:
            return
        del self.open[number]
        if request in self.over and not any(owner == request for owner, _ranks in self.open.values()):
            self.over.discard(request)
            self.owed.add(request)

    @rule(request=st.sampled_from(REQUESTS))
    def finish(self, request: str) -> None:
        if request in self.over:
            return  # an engine ends a request once
        busy = any(owner == request for owner, _ranks in self.open.values())
        assert self.book.request_ended(request) == busy
        if busy:
            self.over.add(request)
        else:
            self.parked.pop(request, None)

    @rule()
    def free(self) -> None:
        assert self.book.take_freed() == self.owed
        self.owed = set()

    @invariant()
    def counts_agree(self) -> None:
        assert self.book.num_open == len(self.open)
        assert self.book.num_held == len(self.over)
        assert all(times <= 1 for times in self.passed.values())
        assert {name for name in REQUESTS if self.book.awaits_report(name)} == self.ahead


TestBook = BookMachine.TestCase


@pytest.mark.known_fault(40)
def test_work_that_ends_twice_is_refused() -> None:
    book = WorkBook(1)
    book.begin(Work(0, "a", Kind.STORE, 1))
    book.ended(0, Ended(1, True))
    with pytest.raises(RuntimeError, match="ended twice"):
        book.ended(0, Ended(1, True))


def freed_when_one_rank_is_done(rules: SafetyRules) -> bool:
    """Window L: rank 0 has released early and still writes; the request is aborted; rank 1 has landed everything."""
    book = WorkBook(2, rules)
    book.begin(Work(0, "a", Kind.LOAD, 100, waits_for_report=True))
    assert book.request_ended("a")
    book.received(["a"])  # the engine adds reports up, one a rank
    book.ended(0, Ended(1, True))
    return book.take_freed() == {"a"}


def test_l_blocks_are_held_until_every_rank_has_landed() -> None:
    assert not freed_when_one_rank_is_done(SafetyRules())


def test_l_one_rank_frees_what_another_still_writes_without_the_rule() -> None:
    assert freed_when_one_rank_is_done(SafetyRules(free_on_minimum=False))


def test_a_report_that_a_request_did_not_wait_for_is_awaited_until_it_comes_and_nothing_else_is_parked_before() -> None:
    book = WorkBook(RANKS)
    book.begin(Work(0, "a", Kind.LOAD, 100, waits_for_report=True))
    assert (book.release("a"), book.release("a")) == (0, None)
    book.ended(0, Ended(RANKS, True))
    assert book.awaits_report("a")  # a rank may have been slower to say so than to end
    with pytest.raises(RuntimeError, match="a is still to be reported for load 0"):
        book.begin(Work(1, "a", Kind.LOAD, 100, waits_for_report=True))
    assert book.received(["a"]) == set()
    book.begin(Work(1, "a", Kind.LOAD, 100, waits_for_report=True))
    assert book.received(["a"]) == {"a"}


def test_a_load_that_failed_on_a_rank_is_released_by_its_report_only() -> None:
    book = WorkBook(RANKS)
    book.begin(Work(0, "a", Kind.LOAD, 100, waits_for_report=True))
    book.failed(0)
    book.failed(7)  # of nobody
    assert book.release("a") is None
    assert book.received(["a"]) == {"a"}
