"""What several GPUs gain beside what one does, where transfer and prefill stand to each other alike.

With tensor parallelism each rank moves and computes its share of the heads. Transfer time T halves and prefill time P
does not quite, so the same workload has another T/P there, and gains are compared at the nearest one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

from concurrency_figures import CellFigures
from concurrency_goals import Line, baseline_of, chosen_of
from concurrency_rules import Change, change_of

CONCURRENCY: Final = 4
MOST_POINTS_SMALLER: Final = 0.05
SAME_RATIO: Final = 1.15
"""T/P that differ by no more than this are the same."""

_ON_TWO: Final = "_two_gpus"
_ALIKE: Final = (
    "concurrency", "chunk", "output", "width", "bystanders", "rate_per_s", "mix", "stores", "miss_every",
    "tier_gb_per_s",
)  # fmt: skip
"""What both workloads have in common."""


def beside_one_gpu(cells: Mapping[str, CellFigures]) -> list[Line]:
    """The gain of four requests at once on two GPUs, of each arm that chooses, beside one GPU's at the nearest T/P.

    Empty unless the cells are of both kinds.
    """
    ones = [cell for name, cell in cells.items() if _ON_TWO not in name]
    twos = [cell for name, cell in cells.items() if _ON_TWO in name and cell.cell["concurrency"] == CONCURRENCY]
    return [line for two in twos for arm in chosen_of(two) for line in _lines(two, ones, arm)]


def _lines(two: CellFigures, ones: Iterable[CellFigures], arm: str) -> Iterable[Line]:
    mine, ratio = _gain(two, arm), two.transfer_over_prefill
    if mine is None or ratio is None:
        return
    found = [
        (abs(math.log(other / ratio)), other, gain, str(one.cell["name"]))
        for one in ones
        if all(one.cell.get(name) == two.cell.get(name) for name in _ALIKE)
        and (gain := _gain(one, arm)) is not None
        and (other := one.transfer_over_prefill) is not None
    ]
    if not found:
        return
    _apart, other, gain, name = min(found)
    smaller, error = mine.value - gain.value, math.hypot(mine.error, gain.error)
    reasons = [f"{whose} {one.why_not}" for whose, one in (("two GPUs:", mine), ("one:", gain)) if not one.shown]
    if max(ratio / other, other / ratio) > SAME_RATIO:
        reasons.insert(0, "T/P is not the same")
    state = "reached" if smaller <= MOST_POINTS_SMALLER else "missed"
    yield Line(
        f"two GPUs beside one, C = {CONCURRENCY}, {two.cell['hit']:,} + {two.cell['new']:,}, {arm}",
        f"gain at most {100 * MOST_POINTS_SMALLER:.0f} points smaller at the same T/P",
        f"{mine.value:+.1%} ± {mine.error:.1%} at T/P {ratio:.2f}, one GPU {gain.value:+.1%} ± {gain.error:.1%} at "
        f"{other:.2f} in {name}: {100 * smaller:+.1f} ± {100 * error:.1f} points",
        f"not shown: {'; '.join(reasons)}" if reasons else state,
    )


def _gain(cell: CellFigures, arm: str) -> Change | None:
    """The change of the time to first token against the better chunk-major form with the same graphs."""
    base = baseline_of(cell, arm) if arm in cell.arms else None
    return change_of(cell.arms[arm].ttft, cell.arms[base].ttft, cell.drift) if base is not None else None
