"""The vLLM engine of a concurrency run: its environment, its model and its options."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from step_time_cells import MODEL

from concurrency.cells import Group
from concurrency.connector_exchange import BASE_SETTINGS, FILL
from concurrency.graph_choice import usual_sizes

ENVIRONMENT: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
_TINY_ENVIRONMENT: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
_RANKS_ENVIRONMENT: Final = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}
"""Of several ranks: processes that begin anew, and sums without NVLink multicast, which not every host allows."""
_FIRST_POOL_GIB: Final = 0.25
"""Of ranks in processes of their own until the kept memory is theirs."""


def set_environment(tiny: bool, tensor_parallel: int) -> None:
    """What vLLM reads when it is imported is set where nobody has set it."""
    environment = ENVIRONMENT | (_TINY_ENVIRONMENT if tiny else {})
    if tensor_parallel > 1:
        environment |= _RANKS_ENVIRONMENT
        if tiny:
            environment |= {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(tensor_parallel)))}
    for name, value in environment.items():
        os.environ.setdefault(name, value)


def make_llm(group: Group, tiny: bool, tensor_parallel: int, more: Mapping[str, Any]) -> Any:
    """An engine for the group, with its core in this process; `more` are options of vLLM's over those chosen here."""
    import vllm
    from vllm.config import KVTransferConfig

    folder = Path(tempfile.mkdtemp(prefix="concurrency-model-"))
    options: dict[str, Any] = {
        "max_model_len": group.document_tokens + 8192,
        "gpu_memory_utilization": 0.86,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 64,
        "enforce_eager": False,
    }
    graphs: dict[str, Any] = {}
    if group.peer is not None:
        graphs["cudagraph_mode"] = "PIECEWISE"  # as the waits of the other arms want it
    if group.prefill_graphs:
        graphs["cudagraph_capture_sizes"] = [*usual_sizes(options["max_num_seqs"]), *group.prefill_graphs]
    if graphs:
        options["compilation_config"] = graphs
    if tiny:
        sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
        from with_vllm.tiny_llama import write_tiny_llama

        write_tiny_llama(folder)  # weights of its own: the CPU build packs weights when it loads them
        options |= {
            "max_model_len": 4096, "max_num_batched_tokens": 256, "max_num_seqs": 32, "enforce_eager": True,
            "dtype": "float32", "block_size": 32, "num_gpu_blocks_override": 600,
        }  # fmt: skip
    else:
        (folder / "config.json").write_text(json.dumps(MODEL))
    options |= {"tensor_parallel_size": tensor_parallel, **group.engine_options, **more}
    return vllm.LLM(
        model=str(folder),
        load_format="auto" if tiny else "dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=group.prefix_caching,
        disable_log_stats=True,
        kv_transfer_config=KVTransferConfig(**_transfer_config(group, tensor_parallel)),
        **options,
    )


def _transfer_config(group: Group, tensor_parallel: int) -> dict[str, Any]:
    if group.peer is not None:
        extra = {"cpu_bytes_to_use": group.pool_bytes, **group.peer_settings}
        return {"kv_connector": group.peer, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    piecewise = {"layers_per_slice": 1, "release": "first", "full_graphs": "never"}
    first = FILL if group.full_graphs else piecewise
    if tensor_parallel > 1:
        first = {**first, "host_pool_gib": _FIRST_POOL_GIB}
    return {
        "kv_connector": "LamellaConnector",
        "kv_connector_module_path": "lamella.connector.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {**BASE_SETTINGS, "chunk_tokens": group.cells[0].chunk, **first},
    }
