"""The cache engine beside an eviction, a tier that loses, hangs or dies: what is left is exact, and bounded in time."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from cache_driver import (
    HERE,
    THERE,
    TOKENS,
    Deployment,
    MemoryTier,
    advance,
    only_in_tier,
    tiered,
)
from engine_driver import ENGINE_MISSING
from lamella.connector.storage.circuit import CircuitBreaker, GuardedTier

pytestmark = pytest.mark.skipif(ENGINE_MISSING is not None, reason=str(ENGINE_MISSING))


@pytest.mark.known_fault(5)
def test_a_chunk_evicted_in_the_middle_ends_the_hit_before_anything_is_written() -> None:
    with Deployment() as run:
        run.store(TOKENS, HERE)
        run.pool.discard([run.cache_engine.keys_of(TOKENS)[2]])
        run.cache[:, :, THERE] = 7
        loading = run.cache_engine.retrieve_layer(TOKENS, [THERE])
        assert next(loading) == 8
        *_, mask = list(loading)
        assert mask.tolist() == [True] * 8 + [False] * 8
        assert (run.cache[:, :, THERE[4:]] == 7).all()


@pytest.mark.known_fault(5)
def test_a_chunk_evicted_between_two_layers_stays_until_its_last_layer_landed() -> None:
    with Deployment() as run:
        run.store(TOKENS, HERE)
        loading = run.cache_engine.retrieve_layer(TOKENS, [THERE])
        advance(loading, 2)
        run.pool.discard(run.cache_engine.keys_of(TOKENS))
        *_, mask = list(loading)
        assert mask.all()
        assert all(run.holds(layer, TOKENS, THERE, 0, 16) for layer in range(run.num_layers))
        assert run.cache_engine.lookup(TOKENS) == 0


@pytest.mark.known_fault(80)
def test_a_chunk_that_a_tier_loses_between_two_layers_is_reported_in_the_same_step_and_in_the_mask() -> None:
    run, tier = tiered(num_layers=4)
    with run:
        only_in_tier(run, TOKENS)
        loading = run.cache_engine.retrieve_layer(TOKENS, [THERE])
        assert advance(loading, 2) == [16, 16]
        run.settle()  # layer 1 is read ahead
        del tier.objects[run.cache_engine.keys_of(TOKENS)[1]]
        *progress, mask = list(loading)
        assert progress[-1] == 4
        assert mask.tolist() == [True] * 4 + [False] * 12
        assert all(run.holds(layer, TOKENS, THERE, 0, 4) for layer in range(4))
        assert run.references() == (0, 0, 0)


@pytest.mark.known_fault(80)
def test_a_tier_that_dies_between_two_layers_costs_the_load_and_nothing_else() -> None:
    run, tier = tiered(num_layers=4)
    with run:
        only_in_tier(run, TOKENS)
        loading = run.cache_engine.retrieve_layer(TOKENS, [THERE])
        advance(loading, 2)
        tier.down = True
        *progress, mask = list(loading)
        assert len(progress) == 3
        assert not mask.any()
        assert run.references() == (0, 0, 0)


def test_a_tier_that_hangs_costs_a_bounded_wait() -> None:
    """SAFE-5: the read is given up after the bound, and what it brings afterwards is not copied anywhere."""
    run, tier = tiered(timeout_s=0.2)
    with run:
        only_in_tier(run, TOKENS)
        read, hang = tier.get_ranges, HangingRead(tier.get_ranges)
        tier.get_ranges = hang  # type: ignore[method-assign]
        run.cache[:, :, THERE] = 7
        assert not run.retrieve(TOKENS, THERE).any()
        hang.let_go()
        tier.get_ranges = read  # type: ignore[method-assign]
        assert run.references() == (0, 0, 0)
        assert (run.cache[:, :, THERE] == 7).all()


def test_a_read_that_answers_after_its_retrieve_was_closed_is_copied_nowhere() -> None:
    """SAFE-1: the blocks were the caller's again when close() returned."""
    run, tier = tiered()
    with run:
        only_in_tier(run, TOKENS)
        read, hang = tier.get_ranges, HangingRead(tier.get_ranges)
        tier.get_ranges = hang  # type: ignore[method-assign]
        loading = run.cache_engine.retrieve_layer(TOKENS, [THERE])
        advance(loading, 2)
        loading.close()
        run.cache[:, :, THERE] = 7
        hang.let_go()
        tier.get_ranges = read  # type: ignore[method-assign]
        assert run.references() == (0, 0, 0)
        assert (run.cache[:, :, THERE] == 7).all()


class HangingRead:
    """A read that answers only once it is let go."""

    def __init__(self, read: Callable[..., None]) -> None:
        self._read = read
        self._gate = threading.Event()

    def __call__(self, *arguments: Any) -> None:
        assert self._gate.wait(20)
        self._read(*arguments)

    def let_go(self) -> None:
        self._gate.set()


def test_an_open_circuit_is_a_miss_and_the_pool_still_serves() -> None:
    memory = MemoryTier(0)
    tier = GuardedTier(memory, CircuitBreaker("memory", 1, 10**9, lambda: 0))
    with Deployment(tiers=[tier]) as run:
        memory.object_bytes = run.layout.object_bytes
        run.store(TOKENS, HERE)
        run.settle()
        run.pool.discard(run.cache_engine.keys_of(TOKENS)[2:])
        tier.breaker.failed("gone")
        assert run.retrieve(TOKENS, THERE).tolist() == [True] * 8 + [False] * 8
        assert run.store(TOKENS, HERE) == 8
