"""What another thread or process does happens soon, not at once: the one bounded wait of all tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

WAIT_S: Final = 60.0
"""A busy machine takes its time; what is waited for takes milliseconds."""


def wait_until(holds: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> None:
    """Waits until it holds, and says what did not come to hold."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.001)
