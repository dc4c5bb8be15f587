"""What a hit is, and who asks for it again: the windows of `test_windows.py` that a request's own load opens."""

from __future__ import annotations

import pytest

from with_vllm.live_engine import LiveEngine
from with_vllm.replays import HIT, OWN
from with_vllm.tiny_engine import BLOCK, PLAIN_STEPS, prompt
from with_vllm.turns import turn_with

P = prompt(HIT + OWN)
needs_plain_steps = pytest.mark.skipif(
    not PLAIN_STEPS, reason="recompute is refused with asynchronous scheduling or Model Runner V2"
)


@pytest.fixture(autouse=True)
def leaves_nothing_behind(engine: LiveEngine):
    with turn_with(engine):
        yield


def blocks_written_beside_the_load(engine: LiveEngine) -> set[int]:
    """Blocks of the load that the request's first own step writes too; the prompt is chunks to its last token."""
    whole = P[:HIT]
    computed = engine.stored(whole)
    engine.add("r1", whole)
    engine.release("r1")
    load = engine.load_of("r1")
    table = engine.scheduler.kv_cache_manager.get_block_ids(engine.request("r1").request_id)[0]
    with engine.landing_on_demand():
        answer = engine.finish("r1")[0]
    if engine.side._rules.whole_blocks:  # otherwise a GPU writes and loads the block at once, in either order
        assert answer.same(computed)
    first_new = min(load.order.num_tokens, len(whole) - 1)  # the engine computes the last token anew in any case
    return load.blocks & set(table[first_new // BLOCK :])


@pytest.mark.known_fault(52, 56)
def test_i_a_hit_ends_at_a_block_and_before_the_last_token(engine: LiveEngine) -> None:
    assert blocks_written_beside_the_load(engine) == set()


def test_i_a_block_is_loaded_and_written_in_one_step_without_the_rule(engine: LiveEngine) -> None:
    with engine.without("whole_blocks"):
        assert blocks_written_beside_the_load(engine) != set()


def asks_after_failures(engine: LiveEngine) -> tuple[bool, int]:
    """(whether the request got its right answer within 40 steps, how many loads were tried)."""
    engine.scheduler.recompute_kv_load_failures = True
    computed = engine.stored(P)
    loads = engine.worker.loads
    original, tried = loads._submit, []

    def refuse(order):
        tried.append(order)

        def fail():
            raise RuntimeError("planted")

        return fail

    loads._submit = refuse
    try:
        engine.add("r1", P)
        for _ in range(40):
            engine.wait_until(lambda: all(load.submitted.done() for load in loads._loads.values()))
            engine.step()
    finally:
        loads._submit = original
    answer = engine.outputs.pop("r1", None)
    return answer is not None and answer.same(computed), len(tried)


@needs_plain_steps
def test_j_a_request_whose_load_failed_is_computed(engine: LiveEngine) -> None:
    assert asks_after_failures(engine) == (True, 1)


@needs_plain_steps
def test_j_it_asks_for_ever_without_the_rule(engine: LiveEngine) -> None:
    with engine.without("remember_failures"):
        right, tried = asks_after_failures(engine)
    assert not right
    assert tried > 10


def same_prompt_twice(engine: LiveEngine) -> tuple[bool, int]:
    computed = engine.stored(P)
    before = engine.side.metrics.total("loads")
    engine.add("r1", P)
    engine.add("r2", P)
    engine.step()
    for load in engine.loads:
        engine.land(load)
    with engine.landing_on_demand():
        answers = engine.finish("r1", "r2")
    return all(answer.same(computed) for answer in answers), engine.side.metrics.total("loads") - before


def test_k_requests_for_the_same_chunks_share_one_load(engine: LiveEngine) -> None:
    assert same_prompt_twice(engine) == (True, 1)


def test_k_they_load_twice_without_the_rule(engine: LiveEngine) -> None:
    with engine.without("share_loads"):
        assert same_prompt_twice(engine) == (True, 2)
