"""Sizes as people write them."""

from __future__ import annotations

import os
import re

MOST_LAYERS = 1024
LEAST_MEASURED_BYTES = 64 << 10
"""Less is the cost of a call, not a rate."""

_MOST_BYTES = 1 << 60
_BINARY = {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_UNITS = {"": 1, "b": 1, **_BINARY, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def parse_measured_bytes(text: str, copies: int) -> int:
    """Bytes to measure with, enough for a measurement and so few that `copies` of them fit into this machine's memory.

    Raises:
        ValueError: as `parse_bytes`, or too few or too many.
    """
    num_bytes = parse_bytes(text)
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // copies
    if not LEAST_MEASURED_BYTES <= num_bytes <= most:
        raise ValueError(
            f"the size must be between {LEAST_MEASURED_BYTES >> 10} KiB and {most >> 20} MiB, of which this machine's "
            f"memory holds {copies}; got {text!r}"
        )
    return num_bytes


def parse_bytes(text: str) -> int:
    """Bytes in a size such as `"64MiB"` or `"1 GB"`.

    Raises:
        ValueError: not a whole number of a known unit, less than one byte, or more than 1 EiB.

    >>> parse_bytes("64MiB"), parse_bytes("1 GB"), parse_bytes("4096")
    (67108864, 1000000000, 4096)
    """
    found = re.fullmatch(r"(\d+) ?([a-zA-Z]*)", text.strip(), flags=re.ASCII)
    if not found or found[2].lower() not in _UNITS or not float(found[1]):
        raise ValueError(f"a size is a whole number with KiB, MiB, GiB, TiB, kB, MB, GB or TB, got {text!r}")
    unit = _UNITS[found[2].lower()]
    if float(found[1]) * unit > _MOST_BYTES:
        raise ValueError(f"a size is at most {_MOST_BYTES >> 30}GiB, got {text!r}")
    return int(found[1]) * unit
