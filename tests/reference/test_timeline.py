"""The recursion: cases worked out by hand, and the laws any schedule obeys (TIME-1 .. 3, ORD-1, ORD-2, REL-2)."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella.reference.ordering import ORDERS, Fifo, OrderPolicy, RoundRobin
from lamella.reference.release import First, JustInTime, ReleasePolicy, Whole
from lamella.reference.slices import plan_slices
from lamella.reference.timeline import (
    NOTHING_TO_LOAD,
    Chunk,
    Load,
    StepRule,
    TimedRequest,
    Timeline,
    add_members,
    compute_timeline,
    schedule_link,
)

RELEASES: list[ReleasePolicy] = [Whole(), First(), JustInTime(), JustInTime(5), JustInTime(None)]
TIMES = st.integers(0, 30)


def request(
    arrival_ns: int, slice_ns: list[int], compute_ns: list[int], new_tokens: int = 1, width: int = 1
) -> TimedRequest:
    """One slice of `width` layers for each entry of slice_ns; its bytes are its ns."""
    return TimedRequest(
        arrival_ns, Load((width,) * len(slice_ns), tuple(slice_ns), tuple(slice_ns)), tuple(compute_ns), new_tokens
    )


@st.composite
def workloads(draw: st.DrawFn, max_requests: int = 5) -> list[TimedRequest]:
    num_layers = draw(st.integers(1, 5))
    layers = st.lists(TIMES, min_size=num_layers, max_size=num_layers)
    arrivals = sorted(draw(st.lists(st.integers(0, 60), min_size=1, max_size=max_requests)))
    made: list[TimedRequest] = []
    for arrival in arrivals:
        widths = [part.num_layers for part in plan_slices(num_layers, draw(st.integers(1, num_layers)))]
        sizes = draw(st.lists(TIMES, min_size=len(widths), max_size=len(widths)))
        load = Load(tuple(widths), tuple(sizes), tuple(sizes)) if draw(st.booleans()) else NOTHING_TO_LOAD
        deadline = draw(st.none() | st.integers(0, 90))
        made.append(TimedRequest(arrival, load, tuple(draw(layers)), draw(st.integers(1, 8)), deadline))
    return made


RULES = st.builds(StepRule, st.integers(0, 5), st.integers(0, 9), st.none() | st.integers(1, 9))
ORDER = st.sampled_from(list(ORDERS.values()))
RELEASE = st.sampled_from(RELEASES)


# ---------------------------------------------------------------- worked by hand


def test_one_request_overlaps_computing_with_loading() -> None:
    # Slices land at 10, 20, 30; layers take 4: 10-14, 20-24, 30-34. The engine stands 6 before each of the last two.
    timeline = compute_timeline([request(0, [10, 10, 10], [4, 4, 4])], Fifo(), First())
    assert timeline.requests[0].ttft_ns == 34
    assert timeline.steps[0].layer_stall_ns == (0, 6, 6)
    assert timeline.steps[0].culprits == (None, 0, 0)


def test_just_in_time_ends_at_the_same_instant_without_a_stall() -> None:
    timeline = compute_timeline([request(0, [10, 10, 10], [4, 4, 4])], Fifo(), JustInTime())
    assert timeline.requests[0].ttft_ns == 34
    assert timeline.requests[0].released_ns == 22
    assert timeline.steps[0].layer_stall_ns == (0, 0, 0)


def test_interleaved_slices_make_both_requests_wait_for_both_loads() -> None:
    two = [request(0, [10, 10], [5, 5])] * 2
    interleaved = compute_timeline(two, RoundRobin(), First())
    one_by_one = compute_timeline(two, Fifo(), First())
    # Interleaved, 0 is released at 10 alone and stands for its second layer until 30; 1 starts at 35.
    assert [times.ttft_ns for times in interleaved.requests] == [35, 45]
    assert [times.ttft_ns for times in one_by_one.requests] == [25, 45]


def test_a_step_waits_for_a_released_request_that_found_no_budget() -> None:
    # Both are released at 2, the budget holds one; the step still waits for the other's second layer (REL-2).
    requests = [request(0, [1, 0], [3, 3], new_tokens=4), request(0, [1, 20], [3, 3], new_tokens=4)]
    timeline = compute_timeline(requests, Fifo(), First(), StepRule(idle_poll_ns=2, token_budget=4))
    first = timeline.steps[0]
    assert [chunk.request for chunk in first.chunks] == [0]
    assert (first.layer_stall_ns, first.culprits) == ((0, 17), (None, 1))


def test_a_prompt_beyond_the_budget_is_prefilled_in_chunks_before_the_next_one_begins() -> None:
    requests = [request(0, [], [8], new_tokens=8), request(0, [], [2], new_tokens=2)]
    timeline = compute_timeline(requests, Fifo(), Whole(), StepRule(token_budget=5))
    assert [step.chunks for step in timeline.steps] == [(Chunk(0, 0, 5),), (Chunk(0, 5, 3), Chunk(1, 0, 2))]
    assert [times.first_token_ns for times in timeline.requests] == [10, 10]


def test_an_idle_engine_looks_on_its_grid() -> None:
    timeline = compute_timeline([request(3, [10], [4])], Fifo(), Whole(), StepRule(idle_poll_ns=4))
    # It wakes at 3, looks at 7, 11, 15; the load lands at 13.
    assert timeline.requests[0].released_ns == 15


@pytest.mark.known_fault(50)
def test_a_hit_with_nothing_to_transfer_is_released_at_its_arrival() -> None:
    for load in (NOTHING_TO_LOAD, Load((2,), (0,), (0,))):
        timeline = compute_timeline([TimedRequest(7, load, (1, 1))], Fifo(), Whole())
        assert (timeline.requests[0].released_ns, timeline.requests[0].first_token_ns) == (7, 9)


@pytest.mark.known_fault(86)
def test_a_small_load_can_overtake_a_burst_by_deadline_or_size() -> None:
    burst, small = request(0, [10] * 8, [1] * 8), request(5, [1] * 8, [1] * 8)
    landed = {
        name: schedule_link([burst, replace(small, deadline_ns=20)], order)[1][-1] for name, order in ORDERS.items()
    }
    assert landed["fifo"] == 88
    assert landed["deadline"] == landed["shortest_remaining"] == 18


# ---------------------------------------------------------------- laws


@given(workloads(max_requests=1), ORDER, RELEASE)
def test_one_request_takes_at_least_the_longer_and_at_most_the_sum(
    workload: list[TimedRequest], order: OrderPolicy, release: ReleasePolicy
) -> None:
    transfer, prefill = sum(workload[0].load.slice_ns), sum(workload[0].layer_compute_ns)
    ttft = compute_timeline(workload, order, release).requests[0].ttft_ns
    assert max(transfer, prefill) <= ttft <= transfer + prefill


@given(workloads(max_requests=1), ORDER, RELEASE, RULES)
def test_overheads_cost_at_most_themselves(
    workload: list[TimedRequest], order: OrderPolicy, release: ReleasePolicy, rule: StepRule
) -> None:
    rule = replace(rule, token_budget=None)
    bare = compute_timeline(workload, order, Whole()).requests[0].ttft_ns
    ttft = compute_timeline(workload, order, release, rule).requests[0].ttft_ns
    assert ttft <= bare + rule.start_delay_ns + rule.idle_poll_ns


@given(workloads(), RULES)
def test_the_width_of_all_layers_with_whole_release_is_chunk_major(
    workload: list[TimedRequest], rule: StepRule
) -> None:
    """Chunk-major moves objects, and a layer is complete with the last of them: here, slices that land no layer."""
    whole: list[TimedRequest] = []
    by_chunks: list[TimedRequest] = []
    for one in workload:
        num_layers, bytes_ = len(one.layer_compute_ns), sum(one.load.slice_bytes)
        if not one.load.slice_layers:
            whole.append(one)
            by_chunks.append(one)
            continue
        objects = [bytes_ // 3, bytes_ // 3, bytes_ - 2 * (bytes_ // 3)]
        whole.append(replace(one, load=Load((num_layers,), (bytes_,), (bytes_,))))
        by_chunks.append(replace(one, load=Load((0, 0, num_layers), tuple(objects), tuple(objects))))
    assert compute_timeline(whole, Fifo(), Whole(), rule) == compute_timeline(by_chunks, Fifo(), Whole(), rule)


@given(workloads(), st.data())
def test_without_a_request_nobody_lands_later_under_fifo(workload: list[TimedRequest], data: st.DataObject) -> None:
    removed = data.draw(st.integers(0, len(workload) - 1))
    fewer = workload[:removed] + workload[removed + 1 :]
    before, after = schedule_link(workload, Fifo()), schedule_link(fewer, Fifo())
    for with_it, without in zip(before[:removed] + before[removed + 1 :], after, strict=True):
        assert all(late >= early for late, early in zip(with_it, without, strict=True))


@given(workloads(), ORDER)
def test_the_link_is_serial_busy_while_there_is_work_and_carries_everything_once(
    workload: list[TimedRequest], order: OrderPolicy
) -> None:
    landings = schedule_link(workload, order)
    carried = sorted(
        (landed, landed - busy, busy, index, part)
        for index, slices in enumerate(landings)
        for part, (landed, busy) in enumerate(zip(slices, workload[index].load.slice_ns, strict=True))
    )
    assert [len(slices) for slices in landings] == [len(one.load.slice_ns) for one in workload]
    free = 0
    left = {(index, part) for _, _, _, index, part in carried}
    for landed, begin, busy, index, part in carried:
        assert begin >= free, "two slices at once"
        waiting = [workload[i].arrival_ns for i, _ in left]
        assert busy == 0 or begin == max(free, min(waiting)), "idle while a slice waits"
        assert begin >= workload[index].arrival_ns
        assert part == 0 or (index, part - 1) not in left, "slices of a request out of order"
        left.remove((index, part))
        free = max(free, landed)


@given(workloads(), ORDER, RELEASE, RULES)
def test_nothing_is_read_before_it_landed_or_starts_before_its_first_layer(
    workload: list[TimedRequest], order: OrderPolicy, release: ReleasePolicy, rule: StepRule
) -> None:
    timeline = compute_timeline(workload, order, release, rule)
    for step, begins in _layer_begins(workload, timeline):
        for times in timeline.requests:
            if times.released_ns <= step.polled_ns < times.first_token_ns:
                assert all(begin >= landed for begin, landed in zip(begins, times.landing_ns, strict=True))
    as_forecast = isinstance(order, Fifo)  # else a later request may go before the first layer of a released one
    for times in timeline.requests:
        assert times.arrival_ns <= times.released_ns <= times.started_ns <= times.first_token_ns
        assert times.arrival_ns <= times.landing_ns[0]
        if not release.needs_forecast or rule.start_delay_ns == 0:
            assert times.landing_ns[0] <= times.released_ns
        elif as_forecast:
            assert times.landing_ns[0] <= times.started_ns


@given(workloads(), ORDER, RULES)
def test_a_stall_has_a_culprit_and_just_in_time_alone_has_none(
    workload: list[TimedRequest], order: OrderPolicy, rule: StepRule
) -> None:
    timeline = compute_timeline(workload, order, First(), rule)
    for step in timeline.steps:
        assert [culprit is not None for culprit in step.culprits] == [stall > 0 for stall in step.layer_stall_ns]
    alone = compute_timeline(workload[:1], order, JustInTime(), rule)
    assert all(sum(step.layer_stall_ns) == 0 for step in alone.steps)


@given(workloads(), ORDER, RELEASE, RULES)
def test_every_token_is_computed_once_and_within_the_budget(
    workload: list[TimedRequest], order: OrderPolicy, release: ReleasePolicy, rule: StepRule
) -> None:
    timeline = compute_timeline(workload, order, release, rule)
    computed = [0] * len(workload)
    for step in timeline.steps:
        assert rule.token_budget is None or sum(chunk.num_tokens for chunk in step.chunks) <= rule.token_budget
        for chunk in step.chunks:
            assert chunk.first_token == computed[chunk.request]
            computed[chunk.request] += chunk.num_tokens
    assert computed == [one.new_tokens for one in workload]


@given(workloads(), RULES)
def test_fifo_first_is_never_worse_than_chunk_major_when_requests_come_alone(
    workload: list[TimedRequest], rule: StepRule
) -> None:
    rule = replace(rule, idle_poll_ns=0)
    for one in workload:
        size = sum(one.load.slice_bytes)
        load = Load((len(one.layer_compute_ns),), (size,), (size,)) if one.load.slice_layers else NOTHING_TO_LOAD
        layered = compute_timeline([one], Fifo(), First(), rule).requests[0].ttft_ns
        assert layered <= compute_timeline([replace(one, load=load)], Fifo(), Whole(), rule).requests[0].ttft_ns


@given(workloads())
def test_the_parts_of_a_cut_prefill_cost_what_the_whole_costs(workload: list[TimedRequest]) -> None:
    cost = add_members(workload)
    one = workload[0]
    parts = [cost([Chunk(0, first, 1)]) for first in range(one.new_tokens)]
    assert tuple(map(sum, zip(*parts, strict=True))) == one.layer_compute_ns


@given(workloads(), ORDER, RELEASE, RULES)
def test_the_same_input_gives_the_same_timeline(
    workload: list[TimedRequest], order: OrderPolicy, release: ReleasePolicy, rule: StepRule
) -> None:
    assert compute_timeline(workload, order, release, rule) == compute_timeline(list(workload), order, release, rule)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ([request(5, [], [1]), request(4, [], [1])], "number 1 arrives at 4, after 5"),
        ([request(0, [], [1]), request(0, [], [1, 1])], "request 1 has 2 layers, the first one 1"),
        ([request(0, [1], [1, 1])], "slices must hold 2 layers, or none"),
        ([request(0, [], [1], new_tokens=0)], "at least 1 token, got 0"),
        ([request(0, [-1], [1])], "negative"),
        ([request(-1, [], [1])], "number 0 arrives at -1"),
    ],
)
def test_impossible_requests_are_refused(wrong: list[TimedRequest], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        compute_timeline(wrong, Fifo(), Whole())


def _layer_begins(workload: list[TimedRequest], timeline: Timeline) -> list[tuple]:
    """Each step with the instant at which each of its layers began."""
    cost = add_members(workload)
    found = []
    for step in timeline.steps:
        reached, begins = step.start_ns, []
        for stall, took in zip(step.layer_stall_ns, cost(step.chunks), strict=True):
            begins.append(reached + stall)
            reached += stall + took
        assert reached == step.end_ns
        found.append((step, begins))
    return found


@pytest.mark.parametrize(
    "rule", [{"token_budget": 0}, {"token_budget": -1}, {"idle_poll_ns": -1}, {"start_delay_ns": -1}]
)
def test_a_rule_by_which_time_or_work_would_stand_still_is_refused(rule: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="times must be at least 0 and token_budget at least 1"):
        StepRule(**rule)
