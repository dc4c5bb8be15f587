"""The tables of docs/concurrency-measurements.md are what the committed recordings say, and none is left out."""

from __future__ import annotations

import json
import re
from collections import Counter
from statistics import fmean

import pytest
from concurrency.figures import figures_of
from concurrency.report import commit_of, commits_of, each_run, newest, summary
from concurrency.rules import counted
from concurrency.several_runs import TODAYS
from concurrency.tables import differences_table

from concurrency_pages import (
    BEFORE,
    EACH,
    ONE_GPU,
    RESULTS,
    ROOT,
    SHOWN,
    Recorded,
    Tables,
    differing,
    prose_of,
    rows_of,
    sections_of,
    unsaid,
    wanted,
    words_of,
)
from finding_words import slow_share


@pytest.fixture(scope="module")
def expected(recorded: Recorded) -> Tables:
    return wanted(recorded)


def test_the_page_holds_every_goal_and_gain_of_the_newest_recordings_and_no_other(page: str, expected: Tables) -> None:
    assert {title: len(rows) > 5 for title, rows in expected.items()} == dict.fromkeys(expected, True)
    assert differing(page, expected) == []


def test_all_but_answers_of_fifty_tokens_is_of_todays_auto(recorded: Recorded) -> None:
    older = {name for name, commit in commits_of([recorded[name] for name in ONE_GPU]).items() if commit not in TODAYS}
    assert older == {f"c{users}_hit15360_new768_chunk256_out50_full" for users in (4, 8)}


def test_a_recording_that_is_not_shown_is_of_no_cell_the_last(recorded: Recorded) -> None:
    every = figures_of(newest([recorded[name] for name in (*BEFORE, *ONE_GPU)]))
    shown = figures_of(newest([recorded[name] for name in ONE_GPU]))
    assert {name for name in every.keys() - shown.keys() if name.endswith("_full")} == set()


def test_what_one_thing_changes_is_as_recorded(page: str, recorded: Recorded) -> None:
    printed = {row for name in (*ONE_GPU, *BEFORE) for row in rows_of(differences_table(figures_of(recorded[name])))}
    rows = sections_of(page)["What each thing is worth"]
    assert len(rows) > 15
    assert [row for row in rows if row not in printed] == []
    deep = {row.split(" | ")[3]: row for name in (*BEFORE, *ONE_GPU)
            for row in rows_of(differences_table(figures_of(recorded[name])))
            if "| chunk_deep_full_graphs |" in row}  # fmt: skip
    assert [row for row in deep.values() if row.split(" | ")[4].endswith("*")] == []
    assert f"no difference is shown in any of {len(deep)} cells" in " ".join(page.split())


@pytest.mark.parametrize(
    ("said", "forged"),
    [
        ("-55.6% ± 0.9%*", "-55.6% ± 0.9%"),
        ("-58.8% ± 1.8%", "-57.8% ± 1.8%"),
        ("(sync_full_graphs) | 104.7 | 99% |", "(sync_full_graphs) | 104.7 | 109% |"),
        ("| reached |", "| missed |"),
        ("| 99ca007 | 59.3 |", "| f8adb2c | 59.3 |"),
        ("| wrong answers | 0 | 1 of 944", "| wrong answers | 0 | 0 of 944"),
        ("| 99ca007 | 3 to 8 | 0 of 168 |", "| 99ca007 | 3 to 8 | 0 of 268 |"),
        ("+2.3 ± 1.8 points", "+2.3 ± 2.8 points"),
        ("+9.5 ± 1.9 points", "+4.5 ± 1.9 points"),
        ("129.9 → 70.5", "129.9 → 60.5"),
        ("16.6 → 22.9 |", "16.6 → 19.9 |"),
        ("| -0.8% ± 4.6% |", "| -9.8% ± 4.6% |"),
        ("-54.2% ± 1.7% (11) |", "-54.2% ± 1.7% (38) |"),
        ("| 39.1 | 47.9 |", "| 49.1 | 47.9 |"),
        ("+52.4% ± 3.6% | beyond two errors |", "+52.4% ± 3.6% | shown |"),
        ("+110.5% ± 5.6%", "+11.5% ± 5.6%"),
        ("+57.6% ± 2.7% | shown |", "+57.6% ± 2.7% | beyond two errors |"),
        ("| -20.7% ± 2.1% |", "| -20.7% ± 2.1%* |"),
        ("-57.4% ± 0.8% of", "-58.4% ± 0.8% of"),
        ("-57.0% ± 0.5% (bbe8d69)", "-57.0% ± 0.5% (970283b)"),
        ("| -6.8% ± 1.8%* |", "| -6.8% ± 1.8% |"),
        ("objects of 1,024 | auto_both_graphs | 112.4 → 42.7", "objects of 4,096 | auto_both_graphs | 112.4 → 42.7"),
        ("over 2 runs | ≤ -55% | -61.2% ± 1.5%", "over 2 runs | ≤ -55% | -61.2% ± 1.0%"),
        ("| C = 1, new = 768, auto_full_graphs, over 4 runs |", "| C = 1, new = 768, auto_full_graphs, over 3 runs |"),
        ("+1.0 ± 0.9 points | reached |", "+1.0 ± 0.9 points | missed |"),
        ("| chunk_both_graphs | 0.85 to 1.33 | 8.3 → 20.2 |", "| chunk_both_graphs | 0.85 to 1.33 | 8.3 → 16.2 |"),
        ("| -61.2% ± 0.6% (29) |", "| -66.2% ± 0.6% (29) |"),
        ("c4_hit15360_new768_chunk256_both | auto_both_graphs | 9d63b3d | 58.0", "c4 | auto | 9d63b3d | 58.0"),
        ("| a second process multiplies on the device, through MPS |", "| a second process multiplies on the device |"),
        ("| -7.3% ± 1.2%* |", "| -9.3% ± 1.2%* |"),
    ],
)
def test_a_figure_that_no_recording_holds_or_that_is_missing_is_noticed(
    said: str, forged: str, page: str, expected: Tables
) -> None:
    changed = page.replace(said, forged)
    assert changed != page
    assert differing(changed, expected) != []


def test_changes_quoted_in_words_are_in_a_table(page: str) -> None:
    rows = "\n".join(row for rows in sections_of(page).values() for row in rows)
    assert unsaid(prose_of(page), rows + (RESULTS / EACH).read_text(encoding="utf-8")) == set()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    quoted = readme.partition("| gains under concurrency, in real vLLM |")[2].partition("\n")[0].replace("−", "-")
    assert len(re.findall(r"[+-]\d+\.\d%", quoted)) > 8
    assert unsaid(quoted, rows) == set()
    assert unsaid(quoted.replace("-58.5%", "-57.5%").replace("to 59.3 ms", "to 69.3 ms"), rows) == {
        "-57.5%", "133.6 to 69.3",
    }  # fmt: skip


def test_how_busy_the_last_hosts_were_is_said(page: str, recorded: Recorded) -> None:
    words = " ".join(page.split())
    for commits, several, said in (
        ({"10aa3d9"}, 5, "{} to {} of them, by recording"),
        ({"e3ba7d2", "9d63b3d", "b290628"}, 4, "were no quieter: {} to {}"),
        ({"2702658", "b2a9d3e"}, 4, "nor those of 2702658 and b2a9d3e: {} to {}"),
        ({"970283b+bbe8d69"}, 1, "that of bbe8d69 and 970283b: {}"),
    ):
        shares = [slow_share(rows) for rows in recorded.values() if commit_of(rows) in commits]
        assert len(shares) == several
        assert said.format(f"{min(shares):.0%}", f"{max(shares):.0%}") in words


def test_the_module_says_when_the_recorded_loads_began(recorded: Recorded) -> None:
    rows = [row for row in recorded["h200-2026-11-30-grid-before-batch"] if row["kind"] == "repeat"]
    off, on = (
        fmean(one["started_us"] - one["asked_us"] for row in rows if row["arm"] == arm for one in counted(row)) / 1e3
        for arm in ("sync_full_graphs", "sync_before_batch_full_graphs")
    )
    module = " ".join((ROOT / "connector" / "before_batch.py").read_text(encoding="utf-8").split())
    assert f"it begins {off:.1f} ms after the question, and {on:.1f} where the hook comes first" in module


def test_every_cause_stands_in_the_finding_with_what_is_known_of_it(page: str, front: str) -> None:
    rows = [row.split(" | ") for row in sections_of(page)["One thing at a time"]]
    known = Counter(row[5] for row in rows)
    assert known["shown"] > 20
    assert known["beyond two errors"] > 15
    assert known["-"] > 10
    by_piecewise_graphs = Counter(row[5] for row in rows if not row[0].endswith("by prefills' graphs"))
    assert by_piecewise_graphs["shown"] == 2
    shown = known["shown"] - by_piecewise_graphs["shown"]
    said = f"{shown} of {len(rows) - by_piecewise_graphs.total()} rows are"
    assert said in words_of(page)
    assert said in words_of(front)
    for row in rows:
        value, error = (float(figure.rstrip("%")) for figure in row[4].split(" ± "))
        assert (row[5] == "-") == (abs(value) <= 2 * error), row


def test_times_of_launches_that_do_not_stand_are_those_recorded(page: str) -> None:
    document = json.loads((RESULTS / "h200-2026-11-30-launch-variants.json").read_text(encoding="utf-8"))
    arms = [arm for run in document["runs"] for cell in run["cells"].values() for arm in cell.values()]
    numbers = {f"{arm[figure]:.1f}" for arm in arms for figure in ("ttft_ms", "requests_per_s")}
    said = re.findall(r"\d+\.\d+", prose_of(page).partition("## Tried and left")[2])
    assert len(said) > 12
    assert [number for number in said if number not in numbers] == []


def test_what_each_recording_says_by_itself_is_written_beside_them(recorded: Recorded) -> None:
    assert (RESULTS / EACH).read_text(encoding="utf-8") == each_run(recorded)


@pytest.mark.parametrize("name", [*BEFORE, *SHOWN])
def test_a_committed_summary_is_that_of_its_recording(name: str, recorded: Recorded) -> None:
    committed = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    assert committed == json.loads(json.dumps(summary(recorded[name])))
