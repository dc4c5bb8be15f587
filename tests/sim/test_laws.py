"""SIM-2, SIM-3, SIM-4 of worlds with everything in them; planted faults of each new part are told apart."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella.sim.engine import Engine
from lamella.sim.hardware import Ratio
from lamella.sim.kv_blocks import KvBlocks
from lamella.sim.loads import Loads
from lamella.sim.paths import RankedLinks
from lamella.sim.requests import Job
from lamella.sim.scheduler import Scheduler
from lamella.sim.shared import SharedLink
from lamella.sim.staged import StagedLink
from lamella.sim.stations import Transfer
from lamella.sim.step_runner import StepRunner
from rich_world import Rich, broken_law, forecast_is_exact, random_rich

WORLDS = 1_500


def test_worlds_with_everything_in_them_keep_the_laws() -> None:
    seen = dict.fromkeys(("preempted", "failed", "computed after all", "stored", "stalled", "late"), 0)
    for seed in range(WORLDS):
        rich = random_rich(random.Random(seed))
        world = rich.run()
        assert broken_law(rich, world) is None, f"seed {seed}: {broken_law(rich, world)}"
        seen["preempted"] += any(record.preemptions for record in world.records)
        seen["failed"] += any(record.ending.value == "failed" for record in world.records)
        seen["computed after all"] += any(record.failure and record.end_ns > 0 for record in world.records)
        seen["stored"] += any(record.stored_ns > 0 for record in world.records)
        seen["stalled"] += world.stall_ns > 0
        seen["late"] += any(request.fault and request.fault.late_ns for _, request in rich.coming)
    assert min(seen.values()) > WORLDS // 50, f"the worlds must be hard, not only many: {seen}"


@given(st.integers(min_value=WORLDS))
def test_the_laws_hold_on_any_seed(seed: int) -> None:
    rich = random_rich(random.Random(seed))
    assert broken_law(rich, rich.run()) is None


def test_the_same_world_gives_the_same_records_steps_and_slices() -> None:
    for seed in range(200):
        first, second = (random_rich(random.Random(seed)).run() for _ in range(2))
        assert (first.records, first.steps, first.slices) == (second.records, second.steps, second.slices)


def test_asking_what_the_way_has_to_carry_changes_nothing() -> None:
    for seed in range(200):
        rich = random_rich(random.Random(seed))
        assert rich.run(ask_every_ns=7).records == rich.run().records, f"seed {seed}"


def test_a_stretch_as_one_event_is_what_its_steps_are_under_pressure_and_faults_too() -> None:
    """Where a release is forecast, and the forecast drifts, how often it is asked matters: those are left out."""
    for seed in range(WORLDS // 2):
        rich = random_rich(random.Random(seed))
        if not forecast_is_exact(rich):
            continue
        assert rich.run().records == rich.run(fast_forward=False).records, f"seed {seed}"


# ---------------------------------------------------------------- planted wrong models


def a_preempted_request_keeps_its_blocks(patch: pytest.MonkeyPatch) -> None:
    end = KvBlocks.end

    def wrong(self: KvBlocks, job: Job, context_tokens: int | None) -> None:
        held = self.free
        end(self, job, context_tokens)
        if context_tokens is not None:
            self.free = held

    patch.setattr(KvBlocks, "end", wrong)


def a_preempted_request_forgets_what_it_generated(patch: pytest.MonkeyPatch) -> None:
    preempt = Scheduler._preempt

    def wrong(self: Scheduler, job: Job) -> tuple[Job, int]:
        found = preempt(self, job)
        job.generated = 0
        return found

    patch.setattr(Scheduler, "_preempt", wrong)


def decoding_asks_for_no_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KvBlocks, "growth", lambda self, num_steps: 0)


def a_step_that_used_a_failed_load_counts(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: Scheduler, job: Job) -> None:
        self._cut = [other for other in self._cut if other is not job]
        self._cut.insert(0, job)

    patch.setattr(Scheduler, "throw_back", wrong)


def a_late_load_is_never_given_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Engine, "_time_out", lambda self, job, transfer: None)


def a_failed_load_still_holds_the_step_up(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: Loads, job: Job) -> None:
        assert job.transfer is not None
        self._carrier.cancel(job.transfer)

    patch.setattr(Loads, "cancel", wrong)


def everybody_has_the_shared_link_alone(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: SharedLink) -> None:
        now = self._clock.now_ns
        if self._moving:
            self._service += (now - self._since_ns) * self._PARTS
            self.busy_ns += now - self._since_ns
        self._since_ns = now

    patch.setattr(SharedLink, "_advance", wrong)


def a_change_of_speed_forgets_what_has_crossed(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: StagedLink, speed: Ratio) -> None:
        self._speed = speed
        self._left_ns = None if self._left_ns is None else 0
        if self._left_ns is not None:
            self._schedule_end()

    patch.setattr(StagedLink, "set_speed", wrong)


def only_the_first_rank_carries(patch: pytest.MonkeyPatch) -> None:
    submit = RankedLinks.submit

    def wrong(self: RankedLinks, transfer: Transfer) -> None:
        links, self.links = self.links, self.links[:1]
        speeds, self._speeds = self._speeds, self._speeds[:1]
        submit(self, transfer)
        self.links, self._speeds = links, speeds

    patch.setattr(RankedLinks, "submit", wrong)


def a_stall_is_charged_to_nobody(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: StepRunner, step: object, layer: int, stall_ns: int) -> None:
        self.stall_ns += stall_ns

    patch.setattr(StepRunner, "_charge_stall", wrong)


def a_stretch_looks_at_no_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KvBlocks, "steps_that_fit", lambda self, most: most)


WRONG = [
    a_preempted_request_keeps_its_blocks,
    a_preempted_request_forgets_what_it_generated,
    decoding_asks_for_no_blocks,
    a_step_that_used_a_failed_load_counts,
    a_late_load_is_never_given_up,
    a_failed_load_still_holds_the_step_up,
    everybody_has_the_shared_link_alone,
    a_change_of_speed_forgets_what_has_crossed,
    only_the_first_rank_carries,
    a_stall_is_charged_to_nobody,
    a_stretch_looks_at_no_blocks,
]


@pytest.mark.parametrize("plant", WRONG, ids=lambda plant: plant.__name__)
def test_a_wrong_world_breaks_a_law(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)

    def is_noticed(rich: Rich) -> bool:
        try:
            return broken_law(rich, rich.run()) is not None
        except (AssertionError, IndexError, KeyError, RuntimeError, ValueError):
            return True  # the planted fault broke an invariant before it gave a wrong answer

    assert any(is_noticed(random_rich(random.Random(seed))) for seed in range(WORLDS)), f"{WORLDS} worlds kept all laws"
