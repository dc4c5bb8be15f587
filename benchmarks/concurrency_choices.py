"""What the arm that chooses foresaw and what came of it, and what each recording says by itself."""

from __future__ import annotations

from collections.abc import Mapping

from concurrency_figures import CellFigures
from concurrency_goals import chosen_of, regret_of


def choices_table(cells: Mapping[str, CellFigures], commits: Mapping[str, str]) -> str:
    """Of the arm that chooses, in each cell: its first tokens beside the best other arm's and beside its own forecast.

    Args:
        commits: of each cell's recording, by the cell's name.
    """
    text = [
        "### the arm that chooses: against the best other arm with the same graphs, and against its own forecast",
        "",
        "| cell | commit | TTFT, ms | against the best other arm | foreseen, ms | of what was measured "
        "| foreseen regret |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, cell in sorted(cells.items()):
        for arm in chosen_of(cell):
            mine, regret = cell.arms[arm], regret_of(cell, arm)
            told = ["-"] * 3
            if mine.predicted_ms is not None and mine.predicted_regret is not None:
                share = mine.predicted_ms / mine.ttft.value
                told = [f"{mine.predicted_ms:.1f}", f"{share:.0%}", f"{mine.predicted_regret:.1%}"]
            beside = "-" if regret is None else f"{regret[0]:+.1%} ({regret[1]})"
            text.append(
                f"| {name} | {commits.get(name, '-')} | {mine.ttft.value:.1f} | {beside} | {' | '.join(told)} |"
            )
    return "\n".join(text) + "\n"
