"""The model against recorded runs: a run that the world itself made is predicted, and every figure can be wrong."""

import copy
import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from lamella.sim.checks import ArmCheck, Measured, Predicted, group_arms, percentiles
from lamella.sim.overheads import MeasuredOverheads, Overheads
from lamella.sim.profiles import load_profile
from lamella.sim.recorded import read_recorded
from lamella.sim.recorded_arms import InputsWait, model_of, predict
from lamella.sim.settings import StepsWait
from lamella.sim.splits import Known, Split
from lamella.sim.strategies import AUTO, CHUNK_MAJOR, RECOMPUTE, Device, parse_strategy
from lamella.sim.validate import Validation, judge, validate
from recorded_run import ARMS, CELLS, TRUE, cell, engine_row, recorded_lines, repeat_row, request_row

DEVICE = Device(load_profile())
KNOWN = MeasuredOverheads("an engine", "made up", TRUE, {})
SPLIT = Split(("a", "b", "c"), ("d", "e", "f"))


def lines_of(*rows: dict[str, Any]) -> list[str]:
    return [json.dumps(row) for row in rows]


@pytest.fixture(scope="module")
def validation() -> Validation:
    return validate(read_recorded(recorded_lines(CELLS, DEVICE, TRUE), "a run"), DEVICE, SPLIT)


def test_overheads_fitted_on_some_cells_predict_the_others(validation: Validation) -> None:
    assert validation.fitted
    assert validation.test.error_at(0.5) <= 0.02
    assert validation.test.error_at(1.0) <= 0.06
    assert validation.test.right_signs == len(validation.test.shown) >= 3
    assert validation.test.largest_regret <= 0.03


def test_without_the_overheads_the_same_run_is_not_predicted(validation: Validation) -> None:
    run = read_recorded(recorded_lines(CELLS, DEVICE, TRUE), "a run")
    bare = validate(run, DEVICE, SPLIT, MeasuredOverheads("none", "nothing", Overheads(), {}))
    assert not bare.fitted
    assert bare.test.error_at(0.5) > 5 * validation.test.error_at(0.5)


def test_true_overheads_without_scatter_predict_a_run_to_the_microsecond() -> None:
    still = replace(TRUE, scatter_permille=0, drift_permille=0)
    run = read_recorded(recorded_lines(CELLS[:2], DEVICE, still, repeats=2), "a run")
    exact = validate(run, DEVICE, Split((), ("a", "b")), replace(KNOWN, overheads=still))
    assert exact.test.errors[-1] < 1e-4
    for arm in exact.test.arms:
        assert (arm.measured.parts is None) == (arm.predicted.parts is None)
        for mine, theirs in zip((arm.measured.parts or ())[1:], (arm.predicted.parts or ())[1:], strict=True):
            assert mine == pytest.approx(theirs, abs=2_000)


def test_the_document_is_json_and_the_last_words_are_the_figures_that_decide(validation: Validation) -> None:
    document = json.loads(json.dumps(validation.document(), allow_nan=False))
    assert document["kind"] == "lamella.validate"
    assert [arm["cell"] for arm in document["test"]["arms"]] == [name for name in "def" for _ in ARMS]
    said = validation.lines()
    assert any(line.startswith("Held out: error of the mean time to first token") for line in said)
    assert len(said) == len(CELLS) * len(ARMS) + 1


# ---------------------------------------------------------------- judging


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


# ---------------------------------------------------------------- what is recorded


def test_the_requests_that_begin_together_do_not_count() -> None:
    rows = [request_row(n) for n in (900, 900, 10, 20)]
    run = read_recorded(lines_of(repeat_row(cell("x", 2, requests=4), "fifo_first", 0, rows)), "x")
    assert [one.ttft_ns for one in run.repeats[0].counted] == [10_000, 20_000]
    of = cell("x", 2, rate_per_s=9.0)
    open_loop = read_recorded(lines_of(repeat_row(of, "fifo_first", 0, rows)), "x").repeats[0]
    assert len(open_loop.counted) == 4


@pytest.mark.parametrize(
    ("arm", "settings", "found"),
    [
        ("chunk_deep", {"layers_per_slice": 0, "release": "whole", "in_flight_mb": 8192}, CHUNK_MAJOR),
        ("recompute", None, RECOMPUTE),
        ("fifo_first", {"order": "fifo", "release": "first"}, parse_strategy("fifo/2/first")),
        ("fifo_jit", {"layers_per_slice": 8, "release": "jit:step"}, parse_strategy("fifo/8/jit:step")),
        ("sync", {"use_layerwise": True}, parse_strategy("fifo/2/first")),
        ("auto", {"layers_per_slice": "auto"}, AUTO),
        ("peer_simple", {}, "another connector"),
        ("early_read", {"order": "fifo", "release": "first"}, "does not wait"),
    ],
)
def test_an_arm_is_run_as_it_was_set_or_left_out_with_the_reason(
    arm: str, settings: dict[str, Any] | None, found: object
) -> None:
    row = repeat_row(cell("x", 1, width=2), "fifo_first", 0, [request_row(9)] * 3)
    (repeat,) = read_recorded(lines_of({**row, "arm": arm, "settings": settings}), "x").repeats
    model = model_of(repeat)
    if isinstance(model, str):
        assert isinstance(found, str)
        assert found in model
    else:
        assert model.strategy == found
        assert model.inputs_behind_bytes == (0 if arm == "recompute" else 32 << 20)
        assert model.joins_at_once == (arm == "sync")


def test_hits_are_what_the_run_says_it_loaded() -> None:
    rows = [request_row(9, loadable=4096, local_hit=11_264), request_row(9), request_row(9, loadable=0, local_hit=0)]
    run = read_recorded(lines_of(engine_row(), repeat_row(cell("x", 1, rate_per_s=1.0), "fifo_first", 0, rows)), "x")
    (repeat,) = run.repeats
    model = model_of(repeat)
    assert not isinstance(model, str)
    records = predict(repeat, model, run, DEVICE, Overheads())
    token = DEVICE.profile.token_bytes
    assert [record.load_bytes // token for record in records] == [4096, 15_360, 0]
    assert [record.new_tokens for record in records] == [768, 768, 16_128]


def test_bystanders_tiers_stores_and_misses_are_in_the_prediction() -> None:
    plain = cell("x", 2, rate_per_s=4.0)
    variants = [
        {},
        {"bystanders": 8},
        {"tier_gb_per_s": 5.0},
        {"stores": True, "hit": 1024, "new": 4096},
        {"miss_every": 2},
    ]
    means = []
    for more in variants:
        row = repeat_row(
            {**plain, **more}, "fifo_first", 0, [{**request_row(9), "at_us": 200_000 * n} for n in range(4)]
        )
        run = read_recorded(lines_of(engine_row(), row), "x")
        (repeat,) = run.repeats
        model = model_of(repeat)
        assert not isinstance(model, str)
        records = predict(repeat, model, run, DEVICE, Overheads())
        assert len(records) == 4
        means.append(sum(record.ttft_ns for record in records) / 4)
        if "stores" in more:
            assert all(record.store_bytes > 0 for record in records)
    base, others = means[0], means[1:3] + means[4:]
    assert all(other > 1.01 * base for other in others)


def test_a_store_leaves_at_the_rate_of_the_way_back() -> None:
    lines = lines_of(engine_row(), repeat_row(cell("x", 1, stores=True), "fifo_first", 0, [request_row(9)] * 2))
    run = read_recorded(lines, "x")
    (repeat,) = run.repeats
    model = model_of(repeat)
    assert not isinstance(model, str)
    leaving, rate = [], DEVICE.profile.wire.d2h_bytes_per_s
    for share in (1, 10):
        wire = replace(DEVICE.profile.wire, d2h_bytes_per_s=rate // share, both_bytes_per_s=rate // 20)
        device = Device(replace(DEVICE.profile, wire=wire))
        record = predict(repeat, model, run, device, Overheads())[-1]
        leaving.append(record.stored_ns - record.first_token_ns)
    assert leaving[1] > 5 * leaving[0] > 0


def test_stores_and_loads_share_what_the_link_carries_both_ways() -> None:
    rows = [{**request_row(9), "at_us": 40_000 * n} for n in range(4)]
    of = cell("x", 2, new=8192, hit=8192, stores=True, rate_per_s=25.0)
    run = read_recorded(lines_of(engine_row(), repeat_row(of, "chunk_bounded", 0, rows)), "x")
    (repeat,) = run.repeats
    model = model_of(repeat)
    assert not isinstance(model, str)
    stored = []
    for share in (1, 20):
        wire = DEVICE.profile.wire
        device = Device(replace(DEVICE.profile, wire=replace(wire, both_bytes_per_s=wire.both_bytes_per_s // share)))
        stored.append(max(one.stored_ns for one in predict(repeat, model, run, device, Overheads())))
    assert stored[1] > stored[0]


@pytest.mark.parametrize(
    ("inputs", "turn", "bytes_"),
    [
        (InputsWait.TURN, {}, 32 << 20),
        (InputsWait.TURN, {"turn_mib": 8}, 8 << 20),
        (InputsWait.TURN, {"turn_mib": 0}, None),
        (InputsWait.LOAD_END, {}, None),
        (InputsWait.NONE, {"turn_mib": 8}, 0),
    ],
)
def test_a_joining_prompt_waits_for_a_turn_unless_there_are_none(
    inputs: InputsWait, turn: dict[str, int], bytes_: int | None
) -> None:
    row = {**repeat_row(cell("x", 1), "fifo_first", 0, [request_row(9)] * 2), "settings": {"order": "fifo", **turn}}
    model = model_of(read_recorded(lines_of(row), "x").repeats[0], inputs)
    assert not isinstance(model, str)
    assert model.inputs_behind_bytes == bytes_


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "x, line 2: not JSON .Expecting"),
        ("[]", "a line is a JSON object, got list"),
        ('{"schema": 2, "kind": "repeat"}', "schema must be 1, got 2"),
        ('{"schema": 1, "kind": "repeat", "cell": {}}', "mix is missing; is it a recorded run"),
    ],
)
def test_a_broken_line_is_refused_by_its_number(line: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_recorded([*lines_of(engine_row()), line], "x")


def places(row: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in a line, lists by their first and last."""
    inside = row.items() if isinstance(row, dict) else enumerate(row) if isinstance(row, list) else ()
    for key, value in inside:
        if not isinstance(row, list) or key in (0, len(row) - 1):
            yield (*at, key)
            yield from places(value, (*at, key))


@pytest.mark.parametrize("instead", [None, "x", [], {}, [[]], 3, -1, math.nan, math.inf])
def test_a_line_with_anything_in_any_place_is_read_or_refused_by_its_number(instead: object) -> None:
    machine = {"machine": {"gpu": "NVIDIA H200", "date": "2026-11-29"}, "commit": "abc"}
    more = {"steps": [[0, 9, 768, 0, 3, 9]], "host_stall_us": {"0": 5}, "graphs": "full"}
    times = {"asked_us": 1, "ordered_us": 2, "started_us": 3, "released_us": 4, "landed_us": [4, 5], "bytes": 8}
    request = request_row(9, loadable=15_360, **times)
    good = [{**engine_row(), **machine}, repeat_row(cell("x", 1), "fifo_first", 0, [request] * 2, **more)]
    assert len(read_recorded(lines_of(*good), "x").repeats) == 1
    for number, row in enumerate(good):
        for *path, last in places(row):
            rows = copy.deepcopy(good)
            holder: Any = rows[number]
            for key in path:
                holder = holder[key]
            holder[last] = instead
            try:
                read_recorded(lines_of(*rows), "x")
            except ValueError as error:
                assert re.match(r"x(, line [12]: | holds no repeat)", str(error)), (path, last)


def test_a_file_without_a_repeat_is_refused() -> None:
    with pytest.raises(ValueError, match="x holds no repeat; record one with"):
        read_recorded(lines_of(engine_row()), "x")


def test_lines_of_other_kinds_are_counted() -> None:
    verify = {"schema": 1, "kind": "verify"}
    run = read_recorded(lines_of(verify, repeat_row(cell("x", 1), "fifo_first", 0, [request_row(9)] * 2), verify), "x")
    assert run.passed_over == {"verify": 2}


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


def test_an_engine_that_does_not_schedule_ahead_is_refused_by_cell() -> None:
    rows = [engine_row(async_scheduling=False), repeat_row(cell("x", 1), "fifo_first", 0, [request_row(9)] * 3)]
    with pytest.raises(ValueError, match="x, fifo_first: the engine did not schedule its steps ahead"):
        validate(read_recorded(lines_of(*rows), "x"), DEVICE, Split((), ("x",)), KNOWN)


# ---------------------------------------------------------------- judging by commit


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


@pytest.mark.parametrize(
    ("graphs", "settings", "found"),
    [
        ("piecewise", {"release": "first"}, False),
        ("full", {"release": "first", "full_graphs": "before"}, True),
        ("full", {"release": "first", "full_graphs": "inside"}, "waits inside a graph of the whole step"),
        ("prefill", {"release": "first"}, "graphs of another kind, prefill"),
    ],
)
def test_which_graphs_an_arm_replayed_is_in_its_model(graphs: str, settings: dict[str, str], found: object) -> None:
    row = {**repeat_row(cell("x", 1), "fifo_first", 0, [request_row(9)] * 3), "graphs": graphs, "settings": settings}
    model = model_of(read_recorded(lines_of(row), "x").repeats[0])
    assert (model if isinstance(model, str) else model.full_graphs) == found


def test_arms_with_full_graphs_are_compared_with_chunk_major_that_has_them() -> None:
    full = [check("x", "chunk_full_graphs", 80, 80), check("x", "fifo_full_graphs", 90, 90)]
    judged = judge([check("x", "chunk_bounded", 100, 100), *(one._replace(full_graphs=True) for one in full)])
    (sign,) = judged.signs
    assert sign.recorded == pytest.approx(90 / 80 - 1)


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


@pytest.mark.parametrize(
    ("engine", "settings", "words"),
    [
        ({"tensor_parallel": 2}, {"release": "first"}, "2 ranks, and the profile is of one"),
        ({"tensor_parallel": 2}, None, "2 ranks, and the profile is of one"),
        ({"tensor_parallel": 1}, {"layers_per_slice": "auto", "bystander_weight": 2.0}, "bystanders weigh 2.0, and"),
        ({"tensor_parallel": None}, {"layers_per_slice": "auto"}, AUTO),
    ],
)
def test_what_the_world_has_no_answer_for_is_left_out(engine: dict[str, Any], settings: Any, words: object) -> None:
    row = {**repeat_row(cell("x", 1), "fifo_first", 0, [request_row(9)] * 3), "settings": settings}
    of = engine_row(**engine)
    model = model_of(read_recorded(lines_of(of, row), "x").repeats[0])
    assert str(words) in model if isinstance(model, str) else model.strategy == words


def test_an_engine_of_no_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="tensor_parallel must be a whole number of at least 1, got 0"):
        read_recorded(lines_of(engine_row(tensor_parallel=0)), "x")


def test_cells_with_full_graphs_alone_have_advice_against_their_own_chunk_major() -> None:
    full = {"chunk_full_graphs": 100, "chunk_deep_full_graphs": 80, "fifo_full_graphs": 90, "recompute_full_graphs": 9}
    judged = judge([check("x", arm, time, time)._replace(full_graphs=True) for arm, time in full.items()])
    (sign,) = judged.signs
    assert sign.recorded == pytest.approx(90 / 80 - 1)
    assert judged.advice == (("x", "chunk_deep_full_graphs", "chunk_deep_full_graphs", 0.0, ""),)
