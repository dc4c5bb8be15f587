"""The tables of docs/concurrency.md are what the committed recordings say today, and leave nothing of them out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from concurrency_figures import figures_of, verdicts_of
from concurrency_goals import differences_table, gains_table, goals, goals_table, regrets_table
from concurrency_report import by_commit, newest, read, summary

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
ONE_GPU = (
    "h200-2026-11-29-grid-by-default",
    "h200-2026-11-29-grid-by-default-original",
    "h200-2026-11-29-grid-more-repeats",
    "h200-2026-11-29-grid-more-original",
    "h200-2026-11-30-grid-eight",
)
"""The newest recordings, in the order of their commits."""
TWO_GPUS = "h200-2026-11-30-grid-two-gpus"
BEFORE = ("h200-2026-11-29-grid-core", "h200-2026-11-29-grid-original", "h200-2026-11-29-grid-full-graphs")

Recorded = dict[str, list[Any]]
Tables = dict[str, list[str]]


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    return {name: read([RESULTS / f"{name}.jsonl.xz"]) for name in (*ONE_GPU, TWO_GPUS, *BEFORE)}


@pytest.fixture(scope="module")
def page() -> str:
    return (ROOT / "docs" / "concurrency.md").read_text(encoding="utf-8")


def _rows(table: str) -> list[str]:
    return [line for line in table.splitlines() if line.startswith("|")][2:]


def _goals(rows: list[Any]) -> list[str]:
    return _rows(goals_table(goals(figures_of(rows), verdicts_of(rows), rows)))


def _gains(rows: list[Any]) -> list[str]:
    return _rows(gains_table(figures_of(rows)))


def _sections(page: str) -> Tables:
    """The rows of each section's tables, without their heads."""
    found: Tables = {}
    for section in page.split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        found[title] = [row for row in re.findall(r"^\|.*\|$", text, re.MULTILINE) if not row.startswith("|---")]
        heads = {line.split("\n")[0] for line in re.findall(r"^\|.*\|\n\|---", text, re.MULTILINE)}
        found[title] = [row for row in found[title] if row not in heads]
    return found


def wanted(recorded: Recorded) -> Tables:
    """What each section must say, row by row."""
    runs = [recorded[name] for name in ONE_GPU]
    joined = newest(runs)
    now = [*_goals(joined), *_gains(joined)]
    older = [
        f"| {row['commit'][:7]} {line}"
        for rows in runs
        for row in rows
        if row["kind"] == "engine"
        for line in (*_goals(rows), *_gains(rows))
        if line not in now
    ]
    return {
        "Goals and what was measured": _goals(joined),
        "What each arm gains": _gains(joined),
        "`auto`": _rows(regrets_table(by_commit(runs))),
        "Two GPUs, tensor parallel 2": [*_goals(recorded[TWO_GPUS]), *_gains(recorded[TWO_GPUS])],
        "Measured at more than one commit": older,
    }


def differing(page: str, expected: Tables) -> list[str]:
    """Rows that one of page and recordings has and the other has not, section by section."""
    sections = _sections(page)
    return [row for title, rows in expected.items() for row in set(rows) ^ set(sections.get(title, ()))]


def test_the_page_holds_every_goal_and_gain_of_the_newest_recordings_and_no_other(
    page: str, recorded: Recorded
) -> None:
    expected = wanted(recorded)
    assert {title: len(rows) > 5 for title, rows in expected.items()} == dict.fromkeys(expected, True)
    assert differing(page, expected) == []


def test_what_one_thing_changes_is_as_recorded(page: str, recorded: Recorded) -> None:
    printed = {row for name in (*ONE_GPU, *BEFORE) for row in _rows(differences_table(figures_of(recorded[name])))}
    rows = _sections(page)["What each thing is worth"]
    assert len(rows) > 30
    assert [row for row in rows if row not in printed] == []


@pytest.mark.parametrize(
    ("said", "forged"),
    [
        ("-58.2% ± 0.5%*", "-58.2% ± 0.5%"),
        ("-61.4% ± 2.2%", "-64.1% ± 2.2%"),
        ("+12.2% (fifo_full_graphs)", "+2.2% (fifo_full_graphs)"),
        ("| missed |", "| reached |"),
        ("| b0a0d48 | C = 8", "| f520c5b | C = 8"),
        ("| auto_full_graphs's regret in 17 cells |", "an auto_full_graphs's regret in 17 cells |"),
        ("| wrong answers | 0 | 1 of 336", "| wrong answers | 0 | 0 of 336"),
    ],
)
def test_a_figure_that_no_recording_holds_or_that_is_missing_is_noticed(
    said: str, forged: str, page: str, recorded: Recorded
) -> None:
    changed = page.replace(said, forged)
    assert changed != page
    assert differing(changed, wanted(recorded)) != []


@pytest.mark.parametrize(("document", "begin", "end"), [
    ("docs/concurrency.md", "## In short", "## The question"),
    ("README.md", "| gains under concurrency, in real vLLM |", "\n"),
])  # fmt: skip
def test_changes_quoted_in_words_are_in_a_table(
    document: str, begin: str, end: str, page: str, recorded: Recorded
) -> None:
    text = (ROOT / document).read_text(encoding="utf-8").partition(begin)[2].partition(end)[0]
    quoted = set(re.findall(r"[+-]\d+\.\d%", text.replace("−", "-")))
    pairs = set(re.findall(r"(\d+\.\d) to (\d+\.\d) ms", text))
    tables = "\n".join(row for rows in _sections(page).values() for row in rows)
    assert len(quoted) > 8
    assert pairs
    assert {figure for figure in quoted if figure not in tables} == set()
    assert {pair for pair in pairs if f"{pair[0]} → {pair[1]}" not in tables} == set()


@pytest.mark.parametrize("name", [*ONE_GPU, TWO_GPUS, *BEFORE])
def test_a_committed_summary_is_that_of_its_recording(name: str, recorded: Recorded) -> None:
    committed = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    assert committed == json.loads(json.dumps(summary(recorded[name])))
