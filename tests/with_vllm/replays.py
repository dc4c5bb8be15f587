"""Steps that an engine replays as one captured graph, in which no hook of a layer is called.

`pytest -p with_vllm.full_graphs_before` gives engines `full_graphs: before`, and prompts of which a reader of the load
computes one token, so that its step is such a replay.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from with_vllm.live_engine import LiveEngine

_ASKED = os.environ.get("LAMELLA_TEST_FULL_GRAPHS")

REPLAYED = _ASKED == "before"
"""Whether steps that read a landing load are replayed whole."""

GRAPHS: dict[str, Any] = {"full_graphs": _ASKED} if _ASKED else {}
"""Of a connector's settings; nothing: the default."""

HIT = 448
"""Tokens of a reader's prompt that are loaded: seven chunks of 64, fourteen blocks."""

OWN = 1 if REPLAYED else 52
"""Tokens of it that are computed."""


def decodes_by_replays(live: LiveEngine) -> bool:
    """Whether a step in which every request computes one token replays one graph."""
    mode = live.llm.llm_engine.vllm_config.compilation_config.cudagraph_mode
    return REPLAYED or (mode is not None and mode.has_full_cudagraphs())


@contextmanager
def replays(live: LiveEngine) -> Iterator[list[list[int]]]:
    """Yields, for each graph of a whole step that is replayed, the layers landed of each load that the step reads.

    A load that has failed counts as one of which nothing has landed.
    """
    worker = live.worker
    began, seen = worker.begin_step, []
    read: list[Any] = []

    def begin_step(orders: Any) -> None:
        began(orders)
        read[:] = [load.transfer for load in worker.loads.gated]
        if not read and worker.loads.bad_blocks & orders.held_blocks:
            read.append(None)

    def look() -> None:
        seen.append([transfer.landed() if transfer is not None else 0 for transfer in read])

    worker.begin_step = begin_step
    try:
        with _at_each_replay(live, look):
            yield seen
    finally:
        del worker.begin_step


@contextmanager
def _at_each_replay(live: LiveEngine, look: Callable[[], None]) -> Iterator[None]:
    """`look` is called where a graph of a whole step is given to the device, and nowhere else."""
    import torch
    from vllm.compilation.cuda_graph import CUDAGraphWrapper
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import get_forward_context

    runner = live.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    if not torch.cuda.is_available():
        owner, name = type(runner), "_model_forward"  # a step that passes for one, see `full_graphs_before`
    elif hasattr(runner, "cudagraph_manager"):  # Model Runner V2
        owner, name = type(runner.cudagraph_manager), "run_fullgraph"
    else:
        owner, name = CUDAGraphWrapper, "__call__"
    original = getattr(owner, name)

    def is_replay(self: Any) -> bool:
        if name == "run_fullgraph":
            return True
        own_mode = self.runtime_mode if owner is CUDAGraphWrapper else CUDAGraphMode.FULL
        return own_mode is get_forward_context().cudagraph_runtime_mode is CUDAGraphMode.FULL

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        if is_replay(self):
            look()
        return original(self, *arguments, **options)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, original)
