"""Shrinking: what comes back still fails, and is small."""

from dataclasses import replace

import pytest
from hypothesis import given

from lamella.reference.arena import CacheCase
from lamella.reference.geometry import ObjectForm
from lamella.reference.laws import TransferCase, Trial
from lamella.reference.plan import Direction, TransferRequest
from lamella.reference.shrink import minimal
from strategies import transfer_cases

LARGE = TransferCase(
    caches=(
        CacheCase(tuple(range(0, 12, 2)), 2, 4, 8, 2, 40, 4, "KNTHD", "NKHTD", (1, 1, 1, 1, 1), (3, 0, 0, 0, 0)),
        CacheCase(tuple(range(1, 12, 2)), 1, 1, 6, 1, 40, 8, "NTD"),
    ),
    form=ObjectForm.TOKEN,
    chunk_tokens=16,
    requests=(
        TransferRequest(50, (tuple(range(39, 26, -1)), (9, 0, 7, 6, 5, 4, 3)), skip_tokens=5, null_block=0),
        TransferRequest(20, ((1, 2, 3, 4, 5), (10, 11, 12)), null_block=0),
    ),
    direction=Direction.RETRIEVE,
    width=(1, 2, 3),
    staging_bytes=4096,
    num_windows=3,
    registered_piece_bytes=512,
    turns=(1, 0, 1, 1),
)


def test_what_plays_no_part_in_the_failure_is_gone() -> None:
    found = minimal(LARGE, lambda case: case.requests[0].num_tokens > case.chunk_tokens)
    (cache,) = found.caches
    assert (len(cache.layers), cache.num_heads, cache.head_dim, cache.element_bytes) == (1, 1, 1, 1)
    assert (cache.memory, cache.steps, cache.margins) == ("", (), ())
    assert (found.chunk_tokens, found.requests[0].num_tokens, found.requests[0].skip_tokens) == (1, 2, 0)
    assert (len(found.requests), found.width, found.turns, found.registered_piece_bytes) == (1, None, (), None)


def test_what_the_failure_needs_stays() -> None:
    found = minimal(LARGE, lambda case: len(case.caches) == 2 and case.requests[0].skip_tokens > 0)
    assert len(found.caches) == 2
    assert found.requests[0].skip_tokens == 1


@given(transfer_cases(max_requests=3))
def test_every_smaller_case_that_is_tried_is_legal_or_refused_with_a_value_error(case: TransferCase) -> None:
    def is_legal(candidate: TransferCase) -> bool:
        Trial(candidate)
        return True

    found = minimal(case, is_legal, max_trials=40)
    assert is_legal(found)


def test_trials_are_bounded() -> None:
    trials = []

    def fails(case: TransferCase) -> bool:
        trials.append(case)
        return True

    minimal(LARGE, fails, max_trials=7)
    assert len(trials) == 7


@pytest.mark.parametrize("case", [replace(LARGE, turns=())])
def test_a_case_none_of_whose_neighbours_fails_comes_back_as_it_is(case: TransferCase) -> None:
    assert minimal(case, lambda candidate: candidate == case) is case
