"""Spans of time as people write them."""

from __future__ import annotations

import re

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_LONGEST_S = 520 * 604_800
_LONGEST_NS = 86_400 * 10**9


def parse_duration_s(text: str) -> int:
    """Seconds in a span such as `"90s"`, `"12h"` or `"7d"`.

    Raises:
        ValueError: not a whole number of a known unit, or more than 520 weeks.

    >>> parse_duration_s("90s"), parse_duration_s("7d")
    (90, 604800)
    """
    found = re.fullmatch(r"(\d+) ?([smhdw])", text.strip(), flags=re.ASCII)
    if not found:
        raise ValueError(f"a span of time is a whole number with s, m, h, d or w, got {text!r}")
    if float(found[1]) * _UNITS_S[found[2]] > _LONGEST_S:
        raise ValueError(f"a span of time is at most 520w, got {text!r}")
    return int(found[1]) * _UNITS_S[found[2]]


def parse_time_ns(text: str) -> int:
    """Nanoseconds in a short time such as `"200ms"` or `"1.5s"`.

    Raises:
        ValueError: not a positive number of ms, us or s, or not between one nanosecond and one day.

    >>> parse_time_ns("200ms"), parse_time_ns("1.5s")
    (200000000, 1500000000)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(us|ms|s)", text.strip(), flags=re.ASCII)
    if not found or not float(found[1]):
        raise ValueError(f"a time is a positive number with us, ms or s, such as 200ms, got {text!r}")
    time_ns = float(found[1]) * {"us": 1e3, "ms": 1e6, "s": 1e9}[found[2]]
    if not 1 <= time_ns <= _LONGEST_NS:
        raise ValueError(f"a time is between 0.001us and 86400s, got {text!r}")
    return round(time_ns)
