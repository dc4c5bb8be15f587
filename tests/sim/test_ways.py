"""SIM-1 on the whole way of a load: tiers, staging, scatter and ranks as events are what their recursion says."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from exactness import Scenario, difference, hardware_of, random_scenario, random_way, run_world, tier_of
from lamella.reference.ordering import Fifo
from lamella.reference.pathway import Way, schedule_way, split_windows
from lamella.reference.release import First, Whole
from lamella.reference.timeline import schedule_link
from lamella.sim.hardware import Tier
from lamella.sim.paths import RankedLinks, TierReader
from lamella.sim.records import Station
from lamella.sim.staged import ScatterKernels, StagedLink
from lamella.sim.stations import Transfer

SCENARIOS = 3_000
NIGHTLY_SCENARIOS = 10_000


def seeded(seed: int) -> tuple[Scenario, Way]:
    """FIFO, and a release that needs no forecast: what the recursion of the whole way has an answer for."""
    rng = random.Random(seed)
    scenario = random_scenario(rng)
    layers = len(scenario.requests[0].layer_compute_ns)
    release = rng.choice((Whole(), First(), First(rng.randint(1, layers))))
    return replace(scenario, order=Fifo(), release=release), random_way(rng, scenario.requests)


def check(seeds: range) -> dict[str, int]:
    """All agree; how many scenarios had each thing that makes them hard."""
    seen = dict.fromkeys(("tier", "ring is full", "scatter", "ranks", "stalls"), 0)
    for seed in seeds:
        scenario, way = seeded(seed)
        assert difference(scenario, way) is None, f"scenario {seed}: {scenario}, {way}"
        if not any(request.load.slice_ns for request in scenario.requests):
            continue
        endless = replace(way, windows=10**9)
        seen["tier"] += way.tier_bytes_per_s is not None
        seen["scatter"] += way.scatter_bytes_per_s is not None
        seen["ring is full"] += schedule_way(scenario.requests, endless) != schedule_way(scenario.requests, way)
        seen["ranks"] += len(set(way.speeds)) > 1
        seen["stalls"] += run_world(scenario, hardware_of(way), tier_of(way)).stall_ns > 0
    return seen


def test_the_whole_way_and_its_recursion_agree_to_the_nanosecond() -> None:
    seen = check(range(SCENARIOS))
    assert min(seen.values()) > SCENARIOS // 40, f"the scenarios must be hard, not only many: {seen}"


@pytest.mark.slow
def test_the_whole_way_and_its_recursion_agree_to_the_nanosecond_on_many_more() -> None:
    check(range(SCENARIOS, SCENARIOS + NIGHTLY_SCENARIOS))


def test_with_nothing_on_the_way_its_recursion_is_the_links() -> None:
    for seed in range(300):
        scenario = seeded(seed)[0]
        assert schedule_way(scenario.requests, Way()) == schedule_link(scenario.requests, Fifo())


def test_windows_hold_all_bytes_and_all_the_time() -> None:
    rng = random.Random(7)
    for _ in range(500):
        num_bytes, wire_ns, window = rng.randint(0, 50), rng.randint(0, 99), rng.choice((None, rng.randint(1, 60)))
        windows = split_windows(num_bytes, wire_ns, window)
        assert (sum(ns for ns, _ in windows), sum(size for _, size in windows)) == (wire_ns, num_bytes)
        assert all(window is None or size <= window for _, size in windows)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"windows": 0}, "windows must be at least 1, got 0"),
        ({"tier_bytes_per_s": 0}, "tier_bytes_per_s must be at least 1, got 0"),
        ({"launch_ns": -1}, "times must be at least 0"),
        ({"speeds": ()}, "times must be at least 0 and speeds positive"),
    ],
)
def test_an_impossible_way_is_refused(wrong: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Way(**wrong)  # type: ignore[arg-type]


# ---------------------------------------------------------------- planted wrong models


def a_ring_without_end(patch: pytest.MonkeyPatch) -> None:
    begin = StagedLink._begin_window

    def wrong(self: StagedLink) -> None:
        if self._free == 0:
            self._free = 1
        begin(self)

    patch.setattr(StagedLink, "_begin_window", wrong)


def a_slice_has_landed_with_its_first_window(patch: pytest.MonkeyPatch) -> None:
    scattered = StagedLink._scattered

    def wrong(self: StagedLink, transfer: Transfer, part: int, num_bytes: int, last: bool) -> None:
        first = len(transfer.landing_ns) == part
        if first:
            transfer.landing_ns.append(self._clock.now_ns)
            transfer.on_landed(part)
        quiet = Transfer(transfer.submission, transfer.load, lambda _: None)
        scattered(self, quiet, part, num_bytes, last)

    patch.setattr(StagedLink, "_scattered", wrong)


def a_slice_has_landed_when_it_has_crossed(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: ScatterKernels, sequence: int, part: int, num_bytes: int, then: Callable[[], None]) -> None:
        then()

    patch.setattr(ScatterKernels, "put", wrong)


def kernels_run_beside_each_other(patch: pytest.MonkeyPatch) -> None:
    put = ScatterKernels.put

    def wrong(self: ScatterKernels, sequence: int, part: int, num_bytes: int, then: Callable[[], None]) -> None:
        self._running = False
        put(self, sequence, part, num_bytes, then)

    patch.setattr(ScatterKernels, "put", wrong)


def the_fastest_rank_is_enough(patch: pytest.MonkeyPatch) -> None:
    submit = RankedLinks.submit

    def wrong(self: RankedLinks, transfer: Transfer) -> None:
        landed = transfer.on_landed
        transfer.on_landed = lambda _: None
        submit(self, transfer)
        told: set[int] = set()
        for copy in self._copies.get(id(transfer), []):

            def first(part: int) -> None:
                if part not in told:
                    told.add(part)
                    landed(part)

            copy.on_landed = first

    patch.setattr(RankedLinks, "submit", wrong)


def a_tier_reads_while_the_latency_lasts_and_not_before(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: Tier, num_bytes: int) -> int:
        return num_bytes * 1_000_000_000 // self.bytes_per_s + self.latency_ns

    patch.setattr(Tier, "slice_ns", wrong)


def the_link_does_not_wait_for_the_tier(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: TierReader, transfer: Transfer, on_slice: Callable[[], None]) -> None:
        del on_slice

    patch.setattr(TierReader, "fetch", wrong)


WRONG = [
    a_ring_without_end,
    a_slice_has_landed_with_its_first_window,
    a_slice_has_landed_when_it_has_crossed,
    kernels_run_beside_each_other,
    the_fastest_rank_is_enough,
    a_tier_reads_while_the_latency_lasts_and_not_before,
    the_link_does_not_wait_for_the_tier,
]


@pytest.mark.parametrize("plant", WRONG, ids=lambda plant: plant.__name__)
def test_a_wrong_way_is_told_apart(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)

    def differs(seed: int) -> bool:
        try:
            return difference(*seeded(seed)) is not None
        except (AssertionError, IndexError, RuntimeError, ValueError):
            return True  # the planted fault broke an invariant before it gave a wrong answer

    assert any(map(differs, range(SCENARIOS))), f"{SCENARIOS} scenarios did not notice"


# ---------------------------------------------------------------- what is written down


def test_no_station_does_two_things_at_once_and_all_bytes_pass_each() -> None:
    """Conservation and causality: tier before link before scatter, everything once, in order."""
    for seed in range(200):
        scenario, way = seeded(seed)
        world = run_world(scenario, hardware_of(way), tier_of(way))
        total = sum(sum(request.load.slice_bytes) for request in scenario.requests)
        for station in (Station.TIER, Station.H2D, Station.SCATTER):
            for rank in range(len(way.speeds)):
                rows = [row for row in world.slices if (row.station, row.rank) == (station, rank)]
                rows.sort(key=lambda row: (row.begin_ns, row.end_ns))
                assert all(before.end_ns <= after.begin_ns for before, after in pairwise(rows))
                assert sum(row.num_bytes for row in rows) == (total if rows else 0)
        crossed = {
            (row.rank, row.sequence, row.part): row.end_ns
            for row in reversed(world.slices)  # the first window of each slice stays
            if row.station is Station.H2D
        }
        for row in world.slices:
            if row.station is Station.SCATTER:
                assert crossed[row.rank, row.sequence, row.part] <= row.begin_ns
