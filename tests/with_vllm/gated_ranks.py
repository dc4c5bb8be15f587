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
from lamella.reference.plan import Direction


class GatedRanksConnector(LamellaConnector):
    """See the module."""

    _engine_options: ClassVar[dict[str, Any]] = {"paced": True, "in_flight_bytes": 1}

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        assert self.worker is not None
        rank = self._rank_facts.tp_rank
        self.worker.engine.grant(Direction.STORE, 1 << 40)
        self._stop = threading.Event()
        path = Path(os.environ["LAMELLA_TEST_GATES"]) / f"rank-{rank}"
        self._follower = threading.Thread(target=self._follow, args=(self.worker.engine, path), daemon=True)
        self._follower.start()

    def shutdown(self) -> None:
        if hasattr(self, "_stop"):
            self._stop.set()
            self._follower.join()
        super().shutdown()

    def _follow(self, engine: Any, path: Path) -> None:
        granted = 0
        while not self._stop.wait(0.001):
            allowed = int(path.read_text()) if path.exists() else 0
            if allowed > granted:
                engine.grant(Direction.RETRIEVE, allowed - granted)
                granted = allowed
