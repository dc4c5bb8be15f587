"""The cache engine with objects of every shape, form and width, whole and partial."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_driver import BLOCK, CHUNK, HERE, THERE, TOKENS, Deployment, only_in_tier, tiered
from engine_driver import ENGINE_MISSING
from lamella.connector.cache_engine import CacheEngine
from lamella.reference.geometry import ObjectForm
from lamella.reference.layout import ByteRange

pytestmark = pytest.mark.skipif(ENGINE_MISSING is not None, reason=str(ENGINE_MISSING))


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
