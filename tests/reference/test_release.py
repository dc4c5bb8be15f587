"""Release policies: the instant from which a request may run (REL-3, REL-4)."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella.reference.release import (
    First,
    JustInTime,
    ReleasePolicy,
    ReleaseView,
    StallPrice,
    WeighedRelease,
    Whole,
    parse_release,
)

POLICIES = [Whole(), First(), First(2), JustInTime(), JustInTime(3), JustInTime(None), WeighedRelease()]
NS = st.integers(0, 1000)


@st.composite
def views(draw: st.DrawFn, num_layers: int = 4) -> ReleaseView:
    return ReleaseView(
        now_ns=draw(NS),
        arrival_ns=tuple(sorted(draw(st.lists(NS, min_size=num_layers, max_size=num_layers)))),
        layer_compute_ns=tuple(draw(st.lists(NS, min_size=num_layers, max_size=num_layers))),
        start_delay_ns=draw(NS),
        step_ns=draw(NS),
        victims=draw(st.integers(0, 8)),
        stall=draw(st.none() | st.builds(StallPrice, st.floats(0, 20), st.floats(0, 20), NS)),
    )


def stall_ns(view: ReleaseView, released_ns: int) -> int:
    """How long a step of this request alone stands waiting, if it is formed at that instant."""
    reached = released_ns + view.start_delay_ns
    stalled = 0
    for arrival, compute in zip(view.arrival_ns, view.layer_compute_ns, strict=True):
        stalled += max(0, arrival - reached)
        reached = max(reached, arrival) + compute
    return stalled


def test_whole_waits_for_the_last_layer_and_first_for_the_named_one() -> None:
    view = ReleaseView(now_ns=0, arrival_ns=(10, 20, 30), layer_compute_ns=(1, 1, 1))
    assert [policy.release_ns(view) for policy in (Whole(), First(), First(2))] == [30, 10, 20]


def test_just_in_time_starts_so_that_the_last_layer_is_met() -> None:
    # Layer 2 lands at 30 and is reached two layers of 8 after the start; the start comes 3 after the release.
    view = ReleaseView(now_ns=0, arrival_ns=(10, 20, 30), layer_compute_ns=(8, 8, 8), start_delay_ns=3)
    assert JustInTime().release_ns(view) == 11


def test_a_release_counts_what_will_have_landed_when_its_step_starts() -> None:
    """The first layer lands at 10, and the step starts 7 after the release; whoever needs no forecast sees it land."""
    view = ReleaseView(0, (10, 20, 30), (50, 50, 50), start_delay_ns=7, stall=StallPrice(0))
    policies = (JustInTime(), JustInTime(100), WeighedRelease(), First())
    assert [policy.release_ns(view) for policy in policies] == [3, 3, 3, 10]


def test_just_in_time_is_first_layer_release_where_computing_is_slower_than_the_wire() -> None:
    view = ReleaseView(now_ns=0, arrival_ns=(10, 20, 30), layer_compute_ns=(50, 50, 50))
    assert JustInTime().release_ns(view) == 10


def test_patience_releases_earlier_by_the_stall_it_tolerates() -> None:
    view = ReleaseView(now_ns=0, arrival_ns=(10, 20, 90), layer_compute_ns=(1, 1, 1), step_ns=40, victims=3)
    assert [JustInTime(patience).release_ns(view) for patience in (0, 15, None)] == [88, 73, 78]


def test_more_victims_make_the_weighed_release_later() -> None:
    releases = [
        JustInTime(None).release_ns(ReleaseView(0, (10, 20, 90), (1, 1, 1), step_ns=40, victims=victims))
        for victims in (0, 1, 7)
    ]
    assert releases == [48, 68, 83]


def test_a_weighed_release_takes_no_heed_where_it_hurts_nobody() -> None:
    view = ReleaseView(0, (10, 20, 90), (1, 1, 1), step_ns=40, victims=3, stall=StallPrice(0))
    assert WeighedRelease().release_ns(view) == 10


def test_what_a_stall_costs_others_makes_a_weighed_release_later() -> None:
    # The stall-free instant is 88. A stall of s costs others s * price and saves the request 40 - s.
    prices = [StallPrice(1), StallPrice(3), StallPrice(1, 2), StallPrice(0, 3)]
    views = [ReleaseView(0, (10, 20, 90), (1, 1, 1), step_ns=40, stall=price) for price in prices]
    assert [WeighedRelease().release_ns(view) for view in views] == [68, 78, 78, 78]


def test_readers_lose_nothing_by_a_stall_of_half_the_time_for_which_the_link_is_busy_with_others() -> None:
    busy = [0, 40, 120, 156]
    views = [ReleaseView(0, (10, 20, 90), (1, 1, 1), step_ns=40, stall=StallPrice(0, 3, one)) for one in busy]
    assert [WeighedRelease().release_ns(view) for view in views] == [78, 63, 28, 10]


@given(views(), NS)
def test_a_dearer_stall_never_releases_earlier(view: ReleaseView, busy_ns: int) -> None:
    prices = [StallPrice(others, readers, busy_ns) for others, readers in ((0, 1), (0, 2), (1, 2), (2, 5))]
    releases = [WeighedRelease().release_ns(replace(view, stall=price)) for price in prices]
    assert releases == sorted(releases)


@given(views(), st.sampled_from(POLICIES))
def test_nothing_is_released_to_start_before_its_first_layer_landed(view: ReleaseView, policy: ReleasePolicy) -> None:
    starts_ns = policy.release_ns(view) + (view.start_delay_ns if policy.needs_forecast else 0)
    assert view.arrival_ns[0] <= starts_ns


@given(views(), st.sampled_from(POLICIES), st.integers(0, 3), NS)
def test_a_layer_that_lands_earlier_never_releases_later(
    view: ReleaseView, policy: ReleasePolicy, layer: int, earlier_by: int
) -> None:
    arrivals = tuple(
        max(0, arrival - earlier_by) if index <= layer else arrival for index, arrival in enumerate(view.arrival_ns)
    )
    earlier = replace(view, arrival_ns=arrivals)
    assert policy.release_ns(earlier) <= policy.release_ns(view)


@given(views())
def test_just_in_time_alone_never_stalls_and_a_nanosecond_earlier_would(view: ReleaseView) -> None:
    released = JustInTime().release_ns(view)
    assert stall_ns(view, released) == 0
    assert stall_ns(view, released - 1) == 1


@given(views(), NS)
def test_patience_bounds_the_stall_of_a_request_alone(view: ReleaseView, patience_ns: int) -> None:
    assert stall_ns(view, JustInTime(patience_ns).release_ns(view)) <= patience_ns


@given(views(), st.sampled_from(POLICIES))
def test_a_policy_that_needs_no_forecast_looks_only_at_the_layers_it_needs(
    view: ReleaseView, policy: ReleasePolicy
) -> None:
    if policy.needs_forecast:
        return
    needed = policy.layers_needed(len(view.arrival_ns))
    assert policy.release_ns(view) == view.arrival_ns[needed - 1]


@pytest.mark.parametrize("text", ["whole", "first", "first:4", "jit", "jit:2ms", "jit:0.25ms", "jit:step", "weighed"])
def test_a_policy_prints_as_it_is_written(text: str) -> None:
    assert str(parse_release(text)) == text


@pytest.mark.parametrize(
    "text", ["", "First", "first:", "first:x", "first:-1", "jit:2", "jit:-1ms", "jit:1e3ms", "whole:2"]
)
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"got {text!r}")):
        parse_release(text)


def test_impossible_counts_and_tolerances_are_refused() -> None:
    with pytest.raises(ValueError, match=r"at least 1 layer, got 0"):
        parse_release("first:0")
    with pytest.raises(ValueError, match=r"at least 0, got -1"):
        JustInTime(-1)
    with pytest.raises(ValueError, match=r"after 5 layers needs as many, but the load has 4"):
        First(5).layers_needed(4)


@given(st.integers(0, 10**12 - 1))
def test_every_tolerance_is_read_back_as_it_was_written(patience_ns: int) -> None:
    assert parse_release(str(JustInTime(patience_ns))) == JustInTime(patience_ns)
