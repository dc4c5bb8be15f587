"""Corrections: towards what is observed, never beyond it, within their range (AUTO-3); and probes."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from itertools import accumulate, pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lamella.reference.correction import (
    CLEARLY,
    CORRECTION_RANGE,
    FIRST_PROBE,
    HELD_UP,
    LARGEST_JUMP,
    MOST_BETWEEN_PROBES,
    Correction,
    Probes,
    time_on_link,
)

TRUTHS = st.floats(1 / CORRECTION_RANGE, CORRECTION_RANGE)
PROFILE_NS = 10_000_000
MS = 1_000_000


def after(start: Correction, truth: float, count: int) -> list[float]:
    """The factor after each of `count` observations of a device that is `truth` times as slow as its profile."""
    factors, correction = [], start
    for _ in range(count):
        correction = correction.after_load(PROFILE_NS, round(PROFILE_NS * truth))
        factors.append(correction.wire)
    return factors


@pytest.mark.parametrize("truth", [0.5, 2.0])
def test_a_device_twice_as_fast_or_slow_as_its_profile_is_believed_after_one_load(truth: float) -> None:
    assert after(Correction(), truth, 1) == [pytest.approx(truth)]


@given(truth=TRUTHS, believed=TRUTHS, seen=st.integers(0, 100))
def test_any_wrong_belief_settles_at_the_truth_without_swinging(truth: float, believed: float, seen: int) -> None:
    factors = [believed, *after(Correction(wire=believed, wire_seen=seen), truth, 80)]
    errors = [abs(factor - truth) for factor in factors]
    assert all(later <= earlier + 1e-6 * truth for earlier, later in pairwise(errors))
    assert all((factor - truth) * (believed - truth) >= -1e-6 * truth for factor in factors)  # always on the same side
    assert factors[-1] == pytest.approx(truth, rel=0.01)


@given(TRUTHS, TRUTHS, st.integers(0, 100), st.floats(0, 1), st.floats(1, 4))
def test_a_load_of_which_bounds_are_known_moves_a_belief_that_breaks_one_clearly_and_never_beyond(
    believed: float, truth: float, seen: int, least: float, most: float
) -> None:
    before = Correction(wire=believed, wire_seen=seen)
    least_ns, most_ns = round(PROFILE_NS * truth * least), round(PROFILE_NS * truth * most)
    after_it = before.after_bounded_load(PROFILE_NS, least_ns, most_ns)
    if least_ns <= believed * PROFILE_NS <= most_ns:
        assert after_it is before
    for bound, is_broken in ((most_ns, believed > 1.2 * truth * most), (least_ns, 1.2 * believed < truth * least)):
        if is_broken:
            was, now = believed - bound / PROFILE_NS, after_it.wire - bound / PROFILE_NS
            assert abs(now) < abs(was)
            assert now * was >= -1e-6


@pytest.mark.parametrize("believed", [1 / 8, 1 / 2, 2.0, 8.0])
def test_loads_behind_readers_bring_a_wrong_belief_to_where_it_does_no_harm(believed: float) -> None:
    """One slice a load, each behind a step of 30 ms that is found to have ended within 10 ms, on a link of 100 ms."""
    chance, correction = random.Random(0), Correction(wire=believed, wire_seen=20)
    for _ in range(100):
        waited, looked = chance.uniform(0, 30), chance.uniform(0, 10)
        took = 100 * chance.uniform(0.95, 1.05)
        correction = correction.after_bounded_load(100 * MS, round((took - looked) * MS), round((took + waited) * MS))
    assert 0.75 < correction.wire < 1.35


STEPS = st.builds(
    Correction,
    steps=TRUTHS,
    steps_seen=st.integers(0, 100),
    least_ns=st.floats(0, 10**9),
    least_seen=st.integers(0, 100),
    longest_ns=st.floats(0, 10**9),
)


@given(STEPS, st.integers(10**5, 10**9), st.floats(1 / 16, 16), st.integers(1, 4))
def test_a_step_moves_what_is_taken_of_its_like_towards_it_and_never_beyond(
    before: Correction, profile_ns: int, times: float, count: int
) -> None:
    took_ns = max(1, round(before.step_ns(profile_ns) * times))
    after_it = before.after_steps(profile_ns * count, took_ns * count, count)
    was, now = before.step_ns(profile_ns) - took_ns, after_it.step_ns(profile_ns) - took_ns
    clipped = after_it.steps in (CORRECTION_RANGE, 1 / CORRECTION_RANGE)
    assert abs(now) <= abs(was) + 1e-6 * took_ns or clipped
    assert now * was >= -1e-6 * took_ns * abs(was) or clipped


@example(least_ms=12.5, factor=3.0, sizes_ms=[3.0, 3.0, 5.0])
@given(
    least_ms=st.one_of(st.just(0.0), st.floats(1, 60)),
    factor=st.floats(0.3, 3),
    sizes_ms=st.lists(st.floats(2, 100), min_size=1, max_size=4),
)
def test_steps_of_several_sizes_are_each_foreseen(least_ms: float, factor: float, sizes_ms: list[float]) -> None:
    """A step takes what its tokens take, and no less than its launch: of whatever sizes, both are found.

    Without any scatter a launch could stay within what is taken for scatter, and go into the factor for good.
    """
    truths = [(round(ms * 1e6), max(least_ms, factor * ms) * 1e6) for ms in sizes_ms]
    chance, correction = random.Random(0), Correction()
    for turn in range(360):
        profile_ns, took_ns = truths[turn % len(truths)]
        correction = correction.after_steps(profile_ns, round(took_ns * chance.gauss(1, 0.04)))
    for profile_ns, took_ns in truths:
        assert correction.step_ns(profile_ns) == pytest.approx(took_ns, rel=0.2)


def test_short_steps_that_their_launch_bounds_make_no_long_one_look_longer() -> None:
    correction = Correction().after_steps(72 * MS, 78 * MS)
    for _ in range(50):
        correction = correction.after_steps(11 * MS, 21 * MS)
    assert correction.step_ns(72 * MS) == pytest.approx(78 * MS)
    assert correction.step_ns(11 * MS) == pytest.approx(21 * MS)
    for _ in range(20):
        correction = correction.after_steps(11 * MS, 12 * MS)  # launches are quicker now
    assert correction.step_ns(11 * MS) == pytest.approx(12 * MS, rel=0.01)
    assert correction.step_ns(72 * MS) == pytest.approx(78 * MS)


@given(st.integers(0, 10**6), st.floats(0, 0.06))
def test_hiccups_spoil_no_more_with_a_least_time_than_with_a_factor_alone(seed: int, often: float) -> None:
    """Some steps of any size take up to ten times as long as they should; what follows is foreseen all the same."""
    chance, correction, wrong = random.Random(seed), Correction(), []
    for number in range(600):
        profile_ms = chance.choice((11, 30, 50, 72))
        truth_ms = max(21.0, 1.08 * profile_ms)
        if number > 100:
            wrong.append(correction.step_ns(profile_ms * MS) / MS / truth_ms)
        hiccup = chance.choice((2, 3, 10)) if number > 20 and chance.random() < often else 1
        correction = correction.after_steps(profile_ms * MS, round(truth_ms * hiccup * MS))
    wrong.sort()
    assert wrong[len(wrong) // 2] < 1.1
    assert wrong[round(0.97 * len(wrong))] < 1.35  # up to 2 where it moved from a long step's time


@given(
    launch_ms=st.floats(1, 30),
    long_ms=st.floats(60, 100),
    short_ms=st.floats(5, 40),
    next_ms=st.floats(5, 100),
    hiccup=st.floats(2, 30),
)
def test_a_hiccup_before_any_least_is_known_is_found_out_by_the_next_step(
    launch_ms: float, long_ms: float, short_ms: float, next_ms: float, hiccup: float
) -> None:
    def truth_ns(ms: float) -> int:
        return round(max(launch_ms, ms) * MS)

    def seen(correction: Correction, ms: float, times: float = 1) -> Correction:
        return correction.after_steps(round(ms * MS), round(truth_ns(ms) * times))

    correction = seen(seen(seen(Correction(), long_ms), short_ms, hiccup), next_ms)
    least_ns = math.sqrt(HELD_UP) * truth_ns(next_ms)  # a hiccup that is too small to be told is halved, in proportion
    for ms in (1, short_ms, next_ms, long_ms):
        assert correction.step_ns(ms * MS) <= CLEARLY * max(truth_ns(ms), least_ns)


@pytest.mark.parametrize("often", [0.05, 0.17, 0.5])
@pytest.mark.parametrize(("short_ms", "long_ms", "launch_ms"), [(16, 40, 40), (50, 120, 80), (8, 72, 40)])
def test_long_steps_of_a_device_that_becomes_slower_for_good_are_found_behind_the_least(
    short_ms: float, long_ms: float, launch_ms: float, often: float
) -> None:
    """What bounded all but the longest steps bounds none of them any more."""
    chance, correction = random.Random(0), Correction()
    for number in range(900):
        profile_ms = long_ms if chance.random() < often else short_ms
        truth_ms = max(launch_ms, profile_ms) if number < 200 else 3 * profile_ms
        correction = correction.after_steps(round(profile_ms * MS), round(truth_ms * MS))
    assert correction.step_ns(long_ms * MS) == pytest.approx(3 * long_ms * MS, rel=0.1)


def test_what_was_learned_of_short_steps_alone_gives_way_to_long_ones() -> None:
    correction = Correction()
    for _ in range(20):
        correction = correction.after_steps(11 * MS, 21 * MS)
    assert correction.step_ns(11 * MS) == pytest.approx(21 * MS)
    for _ in range(60):
        correction = correction.after_steps(72 * MS, 78 * MS).after_steps(11 * MS, 21 * MS)
    assert correction.step_ns(72 * MS) == pytest.approx(78 * MS, rel=0.01)
    assert correction.step_ns(11 * MS) == pytest.approx(21 * MS, rel=0.01)


@pytest.mark.parametrize("wrong", [{"least_ns": -1.0}, {"longest_ns": float("inf")}, {"least_ns": float("nan")}])
def test_times_of_a_correction_are_finite_and_not_negative(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="times must be at least 0 and finite"):
        Correction(**wrong)


@given(st.lists(st.tuples(st.booleans(), st.integers(-5, 10**12), st.integers(-5, 10**12)), max_size=60))
def test_no_observations_take_a_factor_out_of_its_range(observations: list[tuple[bool, int, int]]) -> None:
    correction = Correction()
    for is_load, profile_ns, measured_ns in observations:
        before = correction
        correction = (
            correction.after_load(profile_ns, measured_ns)
            if is_load
            else correction.after_steps(profile_ns, measured_ns)
        )
        for factor in (correction.wire, correction.steps):
            assert 1 / CORRECTION_RANGE <= factor <= CORRECTION_RANGE
        if min(profile_ns, measured_ns) < 1:
            assert correction == before
    assert correction.wire_seen + correction.steps_seen <= len(observations)


def test_noise_is_averaged_and_a_hiccup_is_not_believed() -> None:
    rng = random.Random(0)
    correction = Correction()
    for _ in range(200):
        correction = correction.after_load(PROFILE_NS, round(PROFILE_NS * 2 * rng.uniform(0.8, 1.25)))
    assert correction.wire == pytest.approx(2, rel=0.1)
    hit = correction.after_load(PROFILE_NS, 1000 * PROFILE_NS)
    assert hit.wire < 1.2 * correction.wire


def test_links_and_steps_are_corrected_apart() -> None:
    correction = Correction().after_load(100, 200).after_steps(100, 50)
    assert (correction.wire, correction.steps) == (pytest.approx(2), pytest.approx(0.5))


def test_one_observation_moves_a_fresh_factor_by_no_more_than_its_largest_jump() -> None:
    assert after(Correction(), 100.0, 1) == [pytest.approx(LARGEST_JUMP)]


@pytest.mark.parametrize(("wire", "seen"), [(0.01, 0), (33.0, 0), (1.0, -1)])
def test_impossible_corrections_are_refused(wire: float, seen: int) -> None:
    with pytest.raises(ValueError, match=r"must be (between 1/32 and 32|at least 0)"):
        Correction(wire=wire, wire_seen=seen)


def test_probes_come_ever_more_seldom_and_a_load_begins_anew() -> None:
    probes = Probes()
    overruled = [number for number in range(8_000) if probes.overrules(off=True)]
    gaps = [later - earlier for earlier, later in zip([-1, *overruled], overruled, strict=False)]
    assert gaps[:3] == [FIRST_PROBE, 2 * FIRST_PROBE, 4 * FIRST_PROBE]
    assert max(gaps) == MOST_BETWEEN_PROBES
    assert not probes.overrules(off=False)
    assert sum(probes.overrules(off=True) for _ in range(FIRST_PROBE)) == 1


@given(st.integers(2, 64), st.integers(1, 10**7), st.lists(st.integers(1, 10**8), min_size=1, max_size=20))
def test_whoever_looks_now_and_then_takes_no_link_for_faster_than_it_is(
    num_slices: int, slice_ns: int, looks: list[int]
) -> None:
    """Each slice takes the link as long, and is seen to have landed by the next look."""
    ends = [slice_ns * (index + 1) for index in range(num_slices)]
    instants = sorted({*looks, ends[-1] + max(looks)})
    seen = [instants[bisect_left(instants, end)] for end in ends]
    slices, num_bytes, took_ns = time_on_link([7] * num_slices, 0, seen, 0)
    assert num_bytes == 7 * slices
    assert took_ns >= (slices - 1) * slice_ns
    assert slices == sum(one > seen[0] for one in seen)
    if len(set(seen)) == num_slices:
        assert slices == num_slices - 1


@given(
    st.lists(
        st.tuples(
            st.integers(0, 10**6),  # ordered so long after the load before
            st.sampled_from([0, 0, 10**3, 10**7]),  # how long its blocks are still read then
            st.lists(st.integers(1, 10**6), min_size=1, max_size=8),  # bytes of its slices, a ns each
        ),
        min_size=1,
        max_size=10,
    )
)
def test_the_link_is_taken_for_as_fast_as_it_is_whatever_loads_stood_behind(
    loads: list[tuple[int, int, list[int]]],
) -> None:
    """One load after another; whoever orders one knows whether its blocks are read then, but not for how long."""
    ordered_ns = free_ns = 0
    for after_ns, reads_ns, part_bytes in loads:
        ordered_ns += after_ns
        landed_ns = list(accumulate(part_bytes, initial=max(ordered_ns + reads_ns, free_ns)))[1:]
        started_ns = None if reads_ns else ordered_ns
        slices, num_bytes, took_ns = time_on_link(part_bytes, started_ns, landed_ns, free_ns)
        assert took_ns == num_bytes
        assert slices == len(part_bytes) - (len(part_bytes) > 1 or reads_ns > 0)
        free_ns = landed_ns[-1]
