"""Which cells are fitted on and which are judged, and what is known of the commits that recorded them."""

import json
from dataclasses import replace

import pytest

from lamella.sim.overheads import MeasuredOverheads
from lamella.sim.profiles import load_profile
from lamella.sim.recorded import read_recorded
from lamella.sim.settings import StepsWait
from lamella.sim.splits import Known, Split
from lamella.sim.strategies import Device
from lamella.sim.validate import validate
from recorded_run import ARMS, CELLS, TRUE, cell, engine_row, lines_of, recorded_lines, repeat_row, request_row

DEVICE = Device(load_profile())
KNOWN = MeasuredOverheads("an engine", "made up", TRUE, {})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "a split is JSON"),
        ("9" * 5_000, "a split is JSON"),
        ("[]", "an object with the lists"),
        ('{"train": []}', "an object with the lists"),
        ('{"calibrate": "a", "test": ["b"]}', "calibrate must be a list"),
        ('{"calibrate": ["a"], "test": ["a"]}', "a in both lists: a cell that was fitted on proves nothing"),
        ('{"calibrate": ["a"], "test": []}', "nothing would be judged"),
        ('{"test": ["a"], "commits": []}', "commits must be an object"),
        ('{"test": ["a"], "commits": {"c": {"pace": 1}}}', "commit c: known are steps_wait, slow_lane, other_auto"),
        (
            '{"test": ["a"], "commits": {"c": {"steps_wait": "all"}}}',
            "steps_wait must be one of batch, every, got 'all'",
        ),
        ('{"test": ["a"], "commits": {"c": {"slow_lane": 1}}}', "slow_lane must be true or false, got 1"),
        ('{"test": ["a"], "commits": {"c": {"other_auto": 0}}}', "other_auto must be true or false, got 0"),
        ('{"test": ["a"], "commits": {"c": {"held_out": "yes"}}}', "held_out must be true or false, got 'yes'"),
        (
            '{"test": ["a"], "commits": {"c": {"measured": "pass_ns"}}}',
            "measured must be a list of parts of the overhead",
        ),
        ('{"test": ["a"], "commits": {"c": {"measured": ["speed"]}}}', "such as pass_ns; got .'speed'"),
    ],
)
def test_a_split_that_proves_nothing_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Split.parse(text)


def test_cells_in_neither_list_are_said_and_none_to_judge_by_is_refused() -> None:
    run = read_recorded(recorded_lines(CELLS[:2], DEVICE, TRUE, repeats=1), "a run")
    said = validate(run, DEVICE, Split((), ("b",)), KNOWN)
    assert said.left_out == {"cell a: in neither list": len(ARMS)}
    with pytest.raises(ValueError, match="no cell of the list test was recorded; recorded are a, b"):
        validate(run, DEVICE, Split(("a",), ("z",)), TRUE)


def slow_lines(lane_us: int, commit: str) -> list[str]:
    """An arm of 1 GiB a load, one after another, whose lane took so long for each."""
    of = {"asked_us": 0, "ordered_us": 0, "started_us": 0, "landed_us": [lane_us], "bytes": 1 << 30}
    loads = [{**request_row(90_000, **of), "at_us": 100_000 * n} for n in range(3)]
    rows = [repeat_row(cell("x", 1, rate_per_s=1.0), "fifo_first", n, loads) for n in range(2)]
    return lines_of({**engine_row(), "commit": commit}, *rows)


@pytest.mark.parametrize(
    ("lane_us", "commit", "spoiled"), [(20_000, "old", False), (60_000, "old", True), (60_000, "new", False)]
)
def test_an_arm_is_spoiled_by_a_known_fault_that_its_own_lane_shows(lane_us: int, commit: str, spoiled: bool) -> None:
    """1 GiB takes 19.5 ms; the rule knows the commit and the rate, and not the error."""
    split = Split((), ("x",), {"old": Known(slow_lane=True)})
    found = validate(read_recorded(slow_lines(lane_us, commit), "x"), DEVICE, split, KNOWN).test
    (arm,) = found.arms
    assert arm.spoiled == spoiled
    assert (len(found.errors), len(found.all_errors), found.spoiled) == (not spoiled, 1, spoiled)


def test_an_auto_of_other_rules_is_predicted_and_not_judged_by() -> None:
    """Only where the world chooses: first-layer release is what it was."""
    rows = [
        repeat_row(cell("x", 1), arm, n, [request_row(90_000)] * 3) for n in range(2) for arm in ("fifo_first", "auto")
    ]
    lines = lines_of({**engine_row(), "commit": "old"}, *rows)
    for other in (False, True):
        split = Split((), ("x",), {"old": Known(other_auto=other)})
        found = validate(read_recorded(lines, "x"), DEVICE, split, KNOWN)
        assert {arm.arm for arm in found.test.arms if arm.other_auto} == ({"auto"} if other else set())
        assert (len(found.test.errors), len(found.test.all_errors)) == (2 - other, 2)
        assert any("its auto went by other rules" in line for line in found.lines()) == other


def test_what_steps_wait_for_is_known_by_commit() -> None:
    split = Split.parse('{"test": ["x"], "commits": {"old": {"steps_wait": "every"}}}')
    for commit, way in (("old", StepsWait.EVERY), ("new", StepsWait.BATCH)):
        run = split.tell(read_recorded(slow_lines(20_000, commit), "x"))
        assert {repeat.steps_wait for repeat in run.repeats} == {way}


def test_each_engine_is_predicted_with_what_its_own_cells_show() -> None:
    slow = replace(TRUE, launch_ns=2 * TRUE.launch_ns, prefill_launch_ns=2 * TRUE.prefill_launch_ns)
    lines = [
        json.dumps({**json.loads(line), "commit": commit})
        for commit, overheads in (("quick", TRUE), ("slow", slow))
        for line in recorded_lines([cell(f"{commit} a", 3), cell(f"{commit} d", 1)], DEVICE, overheads)
    ]
    split = Split(("quick a", "slow a"), ("quick d", "slow d"))
    own, mixed = (validate(read_recorded(lines, "x"), DEVICE, split, together=both) for both in (False, True))
    assert set(own.engines) == {"quick", "slow"}
    assert not mixed.engines
    assert own.test.error_at(1.0) < 0.06 < mixed.test.error_at(1.0)


def test_a_held_out_commit_is_judged_by_all_its_cells_and_fitted_to_by_none() -> None:
    """Not even by those that overheads of other engines are measured in."""
    slow = replace(TRUE, launch_ns=2 * TRUE.launch_ns, prefill_launch_ns=2 * TRUE.prefill_launch_ns)
    lines = [
        json.dumps({**json.loads(line), "commit": commit})
        for commit, overheads in (("old", TRUE), ("new", slow))
        for line in recorded_lines([cell("a", 3), cell("d", 1)], DEVICE, overheads)
    ]
    run = read_recorded(lines, "x")
    old, new = (replace(run, repeats=tuple(one for one in run.repeats if one.commit == of)) for of in ("old", "new"))
    split = Split.parse('{"calibrate": ["a"], "test": ["d"], "commits": {"new": {"held_out": true}}}')
    both, alone = validate(run, DEVICE, split), validate(old, DEVICE, split)
    assert both.overheads == alone.overheads
    assert set(both.engines) == {"old"}
    assert both.calibrate == alone.calibrate
    assert {(arm.cell, arm.commit) for arm in both.test.arms} == {("d", "old"), ("d", "new"), ("a", "new")}
    assert not validate(new, DEVICE, split, KNOWN).calibrate.arms


def test_the_same_cell_of_two_commits_is_two() -> None:
    """Neither their times nor what is known of them are averaged; effects and advice are of one engine each."""
    lines = []
    for commit, ttft_us in (("old", 100_000), ("new", 50_000)):
        rows = [
            repeat_row(cell("x", 1), arm, n, [request_row(ttft_us * slower)] * 3)
            for n in range(2)
            for arm, slower in (("chunk_bounded", 2), ("auto", 1))
        ]
        lines += lines_of({**engine_row(), "commit": commit}, *rows)
    split = Split((), ("x",), {"old": Known(other_auto=True)})
    found = validate(read_recorded(lines, "x"), DEVICE, split, KNOWN).test
    assert [(arm.commit, arm.arm, arm.measured.ttft_ns, arm.other_auto) for arm in found.arms] == [
        ("old", "chunk_bounded", 200_000_000, False),
        ("old", "auto", 100_000_000, True),
        ("new", "chunk_bounded", 100_000_000, False),
        ("new", "auto", 50_000_000, False),
    ]
    assert [sign.commit for sign in found.signs] == ["new"]
    assert [advice.commit for advice in found.advice] == ["old", "new"]
