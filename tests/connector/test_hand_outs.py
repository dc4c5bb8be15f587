"""Requests that are let run when a step's outputs are handed out, before any rank has reported them received.

Brute force: a small engine whose scheduler side lets parked requests run at random, judged as every other step is; then
what the scheduler side itself refuses to let run.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from connector.test_who_waits import runs_at_random
from lamella.connector.engine_facts import EngineFacts
from lamella.connector.loads import WorkBook
from lamella.connector.step_orders import Ended, StepOrders, StepReport
from lamella.connector.vllm_scheduler import SchedulerSide
from lamella.connector.vllm_settings import ConnectorSettings
from lamella.connector.worker_loads import WorkerLoads
from scheduler_side import Request, done, loading, output_of, side_of, stored


def test_whoever_is_let_run_at_a_hand_out_is_waited_for_and_reported_once_whatever_happens_to_him() -> None:
    seen = runs_at_random(180, forecasts=True)
    assert min(seen[what] for what in ("by forecast", "before any layer", "sharers")) >= 300, seen
    assert min(seen[what] for what in ("before a rank has its order", "aborted before its report")) >= 100, seen
    assert min(seen[what] for what in ("between two ranks' reports", "not handed out")) >= 20, seen
    assert min(seen[what] for what in ("ended on a rank", "preempted before its report")) >= 8, seen
    assert seen["asks before its report"] >= 8, seen


RECEIVED, RELEASE, LET_RUN, ORDERS = (
    WorkBook.received,
    WorkBook.release,
    WorkerLoads._let_run,
    SchedulerSide.step_orders,
)


def lets_run_and_does_not_report(self: WorkerLoads, number: int, now_ns: int) -> None:
    LET_RUN(self, number, now_ns)
    if (load := self.find(number)) is not None:
        load.reported = True


def reports_again(self: WorkerLoads, number: int, now_ns: int) -> None:
    LET_RUN(self, number, now_ns)
    if (load := self.find(number)) is not None:
        load.reported = False


def swallows_all(self: WorkBook, requests: Sequence[str]) -> set[str]:
    nobody = bool(self._ahead)
    passed = RECEIVED(self, requests)
    return set() if nobody else passed


def swallows_for_ever(self: WorkBook, requests: Sequence[str]) -> set[str]:
    before = dict(self._ahead)
    passed = RECEIVED(self, requests)
    self._ahead = before
    return passed


def expects_no_report(self: WorkBook, request: str) -> int | None:
    number = RELEASE(self, request)
    self._ahead.pop(request, None)
    return number


def lets_the_ended_run(self: WorkBook, request: str) -> int | None:
    held, self._held = self._held, set()
    number = RELEASE(self, request)
    self._held = held
    return number


def late(what: str, num_steps: int) -> Any:
    def orders_of(self: SchedulerSide, output: Any) -> StepOrders:
        orders = ORDERS(self, output)
        kept = self.__dict__.setdefault("late", [()] * num_steps)
        kept.append(getattr(orders, what))
        return replace(orders, **{what: kept.pop(0)})

    return orders_of


FAULTS: dict[str, tuple[type, str, Any]] = {
    "a rank does not report who was let run": (WorkerLoads, "_let_run", lets_run_and_does_not_report),
    "a rank reports him twice": (WorkerLoads, "_let_run", reports_again),
    "a rank does not wait for him": (WorkerLoads, "_let_run", lambda self, number, now_ns: None),
    "others' reports are swallowed": (WorkBook, "received", swallows_all),
    "his next report is swallowed too": (WorkBook, "received", swallows_for_ever),
    "his report is not expected": (WorkBook, "release", expects_no_report),
    "he loads again before his report": (WorkBook, "awaits_report", lambda self, request: False),
    "who has ended is let run": (WorkBook, "release", lets_the_ended_run),
    "the ranks hear of it a step late": (SchedulerSide, "step_orders", late("released", 1)),
    "his load is ordered behind his release": (SchedulerSide, "step_orders", late("loads", 2)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_release_at_a_hand_out_that_goes_wrong_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises((AssertionError, RuntimeError), match="waits for|left over|passed on|never ordered|still to be"):
        runs_at_random(180, forecasts=True)


# ---------------------------------------------------------------- what the scheduler side does and refuses


class Eager(SchedulerSide):
    """Would let everybody run at once."""

    def _may_join(self) -> Sequence[str]:
        return list(self._requests)


def eager(num_ranks: int = 1, blocks: tuple[int, ...] = (4,)) -> tuple[SchedulerSide, Request, int]:
    """A side with a parked request `b` whose load has been ordered: (side, request, load)."""
    side = side_of(num_ranks)
    side.__class__ = Eager
    stored(side, "a", 24, [1, 2, 3, 4, 5, 6])
    request, load = loading(side, "b", 24, [7, 8, 9, 10, 11, 12])
    side._releases_whole = len(blocks) > 1
    return side, request, load.number


def test_a_request_is_passed_on_at_a_hand_out_and_its_report_is_not() -> None:
    side, request, number = eager()
    assert done(side).finished_recving == {"b"}
    assert side.metrics.total("released_by_forecast") == 1
    assert side.matched_tokens(request, 0) == (None, False)  # preempted already: it loads nothing before the report
    orders = side.step_orders(output_of(("b", [7, 8, 9, 10, 11, 12], 20, 4)))
    assert (orders.released, orders.held_blocks) == ((number,), frozenset(range(7, 12)))
    assert pickle.loads(pickle.dumps(orders)) == orders
    assert side.step_orders(output_of()).released == ()
    assert done(side).finished_recving is None
    assert done(side, {"b"}, loads={number: Ended(1, True)}).finished_recving is None
    assert side.matched_tokens(request, 0) == (20, True)


def test_outputs_of_a_step_with_nothing_to_report_let_requests_run_too() -> None:
    side, _request, _number = eager()
    output = SimpleNamespace(finished_recving=None, finished_sending=None, invalid_block_ids=set())
    side.step_done(output, None)
    assert output.finished_recving == {"b"}


def test_a_load_that_has_failed_on_one_rank_lets_nobody_run_while_another_still_writes() -> None:
    """An engine that computes anew gives a failed request's blocks away once it is passed on."""
    side, _request, number = eager(2)
    side.__class__ = SchedulerSide
    done(side, bad={7, 8}, loads={number: Ended(1, False)})
    side.__class__ = Eager
    assert done(side).finished_recving is None
    assert done(side, {"b"}, loads={number: Ended(1, True)}).finished_recving == {"b"}


def test_a_load_that_fails_in_the_step_whose_outputs_are_handed_out_lets_nobody_run() -> None:
    side, _request, _number = eager(2)
    assert done(side, bad={8}).finished_recving is None
    side, _request, _number = eager(2)
    assert done(side, bad={6}).finished_recving == {"b"}  # of somebody else


def test_who_was_aborted_or_reported_or_has_nothing_on_its_way_is_not_let_run() -> None:
    side, request, number = eager()
    assert done(side, {"b"}).finished_recving == {"b"}
    assert done(side).finished_recving is None
    assert done(side, loads={number: Ended(1, True)}).finished_recving is None
    assert side.step_orders(output_of()).released == ()
    side, request, number = eager()
    assert side.request_ended(request)
    assert done(side).finished_recving is None
    assert side.step_orders(output_of()).cancels == (number,)


def test_who_is_aborted_behind_a_hand_out_holds_its_blocks_until_the_ranks_are_done() -> None:
    side, request, number = eager(2)
    done(side)
    assert side.request_ended(request)
    orders = side.step_orders(output_of())
    assert (orders.released, orders.cancels) == ((number,), ())
    assert done(side, loads={number: Ended(1, True)}).finished_sending is None
    output = done(side, {"b"}, loads={number: Ended(1, True)})
    assert (output.finished_recving, output.finished_sending) == (None, {"b"})


def test_with_several_groups_or_behind_a_passed_over_hook_nobody_is_let_run() -> None:
    facts = EngineFacts((4, 4), 64, 1, side_of()._facts.space)
    assert SchedulerSide(ConnectorSettings(layers_per_slice=1), facts)._releases_whole
    side, _request, _number = eager(blocks=(4, 4))
    assert done(side).finished_recving is None
    side, _request, _number = eager()
    assert done(side, releases_whole=True).finished_recving is None
    assert done(side).finished_recving is None  # later reports may be other ranks'
    one, other = StepReport(releases_whole=True), StepReport()
    assert one.merged(other).releases_whole
    assert other.merged(one).releases_whole
    assert not other.merged(other).releases_whole
