"""The world beyond the recursion (SIM-2, SIM-3, SIM-4): decoding, bystanders, submission, closed loops, stretches."""

import random
from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter

import pytest
from simpy.events import Event

from exactness import random_scenario
from lamella.reference.ordering import ORDERS, Fifo, ShortestRemaining, Submission
from lamella.reference.release import First, JustInTime, ReleasePolicy, Whole
from lamella.reference.slices import plan_slices
from lamella.reference.timeline import Load, StepRule, TimedRequest, compute_timeline
from lamella.sim.clock import Clock, Phase
from lamella.sim.engine import Engine
from lamella.sim.hardware import Hardware, Sharing
from lamella.sim.scheduler import EngineSettings, Request, SubmitAt
from lamella.sim.stations import Prefill, plan_load
from lamella.sim.world import RequestRecord, World

RELEASES: list[ReleasePolicy] = [Whole(), First(), JustInTime(), JustInTime(30), JustInTime(None)]


class LinearCompute:
    """Layers that take 10 ns a new token and 1 a decoding request; a decode step of 7 + 1 a context token."""

    num_layers = 4

    def step_layers_ns(self, prefills: Sequence[Prefill], decode_batch: int, decode_context_tokens: int) -> list[int]:
        return [10 * sum(new for _, new in prefills) + decode_batch] * self.num_layers

    def decode_ns(self, batch: int, context_tokens: int, num_steps: int) -> int:
        return num_steps * (7 + context_tokens) + batch * num_steps * (num_steps - 1) // 2


def load_of(total_ns: int, width: int = 1) -> Load:
    return plan_load(plan_slices(4, width), layer_bytes=total_ns // 4, bytes_per_s=1e9)


def run(world: World, *coming: tuple[int, Request]) -> list[RequestRecord]:
    for instant, request in coming:
        world.arrive_at(instant, request)
    return sorted(world.run(), key=attrgetter("sequence"))


def random_coming(rng: random.Random, num_requests: int) -> list[tuple[int, Request]]:
    instant = 0
    coming: list[tuple[int, Request]] = []
    for tag in range(num_requests):
        instant += rng.choice((0, rng.randint(0, 900)))
        load = load_of(4 * rng.randint(1, 200), rng.randint(1, 4)) if rng.random() < 0.7 else Load((), (), ())
        due = rng.choice((None, rng.randint(1, 900)))
        request = Request(
            rng.randint(0, 50), rng.randint(1, 40), rng.randint(1, 30), load, due, tag, rng.choice((0, 5))
        )
        coming.append((instant, request))
    return coming


# ---------------------------------------------------------------- decoding


def test_a_request_decodes_a_token_a_step_over_a_growing_context() -> None:
    (record,) = run(World(LinearCompute(), Fifo(), Whole()), (3, Request(5, 2, output_tokens=4)))
    assert record.first_token_ns == 3 + 4 * 20
    assert record.end_ns == record.first_token_ns + (7 + 7) + (7 + 8) + (7 + 9)
    assert record.tpot_ns == 15


def test_whoever_has_left_is_in_nobodys_context_any_more() -> None:
    alone = Request(5, 2, output_tokens=4)
    first, second = run(World(LinearCompute(), Fifo(), Whole()), (0, alone), (10_000, alone))
    assert second.end_ns - second.arrival_ns == first.end_ns - first.arrival_ns


class CountingCompute(LinearCompute):
    """Counts how often decoding is asked about."""

    def __init__(self) -> None:
        self.asked = 0

    def decode_ns(self, batch: int, context_tokens: int, num_steps: int) -> int:
        self.asked += 1
        return super().decode_ns(batch, context_tokens, num_steps)


@pytest.mark.parametrize("release", RELEASES, ids=str)
def test_a_load_that_has_landed_makes_decoding_step_by_step_no_longer(release: ReleasePolicy) -> None:
    compute = CountingCompute()
    (record,) = run(World(compute, Fifo(), release), (0, Request(5, 2, output_tokens=5000, load=load_of(400))))
    assert record.all_landed_ns == 400
    assert compute.asked < 100, "decoding alone is one event, however many its steps"


def test_an_arrival_joins_at_the_next_step_boundary() -> None:
    world = World(LinearCompute(), Fifo(), Whole(), keep_steps=True)
    records = run(world, (0, Request(0, 1, output_tokens=100)), (60, Request(0, 1)))
    # First token at 40, decode steps end at 48, 57, 67: the second request starts there, beside one decoding request.
    assert records[1].started_ns == 67
    assert records[1].first_token_ns == 67 + 4 * (10 + 1)


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("release", RELEASES, ids=str)
def test_a_stretch_as_one_event_is_what_its_steps_are(order: object, release: ReleasePolicy) -> None:
    for seed in range(40):
        rng = random.Random(seed)
        coming = random_coming(rng, 12)
        settings = EngineSettings(
            start_delay_ns=rng.choice((0, 3)),
            idle_poll_ns=rng.choice((0, 11)),
            token_budget=rng.choice((None, 16)),
            max_batch=rng.choice((None, 3)),
            submit_at=rng.choice(list(SubmitAt)),
        )
        fast = run(World(LinearCompute(), order, release, settings), *coming)
        slow = run(World(LinearCompute(), order, release, settings, fast_forward=False), *coming)
        assert fast == slow, f"seed {seed}"
        assert len(fast) == len(coming)


def test_decoding_takes_its_share_of_the_token_budget() -> None:
    world = World(LinearCompute(), Fifo(), Whole(), EngineSettings(token_budget=4), keep_steps=True)
    run(world, (0, Request(0, 2, output_tokens=50)), (1, Request(0, 8)))
    chunks = [chunk.num_tokens for step in world.steps for chunk in step.chunks if chunk.request == 1]
    assert chunks == [3, 3, 2]


def test_no_more_requests_run_than_the_batch_holds() -> None:
    world = World(LinearCompute(), Fifo(), Whole(), EngineSettings(max_batch=2), keep_steps=True)
    run(world, *[(0, Request(0, 1, output_tokens=6))] * 5)
    assert max(step.decode_batch + len(step.chunks) for step in world.steps) == 2


# ---------------------------------------------------------------- stalls and who pays for them


def test_bystanders_are_charged_for_the_stall_that_a_load_causes() -> None:
    world = World(LinearCompute(), Fifo(), First())
    decoding, loading = run(world, (0, Request(0, 1, output_tokens=500)), (50, Request(8, 1, load=load_of(4000))))
    assert loading.caused_stall_ns > 0
    assert loading.caused_stall_ns == sum(loading.layer_stall_ns) == decoding.victim_stall_ns == world.stall_ns
    assert loading.victim_stall_ns == decoding.caused_stall_ns == 0


def test_just_in_time_spares_the_bystanders_and_whole_costs_them_nothing() -> None:
    for release in (JustInTime(), Whole()):
        world = World(LinearCompute(), Fifo(), release)
        run(world, (0, Request(0, 1, output_tokens=500)), (50, Request(8, 1, load=load_of(4000))))
        assert world.stall_ns == 0


def test_a_decode_step_waits_for_a_released_load_that_found_no_seat() -> None:
    """REL-2: a third request's blocks may be shared, so the step waits although only decoding happens in it."""
    world = World(LinearCompute(), Fifo(), First(), EngineSettings(max_batch=1), keep_steps=True)
    run(world, (0, Request(0, 1, output_tokens=80)), (0, Request(8, 1, load=load_of(400))))
    standing = [step for step in world.steps if step.decode_batch == 1 and sum(step.layer_stall_ns)]
    assert standing
    assert set(standing[0].culprits) == {1, None}


def test_a_decode_step_by_one_graph_waits_in_front_of_it_for_all_that_is_landing() -> None:
    """Layer by layer it computes what has landed meanwhile; as one graph it begins with the last layer's landing."""
    stalls, behind, computing = [], [], []
    for full_graphs in (False, True):
        made = partial(Engine, full_graphs=full_graphs)
        world = World(LinearCompute(), Fifo(), First(), EngineSettings(max_batch=1), keep_steps=True, make_engine=made)
        _, load = run(world, (0, Request(0, 1, output_tokens=80)), (0, Request(8, 1, load=load_of(400))))
        step = next(step for step in world.steps if step.decode_batch == 1 and sum(step.layer_stall_ns))
        stalls.append(step.layer_stall_ns)
        behind.append(step.end_ns - load.all_landed_ns)
        computing.append(step.end_ns - step.start_ns - sum(step.layer_stall_ns))
        assert {culprit for culprit, stall in zip(step.culprits, step.layer_stall_ns, strict=True) if stall} == {1}
        assert load.caused_stall_ns == world.stall_ns
    assert sum(map(bool, stalls[0])) > 1
    assert [bool(stall) for stall in stalls[1]] == [False, False, False, True], "until the last layer is there"
    assert behind[0] < computing[0] == computing[1] == behind[1], "then its layers run one after another"


# ---------------------------------------------------------------- submission and admission


def test_a_load_submitted_at_the_poll_waits_for_the_step_to_end() -> None:
    coming = (0, Request(0, 5)), (10, Request(8, 1, load=load_of(40)))
    at_once = run(World(LinearCompute(), Fifo(), Whole()), *coming)
    at_poll = run(World(LinearCompute(), Fifo(), Whole(), EngineSettings(submit_at=SubmitAt.POLL)), *coming)
    assert (at_once[1].submitted_ns, at_poll[1].submitted_ns) == (10, 200)
    assert at_poll[1].first_token_ns == 200 + 40 + 40


def test_submission_at_the_poll_is_the_recursion_with_those_instants() -> None:
    """Given when loads were submitted, all else follows by the recursion's rules."""
    compute = LinearCompute()
    for seed in range(300):
        rng = random.Random(seed)
        coming = [(at, request._replace(output_tokens=1, due_after_ns=None)) for at, request in random_coming(rng, 6)]
        loading = [(at, request) for at, request in coming if request.load.slice_ns]
        rule = StepRule(idle_poll_ns=rng.choice((0, 7)), token_budget=rng.choice((None, 16)))
        order, release = rng.choice(list(ORDERS.values())), rng.choice(RELEASES)
        settings = EngineSettings(0, rule.idle_poll_ns, rule.token_budget, None, SubmitAt.POLL)
        records = run(World(compute, order, release, settings), *loading)
        timed = [
            TimedRequest(
                record.submitted_ns,
                next(request.load for _, request in loading if request.tag == record.tag),
                tuple(compute.step_layers_ns([(0, record.new_tokens)], 0, 0)),
                record.new_tokens,
            )
            for record in records
        ]
        timeline = compute_timeline(timed, order, release, rule)
        assert [times.first_token_ns for times in timeline.requests] == [record.first_token_ns for record in records]


def test_admission_comes_before_the_queue_and_counts_as_waiting() -> None:
    (record,) = run(World(LinearCompute(), Fifo(), Whole()), (5, Request(8, 1, load=load_of(40), admission_ns=100)))
    assert (record.arrival_ns, record.submitted_ns, record.ttft_ns) == (5, 105, 100 + 40 + 40)


# ---------------------------------------------------------------- driving


def test_a_closed_loop_keeps_so_many_requests_in_flight_and_serves_all() -> None:
    running: list[int] = []
    world = World(LinearCompute(), Fifo(), First(), on_finish=lambda record: running.append(record.sequence))
    world.loop_closed(3, [Request(8, 2, 5, load_of(40), tag=tag) for tag in range(20)], think_ns=4)
    records = world.run()
    assert sorted(record.tag for record in records) == list(range(20))
    assert len(running) == 20
    for record in records:
        assert sum(other.arrival_ns <= record.arrival_ns < other.end_ns for other in records) <= 3


def test_worlds_on_one_clock_do_what_they_do_alone() -> None:
    coming = random_coming(random.Random(1), 20)
    alone = [run(World(LinearCompute(), Fifo(), First()), *coming[part::2]) for part in (0, 1)]
    clock = Clock()
    worlds = [World(LinearCompute(), Fifo(), First(), clock=clock) for _ in range(2)]
    for index, (instant, request) in enumerate(coming):
        worlds[index % 2].arrive_at(instant, request)
    clock.run()
    assert [sorted(world.records, key=attrgetter("sequence")) for world in worlds] == alone


def test_the_same_requests_give_the_same_records() -> None:
    coming = random_coming(random.Random(2), 30)
    first, second = (run(World(LinearCompute(), ShortestRemaining(), JustInTime(None)), *coming) for _ in range(2))
    assert first == second


def test_what_went_in_came_out() -> None:
    coming = random_coming(random.Random(3), 50)
    world = World(LinearCompute(), Fifo(), First(), EngineSettings(token_budget=16))
    records = run(world, *coming)
    assert len(records) == 50
    assert world.backlog_tokens == 0
    assert world.link.carried_bytes == sum(record.load_bytes for record in records)
    assert world.link.busy_ns == sum(sum(request.load.slice_ns) for _, request in coming)
    for record in records:
        instants = (
            record.arrival_ns,
            record.submitted_ns,
            record.first_layer_ns,
            record.released_ns,
            record.started_ns,
        )
        assert list(instants) == sorted(instants)
        assert record.all_landed_ns <= record.first_token_ns <= record.end_ns


@pytest.mark.parametrize(
    "wrong",
    [
        Request(0, 0),
        Request(-1, 1),
        Request(0, 1, output_tokens=0),
        Request(0, 1, admission_ns=-1),
        Request(0, 1, load=Load((3,), (1,), (1,))),
    ],
)
def test_impossible_requests_are_refused(wrong: Request) -> None:
    with pytest.raises(ValueError, match=r"at least 1 token|all 4 layers"):
        World(LinearCompute(), Fifo(), Whole()).arrive(wrong)


class TooFew:
    """An order of one's own that forgot that keys are one a slice."""

    name = "too few"

    def keys(self, submission: Submission) -> tuple[int, ...]:
        return (submission.sequence,)


@pytest.mark.parametrize("sharing", list(Sharing))
def test_an_order_of_ones_own_that_gives_too_few_keys_is_refused_by_its_name(sharing: Sharing) -> None:
    world = World(LinearCompute(), TooFew(), First(), hardware=Hardware(sharing=sharing))
    with pytest.raises(ValueError, match=r"order policy 'too few' must give a tuple of 4 keys.*keys\(\) gave \(0,\)"):
        run(world, (0, Request(8, 8, load=load_of(40))))


@pytest.mark.parametrize("wrong", [{"token_budget": 0}, {"max_batch": 0}, {"idle_poll_ns": -1}, {"start_delay_ns": -1}])
def test_impossible_settings_are_refused(wrong: dict[str, int]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=rf"{name} must be at least \d, got {wrong[name]}"):
        EngineSettings(**wrong)  # type: ignore[arg-type]


# ---------------------------------------------------------------- clock and link


def test_within_an_instant_actions_run_by_phase_and_may_go_back_to_an_earlier_one() -> None:
    clock, seen = Clock(), []

    def form() -> None:
        seen.append("form")
        clock.at(5, Phase.HAPPEN, lambda: seen.append("happen again"))

    clock.at(5, Phase.FORM, form)
    clock.at(5, Phase.FORM, lambda: seen.append("form again"))
    clock.at(5, Phase.CHOOSE, lambda: seen.append("choose"))
    clock.at(5, Phase.HAPPEN, lambda: seen.append("happen"))
    clock.run()
    assert seen == ["happen", "choose", "form", "happen again", "form again"]


def test_a_simpy_process_shares_the_clock() -> None:
    clock, seen = Clock(), []

    def watch() -> Generator[Event, None, None]:
        for _ in range(3):
            yield clock.environment.timeout(10)
            seen.append((clock.now_ns, clock.environment.now))

    clock.environment.process(watch())
    clock.at(20, Phase.HAPPEN, lambda: seen.append("happen"))
    clock.run()
    assert seen == [(10, 10), "happen", (20, 20), (30, 30)]


def test_soon_is_at_once_unless_something_of_the_instant_comes_before() -> None:
    for phase, order in ((Phase.HAPPEN, ["other", "chosen"]), (Phase.FORM, ["chosen", "other"])):
        clock, seen = Clock(), []
        clock.at(
            5, Phase.HAPPEN, lambda clock=clock, seen=seen: clock.soon(Phase.CHOOSE, lambda: seen.append("chosen"))
        )
        clock.at(5, phase, lambda seen=seen: seen.append("other"))
        clock.run()
        assert seen == order


def test_the_past_is_refused() -> None:
    clock = Clock()
    clock.at(5, Phase.HAPPEN, lambda: None)
    clock.run()
    with pytest.raises(ValueError, match=r"instant 4 has passed; it is 5"):
        clock.at(4, Phase.HAPPEN, lambda: None)


def test_a_forecast_comes_true_if_nothing_else_is_submitted() -> None:
    for seed in range(200):
        scenario = random_scenario(random.Random(seed))
        forecasts: list[dict[int, list[int]]] = []
        requests = [replace(request, arrival_ns=0) for request in scenario.requests]
        compute = LinearCompute()
        compute.num_layers = len(requests[0].layer_compute_ns)
        world = World(compute, scenario.order, Whole())
        for request in requests:
            world.arrive_at(0, Request(0, 1, load=request.load))
        world.clock.at(3, Phase.FORM, lambda world=world, into=forecasts: into.append(world.link.forecast_ns()))
        records = {record.sequence: record for record in world.run()}
        for sequence, landings in forecasts[0].items():
            assert landings[-1] == records[sequence].all_landed_ns


def test_every_width_takes_the_same_time_on_the_wire() -> None:
    for width in (1, 2, 3, 4, [1, 1, 2]):
        load = plan_load(plan_slices(4, width), layer_bytes=333, bytes_per_s=7e8)
        assert sum(load.slice_ns) == round(4 * 333 / 0.7)
        assert sum(load.slice_bytes) == 4 * 333
