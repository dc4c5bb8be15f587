"""Routing: every request goes somewhere, hits are what a pool can have, and load is spread by a stated rule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella.sim.profiles import load_profile
from lamella.sim.routing import (
    BLOCK_TOKENS,
    MAX_BACKLOG_GAP_NS,
    MAX_INSTANCES,
    TARGET_LOAD,
    PoolSizes,
    choose_instances,
    route,
)
from lamella.sim.strategies import Device
from lamella.sim.workload import TRACE_CHUNK_TOKENS, TraceRequest, generate_conversations, scale_rate

DEVICE = Device(load_profile())
GIB = 1 << 30
PLENTY = PoolSizes(1024 * GIB)
SECOND = 1_000_000_000


def prompt(arrival_s: float, *chunks: int, extra: int = 7, output: int = 1) -> TraceRequest:
    """A prompt of these whole chunks and `extra` tokens of its own."""
    own = (10**6 + int(arrival_s * 1000),) if extra else ()
    return TraceRequest(round(arrival_s * SECOND), len(chunks) * TRACE_CHUNK_TOKENS + extra, output, (*chunks, *own))


@given(
    seed=st.integers(0, 50),
    instances=st.integers(1, 4),
    host_gib=st.floats(0, 40),
    gpu_gib=st.floats(0, 10),
)
def test_every_request_is_routed_or_listed_and_its_tokens_add_up(
    seed: int, instances: int, host_gib: float, gpu_gib: float
) -> None:
    trace = [*generate_conversations(seed, 6), TraceRequest(10**15, 150_000, 1, tuple(range(10**7, 10**7 + 293)))]
    routing = route(trace, DEVICE, instances, PoolSizes(int(host_gib * GIB), int(gpu_gib * GIB)))
    positions = [request.position for request in routing.requests] + [one.position for one in routing.excluded]
    assert sorted(positions) == list(range(len(trace)))
    assert [(one.position, one.input_tokens) for one in routing.excluded] == [(len(trace) - 1, 150_000)]
    for request in routing.requests:
        given_request = trace[request.position]
        assert 0 <= request.instance < instances
        assert request.cached_tokens + request.new_tokens == given_request.input_tokens
        assert 0 <= request.loaded_tokens <= request.cached_tokens
        assert request.new_tokens >= 1
        assert request.cached_tokens % BLOCK_TOKENS == 0
        assert request.cached_tokens <= TRACE_CHUNK_TOKENS * len(given_request.whole_chunks)
        assert (request.arrival_ns, request.output_tokens) == (given_request.arrival_ns, given_request.output_tokens)


def test_the_same_trace_is_routed_the_same_way() -> None:
    trace = generate_conversations(5, 40)
    assert route(trace, DEVICE, 3, PLENTY) == route(trace, DEVICE, 3, PLENTY)


def test_a_prefix_is_a_hit_once_its_prefill_is_done_and_not_before() -> None:
    at_once, later = prompt(0.01, 1, 2), prompt(5, 1, 2)
    routing = route([prompt(0, 1, 2), at_once, later], DEVICE, 1, PLENTY)
    assert [request.cached_tokens for request in routing.requests] == [0, 0, 2 * TRACE_CHUNK_TOKENS]


@pytest.mark.known_fault(56)
def test_a_prompt_held_whole_still_computes_its_last_block() -> None:
    routing = route([prompt(0, 1, 2, extra=0), prompt(5, 1, 2, extra=0)], DEVICE, 1, PLENTY)
    assert routing.requests[1].new_tokens == BLOCK_TOKENS


def test_without_a_pool_nothing_is_cached() -> None:
    routing = route([prompt(0, 1, 2), prompt(5, 1, 2)], DEVICE, 1, PoolSizes(0))
    assert routing.hit_share == 0


def test_a_pool_of_one_chunk_holds_the_beginning_of_the_last_prompt() -> None:
    one_chunk = PoolSizes(TRACE_CHUNK_TOKENS * DEVICE.profile.token_bytes)
    routing = route([prompt(0, 1, 2), prompt(5, 1, 2), prompt(10, 3), prompt(15, 1)], DEVICE, 1, one_chunk)
    assert [request.cached_tokens for request in routing.requests] == [0, TRACE_CHUNK_TOKENS, 0, 0]


def test_what_the_engine_itself_holds_is_cached_and_not_loaded() -> None:
    gpu_of_one_chunk = PoolSizes(PLENTY.host_bytes, TRACE_CHUNK_TOKENS * DEVICE.profile.token_bytes)
    second = route([prompt(0, 1, 2, 3), prompt(5, 1, 2, 3)], DEVICE, 1, gpu_of_one_chunk).requests[1]
    assert (second.cached_tokens, second.loaded_tokens) == (3 * TRACE_CHUNK_TOKENS, 2 * TRACE_CHUNK_TOKENS)


def test_a_request_follows_its_prefix() -> None:
    trace = [prompt(0, 1, 2), prompt(0.001, 3, 4), prompt(5, 3, 4), prompt(6, 1, 2), prompt(7, 1, 9)]
    assert [request.instance for request in route(trace, DEVICE, 2, PLENTY).requests] == [0, 1, 1, 0, 0]


def test_a_request_leaves_its_prefix_when_the_backlog_there_is_too_long() -> None:
    long = 16 * 8192 // TRACE_CHUNK_TOKENS - 1
    trace = [
        prompt(0, 1, 2),
        prompt(5, 1, 2, *range(100, 100 + long - 2)),  # several seconds of prefill
        prompt(5.001, 1, 2),
    ]
    routing = route(trace, DEVICE, 2, PLENTY)
    assert DEVICE.prefill_ns(0, long * TRACE_CHUNK_TOKENS) > MAX_BACKLOG_GAP_NS
    assert [request.instance for request in routing.requests] == [0, 0, 1]
    assert routing.requests[2].cached_tokens == 0


def test_a_lone_request_is_estimated_as_admission_load_and_prefill() -> None:
    second = route([prompt(0, 1, 2), prompt(5, 1, 2)], DEVICE, 1, PLENTY).requests[1]
    cached = 2 * TRACE_CHUNK_TOKENS
    admitted = DEVICE.profile.engine.admit_ns(cached + 7)
    assert second.alone_ns == admitted + DEVICE.transfer_ns(cached) + DEVICE.prefill_ns(cached, 7)


@pytest.mark.parametrize("seed", [0, 1])
def test_instances_are_added_until_the_estimated_load_is_low_enough(seed: int) -> None:
    trace = scale_rate(generate_conversations(seed, 200), 8)
    chosen = choose_instances(trace, DEVICE, PLENTY)
    assert chosen.num_instances > 1
    assert max(chosen.gpu_load, chosen.link_load) <= TARGET_LOAD
    assert route(trace, DEVICE, chosen.num_instances // 2, PLENTY).gpu_load > TARGET_LOAD


def test_one_request_gets_one_instance() -> None:
    assert choose_instances([prompt(0, 1)], DEVICE, PLENTY).num_instances == 1


@pytest.mark.parametrize("instances", [0, MAX_INSTANCES + 1])
def test_an_impossible_number_of_instances_is_refused(instances: int) -> None:
    with pytest.raises(ValueError, match=f"instances must be between 1 and {MAX_INSTANCES}, got {instances}"):
        route([prompt(0, 1)], DEVICE, instances, PLENTY)


def test_more_load_than_any_number_of_instances_could_carry_is_refused() -> None:
    with pytest.raises(ValueError, match=f"more than {MAX_INSTANCES} instances; name a number.*timestamps are millis"):
        choose_instances([prompt(0, 1)] * 2000, DEVICE, PLENTY)


@pytest.mark.parametrize("sizes", [(-1, 0), (0, -1)])
def test_a_negative_pool_is_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 0, got -1"):
        PoolSizes(*sizes)


def test_what_only_the_engines_own_cache_holds_is_a_hit_that_loads_nothing() -> None:
    routing = route([prompt(0, 1, 2, 3), prompt(100, 1, 2, 3)], DEVICE, 1, PoolSizes(0, GIB))
    assert [(one.cached_tokens, one.loaded_tokens) for one in routing.requests] == [(0, 0), (3 * TRACE_CHUNK_TOKENS, 0)]
