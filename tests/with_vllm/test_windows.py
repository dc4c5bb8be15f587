"""The windows that early release opens in an unmodified engine, each closed by a rule and open without it.

Every load is frozen between two layers and moves only when the test, or a wait, lets it; blocks hold 7.0 beforehand, so
that nothing left over can pass for KV. The letters are those of the design notes on vLLM.
"""

from __future__ import annotations

import math

import pytest
from vllm.v1.outputs import KVConnectorOutput

from with_vllm.answers import Answer
from with_vllm.live_engine import LiveEngine
from with_vllm.no_number import READERS
from with_vllm.replays import HIT, OWN, REPLAYED, replays
from with_vllm.tiny_engine import BLOCK, PLAIN_STEPS, prompt
from with_vllm.turns import turn_with

P = prompt(HIT + OWN)
SHARED = (len(P) - 1) // BLOCK * BLOCK  # what another request with this prompt hits of its blocks
needs_plain_steps = pytest.mark.skipif(
    not PLAIN_STEPS, reason="recompute is refused with asynchronous scheduling or Model Runner V2"
)
FAIL_OR_RECOMPUTE = [pytest.param(False, id="fail"), pytest.param(True, id="recompute", marks=needs_plain_steps)]
NEAR, FAR = 0.1, 0.3  # of KV that should be the same: by rounding alone, and of other tokens or over blocks of those
OTHER = prompt(980, salt=5)  # 31 blocks: more than the 25 that are free beside a held load


by_a_replay = pytest.mark.usefixtures("read_by_a_replay")


@pytest.fixture
def read_by_a_replay(engine: LiveEngine):
    """Under `full_graphs: before` a graph of a whole step read the load; without that the test would show nothing."""
    with replays(engine) as seen:
        yield
    assert any(seen) or not REPLAYED, f"no graph was replayed over what is loaded: {seen}"


@pytest.fixture(autouse=True)
def leaves_nothing_behind(engine: LiveEngine):
    with turn_with(engine):
        yield


@by_a_replay
def test_a_released_request_runs_while_its_layers_land(engine: LiveEngine) -> None:
    computed = engine.stored(P)
    engine.add("r1", P)
    engine.release("r1")
    load = engine.load_of("r1")
    assert load.transfer is not None
    assert load.transfer.landed() == 1
    with engine.landing_on_demand() as waited:
        answer = engine.finish("r1")[0]
    assert answer.same(computed)
    assert answer.cached == HIT
    assert [layer for _request, layer in waited] == ([3] if REPLAYED else [0, 1, 2, 3])
    assert engine.worker.metrics.total("released_early") >= 1


def shared_blocks(engine: LiveEngine) -> tuple[Answer, list[Answer]]:
    computed = engine.stored(P)
    engine.add("r1", P)
    engine.release("r1")
    engine.add("r2", P)
    with engine.landing_on_demand():
        answers = engine.finish("r1", "r2")
    assert (
        answers[1].cached == SHARED
    )  # the engine's own hit: r1's blocks, with r1's own block behind them if it is full
    return computed, answers


@by_a_replay
def test_a_sharer_in_the_same_step_waits_too(engine: LiveEngine) -> None:
    computed, answers = shared_blocks(engine)
    assert all(answer.same(computed) for answer in answers)


@by_a_replay
def test_a_sharer_reads_what_has_not_landed_without_waits(engine: LiveEngine) -> None:
    with engine.without("wait_for_released"):
        computed, answers = shared_blocks(engine)
    assert not any(answer.same(computed) for answer in answers)


@by_a_replay
@pytest.mark.parametrize("waits", READERS)
def test_who_reads_blocks_before_they_land_answers_with_no_number(engine: LiveEngine, waits: bool) -> None:
    """What the right answer is worth: the blocks held no number when the load began."""
    computed = engine.stored(P)
    engine.add("r1", P)
    with engine.landing_on_nothing():
        engine.release("r1")
        load = engine.load_of("r1")
        with engine.without(*([] if waits else ["wait_for_released"])), engine.landing_on_demand():
            answer = engine.finish("r1")[0]
    engine.land(load)
    engine.forget_blocks()
    assert answer.same(computed) == waits
    assert any(map(math.isnan, answer.logprobs)) != waits


def aborted_between_release_and_promotion(engine: LiveEngine) -> tuple[Answer, Answer]:
    expected = engine.stored(OTHER)
    engine.stored(P)
    engine.add("r1", P)
    engine.release("r1")
    load = engine.load_of("r1")
    engine.abort("r1")
    engine.add("r3", OTHER)
    engine.step(6)  # without the hold r3 now computes in r1's blocks, before they land
    engine.land(load)
    return expected, engine.finish("r3")[0]


@pytest.mark.known_fault(32)
def test_b_blocks_of_a_request_aborted_after_release_are_held_until_all_has_landed(engine: LiveEngine) -> None:
    with engine.without("wait_for_released"):  # the hold is enough by itself
        expected, answer = aborted_between_release_and_promotion(engine)
    assert answer.same(expected)


def test_b_blocks_are_overwritten_in_use_without_the_hold(engine: LiveEngine) -> None:
    with engine.without("wait_for_released", "hold_on_abort"):
        expected, answer = aborted_between_release_and_promotion(engine)
    assert not answer.same(expected)


def aborted_before_any_report(engine: LiveEngine) -> tuple[Answer, Answer, float]:
    """(computed, the second request's answer, how far the KV of its prompt is from what was computed)."""
    expected, own = engine.stored_with_kv(OTHER, 960)
    engine.stored(P)
    engine.add("r1", P)
    engine.begin("r1")
    load = engine.load_of("r1")
    engine.wait_until(lambda: load.transfer is not None)
    engine.abort("r1")
    if not engine.side._rules.hold_on_abort:
        engine.land(load, 1)
    engine.add("r3", OTHER)
    engine.step(6)
    if not engine.side._rules.hold_on_abort:  # r3 has its blocks at once, and has filled them by now
        assert engine.request("r3").num_computed_tokens >= len(OTHER)
    if not load.transfer.state.is_final:
        engine.land(load)
    engine.step_until(lambda: engine.request("r3").num_output_tokens > 0)
    apart = engine.apart(engine.kv_of("r3", 960), own)
    return expected, engine.finish("r3")[0], apart


def test_c_a_load_aborted_before_any_report_is_cancelled_and_frees_its_blocks_when_it_has_drained(
    engine: LiveEngine,
) -> None:
    before = engine.side.metrics.total("loads_cancelled")
    with engine.without("wait_for_released"):
        expected, answer, apart = aborted_before_any_report(engine)
    assert answer.same(expected)
    assert apart < NEAR
    assert engine.side.metrics.total("loads_cancelled") == before + 1


def test_c_a_report_at_the_first_layer_frees_blocks_in_flight_without_the_rule(engine: LiveEngine) -> None:
    with engine.without("wait_for_released", "hold_on_abort"):
        _expected, _answer, apart = aborted_before_any_report(engine)
    assert apart > FAR


def aborted_after_promotion(engine: LiveEngine) -> tuple[Answer, Answer, int]:
    """(computed, the second request's answer, tokens that it hit in the engine's own cache)."""
    computed = engine.stored(P)
    engine.add("r1", P)
    engine.release("r1")
    with engine.no_block_for("r1"):
        engine.step()  # promoted, its hashes committed, and not scheduled
    engine.abort("r1")
    engine.add("r2", P)
    hits: list[int] = []
    original = engine.scheduler.connector.get_num_new_matched_tokens

    def ask(request, local_hit):
        hits.append(local_hit)
        return original(request, local_hit)

    engine.scheduler.connector.get_num_new_matched_tokens = ask
    try:
        with engine.landing_on_demand():
            for _ in range(200):
                if "r2" in engine.outputs:
                    break
                for load in engine.loads:
                    if not load.released:  # r2's own load, if it has one, lands behind r1's
                        engine.land(load, 1)
                engine.step()
            return computed, engine.finish("r2")[0], hits[0]
    finally:
        del engine.scheduler.connector.get_num_new_matched_tokens


@by_a_replay
def test_d_nobody_hits_blocks_of_an_aborted_load(engine: LiveEngine) -> None:
    computed, answer, hit = aborted_after_promotion(engine)
    assert answer.same(computed)
    assert hit == 0


@by_a_replay
def test_d_blocks_in_flight_are_hit_without_the_eviction_and_waited_for_all_the_same(engine: LiveEngine) -> None:
    with engine.without("evict_on_abort"):
        computed, answer, hit = aborted_after_promotion(engine)
    assert hit == HIT
    assert answer.same(computed)


@by_a_replay
def test_d_blocks_in_flight_are_read_without_eviction_and_waits(engine: LiveEngine) -> None:
    with engine.without("evict_on_abort", "wait_for_released"):
        computed, answer, hit = aborted_after_promotion(engine)
    assert hit == HIT
    assert not answer.same(computed)


def fails_while_promoted_and_not_scheduled(engine: LiveEngine) -> tuple[Answer, Answer]:
    computed = engine.stored(P)
    engine.fail_at(2)
    engine.add("r1", P)
    engine.release("r1")
    load = engine.load_of("r1")
    with engine.no_block_for("r1"):
        engine.step()
        engine.fail_next(load)
        engine.step(2)  # vLLM looks at requests that wait or run; r1 does neither
    return computed, engine.finish("r1")[0]


@by_a_replay
@pytest.mark.parametrize("recompute", FAIL_OR_RECOMPUTE)
def test_e_an_error_found_while_the_request_is_not_scheduled_is_kept_for_it(
    engine: LiveEngine, recompute: bool
) -> None:
    engine.scheduler.recompute_kv_load_failures = recompute
    computed, answer = fails_while_promoted_and_not_scheduled(engine)
    assert answer.same(computed) if recompute else answer.reason == "error"


def test_e_the_error_is_lost_and_the_tokens_wrong_without_the_rule(engine: LiveEngine) -> None:
    with engine.without("keep_errors"):
        computed, answer = fails_while_promoted_and_not_scheduled(engine)
    assert answer.reason == "length"
    assert not answer.same(computed)


def fails_in_its_step(engine: LiveEngine) -> tuple[Answer, Answer]:
    computed = engine.stored(P)
    engine.fail_at(2)
    engine.add("r1", P)
    engine.release("r1")
    engine.fail_next(engine.load_of("r1"))
    return computed, engine.finish("r1")[0]


@by_a_replay
@pytest.mark.parametrize("recompute", FAIL_OR_RECOMPUTE)
@pytest.mark.known_fault(80)
def test_f_a_failure_in_the_step_that_runs_the_request_is_reported_in_that_step(
    engine: LiveEngine, recompute: bool
) -> None:
    engine.scheduler.recompute_kv_load_failures = recompute
    computed, answer = fails_in_its_step(engine)
    assert answer.same(computed) if recompute else answer.reason == "error"


@by_a_replay
@needs_plain_steps
def test_f_a_report_one_step_late_delivers_a_wrong_token(engine: LiveEngine) -> None:
    engine.scheduler.recompute_kv_load_failures = True
    with engine.without("report_in_same_step"):
        computed, answer = fails_in_its_step(engine)
    assert answer.reason == "length"
    assert not answer.same(computed)


@by_a_replay
def test_f_under_the_policy_fail_no_token_is_delivered(engine: LiveEngine) -> None:
    _computed, answer = fails_in_its_step(engine)
    assert (answer.reason, answer.tokens) == ("error", ())


@by_a_replay
def test_f_under_the_policy_fail_a_report_one_step_late_delivers_a_token(engine: LiveEngine) -> None:
    with engine.without("report_in_same_step"):
        _computed, answer = fails_in_its_step(engine)
    assert answer.reason == "error"
    assert answer.tokens != ()


def shared_while_recomputed(engine: LiveEngine) -> tuple[Answer, list[Answer], list[int], float]:
    """The computation anew takes several steps; the sharer comes after the first.

    Third: its hits in the engine's cache. Fourth: how far its KV is from what was computed.
    """
    engine.scheduler.recompute_kv_load_failures = True
    computed, own = engine.stored_with_kv(P, SHARED)
    engine.fail_at(2)
    engine.add("r1", P)
    engine.release("r1")
    engine.fail_next(engine.load_of("r1"))
    engine.step()  # promoted, run, failed, rolled back
    engine.side.reset()  # the sharer shall find nothing in the pool
    engine.scheduler.scheduler_config.long_prefill_token_threshold = 64  # leaves room for the sharer in each step
    engine.add("r2", P)
    hits: list[int] = []
    original = engine.scheduler.connector.get_num_new_matched_tokens

    def ask(request, local_hit):
        hits.append(local_hit)
        return original(request, local_hit)

    engine.scheduler.connector.get_num_new_matched_tokens = ask
    try:
        engine.step_until(lambda: engine.request("r2").num_output_tokens > 0)
        apart = engine.apart(engine.kv_of("r2", SHARED), own)
        return computed, engine.finish("r1", "r2"), hits, apart
    finally:
        engine.scheduler.scheduler_config.long_prefill_token_threshold = 0
        del engine.scheduler.connector.get_num_new_matched_tokens


@by_a_replay
@needs_plain_steps
@pytest.mark.known_fault(43)
def test_g_nobody_hits_failed_blocks_while_they_are_computed_anew(engine: LiveEngine) -> None:
    computed, answers, hits, apart = shared_while_recomputed(engine)
    assert apart < NEAR
    assert all(answer.same(computed) for answer in answers)
    assert hits[0] == 0


@by_a_replay
@needs_plain_steps
def test_g_failed_blocks_are_hit_without_the_eviction(engine: LiveEngine) -> None:
    with engine.without("evict_on_error", "keep_errors"):
        _computed, _answers, hits, apart = shared_while_recomputed(engine)
    assert hits[0] > 0
    assert apart > FAR


def test_h_a_second_report_is_not_passed_on(engine: LiveEngine) -> None:
    engine.add("r1", prompt(40, salt=3), 30)
    engine.step(2)
    name = engine.request("r1").request_id
    engine.scheduler._update_from_kv_xfer_finished(KVConnectorOutput(finished_recving={name}))
    assert engine.finish("r1")[0].reason == "length"


def test_h_a_second_report_stops_the_engine_without_the_rule(engine: LiveEngine) -> None:
    engine.add("r1", prompt(40, salt=3), 30)
    engine.step(2)
    name = engine.request("r1").request_id
    with engine.without("report_once"), pytest.raises(AssertionError):
        engine.scheduler._update_from_kv_xfer_finished(KVConnectorOutput(finished_recving={name}))
