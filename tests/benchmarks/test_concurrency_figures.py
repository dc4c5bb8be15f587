"""From lines to figures: what counts, what is shown, which arm is the baseline, and which answers are wrong."""

from __future__ import annotations

import math
from typing import Any

import pytest
from concurrency.figures import figures_of, is_flawed, judge, tolerance_of
from concurrency.report import answers_table, overview, summary, table
from concurrency.rules import Mean, change_of, counted

from recorded_rows import CELL, lines, request, row


def test_the_first_requests_of_a_closed_loop_do_not_count() -> None:
    assert len(counted(row("fifo_first", 0, 50.0))) == 2
    open_loop = row("fifo_first", 0, 50.0, cell={**CELL, "rate_per_s": 3.0})
    assert len(counted(open_loop)) == 3


def test_the_better_chunk_major_arm_is_the_baseline() -> None:
    cell = figures_of(lines(chunk_bounded=[100, 100, 100], chunk_deep=[80, 81], fifo_first=[60, 60]))["c"]
    assert cell.baseline == "chunk_deep"
    assert cell.change("fifo_first").value == pytest.approx(60 / 80.5 - 1)


def test_errors_are_those_of_repeats_not_of_requests() -> None:
    mean = figures_of(lines(chunk_bounded=[100, 110, 90]))["c"].arms["chunk_bounded"].ttft
    assert mean == pytest.approx((100, 10 / math.sqrt(3), 3))


@pytest.mark.parametrize(
    ("mine", "base", "drift", "why_not"),
    [
        (Mean(50, 0.5, 5), Mean(100, 1, 5), 0.01, ""),
        (Mean(50, 2.0, 5), Mean(100, 1, 5), 0.01, "standard error 4.0%"),
        (Mean(50, 0.5, 5), Mean(100, 1, 5), 0.06, "baseline drift 6.0%"),
        (Mean(99, 0.5, 5), Mean(100, 1, 5), 0.01, "within two standard errors"),
        (Mean(50, math.inf, 1), Mean(100, 1, 5), 0.01, "standard error inf%, within two standard errors"),
    ],
)
def test_a_change_is_shown_only_by_a_quiet_run(mine: Mean, base: Mean, drift: float, why_not: str) -> None:
    change = change_of(mine, base, drift)
    assert (change.shown, change.why_not) == (not why_not, why_not)


def test_the_ceiling_comes_from_the_runs_own_transfer_and_prefill() -> None:
    cell = figures_of(lines(chunk_bounded=[100, 100], fifo_first=[60, 60]))["c"]
    assert (cell.alone.transfer_ms, cell.alone.prefill_ms) == (40.0, 10.0), "2 to 42 ms; the step of the ten new tokens"
    assert cell.alone.ceiling == pytest.approx(10 / 50)


def test_the_transfer_is_the_shortest_load_because_others_shared_the_link() -> None:
    shared = row("chunk_bounded", 0, 100.0)
    shared["requests"][1]["landed_us"] = [30_000, 82_000]
    assert figures_of([shared])["c"].alone.transfer_ms == 40.0


def test_a_line_that_came_twice_counts_once() -> None:
    twice = [*lines(fifo_first=[50]), *lines(fifo_first=[70])]
    assert figures_of(twice)["c"].arms["fifo_first"].ttft.value == 70


@pytest.mark.parametrize(
    "more",
    [
        {"counters": {"loads_failed": 1}},
        {"requests": [request(50, local_hit=16)]},
        {"requests": [request(50, cached=0)]},
        {"arm": "recompute"},
    ],
)
def test_a_repeat_whose_hits_are_not_the_pools_is_flawed(more: dict[str, Any]) -> None:
    assert not is_flawed(row("fifo_first", 0, 50.0))
    assert is_flawed(row("fifo_first", 0, 50.0) | more)


def answer(*tokens: tuple[int, float, int, float]) -> dict[str, Any]:
    """(token, its log-probability, the runner-up, its) of each place."""
    return {"tokens": [t for t, *_ in tokens], "top": [[[t, lp], [other, olp]] for t, lp, other, olp in tokens]}


RIGHT = [answer((5, -0.1, 6, -0.15), (7, -0.2, 8, -3.0))]


@pytest.mark.parametrize(
    ("mine", "verdict"),
    [
        (answer((5, -0.11, 6, -0.14), (7, -0.2, 8, -3.0)), (1, 0, 0)),
        (answer((6, -0.12, 5, -0.13), (9, -1.0, 8, -3.0)), (0, 1, 0)),
        (answer((6, -0.12, 9, -0.13), (7, -0.2, 8, -3.0)), (0, 0, 1)),
        (answer((5, -0.1, 6, -0.15), (8, -0.2, 7, -3.0)), (0, 0, 1)),
        (answer((5, -0.5, 6, -0.6), (7, -0.2, 8, -3.0)), (0, 0, 1)),
    ],
    ids=["the same", "a near tie", "a token out of nowhere", "a clear change", "a probability that moved"],
)
def test_rounding_is_told_from_wrong_answers(mine: dict[str, Any], verdict: tuple[int, int, int]) -> None:
    assert judge([mine], [RIGHT], tolerance=0.1)[:3] == verdict


def test_what_agrees_with_one_recomputation_is_right_and_with_none_is_wrong() -> None:
    """Where three tokens tie, two recomputations and an answer can each list two others."""
    company, alone = [answer((5, -1.0, 6, -1.05))], [answer((7, -1.0, 5, -1.08))]
    assert judge([answer((7, -1.02, 8, -1.05))], [company, alone], 0.1)[:3] == (1, 0, 0)
    assert judge([answer((6, -1.0, 5, -1.05))], [alone, company], 0.1)[:3] == (0, 1, 0)
    assert judge([answer((9, -1.0, 8, -1.05))], [company, alone], 0.1)[:3] == (0, 0, 1)


def test_the_tolerance_is_four_times_what_company_alone_changes() -> None:
    def verify(arm: str, *answers: dict[str, Any]) -> dict[str, Any]:
        return {"kind": "verify", "cell": CELL, "arm": arm, "answers": answers}

    moved = answer((5, -0.12, 6, -0.15), (7, -0.2, 8, -3.0))
    rows = [verify("recompute_alone", *RIGHT), verify("recompute", moved), verify("early_read", *RIGHT)]
    assert tolerance_of(rows) == {"c": pytest.approx(0.08)}
    assert "| c | early_read | 1 | 0 | 0 |" in answers_table(rows)


def test_the_table_says_what_is_not_shown_and_why() -> None:
    cell = figures_of(lines(chunk_bounded=[100, 100, 120], fifo_first=[60, 60]))["c"]
    text = table(cell)
    assert "baseline drift 18.8%" in text
    assert "not shown" in text
    assert "ceiling of one request alone 20%" in text


def test_the_overview_marks_what_is_shown() -> None:
    quiet = lines(chunk_bounded=[100, 100.5, 100], fifo_first=[60, 60.3], sync=[99, 101])
    assert "| c | 20% | 0% | 100.2 | baseline | -40%* | -0% |" in overview(figures_of(quiet))


def test_the_summary_holds_the_figures_without_the_requests() -> None:
    made = summary(lines(chunk_bounded=[100, 100], fifo_first=[60, 60]))
    assert made["cells"]["c"]["changes"]["fifo_first"]["ttft"]["value"] == pytest.approx(-0.4)
    assert "requests" not in made["cells"]["c"]


def test_how_long_loads_took_and_releases_were_held_and_what_auto_chose() -> None:
    held = request(50.0, started_us=2_000, landed_us=[3_000, 10_000, 42_000], released_us=11_000)
    rows = [row("auto", repeat, 50.0, requests=[held, held, held], counters={"auto_early": 2}) for repeat in range(2)]
    arm = figures_of(rows)["c"].arms["auto"]
    assert arm.held_ms == pytest.approx(8.0)
    assert arm.loads_ms == pytest.approx((40.0, 40.0, 40.0))
    assert arm.choices == {"early": 4}
    assert arm.slices == {3: 6}
    assert "auto chose early 4; slices a load: 3 in 6" in table(figures_of(rows)["c"])
