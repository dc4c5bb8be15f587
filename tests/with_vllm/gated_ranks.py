"""`GatedRanksConnector`: each rank's loads move window by window, as a file of that rank lets them.

For engines whose workers are processes of their own. `$LAMELLA_TEST_GATES/rank-N` holds how many windows rank N may
have moved in all.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, ClassVar

from lamella.connector.vllm import LamellaConnector
from with_vllm.gates import NativeGate, SliceGate
from with_vllm.tiny_engine import ON_GPU

BY_SLICES = ON_GPU or os.environ.get("LAMELLA_TEST_GATE") == "slices"
"""The engine's own gate is of its CPU device; the other works on any."""


class GatedRanksConnector(LamellaConnector):
    """See the module."""

    _engine_options: ClassVar[dict[str, Any]] = {} if BY_SLICES else {"paced": True, "in_flight_bytes": 1}

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        assert self.worker is not None
        rank = self._rank_facts.tp_rank
        gate = SliceGate(self.worker.engine, in_hand=True) if BY_SLICES else NativeGate(self.worker.engine)
        self._stop = threading.Event()
        path = Path(os.environ["LAMELLA_TEST_GATES"]) / f"rank-{rank}"
        self._follower = threading.Thread(target=self._follow, args=(gate, path), daemon=True)
        self._follower.start()

    def shutdown(self) -> None:
        if hasattr(self, "_stop"):
            self._stop.set()
            self._follower.join()
        super().shutdown()

    def _follow(self, gate: NativeGate | SliceGate, path: Path) -> None:
        granted = 0
        while not self._stop.wait(0.001):
            allowed = int(path.read_text()) if path.exists() else 0
            if allowed > granted:
                gate.grant(allowed - granted)
                granted = allowed
