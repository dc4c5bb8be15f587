"""The tables of docs/concurrency.md are what the committed recordings say today."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from concurrency_arms import DIFFERENCES
from concurrency_figures import CellFigures, figures_of, verdicts_of
from concurrency_goals import differences_table, gains_table, goals, goals_table
from concurrency_report import read, summary

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
GROUPS = ("full-graphs", "core", "original", "two-gpus")


@pytest.fixture(scope="module")
def recorded() -> dict[str, list[Any]]:
    return {group: read([RESULTS / f"h200-2026-11-29-grid-{group}.jsonl.xz"]) for group in GROUPS}


@pytest.fixture(scope="module")
def printed(recorded: dict[str, list[Any]]) -> dict[str, set[str]]:
    """The rows that the report prints of each recording."""
    return {group: set(_rows(rows, figures_of(rows))) for group, rows in recorded.items()}


@pytest.fixture(scope="module")
def page() -> str:
    return (ROOT / "docs" / "concurrency.md").read_text(encoding="utf-8")


def _rows(rows: list[Any], cells: dict[str, CellFigures]) -> Iterator[str]:
    tables = (
        goals_table(goals(cells, verdicts_of(rows), rows)),
        gains_table(cells),
        differences_table(cells),
    )
    for text in tables:
        yield from (line for line in text.splitlines()[4:] if line.startswith("|"))


def _measured(page: str) -> list[str]:
    """The page's rows that hold figures of a recording: goals, gains, and what one thing changes."""
    things = tuple(f"| {what} |" for what, _without, _with in DIFFERENCES)
    known = ("| 1 |", "| 4 |", "| 8 |", "| C = ", "| 12,288", "| share", "| auto's", "| wrong answers", *things)
    return [line for line in page.splitlines() if line.startswith(known)]


def test_every_row_of_the_page_is_one_that_the_report_prints(page: str, printed: dict[str, set[str]]) -> None:
    rows = _measured(page)
    assert len(rows) > 80
    assert [row for row in rows if row not in set().union(*printed.values())] == []


def test_a_figure_that_no_recording_holds_is_noticed(page: str, printed: dict[str, set[str]]) -> None:
    forged = page.replace("-61.5% ± 0.2%", "-65.1% ± 0.2%")
    assert forged != page
    assert len([row for row in _measured(forged) if row not in set().union(*printed.values())]) == 2


def test_the_page_leaves_out_no_goal_and_no_gain_of_the_last_run(page: str, recorded: dict[str, list[Any]]) -> None:
    rows = recorded["full-graphs"]
    cells = figures_of(rows)
    wanted = goals_table(goals(cells, verdicts_of(rows), rows)) + gains_table(cells)
    missing = [line for line in wanted.splitlines() if line.startswith("| ") and line not in page]
    assert missing == []


@pytest.mark.parametrize("group", GROUPS)
def test_a_committed_summary_is_that_of_its_recording(group: str, recorded: dict[str, list[Any]]) -> None:
    committed = json.loads((RESULTS / f"h200-2026-11-29-grid-{group}.json").read_text(encoding="utf-8"))
    assert committed == json.loads(json.dumps(summary(recorded[group])))
