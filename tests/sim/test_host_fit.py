"""Overheads are found in the instants of a recorded run that show them, and impossible ones are refused."""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella.sim.host_fit import Fit, fit
from lamella.sim.overheads import MeasuredOverheads, Overheads
from lamella.sim.profiles import load_profile
from lamella.sim.recorded import RecordedRepeat, RecordedRun, read_recorded
from lamella.sim.strategies import Device
from made_up_repeat import write_repeat
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


# ---------------------------------------------------------------- made-up recordings

SHAPES = ((15_360, 768), (4_096, 2_048))
OFFSETS = (-2, -1, 0, 1, 2)
"""Of a part's repeats from its mean, in some unit."""
SPREAD = ("launch_ns", "prefill_launch_ns", "first_token_ns", "after_join_ns", "order_ns", "first_slice_ns")
"""Parts that no other is counted from."""
SHOWN = (*SPREAD, "gate_ns", "pass_ns", "report_ns", "idle_ns", "submit_ns", "load_ns_per_mib", "beside_permille")
POINTS = {"ask_ns": 3, "join_ns": 9}
"""How often a repeat shows what depends on the prompt's length."""
US = 1_000


@st.composite
def overheads(draw: st.DrawFn) -> Overheads:
    def between(least_us: int, most_us: int) -> int:
        return draw(st.integers(least_us, most_us)) * US

    return Overheads(
        pass_ns=between(500, 3_000),
        launch_ns=between(2_000, 6_000),
        prefill_launch_ns=between(2_000, 6_000),
        gate_ns=between(1, 90),
        report_ns=between(300, 900),
        first_token_ns=between(100, 600),
        after_join_ns=between(100, 900),
        idle_ns=between(800, 2_000),
        order_ns=between(200, 900),
        ask_ns=between(500, 1_500),
        ask_ns_per_1000_tokens=between(0, 90),
        join_ns=between(1_000, 4_000),
        join_ns_per_1000_tokens=between(0, 300),
        submit_ns=between(200, 600),
        first_slice_ns=between(50, 400),
        load_ns_per_mib=draw(st.integers(100, 2_000)),
        prefill_rows=tuple((new, draw(st.integers(1_000, 1_300))) for _, new in sorted(SHAPES, key=lambda one: one[1])),
        beside_permille=draw(st.integers(1_050, 1_400)),
    )


def fit_of(repeats: Sequence[RecordedRepeat]) -> Fit:
    return fit(repeats, RecordedRun(True, 8192, 128, "0.26.0", "a machine", tuple(repeats), {}), DEVICE)


def written(true: Overheads, unit_ns: int) -> list[RecordedRepeat]:
    """Repeats in which the parts of `SPREAD` lie around their means by the offsets, in that unit; rows in permille."""
    found = []
    for hit, new in SHAPES:
        for offset in OFFSETS:
            parts: dict[str, Any] = {name: getattr(true, name) + offset * unit_ns for name in SPREAD}
            rows = tuple((tokens, permille + offset * unit_ns // US) for tokens, permille in true.prefill_rows)
            found.append(write_repeat(replace(true, **parts, prefill_rows=rows), DEVICE, hit, new))
    return found


@given(overheads(), st.integers(1, 20))
def test_what_was_written_down_is_found(true: Overheads, unit_us: int) -> None:
    """Each part to the microsecond, whatever stands beside the passes that show it; and how sure it is."""
    found = fit_of(written(true, unit_us * US))
    for name in SHOWN:
        assert getattr(found.overheads, name) == pytest.approx(getattr(true, name), abs=2), name
    for name in ("ask_ns", "join_ns"):
        assert getattr(found.overheads, name) == pytest.approx(getattr(true, name), abs=1_000), name
        per_1000 = f"{name}_per_1000_tokens"
        assert getattr(found.overheads, per_1000) == pytest.approx(getattr(true, per_1000), abs=100), name
    assert found.overheads.prefill_rows == tuple(
        (new, pytest.approx(permille, abs=1)) for new, permille in true.prefill_rows
    )
    offsets = [offset * unit_us * US for _ in SHAPES for offset in OFFSETS]
    error_ns = statistics.stdev(offsets) / math.sqrt(len(offsets))
    for name in SPREAD:
        assert found.errors[name] == pytest.approx(error_ns, abs=2), name
    for new, _ in true.prefill_rows:
        error = unit_us * statistics.stdev(OFFSETS) / math.sqrt(len(OFFSETS))
        assert found.errors[f"prefill_rows[{new}]"] == pytest.approx(error, abs=0.6)
    assert found.errors["pass_ns"] == 0
    assert found.overheads.scatter_permille == 0
    assert found.overheads.drift_permille == round(1000 * statistics.stdev(offsets) / true.launch_ns)


@given(overheads(), st.integers(1, 60), st.integers(1, 200))
def test_a_time_never_falls_with_the_length_of_a_prompt(true: Overheads, ask_us: int, join_us: int) -> None:
    """Where shorter prompts took longer, the mean of all is what is known."""
    repeats: list[RecordedRepeat] = []
    values: dict[str, list[int]] = {name: [] for name in POINTS}
    for hit, new in SHAPES:
        shorter = (sum(SHAPES[0]) - hit - new) // 1000 * US
        falling = replace(
            true,
            ask_ns=true.ask_ns + ask_us * shorter,
            ask_ns_per_1000_tokens=0,
            join_ns=true.join_ns + join_us * shorter,
            join_ns_per_1000_tokens=0,
        )
        repeats += [write_repeat(falling, DEVICE, hit, new) for _ in OFFSETS]
        for name in POINTS:
            values[name].append(getattr(falling, name))
    found = fit_of(repeats)
    for name in values:
        assert getattr(found.overheads, f"{name}_per_1000_tokens") == 0
        assert getattr(found.overheads, name) == pytest.approx(statistics.fmean(values[name]), abs=2)
        points = [one for one in values[name] for _ in range(POINTS[name] * len(OFFSETS))]
        assert found.errors[name] == pytest.approx(statistics.stdev(points) / math.sqrt(len(points)), abs=2)


@given(overheads())
def test_an_odd_repeat_does_not_count(true: Overheads) -> None:
    odd = replace(true, pass_ns=30 * true.pass_ns, order_ns=30 * true.order_ns)
    found = fit_of([*written(true, 0), write_repeat(odd, DEVICE, *SHAPES[0])])
    assert (found.overheads.pass_ns, found.overheads.order_ns) == (true.pass_ns, true.order_ns)


@given(overheads())
def test_what_fewer_than_three_repeats_show_is_not_known(true: Overheads) -> None:
    lines = {f"{name}{slope}" for name in ("ask_ns", "join_ns") for slope in ("", "_per_1000_tokens")}
    assert fit_of(written(true, 0)[:2]).shown == lines | {"scatter_permille"}, "lines count points, not repeats"
