"""Overheads are found in the instants of a recorded run that show them, and impossible ones are refused."""

import json
from dataclasses import replace
from typing import Any

import pytest

from lamella.sim.host_fit import fit
from lamella.sim.overheads import MeasuredOverheads, Overheads
from lamella.sim.profiles import load_profile
from lamella.sim.recorded import read_recorded
from lamella.sim.strategies import Device
from recorded_run import ARMS, CELLS, TRUE, cell, engine_row, recorded_lines, repeat_row, request_row

DEVICE = Device(load_profile())


def test_each_part_is_found_in_the_instants_that_show_it() -> None:
    """Within a few standard errors, or 3% where a part is not told apart from a neighbour to the last."""
    run = read_recorded(recorded_lines(CELLS[:3], DEVICE, TRUE), "a run")
    found = fit([repeat for repeat in run.repeats if repeat.settings is not None], run, DEVICE)
    assert found.repeats == 3 * 3 * (len(ARMS) - 1)
    for name in TRUE.names():
        true, got = getattr(TRUE, name), getattr(found.overheads, name)
        if name == "prefill_rows":
            assert [tokens for tokens, _ in got] == [tokens for tokens, _ in true]
            assert [permille for _, permille in got] == pytest.approx([permille for _, permille in true], rel=0.02)
        else:
            assert got == pytest.approx(true, rel=0.2, abs=60_000 if name.endswith("_ns") else 25), name


def test_a_part_that_nothing_shows_stays_at_nothing() -> None:
    run = read_recorded(recorded_lines(CELLS[:1], DEVICE, TRUE, arms=("recompute",)), "a run")
    assert fit(run.repeats, run, DEVICE).overheads.ask_ns == 0
    bare = read_recorded(
        map(json.dumps, (engine_row(), repeat_row(cell("x", 1), "fifo_first", 0, [request_row(9)] * 3))), "x"
    )
    assert fit(bare.repeats, bare, DEVICE).overheads == Overheads()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"join_ns": -1}, "join_ns must be at least 0, got -1"),
        ({"idle_ns": 0}, "idle_ns must be at least 1, got 0"),
        ({"beside_permille": 99}, "beside_permille must be at least 100, got 99"),
        ({"beside_permille": 10**9}, "beside_permille must be at most 10,000, got 1000000000"),
        ({"drift_permille": 10**9}, "drift_permille must be at most 10,000, got 1000000000"),
        ({"pass_ns": 3600 * 10**9}, "pass_ns must be at most 10,000,000,000, got 3600000000000"),
        ({"load_ns_per_mib": 10**11}, "load_ns_per_mib must be at most"),
        ({"captured_tokens": 10**9}, "captured_tokens must be at most 10,000,000, got 1000000000"),
        ({"prefill_rows": ((0, 1000),)}, "tokens of prefill_rows must be at least 1, got 0"),
        ({"prefill_rows": ((768, 99),)}, "permille of prefill_rows must be at least 100, got 99"),
        ({"prefill_rows": ((768, 10**9),)}, "permille of prefill_rows must be at most 10,000, got 1000000000"),
        ({"prefill_rows": ((768, 1000), (768, 1100))}, "are for different numbers of new tokens"),
    ],
)
def test_impossible_overheads_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(TRUE, **change)


@pytest.mark.parametrize("part", [name for name in Overheads.names() if name != "prefill_rows"])
@pytest.mark.parametrize("value", [-1, 10**13, 10**40])
def test_no_part_may_be_negative_or_beyond_reason(part: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"{part} must be at (least|most) [\d,]+, got {value}"):
        replace(TRUE, **{part: value})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"errors": {"pass_ns": -1}}, "the error of pass_ns must be at least 0, got -1"),
        ({"overheads": replace(TRUE, idle_ns=1)}, "idle_ns must be at least 10,000, got 1"),
    ],
)
def test_what_nobody_can_have_measured_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(MeasuredOverheads("an engine", "a run", TRUE, {}), **change)
