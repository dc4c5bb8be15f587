"""What the link alone needs: no order of loads needs less, and no recorded request came sooner."""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from concurrency.choices import link_table
from concurrency.figures import figures_of
from concurrency.goals import goals
from concurrency.link import Link, floor_of, least_waits, link_of, raw_bytes_per_us
from concurrency.recording import read
from concurrency.report import table
from concurrency.rules import counted, ttft_ms
from hypothesis import given
from hypothesis import strategies as st

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
RECORDINGS = sorted(path.name for path in RESULTS.glob("*grid*.jsonl.xz"))

Loads = Sequence[tuple[int, int]]
Rule = Callable[[Loads], float]


def loads(most: int, longest: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """(arrival, time on an idle link) of up to so many loads."""
    return st.lists(st.tuples(st.integers(0, 12), st.integers(1, longest)), min_size=1, max_size=most)


def equal_loads() -> st.SearchStrategy[list[tuple[int, int]]]:
    return st.tuples(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(1, 12)).map(
        lambda drawn: [(arrival, drawn[1]) for arrival in drawn[0]]
    )


def whole(order: Loads) -> float:
    """The sum of waits where loads go in this order, each whole; the link idles where the next one is not there yet."""
    now = waited = 0
    for arrival, alone in order:
        now = max(now, arrival) + alone
        waited += now - arrival
    return waited


def least_whole(given_loads: Loads) -> float:
    return min(map(whole, itertools.permutations(given_loads)))


def least_in_slices(given_loads: Loads) -> float:
    """The same over every way to give each unit of time to one of the loads that are there, or to none."""
    arrivals = [arrival for arrival, _alone in given_loads]

    @functools.cache
    def after(now: int, left: tuple[int, ...]) -> float:
        if not any(left):
            return 0
        there = [number for number, more in enumerate(left) if more and arrivals[number] <= now]
        waiting = len(there)
        ways = [tuple(more - (number == which) for number, more in enumerate(left)) for which in there] or [left]
        return waiting + min(after(now + 1, way) for way in ways)

    return after(0, tuple(alone for _arrival, alone in given_loads))


def longest_first(given_loads: Loads) -> float:
    return whole(sorted(given_loads, key=lambda load: (load[0], -load[1])))


def as_they_come(given_loads: Loads) -> float:
    return whole(sorted(given_loads, key=lambda load: load[0]))


def nobody_waits(given_loads: Loads) -> float:
    return sum(alone for _arrival, alone in given_loads)


def all_there_at_once(given_loads: Loads) -> float:
    return sum(itertools.accumulate(sorted(alone for _arrival, alone in given_loads)))


HARD: Loads = [(0, 6), (1, 1), (1, 2), (9, 2), (9, 1)]


def test_loads_as_long_as_each_other_go_one_after_another() -> None:
    assert least_waits([(0, 10), (0, 10), (5, 10), (100, 10)]) == [10, 20, 25, 10]
    assert least_waits([(100, 10), (5, 10), (0, 10)]) == [10, 15, 10], "in the order that was given"
    assert least_waits([]) == []


def test_a_short_load_goes_before_what_is_left_of_a_long_one() -> None:
    assert least_waits([(0, 10), (2, 3), (4, 6)]) == [19, 3, 7], "8 are left at 2, still 8 at 5, when 6 go first"
    assert least_waits([(0, 10), (0, 0), (4, 0)]) == [10, 0, 0]


@given(equal_loads())
def test_no_order_of_equal_loads_waits_less(given_loads: list[tuple[int, int]]) -> None:
    assert sum(least_waits(given_loads)) == least_whole(given_loads)


@given(loads(most=4, longest=4))
def test_no_order_waits_less_whole_or_in_slices(given_loads: list[tuple[int, int]]) -> None:
    least = sum(least_waits(given_loads))
    assert least == least_in_slices(given_loads)
    assert least <= least_whole(given_loads)


@given(loads(most=6, longest=12))
def test_loads_that_come_together_go_whole(given_loads: list[tuple[int, int]]) -> None:
    together = [(3, alone) for _arrival, alone in given_loads]
    assert sum(least_waits(together)) == least_whole(together)
    assert sum(least_waits(given_loads)) <= least_whole(given_loads)


@given(loads(most=8, longest=12), st.data())
def test_fewer_or_shorter_loads_never_wait_longer(given_loads: list[tuple[int, int]], data: st.DataObject) -> None:
    """So loads that are left out, and a rate that is too high, can only lower the floor."""
    kept = data.draw(st.lists(st.booleans(), min_size=len(given_loads), max_size=len(given_loads)))
    some = [load for load, keep in zip(given_loads, kept, strict=True) if keep]
    assert sum(least_waits(some)) <= sum(least_waits(given_loads))
    assert sum(least_waits([(arrival, alone / 2) for arrival, alone in given_loads])) <= sum(least_waits(given_loads))
    assert all(wait >= alone for wait, (_arrival, alone) in zip(least_waits(given_loads), given_loads, strict=True))


@pytest.mark.parametrize("wrong", [longest_first, as_they_come, nobody_waits, all_there_at_once])
def test_the_search_over_all_orders_tells_other_rules_from_the_least(wrong: Rule) -> None:
    assert sum(least_waits(HARD)) == least_in_slices(HARD)
    assert wrong(HARD) != least_in_slices(HARD)


# ---- of a repeat


def cell(**more: Any) -> dict[str, Any]:
    return {
        "name": "c4_hit15360_new256_chunk256_full", "concurrency": 2, "hit": 100, "new": 10, "chunk": 256,
        "rate_per_s": None, "mix": [], "miss_every": 0, "bystanders": 0, "output": 16, "tier_gb_per_s": None, **more,
    }  # fmt: skip


def request(at_ms: float, ttft_ms: float = 100.0, mb: float = 40, **more: Any) -> dict[str, Any]:
    """Its load takes 40 ms of an idle link for 40 MB, and lands 60 ms after the request is queued."""
    queued_us, first_us = 2_000, round(2_000 + 1e3 * ttft_ms)
    return {
        "at_us": round(1e3 * at_ms), "queued_us": queued_us, "token_us": [first_us, first_us + 50_000], "tokens": [5],
        "cached": 100, "local_hit": 0, "bytes": round(1e6 * mb), "started_us": 22_000, "landed_us": [30_000, 62_000],
        **more,
    }  # fmt: skip


def row(arm: str, *requests: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "kind": "repeat", "cell": cell(), "arm": arm, "repeat": 0, "wall_us": 500_000, "at_s": 0,
        "requests": list(requests), "steps": [[9_000, 11_000, 10, 0, 5, 40_000]], "host_stall_us": {},
        "peak_in_flight_bytes": 7, "bystander_us": [], "counters": {}, **more,
    }  # fmt: skip


SLOW = Link(1e3, "raw copy")  # a load takes 40 ms


def test_only_counted_requests_and_what_they_load_are_in_the_floor() -> None:
    first = [request(0), request(0)]
    assert floor_of(row("auto", *first, request(10), request(20), request(500)), SLOW) == pytest.approx((50, 10))
    computed = request(15, landed_us=[])
    assert floor_of(row("auto", *first, request(10), request(20), computed), SLOW) == pytest.approx((110 / 3, 10))
    assert floor_of(row("auto", *first, request(10), request(20, mb=10)), SLOW) == pytest.approx((30, 5))
    late = request(10, queued_us=12_000, token_us=[112_000, 162_000])
    assert floor_of(row("auto", *first, late, request(12)), SLOW) == pytest.approx((56, 16)), "from being queued"
    in_the_open = row("auto", request(0), request(0), cell=cell(rate_per_s=9.0))
    assert floor_of(in_the_open, SLOW) == pytest.approx((60, 20)), "all of an open loop's count"


def test_each_rank_has_a_link_of_its_own() -> None:
    on_two = [request(at, landed_by_rank_us=[[30_000, 62_000], [31_000, 61_000]]) for at in (0, 0, 10)]
    assert floor_of(row("auto", *on_two), SLOW) == pytest.approx((20, 0))
    assert link_of([row("auto", *on_two)], 0) == Link(20e6 / 39_000, "quickest load"), "of the quicker rank"


@pytest.mark.parametrize(("raw", "link"), [(0, (1e3, "quickest load")), (999, (1e3, "quickest load")),
                                           (1_100, (1_100, "raw copy"))])  # fmt: skip
def test_the_quicker_of_raw_copy_and_quickest_load_is_the_link(raw: float, link: tuple[float, str]) -> None:
    rows = [row("auto", request(0), request(0, started_us=12_000)), row("sync", request(0, landed_us=[9_000, 99_000]))]
    assert link_of(rows, raw) == link


def test_where_nothing_was_loaded_there_is_no_floor() -> None:
    rows = [row("recompute", *[request(at, cached=0, landed_us=[]) for at in (0, 0, 10)])]
    assert link_of(rows, 1_000) is None
    assert figures_of(rows)[cell()["name"]].arms["recompute"].link_floor is None
    assert "| - | 0.0 | - |" in table(figures_of(rows)[cell()["name"]])


def run(ttft_ms: float, later_ms: float = 0.01) -> list[dict[str, Any]]:
    """Chunk-major's first tokens come after 200 ms, later each repeat; a raw copy is twice as quick as any load."""
    engine = {"kind": "engine", "commit": "a" * 40, "wire": {"gb_per_s": {"h2d": [1.9, 2.0, 1.8], "d2h": [3.0]}}}
    arms = {"chunk_full_graphs": 200.0, "auto_full_graphs": ttft_ms}
    repeats = [
        row(arm, *[request(at, ttft + later_ms * number) for at in (0, 0, 10, 25, 200)], repeat=number, at_s=number)
        for arm, ttft in arms.items()
        for number in range(3)
    ]
    return [engine, *repeats]


def test_the_engine_line_before_a_cell_says_how_quick_raw_copies_were() -> None:
    first, *repeats = run(100)
    assert raw_bytes_per_us(first) == 2_000
    assert raw_bytes_per_us({"kind": "engine"}) == 0, "on a CPU none are made"
    for before, expected in (([first], (2_000, "raw copy")), ([first, {"kind": "engine"}], (1_000, "quickest load"))):
        found = figures_of([*before, *repeats])[cell()["name"]]
        assert found.link == expected
    figures = figures_of([first, *repeats, {"kind": "engine", "wire": {"gb_per_s": {"h2d": [9.0]}}}])[cell()["name"]]
    assert figures.link == (2_000, "raw copy"), "an engine that came after it had no part in it"
    arm = figures.arms["auto_full_graphs"]
    assert arm.link_floor == pytest.approx((65 / 3, 0, 3)), "20, 25 and 20 ms"
    assert arm.link_behind_ms == pytest.approx(5 / 3)
    assert ", link 2.0 GB/s by its raw copy" in table(figures)
    assert "| 21.7 (22%) | 0.0 |" in table(figures)


@pytest.mark.parametrize(("ttft", "state", "named"), [(120.0, "missed", True), (100.0, "reached", False)])
def test_a_goal_that_is_not_reached_names_the_floor(ttft: float, state: str, named: bool) -> None:
    (line,) = (one for one in goals(figures_of(run(ttft)), {}, run(ttft)) if one.what.startswith("C = 4, new = 256"))
    assert line.state == state
    floor = "; 110.0 ms were wanted, and the link alone needs 21.7 for these arrivals"
    assert line.measured.endswith(floor) == named
    assert ("link" in line.measured) == named


def test_so_does_one_of_which_too_little_is_known() -> None:
    rows = run(120.0, later_ms=15.0)
    (line,) = (one for one in goals(figures_of(rows), {}, rows) if one.what.startswith("C = 4, new = 256"))
    assert line.state.startswith("not shown")
    assert line.measured.endswith("; 118.3 ms were wanted, and the link alone needs 21.7 for these arrivals")


def test_the_table_has_the_arm_that_chooses_where_requests_share_the_link() -> None:
    rows = link_table(figures_of(run(100.0))).splitlines()[4:]
    assert rows == [f"| {cell()['name']} | auto_full_graphs | 20.0 | 1.7 | 21.7 | 60.0 | 100.0 | 22% |"]
    alone = [{**one, "cell": cell(concurrency=1)} if "cell" in one else one for one in run(100.0)]
    assert link_table(figures_of(alone)).splitlines()[4:] == []


# ---- of the recordings


def floors(name: str, quicker: float = 1.0) -> list[tuple[float, float, float]]:
    """Of each repeat in which all was loaded: its floor, when its last layers landed and its first tokens came, ms."""
    rows = read([RESULTS / name])
    raw = max(raw_bytes_per_us(one) for one in rows if one["kind"] == "engine")
    links = {found: cell.link for found, cell in figures_of(rows).items()}
    times = []
    for one in rows:
        if one["kind"] != "repeat" or not all(request.get("landed_us") for request in counted(one)):
            continue
        link = links[one["cell"]["name"]]
        assert link is not None
        assert link.bytes_per_us <= raw or link.shown_by == "quickest load"
        landed = statistics.fmean(found["landed_us"][-1] - found["queued_us"] for found in counted(one)) / 1e3
        floor = floor_of(one, link._replace(bytes_per_us=quicker * link.bytes_per_us))
        times.append((floor.ttft_ms, landed, ttft_ms(one)))
    return times


@pytest.mark.parametrize("name", RECORDINGS)
def test_no_repeat_of_any_recording_came_sooner_than_its_floor(name: str) -> None:
    found = floors(name)
    assert found
    assert [times for times in found if not times[0] <= times[1] <= times[2]] == []


def test_the_floor_is_near_some_landings_so_that_a_slower_link_would_be_noticed() -> None:
    assert len(RECORDINGS) > 10
    nearest = {name: max(floor / landed for floor, landed, _ttft in floors(name)) for name in RECORDINGS}
    assert max(nearest.values()) > 0.85, nearest
    assert any(floor > landed for name in RECORDINGS for floor, landed, _ttft in floors(name, quicker=0.8))
