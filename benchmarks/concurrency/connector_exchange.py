"""Exchanging the connector of a live vLLM engine, so that one engine runs many arms.

A new connector is made through vLLM's own interface, as at an engine's start, and its parts take the place of those of
the one before, in the objects that vLLM holds. The host pool's memory and its index stay. Each rank exchanges its half
in its own process; the scheduler's half is made here once every rank has said how it names its objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from concurrency.arms import Arm
from concurrency.cells import Cell, Group
from concurrency.probe import Probe
from concurrency.rank import Ranks, RankSettings

BASE_SETTINGS: Final[dict[str, Any]] = {"max_loads": 32, "max_load_gib": 96.0, "load_timeout_s": 60.0}
"""Of every arm: no load waits for room."""

FILL: Final = {"layers_per_slice": 0, "release": "whole"}
"""Of the connector that fills the pool."""

_TINY_LAYERS: Final = 4


class ConnectorExchange:
    """See the module.

    Args:
        engine: vLLM's `LLMEngine`, with its core in this process.
        ranks: its workers.
        group: whether whole steps are captured.
        tiny: on the CPU device.
        probe: watches every new connector.
    """

    def __init__(self, engine: Any, ranks: Ranks, group: Group, tiny: bool, probe: Probe) -> None:
        self._engine, self._ranks, self._group, self._tiny, self._probe = engine, ranks, group, tiny, probe
        self._scheduler = engine.engine_core.engine_core.scheduler
        self._learner: tuple[str, float | None] = "", None
        self._learned: dict[tuple[str, float | None], Any] = {}
        self._exchanged = False

    def exchange(self, arm: Arm | None, cell: Cell) -> bool:
        """The arm's connector is in place; None: one that stores. Returns whether the pool's index was kept.

        Raises:
            RuntimeError: something is in flight, or a worker process failed.
        """
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        from lamella.connector.vllm import LamellaConnector

        held = self._scheduler.connector
        old = held.scheduler
        if self._engine.has_unfinished_requests() or old.has_open_work:
            raise RuntimeError("a connector can be exchanged only while nothing is in flight: call settle() first")
        settings = self._settings_of(arm, cell)
        handshakes = dict(self._ranks("exchange", settings))
        with settings.seams():
            config = settings.config_of(self._engine.vllm_config)
            made = LamellaConnector(config, KVConnectorRole.SCHEDULER, held._kv_cache_config)
        side = made.scheduler
        assert side is not None
        made.set_xfer_handshake_metadata({rank: handshakes[rank] for rank in sorted(handshakes)})
        made.bind_gpu_block_pool(self._scheduler.kv_cache_manager.block_pool)
        # the pool of the engine's own first connector is not the one that is kept
        kept = self._exchanged and bool(old._facts.space.chunk_tokens == cell.chunk)
        self._exchanged = True
        if kept:
            side.objects = side.stores.objects = old.objects
        self._keep_learned(old, side, arm, cell)
        if arm is not None and not cell.stores:
            side.stores.enabled = False
        if arm is not None and arm.settings is None:
            side.matched_tokens = lambda request, local_hit: (0, False)  # type: ignore[method-assign]
        held.__dict__.update(made.__dict__)
        self._probe.attach(side)
        return kept

    def _keep_learned(self, old: Any, new: Any, arm: Arm | None, cell: Cell) -> None:
        """What an arm that corrects its profile has observed goes on to its next repeat, as in an engine that stays.

        A link of another rate is another machine, of which nothing is known.
        """
        if getattr(old, "_forecast", None) is not None:
            self._learned[self._learner] = old._forecast.correction
        self._learner = ("", None) if arm is None else (arm.name, cell.tier_gb_per_s)
        if getattr(new, "_forecast", None) is not None and self._learner in self._learned:
            new._forecast.correction = self._learned[self._learner]

    def _settings_of(self, arm: Arm | None, cell: Cell) -> RankSettings:
        own: Mapping[str, Any] = {} if arm is None or arm.settings is None else arm.settings
        extra = {**BASE_SETTINGS, "chunk_tokens": cell.chunk, "layers_per_slice": cell.width, **own}
        if arm is None or arm.settings is None:
            extra |= FILL
        if self._tiny:
            extra |= {"staging_mib": 4, "window_mib": 1}
            if isinstance(extra["layers_per_slice"], int):
                extra["layers_per_slice"] = min(extra["layers_per_slice"], _TINY_LAYERS)
            if str(extra.get("release", "")).startswith("first:"):
                extra["release"] = f"first:{_TINY_LAYERS // 2}"
        obeys = arm is None or arm.obeys_waits
        return RankSettings(
            extra,
            obeys,
            cell.tier_gb_per_s,
            self._tiny,
            self._probe.layers_timed,
            "piecewise" if arm is None else arm.graphs,
            arm is not None and arm.begins_in_thread,
        )
