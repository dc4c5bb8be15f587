"""Measuring programs are not installed: their folder goes on the path. And both pages on concurrency, read once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

if TYPE_CHECKING:
    from concurrency_pages import Recorded


@pytest.fixture(scope="session")
def recorded() -> Recorded:
    """The lines of every committed recording that the pages are about, by its name."""
    from concurrency.recording import read

    from concurrency_pages import BEFORE, RESULTS, SHOWN

    return {name: read([RESULTS / f"{name}.jsonl.xz"]) for name in (*BEFORE, *SHOWN)}


@pytest.fixture(scope="session")
def front() -> str:
    """What was found: docs/concurrency.md."""
    return _document("concurrency.md")


@pytest.fixture(scope="session")
def page() -> str:
    """Every table: docs/concurrency-measurements.md."""
    return _document("concurrency-measurements.md")


def _document(name: str) -> str:
    return (Path(__file__).parents[2] / "docs" / name).read_text(encoding="utf-8")
