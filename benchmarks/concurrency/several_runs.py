"""Several recordings of one goal's cell together: the mean of their changes, each against its own run's baseline.

A change is a claim in points and has its own standard error. Runs are weighed by the inverse of its square, and where
they differ by more than their errors say, the error of their mean is wider by as much.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from concurrency.figures import CellFigures
from concurrency.goals import (
    BYSTANDERS,
    LIKE_THROUGHPUT,
    TTFT,
    Line,
    aim_of,
    bystanders_of,
    chosen_of,
    gain_of,
    runs_of,
)
from concurrency.rules import LARGEST_DRIFT, Mean, judged

TODAYS: Final = frozenset(
    {
        "99ca007",
        "e6b6de6",
        "f8adb2c",
        "10aa3d9",
        "8cab52b",
        "e3ba7d2",
        "9d63b3d",
        "b290628",
        "2702658",
        "b2a9d3e",
        "bbe8d69",
        "970283b",
    }
)
"""The commits, as seven digits, whose `auto` chooses by today's rules, whatever the engine below it.

What a hiccup teaches `auto` was mended later.
"""


def weighed(values: Sequence[Mean]) -> Mean:
    """The mean of independent measurements by the inverse squares of their errors; its `repeats` count them.

    The error is that of the weights, times the square root of chi² a degree of freedom where that is above one.

    Raises:
        ValueError: nothing to weigh, or an error that is not above 0 and finite.
    """
    if not values:
        raise ValueError("a mean over runs needs at least one run")
    if bad := [one.error for one in values if not 0 < one.error < math.inf]:
        raise ValueError(f"a run is weighed by its standard error, which must be above 0 and finite, got {bad[0]}")
    least = min(one.error for one in values)
    weights = [(least / one.error) ** 2 for one in values]
    mean = sum(weight * one.value for weight, one in zip(weights, values, strict=True)) / sum(weights)
    error = least / math.sqrt(sum(weights))
    if len(values) > 1:
        chi2 = sum(((one.value - mean) / one.error) ** 2 for one in values)
        error *= max(1.0, math.sqrt(chi2 / (len(values) - 1)))
    return Mean(mean, error, len(values))


def over_runs(runs: Iterable[tuple[str, Mapping[str, CellFigures]]]) -> dict[str, Line]:
    """Of each goal that several runs of today's `auto` say something about, the line of all of them together.

    A goal's cell under any of its names is a run of it: which graphs are replayed is the arm's, not the cell's.

    Args:
        runs: each recording's commit and cells by name. One with a single repeat has no error and is left out.

    Returns:
        The lines, by the `what` of the goal's line of one run.
    """
    todays = [(commit, cells) for commit, cells in runs if commit in TODAYS]
    found: dict[str, Line] = {}
    for what, name, aim in TTFT:
        names = runs_of(name)
        having = [(commit, cells[one]) for commit, cells in todays for one in names if one in cells]
        for arm in sorted({arm for _commit, cell in having for arm in chosen_of(cell)}):
            gains = [(commit, cell.drift, change) for commit, cell in having if (change := gain_of(cell, arm))]
            changes = [(commit, drift, Mean(one.value, one.error, 1)) for commit, drift, one in gains]
            found |= _line(f"{what}, {arm}", aim_of(aim), changes, aim)
    beside: dict[str, list[tuple[str, float, Mean]]] = {}
    for commit, cells in todays:
        for cell in cells.values():
            for what, change, rate in bystanders_of(cell):
                if abs(rate) <= LIKE_THROUGHPUT:
                    beside.setdefault(what, []).append((commit, cell.drift, Mean(change.value, change.error, 1)))
    for what, changes in beside.items():
        found |= _line(what, f"≤ {BYSTANDERS:+.0%} at equal throughput", changes, BYSTANDERS)
    return found


def _line(what: str, goal: str, runs: Iterable[tuple[str, float, Mean]], aim: float) -> dict[str, Line]:
    usable = [one for one in runs if 0 < one[2].error < math.inf]
    if len(usable) < 2:
        return {}
    all_of_them = weighed([change for _commit, _drift, change in usable])
    each = ", ".join(
        f"{change.value:+.1%} ± {change.error:.1%} ({commit}{_drifting(drift)})" for commit, drift, change in usable
    )
    measured = f"{all_of_them.value:+.1%} ± {all_of_them.error:.1%} of {each}"
    return {what: Line(f"{what}, over {len(usable)} runs", goal, measured, judged(all_of_them, aim))}


def _drifting(drift: float) -> str:
    return f", baseline drift {drift:.1%}" if drift > LARGEST_DRIFT else ""


def with_runs(lines: Iterable[Line], over: Mapping[str, Line]) -> list[Line]:
    """The lines of one run, each with that of several behind it."""
    return [one for line in lines for one in (line, over.get(line.what)) if one is not None]
