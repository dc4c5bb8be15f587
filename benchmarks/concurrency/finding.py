"""What each single thing makes of the time to first token: the cells of the groups `finding` and `beside`.

Their arms differ from another in one thing, so that a loss or a gain can be laid to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from concurrency.figures import CellFigures
from concurrency.finding_groups import FINDING
from concurrency.rules import Change
from concurrency.tables import changes_of, differences

NAMES: Final = frozenset(cell.name for group in FINDING.values() for cell in group.cells)
"""The cells that are there for this; their arms stand in no other table or picture of gains."""


def beyond(change: Change) -> str:
    """What is known of a change: shown by the rule, beyond twice its own error though not shown, or neither."""
    if change.shown:
        return "shown"
    return "beyond two errors" if change.beyond_two_errors else "-"


def causes_table(cells: Mapping[str, CellFigures]) -> str:
    """Each thing that one arm has and another has not, in each of these cells that has both."""
    text = [
        "### one thing at a time: time to first token and throughput",
        "",
        "| what | from → to | C | TTFT, ms | TTFT | | throughput |",
        "|---|---|---|---|---|---|---|",
    ]
    here = sorted(NAMES & cells.keys(), key=lambda one: (-int(cells[one].cell["concurrency"]), one))
    for what, without, with_it, cell in differences({name: cells[name] for name in here}):
        before, after = cell.arms[without], cell.arms[with_it]
        change, _e2e, _tpot, served = changes_of(cell, without, with_it)
        shared = ", through MPS" if cell.cell["name"].endswith("_mps") else ""
        text.append(
            f"| {what}{shared} | {without} → {with_it} | {cell.cell['concurrency']} | {before.ttft.value:.1f} → "
            f"{after.ttft.value:.1f} | {change.value:+.1%} ± {change.error:.1%} | {beyond(change)} | "
            f"{served.value:+.1%} ± {served.error:.1%} |"
        )
    return "\n".join(text) + "\n"
