"""`auto` in the world: never worse than what it replaces, near the best fixed arm, right about a wrong profile.

The grids and what regret means are those of benchmarks/auto_regret.py; here runs a sample of the held-out one. Each
wrong policy at the end must be rejected by one of the checks.
"""

from __future__ import annotations

import random
import runpy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lamella.reference import auto_ledger, correction
from lamella.reference.auto import AutoPolicy
from lamella.reference.auto_view import Arm, Decision
from lamella.reference.correction import Correction
from lamella.reference.profile import DeviceProfile
from lamella.reference.release import First, WeighedRelease
from lamella.sim import auto as sim_auto
from lamella.sim.auto import AutoEngine
from lamella.sim.profiles import load_profile
from lamella.sim.regimes import burst_ttft_ns
from lamella.sim.strategies import AUTO, CHUNK_MAJOR, Device, Regime, parse_strategy
from lamella.sim.world import World

GRID = runpy.run_path(str(Path(__file__).resolve().parents[2] / "benchmarks" / "auto_regret.py"))
GridCell = GRID["GridCell"]
FIFO_FIRST = parse_strategy("fifo/1/first")


def sample(cells: list[Any], count: int) -> list[Any]:
    return random.Random(7).sample(cells, count)


def run_auto(
    device: Device, hit: int, new: int, users: int, believed: DeviceProfile | None = None, requests: int = 60
) -> tuple[list[int], AutoEngine, list[Decision]]:
    """TTFT of each request of a closed loop in the order of arrival, the engine, and what it chose."""
    decisions: list[Decision] = []
    policy = AutoPolicy(believed or device.profile)
    engine = partial(device.engine(AUTO), policy=policy, on_choice=decisions.append)
    world = World(device.compute(AUTO), AUTO.order, AUTO.release, device.settings(), make_engine=engine)
    world.loop_closed(users, [device.request(Regime(hit, new, 1, 8), AUTO, tag) for tag in range(requests)])
    records = sorted(world.run(), key=lambda record: record.arrival_ns)
    found = world._engine
    assert isinstance(found, AutoEngine)
    return [record.ttft_ns for record in records], found, decisions


# ---------------------------------------------------------------- checks, used by the tests and by the planted faults


def check_bursts(cells: list[Any]) -> None:
    rows = GRID["burst_rows"](cells)
    told = GRID["summary"](rows)
    assert told["on_chunk_major_max"] <= 0, told
    assert told["on_recompute_max"] <= 0.001, told
    assert told["regret_mean_of_losses"] <= 0.03, told
    assert told["regret_max"] <= 0.08, told


def check_loops(cells: list[Any]) -> None:
    rows = GRID["loop_rows"](cells, 6)
    told = GRID["summary"](rows)
    assert told["on_chunk_major_max"] <= 0.005, told
    assert told["regret_mean"] <= 0.03, told
    assert told["time_of_all_on_chunk_major_max"] <= 0.05, told
    assert told["bystanders_on_chunk_major_mean"] <= 0.05, told


def check_corrected(times_slower: float) -> None:
    """A profile with another link than the true one settles at it, and costs nothing from then on."""
    true = load_profile()
    wire = true.wire
    rate = int(wire.h2d_bytes_per_s * times_slower)
    believed = replace(true, wire=replace(wire, h2d_bytes_per_s=rate, both_bytes_per_s=min(rate, wire.d2h_bytes_per_s)))
    device = Device(true, extrapolate=True)
    with_wrong, engine, _ = run_auto(device, 15_152, 768, 3, believed)
    with_right, _, _ = run_auto(device, 15_152, 768, 3)
    assert engine.correction.wire == pytest.approx(times_slower, rel=0.02)
    assert sum(with_wrong[20:]) == pytest.approx(sum(with_right[20:]), rel=0.02)


def check_learns_from_off() -> None:
    """A profile that takes the link for thirty times too slow computes everything again, until it has tried."""
    true = load_profile()
    rate = true.wire.h2d_bytes_per_s // 30
    believed = replace(true, wire=replace(true.wire, h2d_bytes_per_s=rate, both_bytes_per_s=rate))
    _, engine, decisions = run_auto(Device(true, extrapolate=True), 4_096, 256, 2, believed, requests=120)
    arms = [decision.arm for decision in decisions]
    assert arms[0] is Arm.OFF
    assert Arm.OFF not in arms[-20:]
    assert engine.correction.wire_seen > 20


BURSTS = [
    GridCell(None, None, 4, (24_576,), (512,)),
    GridCell(None, 240, 6, (6_144,), (96,)),
    GridCell(10.0, 240, 12, (24_576,), (96,)),
    GridCell(4.0, None, 6, (6_144,), (96,)),
    GridCell(4.0, None, 3, (49_152,), (3_072,)),
    GridCell(4.0, None, 12, (24_576,), (512,)),
]
LOOPS = [
    GridCell(None, None, 6, (24_576,), (1_536,)),
    GridCell(None, None, 3, (24_576,), (640,), 8),
    GridCell(None, None, 6, (24_576,), (640,), 8),
    GridCell(None, None, 12, (6_144,), (96,), 8),
    GridCell(30.0, None, 6, (6_144,), (1_536,)),
    GridCell(30.0, None, 6, (24_576,), (640,)),
]

# ---------------------------------------------------------------- tests


def test_held_out_bursts_are_never_worse_than_chunk_major_or_recompute_and_near_the_best() -> None:
    check_bursts(BURSTS)
    check_bursts(sample(GRID["burst_cells"](held_out=True), 24))


def test_held_out_closed_loops_are_never_worse_than_chunk_major_and_hurt_no_bystander() -> None:
    check_loops(LOOPS)


@pytest.mark.slow
def test_the_whole_held_out_grid_of_bursts() -> None:
    check_bursts(GRID["burst_cells"](held_out=True))


def test_the_two_grids_share_no_hit_no_new_tokens_and_no_slow_link() -> None:
    for cells in (GRID["burst_cells"], GRID["loop_cells"]):
        tuned, held = cells(held_out=False), cells(held_out=True)
        for part in ("hits", "news"):
            assert {n for cell in tuned for n in getattr(cell, part)}.isdisjoint(
                n for cell in held for n in getattr(cell, part)
            )
        assert {cell.gb_per_s for cell in tuned} & {cell.gb_per_s for cell in held} == {None}


def test_one_of_a_burst_on_a_slow_link_may_be_computed_while_another_loads() -> None:
    cell = GridCell(5.0, None, 2, (4_096,), (64,))
    arms: list[Arm] = []
    served = GRID["run_burst"](cell, AUTO, on_choice=lambda decision: arms.append(decision.arm))
    assert sorted(arm.value for arm in arms) == ["early", "off"]
    best = min(GRID["run_burst"](cell, one).ttft_ns for one in GRID["FIXED"])
    assert served.ttft_ns < 0.7 * best


def test_prefills_that_each_take_long_run_one_after_another() -> None:
    """Eight at once, computing longer than loading: together they would end together, late."""
    device = Device(load_profile())
    regime = Regime(4_096, 1_024, 8)
    auto, first = (sum(burst_ttft_ns(device, regime, strategy)) / regime.concurrency for strategy in (AUTO, FIFO_FIRST))
    assert auto < 0.85 * first


@pytest.mark.parametrize("times_slower", [0.5, 2.0])
def test_a_profile_with_a_link_twice_too_fast_or_slow_is_put_right(times_slower: float) -> None:
    check_corrected(times_slower)


def test_a_profile_with_steps_twice_too_long_is_put_right() -> None:
    true = load_profile()
    believed = replace(
        true, prefill=replace(true.prefill, step_ns=tuple(tuple(2 * ns for ns in row) for row in true.prefill.step_ns))
    )
    device = Device(true, extrapolate=True)
    policy = AutoPolicy(believed)
    engine = partial(device.engine(AUTO), policy=policy)
    world = World(device.compute(AUTO), AUTO.order, AUTO.release, device.settings(), make_engine=engine)
    world.loop_closed(1, [device.request(Regime(15_152, 768, 1, 2), parse_strategy("recompute"))] * 6)
    world.run()
    assert isinstance(world._engine, AutoEngine)
    assert world._engine.correction.steps == pytest.approx(0.5, rel=0.02)


def test_a_link_that_was_never_used_is_tried() -> None:
    check_learns_from_off()


def test_the_same_requests_give_the_same_choices() -> None:
    device = Device(load_profile())
    first, second = (run_auto(device, 15_152, 768, 4)[::2] for _ in range(2))
    assert first == second


def test_auto_is_written_and_read_as_one_word() -> None:
    assert parse_strategy("auto") == AUTO
    assert str(AUTO) == "auto"
    assert AUTO.layerwise
    assert CHUNK_MAJOR != AUTO


# ---------------------------------------------------------------- wrong policies


def _own_time_only(policy: Any, *arguments: Any) -> Any:
    decision = CHOOSE(policy, *arguments)
    chosen = min(decision.predictions, key=lambda one: one.ttft_ns)
    return replace(decision, chosen=chosen, load_ns=decision.load_ns or 1)


CHOOSE = AutoPolicy.choose
OFF = AutoPolicy._off
WRONG: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Callable[[], None]]] = {
    "takes the link for free": (
        lambda patch: patch.setattr(auto_ledger.LoadLedger, "link_wait_ns", lambda *_: 0),
        lambda: check_bursts(BURSTS),
    ),
    "does not ask what it costs others": (
        lambda patch: patch.setattr(AutoPolicy, "choose", _own_time_only),
        lambda: check_bursts(BURSTS),
    ),
    "never computes again": (
        lambda patch: patch.setattr(
            AutoPolicy, "_off", lambda *arguments: OFF(*arguments)._replace(ttft_ns=10**15, cost_ns=10**15)
        ),
        lambda: check_bursts(BURSTS),
    ),
    "always computes again": (
        lambda patch: patch.setattr(AutoPolicy, "_off", lambda *arguments: OFF(*arguments)._replace(cost_ns=0)),
        lambda: check_bursts(BURSTS),
    ),
    "takes slices for free": (
        lambda patch: patch.setattr(
            AutoPolicy,
            "_best_width",
            lambda policy, wire_ns, first_ns, *_: (1, round(wire_ns + first_ns), round(wire_ns / 32)),
        ),
        lambda: check_bursts(BURSTS),
    ),
    "releases whatever that stalls": (
        lambda patch: patch.setattr(WeighedRelease, "release_ns", lambda _, view: First().release_ns(view)),
        lambda: check_loops(LOOPS),
    ),
    "lets prefills share a step": (
        lambda patch: patch.setattr(sim_auto, "waits_its_turn", lambda *_, **__: False),
        test_prefills_that_each_take_long_run_one_after_another,
    ),
    "believes its profile": (
        lambda patch: patch.setattr(Correction, "after_load", lambda one, *_: one),
        lambda: check_corrected(2.0),
    ),
    "corrects the wrong way": (
        lambda patch: patch.setattr(correction, "_moved", lambda factor, observed, seen: factor * factor / observed),
        lambda: check_corrected(2.0),
    ),
    "never tries what it does not use": (
        lambda patch: patch.setattr(correction.Probes, "overrules", lambda *_, **__: False),
        check_learns_from_off,
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_policy_is_rejected(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, check = WRONG[wrong]
    plant(monkeypatch)
    with pytest.raises((AssertionError, ValueError)):
        check()
