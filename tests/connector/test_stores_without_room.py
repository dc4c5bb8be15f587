"""Chunks that find no room are stored once there is some: by their request while it runs, or by the next one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella.connector.objects import PoolObjects, Refusal
from lamella.connector.step_orders import Ended
from lamella.connector.vllm_scheduler import SchedulerSide
from lamella.reference.keys import chunk_keys
from scheduler_side import CHUNK, SPACE, Request, Running, done, output_of

NUM_SLOTS = 16


def occupied(side: SchedulerSide) -> tuple[int, ...]:
    """Every slot is being written by others."""
    assert isinstance(side.objects, PoolObjects)
    others = chunk_keys(SPACE, range(5_000, 5_000 + NUM_SLOTS * CHUNK))
    reserved = side.objects.index.reserve(others)
    assert reserved is not None
    return reserved.slots


def test_a_chunk_that_found_no_room_is_stored_once_there_is_some_while_its_request_runs() -> None:
    run = Running()
    slots = occupied(run.side)
    assert run.step(2 * CHUNK) == ()
    assert (run.num_kept, run.count("stores_without_room")) == (0, 1)
    run.pool.index.abandon(slots)
    (order,) = run.step()
    assert (order.first_chunk, order.skip_tokens, order.num_tokens) == (0, 0, 2 * CHUNK)
    assert run.num_kept == 2
    assert (run.count("stores_without_room"), run.count("stores_after_waiting")) == (1, 1)
    assert run.count("stored_tokens") == 2 * CHUNK


def test_what_a_request_left_without_room_the_next_one_that_holds_the_prefix_stores() -> None:
    """All of it is a hit of the engine's own prefix cache, so nothing of it is computed or loaded."""
    run = Running()
    slots = occupied(run.side)
    run.step(2 * CHUNK)
    run.side.request_ended(run.request)
    run.pool.index.abandon(slots)
    later = Request("b", list(range(2 * CHUNK + 1)))
    assert run.side.matched_tokens(later, 2 * CHUNK) == (0, False)
    run.side.allocated(later, ([1, 2, 3, 4],), 0)
    (order,) = run.side.step_orders(output_of(("b", [1, 2, 3, 4, 9], 2 * CHUNK, 1))).stores
    assert (order.first_chunk, order.num_tokens) == (0, 2 * CHUNK)


def test_it_is_tried_after_one_two_and_four_steps_and_with_each_of_its_chunks() -> None:
    run = Running(*[Refusal.NO_ROOM] * 100, num_tokens=CHUNK)
    tried = []
    for step in range(41):
        run.step(1 if step else CHUNK)
        tried += [step] * len(run.stingy.tries)
        run.stingy.tries.clear()
    assert tried == [0, 1, 3, 7, 8, 16, 24, 32, 40]


@given(st.integers(0, 300))
def test_tries_between_two_chunks_are_few_however_long_the_pool_is_full(num_steps: int) -> None:
    run = Running(*[Refusal.NO_ROOM] * 1_000, num_tokens=CHUNK)
    run.step(CHUNK)
    for _ in range(num_steps):
        run.step()
    by_chunks = num_steps // CHUNK
    by_pauses = num_steps.bit_length() + num_steps // 64
    assert len(run.stingy.tries) <= 1 + by_chunks + by_pauses
    assert run.count("stores_without_room") == 1 + by_chunks, "a store counts once, however often it is tried"
    assert run.count("stores_after_waiting") == 0


@given(st.lists(st.sampled_from([None, Refusal.NO_ROOM, Refusal.NO_ANSWER]), max_size=12), st.lists(st.integers(1, 20)))
def test_no_chunk_is_stored_behind_one_that_was_refused_and_all_are_in_the_end(
    script: list[Refusal | None], steps: list[int]
) -> None:
    run = Running(*script, num_tokens=4 * CHUNK)
    run.step(4 * CHUNK)
    kept = run.num_kept
    for num_tokens in steps:
        if run.computed + num_tokens > (NUM_SLOTS - 1) * CHUNK:
            break
        for order in run.step(num_tokens):
            assert order.first_chunk == kept, "a tail whose head is missing could never be hit"
        ready = [run.pool.index.is_ready(key) for key in run.keys]
        assert ready == sorted(ready, reverse=True)
        kept = run.num_kept
    run.stingy.script.clear()
    run.step(CHUNK)
    assert run.num_kept == run.computed // CHUNK
    assert run.count("stores_after_waiting") == run.count("stores_without_room")


def test_what_waits_for_room_goes_with_the_next_chunk_of_its_request() -> None:
    run = Running(*[Refusal.NO_ROOM] * 4, num_tokens=CHUNK)
    run.step(CHUNK)
    assert [order for _ in range(CHUNK - 1) for order in run.step()] == []
    (order,) = run.step()
    assert (order.first_chunk, order.num_tokens) == (0, 2 * CHUNK)


@pytest.mark.parametrize(
    ("refusal", "counted", "tries"), [(Refusal.NO_ROOM, 1, 2), (Refusal.NO_ANSWER, 0, 2), (Refusal.NO_HEAD, 1, 1)]
)
def test_a_lost_head_is_not_tried_again_and_a_silent_server_is_not_a_full_one(
    refusal: Refusal, counted: int, tries: int
) -> None:
    run = Running(refusal)
    run.step(2 * CHUNK)
    for _ in range(3):
        run.step()
    assert len(run.stingy.tries) == tries
    assert run.count("stores_without_room") == counted
    assert run.count("stores_after_waiting") == (counted if refusal is Refusal.NO_ROOM else 0)


def test_chunks_that_another_request_stored_meanwhile_are_not_stored_twice() -> None:
    run = Running(Refusal.NO_ROOM)
    run.step(2 * CHUNK)
    other = Request("b", list(range(2 * CHUNK)))
    run.side.matched_tokens(other, 0)
    run.side.allocated(other, ([],), 0)
    (order,) = run.side.step_orders(output_of(("b", [21, 22, 23, 24], 0, 2 * CHUNK))).stores
    done(run.side, stores={order.number: Ended(1, True)})
    assert [order for _ in range(CHUNK - 1) for order in run.step()] == []
    (own,) = run.step()
    assert (own.first_chunk, own.num_tokens) == (2, 3 * CHUNK)


def test_a_request_that_is_gone_waits_for_nothing() -> None:
    run = Running(Refusal.NO_ROOM)
    run.step(2 * CHUNK)
    run.side.request_ended(run.request)
    for _ in range(5):
        run.side.step_orders(output_of())
    assert len(run.stingy.tries) == 1
    assert run.side.stores._waiting == {}


def test_a_request_that_waits_and_is_in_no_step_is_tried_when_it_is_in_one_again() -> None:
    run = Running(Refusal.NO_ROOM)
    run.step(2 * CHUNK)
    for _ in range(5):
        assert run.side.step_orders(output_of()).stores == ()
    assert len(run.stingy.tries) == 1
    assert len(run.step()) == 1


def test_a_request_that_has_no_keys_any_more_waits_for_nothing() -> None:
    run = Running(Refusal.NO_ROOM)
    run.step(2 * CHUNK)
    run.request.prompt_embeds = "not tokens"  # type: ignore[assignment]
    assert run.step() == ()
    assert (run.side.stores._waiting, len(run.stingy.tries)) == ({}, 1)
