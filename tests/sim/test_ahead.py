"""The engine that schedules ahead: one story by hand, a loop without events, laws, and faults that must be noticed."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ahead_oracle import tell
from lamella.reference.release import First, Whole
from lamella.reference.timeline import NOTHING_TO_LOAD
from lamella.sim.ahead import AheadEngine, Pass
from lamella.sim.loads import Loads
from lamella.sim.overheads import Overheads
from lamella.sim.requests import Job, Request
from lamella.sim.settings import StepsWait, SubmitAt
from rich_world import (
    BUDGET,
    LAYERS,
    Ahead,
    broken_law,
    load_of,
    random_ahead,
    random_overheads,
    run_ahead,
)

WORLDS = 800


# ---------------------------------------------------------------- by hand


def test_a_token_is_seen_when_its_step_has_ended_and_the_next_is_launched() -> None:
    """Prefill: launched 5 .. 25, computed 10 .. 90. Decode: launched 30 .. 130, after that."""
    overheads = Overheads(pass_ns=5, launch_ns=100, prefill_launch_ns=20, captured_tokens=1, report_ns=0)
    (record,) = run_ahead(Ahead(overheads), (0, Request(0, 2, output_tokens=2))).records
    assert record.started_ns == 5 + 5  # its first layer was launched a quarter of the launch later
    assert record.first_token_ns == 5 + 20 + 5 + 100
    quick = replace(overheads, launch_ns=8)
    (record,) = run_ahead(Ahead(quick), (0, Request(0, 2, output_tokens=2))).records
    assert record.first_token_ns == 10 + 2 * 40, "now the device is the later one"


def test_a_load_joins_the_next_pass_but_one() -> None:
    """Passes with nothing to compute come every 10 ns; landed at 100, it is seen at 100, known at 110, joins at 120."""
    overheads = Overheads(idle_ns=10)
    (record,) = run_ahead(Ahead(overheads), (0, Request(8, 1, load=load_of(95, 4)))).records
    assert (record.all_landed_ns, record.ready_ns, record.released_ns) == (92, 100, 120)


def test_while_a_released_load_lands_the_steps_that_read_it_stand_at_its_layers() -> None:
    """Between the report and the request's own step the decoder has one more, which stands too if every step does."""
    decoding = Request(0, 1, output_tokens=60)
    stood = {}
    for way in StepsWait:
        world = run_ahead(
            Ahead(Overheads(launch_ns=4), steps_wait=way),
            (0, decoding),
            (30, Request(8, 1, load=load_of(4000))),
            release=First(),
        )
        decoder, load = world.records
        assert decoder.victim_stall_ns > 2000
        assert load.caused_stall_ns == world.stall_ns == decoder.victim_stall_ns
        assert load.first_layer_ns < decoder.end_ns
        stood[way] = [step for step in world.steps if any(step.layer_stall_ns)]
    (own,) = stood[StepsWait.BATCH]
    assert [chunk.request for chunk in own.chunks] == [1]
    assert not stood[StepsWait.EVERY][0].chunks, "a step that only decodes"


def test_a_full_graph_waits_in_front_of_its_first_layer() -> None:
    """Piecewise a decoding step stands at several layers; as one graph it begins when all is there."""
    overheads = Overheads(launch_ns=8, full_launch_ns=4)
    began = []
    for full in (False, True):
        ahead = Ahead(overheads, steps_wait=StepsWait.EVERY, full_graphs=full)
        coming = (0, Request(0, 1, output_tokens=60)), (30, Request(8, 1, load=load_of(4000)))
        world = run_ahead(ahead, *coming, release=First())
        began.append(next(step.layer_stall_ns for step in world.steps if any(step.layer_stall_ns) and not step.chunks))
    piecewise, whole = began
    assert sum(map(bool, piecewise)) > 1
    assert [bool(stood) for stood in whole] == [False, False, False, True], "it waits for the last layer"


def test_a_load_inside_its_step_needs_no_look() -> None:
    early, inside = (
        run_ahead(
            Ahead(Overheads(idle_ns=500), joins_at_once=at_once), (0, Request(8, 1, load=load_of(400))), release=First()
        )
        for at_once in (False, True)
    )
    assert inside.records[0].first_token_ns < early.records[0].first_token_ns - 500
    assert inside.stall_ns > 0


@pytest.mark.parametrize(("behind", "later"), [(0, 0), (60, 60), (None, 4000 - 300)])
def test_a_joining_prompts_copy_waits_for_a_turn_or_for_a_loads_end(behind: int | None, later: int) -> None:
    load, other = Request(8, 1, load=load_of(4000)), Request(0, 1)
    _, joined = run_ahead(Ahead(Overheads(idle_ns=10), behind), (0, load), (300, other)).records
    assert joined.started_ns == 300 + later


def test_layers_beside_a_load_take_longer() -> None:
    other = Request(0, 1)
    for permille, took in ((1000, 40), (1500, 60)):
        world = run_ahead(
            Ahead(Overheads(idle_ns=10, beside_permille=permille)), (0, Request(8, 1, load=load_of(4000))), (300, other)
        )
        (step,) = [step for step in world.steps if step.chunks and step.chunks[0].request == 1]
        assert step.end_ns - step.start_ns == took


def test_loads_that_follow_a_forward_begin_behind_its_launch() -> None:
    overheads = Overheads(launch_ns=80, submit_ns=3)
    busy, load = Request(0, 1, output_tokens=30), Request(8, 1, load=load_of(400))
    for submit_at, begins in ((SubmitAt.POLL, 3), (SubmitAt.AFTER_FORWARD, 83)):
        world = run_ahead(Ahead(overheads), (0, busy), (60, load), submit_at=submit_at)
        looks = [step.polled_ns for step in world.steps if step.polled_ns >= 60]
        assert world.records[1].submitted_ns == looks[0] + begins


def test_a_load_begins_when_the_device_has_computed_what_was_launched_before_it() -> None:
    """A prefill launched at 0 .. 20 and computed at 5 .. 405; it asks at 20. On an idle device it begins at once."""
    overheads = Overheads(prefill_launch_ns=20, captured_tokens=1, idle_ns=10)
    for new, comes, asks, begins in ((10, 15, 20, 405), (1, 75, 75, 75)):
        load = Request(8, 1, load=load_of(400))
        world = run_ahead(Ahead(overheads), (0, Request(0, new)), (comes, load))
        assert world.records[1].submitted_ns == asks
        assert min(row.begin_ns for row in world.slices) == begins
        assert [row.end_ns - row.begin_ns for row in world.slices] == [100] * LAYERS


def test_times_scatter_by_seed_around_the_same_mean() -> None:
    overheads = Overheads(launch_ns=1000, scatter_permille=100, drift_permille=50)
    ends = [
        run_ahead(Ahead(overheads, seed=seed), (0, Request(0, 1, output_tokens=50))).records[0].end_ns
        for seed in range(40)
    ]
    still = run_ahead(Ahead(overheads), (0, Request(0, 1, output_tokens=50))).records[0].end_ns
    assert len(set(ends)) > 35
    assert sum(ends) / 40 == pytest.approx(still, rel=0.02)
    again = run_ahead(Ahead(overheads, seed=7), (0, Request(0, 1, output_tokens=50))).records[0].end_ns
    assert again == ends[7]


@pytest.mark.parametrize("settings", [{"kv_blocks": 9}, {"load_timeout_ns": 9}])
def test_what_it_does_not_model_is_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"modelled without {next(iter(settings))}; leave it out"):
        run_ahead(Ahead(Overheads()), **settings)


# ---------------------------------------------------------------- against a loop without events


def coming_of(rng: random.Random) -> list[tuple[int, Request]]:
    instant, coming = 0, []
    for _ in range(rng.randint(1, 9)):
        instant += rng.choice((0, rng.randint(0, 600)))
        loads = rng.random() < 0.7
        load = load_of(4 * rng.randint(1, 120), rng.randint(1, 4)) if loads else NOTHING_TO_LOAD
        coming.append((instant, Request(rng.randint(1, 40), rng.randint(1, 30), rng.randint(1, 12), load)))
    return coming


def differs(seed: int) -> str | None:
    rng = random.Random(seed)
    coming, whole = coming_of(rng), rng.random() < 0.5
    overheads = replace(random_overheads(rng), scatter_permille=0, drift_permille=0, first_slice_ns=0)
    every, full = rng.random() < 0.5, rng.random() < 0.3
    told = tell(coming, overheads, whole=whole, budget=BUDGET, every=every, full=full)
    way = StepsWait.EVERY if every else StepsWait.BATCH
    world = run_ahead(
        Ahead(overheads, steps_wait=way, full_graphs=full), *coming, release=Whole() if whole else First()
    )
    for record, expected in zip(world.records, told, strict=True):
        submitted = record.submitted_ns if record.load_bytes else -1
        landed = expected.landed_ns[-1] if record.load_bytes else record.all_landed_ns
        found = (submitted, record.all_landed_ns, record.first_token_ns, record.end_ns)
        if found != (expected.submitted_ns, landed, expected.first_token_ns, expected.end_ns):
            return f"seed {seed}, request {record.sequence}: {found}, told {expected}"
        if record.started_ns > expected.started_ns:  # the oracle knows no stall before the first layer
            return f"seed {seed}, request {record.sequence} started at {record.started_ns}, told {expected}"
    return None


def test_it_is_what_a_loop_without_events_says() -> None:
    for seed in range(1_500):
        assert differs(seed) is None, differs(seed)


@given(st.integers(min_value=1_500))
def test_it_is_what_a_loop_without_events_says_on_any_seed(seed: int) -> None:
    assert differs(seed) is None, differs(seed)


# ---------------------------------------------------------------- laws


def test_worlds_of_an_engine_that_schedules_ahead_keep_the_laws() -> None:
    stalled = 0
    for seed in range(WORLDS):
        rich = random_ahead(random.Random(seed))
        world = rich.run()
        assert broken_law(rich, world) is None, f"seed {seed}: {broken_law(rich, world)}"
        stalled += world.stall_ns > 0
    assert stalled > WORLDS // 10


@given(st.integers(min_value=WORLDS))
def test_the_laws_hold_on_any_seed(seed: int) -> None:
    rich = random_ahead(random.Random(seed))
    assert broken_law(rich, rich.run()) is None


def test_the_same_seed_gives_the_same_records() -> None:
    for seed in range(100):
        first, second = (random_ahead(random.Random(seed)).run() for _ in range(2))
        assert (first.records, first.steps) == (second.records, second.steps)


# ---------------------------------------------------------------- planted wrong models


def a_token_is_seen_before_it_is_computed(patch: pytest.MonkeyPatch) -> None:
    end_pass = AheadEngine._end_pass

    def wrong(self: AheadEngine) -> None:
        assert self._pass is not None
        self._pass.end_ns = 0
        end_pass(self)

    patch.setattr(AheadEngine, "_end_pass", wrong)


def a_report_is_known_at_once(patch: pytest.MonkeyPatch) -> None:
    seen = AheadEngine._seen

    def wrong(self: AheadEngine, made: Pass) -> list[Job]:
        jobs = seen(self, made)
        for job in jobs:
            job.due = job.released = True
            self._known.append(job)
        return []

    patch.setattr(AheadEngine, "_seen", wrong)


def a_step_that_began_before_the_report_waits_too(patch: pytest.MonkeyPatch) -> None:
    launch_on = AheadEngine._launch_on

    def wrong(self: AheadEngine) -> None:
        assert self._pass is not None
        self._pass.loads = [job for job in self._scheduler.landing.values() if not job.landed] + [
            job for job in self._scheduler.waiting.values() if job.gate is not None and job.gate.landed_layers
        ]
        launch_on(self)

    patch.setattr(AheadEngine, "_launch_on", wrong)


def nothing_waits_for_layers(patch: pytest.MonkeyPatch) -> None:
    launch_on = AheadEngine._launch_on

    def wrong(self: AheadEngine) -> None:
        assert self._pass is not None
        self._pass.loads = []
        launch_on(self)

    patch.setattr(AheadEngine, "_launch_on", wrong)


def the_device_waits_for_the_whole_launch(patch: pytest.MonkeyPatch) -> None:
    begin = AheadEngine._begin_pass

    def wrong(self: AheadEngine, made: Pass) -> None:
        self._device_ns = max(self._device_ns, self._clock.now_ns + made.launch_ns)
        begin(self, made)

    patch.setattr(AheadEngine, "_begin_pass", wrong)


def the_device_is_always_free(patch: pytest.MonkeyPatch) -> None:
    begin = AheadEngine._begin_pass

    def wrong(self: AheadEngine, made: Pass) -> None:
        self._device_ns = 0
        begin(self, made)

    patch.setattr(AheadEngine, "_begin_pass", wrong)


def every_step_waits_whatever_is_asked(patch: pytest.MonkeyPatch) -> None:
    begin = AheadEngine._begin_pass

    def wrong(self: AheadEngine, made: Pass) -> None:
        self._steps_wait = StepsWait.EVERY
        begin(self, made)

    patch.setattr(AheadEngine, "_begin_pass", wrong)


def a_graph_is_launched_layer_by_layer(patch: pytest.MonkeyPatch) -> None:
    begin = AheadEngine._begin_pass

    def wrong(self: AheadEngine, made: Pass) -> None:
        made.whole = False
        begin(self, made)

    patch.setattr(AheadEngine, "_begin_pass", wrong)


def a_load_writes_beside_what_may_read_its_blocks(patch: pytest.MonkeyPatch) -> None:
    start = Loads.start
    patch.setattr(Loads, "start", lambda self, job, device_ns: start(self, job))


def joining_is_free(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Overheads, "joining_ns", lambda self, tokens: 0)


def the_link_is_never_busy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Loads, "ahead_ns", property(lambda self: 0))


WRONG = [
    a_token_is_seen_before_it_is_computed,
    a_report_is_known_at_once,
    a_step_that_began_before_the_report_waits_too,
    nothing_waits_for_layers,
    the_device_waits_for_the_whole_launch,
    the_device_is_always_free,
    the_link_is_never_busy,
    every_step_waits_whatever_is_asked,
    a_graph_is_launched_layer_by_layer,
    a_load_writes_beside_what_may_read_its_blocks,
]


@pytest.mark.parametrize("plant", WRONG, ids=lambda plant: plant.__name__)
def test_a_wrong_engine_is_told_apart(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)

    def noticed(seed: int) -> bool:
        try:
            return differs(seed) is not None
        except Exception:  # whatever stops the wrong engine is a notice too
            return True

    assert any(noticed(seed) for seed in range(600))


def test_joining_that_is_free_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle asks the same object, so an example says it."""
    world = run_ahead(Ahead(Overheads(join_ns=50, join_ns_per_1000_tokens=2000)), (0, Request(496, 4)))
    assert world.records[0].started_ns == 50 + 1000
