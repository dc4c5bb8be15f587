"""Strategies, the map of regimes and the closed loop: what they answer, and what they refuse to (SIM-5)."""

import random
import re
import time
from dataclasses import replace
from typing import Any

import pytest

from lamella.reference.profile import DeviceProfile, Graphs
from lamella.reference.timeline import NOTHING_TO_LOAD
from lamella.sim.profiles import load_profile
from lamella.sim.regimes import (
    Cell,
    RegimeMap,
    burst_ttft_in_world_ns,
    burst_ttft_ns,
    check_in_world,
    compute_map,
    new_tokens_for,
    plan_map,
    reachable_ratios,
)
from lamella.sim.serving import percentile, serve, verdict_of
from lamella.sim.strategies import (
    CANDIDATES,
    CHUNK_MAJOR,
    INTERLEAVED,
    OFF,
    RECOMPUTE,
    Device,
    Regime,
    parse_strategy,
)


def map_regimes(*planned: Any) -> RegimeMap:
    return compute_map(plan_map(*planned))


PARTS = (
    *("admission_ns", "submission_ns", "transfer_wait_ns", "release_wait_ns", "queue_ns", "stall_ns"),
    "computing_ns",
)
FIFO_FIRST = parse_strategy("fifo/1/first")


@pytest.fixture(scope="module")
def profile() -> DeviceProfile:
    return load_profile()


@pytest.fixture(scope="module")
def device(profile: DeviceProfile) -> Device:
    return Device(profile)


# ---------------------------------------------------------------- strategies


@pytest.mark.parametrize("strategy", CANDIDATES, ids=str)
def test_a_strategy_prints_as_it_is_written(strategy: object) -> None:
    assert parse_strategy(str(strategy)) == strategy


@pytest.mark.parametrize(
    ("text", "layerwise"), [("recompute", 0), ("chunk-major", 0), ("fifo/all/first", 1), ("fifo/8/whole", 1)]
)
def test_only_whole_objects_and_recomputing_are_what_one_has_without(text: str, layerwise: int) -> None:
    assert parse_strategy(text).layerwise == bool(layerwise)


@pytest.mark.parametrize(
    "text", ["", "fifo", "fifo/1", "fifo/1/first/x", "fifo/0/first", "fifo/x/first", "fifo/1/never"]
)
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"strategy|width|release"):
        parse_strategy(text)


@pytest.mark.parametrize("field", ["hit_tokens", "new_tokens", "concurrency", "output_tokens"])
def test_a_regime_of_nothing_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=rf"{field} must be at least 1, got 0"):
        replace(Regime(1, 1, 1, 1), **{field: 0})


def test_recomputing_loads_nothing_and_computes_the_hit_too(device: Device) -> None:
    request = device.request(Regime(1000, 24, 1), RECOMPUTE)
    assert (request.cached_tokens, request.new_tokens, request.load) == (0, 1024, NOTHING_TO_LOAD)


def test_all_widths_carry_the_hit_and_cost_only_their_slices_more(device: Device) -> None:
    loads = {width: device.load(15_152, parse_strategy(f"fifo/{width}/first")) for width in ("1", "8", "all")}
    assert {sum(load.slice_bytes) for load in loads.values()} == {15_152 * device.profile.token_bytes}
    extra = sum(loads["1"].slice_ns) - sum(loads["all"].slice_ns)
    assert extra == 31 * device.profile.wire.slice_fixed_ns


@pytest.mark.parametrize(
    ("regime", "words"),
    [
        (Regime(200_000, 100, 1), "200,000 cached"),
        (Regime(1000, 100, 500), "500 requests at once"),
        (Regime(100_000, 100, 64), "tokens of KV held at once"),
        (Regime(1000, 100, 1, 200_000), "200,000 generated"),
    ],
)
def test_outside_the_profile_nothing_is_said_unless_asked(profile: DeviceProfile, regime: Regime, words: str) -> None:
    with pytest.raises(ValueError, match=words) as refusal:
        Device(profile).check(regime, CANDIDATES)
    assert "--extrapolate" in str(refusal.value)
    Device(profile, extrapolate=True).check(regime, CANDIDATES)


@pytest.mark.parametrize("text", ["fifo/40/first", "fifo/1/first:40"])
def test_a_strategy_for_more_layers_than_the_model_has_is_refused(device: Device, text: str) -> None:
    with pytest.raises(ValueError, match=r"32"):
        device.check(Regime(1000, 100, 1), (parse_strategy(text),))


# ---------------------------------------------------------------- the map


def test_recursion_and_world_agree_on_random_regimes(device: Device) -> None:
    rng = random.Random(5)
    for _ in range(40):
        regime = Regime(rng.randint(1, 60_000), rng.randint(1, 9_000), rng.randint(1, 8))
        strategy = rng.choice(CANDIDATES)
        assert burst_ttft_ns(device, regime, strategy) == burst_ttft_in_world_ns(device, regime, strategy), (
            regime,
            strategy,
        )


def test_a_map_of_200_cells_takes_at_most_two_seconds_and_the_world_agrees_with_a_tenth(device: Device) -> None:
    begun = time.process_time()
    regime_map = map_regimes(
        device, 15_152, (1, 2, 3, 4, 5, 6, 8, 10, 12, 16), reachable_ratios(device, 15_152, 20), CANDIDATES
    )
    took_s = time.process_time() - begun
    assert len(regime_map.cells) == 200
    assert took_s <= 2, f"{took_s:.2f} s"
    assert check_in_world(device, regime_map, seed=0) == 20


def test_a_disagreement_between_the_two_is_not_passed_over(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    regime_map = map_regimes(device, 15_152, (2,), (1.0,), CANDIDATES)
    monkeypatch.setattr("lamella.sim.regimes.burst_ttft_in_world_ns", lambda *_: [1, 2])
    with pytest.raises(AssertionError, match=r"the recursion says .* the world \[1, 2\]"):
        check_in_world(device, regime_map, seed=0)


def test_interleaving_gains_alone_and_loses_in_company_while_one_after_another_gains_in_both(device: Device) -> None:
    regime_map = map_regimes(device, 15_152, (1, 4), (1.32,), CANDIDATES)
    alone, four = regime_map.cells
    assert regime_map.change(alone, INTERLEAVED) < -0.3
    assert regime_map.change(four, INTERLEAVED) > 0.3
    assert regime_map.change(four, FIFO_FIRST) < -0.15
    assert regime_map.recommended() == FIFO_FIRST
    assert regime_map.verdict().startswith("Turn it on with fifo/1/first")
    assert "Interleaving (round_robin/1/first) would lose in 1" in regime_map.verdict()


@pytest.mark.known_fault(11)
def test_where_slices_cost_more_than_they_hide_the_answer_is_to_leave_it_off(profile: DeviceProfile) -> None:
    """Tiny hits, parked; and a link on which each slice costs a millisecond."""
    parked = [one for one in CANDIDATES if not one.chooses]  # auto would take them into the next step
    tiny = map_regimes(Device(profile), 64, (1,), (0.003, 0.01), parked)
    costly = Device(replace(profile, wire=replace(profile.wire, slice_fixed_ns=1_000_000)))
    one_layer_slices = map_regimes(costly, 15_152, (1, 4), (0.2, 5.0), [FIFO_FIRST])
    for regime_map in (tiny, one_layer_slices):
        assert regime_map.verdict().startswith("Leave it off"), regime_map.verdict()
        assert regime_map.recommended() == CHUNK_MAJOR


def test_a_short_hit_on_a_slow_link_is_better_recomputed(profile: DeviceProfile) -> None:
    wire = replace(profile.wire, h2d_bytes_per_s=10**9, d2h_bytes_per_s=10**9, both_bytes_per_s=10**9)
    regime_map = map_regimes(Device(replace(profile, wire=wire)), 4096, (1,), (10.0,), CANDIDATES)
    assert regime_map.best(regime_map.cells[0]) == RECOMPUTE
    assert "recompute is the best" in regime_map.verdict()


def test_one_setting_for_all_must_lose_nowhere() -> None:
    safe, bold = parse_strategy("fifo/1/jit"), FIFO_FIRST
    cell = Cell(Regime(1, 1, 1), 1, 1, (100.0, 200.0, 90.0, 50.0))
    worse = Cell(Regime(1, 1, 1), 1, 1, (100.0, 200.0, 95.0, 120.0))
    regime_map = RegimeMap((*OFF, safe, bold), (cell, worse))
    assert regime_map.recommended() == safe
    assert RegimeMap((*OFF, safe, bold), (cell,)).recommended() == bold


def test_where_every_setting_loses_somewhere_off_is_the_setting_for_all() -> None:
    gains = Cell(Regime(1, 1, 1), 1, 1, (100.0, 200.0, 50.0))
    loses = Cell(Regime(1, 1, 1), 1, 1, (100.0, 200.0, 120.0))
    regime_map = RegimeMap((*OFF, FIFO_FIRST), (gains, loses))
    assert regime_map.recommended() == CHUNK_MAJOR
    assert regime_map.verdict().startswith("Leave it off as one setting for all 2 regimes")
    assert "mean TTFT -50% at best" in regime_map.verdict()


def test_a_gain_below_one_percent_is_none() -> None:
    layerwise = FIFO_FIRST
    for ttft, best in ((99.5, CHUNK_MAJOR), (98.5, layerwise)):
        cell = Cell(Regime(1, 1, 1), 1, 1, (100.0, 200.0, ttft))
        assert RegimeMap((*OFF, layerwise), (cell,)).best(cell) == best


def test_new_tokens_give_the_ratio_asked_for(device: Device) -> None:
    for ratio in (0.2, 1.0, 1.32, 4.0):
        new = new_tokens_for(device, 15_152, ratio)
        assert device.transfer_ns(15_152) / device.prefill_ns(15_152, new) == pytest.approx(ratio, rel=0.01)


def test_a_ratio_out_of_reach_is_refused_with_what_is_in_reach(device: Device) -> None:
    with pytest.raises(ValueError, match=r"T/P = 50; h200-llama-3.1-8b reaches 0.12 .. 6.1"):
        new_tokens_for(device, 15_152, 50)


def test_a_map_of_nothing_is_refused(device: Device) -> None:
    with pytest.raises(ValueError, match="at least one concurrency and one ratio"):
        map_regimes(device, 15_152, (), (1.0,), CANDIDATES)


# ---------------------------------------------------------------- closed loop


def test_the_parts_of_ttft_add_up_and_stalls_come_only_from_early_release(device: Device) -> None:
    for strategy in CANDIDATES:
        one = serve(device, Regime(15_152, 768, 4, 20), strategy, 4, seed=1)
        parts = sum(getattr(one, name) for name in PARTS)
        assert parts == pytest.approx(one.mean_ttft_ns)
        assert min(getattr(one, name) for name in PARTS) >= 0
        if str(strategy.release) in {"whole", "jit"}:
            assert one.stall_ns == one.victim_stall_ns == 0


def test_the_closed_loop_shows_the_sign_that_was_measured_in_a_real_engine(device: Device) -> None:
    """vLLM 0.26 on an H200, 15,152 cached + 768 new, 4 users: interleaved loses, one after another gains a third and
    more."""
    regime = Regime(15_152, 768, 4, 50)
    chunk_major, interleaved, fifo = (
        serve(device, regime, strategy, 10, seed=0) for strategy in (CHUNK_MAJOR, INTERLEAVED, FIFO_FIRST)
    )
    assert interleaved.mean_ttft_ns > 1.05 * chunk_major.mean_ttft_ns
    assert fifo.mean_ttft_ns < 0.75 * chunk_major.mean_ttft_ns


def test_the_same_seed_gives_the_same_outcome_and_another_a_different_one(device: Device) -> None:
    first, again, other = (serve(device, Regime(15_152, 768, 3, 20), FIFO_FIRST, 3, seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_the_verdict_of_a_regime_says_off_when_it_is_off_and_names_what_does_better(device: Device) -> None:
    regime = Regime(15_152, 768, 4, 50)
    outcomes = {strategy: serve(device, regime, strategy, 5, seed=0) for strategy in (*OFF, INTERLEAVED, FIFO_FIRST)}

    def verdict(asked: object) -> str:
        return verdict_of(outcomes[asked], [one for strategy, one in outcomes.items() if strategy != asked])

    assert verdict(FIFO_FIRST).startswith("Turn it on with fifo/1/first: mean TTFT -")
    assert verdict(INTERLEAVED).startswith("Leave it off: round_robin/1/first gives mean TTFT +")
    better = (
        r"fifo/1/first does better: mean TTFT -\d+\.\d% against round_robin/1/first, -\d+\.\d% against chunk-major\.$"
    )
    assert re.search(better, verdict(INTERLEAVED))
    assert verdict(CHUNK_MAJOR).startswith("chunk-major is layerwise transfer left off")


def test_no_requests_are_refused(device: Device) -> None:
    with pytest.raises(ValueError, match=r"requests_per_user must be at least 1, got 0"):
        serve(device, Regime(100, 100, 1), CHUNK_MAJOR, 0, seed=0)


def test_a_percentile_is_one_of_the_values() -> None:
    assert [percentile(range(1, 101), share) for share in (0.5, 0.9, 0.99, 1.0)] == [50, 90, 99, 100]
    assert percentile([7], 0.5) == 7


@pytest.mark.parametrize(
    ("strategy", "graphs"),
    [
        ("chunk-major", Graphs.FULL),
        ("recompute", Graphs.FULL),
        ("fifo/1/whole", Graphs.FULL),
        ("fifo/1/first", Graphs.PIECEWISE),
        ("fifo/8/jit", Graphs.PIECEWISE),
        ("round_robin/all/first", Graphs.PIECEWISE),
        ("auto", Graphs.PIECEWISE),
    ],
)
def test_only_early_release_pays_for_piecewise_graphs_where_they_are_asked_for(strategy: str, graphs: Graphs) -> None:
    usual = Device(load_profile())
    full = usual.profile.compute(Graphs.FULL).decode_ns(8, 80_000, 10)
    assert usual.compute(parse_strategy(strategy)).decode_ns(8, 80_000, 10) == full
    device = Device(load_profile(), graphs=Graphs.PIECEWISE)
    found, other = (device.profile.compute(mode).decode_ns(8, 80_000, 10) for mode in (graphs, *set(Graphs) - {graphs}))
    assert device.compute(parse_strategy(strategy)).decode_ns(8, 80_000, 10) == found != other
