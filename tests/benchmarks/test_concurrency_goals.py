"""What a run was to show beside what it does show, and what one thing changes."""

from __future__ import annotations

from typing import Any

import pytest
from concurrency.choices import choices_table
from concurrency.figures import Verdict, figures_of
from concurrency.goals import first_tokens, goals
from concurrency.report import by_run, commits_of, each_run, newest
from concurrency.tables import cells_table, differences_table, gains_table, predictions_of
from concurrency.two_gpus import beside_one_gpu

GOOD = Verdict(8, 0, 0, 0.1)


def cell(name: str, **more: Any) -> dict[str, Any]:
    return {
        "name": name, "concurrency": 1, "hit": 100, "new": 10, "chunk": 256, "rate_per_s": None, "mix": [],
        "miss_every": 0, "bystanders": 0, "output": 50, "tier_gb_per_s": None, **more,
    }  # fmt: skip


def row(one: dict[str, Any], arm: str, number: int, ttft_ms: float, e2e_ms: float, **more: Any) -> dict[str, Any]:
    request = {
        "at_us": 0, "queued_us": 1_000, "token_us": [1_000 + round(1e3 * ttft_ms), 1_000 + round(1e3 * e2e_ms)],
        "tokens": [5], "cached": 100, "local_hit": 0, "started_us": 2_000, "landed_us": [3_000, 42_000],
        "released_us": 4_000,
    }  # fmt: skip
    return {
        "kind": "repeat", "cell": one, "arm": arm, "repeat": number, "wall_us": round(1e3 * e2e_ms), "at_s": number,
        "requests": [request, request], "steps": [[9_000, 11_000, 10, 0, 5, 40_000]], "host_stall_us": {},
        "peak_in_flight_bytes": 7, "bystander_us": [], "counters": {}, **more,
    }  # fmt: skip


def run(name: str, arms: dict[str, float], e2e_ms: dict[str, float] | None = None, **more: Any) -> list[dict[str, Any]]:
    """Four quiet repeats of each arm."""
    return [
        row(cell(name, **more), arm, number, ttft + 0.01 * number, (e2e_ms or {}).get(arm, 200.0) + 0.1 * number)
        for arm, ttft in arms.items()
        for number in range(4)
    ]


def said(rows: list[dict[str, Any]], verdicts: Any = None) -> dict[str, tuple[str, str]]:
    return {line.what: (line.measured, line.state) for line in goals(figures_of(rows), verdicts or {}, rows)}


ONE = "c1_hit15360_new768_chunk256"


def test_the_same_arm_beside_prefills_graphs_is_told_from_that_of_its_own_cell() -> None:
    graphs = {f"{arm}_{kind}_graphs": ttft for kind in ("full", "both") for arm, ttft in (("chunk", 100), ("auto", 50))}
    rows = [*run(f"{ONE}_full", {"chunk_full_graphs": 100, "auto_full_graphs": 55}), *run(f"{ONE}_both", graphs)]
    found = {what: measured for what, (measured, _state) in said(rows).items() if what.startswith("C = 1, new = 768")}
    assert {what.partition(", auto_")[2]: measured.split(" ")[0] for what, measured in found.items()} == {
        "full_graphs": "-45.0%", "full_graphs, beside prefills' graphs": "-50.0%", "both_graphs": "-50.0%",
    }  # fmt: skip
    served = [line.split(" | ")[1:3] for line in gains_table(figures_of(rows)).splitlines()[4:]]
    assert sorted(served) == [
        ["100 + 10 → 50", "auto_both_graphs"], ["100 + 10 → 50", "auto_full_graphs"],
        ["100 + 10 → 50, beside prefills' graphs", "auto_full_graphs"],
    ]  # fmt: skip


@pytest.mark.parametrize(("ttft", "state"), [(60.0, "reached"), (62.0, "missed")])
def test_a_goal_is_reached_or_missed_by_what_is_shown(ttft: float, state: str) -> None:
    measured, found = said(run(ONE, {"chunk_bounded": 100, "fifo_first": 58, "auto": ttft}))["C = 1, new = 768, auto"]
    assert found == state
    assert measured.startswith(f"{ttft / 100 - 1:+.1%}")
    assert "best of the others fifo_first -42.0%" in measured


def test_a_goal_is_not_shown_where_the_run_was_not_quiet() -> None:
    rows = run(ONE, {"chunk_bounded": 100, "auto": 50})
    for number, one in enumerate(rows[:4]):
        for request in one["requests"]:
            request["token_us"][0] += 9_000 * number
    assert said(rows)["C = 1, new = 768, auto"][1].startswith("not shown: standard error")


def test_an_arm_with_graphs_of_its_own_is_held_against_chunk_major_with_the_same() -> None:
    arms = {"chunk_bounded": 100, "auto": 60, "chunk_prefill_graphs": 120, "auto_prefill_graphs": 60}
    found = said(run(f"{ONE}_graphs", arms))
    assert found["C = 1, new = 768, auto_prefill_graphs"][0].startswith("-50.0%")
    assert found["C = 1, new = 768, auto"][0].startswith("-40.0%"), "no other cell says it"
    both = said([*run(ONE, {"chunk_bounded": 100, "auto": 70}), *run(f"{ONE}_graphs", arms)])
    assert both["C = 1, new = 768, auto"][0].startswith("-30.0%"), "the cell of that name says it"
    beside_a_peer = said([*run(ONE, {"peer_offloading": 90}), *run(f"{ONE}_graphs", arms)])
    assert beside_a_peer["C = 1, new = 768, auto"][0].startswith("-40.0%"), "the cell of that name has no such arm"


def test_the_ceilings_share_is_asked_only_where_transfer_and_prefill_are_alike() -> None:
    rows = run(ONE, {"chunk_bounded": 100, "auto": 59})  # T 40 ms, P 40 ms: 50%
    assert said(rows)["share of the ceiling 50% at T/P 1.00, new = 10, auto"] == ("82% ± 0%", "reached")
    for one in rows:
        one["steps"][0][5] = 4_000
    assert not [what for what in said(rows) if "ceiling" in what]


def test_regret_is_against_the_best_other_arm_and_never_negative() -> None:
    good = run("a", {"chunk_bounded": 100, "fifo_first": 60, "auto": 50})
    bad = run("b", {"chunk_bounded": 100, "fifo_first": 50, "auto": 55})
    assert said([*good, *bad])["auto's regret in 2 cells"] == ("mean 5.0%, largest 10.0% in b (fifo_first)", "missed")
    assert said(good)["auto's regret in 1 cells"] == ("mean 0.0%, largest 0.0%", "reached")


def test_a_cell_in_which_only_chunk_major_ran_beside_it_has_no_regret() -> None:
    alone = run("a", {"chunk_bounded": 100, "chunk_deep": 90, "auto": 50})
    worse = run("b", {"chunk_bounded": 100, "fifo_first": 50, "auto": 60})
    assert said([*alone, *worse])["auto's regret in 1 cells"][0].startswith("mean 20.0%"), "not halved by the other"
    assert not [what for what in said(alone) if "regret" in what]


def test_what_auto_does_with_full_graphs_is_told_apart_and_beside_arms_with_full_graphs() -> None:
    full = run(
        "a", {"chunk_full_graphs": 100, "fifo_full_graphs": 50, "auto_full_graphs": 60, "recompute_full_graphs": 50}
    )
    mixed = run(
        "b", {"chunk_bounded": 100, "fifo_first": 20, "auto": 20, "fifo_full_graphs": 60, "auto_full_graphs": 60}
    )
    found = said([*full, *mixed])
    assert found["auto_full_graphs's regret in 2 cells"] == (
        "mean 10.0%, largest 20.0% in a (fifo_full_graphs)",
        "missed",
    )
    assert found["auto's regret in 1 cells"] == ("mean 0.0%, largest 0.0%", "reached")
    assert found["auto_full_graphs's time to first token over recomputation's, 1 cells"] == (
        "worst +20.0% in a",
        "missed in a",
    )


def test_never_worse_names_the_cells_in_which_it_is() -> None:
    good = run("a", {"chunk_bounded": 100, "auto": 50}, {"chunk_bounded": 200, "auto": 180})
    bad = run("b", {"chunk_bounded": 100, "auto": 120}, {"chunk_bounded": 200, "auto": 250})
    found = said([*good, *bad])
    assert found["auto's time to first token over chunk-major's, 2 cells"] == ("worst +20.0% in b", "missed in b")
    assert found["auto's throughput over chunk-major's, 2 cells"][1] == "missed in b"
    assert found["auto's end-to-end latency over chunk-major's, 50 tokens, 2 cells"][1] == "missed in b"
    assert said(good)["auto's throughput over chunk-major's, 1 cells"] == ("worst +11.1% in a", "reached")


def test_bystanders_may_lose_a_twentieth() -> None:
    def with_bystanders(tpot: dict[str, int]) -> list[dict[str, Any]]:
        rows = run("a", dict.fromkeys(tpot, 50.0), bystanders=2)
        for one in rows:
            one["bystander_us"] = [[n * tpot[one["arm"]] + one["repeat"] for n in range(9)]]
        return rows

    assert said(with_bystanders({"chunk_bounded": 10_000, "auto": 10_300}))["bystanders' TPOT, auto"][1] == "reached"
    assert said(with_bystanders({"chunk_bounded": 10_000, "auto": 11_000}))["bystanders' TPOT, auto"][1] == "missed"
    once = [one for one in with_bystanders({"chunk_bounded": 10_000, "auto": 11_000}) if one["repeat"] == 0]
    assert said(once)["bystanders' TPOT, auto"][1].startswith("not shown"), "one repeat has no error to speak of"


def test_bystanders_are_judged_where_both_arms_serve_as_many() -> None:
    def with_bystanders(wall_ms: float, window_ms: float = 0) -> list[dict[str, Any]]:
        rows = run("a", {"chunk_bounded": 50.0, "auto": 50.0}, bystanders=2)
        for one in rows:
            slow = one["arm"] == "auto"
            one["bystander_us"] = [[n * (11_000 if slow else 10_000) + one["repeat"] for n in range(9)]]
            one["wall_us"], one["window_us"] = round((100 if slow else wall_ms) * 1e3), round(window_ms * 1e3)
        return rows

    assert said(with_bystanders(110))["bystanders' TPOT, auto"][1] == "-: throughput differs"
    assert said(with_bystanders(101))["bystanders' TPOT, auto"][1] == "missed"
    assert said(with_bystanders(110, 150))["bystanders' TPOT, auto"][1] == "missed", "counted over one window"
    assert said(with_bystanders(160, 150))["bystanders' TPOT, auto"][1] == "-: throughput differs", "cannot keep up"


def test_of_several_commits_each_cell_is_of_the_last_run_that_has_it() -> None:
    old = [{"kind": "engine", "commit": "a" * 40}, *run("a", {"chunk_bounded": 100, "auto": 60, "sync": 50})]
    old += run("b", {"chunk_bounded": 100, "auto": 70, "fifo_first": 80})
    new = [{"kind": "engine", "commit": "b" * 40}, *run("a", {"chunk_bounded": 100, "auto": 55})]
    cells = figures_of(newest([old, new]))
    assert {name: round(cell.arms["auto"].ttft.value) for name, cell in cells.items()} == {"a": 55, "b": 70}
    assert "sync" not in cells["a"].arms, "arms of another commit stay with it"
    assert commits_of([old, new]) == {"a": "bbbbbbb", "b": "aaaaaaa"}
    lines = choices_table(cells, commits_of([old, new])).splitlines()
    assert lines[4:] == [
        "| a | auto | bbbbbbb | 55.0 | - | - | - | - |",
        "| b | auto | aaaaaaa | 70.0 | -12.5% (fifo_first) | - | - | - |",
    ]


def test_a_recording_of_two_engines_tells_each_cell_by_its_own_engines_commit() -> None:
    rows = [{"kind": "engine", "commit": "a" * 40}, *run("a", {"chunk_bounded": 100, "auto": 60})]
    rows += [{"kind": "engine", "commit": "b" * 40}, *run("b", {"chunk_bounded": 100, "auto": 70})]
    assert commits_of([rows]) == {"a": "aaaaaaa", "b": "bbbbbbb"}
    assert [(commit, list(cells)) for commit, cells in by_run([rows])] == [("aaaaaaa", ["a"]), ("bbbbbbb", ["b"])]
    again = run("a", {"fifo_first": 80})
    assert commits_of([[*rows, *again]]) == {"a": "aaaaaaa+bbbbbbb", "b": "bbbbbbb"}, "one cell of two engines"


def test_a_run_that_ended_before_two_repeats_of_an_arm_did_not_measure_the_cell() -> None:
    def of(commit: str, auto: float, repeats: int) -> list[dict[str, Any]]:
        rows = run("a", {"chunk_bounded": 100, "auto": auto})
        return [{"kind": "engine", "commit": commit * 40}, *(one for one in rows if one["repeat"] < repeats
                or one["arm"] == "chunk_bounded")]  # fmt: skip

    whole, cut, later = of("a", 60, 4), of("b", 50, 1), of("c", 70, 2)
    for runs, commit, ttft in (([whole, cut], "a", 60), ([whole, cut, later], "c", 70), ([cut], "b", 50)):
        assert commits_of(runs) == {"a": commit * 7}
        assert round(figures_of(newest(runs))["a"].arms["auto"].ttft.value) == ttft


def test_what_auto_foresaw_counts_from_the_same_moment_as_the_time_to_first_token() -> None:
    rows = run("a", {"chunk_bounded": 100, "auto": 50})
    for one in rows[4:]:
        first, second = one["requests"]
        one["requests"] = [
            {**first, "asked_us": 5_000, "predicted_us": 900_000, "regret": 9.0},  # the first ones do not count
            {**second, "asked_us": 5_000, "predicted_us": 41_000 - 1_000 * one["repeat"], "regret": 0.05},
        ]
    arm = figures_of(rows)["a"].arms["auto"]
    assert (arm.predicted_ms, arm.predicted_regret) == (pytest.approx(43.5), pytest.approx(0.05)), "4 ms till asked"
    row = choices_table(figures_of(rows), {"a": "abc"}).splitlines()[4]
    assert row == "| a | auto | abc | 50.0 | - | 43.5 | 87% | 5.0% |"


def test_each_run_is_told_by_itself() -> None:
    old = [{"kind": "engine", "commit": "a" * 40}, *run(ONE, {"chunk_bounded": 100, "auto": 60})]
    new = [{"kind": "engine", "commit": "b" * 40}, *run(ONE, {"chunk_bounded": 100, "auto": 55})]
    text = each_run({"first": old, "second": new})
    first, second = text.split("\n## ")[1:]
    assert first.startswith("first, aaaaaaa\n")
    assert second.startswith("second, bbbbbbb\n")
    assert ("-40.0%" in first, "-45.0%" in first, "-40.0%" in second, "-45.0%" in second) == (True, False, False, True)


def test_an_open_loops_cell_is_told_from_a_closed_ones() -> None:
    arms = {"chunk_bounded": 100, "auto": 60}
    both = [*run("a", arms, bystanders=8), *run("b", arms, bystanders=8, rate_per_s=9.0)]
    table = gains_table(figures_of(both))
    assert [table.count(said) for said in ("8 bystanders | auto", "8 bystanders, 9 arrivals/s | auto")] == [1, 1]


def test_a_throttled_tier_misses_and_mixed_sizes_are_told_in_the_gains() -> None:
    arms = {"chunk_bounded": 100, "auto": 60}
    rows = [*run("a", arms, tier_gb_per_s=5.0), *run("b", arms, miss_every=2), *run("c", arms, mix=[[100, 10]])]
    rows += run("d_before_batch_full", arms)
    told = [line.split(" | ")[1] for line in gains_table(figures_of(rows)).splitlines()[4:]]
    assert told == ["100 + 10 → 50, tier of 5 GB/s", "100 + 10 → 50, 1 of 2 misses", "mixed sizes → 50",
                    "100 + 10 → 50, beside `before_batch`"]  # fmt: skip


def test_every_regret_beyond_what_is_allowed_is_named() -> None:
    rows = [one for name, ttft in (("a", 52.0), ("b", 60.0), ("c", 55.0), ("d", 50.0))
            for one in run(name, {"chunk_bounded": 100, "fifo_first": 50, "auto": ttft})]  # fmt: skip
    assert said(rows)["auto's regret in 4 cells"] == (
        "mean 8.5%, largest 20.0% in b (fifo_first), 10.0% in c (fifo_first)", "missed",
    )  # fmt: skip


def test_wrong_answers_count_only_where_the_early_reader_is_caught() -> None:
    rows = run("a", {"chunk_bounded": 100})
    caught = ("a", "early_read"), Verdict(0, 0, 8, 9.0)
    assert said(rows, {("a", "auto"): GOOD, caught[0]: caught[1]})["wrong answers"][1] == "reached"
    assert said(rows, {("a", "auto"): Verdict(7, 0, 1, 9.0), caught[0]: caught[1]})["wrong answers"][1] == "missed"
    assert said(rows, {("a", "auto"): GOOD})["wrong answers"][1] == "not shown: nothing was caught reading early"


def test_first_tokens_are_those_of_recomputation_of_the_same_prompt() -> None:
    rows = [*run("a", {"recompute": 400}), *run("a", {"auto": 50})]
    assert first_tokens(rows) == (4, 4)
    rows[-1]["requests"][1] = {**rows[-1]["requests"][1], "tokens": [6]}
    assert first_tokens(rows) == (3, 4)


def test_one_thing_at_a_time_and_predictions_are_in_the_tables() -> None:
    cells = figures_of(run("a", {"chunk_bounded": 100, "fifo_first": 50, "interleaved_first": 75, "auto": 50}))
    assert "| fifo_first | interleaved_first | a | +50.0% ± 0.0%* |" in differences_table(cells)
    document = {"test": {"arms": [{"cell": "a", "arm": "auto", "predicted": {"ttft_ns": 55_016_500}}]}}
    assert "| 80% of 50% |" not in cells_table(cells, {})
    assert "| 55.0 (+10%) |" in cells_table(cells, predictions_of(document))


def test_what_a_release_waits_for_is_split_at_the_release() -> None:
    arm = figures_of(run("a", {"chunk_bounded": 100}))["a"].arms["chunk_bounded"]
    assert (arm.unnoticed_ms, arm.unadmitted_ms) == (1.0, 5.0), "landed at 3, released at 4, the step begins at 9 ms"


# ---- two GPUs beside one


def at_ratio(name: str, ratio: float, ttft: float, arm: str = "auto_full_graphs", **more: Any) -> list[dict[str, Any]]:
    """A cell in which a load takes 40 ms and a prefill as long as the ratio says; chunk-major takes 100 ms."""
    rows = run(name, {"chunk_full_graphs": 100, arm: ttft}, concurrency=4, **more)
    for one in rows:
        one["requests"] *= 3
        one["steps"][0][5] = 40_000 / ratio
    return rows


def beside(*cells: list[dict[str, Any]], commits: str = "") -> list[tuple[str, str]]:
    """What is said of these recordings, each of one cell, of these commits; all of commit "a" where none are named."""
    runs = [(commit, figures_of(rows)) for commit, rows in zip(commits or "a" * len(cells), cells, strict=True)]
    return [(line.measured, line.state) for line in beside_one_gpu(runs)]


NEAR, FAR = at_ratio("near", 0.8, 45.0), at_ratio("far", 1.2, 30.0)


@pytest.mark.parametrize(("ttft", "points", "state"), [(49.0, "+4.0", "reached"), (51.0, "+6.0", "missed"),
                                                       (38.0, "-7.0", "reached")])  # fmt: skip
def test_two_gpus_are_held_against_one_at_the_nearest_ratio(ttft: float, points: str, state: str) -> None:
    ((measured, found),) = beside(FAR, NEAR, at_ratio("c_two_gpus_full", 0.75, ttft))
    assert found == state
    assert measured == (
        f"{ttft / 100 - 1:+.1%} ± 0.0% at T/P 0.75 (a), one GPU -55.0% ± 0.0% at 0.80 in near (same commit): "
        f"{points} ± 0.0 points"
    )


def spread(rows: list[dict[str, Any]], arm: str, ms: float) -> list[dict[str, Any]]:
    """The same with an arm's four repeats as far apart, two later by so much and two earlier, none drifting."""
    for one in rows:
        if one["arm"] == arm:
            shift = round(1e3 * ms) * (-1 if one["repeat"] % 2 else 1)
            one["requests"] = [
                {**each, "token_us": [us + shift for us in each["token_us"]]} for each in one["requests"]
            ]
    return rows


@pytest.mark.parametrize(
    ("ttft", "apart", "state"),
    [
        (46.0, 1.5, "reached"),  # +1.0 ± 0.9 points
        (49.0, 1.5, "not shown: within two standard errors of the aim"),  # +4.0 ± 0.9
        (60.0, 1.5, "missed"),  # +15.0 ± 0.9
        (46.0, 3.3, "not shown: two GPUs: standard error 4.1%"),  # +1.0 ± 1.9: within five points, of few alike repeats
    ],
)
def test_a_difference_counts_where_both_gains_do_and_by_its_own_error(ttft: float, apart: float, state: str) -> None:
    two = spread(at_ratio("c_two_gpus_full", 0.75, ttft), "auto_full_graphs", apart)
    assert beside(NEAR, two)[0][1] == state


def test_a_difference_of_gains_is_not_shown_where_either_baseline_drifts() -> None:
    def drifting(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for one in rows:
            if one["arm"].startswith("chunk") and one["repeat"] > 1:
                one["requests"] = [{**each, "token_us": [us + 6_000 for us in each["token_us"]]}
                                   for each in one["requests"]]  # fmt: skip
        return rows

    quiet, two = at_ratio("near", 0.8, 45.0), at_ratio("c_two_gpus_full", 0.75, 40.0)
    assert beside(quiet, two)[0][1] == "reached"
    assert "baseline drift 5.8%" in beside(quiet, drifting(at_ratio("c_two_gpus_full", 0.75, 40.0)))[0][1]
    assert "baseline drift 5.8%" in beside(drifting(at_ratio("near", 0.8, 45.0)), two)[0][1]


def one_gpus(*cells: list[dict[str, Any]], commits: str) -> str:
    """The cell that two GPUs, of the last of these recordings, are held against."""
    ((measured, _state),) = beside(*cells, commits=commits)
    return measured.partition("one GPU ")[2].partition(" points")[0]


def test_two_gpus_are_held_against_one_of_the_same_commit_where_one_has_the_same_ratio() -> None:
    two = at_ratio("c_two_gpus_full", 0.75, 46.0)
    nearer, near, later = at_ratio("nearer", 0.75, 40.0), at_ratio("near", 0.8, 45.0), at_ratio("near", 0.76, 47.0)
    assert one_gpus(near, nearer, two, commits="abb").startswith("-60.0% ± 0.0% at 0.75 in nearer (same commit)")
    assert one_gpus(nearer, near, two, commits="abb").startswith("-55.0% ± 0.0% at 0.80 in near (same commit)")
    assert one_gpus(near, nearer, two, commits="aab").startswith("-60.0% ± 0.0% at 0.75 in nearer (a)")
    assert one_gpus(near, later, two, commits="bab").startswith("-55.0% ± 0.0% at 0.80 in near (same commit)"), (
        "the recording of another commit is the later one of the same cell"
    )
    assert one_gpus(near, later, two, commits="aab").startswith("-53.0% ± 0.0% at 0.76 in near (a)"), "the later one"
    assert one_gpus(near, later, two, commits="bbb").startswith("-53.0% ± 0.0% at 0.76 in near (same commit)")
    assert one_gpus(near, two, commits="--").startswith("-55.0% ± 0.0% at 0.80 in near (-)"), "nobody knows"


def test_of_two_gpus_too_the_later_recording_counts() -> None:
    first, second = at_ratio("c_two_gpus_full", 0.75, 46.0), at_ratio("c_two_gpus_full", 0.75, 51.0)
    ((measured, state),) = beside(first, NEAR, second, commits="aab")
    assert measured.startswith("-49.0% ± 0.0% at T/P 0.75 (b), one GPU -55.0% ± 0.0% at 0.80 in near (a): +6.0")
    assert state == "missed"


def test_the_same_ratio_of_another_commit_goes_before_another_ratio_of_the_same() -> None:
    two = at_ratio("c_two_gpus_full", 0.75, 46.0)
    assert one_gpus(NEAR, FAR, two, commits="abb").startswith("-55.0% ± 0.0% at 0.80 in near (a)")
    further = at_ratio("further", 0.4, 45.0)
    assert one_gpus(further, FAR, two, commits="abb").startswith("-70.0% ± 0.0% at 1.20 in far (same commit)")
    assert beside(further, FAR, two, commits="abb")[0][1] == "not shown: T/P is not the same"


def test_two_gpus_are_not_held_against_another_ratio_workload_or_noise() -> None:
    two = at_ratio("c_two_gpus_full", 0.75, 46.0)
    assert beside(FAR, two)[0][1] == "not shown: T/P is not the same"
    assert beside(FAR, at_ratio("near", 0.8, 45.0, output=16), two)[0][1] == "not shown: T/P is not the same"
    assert beside(FAR, at_ratio("near", 0.8, 45.0, arm="fifo_full_graphs"), two)[0][1].startswith("not shown: T/P")
    noisy = at_ratio("c_two_gpus_full", 0.75, 46.0)
    for number, one in enumerate(noisy[4:]):
        one["requests"] = [{**request, "token_us": [1_000 + 46_000 + 9_000 * number, 201_000]}
                           for request in one["requests"]]  # fmt: skip
    assert beside(NEAR, noisy)[0][1].startswith("not shown: two GPUs: standard error")
    assert beside(NEAR, FAR) == beside(two) == [], "only where both kinds are given"
    alone = [[{**row, "cell": {**row["cell"], "concurrency": 1}} for row in rows] for rows in (NEAR, two)]
    assert beside(*alone) == [], "the goal is about four at once"
