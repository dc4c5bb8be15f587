"""LamellaConnector under the scheduler tests of vLLM, written for a connector that asks another engine for KV.

Those tests play the worker themselves, and mark requests by `kv_transfer_params["do_remote_prefill"]`. So here a marked
request finds its chunks in the pool, a report of "received" or of a failed block ends its load, and nothing is stored.
Everything else is the connector as it is. `upstream.sh` re-points the tests.
"""

from __future__ import annotations

from typing import Any

from lamella.connector.step_orders import Ended, StepReport
from lamella.connector.tier_prefetch import RankObjects
from lamella.connector.vllm import LamellaConnector


class RepointedConnector(LamellaConnector):
    """See the module."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        vllm_config.kv_transfer_config.kv_connector_extra_config = {
            "layers_per_slice": 1,
            "release": "whole" if vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute" else "first",
            "chunk_tokens": vllm_config.cache_config.block_size,
        }
        super().__init__(vllm_config, role, kv_cache_config)
        if self.scheduler is not None:
            self.scheduler.set_ranks([RankObjects(b"r" * 32, 1)], 4096)
            self.scheduler.stores.enabled = False

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        side = self._scheduler
        if (request.kv_transfer_params or {}).get("do_remote_prefill"):
            reserved = side.objects.index.reserve(side._keys.keys(request, request.num_tokens))
            if reserved is not None:
                side.objects.index.commit(reserved.slots)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if request.kv_transfer_params:
            request.kv_transfer_params["do_remote_prefill"] = False

    def update_connector_output(self, connector_output: Any) -> None:
        side = self._scheduler
        received = set(connector_output.finished_recving or ())
        bad = set(connector_output.invalid_block_ids or ())
        report = StepReport()
        for number, load in side._loads.items():
            if load.order.request in received or load.order.joins_step or load.blocks & bad:
                report.loads[number] = Ended(1, not load.blocks & bad)
        side.step_done(connector_output, report)
