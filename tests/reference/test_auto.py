"""`auto`: the arm that costs least (AUTO-1), the same for the same arguments (AUTO-2), by times that come true."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella.reference.auto import TIE, AutoPolicy
from lamella.reference.auto_view import Abilities, Arm, AutoView, Prediction, WaitingLoad
from lamella.reference.correction import CORRECTION_RANGE, Correction
from lamella.reference.ordering import Fifo
from lamella.reference.profile import DeviceProfile
from lamella.reference.release import First, ReleasePolicy, WeighedRelease, Whole
from lamella.reference.slices import plan_slices
from lamella.reference.timeline import Load, StepRule, TimedRequest, compute_timeline
from lamella.sim.profiles import load_profile

MS = 1_000_000
ALL = Abilities()


@pytest.fixture(scope="module")
def profile() -> DeviceProfile:
    return load_profile()


@pytest.fixture(scope="module")
def policy(profile: DeviceProfile) -> AutoPolicy:
    return AutoPolicy(profile)


def with_link(profile: DeviceProfile, gb_per_s: float, slice_ns: int | None = None) -> DeviceProfile:
    rate = int(gb_per_s * 1e9)
    fixed = profile.wire.slice_fixed_ns if slice_ns is None else slice_ns
    wire = replace(profile.wire, h2d_bytes_per_s=rate, both_bytes_per_s=rate, d2h_bytes_per_s=rate)
    return replace(profile, wire=replace(wire, slice_fixed_ns=fixed))


def found(predictions: tuple[Prediction, ...], arm: Arm) -> Prediction:
    return next(one for one in predictions if one.arm is arm)


@st.composite
def views(draw: st.DrawFn) -> AutoView:
    load = draw(st.integers(16, 65_536))
    waiting = draw(st.lists(st.builds(WaitingLoad, st.integers(-MS, 500 * MS), st.integers(MS, 200 * MS)), max_size=16))
    decoding = draw(st.integers(0, 32))
    return AutoView(
        load_tokens=load,
        cached_tokens=load + draw(st.integers(0, 8_192)),
        new_tokens=draw(st.integers(1, 8_192)),
        link_wait_ns=draw(st.integers(0, 500 * MS)),
        engine_wait_ns=draw(st.integers(0, 100 * MS)),
        queued_ns=draw(st.integers(0, 500 * MS)),
        waiting=tuple(sorted(waiting)),
        decoding=decoding,
        bystanders=draw(st.integers(0, decoding)),
        step_ns=draw(st.integers(0, 50 * MS)),
        idle=not decoding and draw(st.booleans()),
        release_lag_ns=draw(st.sampled_from([0, 6 * MS, 40 * MS])),
        sharing=draw(st.integers(0, 8)),
        joining_ns=draw(st.sampled_from([0, 5 * MS, 20 * MS])),
        ordering_ns=draw(st.sampled_from([None, 0, 2 * MS, 9 * MS])),
        first_tokens=draw(st.integers(0, 8)),
    )


corrections = st.builds(Correction, st.floats(1 / 8, 8), st.floats(1 / 8, 8))
abilities = st.builds(Abilities, st.booleans(), st.booleans(), st.booleans(), st.sampled_from([1, 4, 32]))

# ---------------------------------------------------------------- what a newcomer should see


def test_a_long_hit_on_a_fast_link_is_loaded_and_met_early(policy: AutoPolicy) -> None:
    decision = policy.choose(AutoView(15_152, 15_152, 768), Correction(), ALL)
    assert decision.arm in (Arm.EARLY, Arm.SYNC)
    assert decision.chosen.ttft_ns < 0.65 * found(decision.predictions, Arm.CHUNK_MAJOR).ttft_ns


def test_a_hit_on_a_link_slower_than_the_engine_is_computed_again(profile: DeviceProfile) -> None:
    decision = AutoPolicy(with_link(profile, 2)).choose(AutoView(4_096, 4_096, 64), Correction(), ALL)
    assert (decision.arm, decision.loads, decision.load_ns) == (Arm.OFF, False, 0)


def test_behind_a_long_queue_a_hit_is_computed_again_and_what_that_costs_others_counts(
    profile: DeviceProfile,
) -> None:
    slow = AutoPolicy(with_link(profile, 5))
    behind = AutoView(15_152, 15_152, 256, link_wait_ns=4_000 * MS)
    assert slow.choose(behind, Correction(), ALL).arm is Arm.OFF
    about_to_land = replace(
        behind, link_wait_ns=500 * MS, waiting=tuple(WaitingLoad(i * MS, 11 * MS) for i in range(8))
    )
    decision = slow.choose(about_to_land, Correction(), ALL)
    off = found(decision.predictions, Arm.OFF)
    assert decision.arm is Arm.EARLY
    assert off.ttft_ns < decision.chosen.ttft_ns
    assert off.cost_ns > off.ttft_ns + 1_000 * MS
    assert decision.regret > 0.5


def test_an_idle_engine_takes_a_lone_request_into_its_next_step(policy: AutoPolicy) -> None:
    assert policy.choose(AutoView(4_096, 4_096, 1_024), Correction(), ALL).arm is Arm.SYNC


def test_nobody_is_made_to_stand_in_a_step_that_waits_for_the_whole_queue_of_the_link(policy: AutoPolicy) -> None:
    busy = AutoView(4_096, 4_096, 1_024, link_wait_ns=100 * MS, decoding=4, step_ns=6 * MS, idle=False)
    assert policy.choose(busy, Correction(), ALL).arm is Arm.EARLY


def test_a_step_that_waits_costs_nobody_anything_while_the_engine_computes_for_all(policy: AutoPolicy) -> None:
    """With 40 ms to compute before its step, the link's 30 ms of others cost nobody a token; with none, 30 ms each."""
    view = AutoView(15_360, 15_360, 2_048, link_wait_ns=30 * MS, decoding=4, step_ns=6 * MS, idle=False)
    view = replace(view, release_lag_ns=6 * MS)
    busy = replace(view, engine_wait_ns=40 * MS)
    free_sync, busy_sync = (found(policy.choose(one, Correction(), ALL).predictions, Arm.SYNC) for one in (view, busy))
    assert free_sync.ttft_ns - 1 * MS < busy_sync.ttft_ns < free_sync.ttft_ns + 11 * MS
    cost_of_others = [one.cost_ns - one.ttft_ns for one in (free_sync, busy_sync)]
    assert cost_of_others[0] > cost_of_others[1] + 4 * 30 * MS
    assert policy.choose(busy, Correction(), ALL).arm is Arm.SYNC
    assert policy.choose(view, Correction(), ALL).arm is Arm.EARLY


def test_who_joins_at_once_keeps_the_first_tokens_of_those_who_share_its_step(policy: AutoPolicy) -> None:
    """With somebody released for the next step already, joining it costs that one the whole prefill; else nobody."""
    view = AutoView(15_360, 15_360, 2_048, engine_wait_ns=60 * MS, decoding=3, step_ns=7 * MS, idle=False)
    view = replace(view, release_lag_ns=7 * MS, joining_ns=5 * MS)
    first_ns, _ = policy.prefill_ns(15_360, 2_048, Correction())
    alone, shared = (policy.choose(replace(view, sharing=count), Correction(), ALL) for count in (0, 1))
    assert (alone.arm, shared.arm) == (Arm.SYNC, Arm.EARLY)
    for one, other in zip(alone.predictions, shared.predictions, strict=True):
        assert other.cost_ns - one.cost_ns == (first_ns if one.arm is Arm.SYNC else 0)
        assert other.ttft_ns == one.ttft_ns


@pytest.mark.parametrize(("new", "sooner"), [(768, 3 * MS), (8_192, 0)], ids=["link", "computing"])
def test_a_load_ordered_before_the_batch_ends_its_step_sooner_as_far_as_it_waits_for_the_link(
    policy: AutoPolicy, new: int, sooner: int
) -> None:
    """And no other arm; a load cannot begin later than the step that brings it, whatever is claimed."""
    view = AutoView(15_360, 15_360, new, joining_ns=5 * MS)
    prompt, at_once, never = (
        policy.choose(replace(view, ordering_ns=ordering), Correction(), ALL).predictions
        for ordering in (None, 2 * MS, 9 * MS)
    )
    gained = {one.arm: one.ttft_ns - other.ttft_ns for one, other in zip(prompt, at_once, strict=True)}
    assert gained.pop(Arm.SYNC) == pytest.approx(sooner, abs=1.3 * MS)
    assert set(gained.values()) == {0}
    assert never == prompt


def test_a_release_that_starts_a_lag_later_makes_early_and_chunk_major_later_and_no_other_arm(
    policy: AutoPolicy,
) -> None:
    view = AutoView(15_360, 15_360, 768, decoding=2, step_ns=6 * MS, idle=False)
    before, after = (
        policy.choose(replace(view, release_lag_ns=lag), Correction(), ALL).predictions for lag in (0, 9 * MS)
    )
    later = {one.arm: other.ttft_ns - one.ttft_ns for one, other in zip(before, after, strict=True)}
    assert later.pop(Arm.CHUNK_MAJOR) == 9 * MS
    assert 0 < later.pop(Arm.EARLY) <= 9 * MS
    assert later == {Arm.SYNC: 0, Arm.OFF: 0}


def test_a_release_starts_no_sooner_than_a_lag_behind_what_the_engine_has_to_compute(policy: AutoPolicy) -> None:
    view = AutoView(1_024, 1_024, 768, engine_wait_ns=200 * MS, decoding=2, step_ns=6 * MS, idle=False)
    early = [
        found(policy.choose(replace(view, release_lag_ns=lag), Correction(), ALL).predictions, Arm.EARLY).ttft_ns
        for lag in (0, 9 * MS)
    ]
    assert early[1] - early[0] == 9 * MS


def test_of_widths_that_end_the_prefill_at_the_same_time_the_narrowest_is_taken(policy: AutoPolicy) -> None:
    """Behind 300 ms of computing any width is in time: the engine may be free before that is expected of it."""
    waiting = (WaitingLoad(30 * MS, 20 * MS),) * 3
    view = AutoView(15_360, 15_360, 768, queued_ns=300 * MS, waiting=waiting, decoding=4, step_ns=6 * MS, idle=False)
    for one in policy.choose(view, Correction(), ALL).predictions:
        assert one.width == (1 if one.arm in (Arm.EARLY, Arm.SYNC) else 32)


def test_where_slices_cost_much_they_are_wide_and_where_little_narrow(profile: DeviceProfile) -> None:
    view = AutoView(15_152, 15_152, 768)
    widths = [
        AutoPolicy(with_link(profile, 55, cost)).choose(view, Correction(), ALL).chosen.width
        for cost in (6_000, 200_000, 5_000_000)
    ]
    assert widths[0] == 1
    assert widths[1] not in (1, 32)
    assert widths[2] in (16, 32)


def test_company_on_the_link_makes_slices_wider(profile: DeviceProfile) -> None:
    costly = AutoPolicy(with_link(profile, 55, 60_000))
    alone = AutoView(15_152, 15_152, 256)
    waiting = tuple(WaitingLoad(36 * MS * (i + 1), 11 * MS) for i in range(8))
    crowded = replace(alone, link_wait_ns=8 * 36 * MS, waiting=waiting)
    narrow, wide = (costly.choose(view, Correction(), ALL).chosen.width for view in (alone, crowded))
    assert isinstance(narrow, int)
    assert isinstance(wide, int)
    assert narrow < wide


def test_the_reason_names_the_arm_every_time_and_the_regret(policy: AutoPolicy) -> None:
    reason = policy.choose(AutoView(15_152, 15_152, 768), Correction(), ALL).reason()
    assert "\n" not in reason
    for word in ("layers a slice", "early", "sync", "chunk_major", "off", "regret 0.0%"):
        assert word in reason


# ---------------------------------------------------------------- laws


@given(view=views(), correction=corrections, can=abilities)
def test_no_arm_that_can_be_done_costs_less_than_the_chosen_one(
    policy: AutoPolicy, view: AutoView, correction: Correction, can: Abilities
) -> None:
    decision = policy.choose(view, correction, can)
    assert decision.chosen.cost_ns <= min(one.cost_ns for one in decision.predictions) * (1 + TIE)
    assert decision.chosen in decision.predictions
    arms = {one.arm for one in decision.predictions}
    narrow = can.least_width < policy.num_layers
    assert arms == {
        Arm.CHUNK_MAJOR,
        *([Arm.EARLY] if can.early and narrow else []),
        *([Arm.SYNC] if can.sync and narrow else []),
        *([Arm.OFF] if can.off else []),
    }
    assert all(one.cost_ns >= one.ttft_ns for one in decision.predictions)
    assert decision.regret >= 0
    widths = decision.chosen.width if isinstance(decision.chosen.width, tuple) else (decision.chosen.width,)
    assert min(widths) >= can.least_width
    plan_slices(policy.num_layers, decision.chosen.width)


@given(view=views(), correction=corrections)
def test_the_same_arguments_give_the_same_answer(policy: AutoPolicy, view: AutoView, correction: Correction) -> None:
    assert policy.choose(view, correction, ALL) == policy.choose(view, correction, ALL)


@given(view=views(), slower=st.floats(1, 8))
def test_a_slower_link_makes_no_load_earlier_and_leaves_computing_again_as_it_is(
    policy: AutoPolicy, view: AutoView, slower: float
) -> None:
    alone = replace(view, waiting=())  # in company, a width is chosen for others' sake too
    before = policy.choose(alone, Correction(), ALL).predictions
    after = policy.choose(alone, Correction(wire=slower), ALL).predictions
    for one, other in zip(before, after, strict=True):
        if one.arm is Arm.OFF:
            assert one == other
        else:
            assert other.ttft_ns >= one.ttft_ns - 2


@given(view=views(), more=st.integers(1, 16))
def test_more_who_would_stand_still_never_make_an_arm_cheaper(policy: AutoPolicy, view: AutoView, more: int) -> None:
    crowded = replace(view, decoding=view.decoding + more, bystanders=view.bystanders + more, idle=False)
    before = policy.choose(replace(view, idle=False), Correction(), ALL).predictions
    for one, other in zip(before, policy.choose(crowded, Correction(), ALL).predictions, strict=True):
        assert other.cost_ns >= one.cost_ns - 2


@given(view=views(), correction=corrections, more=st.integers(1, 8))
def test_more_first_tokens_that_would_wait_make_joining_at_once_dearer_and_change_no_other_arm(
    policy: AutoPolicy, view: AutoView, correction: Correction, more: int
) -> None:
    before = policy.choose(view, correction, ALL).predictions
    for crowded in (
        replace(view, sharing=view.sharing + more),
        replace(view, first_tokens=view.first_tokens + more),
    ):
        for one, other in zip(before, policy.choose(crowded, correction, ALL).predictions, strict=True):
            assert other == one or (one.arm is Arm.SYNC and other.cost_ns > one.cost_ns)
            assert (other.ttft_ns, other.width) == (one.ttft_ns, one.width)


@given(view=views(), correction=corrections)
def test_no_arm_answers_before_its_prefill_could_be_computed_after_what_the_engine_has_to_do(
    policy: AutoPolicy, view: AutoView, correction: Correction
) -> None:
    decision = policy.choose(view, correction, ALL)
    least = view.engine_wait_ns + view.queued_ns + decision.prefill_ns
    assert all(one.ttft_ns >= least - 2 for one in decision.predictions)


@pytest.mark.parametrize(
    ("view", "says"),
    [
        (AutoView(0, 0, 10), "needs a hit"),
        (AutoView(10, 10, 0), "new tokens behind it"),
        (AutoView(10, 5, 1), "needs a hit"),
        (AutoView(10, 10, 1, link_wait_ns=-1), "at least 0"),
        (AutoView(10, 10, 1, release_lag_ns=-1), "at least 0"),
        (AutoView(10, 10, 1, sharing=-1), "at least 0"),
        (AutoView(10, 10, 1, decoding=1, bystanders=2), "at least 0"),
    ],
)
def test_a_view_of_nothing_is_refused(policy: AutoPolicy, view: AutoView, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        policy.choose(view, Correction(), ALL)


@pytest.mark.parametrize("weight", [-0.1, float("inf"), float("nan")])
def test_a_weight_below_nothing_is_refused(profile: DeviceProfile, weight: float) -> None:
    with pytest.raises(ValueError, match="bystander_weight must be at least 0"):
        AutoPolicy(profile, bystander_weight=weight)


def test_a_choice_among_sixteen_waiting_loads_costs_the_scheduler_less_than_a_tenth_of_a_millisecond(
    policy: AutoPolicy,
) -> None:
    waiting = tuple(WaitingLoad(10 * MS * i, 12 * MS) for i in range(16))
    view = AutoView(65_536, 65_536, 256, link_wait_ns=700 * MS, waiting=waiting, decoding=8, step_ns=6 * MS, idle=False)
    took: list[int] = []
    for _ in range(300):
        begun = time.perf_counter_ns()
        policy.choose(view, Correction(), ALL)
        took.append(time.perf_counter_ns() - begun)
    assert min(took) < 100_000, f"{min(took)} ns"


# ---------------------------------------------------------------- what is predicted comes true


def by_recursion(policy: AutoPolicy, cached: int, new: int, arm: Arm, width: int | tuple[int, ...]) -> int:
    """TTFT of one request alone, by the recursion."""
    layers = policy.num_layers
    slices = [part.num_layers for part in plan_slices(layers, width)]
    wire = policy.wire_ns(cached)
    ends = [wire * sum(slices[: i + 1]) // layers + (i + 1) * policy.slice_ns for i in range(len(slices))]
    times = tuple(end - begin for begin, end in zip([0, *ends], ends, strict=False))
    compute = policy.prefill_ns(cached, new, Correction())[1]
    per_layer = tuple(compute * (i + 1) // layers - compute * i // layers for i in range(layers))
    release: ReleasePolicy = Whole() if arm is Arm.CHUNK_MAJOR else First()
    request = TimedRequest(0, Load(tuple(slices), tuple(slices), times), per_layer, new)
    return compute_timeline([request], Fifo(), release, StepRule(0, MS)).requests[0].ttft_ns


@given(cached=st.integers(64, 65_536), new=st.integers(1, 8_192))
def test_predictions_for_a_request_alone_are_the_recursions_to_one_idle_poll(
    policy: AutoPolicy, cached: int, new: int
) -> None:
    for one in policy.choose(AutoView(cached, cached, new), Correction(), ALL).predictions:
        if one.arm in (Arm.CHUNK_MAJOR, Arm.EARLY):
            exact = by_recursion(policy, cached, new, one.arm, one.width)
            assert abs(one.ttft_ns - exact) <= MS, one


def test_a_load_that_is_released_early_is_weighed_and_every_other_is_whole(policy: AutoPolicy) -> None:
    early = policy.choose(AutoView(15_152, 15_152, 768), Correction(), replace(ALL, sync=False))
    whole = policy.choose(AutoView(15_152, 15_152, 768), Correction(), Abilities(early=False, sync=False))
    assert (early.release, whole.release) == (WeighedRelease(), Whole())


def test_a_model_with_other_layers_and_tokens_is_planned_in_its_own(profile: DeviceProfile) -> None:
    policy = AutoPolicy(profile, num_layers=61, token_bytes=70_272, token_budget=2_048)
    decision = policy.choose(AutoView(8_192, 8_192, 4_096), Correction(), ALL)
    plan_slices(61, decision.chosen.width)
    assert decision.prefill_ns > decision.compute_ns  # two steps
    assert policy.wire_ns(1_000) == round(1_000 * 70_272 * 1e9 / profile.wire.h2d_bytes_per_s)


def test_the_least_width_is_kept_where_narrow_runs_copy_slowly(policy: AutoPolicy) -> None:
    can = replace(ALL, least_width=8)
    assert policy.choose(AutoView(15_152, 15_152, 768), Correction(), can).chosen.width == 8
    assert policy.choose(AutoView(15_152, 15_152, 768), Correction(), replace(ALL, least_width=32)).arm in (
        Arm.CHUNK_MAJOR,
        Arm.OFF,
    )


def test_corrections_stay_in_range_whatever_is_observed() -> None:
    assert Correction(wire=CORRECTION_RANGE).after_load(1, 10**9).wire == CORRECTION_RANGE
