"""The in-process cache from its settings: what is opened, what it does, and that all of it is given back."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache_driver import Deployment
from engine_driver import ENGINE_MISSING
from lamella.connector.buffered import BufferedConnector
from lamella.connector.config import CacheSettings
from lamella.connector.in_process import InProcessCache
from lamella.connector.layer_hooks import StepReport, StepRequest
from lamella.connector.layerwise import LayerwiseConnector
from lamella.connector.storage.circuit import CircuitState, GuardedTier
from lamella.reference.geometry import KVGeometry, ObjectForm
from lamella.reference.keys import KeySpace
from lamella.reference.layout import KernelGroup, ObjectLayout, TensorView, engine_layout
from storage_servers import REDIS_MISSING, redis_server

pytestmark = pytest.mark.skipif(ENGINE_MISSING is not None, reason=str(ENGINE_MISSING))

TOKENS = list(range(100, 116))
HERE, THERE = list(range(8)), list(range(8, 16))


def step(cache: InProcessCache, run: Deployment, tokens: list[int], table: list[int]) -> StepReport:
    """A step that computes what the cache does not have."""
    matched = cache.cache_engine.num_new_matched_tokens(tokens, 0)
    cache.hooks.start_load_kv([StepRequest("a", tokens, [table], 0, matched)])
    for layer in range(run.num_layers):
        run.compute(layer, tokens, table, matched)
        cache.hooks.wait_for_layer_load(layer)
        assert run.holds(layer, tokens, table, 0, len(tokens))
        cache.hooks.save_kv_layer(layer)
    return cache.hooks.wait_for_save()


def settle(cache: InProcessCache) -> None:
    """Whatever goes on in the background has ended; what a load lets go of may be written to nearer tiers."""
    assert cache.cache_engine.drain(10)
    cache.storage.flush(10)


@pytest.mark.parametrize(
    "values",
    [
        {"promote": False},
        {"use_layerwise": True},
        {"use_layerwise": True, "promote": False},
        {"use_layerwise": True, "layers_per_slice": "1,2", "use_gpu": False},
    ],
)
def test_what_one_process_stored_another_one_loads_from_its_files(values: dict[str, Any], tmp_path: Path) -> None:
    settings = CacheSettings.from_mapping({**values, "local_file_folder": str(tmp_path / "kv"), "pool_objects": 4})
    with Deployment() as run:
        with InProcessCache(settings, run.space, run.layout, run.caches) as cache:
            assert step(cache, run, TOKENS, HERE) == StepReport({}, {}, {"a": 16})
            assert step(cache, run, TOKENS, THERE) == StepReport({"a": 15}, {}, {"a": 0})
        run.cache[:] = 0
        with InProcessCache(settings, run.space, run.layout, run.caches) as cache:
            again = 0 if settings.promote else 4  # the last token's chunk, unless the load leaves it in the pool
            assert step(cache, run, TOKENS, THERE) == StepReport({"a": 15}, {}, {"a": again})
            assert cache.cache_engine.lookup(TOKENS) == 16
            settle(cache)
            counts = cache.tier_counts()[f"file:{tmp_path / 'kv'}"]
            assert (counts.found > 0, counts.reads > 0, counts.failures, counts.damaged) == (True, True, 0, 0)


@pytest.mark.skipif(REDIS_MISSING is not None, reason=str(REDIS_MISSING))
def test_files_and_a_server_stand_behind_the_pool_and_what_the_server_brings_is_filed(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis") as server, Deployment() as run:
        values = {"use_layerwise": True, "remote_tier": server.url, "pool_objects": 8}
        with InProcessCache(CacheSettings.from_mapping(values), run.space, run.layout, run.caches) as cache:
            assert step(cache, run, TOKENS, HERE).stored == {"a": 16}
            settle(cache)
        run.cache[:] = 0
        settings = CacheSettings.from_mapping({**values, "local_file_folder": str(tmp_path / "kv")})
        with InProcessCache(settings, run.space, run.layout, run.caches) as cache:
            assert step(cache, run, TOKENS, THERE).loaded == {"a": 15}
            settle(cache)
            assert [tier.name.split(":")[0] for tier in cache.storage.tiers] == ["file", "redis"]
            assert cache.storage.tiers[0].exists(cache.cache_engine.keys_of(TOKENS)) == (True,) * 4


def test_settings_choose_the_connector_and_its_slices() -> None:
    with Deployment(num_layers=4) as run:
        for values, kind, slices in (
            ({}, LayerwiseConnector, 1),
            ({"use_layerwise": True}, LayerwiseConnector, 4),
            ({"use_layerwise": True, "layers_per_slice": 3}, LayerwiseConnector, 2),
            ({"use_layerwise": True, "enable_blending": True, "blend_tokens": 32}, BufferedConnector, 4),
        ):
            settings = CacheSettings.from_mapping({**values, "pool_objects": 2})
            with InProcessCache(settings, run.space, run.layout, run.caches) as cache:
                assert type(cache.cache_engine.connector) is kind
                assert len(cache.cache_engine.connector.slices) == slices


def test_a_step_with_blending_recomputes_nothing_and_loads_everything() -> None:
    values = {"use_layerwise": True, "enable_blending": True, "blend_tokens": 32, "pool_objects": 4}
    with Deployment() as run:
        run.cache[:] = 0
        with InProcessCache(CacheSettings.from_mapping(values), run.space, run.layout, run.caches) as cache:
            saving = cache.cache_engine.store_layer(TOKENS, [HERE])
            for layer in range(run.num_layers):
                run.compute(layer, TOKENS, HERE)
                next(saving)
            next(saving)
            saving.close()
            cache.hooks.start_load_kv([StepRequest("a", [*TOKENS, 1], [[*THERE, 16]], 0, 16, save=False)])
            for layer in range(run.num_layers):
                cache.hooks.wait_for_layer_load(layer)
            assert cache.hooks.wait_for_save() == StepReport({"a": 16}, {}, {})
            assert all(run.holds(layer, TOKENS, THERE, 0, 16) for layer in range(run.num_layers))


def test_a_folder_that_stops_serving_opens_its_circuit_and_the_pool_goes_on(tmp_path: Path) -> None:
    now_ns = [0]
    folder = tmp_path / "kv"
    settings = CacheSettings(use_layerwise=True, local_file_folder=folder, breaker_failures=1, pool_objects=8)
    with (
        Deployment() as run,
        InProcessCache(settings, run.space, run.layout, run.caches, clock_ns=lambda: now_ns[0]) as cache,
    ):
        tier = cache.storage.tiers[0]
        assert isinstance(tier, GuardedTier)
        folder.rmdir()
        folder.write_text("a file where the folder was")
        assert step(cache, run, TOKENS, HERE).stored == {"a": 16}
        settle(cache)
        assert tier.breaker.state is CircuitState.OPEN
        assert step(cache, run, TOKENS, THERE).loaded == {"a": 15}
        folder.unlink()
        now_ns[0] = int(settings.breaker_retry_s * 1e9)
        folder.mkdir(mode=0o700)
        assert step(cache, run, [1, 2, 3, 4], THERE).stored == {"a": 4}
        settle(cache)
        assert tier.breaker.state is CircuitState.CLOSED


def test_an_open_step_is_aborted_when_the_cache_closes() -> None:
    with Deployment() as run:
        cache = InProcessCache(CacheSettings(pool_objects=4), run.space, run.layout, run.caches)
        step(cache, run, TOKENS, HERE)
        cache.hooks.start_load_kv([StepRequest("a", TOKENS, [THERE], 0, 15)])
        cache.close()
        cache.close()


def test_a_cache_closes_over_a_retriever_that_gave_its_mask_and_that_nobody_closed() -> None:
    with Deployment() as run:
        with InProcessCache(CacheSettings(pool_objects=4), run.space, run.layout, run.caches) as cache:
            step(cache, run, TOKENS, HERE)
            loading = cache.cache_engine.retrieve_layer(TOKENS, [THERE])
            *_, mask = [next(loading) for _ in range(run.num_layers + 2)]
        assert isinstance(mask, np.ndarray)
        assert mask.all()
        loading.close()


def test_what_cannot_be_opened_leaves_nothing_behind(tmp_path: Path) -> None:
    with Deployment(num_layers=3) as run, Deployment(num_layers=4) as other:
        with pytest.raises(ValueError, match="num_layers 4, the geometry 3"):
            InProcessCache(CacheSettings(pool_objects=2), run.space, run.layout, other.caches)
        with pytest.raises(ValueError, match="key space says"):
            InProcessCache(CacheSettings(pool_objects=2), other.space, run.layout, run.caches)
        with pytest.raises(ValueError, match="give compute_stream"):
            InProcessCache(CacheSettings(pool_objects=2), run.space, run.layout, run.caches, device="cuda:0")


def test_a_prompt_wholly_cached_is_loaded_up_to_a_block_of_every_group_whatever_their_sizes() -> None:
    """Blocks of 2 and of 3 tokens in objects of 6, in block form: of 12 cached tokens 6 can be loaded."""
    sizes, chunk, heads = (2, 3), 6, 2
    layout = ObjectLayout(
        tuple(KernelGroup(KVGeometry(1, 2, heads, 4, 2, chunk), (layer,), size) for layer, size in enumerate(sizes)),
        ObjectForm.BLOCK,
    )
    arrays = [np.random.default_rng(size).integers(1, 9, (2, 12, size, heads, 4), np.uint16) for size in sizes]
    caches = [engine_layout("KNTHD", [TensorView(a.ctypes.data, a.shape, a.strides, 2)]) for a in arrays]
    space = KeySpace("tiny", "uint16", ObjectForm.BLOCK, "of 2 and 3", chunk, 0, 1, (0, 2))
    tokens = list(range(12))
    with InProcessCache(CacheSettings(use_layerwise=True, pool_objects=4), space, layout, caches) as cache:

        def moved(request: StepRequest) -> StepReport:
            cache.hooks.start_load_kv([request])
            for layer in range(2):
                cache.hooks.wait_for_layer_load(layer)
                cache.hooks.save_kv_layer(layer)
            return cache.hooks.wait_for_save()

        assert moved(StepRequest("a", tokens, [list(range(6)), list(range(4))], 0, 0)).stored == {"a": 12}
        matched = cache.cache_engine.num_new_matched_tokens(tokens, 0)
        assert matched == 6
        assert moved(StepRequest("b", tokens, [list(range(6, 12)), list(range(4, 8))], 0, matched)).loaded == {"b": 6}
    for array, size, first in zip(arrays, sizes, (6, 4), strict=True):
        assert (array[:, : 6 // size] == array[:, first : first + 6 // size]).all()
