"""What no answer can be asked for: numbers that are senseless, refused before anything is computed with them."""

from __future__ import annotations

from typing import Final

MOST_TOKENS: Final = 10_000_000
"""Of a prompt or an answer: more than any engine serves."""
MOST_USERS: Final = 10_000
MOST_REQUESTS: Final = 100_000
"""Of one user, and repeats, turns: more would run for days."""
MOST_WORKERS: Final = 1024
DAY_NS: Final = 24 * 3600 * 10**9


def check_range(name: str, value: float, least: float, most: float) -> None:
    """The value is in the range.

    Raises:
        ValueError: it is not, or it is no number; the message names it and the bound that it breaks.

    >>> check_range("turns", 3, 1, 10)
    >>> check_range("turns", 0, 1, 10)
    Traceback (most recent call last):
    ValueError: turns must be at least 1, got 0
    """
    if not value >= least:
        raise ValueError(f"{name} must be at least {least:,}, got {value}")
    if not value <= most:
        raise ValueError(f"{name} must be at most {most:,}, got {value}")


def check_seed(seed: int) -> None:
    """The seed is one of its own: some generators take a negative one for its positive twin.

    Raises:
        ValueError: it is negative.
    """
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
