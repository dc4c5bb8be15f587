"""Overheads fitted to recorded arms: a pattern search over whole nanoseconds, with the same answer every time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

from lamella.sim.checks import RecordedArm, check_arm
from lamella.sim.overheads import Overheads
from lamella.sim.recorded import RecordedRun
from lamella.sim.strategies import Device

FIRST_STEP_NS: Final = 2_000_000
LAST_STEP_NS: Final = 120_000
PER_1000_SHARE: Final = 16
"""A thousand tokens' overhead is searched in steps so many times smaller: prompts have tens of thousands."""
PLAUSIBLE: Final = Overheads(
    step_ns=400_000, launch_ns=4_000_000, submit_ns=300_000, first_slice_ns=1_000_000, join_ns=2_000_000
)
"""Where the search begins besides at nothing: a Python engine on a server's processor. A loss over whole runs is not
convex, since requests form other batches when a time changes a little."""
TPOT_WEIGHT: Final = 0.25
"""Of the error of the time between tokens, beside that to the first."""


def fit(arms: Sequence[RecordedArm], run: RecordedRun, device: Device) -> Overheads:
    """The overheads with which the arms' predictions are nearest to what was recorded; all 0 without arms.

    Nearest is the least mean of squared logarithms of predicted over recorded time to first token, and with a lesser
    weight between tokens. Each part is moved up and down by a step that halves when no move helps; of the searches from
    nothing and from `PLAUSIBLE`, the better counts.
    """
    if not arms:
        return Overheads()

    def loss(overheads: Overheads) -> float:
        total = 0.0
        for arm in arms:
            check = check_arm(arm, run, device, overheads)
            total += math.log(check.predicted.ttft_ns / check.measured.ttft_ns) ** 2
            if check.measured.tpot_ns and check.predicted.tpot_ns:
                total += TPOT_WEIGHT * math.log(check.predicted.tpot_ns / check.measured.tpot_ns) ** 2
        return total / len(arms)

    return min((search(loss, begin) for begin in (Overheads(), PLAUSIBLE)), key=loss)


def search(loss: Callable[[Overheads], float], begin: Overheads) -> Overheads:
    """The overheads of least loss that moves of one part at a time reach from `begin`."""
    best, least = begin, loss(begin)
    step_ns = FIRST_STEP_NS
    while step_ns >= LAST_STEP_NS:
        moved = False
        for name in Overheads.names():
            move = step_ns // PER_1000_SHARE if name.endswith("1000_tokens") else step_ns
            for value in (getattr(best, name) + move, getattr(best, name) - move):
                if value < 0:
                    continue
                candidate = best.changed(name, value)
                found = loss(candidate)
                if found < least:
                    best, least, moved = candidate, found, True
                    break
        if not moved:
            step_ns //= 2
    return best
