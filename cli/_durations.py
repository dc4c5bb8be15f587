"""Spans of time as people write them."""

from __future__ import annotations

import re

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def parse_duration_s(text: str) -> int:
    """Seconds in a span such as `"90s"`, `"12h"` or `"7d"`.

    Raises:
        ValueError: not a whole number of a known unit.

    >>> parse_duration_s("90s"), parse_duration_s("7d")
    (90, 604800)
    """
    found = re.fullmatch(r"(\d+) ?([smhdw])", text.strip(), flags=re.ASCII)
    if not found:
        raise ValueError(f"a span of time is a whole number with s, m, h, d or w, got {text!r}")
    return int(found[1]) * _UNITS_S[found[2]]
