"""Real vLLM for the connector's tests; where it is not installed they skip and say how to get it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HAS_VLLM = importlib.util.find_spec("vllm") is not None
_REASON = "vLLM is not installed here: `make test-vllm` builds an environment that has its CPU build"

# Read by vLLM when it is imported. One thread: the tiny model gains nothing from more, and vLLM's threads spin.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


class ModuleWithoutVllm(pytest.Module):
    """A module that is skipped before it imports vLLM."""

    def collect(self) -> list[pytest.Item]:
        pytest.skip(_REASON, allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return None if HAS_VLLM else ModuleWithoutVllm.from_parent(parent, path=module_path)


def pytest_configure(config: pytest.Config) -> None:
    if HAS_VLLM:  # vLLM and its dependencies warn of their own futures while they are imported
        config.addinivalue_line("filterwarnings", "default")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _model(tmp_path_factory, "tiny-llama")


@pytest.fixture(scope="session")
def deep_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixteen layers, so that slices of eight mean something."""
    return _model(tmp_path_factory, "deep-llama", layers=16)


def _model(factory: pytest.TempPathFactory, name: str, **options: Any) -> Path:
    import torch

    from with_vllm.tiny_engine import DTYPE
    from with_vllm.tiny_llama import write_tiny_llama

    return write_tiny_llama(factory.mktemp(name), dtype=getattr(torch, DTYPE), **options)


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> Iterator[object]:
    """An engine whose loads move slice by slice as a test lets them; its cache of 39 blocks makes reuse certain."""
    from with_vllm.live_engine import LiveEngine
    from with_vllm.replays import GRAPHS

    live = LiveEngine(
        tiny_llama,
        {
            **GRAPHS,
            "layers_per_slice": 1,
            "host_pool_gib": 0.1,
            "chunk_tokens": 64,
            "wait_timeout_s": 60.0,
            "load_timeout_s": 300,
        },
        paced=True,
        num_gpu_blocks_override=40,
    )
    yield live
    live.close()
