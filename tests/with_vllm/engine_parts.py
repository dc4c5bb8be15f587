"""The parts of a real vLLM engine in this process, and the KV that lies in its caches."""

from __future__ import annotations

from typing import Any

import torch
from vllm import LLM
from vllm.distributed.kv_transfer import get_kv_transfer_group

from lamella.connector.worker_loads import Load


class EngineParts:
    """Of an engine that runs in this process."""

    llm: LLM

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def side(self) -> Any:
        return self.scheduler.connector.scheduler

    @property
    def connector(self) -> Any:
        return get_kv_transfer_group()

    @property
    def worker(self) -> Any:
        return self.connector.worker

    def request(self, name: str) -> Any:
        """The scheduler's request; its id carries a suffix."""
        (found,) = [one for key, one in self.scheduler.requests.items() if key == name or key.startswith(f"{name}-")]
        return found

    @property
    def loads(self) -> list[Load]:
        """The worker's loads in flight, oldest first."""
        return list(self.worker.loads._loads.values())

    def load_of(self, name: str) -> Load:
        """The worker's load of a request."""
        (found,) = [
            load for load in self.loads if load.order.request == name or load.order.request.startswith(f"{name}-")
        ]
        return found

    def kv_of(self, name: str, num_tokens: int) -> list[torch.Tensor]:
        """Bytes of the request's first tokens, a tensor a layer; None of it moves any more."""
        blocks = self.scheduler.kv_cache_manager.get_block_ids(self.request(name).request_id)[0]
        index = torch.tensor(blocks[: num_tokens // self.block_tokens], device=self.tensors[0].device)
        return [tensor[index].view(torch.uint8).cpu() for tensor in self.tensors]  # [blocks, ...]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The engine's caches, by layer."""
        return list(self.worker.tensors.values())

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return int(self.worker.caches.block_tokens[0][0])

    def apart(self, kv: list[torch.Tensor], own: list[torch.Tensor]) -> float:
        """How far KV, as `kv_of` gives it, is from `own` in its worst block of a layer; 0: the same, over 1: another's.

        Tokens can be equal by luck where a copy went wrong, and differ by luck where none did; this says which.
        """
        worst = 0.0
        for tensor, mine, right in zip(self.tensors, kv, own, strict=True):
            a, b = (one.view(tensor.dtype).float().flatten(1) for one in (mine, right))  # [blocks, elements]
            worst = max(worst, float(((a - b).norm(dim=1) / b.norm(dim=1)).max()))
        return worst
