"""The tables of a concurrency run: goals, what every arm gains, and what one thing changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from concurrency.arms import DIFFERENCES, graphs_of
from concurrency.figures import CellFigures
from concurrency.goals import NO_OVERLAP, Line, arriving, baseline_of, chosen_of, company_of, objects_of, regret_of
from concurrency.rules import Change, change_of


def goals_table(lines: Sequence[Line]) -> str:
    """The goals, one a line."""
    text = ["### figures: goal and measured", "", "| what | goal | measured | |", "|---|---|---|---|"]
    return "\n".join([*text, *(f"| {' | '.join(line)} |" for line in lines)]) + "\n"


def cells_table(cells: Mapping[str, CellFigures], predicted: Mapping[tuple[str, str], float]) -> str:
    """Of the arm that chooses, in each cell: changes against chunk-major, share of the ceiling, regret, prediction."""
    text = [
        "### cells: the arm that chooses, against the better chunk-major form with the same graphs (a star: shown)",
        "",
        "| cell | arm | TTFT | e2e | throughput | TPOT | of the ceiling | regret (best other) | predicted TTFT, ms |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, cell in cells.items():
        for arm in chosen_of(cell):
            base = baseline_of(cell, arm)
            if base is None:
                continue
            ttft, e2e, tpot, throughput = changes_of(cell, base, arm)
            changes = [ttft, e2e, throughput, tpot]
            shares = "-"
            ceiling = cell.alone_of(arm).ceiling
            if ceiling is not None and cell.cell["concurrency"] == 1:
                shares = f"{-changes[0].value / ceiling:.0%} of {ceiling:.0%}"
            regret = regret_of(cell, arm)
            known = predicted.get((name, arm))
            text.append(
                f"| {name} | {arm} | "
                + " | ".join(f"{change.value:+.1%}{'*' if change.shown else ''}" for change in changes)
                + f" | {shares} | {'-' if regret is None else f'{regret[0]:+.1%} ({regret[1]})'} | "
                + ("-" if known is None else f"{known:.1f} ({known / cell.arms[arm].ttft.value - 1:+.0%})")
                + " |"
            )
    return "\n".join(text) + "\n"


def gains_table(cells: Mapping[str, CellFigures]) -> str:
    """Every arm that overlaps, in each cell, against the better chunk-major form with the same graphs."""
    text = [
        "### gains (a star: shown)",
        "",
        "| C | cached + new → answered | arm | TTFT, ms | TTFT | e2e | TPOT | throughput |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cell in sorted(cells.values(), key=lambda one: int(one.cell["concurrency"])):
        facts = cell.cell
        for arm in sorted(cell.arms, key=lambda name: (graphs_of(name), cell.arms[name].ttft.value)):
            base = baseline_of(cell, arm)
            if base is None or arm.startswith(NO_OVERLAP):
                continue
            before, after = cell.arms[base], cell.arms[arm]
            changes = changes_of(cell, base, arm)
            served = f"{_workload(facts)}{company_of(facts['name'], arm)}"
            text.append(
                f"| {facts['concurrency']} | {served} | {arm} | {before.ttft.value:.1f} → "
                f"{after.ttft.value:.1f} | {changes[0].value:+.1%} ± {changes[0].error:.1%}"
                f"{'*' if changes[0].shown else ''} | "
                + " | ".join(f"{one.value:+.1%}{'*' if one.shown else ''}" for one in changes[1:])
                + " |"
            )
    return "\n".join(text) + "\n"


def changes_of(cell: CellFigures, before: str, after: str) -> list[Change]:
    """From one arm to another: time to first token, whole answers, time per token, throughput."""
    return [
        change_of(getattr(cell.arms[after], figure), getattr(cell.arms[before], figure), cell.drift)
        for figure in ("ttft", "e2e", "tpot", "requests_per_s")
    ]


def _workload(facts: Mapping[str, Any]) -> str:
    shape = "mixed sizes" if facts["mix"] else f"{facts['hit']:,} + {facts['new']:,}"
    beside = f", {facts['bystanders']} bystanders" if facts["bystanders"] else ""
    misses = f", 1 of {facts['miss_every']} misses" if facts["miss_every"] else ""
    tier = f", tier of {facts['tier_gb_per_s']:g} GB/s" if facts["tier_gb_per_s"] else ""
    return f"{shape} → {facts['output']}{objects_of(facts)}{beside}{misses}{tier}{arriving(facts)}"


def differences(cells: Mapping[str, CellFigures]) -> Iterator[tuple[str, str, str, CellFigures]]:
    """(the thing, the arm without it, the arm with it, the cell), wherever a cell has both."""
    for what, without, with_it in DIFFERENCES:
        for cell in cells.values():
            if {without, with_it} <= cell.arms.keys():
                yield what, without, with_it, cell


def differences_table(cells: Mapping[str, CellFigures]) -> str:
    """What one thing changes, wherever a cell has the arm with it and the one without."""
    text = [
        "### one thing at a time (a star: shown)",
        "",
        "| what | from | to | cell | TTFT | e2e | TPOT | throughput |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for what, without, with_it, cell in differences(cells):
        changes = changes_of(cell, without, with_it)
        shown = " | ".join(f"{one.value:+.1%} ± {one.error:.1%}{'*' if one.shown else ''}" for one in changes)
        text.append(f"| {what} | {without} | {with_it} | {cell.cell['name']} | {shown} |")
    return "\n".join(text) + "\n"


def predictions_of(document: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """(cell, arm) to the predicted mean time to first token in ms, from what `lamella validate --json` wrote."""
    return {
        (one["cell"], one["arm"]): one["predicted"]["ttft_ns"] / 1e6
        for part in ("calibrate", "test")
        for one in document.get(part, {}).get("arms", ())
    }
