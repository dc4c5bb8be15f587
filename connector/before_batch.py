"""vLLM's second model runner hears of a step's loads before it prepares the batch, as its first one does.

A worker's first model runner calls the connector's `handle_preemptions` before it touches a step. The second, which
vLLM takes by default for most models, prepares the batch first: request states, block tables, attention metadata, 4 to
6 ms of the host beside an H200 for a prompt of 16 thousand tokens. A load that the step itself waits for could move
all that while: at one user it begins 9.4 ms after the question, and 5.0 where the hook comes first
(`h200-2026-11-30-grid-before-batch` in `benchmarks/results`; docs/concurrency.md says what comes of it). No hook of
vLLM is called there, so `execute_model` of the runner's class is wrapped, once a process and only where the setting
`before_batch` asks for it; the hook is called a second time where vLLM has it.

What the runner itself writes while it prepares a batch would come behind such a load: new blocks that it zeroes for
models with recurrent state or caches of several precisions, and blocks that it copies for a hit that ends within one.
In a step with either, loads begin behind it as by default.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final

_RUNNER: Final = "vllm.v1.worker.gpu.model_runner.GPUModelRunner.execute_model"
_ORDERS: Final = "scheduler_output"
_WRITTEN: Final = ("new_block_ids_to_zero", "kv_cache_block_copies")
"""Of a step that vLLM has scheduled: blocks that its runners write before the forward pass."""


def runner_writes_blocks(scheduler_output: Any) -> bool:
    """Whether a model runner writes blocks itself while it prepares the step."""
    return any(getattr(scheduler_output, name, None) for name in _WRITTEN)


def told_first(execute_model: Callable[..., Any], tell: Callable[[Any], None]) -> Callable[..., Any]:
    """`execute_model(runner, scheduler_output, ...)` after `tell(its connector metadata)`, where it has any.

    Raises:
        RuntimeError: the method takes something else.
    """
    names = list(inspect.signature(execute_model).parameters)
    if names[1:2] != [_ORDERS]:
        raise RuntimeError(
            f"before_batch wraps {_RUNNER}(self, {_ORDERS}, ...), and this vLLM's takes ({', '.join(names)}): leave "
            "before_batch out"
        )

    @functools.wraps(execute_model)
    def execute_told(runner: Any, scheduler_output: Any, *arguments: Any, **named: Any) -> Any:
        metadata = getattr(scheduler_output, "kv_connector_metadata", None)
        if metadata is not None:
            tell(metadata)
        return execute_model(runner, scheduler_output, *arguments, **named)

    execute_told.tells_first = True  # type: ignore[attr-defined]
    return execute_told


def tell_second_runner_first(kind: type) -> None:
    """From now on each step's orders reach this process's connector before the second model runner prepares the batch.

    The process may have other engines later, with or without a connector: only one of that kind is told.

    Raises:
        RuntimeError: this vLLM's second runner is another than the one that this was written for.
    """
    try:
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    except ImportError as error:
        raise RuntimeError(f"before_batch wraps {_RUNNER}, which this vLLM has not: leave it out") from error
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    def tell(metadata: Any) -> None:
        connector = get_kv_transfer_group() if has_kv_transfer_group() else None
        if isinstance(connector, kind):
            connector.handle_preemptions(metadata)  # type: ignore[attr-defined]

    if not getattr(GPUModelRunner.execute_model, "tells_first", False):
        GPUModelRunner.execute_model = told_first(GPUModelRunner.execute_model, tell)
