"""A pytest plugin: engines keep full CUDA graphs (`full_graphs: before`), and who reads a landing load replays one.

    pytest -p with_vllm.full_graphs_before tests/with_vllm/test_windows.py

On a GPU nothing is pretended. A CPU has no graphs: there a step in which every request computes one token passes for a
replay. Its context says that it is one, and no hook of a layer is called in it.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["LAMELLA_TEST_FULL_GRAPHS"] = "before"


def pytest_collection_finish() -> None:
    import torch

    if not torch.cuda.is_available():
        _pass_decoding_steps_for_replays()


def _pass_decoding_steps_for_replays() -> None:
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import get_forward_context, is_forward_context_available
    from vllm.v1.worker import gpu_model_runner

    from lamella.connector.vllm import LamellaConnector

    enter, has_metadata = gpu_model_runner.set_forward_context, LamellaConnector.has_connector_metadata

    def set_forward_context(attn_metadata: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(attn_metadata, dict) and {one.max_query_len for one in attn_metadata.values()} == {1}:
            options["cudagraph_runtime_mode"] = CUDAGraphMode.FULL
        return enter(attn_metadata, *arguments, **options)

    def has_connector_metadata(self: LamellaConnector) -> bool:
        if is_forward_context_available() and get_forward_context().cudagraph_runtime_mode is CUDAGraphMode.FULL:
            return False
        return has_metadata(self)

    gpu_model_runner.set_forward_context = set_forward_context
    LamellaConnector.has_connector_metadata = has_connector_metadata
