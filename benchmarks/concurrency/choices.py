"""What the arm that chooses foresaw and what came of it, and how far that is from what the link allows."""

from __future__ import annotations

from collections.abc import Mapping

from concurrency.figures import CellFigures
from concurrency.goals import chosen_of, regret_of


def choices_table(cells: Mapping[str, CellFigures], commits: Mapping[str, str]) -> str:
    """Of the arm that chooses, in each cell: its first tokens beside the best other arm's and beside its own forecast.

    Args:
        commits: of each cell's recording, by the cell's name.
    """
    text = [
        "### the arm that chooses: against the best other arm with the same graphs, and against its own forecast",
        "",
        "| cell | arm | commit | TTFT, ms | against the best other arm | foreseen, ms | of what was measured "
        "| foreseen regret |",
        "|---|---|---|---|---|---|---|---|",
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
                f"| {name} | {arm} | {commits.get(name, '-')} | {mine.ttft.value:.1f} | {beside} | {' | '.join(told)} |"
            )
    return "\n".join(text) + "\n"


def link_table(cells: Mapping[str, CellFigures]) -> str:
    """Of the arm that chooses, where several requests share the link: its first tokens beside the link's floor.

    Not of cells behind a throttled tier, which no raw copy measures, nor of those with misses, which load nothing.
    """
    text = [
        "### the arm that chooses: the least mean time to first token that the link allows for its arrivals",
        "",
        "| cell | arm | an idle link, ms | behind others | link floor | last layer landed | TTFT | floor's share |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, cell in sorted(cells.items()):
        if cell.cell["concurrency"] == 1 or cell.cell["tier_gb_per_s"] or cell.cell["miss_every"]:
            continue
        for arm in chosen_of(cell):
            mine = cell.arms[arm]
            if mine.link_floor is None or mine.link_behind_ms is None or mine.last_layer_ms is None:
                continue
            floor, ttft = mine.link_floor.value, mine.ttft.value
            text.append(
                f"| {name} | {arm} | {floor - mine.link_behind_ms:.1f} | {mine.link_behind_ms:.1f} | {floor:.1f} | "
                f"{mine.last_layer_ms:.1f} | {ttft:.1f} | {floor / ttft:.0%} |"
            )
    return "\n".join(text) + "\n"
