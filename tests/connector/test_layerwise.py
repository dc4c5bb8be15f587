"""The layerwise connector's own generators: their yields, their streams, and who waits for whom."""

from __future__ import annotations

import numpy as np
import pytest

from cache_driver import WAIT_S, Deployment, advance
from engine_driver import ENGINE_MISSING
from lamella.connector.in_flight import Load, Save
from lamella.connector.layerwise import LayerwiseConnector
from lamella.connector.streams import Blocks, Moment
from lamella.cuda_ext.arrival import HostFence
from lamella.cuda_ext.transfer import CopyMethod
from lamella.reference.plan import Direction

pytestmark = pytest.mark.skipif(ENGINE_MISSING is not None, reason=str(ENGINE_MISSING))

TOKENS = list(range(100, 116))
HERE, THERE, ELSEWHERE = list(range(8)), list(range(8, 16)), list(range(16, 24))


class GatedStream:
    """A compute stream whose work so far ends when the test says so."""

    handle = 0

    def __init__(self) -> None:
        self.fences: list[HostFence] = []

    def record(self) -> Moment:
        self.fences.append(HostFence())
        return Moment(self.fences[-1])


@pytest.mark.parametrize("num_layers", [1, 2, 5])
def test_batched_to_gpu_yields_n_plus_2_times_and_takes_a_layers_objects_at_each_of_n(num_layers: int) -> None:
    with Deployment(num_layers=num_layers) as run:
        run.store(TOKENS, HERE)
        held = run.storage.hold_prefix(run.cache_engine.keys_of(TOKENS))
        load = Load(Blocks((THERE,), 16), held.num_chunks)
        consumer = run.connector.batched_to_gpu(load)
        yields = 1
        next(consumer)
        for future in run.storage.layerwise_batched_get(held, run.connector.slices):
            consumer.send(future)
            yields += 1
        assert yields == num_layers + 1
        next(consumer)
        assert list(consumer) == [], "N+2 yields"
        assert all(run.holds(layer, TOKENS, THERE, 0, 16) for layer in range(num_layers))
        held.release()
        assert run.references() == (0, 0, 0)


@pytest.mark.parametrize("num_layers", [1, 2, 5])
def test_batched_from_gpu_yields_n_plus_1_times(num_layers: int) -> None:
    with Deployment(num_layers=num_layers) as run:
        reservation = run.storage.allocate(run.cache_engine.keys_of(TOKENS))
        assert reservation is not None
        save = Save(Blocks((HERE,), 16), dict(enumerate(reservation.addresses)))
        producer = run.connector.batched_from_gpu(save)
        for layer in range(num_layers):
            run.compute(layer, TOKENS, HERE)
            next(producer)
        next(producer)
        assert list(producer) == [], "N+1 yields"
        assert save.reason is None
        assert save.outstanding.wait(WAIT_S)
        run.storage.batched_put(reservation)
        assert run.retrieve(TOKENS, THERE).all()


@pytest.mark.parametrize(("use_gpu", "method"), [(True, CopyMethod.STAGED_BATCH), (False, CopyMethod.GATHER)])
def test_use_gpu_decides_whether_copies_pass_through_a_buffer(use_gpu: bool, method: CopyMethod) -> None:
    with Deployment(use_gpu=use_gpu) as run:
        run.store(TOKENS, HERE)
        held = run.storage.hold_prefix(run.cache_engine.keys_of(TOKENS))
        load = Load(Blocks((THERE,), 16), held.num_chunks)
        consumer = run.connector.batched_to_gpu(load)
        next(consumer)
        for future in run.storage.layerwise_batched_get(held, run.connector.slices):
            consumer.send(future)
        next(consumer)
        consumer.close()
        held.release()
        assert {one.transfer.query().method for one in load.moving()} == {method}
        assert all(run.holds(layer, TOKENS, THERE, 0, 16) for layer in range(run.num_layers))


def test_the_first_request_of_a_batch_makes_the_store_stream_wait_for_what_was_computed() -> None:
    """XFER-3 for stores: no layer is read before the compute stream has written it, for any request of the batch."""
    with Deployment(num_layers=2, num_slots=8) as run:
        stream = GatedStream()
        run.connector.current_stream = stream
        first = run.cache_engine.store_layer(TOKENS, [HERE], sync=True)
        second = run.cache_engine.store_layer([1, 2, 3, 4], [THERE], sync=False)
        for layer in range(2):
            next(first)
            next(second)
            assert len(stream.fences) == layer + 1, "one wait a layer, by the first request alone"
            assert not run.connector.store_stream.outstanding.wait(0.02), "nothing is stored yet"
            run.compute(layer, TOKENS, HERE)  # what the compute stream was given before, ends only now
            run.compute(layer, [1, 2, 3, 4], THERE)
            stream.fences[-1].open()
            assert run.connector.store_stream.outstanding.wait(WAIT_S)
        assert [next(first), next(second)] == [16, 4]
        first.close()
        second.close()
        keys = run.cache_engine.keys_of(TOKENS)
        with run.pool.pin(keys) as objects:
            stored = [bytes(run.pool.memory.buffer(slot)) for slot in objects.slots]
        assert all(np.frombuffer(one, np.uint16).all() for one in stored), "every layer as it was computed"


def test_a_load_starts_after_what_the_compute_stream_was_given_before_it() -> None:
    """XFER-3 for loads: the blocks' last readers come first; later computing does not hold later layers back."""
    with Deployment(num_layers=3) as run:
        run.store(TOKENS, HERE)
        stream = GatedStream()
        run.connector.current_stream = stream
        run.cache[:, :, THERE] = 7
        loading = run.cache_engine.retrieve_layer(TOKENS, [THERE], sync=False)
        advance(loading, 4)
        assert len(stream.fences) == 1, "one moment a load, not one a layer"
        assert (run.cache[:, :, THERE] == 7).all()
        stream.fences[0].open()
        *_, mask = list(loading)
        assert mask.all()
        assert all(run.holds(layer, TOKENS, THERE, 0, 16) for layer in range(3))


def test_a_request_that_is_not_the_batchs_last_waits_only_for_its_own_end() -> None:
    with Deployment(num_layers=3, num_slots=8, engine_options={"paced": True}) as run:
        run.engine.grant(Direction.STORE, 1000)
        run.store(TOKENS, HERE)
        loading = run.cache_engine.retrieve_layer(TOKENS, [THERE], sync=False)
        assert advance(loading, 4) == [16] * 4, "nothing has landed, and nobody waited"
        run.engine.grant(Direction.RETRIEVE, 1000)
        *_, mask = list(loading)
        assert mask.all()


def test_chunks_that_a_load_has_lost_are_written_in_no_later_layer() -> None:
    """They are computed again, perhaps already: nothing may land in their blocks from then on."""
    with Deployment(num_layers=4) as run:
        run.store(TOKENS, HERE)
        held = run.storage.hold_prefix(run.cache_engine.keys_of(TOKENS))
        load = Load(Blocks((THERE,), 16), held.num_chunks)
        consumer = run.connector.batched_to_gpu(load)
        futures = run.storage.layerwise_batched_get(held, run.connector.slices)
        next(consumer)
        consumer.send(next(futures))
        assert run.connector.load_stream.outstanding.wait(WAIT_S)
        load.shorten(2, "lost two of the chunks of one transfer")
        run.cache[:, :, THERE] = 7
        for future in futures:
            consumer.send(future)
        next(consumer)
        consumer.close()
        held.release()
        for layer in (1, 2, 3):
            assert run.holds(layer, TOKENS, THERE, 0, 8)
            assert (run.cache[layer, :, THERE[4:]] == 7).all()


def test_slices_are_loaded_when_their_first_layer_is_due_and_stored_after_their_last() -> None:
    with Deployment(num_layers=5, width=2) as run:
        saving = run.cache_engine.store_layer(TOKENS, [HERE])
        stored = []
        for layer in range(5):
            run.compute(layer, TOKENS, HERE)
            next(saving)
            assert run.connector.store_stream.outstanding.wait(WAIT_S)
            stored.append(run.engine.lane(Direction.STORE).windows)
        assert stored == [0, 1, 1, 2, 3]
        next(saving)
        loading = run.cache_engine.retrieve_layer(TOKENS, [THERE])
        loaded = []
        for _ in range(6):
            next(loading)
            assert run.connector.load_stream.outstanding.wait(WAIT_S)
            loaded.append(run.engine.lane(Direction.RETRIEVE).windows)
        assert loaded == [0, 1, 1, 2, 2, 3]
        loading.close()


def test_caches_that_do_not_fit_the_objects_are_refused() -> None:
    with (
        Deployment(num_layers=3) as run,
        Deployment(num_layers=4) as other,
        pytest.raises(ValueError, match="num_layers 4, the geometry 3"),
    ):
        LayerwiseConnector(run.engine, run.layout, other.caches, run.connector.slices, run.pool.memory)
