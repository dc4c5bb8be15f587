"""A step that merely goes on: what it costs the scheduler side, and that chunks are stored all the same.

The cost is counted in calls of our own functions, not in time: it may not depend on how many requests decode.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella.connector.engine_facts import EngineFacts
from lamella.connector.step_orders import Ended, StepOrders
from lamella.connector.tier_prefetch import RankObjects
from lamella.connector.vllm_scheduler import SchedulerSide
from lamella.connector.vllm_settings import ConnectorSettings
from lamella.reference.geometry import ObjectForm
from lamella.reference.keys import KeySpace
from python_calls import counted_calls
from scheduler_side import Request, done

BLOCK, CHUNK = 16, 64
SPACE = KeySpace("m", "float32", ObjectForm.TOKEN, "logical", CHUNK, 0, 1, (0, 4))


class Engine:
    """Requests as vLLM schedules them: blocks come when tokens need them, so many of them ahead."""

    def __init__(self, ahead: int = 0, **settings: Any) -> None:
        facts = EngineFacts((BLOCK,), 64, 1, SPACE, token_budget=8_192)
        self.side = SchedulerSide(ConnectorSettings(**{"layers_per_slice": 1, **settings}), facts)
        self.side.set_ranks([RankObjects(b"s" * 32, 512)], 4_096)
        self.ahead = ahead
        self.requests: dict[str, Request] = {}
        self.blocks: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        self._next_block = 1

    def add(self, name: str, num_tokens: int) -> None:
        """A request that hits nothing."""
        salt = len(self.requests) * 1_000
        request = self.requests[name] = Request(name, [*range(salt, salt + num_tokens)])
        self.side.matched_tokens(request, 0)
        self.side.allocated(request, ([],), 0)

    def step(self, **scheduled: int) -> StepOrders:
        """So many tokens of each of these are computed; whoever has computed its last one gets another."""
        fresh, going = [], []
        for name, tokens in scheduled.items():
            computed = self.computed.get(name, 0)
            before = self.blocks.get(name, 0)
            needed = max(before, -(-(computed + tokens + self.ahead) // BLOCK))
            new = [*range(self._next_block, self._next_block + needed - before)]
            self._next_block += needed - before
            self.blocks[name] = needed
            (going if name in self.computed else fresh).append((name, new, computed))
            self.computed[name] = computed + tokens
        output = SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(req_id=name, block_ids=(new,), num_computed_tokens=computed)
                for name, new, computed in fresh
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[name for name, *_rest in going],
                new_block_ids=[(new,) if new else None for _name, new, _computed in going],
                num_computed_tokens=[computed for *_rest, computed in going],
                resumed_req_ids=set(),
            ),
            num_scheduled_tokens=dict(scheduled),
            total_num_scheduled_tokens=sum(scheduled.values()),
        )
        orders = self.side.step_orders(output)
        for name in scheduled:
            request = self.requests[name]
            if self.computed[name] >= request.num_tokens:
                request.all_token_ids.append(request.all_token_ids[-1] + 1)
        return orders


def decoding(num_requests: int, **settings: Any) -> tuple[Engine, dict[str, int]]:
    """An engine in which so many requests decode, none of them near the end of a block."""
    engine = Engine(**settings)
    names = [f"r{number}" for number in range(num_requests)]
    for name in names:
        engine.add(name, 5)
    engine.step(**dict.fromkeys(names, 5))
    ones = dict.fromkeys(names, 1)
    engine.step(**ones)
    return engine, ones


@pytest.mark.parametrize(
    ("settings", "most_calls"), [({}, 12), ({"release": "jit"}, 14), ({"layers_per_slice": "auto"}, 30)], ids=str
)
def test_a_step_that_only_decodes_costs_as_many_calls_with_64_requests_as_with_one(
    settings: dict[str, Any], most_calls: int
) -> None:
    counts = []
    for num_requests in (1, 16, 64):
        engine, ones = decoding(num_requests, **settings)
        orders = engine.step(**ones)
        with counted_calls() as calls:
            again = engine.step(**ones)
        assert again == orders
        counts.append(calls.total())
    assert counts[0] == counts[1] == counts[2]
    assert counts[0] <= most_calls


@pytest.mark.parametrize("settings", [{}, {"release": "jit"}], ids=str)
def test_orders_of_a_step_that_only_decodes_are_the_last_steps_own(settings: dict[str, Any]) -> None:
    engine, ones = decoding(16, **settings)
    assert engine.step(**ones) is engine.step(**ones)
    assert engine.step(r0=1) is not engine.step(**ones)


def test_who_gets_a_block_is_looked_at_and_nobody_else() -> None:
    engine, ones = decoding(16)
    with counted_calls() as quiet:
        engine.step(**ones)
    engine.step(r3=7)
    with counted_calls() as calls:
        engine.step(**{**ones, "r3": 2})  # its fifteenth and sixteenth token, and then a new block
        engine.step(**ones)
    assert calls["BatchBlocks.num_tokens"] == 1
    assert calls.total() <= 2 * quiet.total() + 10


def test_blocks_far_ahead_bring_no_looks_before_the_chunk_is_complete() -> None:
    engine = Engine(ahead=200)  # as blocks of 256 tokens do
    engine.add("a", 5)
    engine.step(a=5)
    with counted_calls() as calls:
        stored = [engine.step(a=1).stores for _token in range(60)]
    assert calls["BatchBlocks.num_tokens"] <= 60 // BLOCK + 2  # who gets blocks, and the step that completes the chunk
    assert [bool(stores) for stores in stored] == [False] * 58 + [True, False]


def test_who_was_left_out_of_a_step_is_looked_at_in_the_next() -> None:
    engine = Engine(ahead=200)
    for name in "ab":
        engine.add(name, 62)
    engine.step(a=62, b=62)
    engine.step(a=1, b=1)
    assert [one.request for one in engine.step(b=1).stores] == ["b"]
    assert [one.request for one in engine.step(a=1).stores] == ["a"]


@pytest.mark.parametrize("ahead", [0, 3])
def test_a_chunk_is_stored_with_the_step_that_completes_it(ahead: int) -> None:
    engine = Engine(ahead)
    engine.add("a", 60)
    assert engine.step(a=60).stores == ()
    found = [engine.step(a=1).stores for _token in range(8)]
    assert [len(stores) for stores in found] == [0, 0, 0, 1, 0, 0, 0, 0]
    ((store,),) = (stores for stores in found if stores)
    assert (store.first_chunk, store.num_tokens) == (0, CHUNK)


def test_a_store_that_was_dropped_is_ordered_again_by_the_next_step() -> None:
    engine = Engine()
    engine.add("a", 70)
    (store,) = engine.step(a=70).stores
    done(engine.side, stores={store.number: Ended(1, False)})
    (again,) = engine.step(a=1).stores
    assert again.first_chunk == 0


class Scanned:
    """The plain rule: after each step, every request's complete chunks that have not been stored are."""

    def __init__(self) -> None:
        self.stored: dict[str, int] = {}

    def step(self, engine: Engine, known: dict[str, int], scheduled: dict[str, int]) -> set[tuple[str, int, int]]:
        found = set()
        for name in scheduled:
            first, end = self.stored.get(name, 0), min(engine.computed[name], known[name]) // CHUNK
            if end > first:
                self.stored[name] = end
                found.add((name, first, end * CHUNK))
        return found


STEPS = st.lists(
    st.dictionaries(
        st.sampled_from("abcd"), st.sampled_from([1, 1, 1, 2, 15, 16, 17, 47, 63, 64, 65, 200]), min_size=1
    ),
    max_size=30,
)


@given(steps=STEPS, ahead=st.sampled_from([0, 1, 40]), prompts=st.lists(st.integers(1, 300), min_size=4, max_size=4))
def test_as_much_is_stored_in_each_step_as_if_every_request_were_looked_at(
    steps: list[dict[str, int]], ahead: int, prompts: list[int]
) -> None:
    engine, plain = Engine(ahead), Scanned()
    for name, num_tokens in zip("abcd", prompts, strict=True):
        engine.add(name, num_tokens)
    for wanted in steps:
        known = {name: request.num_tokens for name, request in engine.requests.items()}
        scheduled = {name: min(tokens, known[name] - engine.computed.get(name, 0)) for name, tokens in wanted.items()}
        orders = engine.step(**scheduled)
        expected = plain.step(engine, known, scheduled)
        assert {(one.request, one.first_chunk, one.num_tokens) for one in orders.stores} == expected
        done(engine.side, stores={one.number: Ended(1, True) for one in orders.stores})


def test_who_comes_back_after_a_preemption_has_the_blocks_that_it_came_back_with() -> None:
    engine = Engine()
    engine.add("a", 80)
    engine.step(a=40)
    output = SimpleNamespace(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=["a"], new_block_ids=[([50, 51, 52, 53],)], num_computed_tokens=[0], resumed_req_ids={"a"}
        ),
        num_scheduled_tokens={"a": 64},
        total_num_scheduled_tokens=64,
    )
    (store,) = engine.side.step_orders(output).stores
    assert store.blocks == ((50, 51, 52, 53),)
