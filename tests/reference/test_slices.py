"""Slices: widths and schedules."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella.reference.slices import Slice, parse_width, plan_slices
from strategies import widths


def test_a_width_that_does_not_divide_leaves_a_short_last_slice() -> None:
    assert plan_slices(8, 3) == (Slice(0, 3), Slice(3, 3), Slice(6, 2))


def test_the_last_width_of_a_schedule_repeats() -> None:
    assert [s.num_layers for s in plan_slices(32, [1, 1, 2, 4])] == [1, 1, 2, *[4] * 7]


def test_a_schedule_longer_than_the_model_is_cut_off() -> None:
    assert plan_slices(3, [2, 2, 3]) == (Slice(0, 2), Slice(2, 1))


def test_one_slice_of_all_layers_is_the_widest() -> None:
    assert plan_slices(32, 32) == (Slice(0, 32),)


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), widths(n))))
def test_slices_partition_the_layers_in_order(drawn: tuple[int, int | tuple[int, ...]]) -> None:
    num_layers, width = drawn
    slices = plan_slices(num_layers, width)
    assert [layer for s in slices for layer in range(s.first_layer, s.end_layer)] == list(range(num_layers))
    schedule = [width] if isinstance(width, int) else list(width)
    wanted = schedule + [schedule[-1]] * len(slices)
    assert [s.num_layers for s in slices[:-1]] == wanted[: len(slices) - 1]
    assert 1 <= slices[-1].num_layers <= wanted[len(slices) - 1]


@pytest.mark.parametrize(
    ("num_layers", "width", "sentence"),
    [
        (32, 0, "layers_per_slice must be between 1 and 32, got 0"),
        (32, 40, "layers_per_slice must be between 1 and 32, got 40"),
        (32, -1, "layers_per_slice must be between 1 and 32, got -1"),
        (4, [1, 5], "layers_per_slice must be between 1 and 4, got 5"),
        (4, [], "a schedule of widths needs at least one width, got none"),
        (0, 1, "num_layers must be at least 1, got 0"),
    ],
)
def test_a_bad_width_is_refused_with_its_value(num_layers: int, width: int | list[int], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        plan_slices(num_layers, width)


@given(st.lists(st.integers(1, 99), min_size=1, max_size=5))
def test_a_written_width_is_read_back(schedule: list[int]) -> None:
    expected: int | tuple[int, ...] = schedule[0] if len(schedule) == 1 else tuple(schedule)
    assert parse_width(", ".join(map(str, schedule))) == expected


@pytest.mark.parametrize("text", ["", "0", "-1", "1,,2", "1.5", "eight", "²", "1;2", "0,1"])
def test_a_width_that_cannot_be_read_is_quoted_back(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"got {text!r}")):
        parse_width(text)
