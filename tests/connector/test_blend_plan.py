"""What becomes of each token, and how many are computed anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella.connector.blend_plan import RecomputeRatio, Reuse, check_reuses, plan_blend

STORED = list(range(100, 120))


def test_gaps_reused_tokens_and_the_last_one() -> None:
    tokens = [1, 2, *STORED[4:10], 3, *STORED[:5]]
    reuses = [Reuse(STORED, 2, first=4, end=10), Reuse(STORED, 9, end=5)]
    plan = plan_blend(tokens, reuses, [6, 5])
    assert plan.moved.tolist() == [0, 0, *[-2] * 6, 0, *[9] * 5]
    assert plan.reused.tolist() == [False, False, *[True] * 6, False, *[True] * 5]
    assert plan.optional.tolist() == [False, False, *[True] * 6, False, *[True] * 4, False]
    assert plan.required().tolist() == [True, True, *[False] * 6, True, *[False] * 4, True]


def test_what_was_not_found_is_a_gap() -> None:
    plan = plan_blend([1, *STORED, 2], [Reuse(STORED, 1)], [8])
    assert plan.reused.tolist() == [False, *[True] * 8, *[False] * 13]
    assert not plan.moved[9:].any()


def test_what_stands_at_the_beginning_as_it_was_stored_is_never_optional() -> None:
    tokens = [*STORED, *STORED[:3], 9]
    assert not plan_blend(tokens, [Reuse(STORED, 0)], [20]).optional.any()
    assert plan_blend(tokens, [Reuse(STORED, 0), Reuse(STORED, 20, end=3)], [20, 3]).optional.sum() == 3
    assert plan_blend(STORED[5:], [Reuse(STORED, 0, first=5)], [15]).optional.sum() == 14, "it stood behind five others"
    assert plan_blend([7, *STORED[1:]], [Reuse(STORED, 1, first=1)], [19]).optional.sum() == 18, "another was first"


@pytest.mark.parametrize(
    ("tokens", "reuses", "reason"),
    [
        ([], [], "no tokens"),
        (STORED, [Reuse(STORED, 1)], "reuse 0 ends at 21, the sequence at 20"),
        (
            [1, *STORED],
            [Reuse(STORED, 0, end=3)],
            "position 0: the sequence has 1, what was stored 100",
        ),
        (STORED, [Reuse(STORED, 0, end=5), Reuse(STORED, 3, first=3)], "reuses 0 and 1 both stand at position 3"),
    ],
)
def test_reuses_that_do_not_fit_are_refused(tokens: Sequence[int], reuses: Sequence[Reuse], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_reuses(tokens, reuses)


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"start": -1}, "must not be negative, got -1"),
        ({"start": 0, "first": 5, "end": 5}, "got 5 .. 5"),
        ({"start": 0, "end": 21}, "of 20 stored ones, got 0 .. 21"),
        ({"start": 0, "first": -1}, "got -1 .. 20"),
    ],
)
def test_a_part_that_cannot_be_is_refused(part: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Reuse(STORED, **part)


def test_more_found_than_asked_for_is_refused() -> None:
    with pytest.raises(ValueError, match="between 0 and the 20 tokens asked for, got 21"):
        plan_blend(STORED, [Reuse(STORED, 0)], [21])


def test_a_share_is_rounded_up_and_a_schedule_repeats_its_last() -> None:
    assert [RecomputeRatio.of(0.15).kept(layer, 100) for layer in (0, 1, 9)] == [100, 15, 15]
    assert [RecomputeRatio.of((0.5, 0.25)).kept(layer, 9) for layer in (0, 1, 2, 3)] == [9, 5, 3, 3]
    assert RecomputeRatio.of(0.0).kept(0, 100) == 0
    assert RecomputeRatio.of(0.07).kept(1, 100) == 7, "0.07 * 100 is a little more than 7 in binary"


@given(st.lists(st.floats(0, 1), min_size=1, max_size=5), st.integers(0, 50), st.integers(0, 8))
def test_never_more_from_layer_to_layer(shares: list[float], num_tokens: int, layer: int) -> None:
    ratio = RecomputeRatio.of(sorted(shares, reverse=True))
    assert 0 <= ratio.kept(layer + 1, num_tokens) <= ratio.kept(layer, num_tokens) <= num_tokens


@pytest.mark.parametrize(
    ("shares", "reason"),
    [((), "at least one"), (-0.1, "between 0 and 1, got -0.1"), ((0.1, 0.5), "must not rise"), (2, "got 2.0")],
)
def test_a_ratio_that_cannot_be_is_refused(shares: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        RecomputeRatio.of(shares)
