"""Requests come as they are said to: again after an answer, at a rate, or in conversations."""

import itertools
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella.sim.arrivals import BLOCK_TOKENS, Arrivals, ClosedLoop, Conversations, Poisson
from lamella.sim.profiles import load_profile
from lamella.sim.records import RequestRecord
from lamella.sim.serving import run_world
from lamella.sim.strategies import CHUNK_MAJOR, RECOMPUTE, Device, Regime, parse_strategy

DEVICE = Device(load_profile())
FIFO_FIRST = parse_strategy("fifo/1/first")
REGIME = Regime(4_096, 256, 3, 20)


def records(arrivals: Arrivals, strategy: object = FIFO_FIRST, requests: int = 6, seed: int = 1) -> list[RequestRecord]:
    world = run_world(DEVICE, REGIME, strategy, requests, seed, arrivals)  # type: ignore[arg-type]
    return sorted(world.records, key=lambda record: (record.arrival_ns, record.sequence))


@pytest.mark.parametrize(
    "arrivals", [ClosedLoop(), ClosedLoop(10**9), Poisson(30), Conversations(3, 40, 10**8)], ids=str
)
def test_every_request_asked_for_is_served_and_the_same_seed_gives_the_same(arrivals: Arrivals) -> None:
    assert len(records(arrivals)) == 6 * REGIME.concurrency
    assert records(arrivals) == records(arrivals)
    assert records(arrivals, seed=2) != records(arrivals)


def test_a_user_asks_again_a_think_time_after_the_answer() -> None:
    think = 700_000_000
    found = records(ClosedLoop(think))
    ends = {record.end_ns for record in found}
    later = found[REGIME.concurrency :]
    assert all(record.arrival_ns - think in ends for record in later)


def test_a_rate_is_kept_whatever_the_engine_does() -> None:
    slow, fast = (records(Poisson(40), one, requests=200) for one in (RECOMPUTE, CHUNK_MAJOR))
    arrivals = [record.arrival_ns for record in slow]
    assert arrivals == [record.arrival_ns for record in fast]
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    assert mean(gaps) == pytest.approx(1e9 / 40, rel=0.12)
    variation = (mean(gap**2 for gap in gaps) / mean(gaps) ** 2 - 1) ** 0.5
    assert variation == pytest.approx(1, abs=0.15), "gaps of a Poisson stream are exponential"


@given(st.integers(16, 5_000), st.integers(1, 500), st.integers(1, 300), st.integers(1, 8), st.integers(1, 200))
def test_a_turn_sends_all_that_was_said_and_hits_it_in_whole_blocks(
    hit: int, new: int, output: int, turns: int, question: int
) -> None:
    prompts = list(Conversations(turns, question).prompts(Regime(hit, new, 1, output)))
    assert prompts[0] == (hit, new)
    assert len(prompts) == turns
    for (cached, fresh), (next_cached, next_fresh) in itertools.pairwise(prompts):
        assert next_cached + next_fresh == cached + fresh + output + question
        assert next_cached % BLOCK_TOKENS == 0
        assert 0 <= cached + fresh + output - next_cached < BLOCK_TOKENS


def test_a_turn_follows_the_answer_before_it_and_after_the_last_a_user_begins_anew() -> None:
    turns = 4
    found = records(Conversations(turns, 40, 10**8), requests=10)
    users = REGIME.concurrency
    for user in range(users):
        mine = sorted((record for record in found if record.tag % users == user), key=lambda record: record.tag)
        assert [record.tag // users for record in mine] == list(range(len(mine)))
        for before, after in itertools.pairwise(mine):
            assert after.arrival_ns > before.end_ns, "a user thinks before the next turn"
        contexts = [record.cached_tokens for record in mine]
        for position, cached in enumerate(contexts):
            fresh = position % turns == 0
            assert cached == REGIME.hit_tokens if fresh else cached > contexts[position - 1]


def test_think_times_do_not_depend_on_the_strategy() -> None:
    arrivals = Conversations(3, 40, 10**7)

    def thought(strategy: object) -> dict[int, int]:
        found = {record.tag: record for record in records(arrivals, strategy)}
        users = REGIME.concurrency
        return {
            tag: record.arrival_ns - found[tag - users].end_ns for tag, record in found.items() if tag - users in found
        }

    one, other = thought(FIFO_FIRST), thought(RECOMPUTE)
    common = one.keys() & other.keys()
    assert len(common) >= 10
    assert {tag: one[tag] for tag in common} == {tag: other[tag] for tag in common}


def test_the_longest_prompt_is_known_before_anything_runs() -> None:
    arrivals = Conversations(5, 40)
    longest = arrivals.largest(REGIME)
    found = records(arrivals, requests=5)
    assert longest.hit_tokens + longest.new_tokens == max(one.cached_tokens + one.new_tokens for one in found)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ClosedLoop(-1), "think_ns must be at least 0, got -1"),
        (lambda: Poisson(0), "a rate must be between 0.001 and 100,000 requests a second, got 0"),
        (lambda: Conversations(0), "turns must be at least 1, got 0"),
        (lambda: Conversations(1, 0), "question_tokens must be at least 1, got 0"),
        (lambda: Conversations(1, 1, -5), "think_ns must be at least 0, got -5"),
    ],
)
def test_impossible_arrivals_are_refused(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
