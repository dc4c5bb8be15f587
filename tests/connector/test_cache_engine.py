"""The cache engine's generators: protocols that always complete, hits that are exact, and references that come back."""

import threading
import time

import numpy as np
import pytest

from cache_driver import (
    CHUNK,
    HERE,
    THERE,
    TOKENS,
    WAIT_S,
    Deployment,
    advance,
    only_in_tier,
    tiered,
)
from engine_driver import ENGINE_MISSING
from lamella.connector.storage.circuit import CircuitBreaker, CircuitState
from lamella.reference.plan import Direction

pytestmark = pytest.mark.skipif(ENGINE_MISSING is not None, reason=str(ENGINE_MISSING))


# ---- the protocol


def test_what_was_stored_comes_back_into_other_blocks() -> None:
    with Deployment() as run:
        assert run.store(TOKENS, HERE) == 16
        assert run.cache_engine.lookup(TOKENS) == 16
        mask = run.retrieve(TOKENS, THERE)
        assert mask.all()
        assert all(run.holds(layer, TOKENS, THERE, 0, 16) for layer in range(run.num_layers))
        assert run.references() == (0, 0, 0)


def test_setup_and_layers_say_how_much_comes_and_the_last_yield_which() -> None:
    with Deployment(num_layers=3) as run:
        run.store(TOKENS[:8], HERE)
        *progress, mask = list(run.cache_engine.retrieve_layer(TOKENS, [THERE]))
        assert progress == [8, 8, 8, 8], "setup and N layers"
        assert mask.tolist() == [True] * 8 + [False] * 8


@pytest.mark.known_fault(1, 50)
@pytest.mark.parametrize("tokens", [[], [1], TOKENS], ids=["no tokens", "less than a chunk", "a miss"])
def test_a_miss_completes_the_protocol_without_device_work(tokens: list[int]) -> None:
    with Deployment() as run:
        *progress, mask = list(run.cache_engine.retrieve_layer(tokens, [THERE]))
        assert progress == [0] * (run.num_layers + 1)
        assert (mask.shape, mask.any()) == ((len(tokens),), False)
        assert run.engine.lane(Direction.RETRIEVE).windows == 0


@pytest.mark.known_fault(1, 50)
def test_a_hit_that_the_engine_has_already_moves_nothing_and_completes() -> None:
    with Deployment() as run:
        run.store(TOKENS, HERE)
        *progress, mask = list(run.cache_engine.retrieve_layer(TOKENS, [THERE], np.zeros(16, np.bool_)))
        assert (progress, mask.any()) == ([0] * 4, False)
        assert run.engine.lane(Direction.RETRIEVE).windows == 0


@pytest.mark.known_fault(2)
def test_chunks_that_are_stored_already_complete_the_protocol_and_move_nothing() -> None:
    with Deployment() as run:
        run.store(TOKENS, HERE)
        windows = run.engine.lane(Direction.STORE).windows
        assert run.store(TOKENS, THERE) == 0
        assert run.engine.lane(Direction.STORE).windows == windows
        assert run.references() == (0, 0, 0)


@pytest.mark.known_fault(2)
def test_a_store_that_fails_under_way_completes_its_protocol_and_leaves_nothing() -> None:
    with Deployment() as run:
        run.engine.plant_fault(Direction.STORE, 1)  # the second layer's window
        assert run.store(TOKENS, HERE) == 0
        assert run.cache_engine.lookup(TOKENS) == 0, "half an object is no object"
        assert run.references() == (0, 0, 0)
        assert run.store(TOKENS, HERE) == 16, "its slots are free again"


@pytest.mark.known_fault(2)
def test_an_unhealthy_device_makes_misses_and_skipped_stores_not_errors() -> None:
    clock_ns = [0]
    breaker = CircuitBreaker("device", 1, 100, lambda: clock_ns[0])
    with Deployment(breaker=breaker) as run:
        run.store(TOKENS, HERE)
        run.engine.plant_fault(Direction.RETRIEVE, 0)
        assert not run.retrieve(TOKENS, THERE).any()
        assert breaker.state is CircuitState.OPEN
        assert run.cache_engine.lookup(TOKENS) == 0
        assert not run.retrieve(TOKENS, THERE).any()
        assert run.store([1, 2, 3, 4], HERE) == 0
        clock_ns[0] = 100
        assert run.retrieve(TOKENS, THERE).all()
        assert breaker.state is CircuitState.CLOSED


@pytest.mark.known_fault(2)
def test_a_device_that_turns_unhealthy_between_two_layers_does_not_end_the_protocol() -> None:
    breaker = CircuitBreaker("device", 1, 100, lambda: 0)
    with Deployment(breaker=breaker) as run:
        saving = run.cache_engine.store_layer(TOKENS, [HERE])
        run.compute(0, TOKENS, HERE)
        next(saving)
        breaker.failed("somewhere else")
        assert len(advance(saving, run.num_layers)) == run.num_layers, "N+1 yields in all"


@pytest.mark.known_fault(2)
@pytest.mark.parametrize("layer", range(3))
def test_a_transfer_that_fails_in_any_layer_leaves_n_plus_2_yields_and_an_honest_mask(layer: int) -> None:
    with Deployment(num_layers=3) as run:
        run.store(TOKENS, HERE)
        run.engine.plant_fault(Direction.RETRIEVE, layer)
        *progress, mask = list(run.cache_engine.retrieve_layer(TOKENS, [THERE]))
        assert len(progress) == 4
        assert not mask.any(), "no token has all its layers"
        assert progress == sorted(progress, reverse=True)
        assert run.references() == (0, 0, 0)


# ---- nothing is leaked, whenever it ends


@pytest.mark.parametrize("times", range(6))
def test_a_retrieve_closed_at_any_yield_holds_and_moves_nothing(times: int) -> None:
    run, _ = tiered(num_layers=4)
    with run:
        only_in_tier(run, TOKENS)
        run.store(TOKENS[:8], HERE)  # the first half is in the pool again
        loading = run.cache_engine.retrieve_layer(TOKENS, [THERE])
        advance(loading, times)
        loading.close()
        assert run.references() == (0, 0, 0)


@pytest.mark.parametrize("times", range(5))
def test_a_store_closed_at_any_yield_can_not_be_found_unless_it_was_whole(times: int) -> None:
    with Deployment(num_layers=4) as run:
        saving = run.cache_engine.store_layer(TOKENS, [HERE])
        advance(saving, times)
        saving.close()
        assert run.references() == (0, 0, 0)
        assert run.cache_engine.lookup(TOKENS) == 0


def test_a_retriever_that_gave_its_mask_and_a_storer_that_gave_its_end_hold_nothing_though_nobody_closed_them() -> None:
    with Deployment() as run:
        saving = run.cache_engine.store_layer(TOKENS, [HERE])
        assert advance(saving, run.num_layers + 1)[-1] == 16
        assert run.references() == (0, 0, 0)
        loading = run.cache_engine.retrieve_layer(TOKENS, [THERE])
        advance(loading, run.num_layers + 1)
        assert run.pool.report().occupancy.pinned == 4, "until the mask"
        assert next(loading).all()
        assert run.references() == (0, 0, 0)


def test_retrievers_that_read_a_tier_or_came_short_hold_nothing_either_once_they_gave_their_mask() -> None:
    run, tier = tiered(num_layers=4, storage_options={"promote": True})
    with run:
        only_in_tier(run, TOKENS)
        lost = run.cache_engine.keys_of(TOKENS)[2]
        whole = run.cache_engine.retrieve_layer(TOKENS, [THERE])
        assert advance(whole, 6)[-1].all()
        assert run.references() == (0, 0, 0)
        run.pool.discard(run.cache_engine.keys_of(TOKENS))
        short = run.cache_engine.retrieve_layer(TOKENS, [list(range(16, 24))])
        next(short)
        run.settle()
        del tier.objects[lost]
        assert advance(short, 5)[-1].sum() == 8
        assert run.references() == (0, 0, 0)


def test_a_storer_that_failed_holds_no_room_once_it_has_said_so() -> None:
    with Deployment() as run:
        run.engine.plant_fault(Direction.STORE, 1)
        saving = run.cache_engine.store_layer(TOKENS, [HERE])
        assert advance(saving, run.num_layers + 1)[-1] == 0
        assert run.references() == (0, 0, 0)


def test_what_is_still_being_copied_when_the_mask_is_given_stays_pinned_until_it_has_drained() -> None:
    """XFER-2: the compute stream waits for layers, not the thread that advances; a load that failed ends as early."""
    with Deployment(engine_options={"paced": True, "in_flight_bytes": 1}, timeout_s=0.2) as run:
        run.engine.grant(Direction.STORE, 1000)
        run.store(TOKENS, HERE)
        loading = run.cache_engine.retrieve_layer(TOKENS, [THERE])
        *_, mask = advance(loading, run.num_layers + 2)  # no window is granted: every wait runs out
        assert not mask.any()
        assert run.engine.lane(Direction.RETRIEVE).in_flight_bytes
        assert run.pool.report().occupancy.pinned == 4
        run.engine.grant(Direction.RETRIEVE, 1000)
        assert run.references() == (0, 0, 0)


def test_a_retrieve_closed_while_a_window_is_in_flight_returns_only_once_it_has_drained() -> None:
    """SAFE-1: the blocks can be reused as soon as close() has returned, and not before; what waits is cancelled."""
    with Deployment(engine_options={"paced": True, "in_flight_bytes": 1}) as run:
        run.engine.grant(Direction.STORE, 1000)
        run.store(TOKENS, HERE)
        loading = run.cache_engine.retrieve_layer(TOKENS, [THERE], sync=False)
        advance(loading, 1 + run.num_layers)
        deadline = time.monotonic() + WAIT_S
        while not run.engine.lane(Direction.RETRIEVE).in_flight_bytes:
            assert time.monotonic() < deadline, "the window was never issued"
        closing = threading.Thread(target=loading.close)
        closing.start()
        closing.join(0.1)
        assert closing.is_alive(), "a window is in flight"
        run.engine.grant(Direction.RETRIEVE, 1)
        closing.join(WAIT_S / 2)
        assert not closing.is_alive()
        run.cache[:, :, THERE] = 7
        assert run.references() == (0, 0, 0)
        assert (run.cache[:, :, THERE] == 7).all()


@pytest.mark.known_fault(4)
def test_a_pool_of_one_less_serves_any_number_of_requests_and_frees_every_one() -> None:
    with Deployment(num_slots=3) as run:
        for number in range(8):
            tokens = [1000 * number + place for place in range(CHUNK)]
            assert run.store(tokens, HERE) == CHUNK
            assert run.retrieve(tokens, THERE).all()
            assert run.references() == (0, 0, 0)


@pytest.mark.known_fault(40)
def test_two_requests_for_one_chunk_pin_it_twice_and_the_first_to_end_frees_nothing() -> None:
    with Deployment(num_slots=4) as run:
        run.store(TOKENS, HERE)
        first = run.cache_engine.retrieve_layer(TOKENS, [list(range(8, 16))], sync=False)
        second = run.cache_engine.retrieve_layer(TOKENS, [list(range(16, 24))])
        advance(first, 2)
        advance(second, 2)
        first.close()
        run.settle()
        assert run.pool.report().occupancy.pinned == 4
        assert run.store([1, 2, 3, 4], HERE) == 0, "nothing may be evicted"
        *_, mask = list(second)
        assert mask.all()
        assert all(run.holds(layer, TOKENS, list(range(16, 24)), 0, 16) for layer in range(run.num_layers))
        assert run.references() == (0, 0, 0)


@pytest.mark.known_fault(41)
def test_a_sequence_larger_than_the_pool_is_not_stored_at_all() -> None:
    with Deployment(num_slots=3) as run:
        assert run.store(TOKENS, HERE) == 0
        assert run.pool.report().occupancy.free == 3
        assert run.store(TOKENS[:12], HERE) == 12


@pytest.mark.known_fault(41)
def test_a_prefix_larger_than_the_layer_buffers_comes_as_far_as_they_reach() -> None:
    run, _ = tiered(num_buffers=3)
    with run:
        only_in_tier(run, TOKENS)
        assert run.cache_engine.lookup(TOKENS) == 12
        assert run.retrieve(TOKENS, THERE).tolist() == [True] * 12 + [False] * 4
        assert run.references() == (0, 0, 0)
