"""Tables of step times: exact on the nodes, between their neighbours off them, and added up to batches by one rule."""

import json
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella.reference.tables import DecodeTable, LinearCurve, MeasuredCompute, PrefillTable
from lamella.sim.profiles import load_profile

PREFILL = PrefillTable((0, 1000, 4000), (16, 512, 2048), ((50, 60, 80), (120, 150, 240), (470, 590, 950)))
DECODE = DecodeTable((1, 8, 32), (100, 1000, 10_000), ((40, 42, 60), (50, 66, 210), (70, 134, None)))


def rising(least: int, size: int) -> st.SearchStrategy[tuple[int, ...]]:
    steps = st.lists(st.integers(1, 10_000), min_size=size, max_size=size)
    return steps.map(lambda gaps: tuple(least + sum(gaps[:i]) for i in range(size)))


@st.composite
def prefill_tables(draw: st.DrawFn) -> PrefillTable:
    """Monotone, as measured ones are but for noise: a row and a column of increments, added up."""
    cached = draw(rising(0, 3))
    new = draw(rising(1, 3))
    increments = st.lists(st.integers(1, 10**7), min_size=3, max_size=3)
    across, down = draw(increments), draw(increments)
    rows = tuple(tuple(sum(across[: j + 1]) * (i + 1) + sum(down[: i + 1]) for j in range(3)) for i in range(3))
    return PrefillTable(cached, new, rows)


@given(prefill_tables())
def test_a_prefill_on_a_node_costs_what_was_measured(table: PrefillTable) -> None:
    compute = MeasuredCompute(table, DECODE, 1)
    for i, new in enumerate(table.new_tokens):
        for j, cached in enumerate(table.cached_tokens):
            assert compute.step_ns([(cached, new)], 0, 0) == table.step_ns[i][j]


@given(prefill_tables(), st.data())
def test_between_nodes_a_prefill_lies_within_the_corners_of_its_cell(table: PrefillTable, data: st.DataObject) -> None:
    cached = data.draw(st.integers(0, table.cached_tokens[-1]))
    new = data.draw(st.integers(table.new_tokens[0], table.new_tokens[-1]))
    j = max(index for index, node in enumerate(table.cached_tokens[:-1]) if node <= cached)
    i = max(index for index, node in enumerate(table.new_tokens[:-1]) if node <= new)
    corners = [table.step_ns[row][column] for row in (i, i + 1) for column in (j, j + 1)]
    assert min(corners) - 1e-6 <= table.alone_ns(cached, new) <= max(corners) + 1e-6


@given(prefill_tables(), st.data())
def test_more_cached_or_more_new_tokens_never_cost_less_in_a_monotone_table(
    table: PrefillTable, data: st.DataObject
) -> None:
    few, many = sorted(data.draw(st.tuples(*[st.integers(0, table.cached_tokens[-1])] * 2)))
    new = data.draw(st.integers(1, table.new_tokens[-1]))
    assert table.alone_ns(few, new) <= table.alone_ns(many, new) + 1e-6
    little, much = sorted(data.draw(st.tuples(*[st.integers(1, table.new_tokens[-1])] * 2)))
    assert table.alone_ns(few, little) <= table.alone_ns(few, much) + 1e-6


@given(prefill_tables(), st.data())
def test_matrix_products_and_attention_add_up_to_the_prefill(table: PrefillTable, data: st.DataObject) -> None:
    cached = data.draw(st.integers(0, table.cached_tokens[-1]))
    new = data.draw(st.integers(1, table.new_tokens[-1]))
    parts = table.dense_ns(new) + MeasuredCompute(table, DECODE, 1).attention_ns(cached, new)
    assert parts == pytest.approx(table.alone_ns(cached, new), rel=1e-12)


def test_a_step_of_one_prefill_costs_the_same_by_the_rule_for_batches() -> None:
    compute = MeasuredCompute(PREFILL, DECODE, 1)
    together = PREFILL.dense_ns(700) + compute.attention_ns(2500, 700)
    assert compute.step_ns([(2500, 700)], 0, 0) == round(together)


def test_a_row_of_its_own_changes_what_lies_between_its_neighbours_and_nothing_else() -> None:
    rowed = PREFILL.with_row(1024, 1.1)
    assert rowed.new_tokens == (16, 512, 1024, 2048)
    assert rowed.alone_ns(1000, 1024) == pytest.approx(1.1 * PREFILL.alone_ns(1000, 1024), abs=0.5)
    assert rowed.alone_ns(1000, 800) > PREFILL.alone_ns(1000, 800)
    assert rowed.alone_ns(1000, 300) == PREFILL.alone_ns(1000, 300)
    assert PREFILL.with_row(512, 2.0).step_ns[1] == (240, 300, 480), "a node that is there is replaced"


def test_fewer_new_tokens_than_measured_cost_what_the_fewest_cost() -> None:
    assert PREFILL.alone_ns(1000, 1) == PREFILL.alone_ns(1000, 16) == 60


@pytest.mark.parametrize(
    ("cached", "new", "inside"),
    [(0, 1, True), (4000, 2048, True), (4001, 1, False), (0, 2049, False), (-1, 5, False), (0, 0, False)],
)
def test_the_domain_ends_with_the_nodes(cached: int, new: int, inside: bool) -> None:
    assert PREFILL.covers(cached, new) is inside


def test_outside_the_domain_a_prefill_is_refused_or_openly_extrapolated() -> None:
    with pytest.raises(ValueError, match="no prefill of 4096 new tokens over 0 cached"):
        MeasuredCompute(PREFILL, DECODE, 1).step_ns([(0, 4096)], 0, 0)
    line = 470 + (470 - 120) * (4096 - 2048) / (2048 - 512)
    assert MeasuredCompute(PREFILL, DECODE, 1, extrapolate=True).step_ns([(0, 4096)], 0, 0) == round(line)


def test_a_larger_batch_than_measured_is_refused_or_openly_extrapolated() -> None:
    with pytest.raises(ValueError, match=r"decode batches of 1 \.\. 32, not 33"):
        MeasuredCompute(PREFILL, DECODE, 1).decode_ns(33, 100, 1)
    assert MeasuredCompute(PREFILL, DECODE, 1, extrapolate=True).decode_ns(56, 56 * 100, 1) in (90, 91, 92)


def test_a_row_of_the_decode_table_goes_on_with_its_last_slope_where_memory_ended() -> None:
    assert DECODE.row(32)[2] == 134 + (134 - 70) / 900 * 9000


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_a_single_decode_step_costs_the_table_s_value_at_its_middle(batch: int) -> None:
    compute = MeasuredCompute(PREFILL, DECODE, 1)
    curve = LinearCurve(DECODE.context_tokens, DECODE.row(batch))
    assert abs(compute.decode_ns(batch, batch * 500, 1) - curve.at(500.5)) <= 1


@given(batch=st.integers(1, 32), context=st.integers(1, 200_000), first=st.integers(0, 3000), then=st.integers(0, 3000))
def test_a_stretch_costs_what_its_parts_cost_to_the_nanosecond(batch: int, context: int, first: int, then: int) -> None:
    compute = load_profile().compute()
    whole = compute.decode_ns(batch, context, first + then)
    assert whole == compute.decode_ns(batch, context, first) + compute.decode_ns(batch, context + first * batch, then)


@given(st.integers(1, 128), st.integers(0, 10**6), st.integers(1, 100))
def test_a_longer_stretch_takes_longer(batch: int, context: int, steps: int) -> None:
    compute = load_profile().compute()
    assert 0 < compute.decode_ns(batch, context, steps) < compute.decode_ns(batch, context, steps + 1)


@given(st.lists(st.tuples(st.integers(0, 131_072), st.integers(1, 2048)), min_size=1, max_size=4), st.integers(0, 64))
def test_the_layers_of_a_step_add_up_to_it_and_differ_by_no_more_than_a_nanosecond(
    prefills: list[tuple[int, int]], decodes: int
) -> None:
    compute = load_profile().compute()
    layers = compute.step_layers_ns(prefills, decodes, decodes * 1000)
    assert len(layers) == compute.num_layers
    assert sum(layers) == compute.step_ns(prefills, decodes, decodes * 1000)
    assert max(layers) - min(layers) <= 1


def test_the_integral_of_a_curve_is_the_area_under_it() -> None:
    curve = LinearCurve((0, 10, 20), (0.0, 10.0, 10.0))
    assert [curve.integral(x) for x in (0, 10, 20, 30)] == [0, 50, 150, 250]
    assert [curve.at(x) for x in (-5, 5, 15, 25)] == [-5, 5, 10, 10]


@pytest.mark.parametrize(
    ("cached", "new", "times", "message"),
    [
        ((0,), (1, 2), ((1,), (1,)), "cached_tokens needs at least 2 nodes"),
        ((0, 0), (1, 2), ((1, 1), (1, 1)), "cached_tokens must rise"),
        ((5, 9), (1, 2), ((1, 1), (1, 1)), "cached_tokens must begin at 0, got 5"),
        ((0, 9), (0, 2), ((1, 1), (1, 1)), "new_tokens must be at least 1, got 0"),
        ((0, 9), (1, 2), ((1, 1),), r"step_ns must have 2 rows \(new\) of 2 \(cached\), got \[2\]"),
        ((0, 9), (1, 2), ((1, 1), (1, 0)), "every step_ns must be at least 1, got 0"),
    ],
)
def test_an_impossible_prefill_table_is_refused(
    cached: tuple[int, ...], new: tuple[int, ...], times: tuple[tuple[int, ...], ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        PrefillTable(cached, new, times)


@pytest.mark.parametrize(
    ("batch", "times", "message"),
    [
        ((2, 3), ((1, 2, 3), (1, 2, 3)), "batch must begin at 1, got 2"),
        ((1, 3), ((1, 2, 3), (1, None, 3)), "batch 3 needs at least two times, None only after the last"),
        ((1, 3), ((1, 2, 3), (1, None, None)), "batch 3 needs at least two times"),
        ((1, 3), ((1, 2, 3), (0, 2, 3)), "every step_ns must be at least 1, got 0"),
        ((1, 3), ((1, 2), (1, 2)), r"rows \(batch\) of 3 \(context\)"),
    ],
)
def test_an_impossible_decode_table_is_refused(
    batch: tuple[int, ...], times: tuple[tuple[int | None, ...], ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        DecodeTable(batch, (10, 20, 30), times)


# ---------------------------------------------------------------- the rule against the GPU


def _measured() -> list[dict[str, Any]]:
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "h200-2026-11-29-step-times-full.json"
    run = json.loads(path.read_text())
    return [*run["batched"], *run["mixed"]]


def _prediction_errors(compute: MeasuredCompute) -> list[float]:
    errors = []
    for row in _measured():
        prefills = [(row["cached"], row["new"])] * row.get("requests", 1)
        decodes: int = row.get("batch", 0)
        context: int = row.get("context", 0)
        predicted = compute.step_ns(prefills, decodes, decodes * (context + 50))
        errors.append(predicted / 1e6 / statistics.median(row["gpu_ms"]) - 1)
    return errors


def test_steps_of_several_prefills_and_of_prefills_beside_decodes_are_predicted_from_single_ones() -> None:
    errors = _prediction_errors(load_profile().compute())
    assert len(errors) == 19
    assert statistics.mean(map(abs, errors)) < 0.04
    assert max(map(abs, errors)) < 0.10


def test_adding_up_the_members_own_times_would_miss_those_steps() -> None:
    """The obvious rule, each member as if it were alone, counts the weights once a member."""

    class AddedUp(MeasuredCompute):
        def step_ns(self, prefills, decode_batch, decode_context_tokens):
            alone = sum(super(AddedUp, self).step_ns([prefill], 0, 0) for prefill in prefills)
            return alone + (self.decode_ns(decode_batch, decode_context_tokens, 1) if decode_batch else 0)

    profile = load_profile()
    errors = _prediction_errors(AddedUp(profile.prefill, next(iter(profile.decode.values())), profile.num_layers))
    assert max(map(abs, errors)) > 0.5


def test_the_shipped_tables_rise_with_context_batch_and_tokens() -> None:
    profile = load_profile()
    for row in profile.prefill.step_ns:
        assert all(after > 0.99 * before for before, after in pairwise(row))
    for column in zip(*profile.prefill.step_ns, strict=True):
        assert all(after > before for before, after in pairwise(column))
