"""The ledger of loads under way, against a link that serves them one after another."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella.reference.auto_ledger import LoadLedger

GAPS = st.lists(st.tuples(st.integers(0, 200), st.integers(1, 100)), min_size=1, max_size=12)


@given(GAPS)
def test_forecasts_are_those_of_a_serial_link(loads: list[tuple[int, int]]) -> None:
    """Each load submitted `gap` after the one before; the true link takes exactly what was predicted."""
    ledger, now, free = LoadLedger(), 0, 0
    landings: list[int] = []
    for number, (gap, length) in enumerate(loads):
        now += gap
        for done, landed in enumerate(landings):
            if landed <= now:
                ledger.ended(done, landed)
        assert ledger.link_wait_ns(now) == max(0, free - now)
        ledger.began(number, now, length, compute_ns=7)
        free = max(free, now) + length
        landings.append(free)
        assert ledger.waiting(now)[-1].landed_ns == free - now


@given(st.integers(1, 4), st.integers(2, 10))
def test_errors_of_prediction_do_not_add_up(slower: int, count: int) -> None:
    """The true link is `slower` times as slow as predicted: after each landing only what is left is wrong."""
    ledger = LoadLedger()
    for number in range(count):
        ledger.began(number, 0, 100, 0)
    for number in range(count):
        now = 100 * slower * (number + 1)
        ledger.ended(number, now)
        left = 100 * (count - number - 1)
        assert ledger.link_wait_ns(now) == left


def test_a_load_that_is_cancelled_behind_others_lets_those_behind_it_come_earlier() -> None:
    ledger = LoadLedger()
    for number in range(3):
        ledger.began(number, 0, 100, 0)
    ledger.ended(1, 30)
    assert [load.landed_ns for load in ledger.waiting(30)] == [70, 170]


def test_who_has_joined_a_step_waits_no_more_but_still_holds_the_link() -> None:
    ledger = LoadLedger()
    ledger.began(0, 0, 100, 5)
    ledger.joined(0)
    assert (ledger.waiting(10), ledger.link_wait_ns(10), ledger.num_open) == ((), 90, 1)


def test_behind_a_load_are_those_that_came_after_it() -> None:
    ledger = LoadLedger()
    for number in range(3):
        ledger.began(number, 0, 100, 0)
    assert [ledger.behind_ns(number, 50) for number in range(3)] == [200, 100, 0]


def test_a_late_load_delays_whoever_comes_by_no_time_that_is_past() -> None:
    ledger = LoadLedger()
    ledger.began(0, 0, 100, 0)
    assert ledger.link_wait_ns(150) == 0
    ledger.began(1, 150, 100, 0)
    assert [load.landed_ns for load in ledger.waiting(150)] == [-50, 100]


def test_an_unknown_end_changes_nothing_and_a_number_begins_once() -> None:
    ledger = LoadLedger()
    ledger.began(0, 0, 100, 0)
    ledger.ended(7, 10)
    ledger.joined(7)
    assert ledger.link_wait_ns(10) == 90
    with pytest.raises(ValueError, match="load 0 is under way already"):
        ledger.began(0, 10, 100, 0)
