"""What only a rank with its caches can tell is told when it starts, before anything is served."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partialmethod
from typing import Any

import pytest

from lamella.connector.cache_shapes import GroupShape
from lamella.connector.mover import PoolMover
from lamella.connector.step_orders import StoreOrder
from lamella.connector.vllm_settings import ConnectorSettings
from lamella.connector.vllm_worker import _UNDRAINED, RankFacts, WorkerSide
from lamella.cuda_ext.engine import Fault, TransferEngine
from lamella.reference.geometry import ObjectForm
from lamella.reference.keys import KeySpace
from lamella.reference.plan import Direction

torch = pytest.importorskip("torch")
LAYERS = 4


def start(caches: Mapping[str, Any] | None = None, group: GroupShape | None = None, **settings: Any) -> WorkerSide:
    """A rank of four layers, in this process's memory."""
    caches = caches or {f"layer.{layer}": torch.zeros(2, 8, 16, 2, 8) for layer in range(LAYERS)}
    space = KeySpace("m", "float32", ObjectForm.BLOCK, "logical", 32, 0, 1, (0, LAYERS))
    given = {"layers_per_slice": 1, "chunk_tokens": 32, "host_pool_gib": 0.001, **settings}
    facts = RankFacts((group or GroupShape(tuple(caches), 16, 2, 8),), space, 0, 0)
    return WorkerSide(ConnectorSettings.from_mapping(given), facts, caches)


@pytest.mark.parametrize("layers", [1, LAYERS, LAYERS + 1, 999])
@pytest.mark.parametrize("width", [0, 1, 3, LAYERS, "1,2"])
def test_a_release_that_waits_for_layers_that_are_not_there_stops_the_engine_at_start(layers: int, width: Any) -> None:
    """It was taken, and the engine died of the first hit."""
    if layers > LAYERS and width != 0:  # chunk-major: release means nothing
        with pytest.raises(ValueError, match=f"release first:{layers} on a rank of 4 layers: .*; name fewer"):
            start(layers_per_slice=width, release=f"first:{layers}")
    else:
        start(layers_per_slice=width, release=f"first:{layers}").close()


def test_memory_that_is_not_there_is_said_with_the_setting_that_asked_for_it() -> None:
    with pytest.raises(OSError, match="host_pool_gib 1000000, which each rank takes: .*cannot map .*; lower it"):
        start(host_pool_gib=1_000_000)


def test_a_staging_ring_that_the_device_has_no_room_for_is_said_with_its_setting() -> None:
    with pytest.raises(MemoryError, match=r"staging_mib 1000000, which each rank takes .*: out of .*memory; lower it"):
        start(staging_mib=1_000_000)


@pytest.mark.parametrize(("staging_mib", "window_mib"), [(63, 16), (64, 17), (3, 1), (1, 1), (32, 16)])
def test_a_staging_ring_that_settings_let_pass_is_one_that_an_engine_takes(staging_mib: int, window_mib: int) -> None:
    """Two windows were enough for the settings, and the engine wants four."""
    with pytest.raises(ValueError, match=rf"^staging_mib \({staging_mib}\) must hold four windows .*") as refused:
        start(staging_mib=staging_mib, window_mib=window_mib)
    remedies = re.findall(r"(raise it|lower window_mib) to (\d+)", str(refused.value))
    assert remedies[0] == ("raise it", str(4 * window_mib))
    for what, value in remedies:
        changed = {"raise it": {"staging_mib": int(value)}, "lower window_mib": {"window_mib": int(value)}}[what]
        start(**{"staging_mib": staging_mib, "window_mib": window_mib, **changed}).close()


def test_windows_that_hold_no_block_are_said_with_their_setting() -> None:
    caches = {f"layer.{layer}": torch.zeros(2, 64, 16, 512) for layer in range(LAYERS)}  # 2 MiB a block
    with pytest.raises(ValueError, match=r"^window_mib 1: .*at least 2097152 .*; raise it$"):
        start(caches, GroupShape(tuple(caches), 16, 64, 256), window_mib=1, host_pool_gib=0.1)
    start(caches, GroupShape(tuple(caches), 16, 64, 256), window_mib=2, host_pool_gib=0.1).close()


def test_a_device_that_does_not_drain_ends_no_shutdown_and_keeps_the_memory_that_it_may_use(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was raised left vLLM with this rank's connector: an engine made next moved chunks of another size by it."""
    monkeypatch.setattr(TransferEngine, "close", partialmethod(TransferEngine.close, timeout_s=0.1))
    rank = start()
    mover = rank.mover
    assert isinstance(mover, PoolMover)
    mover.engine.plant_fault(Direction.STORE, 0, Fault.STUCK)
    blocks = ((1, 2),)
    mover._store(StoreOrder(1, "r", (0,), 0, blocks, 32, 0, ()), rank.slices).wait_recorded(1, 10)
    rank.close()
    assert "cpu: the device did not drain within the bound; the memory of its transfers stays taken" in caplog.text
    assert _UNDRAINED.pop() is mover
