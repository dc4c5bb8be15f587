"""What the tests of blending start with; torch is imported only by those that ask for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """The models are so small that torch's threads would only wait for one another."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def shared(one_thread: None) -> Iterator[Any]:
    """A blending engine that holds the documents ONE and TWO."""
    from blend_driver import ONE, TWO, BlendingEngine

    with BlendingEngine() as run:
        run.store(ONE)
        run.store(TWO)
        yield run
