"""A vLLM KV connector that claims hits it never loads, so that any (cached, new) step can be timed.

TIMING ONLY: the blocks of a claimed hit hold random numbers, so the tokens that come out mean nothing.
The claimed length is ``Claim.tokens``, set by the measuring program in the same process; each step's batch
and two CUDA events (just before the forward, just after sampling) are appended to ``STEPS``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata


class Claim:
    """How many tokens of the next prompts count as already computed (a multiple of the block size)."""

    tokens = 0


@dataclass
class StepTimes:
    """One engine step: its batch and the events around it on the compute stream."""

    num_requests: int
    num_tokens: int
    begin: torch.cuda.Event
    end: torch.cuda.Event | None = None


STEPS: list[StepTimes] = []


@dataclass
class StepShape(KVConnectorMetadata):
    """What the scheduler side tells the worker side about a step."""

    num_requests: int
    num_tokens: int


def _timing_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class FakeHitConnector(KVConnectorBase_V1):
    """Answers every look-up with ``Claim.tokens`` computed tokens, synchronously, and moves no byte."""

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return bool(extra_config.get("piecewise", False))

    # Scheduler side.
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return max(0, Claim.tokens - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        return

    def build_connector_meta(self, scheduler_output: Any) -> StepShape:
        scheduled = scheduler_output.num_scheduled_tokens
        return StepShape(len(scheduled), sum(scheduled.values()))

    # Worker side.
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        for cache in kv_caches.values():  # zeros would run faster than real keys and values
            cache.normal_()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        shape = self._get_connector_metadata()
        if shape.num_tokens:
            STEPS.append(StepTimes(shape.num_requests, shape.num_tokens, _timing_event()))

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        if STEPS and STEPS[-1].end is None:
            STEPS[-1].end = _timing_event()
