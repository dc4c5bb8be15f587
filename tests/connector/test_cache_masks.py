"""Which tokens of a sequence the cache engine moves, and what a scheduler is told of them."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_driver import CHUNK, HERE, THERE, TOKENS, Deployment, MemoryTier, only_in_tier, tiered
from engine_driver import ENGINE_MISSING
from lamella.reference.geometry import ObjectForm

pytestmark = pytest.mark.skipif(ENGINE_MISSING is not None, reason=str(ENGINE_MISSING))


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


@pytest.mark.parametrize(
    ("mask", "got"),
    [
        ([True] * 16, "a list"),
        (np.ones(16, np.int64), "an array of int64"),
    ],
)
def test_a_mask_of_another_type_is_refused_with_its_shape_and_how_to_make_one(mask: Any, got: str) -> None:
    with Deployment() as run:
        for begin in (run.cache_engine.retrieve_layer, run.cache_engine.store_layer):
            with pytest.raises(
                TypeError, match=rf"mask must be a NumPy array of bool, \[16\], or None, got {got}: pass"
            ):
                next(begin(TOKENS, [HERE], mask))
        assert run.references() == (0, 0, 0)


@pytest.mark.parametrize(
    ("block_ids", "says"),
    [
        (HERE, r"1 here.*got the numbers themselves, 0 first: pass \[block_ids\]"),
        (np.arange(8), "got the numbers themselves"),
        (None, r"as in \[\[3, 4, 5\]\], got None"),
        ([None], "got None for group 0"),
        ([[0.0, 1.0]], r"got \[0.0, 1.0\] for group 0"),
        ([[HERE]], "for group 0"),
        (["0123"], "got '0123' for group 0"),
    ],
)
def test_block_tables_of_another_shape_or_type_are_refused_with_the_shape_that_is_wanted(
    block_ids: Any, says: str
) -> None:
    with Deployment() as run:
        for begin in (run.cache_engine.retrieve_layer, run.cache_engine.store_layer):
            with pytest.raises(TypeError, match=rf"block_ids must be a block table for each kernel group.*{says}"):
                next(begin(TOKENS, block_ids))
        assert run.references() == (0, 0, 0)


def test_a_block_table_may_be_any_sequence_of_whole_numbers() -> None:
    with Deployment() as run:
        for block_ids in ([tuple(HERE)], [range(8)], np.array([HERE], np.int32), (np.array(HERE),)):
            assert len(list(run.cache_engine.store_layer(TOKENS, block_ids))) == run.num_layers + 1


@pytest.mark.parametrize("tokens", [7, None, iter(TOKENS)])
def test_tokens_that_are_no_sequence_are_refused_by_name(tokens: Any) -> None:
    with Deployment() as run:
        calls = (
            run.cache_engine.lookup,
            run.cache_engine.keys_of,
            lambda these: run.cache_engine.num_new_matched_tokens(these, 0),
            lambda these: next(run.cache_engine.retrieve_layer(these, [HERE])),
            lambda these: next(run.cache_engine.store_layer(these, [HERE])),
        )
        for call in calls:
            with pytest.raises(
                TypeError, match=r"tokens must be a sequence of whole numbers, as in list\(tokens\), got"
            ):
                call(tokens)


@pytest.mark.parametrize(("computed", "error"), [(-5, ValueError), (0.5, TypeError), ("4", TypeError)])
def test_computed_tokens_that_cannot_be_counted_are_refused(computed: Any, error: type[Exception]) -> None:
    with Deployment() as run, pytest.raises(error, match=f"num_computed_tokens must be .*, got {computed!r}"):
        run.cache_engine.num_new_matched_tokens(TOKENS, computed)


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
