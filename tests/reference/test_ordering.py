"""Order policies: keys are integers fixed at submission (ORD-3), and the smallest key wins."""

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella.reference.ordering import LARGEST_KEY, ORDERS, OrderPolicy, Submission, parse_order, slice_keys
from lamella.reference.timeline import Load, TimedRequest, schedule_link

SUBMISSIONS = st.builds(
    Submission,
    sequence=st.integers(0, 2**40),
    arrival_ns=st.integers(0, 2**60),
    slice_bytes=st.lists(st.integers(0, 2**40), max_size=8).map(tuple),
    deadline_ns=st.none() | st.integers(-(2**60), 2**60),
    round=st.integers(0, 2**40),
)


def carried(order: str, *requests: TimedRequest) -> list[tuple[int, int]]:
    """(request, slice) in the order in which the link carried them; every slice takes 10 ns."""
    landings = schedule_link(requests, parse_order(order))
    return [
        (index, part)
        for _, index, part in sorted(
            (landed, index, part) for index, slices in enumerate(landings) for part, landed in enumerate(slices)
        )
    ]


def request(arrival_ns: int, num_slices: int, slice_bytes: int = 8, deadline_ns: int | None = None) -> TimedRequest:
    load = Load((1,) * num_slices, (slice_bytes,) * num_slices, (10,) * num_slices)
    return TimedRequest(arrival_ns, load, (0,) * num_slices, deadline_ns=deadline_ns)


def test_fifo_finishes_one_request_before_the_next() -> None:
    assert carried("fifo", request(0, 2), request(0, 2), request(5, 2)) == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
    ]


def test_shortest_remaining_lets_a_smaller_newcomer_pass_between_slices() -> None:
    assert carried("shortest_remaining", request(0, 3), request(5, 1)) == [(0, 0), (1, 0), (0, 1), (0, 2)]


def test_shortest_remaining_does_not_stop_a_request_that_is_nearly_done() -> None:
    assert carried("shortest_remaining", request(0, 3), request(15, 2)) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]


def test_the_earliest_deadline_goes_first_and_none_goes_last() -> None:
    requests = request(0, 1), request(0, 1, deadline_ns=50), request(0, 1, deadline_ns=40)
    assert carried("deadline", *requests) == [(2, 0), (1, 0), (0, 0)]


def test_round_robin_takes_one_slice_of_each_in_turn() -> None:
    assert carried("round_robin", request(0, 2), request(0, 2), request(0, 1)) == [
        (0, 0),
        (1, 0),
        (2, 0),
        (0, 1),
        (1, 1),
    ]


def test_a_newcomer_joins_round_robin_and_does_not_jump_the_queue() -> None:
    # It arrives in round 2. Counted from round 0 its first three slices would all go before the others' next.
    first = carried("round_robin", request(0, 6), request(25, 3))
    assert first == [(0, 0), (0, 1), (0, 2), (1, 0), (0, 3), (1, 1), (0, 4), (1, 2), (0, 5)]


@pytest.mark.parametrize("order", ORDERS)
def test_equal_requests_go_by_sequence(order: str) -> None:
    assert carried(order, request(0, 1), request(0, 1), request(0, 1)) == [(0, 0), (1, 0), (2, 0)]


@given(SUBMISSIONS, st.sampled_from(list(ORDERS.values())))
def test_there_is_one_key_a_slice_and_it_fits_64_bits(submission: Submission, policy: OrderPolicy) -> None:
    keys = policy.keys(submission)
    assert len(keys) == len(submission.slice_bytes)
    assert all(-(2**63) <= key <= LARGEST_KEY for key in keys)


@pytest.mark.parametrize("name", ORDERS)
def test_a_policy_is_found_by_its_name(name: str) -> None:
    assert parse_order(name).name == name


def test_an_unknown_order_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"fifo, shortest_remaining, deadline, round_robin; got 'lifo'"):
        parse_order("lifo")


@dataclass(frozen=True)
class Mine:
    """A policy that gives whatever it was told to."""

    given: Any
    name: str = "mine"

    def keys(self, submission: Submission) -> tuple[int, ...]:
        return self.given  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("given_keys", "error"),
    [
        ((1,), ValueError),
        ((1, 2, 3), ValueError),
        ((), ValueError),
        ((1, LARGEST_KEY + 1), ValueError),
        ((1.0, 2.0), TypeError),
        (("a", "b"), TypeError),
        ((None, None), TypeError),
        (None, TypeError),
        (7, TypeError),
    ],
)
def test_a_policy_whose_keys_do_not_fit_the_slices_is_refused_by_its_name(
    given_keys: Any, error: type[Exception]
) -> None:
    says = r"order policy 'mine' must give a tuple of 2 keys, .* each a whole number of 64 bits; its keys\(\) gave "
    with pytest.raises(error, match=says):
        slice_keys(Mine(given_keys), Submission(0, 0, (8, 8)))
    with pytest.raises(error, match=says):
        schedule_link([request(0, 2)], Mine(given_keys))


def test_keys_in_a_list_are_as_good_as_in_a_tuple() -> None:
    assert slice_keys(Mine([2, 1]), Submission(0, 0, (8, 8))) == (2, 1)
