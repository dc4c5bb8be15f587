"""SIM-1: the world is to the nanosecond what the recursion says, and wrong worlds are told apart by the same check."""

import heapq
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exactness import Scenario, difference, random_scenario, run_recursion, run_world
from lamella.reference.arrival import LayerArrivalGate
from lamella.reference.ordering import RoundRobin
from lamella.reference.release import First, JustInTime
from lamella.reference.timeline import Chunk, Load, StepRule, TimedRequest
from lamella.sim.clock import Clock, Phase
from lamella.sim.engine import Engine
from lamella.sim.scheduler import Job, Scheduler
from lamella.sim.stations import Link, Transfer

SCENARIOS = 3_000


def seeded(seed: int) -> Scenario:
    return random_scenario(random.Random(seed))


def test_world_and_recursion_agree_to_the_nanosecond(capsys: pytest.CaptureFixture[str]) -> None:
    """Every landing, release, start, first token, stall, culprit and byte, ties and zero durations included."""
    ties = zeros = stalls = 0
    for seed in range(SCENARIOS):
        scenario = seeded(seed)
        assert difference(scenario) is None, f"scenario {seed}: {scenario}"
        timeline = run_recursion(scenario)
        instants = [landing for times in timeline.requests for landing in set(times.landing_ns)]
        ties += len(set(instants)) < len(instants) or any(step.polled_ns in instants for step in timeline.steps)
        zeros += any(0 in (*request.load.slice_ns, *request.layer_compute_ns) for request in scenario.requests)
        stalls += any(sum(step.layer_stall_ns) for step in timeline.steps)
    with capsys.disabled():
        print(f"\n{SCENARIOS:,} scenarios equal to the ns; ties in {ties:,}, zeros in {zeros:,}, stalls in {stalls:,}")
    assert min(ties, zeros, stalls) > SCENARIOS // 10, "the scenarios must be hard, not only many"


@pytest.mark.slow
def test_world_and_recursion_agree_to_the_nanosecond_on_many_more() -> None:
    for seed in range(SCENARIOS, SCENARIOS + 10_000):
        assert difference(seeded(seed)) is None, f"scenario {seed}: {seeded(seed)}"


@given(st.integers(min_value=3_000))
def test_world_and_recursion_agree_on_any_seed(seed: int) -> None:
    assert difference(seeded(seed)) is None


# ---------------------------------------------------------------- planted wrong models


def ties_go_to_the_youngest(patch: pytest.MonkeyPatch) -> None:
    head = Transfer.head

    def wrong(self: Transfer) -> tuple[int, int, int, Transfer]:
        key, sequence, part, transfer = head(self)
        return key, -sequence, part, transfer

    patch.setattr(Transfer, "head", wrong)


def newcomers_start_in_round_0(patch: pytest.MonkeyPatch) -> None:
    submit = Link.submit

    def wrong(self: Link, transfer: Transfer) -> None:
        self._round = 0
        submit(self, transfer)

    patch.setattr(Link, "submit", wrong)


def happens_too_early(patch: pytest.MonkeyPatch, phase: Phase) -> None:
    at = Clock.at

    def wrong(self: Clock, instant_ns: int, asked: Phase, action: Callable[[], object]) -> None:
        at(self, instant_ns, Phase.HAPPEN if asked is phase else asked, action)

    patch.setattr(Clock, "at", wrong)


def the_link_chooses_before_what_arrives(patch: pytest.MonkeyPatch) -> None:
    happens_too_early(patch, Phase.CHOOSE)


def a_step_forms_before_what_lands(patch: pytest.MonkeyPatch) -> None:
    happens_too_early(patch, Phase.FORM)


def a_slice_releases_when_the_one_before_it_has_landed(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: LayerArrivalGate[int]) -> bool:
        return self._ends[min(self._landed, len(self._ends) - 1)] >= self._release_after_layers

    patch.setattr(LayerArrivalGate, "released", property(wrong))


def layers_do_not_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LayerArrivalGate, "landed_layers", property(lambda self: self.num_layers))


def a_step_waits_for_its_own_members_only(patch: pytest.MonkeyPatch) -> None:
    fill_step = Scheduler.fill_step

    def wrong(self: Scheduler) -> list[tuple[Job, Chunk]]:
        taken = fill_step(self)
        members = {job.sequence for job, _ in taken}
        self.landing = {sequence: job for sequence, job in self.landing.items() if sequence in members}
        return taken

    patch.setattr(Scheduler, "fill_step", wrong)


def a_cut_prefill_goes_behind_the_ready_ones(patch: pytest.MonkeyPatch) -> None:
    fill_step = Scheduler.fill_step

    def wrong(self: Scheduler) -> list[tuple[Job, Chunk]]:
        for job in self._cut:
            heapq.heappush(self._ready, (job.sequence, job))
        self._cut = []
        return fill_step(self)

    patch.setattr(Scheduler, "fill_step", wrong)


def an_idle_engine_knows_no_grid(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: Engine) -> None:
        if self._step is None:
            self._poll_at(self._clock.now_ns, self._settings.idle_poll_ns)

    patch.setattr(Engine, "_look_soon", wrong)


def the_forecast_knows_only_the_slice_under_way(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: Link) -> dict[int, list[int]]:
        now = self._clock.now_ns
        carrying = {self._carrying[0].submission.sequence: 1} if self._carrying else {}
        waiting = {sequence: transfer.left for _, sequence, _, transfer in self._heads}
        return {
            sequence: [now] * (carrying.get(sequence, 0) + waiting.get(sequence, 0))
            for sequence in {*carrying, *waiting}
        }

    patch.setattr(Link, "forecast_ns", wrong)


WRONG = [
    ties_go_to_the_youngest,
    newcomers_start_in_round_0,
    the_link_chooses_before_what_arrives,
    a_step_forms_before_what_lands,
    a_slice_releases_when_the_one_before_it_has_landed,
    layers_do_not_wait,
    a_step_waits_for_its_own_members_only,
    a_cut_prefill_goes_behind_the_ready_ones,
    an_idle_engine_knows_no_grid,
    the_forecast_knows_only_the_slice_under_way,
]


@pytest.mark.parametrize("plant", WRONG, ids=lambda plant: plant.__name__)
def test_a_wrong_world_is_told_apart(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)

    def differs(seed: int) -> bool:
        try:
            return difference(seeded(seed)) is not None
        except (AssertionError, RuntimeError, ValueError):
            return True  # the planted fault broke an invariant before it gave a wrong answer

    assert any(map(differs, range(SCENARIOS))), f"{SCENARIOS} scenarios did not notice"


# ---------------------------------------------------------------- what one scenario shows


def test_zero_durations_do_not_livelock() -> None:
    """Everything at the same instant: requests, slices, steps; also with two requests and an idle poll."""
    request = TimedRequest(0, Load((1, 1), (0, 0), (0, 0)), (0, 0))
    for release in (First(), JustInTime(None)):
        scenario = Scenario((request, request), RoundRobin(), release, StepRule(idle_poll_ns=1))
        assert difference(scenario) is None
        assert {record.end_ns for record in run_world(scenario).records} == {0}
