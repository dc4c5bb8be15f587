"""The tables and figures of docs/concurrency.md are what the committed recordings say, and none is left out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from concurrency_choices import choices_table, link_table
from concurrency_figures import figures_of, verdicts_of
from concurrency_goals import Line, differences_table, gains_table, goals, goals_table
from concurrency_report import by_run, commit_of, commits_of, each_run, newest, read, summary
from concurrency_rules import ttft_ms
from concurrency_two_gpus import beside_one_gpu

from concurrency_words import phrases, ranges

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
ONE_GPU = (
    "h200-2026-11-30-grid-one-step",
    "h200-2026-11-29-grid-by-default",
    "h200-2026-11-29-grid-by-default-original",
    "h200-2026-11-29-grid-more-repeats",
    "h200-2026-11-29-grid-more-original",
    "h200-2026-11-30-grid-eight",
    "h200-2026-11-30-grid-alone",
    "h200-2026-11-30-grid-two-steps",
)
"""In the order in which a cell's last one counts: of their commits, but for the one whose `auto` was given up."""
GIVEN_UP, LATEST = ONE_GPU[0], ONE_GPU[-1]
TWO_GPUS = "h200-2026-11-30-grid-two-gpus-full"
PIECEWISE = "h200-2026-11-30-grid-two-gpus"
SHOWN = (*ONE_GPU, PIECEWISE, TWO_GPUS)
BEFORE = ("h200-2026-11-29-grid-core", "h200-2026-11-29-grid-original", "h200-2026-11-29-grid-full-graphs")
EACH = "concurrency-by-recording.md"

Recorded = dict[str, list[Any]]
Tables = dict[str, list[str]]


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    return {name: read([RESULTS / f"{name}.jsonl.xz"]) for name in (*BEFORE, *SHOWN)}


@pytest.fixture(scope="module")
def expected(recorded: Recorded) -> Tables:
    return wanted(recorded)


@pytest.fixture(scope="module")
def page() -> str:
    return (ROOT / "docs" / "concurrency.md").read_text(encoding="utf-8")


def _rows(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if line.startswith("|")][2:]


def _goals(rows: list[Any], beside: tuple[list[list[Any]], ...] = ()) -> list[str]:
    """Of one recording; behind it how it stands beside each of the other sets of them."""
    lines: list[Line] = goals(figures_of(rows), verdicts_of(rows), rows)
    for other in beside:
        lines += beside_one_gpu(by_run([*other, rows]))
    return _rows(goals_table(lines))


def _gains(rows: list[Any]) -> list[str]:
    return _rows(gains_table(figures_of(rows)))


def _choices(runs: list[list[Any]]) -> list[str]:
    return _rows(choices_table(figures_of(newest(runs)), commits_of(runs)))


def _recording(name: str, rows: list[Any]) -> str:
    """A line of the table of recordings, but for what it is about."""
    cells = figures_of(rows)
    counts = [arm.ttft.repeats + arm.set_aside for cell in cells.values() for kind, arm in cell.arms.items()
              if kind.startswith("auto")]  # fmt: skip
    repeats = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    wrong = [line.measured.partition(";")[0] for line in goals(cells, verdicts_of(rows), rows)
             if line.what == "wrong answers"]  # fmt: skip
    return f"| `{name}` | {commit_of(rows)} | {repeats} | {''.join(wrong) or '-'} |"


def _sections(page: str) -> Tables:
    """The rows of each section's tables, without their heads."""
    found: Tables = {}
    for section in page.split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        found[title] = [row for row in re.findall(r"^\|.*\|$", text, re.MULTILINE) if not row.startswith("|---")]
        heads = {line.split("\n")[0] for line in re.findall(r"^\|.*\|\n\|---", text, re.MULTILINE)}
        found[title] = [row for row in found[title] if row not in heads]
    found["The measurement"] = [row.rsplit(" | ", 1)[0] + " |" for row in found["The measurement"]]
    return found


def _prose(page: str) -> str:
    """Everything but tables and commands."""
    lines = page.splitlines()
    return "\n".join(line for line in lines if not line.startswith(("|", "    "))).replace("−", "-")


def wanted(recorded: Recorded) -> Tables:
    """What each section must say, row by row."""
    runs = [recorded[name] for name in ONE_GPU]
    joined, two = newest(runs), recorded[TWO_GPUS]
    older = beside_one_gpu(by_run([*runs, recorded[PIECEWISE]]))
    return {
        "The measurement": [_recording(name, recorded[name]) for name in SHOWN],
        "Goals and what was measured": _goals(joined),
        "What each arm gains": _gains(joined),
        "`auto`": _choices(runs),
        "What bounds it": _rows(link_table(figures_of(joined))),
        "Two GPUs, tensor parallel 2": [
            *_goals(two, (runs, [recorded[LATEST]])), *_rows(goals_table(older)), *_gains(two), *_choices([two]),
        ],
    }  # fmt: skip


def differing(page: str, expected: Tables) -> list[str]:
    """Rows that one of page and recordings has and the other has not, section by section."""
    sections = _sections(page)
    return [row for title, rows in expected.items() for row in set(rows) ^ set(sections.get(title, ()))]


def test_the_page_holds_every_goal_and_gain_of_the_newest_recordings_and_no_other(page: str, expected: Tables) -> None:
    assert {title: len(rows) > 5 for title, rows in expected.items()} == dict.fromkeys(expected, True)
    assert differing(page, expected) == []


def test_an_auto_that_was_given_up_is_shown_only_where_nothing_else_has_the_cell(recorded: Recorded) -> None:
    given_up = set(figures_of(recorded[GIVEN_UP]))
    others = {name for run in ONE_GPU[1:] for name in figures_of(recorded[run])}
    assert given_up - others == {"c4_hit15360_new1024_chunk256_full"}
    runs = [recorded[name] for name in ONE_GPU]
    assert {name for name, commit in commits_of(runs).items() if commit == commit_of(recorded[GIVEN_UP])} == (
        (given_up - others) | set(figures_of(recorded["h200-2026-11-30-grid-alone"]))
    )


def test_what_one_thing_changes_is_as_recorded(page: str, recorded: Recorded) -> None:
    printed = {row for name in (*ONE_GPU, *BEFORE) for row in _rows(differences_table(figures_of(recorded[name])))}
    rows = _sections(page)["What each thing is worth"]
    assert len(rows) > 25
    assert [row for row in rows if row not in printed] == []
    order = [*ONE_GPU[1:6], GIVEN_UP, *ONE_GPU[6:]]  # of their commits: fixed arms are the same in both
    deep = {row.split(" | ")[3]: row for name in order for row in _rows(differences_table(figures_of(recorded[name])))
            if "| chunk_deep_full_graphs |" in row}  # fmt: skip
    shown = {row for row in deep.values() if row.split(" | ")[4].endswith("*")}
    assert {row for row in rows if "| chunk_deep_full_graphs |" in row} == shown
    assert f"{len(deep) - len(shown)} of {len(deep)} cells" in page


@pytest.mark.parametrize(
    ("said", "forged"),
    [
        ("-58.2% ± 0.2%*", "-58.2% ± 0.2%"),
        ("-61.1% ± 1.6%", "-60.1% ± 1.6%"),
        ("+2.8% (sync_full_graphs)", "-2.8% (sync_full_graphs)"),
        ("(sync_full_graphs) | 102.7 | 161% |", "(sync_full_graphs) | 102.7 | 101% |"),
        ("| reached |", "| missed |"),
        ("| 4b1f1f9 | 53.1 |", "| 53723eb | 53.1 |"),
        ("| auto_full_graphs's regret in 19 cells |", "an auto_full_graphs's regret in 19 cells |"),
        ("| wrong answers | 0 | 1 of 416", "| wrong answers | 0 | 0 of 416"),
        ("| 53723eb | 3 to 8 | 0 of 200 |", "| 53723eb | 3 to 8 | 0 of 280 |"),
        ("+5.6 ± 3.6 points", "+4.6 ± 3.6 points"),
        ("+1.6 ± 3.6 points", "+0.6 ± 3.6 points"),
        ("+9.9 ± 10.1 points", "+9.9 ± 1.1 points"),
        ("101.3 → 44.0", "101.3 → 41.0"),
        ("| 44.1 | 51.8 |", "| 54.1 | 51.8 |"),
    ],
)
def test_a_figure_that_no_recording_holds_or_that_is_missing_is_noticed(
    said: str, forged: str, page: str, expected: Tables
) -> None:
    changed = page.replace(said, forged)
    assert changed != page
    assert differing(changed, expected) != []


def unsaid(text: str, tables: str) -> set[str]:
    """Changes in percent and pairs of times in a text that no table has."""
    quoted = set(re.findall(r"[+-]\d+\.\d%", text))
    pairs = set(re.findall(r"(\d+\.\d) to (\d+\.\d) ms", text))
    return {figure for figure in quoted if figure not in tables} | {
        f"{before} to {after}" for before, after in pairs if f"{before} → {after}" not in tables
    }


def test_changes_quoted_in_words_are_in_a_table(page: str) -> None:
    rows = "\n".join(row for rows in _sections(page).values() for row in rows)
    short = _prose(page).partition("## In short")[2].partition("## The question")[0]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    quoted = readme.partition("| gains under concurrency, in real vLLM |")[2].partition("\n")[0].replace("−", "-")
    for text in (short, quoted):
        assert len(re.findall(r"[+-]\d+\.\d%", text)) > 8
        assert unsaid(text, rows) == set()
    assert unsaid(_prose(page), rows + (RESULTS / EACH).read_text(encoding="utf-8")) == set()
    assert unsaid(short.replace("-57.3%", "-58.3%").replace("to 44.0 ms", "to 43.0 ms"), rows) == {
        "-58.3%", "101.3 to 43.0",
    }  # fmt: skip


def unspoken(page: str, recorded: Recorded) -> list[str]:
    """Phrases that the recordings would say otherwise than the page."""
    now = figures_of(newest([recorded[name] for name in ONE_GPU]))
    given_up, older, two = (figures_of(recorded[name]) for name in (GIVEN_UP, ONE_GPU[3], TWO_GPUS))
    words = " ".join(_prose(page).replace("\n- ", "\n").split())
    return [said for said in (*phrases(now, given_up, older, two), *ranges(_sections(page))) if said not in words]


def test_what_is_said_in_words_is_what_the_recordings_say(page: str, recorded: Recorded) -> None:
    assert unspoken(page, recorded) == []
    changed = page.replace("the link is busy for 66%", "the link is busy for 56%").replace(
        "over 19 cells", "over 9 cells"
    )
    assert len(unspoken(changed, recorded)) == 2


def test_times_of_launches_that_do_not_stand_are_those_recorded(page: str) -> None:
    document = json.loads((RESULTS / "h200-2026-11-30-launch-variants.json").read_text(encoding="utf-8"))
    arms = [arm for run in document["runs"] for cell in run["cells"].values() for arm in cell.values()]
    numbers = {f"{arm[figure]:.1f}" for arm in arms for figure in ("ttft_ms", "requests_per_s")}
    said = re.findall(r"\d+\.\d+", _prose(page).partition("## Tried and left")[2].partition("## Not run")[0])
    assert len(said) > 12
    assert [number for number in said if number not in numbers] == []


def test_the_rounds_of_two_gpus_are_as_recorded(page: str, recorded: Recorded) -> None:
    rows = [row for row in recorded[TWO_GPUS] if row["kind"] == "repeat" and row["arm"] == "auto_full_graphs"
            and row["cell"]["concurrency"] == 4 and row["cell"]["hit"] == 15_360]  # fmt: skip
    first, second, *others = (ttft_ms(row) for row in sorted(rows, key=lambda row: row["repeat"]))
    assert (
        f"took {first:.1f} and {second:.1f} ms in the first two and {min(others):.1f} to {max(others):.1f} in the "
        f"other {['none', 'one', 'two', 'three', 'four'][len(others)]}"
    ) in " ".join(page.split())


def test_what_each_recording_says_by_itself_is_written_beside_them(recorded: Recorded) -> None:
    assert (RESULTS / EACH).read_text(encoding="utf-8") == each_run(recorded)


@pytest.mark.parametrize("name", [*BEFORE, *SHOWN])
def test_a_committed_summary_is_that_of_its_recording(name: str, recorded: Recorded) -> None:
    committed = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    assert committed == json.loads(json.dumps(summary(recorded[name])))
