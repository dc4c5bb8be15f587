"""A step time that cannot be right is refused with its place and value; what scatters as measurements do is taken."""

import copy
import json
import random
from importlib.resources import files
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella.reference.plausible import WILD, check_decode
from lamella.reference.profile import Graphs, profile_from_mapping
from lamella.reference.tables import DecodeTable, MeasuredCompute, PrefillTable
from lamella.sim.profiles import DEFAULT_PROFILE

SHIPPED: dict[str, Any] = json.loads((files("lamella.sim.profiles") / f"{DEFAULT_PROFILE}.json").read_text("utf-8"))
TABLES = (("prefill",), ("decode", "full"), ("decode", "piecewise"))
CELLS = [
    (part, row, column)
    for part in TABLES
    for row, times in enumerate((SHIPPED[part[0]] if len(part) == 1 else SHIPPED[part[0]][part[1]])["step_ns"])
    for column, time in enumerate(times)
    if time is not None
]


def rows_of(mapping: dict[str, Any], part: tuple[str, ...]) -> list[list[int | None]]:
    for key in part:
        mapping = mapping[key]
    rows: list[list[int | None]] = mapping["step_ns"]
    return rows


def with_time(part: tuple[str, ...], row: int, column: int, factor: float) -> tuple[dict[str, Any], int]:
    mapping = copy.deepcopy(SHIPPED)
    rows = rows_of(mapping, part)
    time = rows[row][column]
    assert time is not None
    wild = rows[row][column] = int(time * factor)
    return mapping, wild


@pytest.mark.parametrize("factor", [6.0, 100.0, 1 / 40])
@pytest.mark.parametrize(("part", "row", "column"), CELLS)
def test_one_wild_step_time_is_named_wherever_it_stands(
    part: tuple[str, ...], row: int, column: int, factor: float
) -> None:
    mapping, wild = with_time(part, row, column, factor)
    with pytest.raises(
        ValueError, match=r"cannot be right beside step_ns\[.*measure it again, or correct the file"
    ) as said:
        profile_from_mapping(mapping)
    assert str(said.value).startswith(f"profile.{'.'.join(part)}: ")
    assert f"step_ns[{row}][{column}] = {wild:,} (" in str(said.value)


@given(st.integers(min_value=0))
def test_scatter_of_a_tenth_is_taken_and_no_step_of_it_is_negative(seed: int) -> None:
    rng = random.Random(seed)
    mapping = copy.deepcopy(SHIPPED)
    for part in TABLES:
        for times in rows_of(mapping, part):
            times[:] = [None if time is None else round(time * rng.uniform(0.9, 1.1)) for time in times]
    profile = profile_from_mapping(mapping)
    for graphs in Graphs:
        compute = profile.compute(graphs)
        for _ in range(20):
            batch, context = rng.randint(1, 128), rng.randint(1, 20_000)
            prefills = [(rng.randint(0, 60_000), rng.randint(1, 2_000)) for _ in range(rng.randint(1, 4))]
            assert compute.step_ns(prefills, batch, batch * context) > 0
            assert compute.decode_ns(batch, batch * context, 1) > 0


def test_a_first_context_that_leaves_nothing_for_an_empty_one_is_refused() -> None:
    """Context 100 and 200 take 10 and 25 ns: at 0 a step would take -5."""
    table = DecodeTable((1, 2), (100, 200), ((10, 25), (30, 31)))
    with pytest.raises(ValueError, match=r"d: at batch 1 step_ns 10 at context 100 and 25 at 200 leave no time"):
        check_decode(table, "d")
    assert WILD * 2 > 25 / 10, "beside each other alone they would pass"


def test_tables_that_contradict_each_other_are_said_to_instead_of_a_negative_step() -> None:
    prefill = PrefillTable((0, 1_000), (16, 64), ((10, 10), (10, 10)))
    falling = DecodeTable((1, 2), (100, 1_000), ((1_000, 10), (1_000, 10)))
    with pytest.raises(
        ValueError, match=r"prefills \(cached, new\) \[\(0, 16\)\] beside 1 decoding requests would take -"
    ):
        MeasuredCompute(prefill, falling, 1).step_ns([(0, 16)], 1, 1_000)


def whole_numbers(inside: Any, *path: Any) -> list[tuple[Any, ...]]:
    """Where a whole number stands."""
    if isinstance(inside, dict | list):
        items = inside.items() if isinstance(inside, dict) else enumerate(inside)
        return [found for key, one in items for found in whole_numbers(one, *path, key)]
    return [path] if type(inside) is int else []


def test_no_number_in_a_profile_says_how_much_is_made_before_anybody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode batch of 10^18 made as many curves when the profile was opened, until memory was full."""
    rows = 0

    def row(self: DecodeTable, batch: int) -> tuple[float, ...]:
        nonlocal rows
        rows += 1
        assert rows < 100
        return known(self, batch)

    known = DecodeTable.row
    taken = 0
    for *path, last in whole_numbers(SHIPPED):
        mapping = copy.deepcopy(SHIPPED)
        inside: Any = mapping
        for key in path:
            inside = inside[key]
        inside[last] = 10**18
        try:
            profile = profile_from_mapping(mapping)
        except ValueError:
            continue
        taken, rows = taken + 1, 0
        with monkeypatch.context() as patched:
            patched.setattr(DecodeTable, "row", row)
            for graphs in Graphs:
                assert profile.compute(graphs).decode_ns(2, 1_000, 1) > 0
    assert taken >= 10
