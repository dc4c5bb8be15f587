"""Prompts that find every slot of the pool in use: stored once there is room, by their request or by the next one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lamella.reference.keys import chunk_keys
from with_vllm.answers import Answer
from with_vllm.live_engine import LiveEngine
from with_vllm.replays import HIT, OWN
from with_vllm.tiny_engine import prompt
from with_vllm.turns import turn_with

P = prompt(HIT + OWN)
COUNTERS = "stores_without_room", "stores_after_waiting", "stores_dropped"


@pytest.fixture(autouse=True)
def leaves_nothing_behind(engine: LiveEngine) -> Iterator[None]:
    with turn_with(engine):
        yield


@contextmanager
def every_slot_in_use(engine: LiveEngine) -> Iterator[None]:
    """Others write into all of them."""
    engine.forget_blocks()
    engine.side.reset()
    objects, space = engine.side.objects, engine.side._facts.space
    others = chunk_keys(space, [token % 500 for token in range(objects.num_slots * space.chunk_tokens)])
    reserved = objects.index.reserve(others)
    assert reserved is not None
    try:
        yield
        assert objects.index.occupancy().free == 0, "more slots became ready meanwhile"
    finally:
        objects.index.abandon(reserved.slots)


def counts(engine: LiveEngine) -> list[int]:
    return [engine.side.metrics.total(name) for name in COUNTERS]


def loaded_and_answered(engine: LiveEngine, num_new: int) -> Answer:
    """The prompt's answer from what is stored of it alone."""
    engine.forget_blocks()
    engine.add("again", P, num_new)
    engine.release("again")
    engine.land(engine.load_of("again"))
    return engine.finish("again")[0]


def test_a_prompt_that_found_no_room_is_stored_by_its_request_once_there_is_some(engine: LiveEngine) -> None:
    before = counts(engine)
    with every_slot_in_use(engine):
        engine.add("r1", P, 30)
        engine.step_until(lambda: engine.request("r1").num_output_tokens > 1)
        refused = engine.side.metrics.total("stores_without_room") - before[0]
        assert refused, "its chunks were complete, and there was no room"
    computed = engine.finish("r1")[0]
    engine.settle()
    assert [now - then for now, then in zip(counts(engine), before, strict=True)] == [refused, refused, 0]
    loaded = loaded_and_answered(engine, 30)
    assert loaded.cached == HIT
    assert loaded.same(computed)


def test_a_prompt_that_found_no_room_until_its_end_is_stored_by_the_next_request_that_holds_it(
    engine: LiveEngine,
) -> None:
    """That one computes nothing of it: the engine's own prefix cache holds it."""
    before = counts(engine)
    with every_slot_in_use(engine):
        computed = engine.generate(P, 3)
    assert engine.generate(P, 3).same(computed)
    engine.settle()
    _refused, later, dropped = (now - then for now, then in zip(counts(engine), before, strict=True))
    assert later == dropped == 0
    loaded = loaded_and_answered(engine, 3)
    assert loaded.cached == HIT
    assert loaded.same(computed)
