"""What a recorded run says, line by line, and how an arm of it is run by the world: as it was set, or left out."""

import copy
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from lamella.sim.overheads import Overheads
from lamella.sim.profiles import load_profile
from lamella.sim.recorded import read_recorded
from lamella.sim.recorded_arms import InputsWait, model_of, predict
from lamella.sim.strategies import AUTO, CHUNK_MAJOR, RECOMPUTE, Device, parse_strategy
from recorded_run import cell, engine_row, lines_of, repeat_row, request_row

DEVICE = Device(load_profile())


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
        ("fifo_beside", {"order": "fifo", "release": "first"}, "a second process"),
        ("chunk_beside", {"layers_per_slice": 0, "release": "whole"}, "a second process"),
        ("fifo_beside_both_graphs", {"order": "fifo", "release": "first"}, "a second process"),
        ("fifo_thread_both_graphs", {"order": "fifo", "release": "first"}, "a thread in Python"),
        ("early_read", {"order": "fifo", "release": "first"}, "does not wait"),
    ],
)
def test_an_arm_is_run_as_it_was_set_or_left_out_with_the_reason(
    arm: str, settings: dict[str, Any] | None, found: object
) -> None:
    row = repeat_row(cell("x", 1, width=2), "fifo_first", 0, [request_row(9)] * 3)
    graphs = "both" if arm.endswith("_both_graphs") else "piecewise"
    (repeat,) = read_recorded(lines_of({**row, "arm": arm, "settings": settings, "graphs": graphs}), "x").repeats
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
