"""`auto` at a hand-out: who may join the next step, by a clock that the test moves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from connector.test_auto_choice import MS, Clock, auto_of, batch_of, requests
from lamella.connector.auto_choice import AutoChoice
from lamella.connector.batch_blocks import Scheduled
from lamella.reference.auto_view import Arm
from lamella.reference.release import WeighedRelease

OTHERS = [f"d{number}" for number in range(16)]


def parked(auto: AutoChoice, name: str, number: int, *, cached: int = 15_152, new: int = 768) -> None:
    """A request whose load is on its way, slice by slice, to be released early."""
    auto.choose(name, cached, 0, cached + new)
    early = next(one for one in auto._chosen[name].predictions if one.arm is Arm.EARLY)
    auto._chosen[name] = replace(auto._chosen[name], chosen=early, release=WeighedRelease())
    auto.planned(name, number)


def decoding(clock: Clock, *, steps_ahead: bool = True) -> AutoChoice:
    """An engine in which others decode, and a load that the next step is to begin."""
    auto = auto_of(clock, steps_ahead=steps_ahead, bystander_weight=1.0)
    for name in OTHERS:
        auto.missed(name, 0, 100)
    auto.step_made(batch_of(*(Scheduled(name, 0, 100) for name in OTHERS)), requests(**dict.fromkeys(OTHERS, 100)))
    parked(auto, "a", 0)
    return auto


def made(auto: AutoChoice) -> None:
    """A step in which the others decode has been made."""
    auto.step_made(batch_of(*(Scheduled(name, 100, 1) for name in OTHERS)), requests(**dict.fromkeys(OTHERS, 101)))


def joins_at(auto: AutoChoice, clock: Clock, from_ns: int = 0) -> int:
    """The hand-out, one a millisecond, at which somebody may join."""
    for at_ns in range(from_ns, from_ns + 2_000 * MS, MS):
        clock.now_ns = at_ns
        if auto.handed_out():
            return at_ns
    raise AssertionError("nobody ever joined")


def test_a_request_joins_when_its_layers_land_as_fast_as_it_computes_and_not_before() -> None:
    clock = Clock()
    auto = decoding(clock)
    made(auto)
    assert auto.handed_out() == []
    lands_ns = auto._ledger.window_ns(0)[1]
    assert 0 < joins_at(auto, clock) < lands_ns


def test_a_load_that_has_not_been_ordered_with_a_step_is_left() -> None:
    clock = Clock()
    auto = decoding(clock)
    clock.now_ns = 10_000 * MS
    assert auto.handed_out() == []
    made(auto)
    assert auto.handed_out() == ["a"]


def test_an_engine_that_makes_one_step_after_another_leaves_all_to_the_looks() -> None:
    clock = Clock()
    auto = decoding(clock, steps_ahead=False)
    made(auto)
    clock.now_ns = 10_000 * MS
    assert auto.handed_out() == []
    assert not auto.has_parked


def test_who_is_released_by_whomever_is_no_candidate_any_more_and_stands_before_who_asks_next() -> None:
    clock = Clock()
    auto = decoding(clock)
    made(auto)
    assert auto.has_parked
    auto.choose("b", 15_152, 0, 15_920)
    before = auto._chosen["b"].chosen.ttft_ns
    auto.released("a")
    auto.released("a")  # a report may come behind it
    auto.released("somebody else")
    assert not auto.has_parked
    clock.now_ns = 10_000 * MS
    assert auto.handed_out() == []
    assert set(auto._released) == {"a"}
    auto.step_made(batch_of(Scheduled("a", 15_152, 768)), requests(a=15_920))
    assert not auto._released
    assert before > 0


def test_who_is_gone_is_no_candidate() -> None:
    clock = Clock()
    auto = decoding(clock)
    made(auto)
    auto.forget("a")
    clock.now_ns = 10_000 * MS
    assert (auto.handed_out(), auto.has_parked) == ([], False)


@pytest.mark.parametrize(("left", "joins"), [(100, ["s"]), (10_000, [])], ids=["room", "full"])
def test_a_step_without_room_lets_nobody_join(left: int, joins: list[str]) -> None:
    clock = Clock()
    auto = decoding(clock)
    auto.forget("a")
    for number, name in enumerate("st", 1):  # somebody is behind: one short prefill shares the step that p goes on in
        parked(auto, name, number, new=16)
    auto.missed("p", 0, 8_000 + left)
    auto.step_made(batch_of(Scheduled("p", 0, 8_000)), requests(p=8_000 + left))
    clock.now_ns = 10_000 * MS
    assert auto.handed_out() == joins


def test_of_long_prefills_one_joins_a_step_in_the_order_of_the_loads() -> None:
    clock = Clock()
    auto = decoding(clock)
    parked(auto, "b", 1)
    made(auto)
    clock.now_ns = 10_000 * MS
    assert auto.handed_out() == ["a"]
    auto.released("a")
    assert auto.handed_out() == []  # the last of the queue waits for a prefill that is in the step already
    auto.step_made(batch_of(Scheduled("a", 15_152, 768)), requests(a=15_920))
    assert auto.handed_out() == ["b"]


@pytest.mark.parametrize("width", [1, 4, None])
def test_layers_land_in_the_loads_window_slice_by_slice(width: int | None) -> None:
    auto = decoding(Clock())
    begins_ns, ends_ns = auto._ledger.window_ns(0)
    plan = auto._parked["a"][1]
    arrival = auto._arrival_ns(0, type(plan)(width, plan.release, plan.compute_ns, plan.load_ns))
    assert len(arrival) == 32
    assert arrival[-1] == ends_ns
    assert arrival[0] == begins_ns + (ends_ns - begins_ns) * (width or 32) // 32
    assert len(set(arrival)) == 32 // (width or 32)
