"""What a concurrency run was to show: each goal beside what was measured, and whether it is reached and shown.

Goals are for one H200 and 15,360 cached tokens, against the better chunk-major form that replays the same graphs.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from concurrency.arms import CHUNK_MAJOR, graphs_of
from concurrency.figures import CellFigures, Verdict
from concurrency.rules import Change, Row, change_of, counted

CHOSEN: Final = ("auto", "auto_prefill_graphs", "auto_full_graphs", "auto_both_graphs")
"""The arms that choose for each request; what the goals are about."""

TTFT: Final[tuple[tuple[str, str, float], ...]] = (
    ("C = 1, new = 768", "c1_hit15360_new768_chunk256", -0.39),
    ("C = 4, new = 768", "c4_hit15360_new768_chunk256", -0.45),
    ("C = 8, new = 768", "c8_hit15360_new768_chunk256", -0.55),
    ("C = 4, new = 256", "c4_hit15360_new256_chunk256", -0.45),
    ("C = 4, new = 2048", "c4_hit15360_new2048_chunk256", -0.45),
    ("12,288 + 2,866, chunk 4096, C = 1", "c1_hit12288_new2866_chunk4096", 0.0),
    ("12,288 + 2,866, chunk 4096, C = 4", "c4_hit12288_new2866_chunk4096", 0.0),
    ("12,288 + 2,866, chunk 4096, C = 8", "c8_hit12288_new2866_chunk4096", 0.0),
    ("14,336 + 818, chunk 2048, C = 1", "c1_hit14336_new818_chunk2048", 0.0),
    ("14,336 + 818, chunk 2048, C = 4", "c4_hit14336_new818_chunk2048", 0.0),
    ("14,336 + 818, chunk 2048, C = 8", "c8_hit14336_new818_chunk2048", 0.0),
)
"""(what, cell, largest change of the mean time to first token); 0: any gain."""
CEILING_SHARE: Final = 0.8
MEAN_REGRET: Final = 0.03
LARGEST_REGRET: Final = 0.08
BYSTANDERS: Final = 0.05
LIKE_THROUGHPUT: Final = 0.02
"""Bystanders of two arms are compared where both serve as many requests a second, to so much of it."""
AGAIN: Final[Mapping[str, str]] = {
    "before_batch_full": ", beside `before_batch`",
    "in_flight_both": ", beside other bytes in flight",
}
"""Cells of the same sizes again, in which some arms switch one setting: how names end, and what rows say of it."""
NO_OVERLAP: Final = ("chunk", "recompute", "early", "peer")


class Line(NamedTuple):
    """One goal: what it is about, the goal, what was measured, and one of `reached`, `missed` or `not shown: ...`."""

    what: str
    goal: str
    measured: str
    state: str


def baseline_of(cell: CellFigures, arm: str) -> str | None:
    """The better chunk-major arm with the same graphs; None where the cell has none."""
    alike = [name for name in CHUNK_MAJOR[graphs_of(arm)] if name in cell.arms]
    return min(alike, key=lambda name: cell.arms[name].ttft.value, default=None)


def gain_of(cell: CellFigures, arm: str) -> Change | None:
    """The change of an arm's time to first token against that chunk-major arm's; None where one of both is missing."""
    base = baseline_of(cell, arm) if arm in cell.arms else None
    return None if base is None else change_of(cell.arms[arm].ttft, cell.arms[base].ttft, cell.drift)


def chosen_of(cell: CellFigures) -> list[str]:
    """The cell's arms that choose for each request."""
    return [name for name in CHOSEN if name in cell.arms]


def regret_of(cell: CellFigures, arm: str) -> tuple[float, str] | None:
    """By how much the arm's mean is above the best other arm's with the same graphs, and which that is.

    None where no other way than chunk-major ran: better than that is no sign of a good choice.
    """
    others = [
        name
        for name in cell.arms
        if not name.startswith("auto") and name != "early_read" and graphs_of(name) == graphs_of(arm)
    ]
    if all(name.startswith("chunk") for name in others):
        return None
    best = min(others, key=lambda name: cell.arms[name].ttft.value)
    return cell.arms[arm].ttft.value / cell.arms[best].ttft.value - 1, best


def goals(
    cells: Mapping[str, CellFigures], verdicts: Mapping[tuple[str, str], Verdict], rows: Sequence[Row]
) -> list[Line]:
    """Every goal that the cells say something about."""
    lines = [line for what, name, goal in TTFT for line in _ttft_lines(cells, what, name, goal)]
    lines += [line for cell in cells.values() for line in _ceiling_lines(cell)]
    for arm in ("auto", "auto_full_graphs", "auto_both_graphs"):
        lines += _regret_lines(cells, arm)
        for figure, what, sign in (
            ("ttft", f"{arm}'s time to first token over chunk-major's", 1),
            ("ttft", f"{arm}'s time to first token over recomputation's", 1),
            ("requests_per_s", f"{arm}'s throughput over chunk-major's", -1),
            ("e2e", f"{arm}'s end-to-end latency over chunk-major's, 50 tokens", 1),
        ):
            chosen = [cell for cell in cells.values() if figure != "e2e" or cell.cell["output"] == 50]
            lines += _never_worse(chosen, arm, figure, what, sign)
    lines += _bystander_lines(cells.values())
    if verdicts:
        wrong = {arm: verdict.wrong for (_cell, arm), verdict in verdicts.items() if verdict.wrong}
        caught = sum(verdict.wrong for (_cell, arm), verdict in verdicts.items() if arm == "early_read")
        total = sum(sum(verdict[:3]) for (_cell, arm), verdict in verdicts.items() if arm != "early_read")
        wrong.pop("early_read", None)
        lines.append(
            Line(
                "wrong answers",
                "0",
                f"{sum(wrong.values())} of {total}; the early reader's {caught}",
                "missed" if wrong else "reached" if caught else "not shown: nothing was caught reading early",
            )
        )
    same, seen = first_tokens(rows)
    if seen:
        lines.append(Line("first tokens like recomputation's, in all repeats", "-", f"{same} of {seen}", "-"))
    return lines


def _regret_lines(cells: Mapping[str, CellFigures], arm: str) -> Iterable[Line]:
    found = {
        name: (max(0.0, regret[0]), regret[1])
        for name, cell in cells.items()
        if arm in cell.arms and (regret := regret_of(cell, arm))
    }
    if not found:
        return
    mean = statistics.fmean(regret for regret, _best in found.values())
    name, (largest, best) = max(found.items(), key=lambda item: item[1])
    worst = f" in {name} ({best})" if largest else ""
    worst += "".join(
        f", {regret:.1%} in {other} ({than})"
        for other, (regret, than) in found.items()
        if regret > LARGEST_REGRET and other != name
    )
    yield Line(
        f"{arm}'s regret in {len(found)} cells",
        f"mean ≤ {MEAN_REGRET:.0%}, any ≤ {LARGEST_REGRET:.0%}",
        f"mean {mean:.1%}, largest {largest:.1%}{worst}",
        "reached" if mean <= MEAN_REGRET and largest <= LARGEST_REGRET else "missed",
    )


def cells_of(name: str) -> list[str]:
    """The names under which a goal's cell may be recorded."""
    return [name, *(f"{name}_{kind}" for kind in ("graphs", "full_graphs", "full", "piecewise", "both"))]


def runs_of(name: str) -> list[str]:
    """And those of the same sizes again: their plain arms are runs of the goal, though no line of their own."""
    return [*cells_of(name), *(f"{name}_{suffix}" for suffix in AGAIN)]


def aim_of(goal: float) -> str:
    """A goal for the time to first token in words."""
    return f"≤ {goal:+.0%}" if goal else "a gain"


def _ttft_lines(cells: Mapping[str, CellFigures], what: str, name: str, goal: float) -> Iterable[Line]:
    for cell_name in cells_of(name):
        cell = cells.get(cell_name)
        if cell is None:
            continue
        for arm in chosen_of(cell):
            if cell_name != name and name in cells and arm in cells[name].arms and graphs_of(arm) == "piecewise":
                continue
            base = baseline_of(cell, arm)
            if base is None:
                continue
            change = change_of(cell.arms[arm].ttft, cell.arms[base].ttft, cell.drift)
            reached = change.value <= goal if goal else change.value < 0
            state = f"not shown: {change.why_not}" if not change.shown else "reached" if reached else "missed"
            best = _best_layerwise(cell, arm)
            before, after = cell.arms[base].ttft.value, cell.arms[arm].ttft.value
            measured = f"{change.value:+.1%} ± {change.error:.1%} ({before:.1f} → {after:.1f} ms)"
            if best is not None:
                ratio = cell.arms[best].ttft.value / cell.arms[base].ttft.value - 1
                measured += f"; best of the others {best} {ratio:+.1%}"
            floor = cell.arms[arm].link_floor
            if not reached and floor is not None:
                measured += (
                    f"; {before * (1 + goal):.1f} ms were wanted, and the link alone needs {floor.value:.1f} for these "
                    "arrivals"
                )
            yield Line(f"{what}, {arm}{company_of(cell_name, arm)}", aim_of(goal), measured, state)


def _best_layerwise(cell: CellFigures, arm: str) -> str | None:
    others = [
        name for name in cell.arms if not name.startswith(("auto", *NO_OVERLAP)) and graphs_of(name) == graphs_of(arm)
    ]
    return min(others, key=lambda name: cell.arms[name].ttft.value, default=None)


def _ceiling_lines(cell: CellFigures) -> Iterable[Line]:
    facts = cell.cell
    if facts["concurrency"] != 1 or facts["bystanders"] or facts["rate_per_s"] or facts["tier_gb_per_s"]:
        return
    for arm in chosen_of(cell):
        base, alone = baseline_of(cell, arm), cell.alone_of(arm)
        ceiling, ratio = alone.ceiling, alone.transfer_over_prefill
        if base is None or ceiling is None or ratio is None or not 0.45 <= ratio <= 2.2:
            continue
        change = change_of(cell.arms[arm].ttft, cell.arms[base].ttft, cell.drift)
        share = -change.value / ceiling
        state = "reached" if share >= CEILING_SHARE else "missed"
        yield Line(
            f"share of the ceiling {ceiling:.0%} at T/P {ratio:.2f}, new = {facts['new']}{objects_of(facts)}, {arm}",
            f"≥ {CEILING_SHARE:.0%}",
            f"{share:.0%} ± {change.error / ceiling:.0%}",
            state if change.shown else f"not shown: {change.why_not}",
        )


def _never_worse(cells: Iterable[CellFigures], arm: str, figure: str, what: str, sign: int) -> Iterable[Line]:
    """One line over all cells: by how much the arm is worse where it is worst, and whether any of it is shown."""
    found: list[tuple[float, str, bool]] = []
    for cell in cells:
        base = _recomputing(cell, arm) if "recomputation" in what else baseline_of(cell, arm)
        if arm not in cell.arms or base is None:
            continue
        change = change_of(getattr(cell.arms[arm], figure), getattr(cell.arms[base], figure), cell.drift)
        found.append((sign * change.value, str(cell.cell["name"]), change.shown))
    if not found:
        return
    worst = max(found)
    sure = [name for value, name, shown in found if value > 0 and shown]
    worse = sum(value > 0 for value, _name, _shown in found)
    state = "reached"
    if worse:
        state = f"missed in {', '.join(sure)}" if sure else f"not shown: worse in {worse} cells, none of it shown"
    yield Line(f"{what}, {len(found)} cells", "never worse", f"worst {sign * worst[0]:+.1%} in {worst[1]}", state)


def _recomputing(cell: CellFigures, arm: str) -> str | None:
    alike = (name for name in cell.arms if name.startswith("recompute") and graphs_of(name) == graphs_of(arm))
    return next(alike, None)


def company_of(name: str, arm: str) -> str:
    """What else an arm's cell was measured for, where the same workload has a cell for such arms alone."""
    again = next((said for suffix, said in AGAIN.items() if name.endswith(suffix)), "")
    if again:
        return again
    return ", beside prefills' graphs" if name.endswith("_both") and graphs_of(arm) != "both" else ""


def objects_of(facts: Mapping[str, Any]) -> str:
    """How large a cell's objects are, where they are not of 256 tokens."""
    return f", objects of {facts['chunk']:,}" if facts["chunk"] != 256 else ""


def arriving(facts: Mapping[str, Any]) -> str:
    """How often requests come to an open loop's cell; nothing of a closed one's."""
    return f", {facts['rate_per_s']:g} arrivals/s" if facts["rate_per_s"] else ""


def bystanders_of(cell: CellFigures) -> Iterable[tuple[str, Change, float]]:
    """Of each arm that is judged by it: what is claimed, bystanders' change, and by how much throughput differs."""
    for arm in sorted(cell.arms):
        base, mine = baseline_of(cell, arm), cell.arms[arm].bystander_tpot
        theirs = None if base is None else cell.arms[base].bystander_tpot
        if base is None or theirs is None or mine is None or arm.startswith(("chunk", "recompute")):
            continue
        change = change_of(mine, theirs, cell.drift)
        rate = cell.arms[arm].requests_per_s.value / cell.arms[base].requests_per_s.value - 1
        yield f"bystanders' TPOT, {arm}{arriving(cell.cell)}", change, rate


def _bystander_lines(cells: Iterable[CellFigures]) -> Iterable[Line]:
    for what, change, rate in (one for cell in cells for one in bystanders_of(cell)):
        state = "reached" if change.value <= BYSTANDERS else "missed"
        if not abs(change.value - BYSTANDERS) > 2 * change.error:
            state = "not shown: within two standard errors of the bound"
        if abs(rate) > LIKE_THROUGHPUT:
            state = "-: throughput differs"
        measured = f"{change.value:+.1%} ± {change.error:.1%} at throughput {rate:+.1%}"
        yield Line(what, f"≤ {BYSTANDERS:+.0%} at equal throughput", measured, state)


def first_tokens(rows: Sequence[Row]) -> tuple[int, int]:
    """How many of all counted requests began as recomputation of the same prompt did, and of how many that is known.

    Rounding alone makes some differ; an arm that read early would differ in most.
    """
    known: dict[tuple[str, int], set[int]] = {}
    for row in rows:
        if row["kind"] == "repeat" and row["arm"].startswith("recompute"):
            for number, request in enumerate(row["requests"]):
                known.setdefault((row["cell"]["name"], number), set()).add(request["tokens"][0])
    same = seen = 0
    for row in rows:
        if row["kind"] != "repeat" or row["arm"].startswith(("recompute", "early", "peer")):
            continue
        skipped = len(row["requests"]) - len(counted(row))
        for number, request in enumerate(row["requests"]):
            right = known.get((row["cell"]["name"], number))
            if right is not None and number >= skipped:
                seen += 1
                same += request["tokens"][0] in right
    return same, seen
