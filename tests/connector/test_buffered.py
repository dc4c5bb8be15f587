"""The buffered connector: layers are changed between their load and their blocks, three at a time."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cache_driver import BLOCK, CHUNK, DIM, HEADS, WAIT_S, Deployment, MemoryTier
from engine_driver import ENGINE_MISSING
from lamella.connector import buffered
from lamella.connector.buffered import NUM_BUFFERS, BufferedConnector
from lamella.connector.cache_engine import CacheEngine
from lamella.connector.streams import Moment
from lamella.cuda_ext.arrival import HostFence
from lamella.reference.geometry import ObjectForm
from lamella.reference.plan import Direction
from waiting import wait_until

pytestmark = pytest.mark.skipif(ENGINE_MISSING is not None, reason=str(ENGINE_MISSING))

TOKENS = list(range(100, 116))
HERE, THERE = list(range(8)), list(range(8, 16))


class Blending:
    """A deployment whose loads pass through buffers."""

    def __init__(self, num_layers: int = 4, kv: int = 2, max_tokens: int = 16) -> None:
        self.tier = MemoryTier(0)
        self.run = Deployment(num_layers=num_layers, kv=kv, tiers=[self.tier])
        self.tier.object_bytes = self.run.layout.object_bytes
        self.connector = BufferedConnector(
            self.run.engine, self.run.layout, self.run.caches, self.run.pool.memory, max_tokens=max_tokens
        )
        self.engine = CacheEngine(self.run.space, self.run.storage, self.connector)
        self.run.store(TOKENS, HERE)
        self.run.settle()

    def layer(self, layer: int) -> NDArray[np.uint16]:
        """The buffered layer, `[K, max_tokens, H, D]`."""
        view = self.connector.layer_view(layer)
        size = sum((count - 1) * stride for count, stride in zip(view.shape, view.strides, strict=True)) + 2
        raw = (ctypes.c_char * size).from_address(view.address)
        return np.ndarray(view.shape, np.uint16, raw, strides=view.strides)

    def close(self) -> None:
        assert self.engine.drain(10)
        assert self.run.references() == (0, 0, 0)
        self.connector.close()
        self.run.close()


@pytest.fixture
def blending() -> Iterator[Blending]:
    made = Blending()
    yield made
    made.close()


def test_each_layer_can_be_changed_in_its_buffer_and_arrives_changed_in_the_blocks(blending: Blending) -> None:
    run = blending.run
    loading = blending.engine.retrieve_layer(TOKENS, [THERE])
    next(loading)
    next(loading)
    for layer in range(4):
        found = next(loading)  # load of layer + 1, wait for layer, scatter of layer - 1
        view = blending.layer(layer)
        for place in range(16):
            assert np.array_equal(view[:, place], run.kv_of(layer, TOKENS, place))
        view[:, 3] = 1000 + layer  # the recompute of one token
    assert isinstance(found, np.ndarray)
    assert found.all()
    assert list(loading) == [], "run to its end, the last layer is scattered"
    for layer in range(4):
        assert run.holds(layer, TOKENS, THERE, 0, 3)
        assert run.holds(layer, TOKENS, THERE, 4, 16)
        assert (run.cache[layer, :, THERE[3 // BLOCK], 3 % BLOCK] == 1000 + layer).all()


def test_with_the_mask_objects_are_let_go_and_the_last_layer_still_comes_from_its_buffer(blending: Blending) -> None:
    run = blending.run
    run.cache[:, :, THERE] = 7
    loading = blending.engine.retrieve_layer(TOKENS, [THERE])
    *_, mask = [next(loading) for _ in range(run.num_layers + 2)]
    assert isinstance(mask, np.ndarray)
    assert mask.all()
    # copies let go of what they read once they have drained, which another thread is told
    wait_until(lambda: run.references() == (0, 0, 0), "nothing is held, though the generator stands at its mask", 10)
    assert next(loading, None) is None
    assert all(run.holds(layer, TOKENS, THERE, 0, 16) for layer in range(run.num_layers))


@given(
    num_layers=st.integers(1, 7),
    kv=st.sampled_from((1, 2)),
    skip=st.integers(0, 16),
    in_pool=st.integers(0, 4),
    changed=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 15)), max_size=6),
)
def test_what_lands_is_what_the_recompute_left(
    num_layers: int, kv: int, skip: int, in_pool: int, changed: list[tuple[int, int]]
) -> None:
    """Against the paged path and a change made there afterwards."""
    blending = Blending(num_layers, kv)
    run = blending.run
    run.pool.discard(run.cache_engine.keys_of(TOKENS)[in_pool:])
    mask = np.arange(16) >= skip
    changes = {(layer, place) for layer, place in changed if layer < num_layers and place >= skip}
    run.cache[:, :, THERE] = 7
    run.retrieve(TOKENS, THERE, mask=mask)
    for layer, place in changes:
        run.cache[layer, :, THERE[place // BLOCK], place % BLOCK] = 40_000 + layer
    expected = run.cache[:, :, THERE].copy()
    run.cache[:, :, THERE] = 7
    loading = blending.engine.retrieve_layer(TOKENS, [THERE], mask)
    next(loading)
    next(loading)
    for layer in range(num_layers):
        next(loading)
        for where, place in changes:
            if where == layer:
                blending.layer(layer)[:, place] = 40_000 + layer
    assert list(loading) == []
    assert np.array_equal(run.cache[:, :, THERE], expected)
    blending.close()


def test_the_buffers_are_three_layers_whatever_the_model(blending: Blending) -> None:
    addresses = [blending.connector.layer_view(layer).address for layer in range(4)]
    assert len(set(addresses)) == NUM_BUFFERS
    assert addresses[3] == addresses[0]


def test_a_buffer_is_loaded_again_only_after_its_last_layer_was_scattered() -> None:
    """Layer 3 uses the buffer of layer 0, whose scatter is held back here by the compute stream."""
    blending = Blending()
    loading = blending.engine.retrieve_layer(TOKENS, [THERE])
    next(loading)
    next(loading)
    next(loading)  # layer 0 is in its buffer
    gate = HostFence()
    blending.connector.current_stream = GatedStream(gate)
    next(loading)  # layer 0 is being scattered, behind the gate
    blending.layer(0)[:] = 999  # the compute stream's work, which the gate stands for
    advancing = threading.Thread(target=lambda: next(loading))
    advancing.start()
    advancing.join(0.1)
    assert advancing.is_alive(), "layer 3 waits for its buffer"
    gate.open()
    advancing.join(WAIT_S)
    assert not advancing.is_alive()
    for _ in loading:
        pass
    assert (blending.run.cache[0][:, THERE] == 999).all(), "and layer 3 did not overwrite it"
    blending.close()


def test_a_layer_larger_than_a_window_is_scattered_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffered, "SCATTER_WINDOW_BYTES", 1)  # and so a block's
    blending = Blending()
    before = blending.connector.scatter_stream._engine.lane(Direction.RETRIEVE).windows
    assert list(blending.engine.retrieve_layer(TOKENS, [THERE]))
    assert blending.connector.scatter_stream._engine.lane(Direction.RETRIEVE).windows - before == 4 * 16 // BLOCK
    assert all(blending.run.holds(layer, TOKENS, THERE, 0, 16) for layer in range(4))
    blending.close()


class SlowStream:
    """A compute stream that says when its work so far has ended."""

    handle = 0

    def __init__(self) -> None:
        self.idle = threading.Event()

    def record(self) -> Moment:
        return Moment(None, None, self.idle.is_set)


def test_a_layer_is_scattered_once_its_recompute_has_ended_and_no_lane_waits_for_it() -> None:
    blending = Blending()
    run, stream = blending.run, SlowStream()
    run.cache[:, :, THERE] = 7
    blending.connector.current_stream = stream
    loading = blending.engine.retrieve_layer(TOKENS, [THERE])
    for _ in range(4):
        next(loading)  # layers 0, 1 and 2 are on their way
    assert blending.connector.scatter_stream.outstanding.wait(0), "nothing waits in the lane"
    advancing = threading.Thread(target=lambda: next(loading))
    advancing.start()
    advancing.join(0.1)
    assert advancing.is_alive(), "layer 3 needs the buffer of layer 0, which is still computed on"
    assert (run.cache[:, :, THERE] == 7).all()
    stream.idle.set()
    advancing.join(WAIT_S)
    assert not advancing.is_alive()
    assert list(loading)
    assert all(run.holds(layer, TOKENS, THERE, 0, 16) for layer in range(4))
    blending.close()


class GatedStream:
    """A compute stream whose present work ends with a gate."""

    handle = 0

    def __init__(self, gate: HostFence) -> None:
        self._gate = gate

    def record(self) -> Moment:
        return Moment(self._gate)


def test_a_load_that_is_closed_early_scatters_nothing_more_and_frees_the_buffers(blending: Blending) -> None:
    for times in range(7):
        loading = blending.engine.retrieve_layer(TOKENS, [THERE])
        for _ in range(min(times, 6)):
            next(loading)
        loading.close()
        assert blending.engine.drain(10)
        assert blending.run.references() == (0, 0, 0)


def test_one_load_at_a_time_and_no_more_tokens_than_a_buffer(blending: Blending) -> None:
    first = blending.engine.retrieve_layer(TOKENS, [THERE])
    next(first)
    with pytest.raises(RuntimeError, match="another load's"):
        next(blending.engine.retrieve_layer(TOKENS, [HERE]))
    first.close()
    small = Blending(max_tokens=8)
    with pytest.raises(ValueError, match="a buffer holds 8 tokens, got 16"):
        next(small.engine.retrieve_layer(TOKENS, [THERE]))
    small.close()


def test_a_failed_load_is_reported_and_what_failed_is_not_scattered(blending: Blending) -> None:
    run = blending.run
    run.cache[:, :, THERE] = 7
    run.engine.plant_fault(Direction.RETRIEVE, run.engine.lane(Direction.RETRIEVE).windows + 2)
    *_, mask = list(blending.engine.retrieve_layer(TOKENS, [THERE]))
    assert not mask.any()


def test_stores_go_straight_from_the_blocks(blending: Blending) -> None:
    tokens = [5, 6, 7, 8]
    saving = blending.engine.store_layer(tokens, [THERE[:2]])
    for layer in range(4):
        blending.run.compute(layer, tokens, THERE)
        next(saving)
    assert next(saving) == CHUNK
    saving.close()
    assert blending.run.retrieve(tokens, HERE).all()
    assert all(blending.run.holds(layer, tokens, HERE, 0, CHUNK) for layer in range(4))


def test_the_block_form_has_no_token_axis_to_blend_on() -> None:
    with Deployment(form=ObjectForm.BLOCK) as run, pytest.raises(ValueError, match="token form, got 1 in block form"):
        BufferedConnector(run.engine, run.layout, run.caches, run.pool.memory, max_tokens=16)


def test_a_view_names_keys_and_values_token_by_token(blending: Blending) -> None:
    assert blending.connector.layer_view(0).shape == (2, 16, HEADS, DIM)
