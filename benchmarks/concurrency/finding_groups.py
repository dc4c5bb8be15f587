"""The groups of measure.py whose arms differ from another in one thing; what they tell: finding.py."""

from __future__ import annotations

from typing import Final

from concurrency.arms import BASELINE, by_both
from concurrency.cells import PREFILL_GRAPHS, Group, closed, named

_MIDDLE: Final = closed(4, 15_360, 768)
_ALONE: Final = closed(1, 15_360, 768)
_ONE_THING: Final = (
    BASELINE, "fifo_first", "interleaved_first", "fifo_deep_first", "fifo_no_turns", "chunk_no_turns", "chunk_deep",
    "fifo_deep_no_turns", "interleaved_deep_no_turns", "sync", "fifo_whole", "fifo_width32", "sync_width32", "fifo_jit",
    "fifo_first8", "fifo_width8", "fifo_thread", "fifo_value",
)  # fmt: skip
_ONE_THING_ALONE: Final = (
    BASELINE, "fifo_first", "fifo_deep_first", "fifo_no_turns", "fifo_deep_no_turns", "chunk_no_turns", "sync",
    "fifo_whole", "fifo_width32", "sync_width32", "fifo_width8", "fifo_thread",
)  # fmt: skip
_BESIDE: Final = (BASELINE, "fifo_first", "chunk_beside", "fifo_beside")


def _by_both(arms: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(by_both(name) for name in arms if name != "fifo_value")


FINDING: Final[dict[str, Group]] = {
    "finding": Group(
        (
            named(_MIDDLE, "finding", arms=_ONE_THING, repeats=2, most_repeats=8),
            named(_ALONE, "finding", arms=_ONE_THING_ALONE, repeats=2, most_repeats=6),
        )
    ),
    "finding_both": Group(
        (
            named(_MIDDLE, "finding_both", arms=_by_both(_ONE_THING), repeats=5, most_repeats=12),
            named(_ALONE, "finding_both", arms=_by_both(_ONE_THING_ALONE), repeats=4, most_repeats=10),
            named(_MIDDLE, "beside_both", arms=_by_both(_BESIDE), repeats=4, most_repeats=8),
        ),
        full_graphs=True,
        prefill_graphs=PREFILL_GRAPHS,
    ),
    "beside": Group(tuple(named(cell, "beside", arms=_BESIDE, repeats=3) for cell in (_MIDDLE, _ALONE))),
    "beside_mps": Group(
        tuple(named(cell, "beside_mps", arms=_BESIDE, repeats=3) for cell in (_MIDDLE, _ALONE)), mps=True
    ),
}
