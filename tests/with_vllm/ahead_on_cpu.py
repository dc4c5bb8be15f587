"""A pytest plugin: vLLM's CPU engine schedules a step ahead, which it refuses by itself, so that what asynchronous
scheduling does to a connector can be tested without a GPU.

    pytest -p with_vllm.ahead_on_cpu tests/with_vllm/test_windows.py

The runner's CUDA streams and events, through which it copies sampled tokens, become objects that do nothing: on a CPU
everything has happened when a call returns.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["LAMELLA_TEST_AHEAD"] = "1"


class _Done:
    """A stream or an event of which nothing is ever outstanding."""

    cuda_stream = 0

    def __init__(self, *arguments: Any, **options: Any) -> None: ...

    def __enter__(self) -> _Done:
        return self

    def __exit__(self, *error: object) -> None: ...

    def record(self, *arguments: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait(self, *arguments: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def query(self) -> bool:
        return True


def pytest_configure() -> None:
    import torch
    from vllm.platforms.cpu import CpuPlatform

    for name in ("Event", "Stream", "stream", "current_stream"):
        setattr(torch.cuda, name, _Done)
    checked = CpuPlatform.check_and_update_config.__func__

    def check(cls: Any, config: Any) -> None:
        checked(cls, config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check)
