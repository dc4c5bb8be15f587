"""Tests that use one engine in turn: what one of them leaves behind does not stop the next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from with_vllm.live_engine import LiveEngine


@contextmanager
def turn_with(engine: LiveEngine) -> Iterator[None]:
    """One test's turn with the `engine` of frozen loads, which nothing is left in.

    If nothing ends what the test left in the air, every later one says so at once, and runs nothing.
    """
    if engine.broken:
        pytest.fail(f"not run, an earlier test has left the engine unusable: {engine.broken}", pytrace=False)
    engine.scheduler.recompute_kv_load_failures = False
    yield
    engine.come_to_rest()
    occupancy, blocks = engine.side.objects.index.occupancy(), engine.scheduler.kv_cache_manager.block_pool
    assert (occupancy.pins, occupancy.writing) == (0, 0)
    assert engine.side.book.num_held == 0
    assert engine.worker.loads.bad_blocks == engine.side._bad_blocks  # what is computed anew is forgiven on both sides
    assert blocks.get_num_free_blocks() == blocks.num_gpu_blocks - 1
