"""The least mean time to first token that the link allows for requests that arrive as they did.

A true lower bound: for every repeat the shortest remaining load goes first at the rate of a raw copy, which gives the
least mean of all orders, whole or in slices; what is computed of the last layer counts as nothing, loads of requests
that do not count as none. It is a bound for those arrivals: in a closed loop the next ones follow from what was served,
so another arm has others. For any arrivals at all there is only each load's own time on an idle link.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from concurrency.rules import Row, counted


class Link(NamedTuple):
    """The rate that one link is taken to have, bytes/us, and what showed it: `raw copy` or `quickest load`."""

    bytes_per_us: float
    shown_by: str


class Floor(NamedTuple):
    """Of one repeat, mean over its counted requests in ms: the least time to first token, and what of it is waiting."""

    ttft_ms: float
    behind_others_ms: float


def least_waits(loads: Sequence[tuple[float, float]]) -> list[float]:
    """From each load's arrival to its end on one link, with the least sum that any order of them can have.

    Shortest remaining first; of equal loads that is one after another as they come.

    Args:
        loads: (arrival, time on an idle link), in one unit.

    Source: Schrage, "A proof of the optimality of the shortest remaining processing time discipline", 1968.
    """
    waits = [0.0] * len(loads)
    there: list[tuple[float, int]] = []  # what is left of it, which
    now = -math.inf
    for arrival, which in [*sorted((load[0], which) for which, load in enumerate(loads)), (math.inf, -1)]:
        while there and now < arrival:
            left, first = heapq.heappop(there)
            if now + left > arrival:
                heapq.heappush(there, (left - (arrival - now), first))
                break
            now += left
            waits[first] = now - loads[first][0]
        now = arrival
        if which >= 0:
            heapq.heappush(there, (loads[which][1], which))
    return waits


def raw_bytes_per_us(engine: Row) -> float:
    """The quickest raw copy to the device that the engine's line names; 0: it names none."""
    copies: Mapping[str, Sequence[float]] = (engine.get("wire") or {}).get("gb_per_s", {})
    return 1e3 * max(copies.get("h2d", ()), default=0.0)


def link_of(rows: Iterable[Row], raw: float) -> Link | None:
    """The quicker of a raw copy and of the quickest load of all repeats, which gives the lower floor; None: no load.

    Args:
        raw: bytes/us; 0 where none was measured.
    """
    quickest = 0.0
    for row in rows:
        for one in filter(_loaded, row["requests"]):
            for landed in one.get("landed_by_rank_us", [one["landed_us"]]):
                quickest = max(quickest, _bytes_a_link(one) / max(1, landed[-1] - one["started_us"]))
    if not quickest:
        return None
    return Link(raw, "raw copy") if raw >= quickest else Link(quickest, "quickest load")


def floor_of(row: Row, link: Link) -> Floor:
    """Of one repeat; a request that loaded nothing waits for nothing."""
    requests = counted(row)
    loads = [
        (one["at_us"] + one["queued_us"], _bytes_a_link(one) / link.bytes_per_us if _loaded(one) else 0.0)
        for one in requests
    ]
    waits, alone = least_waits(loads), [load[1] for load in loads]
    behind = [max(0.0, wait - own) for wait, own in zip(waits, alone, strict=True)]  # sums of times round
    return Floor(statistics.fmean(waits) / 1e3, statistics.fmean(behind) / 1e3)


def _loaded(one: Row) -> bool:
    return bool(one.get("landed_us")) and "started_us" in one and "bytes" in one


def _bytes_a_link(one: Row) -> float:
    """Each rank has a link of its own and loads its share of the heads."""
    return float(one["bytes"] / len(one.get("landed_by_rank_us", "1")))
