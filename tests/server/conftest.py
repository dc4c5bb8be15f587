"""What tests of a rank start with: a small server process of their own, and a rank's memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

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
def num_layers() -> int:
    """Of `memory`; a module with other needs has its own."""
    return 32


@pytest.fixture
def memory(num_layers: int) -> Iterator[RankMemory]:
    made = RankMemory(num_layers=num_layers)
    yield made
    made.close()
