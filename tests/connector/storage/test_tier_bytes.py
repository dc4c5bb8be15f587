"""Through every tier and at every width the engine's cache holds what chunk-major from the pool leaves in it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache_driver import BLOCK, CHUNK, DIM, HEADS, Deployment
from engine_driver import ENGINE_MISSING
from lamella.connector.storage.circuit import CircuitBreaker, GuardedTier
from lamella.connector.storage.object_format import layer_runs
from lamella.connector.storage.redis_tier import RedisTier
from lamella.connector.storage.tier import Tier
from lamella.reference.geometry import KVGeometry, ObjectForm
from lamella.reference.layout import ObjectLayout
from storage_servers import REDIS_MISSING, RedisProcess, redis_server
from tier_objects import TIERS, make_tier

pytestmark = pytest.mark.skipif(ENGINE_MISSING is not None, reason=str(ENGINE_MISSING))

LAYERS, TOKENS = 4, list(range(100, 116))  # 4 chunks
HERE, THERE = list(range(8)), list(range(8, 16))
POISON = 0xFFFF
LAYOUTS = {
    (kv, form): ObjectLayout.single(KVGeometry(LAYERS, kv, HEADS, DIM, 2, CHUNK), BLOCK, form)
    for kv in (1, 2)
    for form in ObjectForm
}


@pytest.fixture(params=TIERS, scope="module")
def tiers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[tuple[int, ObjectForm], Tier]]:
    """A tier of the kind for every layout, each with the whole document."""
    made = {}
    for (kv, form), layout in LAYOUTS.items():
        folder = tmp_path_factory.mktemp(f"{kv}-{form.value}")
        tier = make_tier(request.param, folder, request.getfixturevalue, layout.object_bytes, layer_runs(layout))
        with deployment(tier, kv, form) as run:
            assert run.store(TOKENS, HERE) == len(TOKENS)
            run.settle()
        made[kv, form] = tier
    yield made
    for tier in made.values():
        tier.close()


def deployment(tier: Tier | None, kv: int, form: ObjectForm, **options: Any) -> Deployment:
    tiers = [] if tier is None else [tier]
    return Deployment(num_layers=LAYERS, kv=kv, form=form, tiers=tiers, **options)


def chunk_major(kv: int, form: ObjectForm, mask: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """The whole cache after a retrieve of whole objects from the pool."""
    with deployment(None, kv, form, width=LAYERS) as run:
        run.store(TOKENS, HERE)
        run.cache[:] = POISON
        assert np.array_equal(run.retrieve(TOKENS, THERE, mask=mask), mask)
        return run.cache.copy()


@settings(max_examples=max(10, settings.default.max_examples // 8), suppress_health_check=[HealthCheck.too_slow])
@given(
    kv=st.sampled_from([1, 2]),
    form=st.sampled_from(list(ObjectForm)),
    width=st.one_of(st.integers(1, LAYERS), st.lists(st.integers(1, LAYERS), min_size=1, max_size=3)),
    skip_blocks=st.integers(0, 7),
    promote=st.booleans(),
    in_pool=st.integers(0, 3),
)
def test_the_bytes_are_chunk_majors(
    tiers: dict[tuple[int, ObjectForm], Tier],
    kv: int,
    form: ObjectForm,
    width: int | list[int],
    skip_blocks: int,
    promote: bool,
    in_pool: int,
) -> None:
    mask = np.ones(len(TOKENS), np.bool_)
    mask[: skip_blocks * BLOCK] = False
    with deployment(tiers[kv, form], kv, form, width=width, storage_options={"promote": promote}) as run:
        run.store(TOKENS[: in_pool * CHUNK], HERE)  # the head of the prefix is in the pool
        run.cache[:] = POISON
        assert np.array_equal(run.retrieve(TOKENS, THERE, mask=mask), mask)
        assert np.array_equal(run.cache, chunk_major(kv, form, mask))
        assert run.references() == (0, 0, 0)


# ---- a server that dies in the middle of a load


@pytest.mark.skipif(REDIS_MISSING is not None, reason=str(REDIS_MISSING))
@pytest.mark.parametrize("how", ["killed", "silent"])
@pytest.mark.parametrize("promote", [True, False])
def test_a_server_that_dies_under_a_load_is_a_clean_miss_and_serves_again_when_it_is_back(
    tmp_path: Path, how: str, promote: bool
) -> None:
    layout = LAYOUTS[2, ObjectForm.TOKEN]
    with redis_server(tmp_path / "redis") as server:
        tier = RedisTier(server.url, layout.object_bytes, layer_runs(layout), timeout_s=1.0, retries=0)
        guarded = GuardedTier(tier, CircuitBreaker("redis", 3, 0, lambda: 0))
        with deployment(guarded, 2, ObjectForm.TOKEN, timeout_s=5.0, storage_options={"promote": promote}) as run:
            only_in_server(run)
            load = run.cache_engine.retrieve_layer(TOKENS, [THERE])
            assert next(load) == 16
            assert next(load) == 16  # layer 0 is on its way
            end(server, how)
            *progress, mask = list(load)
            assert len(progress) == LAYERS - 1, "the protocol is completed"
            assert progress[-1] == 0
            assert not mask.any(), "nothing is called loaded of which a layer is missing"
            assert run.references() == (0, 0, 0)
            assert run.cache_engine.lookup(TOKENS) == 0
            assert run.store(TOKENS, HERE) == 16, "the engine goes on without the server"
            run.settle()
            back(server, how)
            only_in_server(run)
            run.cache[:] = POISON
            assert run.retrieve(TOKENS, THERE).all()
            assert all(run.holds(layer, TOKENS, THERE, 0, 16) for layer in range(LAYERS))
        tier.close()


def only_in_server(run: Deployment) -> None:
    run.pool.discard(run.cache_engine.keys_of(TOKENS))
    run.store(TOKENS, HERE)
    run.settle()
    run.pool.discard(run.cache_engine.keys_of(TOKENS))


def end(server: RedisProcess, how: str) -> None:
    if how == "killed":
        server.kill()
    else:
        server.hold()


def back(server: RedisProcess, how: str) -> None:
    if how == "killed":
        server.start()
    else:
        server.go_on()
