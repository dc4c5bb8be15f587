"""Corrections: towards what is observed, never beyond it, within their range (AUTO-3); and probes."""

from __future__ import annotations

import random
from bisect import bisect_left
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella.reference.correction import (
    CORRECTION_RANGE,
    FIRST_PROBE,
    LARGEST_JUMP,
    MOST_BETWEEN_PROBES,
    Correction,
    Probes,
    time_on_link,
)

TRUTHS = st.floats(1 / CORRECTION_RANGE, CORRECTION_RANGE)
PROFILE_NS = 10_000_000


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
