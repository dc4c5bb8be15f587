"""What is counted is counted in whole numbers: the check that every size of the public values passes through."""

from __future__ import annotations

from typing import Final

MOST_SECONDS: Final = 10**9
"""Thirty years, the bound of every time: what is much longer no clock of 64 bits of ns and no system call can hold."""


def check_int(name: str, value: object) -> None:
    """The value is a whole number.

    A bool is none, nor is a NumPy integer, whose products wrap around where Python's do not.

    Raises:
        TypeError: it is no `int`.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number (an int), got {value!r}")


def check_whole(name: str, value: int, least: int, most: int | None = None) -> None:
    """The value is a whole number in the range.

    Raises:
        TypeError: as `check_int`.
        ValueError: it is out of the range.

    >>> check_whole("num_layers", 32, 1)
    >>> check_whole("num_layers", 0, 1)
    Traceback (most recent call last):
    ValueError: num_layers must be at least 1, got 0
    >>> check_whole("num_layers", 2.0, 1)
    Traceback (most recent call last):
    TypeError: num_layers must be a whole number (an int), got 2.0
    """
    check_int(name, value)
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if most is not None and value > most:
        raise ValueError(f"{name} must be at most {most:,}, got {value:,}")
