"""Which repeats of a concurrency run count, when a change is shown, and when a cell has shown enough.

A repeat is one observation: its figure is the mean over its counted requests, and errors are those of repeats, because
requests of one repeat are not independent.

On a shared machine the host's speed jumps by as much as 1.8 from one second to the next, and a step with piecewise
graphs is as long as its launches. So each repeat carries measures of the host that no arm has a part in: the median
time in which a prompt was handed to the engine, and how long a fixed loop took on the core of each thread that drives
the engine, before and after the repeat. Repeats in which one of them took `SLOW_HOST` times as long as in the cell's
quick repeats are set aside, whatever they show. Recordings from before the loop have only the first.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from concurrency.arms import chunk_major_of

Row = Mapping[str, Any]
LARGEST_ERROR: Final = 0.02
LARGEST_DRIFT: Final = 0.05
SLOW_HOST: Final = 1.3
FEWEST_REPEATS: Final = 3
_QUICK_SHARE: Final = 0.2
_WANTED: Final = 0.9
"""A run goes on until errors and drift are below this share of what is allowed."""


class Mean(NamedTuple):
    """A mean over repeats and its standard error; the error of fewer than two repeats is not known."""

    value: float
    error: float
    repeats: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        """Of one figure a repeat.

        Raises:
            ValueError: no repeats.
        """
        if not values:
            raise ValueError("a mean needs at least one repeat")
        if len(values) < 2:
            return cls(values[0], math.inf, 1)
        return cls(statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values)), len(values))

    @property
    def relative_error(self) -> float:
        """Of the mean."""
        return self.error / self.value if self.value else math.inf


class Change(NamedTuple):
    """How an arm's mean differs from the baseline's, as a share of the baseline's; negative: it is shorter."""

    value: float
    error: float
    shown: bool
    why_not: str

    @property
    def beyond_two_errors(self) -> bool:
        """Whether it is larger than twice its own standard error, shown or not."""
        return abs(self.value) > 2 * self.error


def change_of(mine: Mean, base: Mean, drift: float) -> Change:
    """The relative change, its standard error, and whether it counts: small errors, little drift, beyond two errors."""
    if not base.value:
        return Change(math.nan, math.inf, False, "the baseline's is 0")
    ratio = mine.value / base.value
    error = ratio * math.hypot(mine.relative_error, base.relative_error)
    reasons = []
    if max(mine.relative_error, base.relative_error) > LARGEST_ERROR:
        reasons.append(f"standard error {max(mine.relative_error, base.relative_error):.1%}")
    if drift > LARGEST_DRIFT:
        reasons.append(f"baseline drift {drift:.1%}")
    if abs(ratio - 1) <= 2 * error:
        reasons.append("within two standard errors")
    return Change(ratio - 1, error, not reasons, ", ".join(reasons))


def judged(points: Mean, bound: float, drifts: Sequence[float] = ()) -> str:
    """Whether a claim in points, a change or a difference of two, is `reached`, `missed` or `not shown: ...`.

    Its own standard error must be at most `LARGEST_ERROR`, each baseline's drift at most `LARGEST_DRIFT`, and all that
    lies within two standard errors of it on one side of the bound.
    """
    reasons = [f"standard error {100 * points.error:.1f} points"] if points.error > LARGEST_ERROR else []
    reasons += [f"baseline drift {drift:.1%}" for drift in drifts if drift > LARGEST_DRIFT]
    if abs(points.value - bound) < 2 * points.error:
        reasons.append("within two standard errors of the aim")
    return f"not shown: {', '.join(reasons)}" if reasons else "reached" if points.value <= bound else "missed"


def counted(row: Row) -> list[Row]:
    """The requests of a repeat that count: not the first of a closed loop, which begin together."""
    requests: list[Row] = row["requests"]
    return requests if row["cell"]["rate_per_s"] else requests[row["cell"]["concurrency"] :]


def ttft_ms(row: Row) -> float:
    """Mean time to first token of a repeat, from the engine's having the request."""
    return statistics.fmean((request["token_us"][0] - request["queued_us"]) / 1e3 for request in counted(row))


def host_us(row: Row) -> float | None:
    """How quick the host was: the median hand-over of a prompt; None in an open loop, where it includes lateness."""
    if row["cell"]["rate_per_s"]:
        return None
    return float(statistics.median(request["queued_us"] for request in row["requests"]))


def host_measures(row: Row) -> dict[str, float]:
    """What a repeat says of the host, in microseconds: the hand-over, and the slower look at each process's core."""
    looks = enumerate(zip(*row.get("probe_us", ()), strict=False))
    return _hand_over(row) | {f"core of process {number}": max(us) for number, us in looks}


def _hand_over(row: Row) -> dict[str, float]:
    us = host_us(row)
    return {} if us is None else {"hand-over": us}


def slow_of(rows: Sequence[Row], measured: Callable[[Row], Mapping[str, float]], limit: float = SLOW_HOST) -> set[int]:
    """The `id` of those of a cell's repeats, of all its arms, in which the host was slow by one of these measures."""
    measures = {id(row): measured(row) for row in rows}
    found: set[int] = set()
    for name in {name for seen in measures.values() for name in seen}:
        us = {row: seen[name] for row, seen in measures.items() if name in seen}
        quick = sorted(us.values())[int(_QUICK_SHARE * (len(us) - 1))]
        found.update(row for row, one_us in us.items() if one_us > limit * quick)
    return found


def kept(arms: Mapping[str, Sequence[Row]]) -> dict[str, list[Row]]:
    """A cell's repeats by arm without those in which the host was slow, for all arms alike.

    Where an arm that has `FEWEST_REPEATS` would not keep as many, those are told by the hand-over alone, and where it
    still would not, all are kept; arms with fewer keep what they have.
    """
    every = [row for rows in arms.values() for row in rows]
    enough = {name for name, rows in arms.items() if len(rows) >= FEWEST_REPEATS}
    for measured in (host_measures, _hand_over):
        slow = slow_of(every, measured)
        found = {
            name: [row for row in rows if name not in enough or id(row) not in slow] for name, rows in arms.items()
        }
        if all(len(found[name]) >= FEWEST_REPEATS for name in enough):
            return found
    return {name: list(rows) for name, rows in arms.items()}


def drift_of(values: Sequence[float]) -> float:
    """Between the means of the earlier and of the later half of the baseline's repeats; of three, first and last."""
    if len(values) < 2:
        return math.inf
    half = len(values) // 2 if len(values) > 3 else 1
    return abs(statistics.fmean(values[-half:]) - statistics.fmean(values[:half])) / statistics.fmean(values)


def in_time(rows: Sequence[Row]) -> list[Row]:
    """As they were run."""
    return sorted(rows, key=lambda row: (row.get("at_s", 0.0), row["repeat"]))


def not_shown_yet(arms: Mapping[str, Sequence[Row]], wanted: Sequence[str]) -> set[str]:
    """The arms that need more repeats before a change of theirs can be shown; the baseline where it drifts.

    Recomputation runs as often as its arm says. The chunk-major form that is surely the worse one needs no more.
    """
    have = kept({name: arms.get(name, ()) for name in wanted})
    means = {name: Mean.of([ttft_ms(row) for row in rows]) if rows else None for name, rows in have.items()}
    wide = {
        name
        for name, mean in means.items()
        if not name.startswith("recompute")
        and (mean is None or mean.repeats < FEWEST_REPEATS or mean.relative_error > _WANTED * LARGEST_ERROR)
    }
    opening, *others = chunk_major_of(have)
    for other in others:
        bounded, deep = means.get(opening), means.get(other)
        if bounded is not None and deep is not None and max(bounded.repeats, deep.repeats) >= FEWEST_REPEATS:
            sure = abs(bounded.value - deep.value) > 3 * math.hypot(bounded.error, deep.error)
            if sure and bounded.value < deep.value:
                wide.discard(other)
    if opening in have:
        drift = drift_of([ttft_ms(row) for row in in_time(have[opening])])
        if drift > _WANTED * LARGEST_DRIFT:
            wide.add(opening)
    return wide
