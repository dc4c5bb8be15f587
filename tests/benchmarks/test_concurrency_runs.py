"""Several recordings of one goal's cell together, and what counts of a claim in points."""

from __future__ import annotations

import math
from typing import Any

import pytest
from concurrency.figures import figures_of
from concurrency.goals import goals
from concurrency.rules import Mean, judged
from concurrency.several_runs import TODAYS, over_runs, weighed, with_runs
from hypothesis import example, given
from hypothesis import strategies as st

from .test_concurrency_goals import ONE, run, spread

VALUES = st.floats(-1, 1, allow_nan=False)
ERRORS = st.floats(1e-4, 0.5)
RUN = st.builds(Mean, VALUES, ERRORS, st.just(1))


@given(RUN)
def test_one_run_alone_is_itself(one: Mean) -> None:
    together = weighed([one])
    assert (together.value, together.error) == (pytest.approx(one.value), pytest.approx(one.error))


@given(RUN, st.integers(2, 20))
def test_equal_runs_shrink_the_error_by_the_root_of_their_number(one: Mean, number: int) -> None:
    together = weighed([one] * number)
    assert (together.value, together.repeats) == (pytest.approx(one.value), number)
    assert together.error == pytest.approx(one.error / math.sqrt(number))


@given(VALUES, ERRORS, st.floats(0, 10), st.integers(1, 10))
@example(0.0, 0.1, 2.0, 1)
def test_runs_that_disagree_widen_the_error_by_as_much(middle: float, error: float, apart: float, pairs: int) -> None:
    """Each pair lies so many errors on either side of the middle, so that chi² is the number times the square."""
    runs = [Mean(middle + sign * apart * error, error, 1) for sign in (-1, 1)] * pairs
    agreed = error / math.sqrt(len(runs))
    widened = max(1.0, apart * math.sqrt(len(runs) / (len(runs) - 1)))
    assert weighed(runs).error == pytest.approx(agreed * widened)


@given(st.lists(RUN, min_size=1, max_size=8), st.randoms())
def test_the_mean_lies_among_the_runs_whatever_their_order(runs: list[Mean], chance: Any) -> None:
    together = weighed(runs)
    low, high = min(one.value for one in runs), max(one.value for one in runs)
    assert low - 1e-9 <= together.value <= high + 1e-9
    shuffled = list(runs)
    chance.shuffle(shuffled)
    assert weighed(shuffled)[:2] == pytest.approx(together[:2])


def test_a_run_twice_as_sure_weighs_four_times_as_much() -> None:
    together = weighed([Mean(-0.60, 0.01, 1), Mean(-0.61, 0.02, 1)])
    assert together.value == pytest.approx(-0.602)
    assert together.error == pytest.approx(0.02 / math.sqrt(5)), "they agree"


@pytest.mark.parametrize("error", [0.0, -0.1, math.inf, math.nan])
def test_a_run_without_an_error_is_refused(error: float) -> None:
    with pytest.raises(ValueError, match=f"must be above 0 and finite, got {error}"):
        weighed([Mean(0.0, 0.1, 1), Mean(0.0, error, 1)])
    with pytest.raises(ValueError, match="at least one run"):
        weighed([])


@pytest.mark.parametrize(
    ("value", "error", "drifts", "state"),
    [
        (-0.4901, 0.02, (), "reached"),
        (-0.49, 0.021, (), "not shown: standard error 2.1 points, within two standard errors of the aim"),
        (-0.60, 0.021, (), "not shown: standard error 2.1 points"),
        (-0.48, 0.02, (), "not shown: within two standard errors of the aim"),
        (-0.42, 0.02, (), "not shown: within two standard errors of the aim"),
        (-0.40, 0.02, (), "missed"),
        (-0.60, 0.01, (0.05, 0.05), "reached"),
        (-0.60, 0.01, (0.02, 0.051), "not shown: baseline drift 5.1%"),
        (-0.45, 0.0, (), "reached"),
    ],
)
def test_a_claim_in_points_counts_by_its_own_error(
    value: float, error: float, drifts: tuple[float, ...], state: str
) -> None:
    assert judged(Mean(value, error, 1), -0.45, drifts) == state


# ---- of recordings

FIRST, SECOND, THIRD, *_LATER = sorted(TODAYS)


def at(ttft: float, apart: float = 1.0, **more: Any) -> dict[str, Any]:
    return figures_of(spread(run(ONE, {"chunk_bounded": 100, "auto": ttft}, **more), "auto", apart))


def test_every_run_of_todays_auto_counts_against_its_own_baseline() -> None:
    line = over_runs([(FIRST, at(50.0)), ("0000000", at(90.0)), (SECOND, at(52.0))])["C = 1, new = 768, auto"]
    assert line.what == "C = 1, new = 768, auto, over 2 runs"
    assert line.measured.startswith("-49.0% ± 1.0% of -50.0% ± 0.6% (")
    assert line.measured.endswith(f"-48.0% ± 0.6% ({SECOND})")
    assert line.state == "reached"
    slower = {ONE: figures_of(run(ONE, {"chunk_bounded": 200, "auto": 100}))[ONE]}
    assert "-50.0%" in over_runs([(FIRST, at(50.0)), (SECOND, slower)])["C = 1, new = 768, auto"].measured.split("(")[1]


def test_a_cell_again_in_which_some_arms_switch_one_setting_is_a_run_of_it() -> None:
    def full(ttft: float, cell: str) -> dict[str, Any]:
        rows = run(f"{ONE}_{cell}", {"chunk_full_graphs": 100, "auto_full_graphs": ttft})
        return figures_of(spread(rows, "auto_full_graphs", 1.0))

    both = over_runs([(FIRST, full(50.0, "full")), (SECOND, full(52.0, "before_batch_full"))])
    assert both["C = 1, new = 768, auto_full_graphs"].measured.endswith(f"-48.0% ± 0.6% ({SECOND})")
    assert over_runs([(FIRST, full(50.0, "full")), (SECOND, full(52.0, "bystanders_full"))]) == {}
    again = over_runs([(FIRST, full(50.0, "full")), (SECOND, full(52.0, "in_flight_both"))])
    assert again["C = 1, new = 768, auto_full_graphs"].measured == both["C = 1, new = 768, auto_full_graphs"].measured


def test_a_cell_of_other_graphs_too_is_a_run_of_each_arm_that_it_has() -> None:
    def beside(full: float, both: float) -> dict[str, Any]:
        arms = {"chunk_full_graphs": 100, "auto_full_graphs": full, "chunk_both_graphs": 90, "auto_both_graphs": both}
        rows = run(f"{ONE}_both", arms)
        return figures_of(spread(spread(rows, "auto_full_graphs", 1.0), "auto_both_graphs", 1.0))

    alone = figures_of(spread(run(f"{ONE}_full", {"chunk_full_graphs": 100, "auto_full_graphs": 50}),
                              "auto_full_graphs", 1.0))  # fmt: skip
    lines = over_runs([(FIRST, alone), (SECOND, beside(52.0, 45.0)), (THIRD, beside(52.0, 36.0))])
    assert set(lines) == {"C = 1, new = 768, auto_full_graphs", "C = 1, new = 768, auto_both_graphs"}
    full, both = (lines[f"C = 1, new = 768, auto_{kind}_graphs"].measured for kind in ("full", "both"))
    assert f"-50.0% ± 0.6% ({FIRST}), -48.0% ± 0.6% ({SECOND}), -48.0% ± 0.6% ({THIRD})" in full
    assert both.startswith("-55.0% ± 5.0% of -50.0% ")


def test_one_run_one_repeat_or_another_auto_says_nothing_of_several() -> None:
    once = figures_of([row for row in run(ONE, {"chunk_bounded": 100, "auto": 50}) if row["repeat"] == 0])
    for runs in ([(FIRST, at(50.0))], [(FIRST, at(50.0)), (SECOND, once)], [(FIRST, at(50.0)), ("4b1f1f9", at(50.0))]):
        assert over_runs(runs) == {}


def test_runs_that_say_different_things_do_not_reach_a_goal_together() -> None:
    line = over_runs([(FIRST, at(40.0)), (SECOND, at(60.0))])["C = 1, new = 768, auto"]
    assert line.state.startswith("not shown: standard error 10.0 points")


def test_a_baseline_that_drifts_is_told_beside_its_run() -> None:
    rows = run(ONE, {"chunk_bounded": 100, "auto": 50})
    for one in rows[2:4]:
        one["requests"] = [{**each, "token_us": [us + 6_000 for us in each["token_us"]]} for each in one["requests"]]
    measured = over_runs([(FIRST, at(50.0)), (SECOND, figures_of(rows))])["C = 1, new = 768, auto"].measured
    assert f"({FIRST}), " in measured
    assert f"({SECOND}, baseline drift 5.8%)" in measured


def test_bystanders_count_where_throughput_is_the_same() -> None:
    def beside(tpot_us: int, wall_ms: float = 100) -> dict[str, Any]:
        rows = run("a", {"chunk_bounded": 50.0, "auto": 50.0}, bystanders=2)
        for one in rows:
            mine = one["arm"] == "auto"
            one["bystander_us"] = [[n * ((tpot_us if mine else 10_000) + one["repeat"]) for n in range(9)]]
            one["wall_us"] = round(1e3 * (wall_ms if mine else 100))
        return figures_of(rows)

    ((what, line),) = over_runs([(FIRST, beside(10_200)), (SECOND, beside(10_300))]).items()
    assert (what, line.state) == ("bystanders' TPOT, auto", "reached")
    assert over_runs([(FIRST, beside(10_200)), (SECOND, beside(10_300, wall_ms=110))]) == {}


def test_a_goals_line_of_several_runs_stands_behind_that_of_one() -> None:
    rows = run(ONE, {"chunk_bounded": 100, "auto": 50})
    over = over_runs([(FIRST, at(50.0)), (SECOND, at(52.0))])
    lines = [line.what for line in with_runs(goals(figures_of(rows), {}, rows), over)]
    assert lines[:2] == ["C = 1, new = 768, auto", "C = 1, new = 768, auto, over 2 runs"]
    assert len(lines) == len(goals(figures_of(rows), {}, rows)) + 1
