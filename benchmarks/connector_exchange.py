"""Exchanging the connector of a live vLLM engine, so that one engine runs many arms.

A new connector is made through vLLM's own interface, as at an engine's start, and its parts take the place of those of
the one before, in the objects that vLLM holds. The host pool's memory and its index stay.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
import time
from collections.abc import Mapping
from typing import Any, Final

from concurrency_cells import Arm, Cell, Group
from concurrency_probe import Probe
from kept_pool import KeptPool

BASE_SETTINGS: Final[dict[str, Any]] = {"max_loads": 32, "max_load_gib": 96.0, "load_timeout_s": 60.0}
"""Of every arm: no load waits for room."""

FILL: Final = {"layers_per_slice": 0, "release": "whole"}
"""Of the connector that fills the pool."""

_CONTROL_GB_PER_S: Final = 5.0
"""The control that reads early gets its KV so slowly that layers are read before they have landed."""


def keep_pool(pool: KeptPool) -> None:
    """Every worker side that is made from now on takes its host memory from the pool."""
    from lamella.connector.vllm_worker import WorkerSide

    def kept(worker: Any, object_bytes: int) -> Any:
        return pool.cut(object_bytes)

    WorkerSide._make_memory = kept  # type: ignore[assignment,method-assign]


class ConnectorExchange:
    """See the module.

    Args:
        engine: vLLM's `LLMEngine`, with its core in this process.
        group: whether whole steps are captured.
        tiny: on the CPU device.
        probe: watches every new connector.
    """

    def __init__(self, engine: Any, group: Group, tiny: bool, probe: Probe) -> None:
        self._engine, self._group, self._tiny, self._probe = engine, group, tiny, probe
        self._scheduler = engine.engine_core.engine_core.scheduler
        self._arm = ""
        self._learned: dict[str, Any] = {}

    def exchange(self, arm: Arm | None, cell: Cell) -> bool:
        """The arm's connector is in place; None: one that stores. Returns whether the pool's index was kept.

        Raises:
            RuntimeError: something is in flight.
        """
        from vllm.distributed.kv_transfer import get_kv_transfer_group
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        from lamella.connector.safety_rules import SafetyRules
        from lamella.connector.vllm import LamellaConnector

        worker_end, scheduler_end = get_kv_transfer_group(), self._scheduler.connector
        old = scheduler_end.scheduler
        if self._engine.has_unfinished_requests() or old.has_open_work:
            raise RuntimeError("a connector can be exchanged only while nothing is in flight: call settle() first")
        settings = {} if arm is None or arm.settings is None else arm.settings
        config = self._config_of(settings, cell, fills=arm is None)
        slow = cell.tier_gb_per_s if arm is None or arm.obeys_waits else _CONTROL_GB_PER_S
        LamellaConnector._rules = SafetyRules(wait_for_released=arm is None or arm.obeys_waits)
        LamellaConnector._engine_options = self._tier_options(slow)
        tensors = worker_end.worker.tensors
        worker_end.worker.close()
        try:
            worker = LamellaConnector(config, KVConnectorRole.WORKER, worker_end._kv_cache_config)
            worker.register_kv_caches(tensors)
            scheduler = LamellaConnector(config, KVConnectorRole.SCHEDULER, scheduler_end._kv_cache_config)
        finally:
            LamellaConnector._rules, LamellaConnector._engine_options = SafetyRules(), {}
        handshake, side = worker.get_handshake_metadata(), scheduler.scheduler
        assert handshake is not None
        assert side is not None
        scheduler.set_xfer_handshake_metadata({0: handshake})
        scheduler.bind_gpu_block_pool(self._scheduler.kv_cache_manager.block_pool)
        same_chunks = bool(old._facts.space.chunk_tokens == cell.chunk)
        if same_chunks:
            side.index, side._num_slots = old.index, old._num_slots
        self._keep_learned(old, side, arm)
        if arm is not None and not cell.stores:
            side._store = lambda one: []  # type: ignore[method-assign]
        if arm is not None and arm.settings is None:
            side.matched_tokens = lambda request, local_hit: (0, False)  # type: ignore[method-assign]
        if self._tiny and slow is not None:
            assert worker.worker is not None
            threading.Thread(target=_let_windows_move, args=(worker.worker.engine,), daemon=True).start()
        worker_end.__dict__.update(worker.__dict__)
        scheduler_end.__dict__.update(scheduler.__dict__)
        self._probe.attach(worker_end, side)
        return same_chunks

    def _keep_learned(self, old: Any, new: Any, arm: Arm | None) -> None:
        """What an arm that corrects its profile has observed goes on to its next repeat, as in an engine that stays."""
        if getattr(old, "_auto", None) is not None:
            self._learned[self._arm] = old._auto.correction
        self._arm = "" if arm is None else arm.name
        if getattr(new, "_auto", None) is not None and self._arm in self._learned:
            new._auto.correction = self._learned[self._arm]

    def _config_of(self, settings: Mapping[str, Any], cell: Cell, fills: bool) -> Any:
        extra = {**BASE_SETTINGS, "chunk_tokens": cell.chunk, "layers_per_slice": cell.width, **settings}
        if fills or self._group.full_graphs:
            extra |= FILL
        if self._tiny:
            extra |= {"staging_mib": 4, "window_mib": 1}
        config = copy.copy(self._engine.vllm_config)
        config.kv_transfer_config = copy.copy(config.kv_transfer_config)
        config.kv_transfer_config.kv_connector_extra_config = extra
        return config

    def _tier_options(self, gb_per_s: float | None) -> dict[str, Any]:
        """A lane that looks for a window no sooner than that rate allows, one window at a time: a slower link.

        A lane learns to look up to a tenth earlier than the rate says. On the CPU windows move when they are let.
        """
        from lamella.cuda_ext.rates import H200_RATES

        if gb_per_s is None:
            return {}
        if self._tiny:
            return {"paced": True, "in_flight_bytes": 1, "window_bytes": 1 << 17}
        rates = dataclasses.replace(H200_RATES, wire_bytes_per_s=0.9e9 * gb_per_s)
        window = (1 << 20) if gb_per_s < 10 else 4 << 20
        return {"rates": rates, "in_flight_bytes": 1, "window_bytes": window, "gather_factor": 0.0}


def _let_windows_move(engine: Any) -> None:
    """A window of 128 KiB every two milliseconds, until the engine is closed."""
    from lamella.cuda_ext._engine_library import TransferStopped
    from lamella.reference.plan import Direction

    try:
        engine.grant(Direction.STORE, 1 << 40)
        while True:
            engine.grant(Direction.RETRIEVE, 1)
            time.sleep(0.002)
    except TransferStopped:
        return
