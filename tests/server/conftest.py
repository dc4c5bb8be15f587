"""What tests start with: a small server process of their own, and of a rank also its memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import server_driver
from rank_driver import RankMemory, ServerProcess, serving


@pytest.fixture
def server_options() -> tuple[str, ...]:
    """Of `lamella serve`; a module with other needs has its own."""
    return ("--memory", "4MiB")


@pytest.fixture
def server(tmp_path: Path, server_options: tuple[str, ...]) -> Iterator[ServerProcess]:
    with serving(tmp_path / "s", *server_options) as process:
        yield process


@pytest.fixture
def tidy_server(tmp_path: Path) -> Iterator[server_driver.ServerProcess]:
    """One without a rank: it is stopped, if it still runs, and must have left no shared memory."""
    with server_driver.server_process(tmp_path) as running:
        yield running
        if running.process.poll() is None:
            running.stop()
    assert running.memories() == [], "no shared memory stays behind"


@pytest.fixture
def num_layers() -> int:
    """Of `memory`; a module with other needs has its own."""
    return 32


@pytest.fixture
def memory(num_layers: int) -> Iterator[RankMemory]:
    made = RankMemory(num_layers=num_layers)
    yield made
    made.close()
