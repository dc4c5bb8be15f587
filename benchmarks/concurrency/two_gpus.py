"""What several GPUs gain beside what one does, where transfer and prefill stand to each other alike.

With tensor parallelism each rank moves and computes its share of the heads. Transfer time T halves and prefill time P
does not quite, so the same workload has another T/P there, and gains are compared at the same one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from concurrency.figures import CellFigures
from concurrency.goals import Line, chosen_of, gain_of
from concurrency.rules import SLOW_HOST, Mean, Row, change_of, host_measures, judged, kept, slow_of, ttft_ms

CONCURRENCY: Final = 4
MOST_POINTS_SMALLER: Final = 0.05
SAME_RATIO: Final = 1.15
"""T/P that differ by no more than this are the same."""

LIMITS: Final = (SLOW_HOST, 1.5, 2.2, math.inf)
"""Of a quick look at a core, above which a repeat is set aside: the rule's, and others to see what hangs on it."""
FOUR_AT_ONCE: Final = tuple(f"c4_hit15360_new768_chunk256_two_gpus_{graphs}" for graphs in ("full", "prefill_graphs"))
"""The cells of four at once that are looked into; in the second, prefills of half of the arms replay graphs too."""
CHUNK_MAJOR_AND_CHOSEN: Final = (("chunk_full_graphs", "auto_full_graphs"), ("chunk_both_graphs", "auto_both_graphs"))

_ON_TWO: Final = "_two_gpus"
_ALIKE: Final = (
    "concurrency", "chunk", "output", "width", "bystanders", "rate_per_s", "mix", "stores", "miss_every",
    "tier_gb_per_s",
)  # fmt: skip
"""What both workloads have in common."""


class Recorded(NamedTuple):
    """A cell, and the commit that was measured."""

    cell: CellFigures
    commit: str


def on_two_gpus(name: str) -> bool:
    """Whether a cell of that name is one of two GPUs."""
    return _ON_TWO in name


def beside_one_gpu(runs: Iterable[tuple[str, Mapping[str, CellFigures]]]) -> list[Line]:
    """The gain of four requests at once on two GPUs, of each arm that chooses, beside one GPU's.

    Of one GPU's cells those at the same T/P go first, of these those of the same commit, and of these the nearest.

    Args:
        runs: each recording's commit and cells by name; of a name the last recording counts, and to stand beside two
            GPUs the last one of their commit too. A commit "-" is not known.

    Returns:
        A line for each such arm; none unless there are cells of both kinds.
    """
    newest: dict[str, Recorded] = {}
    of_commit: dict[tuple[str, str], Recorded] = {}
    for commit, cells in runs:
        for name, cell in cells.items():
            newest[name] = of_commit[commit, name] = Recorded(cell, commit)
    lines: list[Line] = []
    for name, two in newest.items():
        if not on_two_gpus(name) or two.cell.cell["concurrency"] != CONCURRENCY:
            continue
        ones = [*newest.values(), *(one for (commit, _name), one in of_commit.items() if commit == two.commit)]
        for arm in chosen_of(two.cell):
            lines += _lines(two, [one for one in ones if not on_two_gpus(one.cell.cell["name"])], arm)
    return lines


def _lines(two: Recorded, ones: Iterable[Recorded], arm: str) -> Iterable[Line]:
    mine, ratio = gain_of(two.cell, arm), two.cell.alone_of(arm).transfer_over_prefill
    if mine is None or ratio is None:
        return
    found = [
        (
            max(ratio / other, other / ratio) > SAME_RATIO,
            one.commit != two.commit or one.commit == "-",
            abs(math.log(other / ratio)),
            str(one.cell.cell["name"]),
            other,
            gain,
            one.commit,
            one.cell.drift,
        )
        for one in ones
        if all(one.cell.cell.get(name) == two.cell.cell.get(name) for name in _ALIKE)
        and (gain := gain_of(one.cell, arm)) is not None
        and (other := one.cell.alone_of(arm).transfer_over_prefill) is not None
    ]
    if not found:
        return
    another_ratio, another_commit, _apart, name, other, gain, commit, drift = min(found)
    smaller = Mean(mine.value - gain.value, math.hypot(mine.error, gain.error), 1)
    reasons = [f"{whose} {one.why_not}" for whose, one in (("two GPUs:", mine), ("one:", gain)) if not one.shown]
    if another_ratio:
        reasons.insert(0, "T/P is not the same")
    state = judged(smaller, MOST_POINTS_SMALLER, (two.cell.drift, drift))
    spec = two.cell.cell
    yield Line(
        f"two GPUs beside one, C = {CONCURRENCY}, {spec['hit']:,} + {spec['new']:,}, {arm}",
        f"gain at most {100 * MOST_POINTS_SMALLER:.0f} points smaller at the same T/P",
        f"{mine.value:+.1%} ± {mine.error:.1%} at T/P {ratio:.2f} ({two.commit}), one GPU {gain.value:+.1%} ± "
        f"{gain.error:.1%} at {other:.2f} in {name} ({commit if another_commit else 'same commit'}): "
        f"{100 * smaller.value:+.1f} ± {100 * smaller.error:.1f} points",
        f"not shown: {'; '.join(reasons)}" if reasons else state,
    )


def limits_table(runs: Mapping[str, Sequence[Row]]) -> str:
    """What each arm that chooses gains in a cell of `FOUR_AT_ONCE` by the limit above which repeats are set aside.

    On two GPUs three threads must have quick cores at once, so that most repeats are.

    Args:
        runs: the lines of each, by its name; those without looks at the cores, or without the cell, are left out.
    """
    having = [
        (name, rows, base, chosen)
        for name, rows in ((name, _repeats(lines)) for name, lines in runs.items())
        for base, chosen in CHUNK_MAJOR_AND_CHOSEN
        if any(row["arm"] == chosen for row in rows) and all("probe_us" in row for row in rows)
    ]
    text = [
        "### what is gained on two GPUs, by limit (repeats left)",
        "",
        f"| limit | {' | '.join(f'{name}, {chosen}' for name, _rows, _base, chosen in having)} |",
        f"|---|{'---|' * len(having)}",
    ]
    for limit in LIMITS if having else ():
        gains = " | ".join(_gain_within(rows, base, chosen, limit) for _name, rows, base, chosen in having)
        text.append(f"| {'none' if limit == math.inf else limit} | {gains} |")
    return "\n".join(text) + "\n"


def launches_table(runs: Mapping[str, Sequence[Row]]) -> str:
    """What bounds a rank's prefill in a cell of `FOUR_AT_ONCE`: how quick cores were, launching beside computing.

    Of the repeats that count: the slower look at each process's core, 0.7 ms on a quick one; of chunk-major prefills by
    each arm's graphs, rank 0's thread from a step's begin until all is launched, and the step on the device, in the
    median and in the quarters that were launched quickest and slowest.

    Args:
        runs: the lines of each, by its name; arms of which no device timed four such steps are left out.
    """
    text = [
        "### what bounds a rank's prefill on two GPUs, medians",
        "",
        "| run | arm | cores, ms | launching → step, ms | quickest quarter | slowest quarter |",
        "|---|---|---|---|---|---|",
    ]
    for name, rows in runs.items():
        arms: dict[str, list[Row]] = {}
        for row in _repeats(rows):
            arms.setdefault(row["arm"], []).append(row)
        counting = kept(arms)
        looks = [[max(us) for us in zip(*row["probe_us"], strict=True)] for group in counting.values()
                 for row in group if "probe_us" in row]  # fmt: skip
        cores = sorted(statistics.median(us) / 1e3 for us in zip(*looks, strict=True))
        told = f"{cores[0]:.2f} to {cores[-1]:.2f}" if cores else "-"
        for arm, _chosen in CHUNK_MAJOR_AND_CHOSEN:
            steps = _prefills_ms(counting.get(arm, ()))
            if len(steps) < 4:
                continue
            parts = (steps, steps[: len(steps) // 4], steps[-(len(steps) // 4) :])
            medians = (" → ".join(f"{statistics.median(ms):.1f}" for ms in zip(*part, strict=True)) for part in parts)
            text.append(f"| {name} | {arm} | {told} | {' | '.join(medians)} |")
    return "\n".join(text) + "\n"


def _prefills_ms(rows: Iterable[Row]) -> list[tuple[float, float]]:
    """Launching and the step of each prefill, beside at most the others' decoding; launched quickest first."""
    return sorted(
        (step[1] / 1e3, step[5] / 1e3)
        for row in rows
        for step in row["steps"]
        if row["cell"]["new"] <= step[2] < row["cell"]["new"] + CONCURRENCY and step[5] is not None
    )


def _repeats(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["kind"] == "repeat" and row["cell"]["name"] in FOUR_AT_ONCE]


def _gain_within(rows: Sequence[Row], chunk_major: str, chosen: str, limit: float) -> str:
    slow = slow_of(rows, host_measures, limit)
    base, mine = (
        [ttft_ms(row) for row in rows if row["arm"] == arm and id(row) not in slow] for arm in (chunk_major, chosen)
    )
    if not base or not mine:
        return "-"
    gain = change_of(Mean.of(mine), Mean.of(base), 0.0)
    return f"{gain.value:+.1%} ± {gain.error:.1%} ({len(mine)})"
