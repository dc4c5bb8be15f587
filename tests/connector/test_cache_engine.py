"""The cache engine's generators: protocols that always complete, hits that are exact, and references that come back."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_driver import BLOCK, CHUNK, WAIT_S, Deployment, MemoryTier, advance
from engine_driver import ENGINE_MISSING
from lamella.connector.cache_engine import CacheEngine
from lamella.connector.storage.circuit import CircuitBreaker, CircuitState, GuardedTier
from lamella.reference.geometry import ObjectForm
from lamella.reference.layout import ByteRange
from lamella.reference.plan import Direction

pytestmark = pytest.mark.skipif(ENGINE_MISSING is not None, reason=str(ENGINE_MISSING))

TOKENS = list(range(100, 116))  # 4 chunks
HERE, THERE = list(range(8)), list(range(8, 16))


def tiered(**options: Any) -> tuple[Deployment, MemoryTier]:
    """A deployment with a tier behind its pool."""
    tier = MemoryTier(0)
    run = Deployment(tiers=[tier], **options)
    tier.object_bytes = run.layout.object_bytes
    return run, tier


def only_in_tier(run: Deployment, tokens: list[int]) -> None:
    """The sequence's objects are in the tier and no longer in the pool."""
    run.store(tokens, HERE)
    run.settle()
    run.pool.discard(run.cache_engine.keys_of(tokens))


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


# ---- misses and losses


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


# ---- masks


@pytest.mark.known_fault(55)
def test_a_mask_that_is_no_multiple_of_the_chunk_loads_exactly_its_tokens() -> None:
    with Deployment() as run:
        run.store(TOKENS, HERE)
        run.cache[:, :, THERE] = 7
        mask = np.arange(16) >= 5
        assert run.retrieve(TOKENS, THERE, mask=mask).tolist() == mask.tolist()
        for layer in range(run.num_layers):
            assert run.holds(layer, TOKENS, THERE, 5, 16)
            assert (run.cache[layer, :, THERE[:2]] == 7).all()
            assert (run.cache[layer, :, THERE[2], 0] == 7).all()


@pytest.mark.known_fault(55)
def test_a_store_whose_mask_begins_inside_a_chunk_stores_that_chunk_whole() -> None:
    with Deployment() as run:
        assert run.store(TOKENS, HERE, mask=np.arange(16) >= 5) == 12
        assert run.cache_engine.lookup(TOKENS) == 0
        assert run.store(TOKENS[:4], HERE) == 4
        assert run.retrieve(TOKENS, THERE).all()
        assert all(run.holds(layer, TOKENS, THERE, 0, 16) for layer in range(run.num_layers))


@pytest.mark.known_fault(55)
def test_in_block_form_a_mask_that_cuts_a_block_is_refused_before_anything_moves() -> None:
    with Deployment(form=ObjectForm.BLOCK) as run:
        run.store(TOKENS, HERE)
        with pytest.raises(ValueError, match="in block form skip_tokens must be a multiple of 2, got 5"):
            next(run.cache_engine.retrieve_layer(TOKENS, [THERE], np.arange(16) >= 5))
        assert run.references() == (0, 0, 0)


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (np.ones(15, np.bool_), r"each of 16 tokens, got shape \(15,\)"),
        (np.arange(16) != 6, "one run of tokens, got False at 6 inside 0 .. 15"),
    ],
)
def test_a_mask_that_means_nothing_is_refused(mask: Any, reason: str) -> None:
    with Deployment() as run:
        for begin in (run.cache_engine.retrieve_layer, run.cache_engine.store_layer):
            with pytest.raises(ValueError, match=reason):
                next(begin(TOKENS, [HERE], mask))


def test_a_store_cannot_end_before_the_sequence_does() -> None:
    with Deployment() as run, pytest.raises(ValueError, match="True to its end, got False from token 12"):
        next(run.cache_engine.store_layer(TOKENS, [HERE], np.arange(16) < 12))


def test_blocks_that_are_missing_or_named_twice_are_refused_before_anything_is_taken() -> None:
    with Deployment() as run:
        run.store(TOKENS, HERE)
        for table, reason in ((THERE[:7], "need 8 blocks"), ([8] * 8, "written twice"), ([99] * 8, "outside")):
            with pytest.raises(ValueError, match=reason):
                next(run.cache_engine.retrieve_layer(TOKENS, [table]))
        with pytest.raises(ValueError, match="need 8 blocks"):
            next(run.cache_engine.store_layer(TOKENS, [HERE[:7]]))
        assert run.references() == (0, 0, 0)


def test_chunks_that_the_engine_has_already_are_not_read_from_a_tier() -> None:
    run, tier = tiered(num_buffers=2)
    with run:
        only_in_tier(run, TOKENS)
        keys = run.cache_engine.keys_of(TOKENS)
        mask = np.arange(16) >= 10
        assert run.retrieve(TOKENS, THERE, mask=mask).tolist() == mask.tolist(), "two chunks, for which buffers suffice"
        assert all(run.holds(layer, TOKENS, THERE, 10, 16) for layer in range(run.num_layers))
        assert {key for key, _ in tier.reads} == set(keys[2:])


def test_a_store_that_nobody_wants_stores_nothing_not_even_a_partial_chunk() -> None:
    with Deployment(save_partial_chunk=True) as run:
        assert run.store(TOKENS[:10], HERE, mask=np.zeros(10, np.bool_)) == 0
        assert run.pool.report().occupancy.ready == 0


# ---- what a scheduler asks


@pytest.mark.known_fault(56)
def test_a_prompt_that_is_wholly_cached_leaves_its_last_token_to_compute() -> None:
    with Deployment() as run:
        run.store(TOKENS, HERE)
        assert run.cache_engine.num_new_matched_tokens(TOKENS, 0) == 15
        assert run.cache_engine.num_new_matched_tokens([*TOKENS, 1], 0) == 16
        mask = np.arange(16) < 15
        run.cache[:, :, THERE] = 7
        assert run.retrieve(TOKENS, THERE, mask=mask).tolist() == mask.tolist()
        assert (run.cache[:, :, THERE[7], 1] == 7).all(), "the slot that the engine is about to write"
    with Deployment(form=ObjectForm.BLOCK) as run:
        run.store(TOKENS, HERE)
        assert run.cache_engine.num_new_matched_tokens(TOKENS, 0) == 14, "whole blocks only"


@pytest.mark.known_fault(58)
@given(computed=st.integers(0, 40), length=st.integers(0, 16))
def test_new_matched_tokens_are_never_negative_and_never_the_last(computed: int, length: int) -> None:
    with Deployment() as run:
        run.store(TOKENS[:8], HERE)
        tokens = TOKENS[:length]
        matched = run.cache_engine.num_new_matched_tokens(tokens, computed)
        assert matched == max(0, min(8 if length >= 8 else length // CHUNK * CHUNK, max(0, length - 1)) - computed)


def test_a_tenant_that_is_not_bytes_is_refused_by_name_and_nothing_is_stored() -> None:
    with Deployment() as run:
        for call in (run.cache_engine.lookup, run.cache_engine.keys_of):
            with pytest.raises(TypeError, match=r"tenant must be bytes or None, got 'ada': encode it"):
                call(TOKENS, tenant="ada")
        with pytest.raises(TypeError, match="tenant must be bytes"):
            run.store(TOKENS, HERE, tenant="ada")
        with pytest.raises(TypeError, match="tenant must be bytes"):
            run.retrieve(TOKENS, THERE, tenant="ada")
        assert run.references() == (0, 0, 0)
        assert run.cache_engine.lookup(TOKENS, tenant=b"ada") == 0


def test_tenants_and_ranks_do_not_find_one_anothers_objects() -> None:
    with Deployment() as run:
        assert run.store(TOKENS, HERE, tenant=b"ada") == 16
        assert run.cache_engine.lookup(TOKENS, tenant=b"ada") == 16
        assert run.cache_engine.lookup(TOKENS, tenant=b"bob") == run.cache_engine.lookup(TOKENS) == 0
        assert not run.retrieve(TOKENS, THERE, tenant=b"bob").any()
    tier = MemoryTier(0)
    for rank, expected in ((0, 0), (1, 0), (0, 16)):
        with Deployment(tiers=[tier], rank=rank) as run:
            tier.object_bytes = run.layout.object_bytes
            assert run.cache_engine.lookup(TOKENS) == expected
            run.store(TOKENS, HERE)


def test_a_lookup_names_the_longest_prefix_over_pool_and_tier() -> None:
    run, _ = tiered()
    with run:
        only_in_tier(run, TOKENS)
        keys = run.cache_engine.keys_of(TOKENS)
        run.store(TOKENS[:4], HERE)
        run.settle()
        assert run.cache_engine.lookup(TOKENS) == 16
        run.storage.delete(keys[3:])
        assert run.cache_engine.lookup(TOKENS) == 12
        run.storage.delete(keys[1:2])
        assert run.cache_engine.lookup(TOKENS) == 4


# ---- shapes


@pytest.mark.known_fault(10)
@pytest.mark.parametrize("form", ObjectForm)
@pytest.mark.parametrize("use_gpu", [True, False])
def test_mla_has_one_plane_a_token_in_pool_and_tier(form: ObjectForm, use_gpu: bool) -> None:
    run, tier = tiered(kv=1, form=form, use_gpu=use_gpu)
    with run:
        run.store(TOKENS, HERE)
        assert run.retrieve(TOKENS, THERE).all()
        assert all(run.holds(layer, TOKENS, THERE, 0, 16) for layer in range(run.num_layers))
        run.settle()
        run.pool.discard(run.cache_engine.keys_of(TOKENS))
        run.cache[:, :, THERE] = 0
        assert run.retrieve(TOKENS, THERE).all()
        assert all(run.holds(layer, TOKENS, THERE, 0, 16) for layer in range(run.num_layers))
        layer_bytes = run.layout.groups[0].geometry.layer_bytes
        key = run.cache_engine.keys_of(TOKENS)[0]
        assert (key, (ByteRange(layer_bytes, layer_bytes),)) in tier.reads, "one range a layer"


def test_a_partial_last_chunk_is_stored_only_when_asked_for_and_carries_nobody_elses_bytes() -> None:
    tokens = TOKENS[:10]
    with Deployment() as run:
        assert run.store(tokens, HERE) == 8
    run, tier = tiered(save_partial_chunk=True, num_slots=3)
    with run:
        run.store(list(range(12)), HERE)  # every slot has held a full object
        run.settle()  # and the tier has them, so that none is pinned
        assert run.store(tokens, HERE) == 10
        run.settle()
        assert run.retrieve(tokens, THERE).all()
        assert all(run.holds(layer, tokens, THERE, 0, 10) for layer in range(run.num_layers))
        whole = np.frombuffer(tier.objects[run.cache_engine.keys_of(tokens)[2]], np.uint16)
        planes = whole.reshape(2, run.num_layers, CHUNK, -1)  # [K, L, T, D]
        assert planes[:, :, :2].all()
        assert not planes[:, :, 2:].any()


def test_a_key_space_of_other_objects_is_refused() -> None:
    with Deployment() as run, pytest.raises(ValueError, match=r"says .* \(8, .*TOKEN.*, 3\), the objects have"):
        CacheEngine(replace(run.space, chunk_tokens=8), run.storage, run.connector)


@given(
    width=st.integers(1, 5) | st.lists(st.integers(1, 5), min_size=1, max_size=3),
    num_chunks=st.integers(1, 4),
    in_pool=st.integers(0, 4),
    skip=st.integers(0, 16),
    form=st.sampled_from(ObjectForm),
    kv=st.sampled_from((1, 2)),
    use_gpu=st.booleans(),
)
def test_every_width_leaves_the_bytes_that_chunk_major_leaves(
    width: int | list[int], num_chunks: int, in_pool: int, skip: int, form: ObjectForm, kv: int, use_gpu: bool
) -> None:
    """XFER-1 through the whole layer: any width, from pool and tier in any mix, stored and loaded."""
    tokens = TOKENS[: num_chunks * CHUNK]
    skip = (
        min(skip, len(tokens))
        // (BLOCK if form is ObjectForm.BLOCK else 1)
        * (BLOCK if form is ObjectForm.BLOCK else 1)
    )
    left = []
    for cut in (5, width):
        run, tier = tiered(num_layers=5, width=cut, form=form, kv=kv, use_gpu=use_gpu)
        with run:
            run.store(tokens, HERE)
            run.settle()
            run.pool.discard(run.cache_engine.keys_of(tokens)[in_pool:])
            run.cache[:, :, THERE] = 0xFFFF
            mask = run.retrieve(tokens, THERE, mask=np.arange(len(tokens)) >= skip)
            left.append((run.cache.copy(), dict(tier.objects), mask))
            assert run.references() == (0, 0, 0)
    (chunk_major, objects, whole), (sliced, same_objects, mask) = left
    assert np.array_equal(chunk_major, sliced)
    assert objects == same_objects
    assert whole.tolist() == mask.tolist() == [place >= skip for place in range(len(tokens))]


def test_a_retrieve_from_a_tier_needs_host_memory_for_one_slice_not_for_the_prefix() -> None:
    run, _ = tiered(num_layers=8, num_buffers=4)
    with run:
        only_in_tier(run, TOKENS)
        full = run.pool.reserve([key._replace(num_tokens=1) for key in run.cache_engine.keys_of(list(range(32)))])
        assert full is not None
        assert run.retrieve(TOKENS, THERE).all(), "with no room in the pool and buffers for 4 of 32 layers and chunks"
        assert all(run.holds(layer, TOKENS, THERE, 0, 16) for layer in range(8))
        assert run.buffers.peak_used == 4
        full.abandon()
