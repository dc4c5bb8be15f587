"""How predicted arms are judged by recorded ones: errors, the side of zero, and what following the advice costs."""

import math

import pytest

from lamella.sim.checks import ArmCheck, Measured, Predicted, group_arms, percentiles
from lamella.sim.recorded import read_recorded
from lamella.sim.validate import judge
from recorded_run import cell, engine_row, lines_of, repeat_row, request_row


def check(of: str, arm: str, measured: float, predicted: float, error: float = 0.0) -> ArmCheck:
    times = (round(measured),) * 3
    return ArmCheck(of, arm, Measured(measured, error, 0, times, 5), Predicted(predicted, 0, (round(predicted),) * 3))


def test_a_sign_counts_where_the_run_shows_an_effect() -> None:
    base = check("x", "chunk_bounded", 100, 100, 1)
    judged = judge([base, check("x", "fifo_first", 80, 110, 1), check("x", "interleaved_first", 101, 90, 1)])
    by_arm = {sign.arm: sign for sign in judged.signs}
    assert (by_arm["fifo_first"].shown, by_arm["fifo_first"].right) == (True, False)
    assert not by_arm["interleaved_first"].shown, "1% with standard errors of 1% is no effect"
    assert (len(judged.shown), judged.right_signs) == (1, 0)


def test_effects_are_against_the_better_form_of_chunk_major() -> None:
    judged = judge(
        [check("x", "chunk_bounded", 100, 100), check("x", "chunk_deep", 70, 70), check("x", "fifo_first", 80, 60)]
    )
    (sign,) = judged.signs
    assert sign.recorded == pytest.approx(80 / 70 - 1)
    assert not sign.right


@pytest.mark.parametrize("error", [11.0, math.inf])
def test_an_arm_that_the_recording_is_not_sure_of_is_shown_and_not_judged_by(error: float) -> None:
    arms = [check("x", "chunk_bounded", 100, 103), check("x", "fifo_first", 50, 100, error)]
    judged = judge(arms)
    assert judged.arms == tuple(arms)
    assert judged.errors == [pytest.approx(0.03)]
    assert judged.signs == ()
    assert judged.advice[0].best == "chunk_bounded"


def test_regret_is_what_the_advice_costs_as_recorded() -> None:
    judged = judge(
        [check("x", "chunk_bounded", 100, 100), check("x", "fifo_first", 90, 95), check("x", "fifo_jit", 80, 97)]
    )
    assert judged.advice == (("x", "fifo_first", "fifo_jit", pytest.approx(90 / 80 - 1), ""),)


def test_arms_that_are_one_setting_to_the_world_are_advised_as_one() -> None:
    arms = [check("x", "chunk_bounded", 100, 100), check("x", "fifo_first", 80, 70), check("x", "fifo_value", 90, 70)]
    judged = judge([arms[0], *(one._replace(setting="fifo/1/first") for one in arms[1:])])
    assert judged.advice == (("x", "fifo/1/first", "fifo/1/first", 0.0, ""),)


def test_recomputing_is_compared_and_not_recommended() -> None:
    judged = judge([check("x", "chunk_bounded", 100, 100), check("x", "recompute", 50, 50)])
    assert judged.advice[0].recommended == "chunk_bounded"
    assert judged.signs == ()


def test_one_repeat_has_no_standard_error_and_shows_nothing() -> None:
    run = read_recorded(lines_of(engine_row(), repeat_row(cell("x", 1), "fifo_first", 0, [request_row(9)] * 3)), "one")
    arms, _ = group_arms(run.repeats)
    assert math.isinf(arms["x", ""]["fifo_first"].measured.error_ns)


def test_the_standard_error_is_that_of_the_mean_of_the_repeats() -> None:
    rows = [repeat_row(cell("x", 1), "fifo_first", n, [request_row(ms)] * 3) for n, ms in enumerate((10, 20))]
    arms, _ = group_arms(read_recorded(lines_of(engine_row(), *rows), "two").repeats)
    measured = arms["x", ""]["fifo_first"].measured
    assert measured.error_ns / measured.ttft_ns == pytest.approx(5 / 15)


def test_at_most_a_tenth_of_the_arms_exceeds_the_error_at_p90() -> None:
    judged = judge([check("x", f"arm{n}", 100, 100 + n) for n in range(1, 6)])
    assert (judged.error_at(0.5), judged.error_at(0.9)) == (pytest.approx(0.03), pytest.approx(0.05))


def test_percentiles_are_times_that_occurred() -> None:
    assert percentiles(list(range(1, 101))) == (50, 90, 99)
    assert percentiles([7]) == (7, 7, 7)


def test_arms_with_full_graphs_are_compared_with_chunk_major_that_has_them() -> None:
    full = [check("x", "chunk_full_graphs", 80, 80), check("x", "fifo_full_graphs", 90, 90)]
    judged = judge([check("x", "chunk_bounded", 100, 100), *(one._replace(graphs="full") for one in full)])
    (sign,) = judged.signs
    assert sign.recorded == pytest.approx(90 / 80 - 1)


def test_cells_with_full_graphs_alone_have_advice_against_their_own_chunk_major() -> None:
    full = {"chunk_full_graphs": 100, "chunk_deep_full_graphs": 80, "fifo_full_graphs": 90, "recompute_full_graphs": 9}
    judged = judge([check("x", arm, time, time)._replace(graphs="full") for arm, time in full.items()])
    (sign,) = judged.signs
    assert sign.recorded == pytest.approx(90 / 80 - 1)
    assert judged.advice == (("x", "chunk_deep_full_graphs", "chunk_deep_full_graphs", 0.0, ""),)


def test_arms_whose_prefills_replay_graphs_are_compared_with_chunk_major_that_does() -> None:
    """And the advice says which graphs: it chooses from all arms of the cell."""
    times = {"chunk": 100, "fifo": 90}
    full = [check("x", f"{arm}_full_graphs", ms, ms)._replace(graphs="full") for arm, ms in times.items()]
    both = [check("x", f"{arm}_both_graphs", ms / 2, ms / 2)._replace(graphs="both") for arm, ms in times.items()]
    judged = judge([*full, *both])
    assert [(sign.arm, sign.recorded) for sign in judged.signs] == [
        ("fifo_full_graphs", pytest.approx(-0.1)),
        ("fifo_both_graphs", pytest.approx(-0.1)),
    ]
    assert judged.advice[0].recommended == "fifo_both_graphs"
