"""The tables and figures of docs/concurrency.md are what the committed recordings say, and none is left out."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from concurrency.choices import choices_table, link_table
from concurrency.figures import figures_of, verdicts_of
from concurrency.finding import causes_table
from concurrency.goals import goals
from concurrency.recording import read
from concurrency.report import by_run, commit_of, commits_of, each_run, newest, summary
from concurrency.rules import counted
from concurrency.several_runs import TODAYS, over_runs, with_runs
from concurrency.tables import differences_table, gains_table, goals_table
from concurrency.two_gpus import beside_one_gpu, launches_table, limits_table

from before_batch_words import before_batch, ranks
from concurrency_words import phrases, ranges
from finding_words import finding, slow_share
from prefill_graphs_words import prefill_graphs, shortest_prompts

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
ONE_GPU = (
    "h200-2026-11-29-grid-by-default-original",
    "h200-2026-11-29-grid-more-original",
    "h200-2026-11-30-grid-eight",
    "h200-2026-11-30-grid-all-cells",
    "h200-2026-11-30-grid-more-cells",
    "h200-2026-11-30-grid-quick-cores",
    "h200-2026-11-30-grid-new1024",
    "h200-2026-11-30-grid-finding",
    "h200-2026-11-30-grid-busy-host",
    "h200-2026-11-30-grid-peers-and-piecewise",
    "h200-2026-11-30-grid-before-batch",
    "h200-2026-11-30-grid-new1024-again",
    "h200-2026-11-30-grid-prefill-graphs",
    "h200-2026-11-30-grid-mps-and-prefill-graphs",
)
"""In the order in which a cell's last one counts; the first three have answers and 50 tokens that no later one has."""
TWO_GPUS = (
    "h200-2026-11-30-grid-two-gpus-full",
    "h200-2026-11-30-grid-two-gpus-quick-cores",
    "h200-2026-11-30-grid-two-gpus-busy-host",
    "h200-2026-11-30-grid-two-gpus-before-batch",
    "h200-2026-11-30-grid-two-gpus-prefill-graphs",
)
SHOWN = (*ONE_GPU, *TWO_GPUS)
BEFORE = (
    "h200-2026-11-29-grid-core",
    "h200-2026-11-29-grid-original",
    "h200-2026-11-29-grid-full-graphs",
    "h200-2026-11-29-grid-by-default",
    "h200-2026-11-29-grid-more-repeats",
    "h200-2026-11-30-grid-two-gpus",
    "h200-2026-11-30-grid-one-step",
    "h200-2026-11-30-grid-alone",
    "h200-2026-11-30-grid-two-steps",
)
"""Of no cell the last; some of their fixed arms are in no later one."""
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


def _goals(runs: list[list[Any]]) -> list[str]:
    joined = newest(runs)
    lines = goals(figures_of(joined), verdicts_of(joined), joined)
    return _rows(goals_table(with_runs(lines, over_runs(by_run(runs)))))


def _gains(runs: list[list[Any]]) -> list[str]:
    """Of the arm that chooses and of one request after another, by full graphs and where prefills replay some too."""
    shown = tuple(f"| {arm}_{graphs}_graphs |" for arm in ("auto", "fifo") for graphs in ("full", "both"))
    return [row for row in _rows(gains_table(figures_of(newest(runs)))) if any(arm in row for arm in shown)]


def _shared_link(runs: list[list[Any]]) -> list[str]:
    """Where part of the floor is behind others' loads."""
    return [row for row in _rows(link_table(figures_of(newest(runs)))) if row.split(" | ")[3] != "0.0"]


def _choices(runs: list[list[Any]]) -> list[str]:
    return _rows(choices_table(figures_of(newest(runs)), commits_of(runs)))


def _recording(name: str, rows: list[Any]) -> str:
    """A line of the table of recordings, but for what it is about."""
    cells = figures_of(rows)
    counts = [arm.ttft.repeats + arm.set_aside for cell in cells.values() for kind, arm in cell.arms.items()
              if kind.startswith("auto")]  # fmt: skip
    repeats = " to ".join(map(str, sorted({min(counts), max(counts)}))) if counts else "-"
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


def _before_batch(runs: list[list[Any]]) -> list[str]:
    """What beginning loads before their batch changes."""
    return [row for row in _rows(differences_table(figures_of(newest(runs)))) if "_before_batch_full_graphs |" in row]


def _prefill_graphs(runs: list[list[Any]]) -> list[str]:
    """What graphs of prefills change."""
    rows = _rows(differences_table(figures_of(newest(runs))))
    return [row for row in rows if row.startswith("| prefills replay captured graphs too")]


def wanted(recorded: Recorded) -> Tables:
    """What each section must say, row by row."""
    one, two = ([recorded[name] for name in names] for names in (ONE_GPU, TWO_GPUS))
    beside = [line for run in two for line in beside_one_gpu(by_run([*one, run]))]
    return {
        "The measurement": [_recording(name, recorded[name]) for name in SHOWN],
        "Goals and what was measured": _goals(one),
        "What each arm gains": _gains(one),
        "`auto`": _choices(one),
        "The finding": _rows(causes_table(figures_of(newest(one)))),
        "What bounds it": _shared_link(one),
        "Loads that begin before their batch": [*_before_batch(one), *_before_batch(two)],
        "Prefills that replay graphs": [*_prefill_graphs(one), *_prefill_graphs(two)],
        "Two GPUs, tensor parallel 2": [
            *_goals(two),
            *_rows(goals_table(beside)),
            *_gains(two),
            *_choices(two),
            *_rows(limits_table({name: recorded[name] for name in TWO_GPUS})),
            *_rows(launches_table({name: recorded[name] for name in TWO_GPUS})),
        ],
    }


def differing(page: str, expected: Tables) -> list[str]:
    """Rows that one of page and recordings has and the other has not, section by section."""
    sections = _sections(page)
    return [row for title, rows in expected.items() for row in set(rows) ^ set(sections.get(title, ()))]


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
    printed = {row for name in (*ONE_GPU, *BEFORE) for row in _rows(differences_table(figures_of(recorded[name])))}
    rows = _sections(page)["What each thing is worth"]
    assert len(rows) > 15
    assert [row for row in rows if row not in printed] == []
    deep = {row.split(" | ")[3]: row for name in (*BEFORE, *ONE_GPU)
            for row in _rows(differences_table(figures_of(recorded[name])))
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
        ("| wrong answers | 0 | 1 of 864", "| wrong answers | 0 | 0 of 864"),
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
    assert unsaid(short.replace("-58.5%", "-57.5%").replace("to 70.5 ms", "to 60.5 ms"), rows) == {
        "-57.5%", "129.9 to 60.5",
    }  # fmt: skip


def unspoken(page: str, recorded: Recorded) -> list[str]:
    """Phrases that the recordings would say otherwise than the page."""
    now, two = (figures_of(newest([recorded[name] for name in names])) for names in (ONE_GPU, TWO_GPUS))
    over = over_runs(by_run([recorded[name] for name in ONE_GPU]))
    quiet = figures_of(recorded["h200-2026-11-30-grid-two-steps"])
    words = " ".join(_prose(page).replace("\n- ", "\n").split())
    each = [figures_of(recorded[name]) for name in TWO_GPUS]
    wanted_words = (
        *phrases(now, two, quiet, over), *ranges(_sections(page)), *finding(now), *before_batch(now, two),
        *ranks(each, now), *prefill_graphs(now, two, over, _sections(page)),
        shortest_prompts([(commit_of(recorded[name]), figures_of(recorded[name])) for name in ONE_GPU]),
    )  # fmt: skip
    return [said for said in wanted_words if said not in words]


def test_what_is_said_in_words_is_what_the_recordings_say(page: str, recorded: Recorded) -> None:
    assert unspoken(page, recorded) == []
    changed = page.replace("over 29 cells", "over 37 cells").replace("Busy for 84%", "Busy for 94%")
    assert len(unspoken(changed, recorded)) == 2


def test_how_busy_the_last_hosts_were_is_said(page: str, recorded: Recorded) -> None:
    words = " ".join(page.split())
    for commits, several, said in (
        ({"10aa3d9"}, 5, "{} to {} of them, by recording"),
        ({"e3ba7d2", "9d63b3d", "b290628"}, 4, "were no quieter: {} to {}"),
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


def test_every_cause_stands_in_the_finding_with_what_is_known_of_it(page: str) -> None:
    rows = [row.split(" | ") for row in _sections(page)["The finding"]]
    known = Counter(row[5] for row in rows)
    assert known["shown"] == 2, "the page says so"
    assert known["beyond two errors"] > 15
    assert known["-"] > 10
    for row in rows:
        value, error = (float(figure.rstrip("%")) for figure in row[4].split(" ± "))
        assert (row[5] == "-") == (abs(value) <= 2 * error), row


def test_times_of_launches_that_do_not_stand_are_those_recorded(page: str) -> None:
    document = json.loads((RESULTS / "h200-2026-11-30-launch-variants.json").read_text(encoding="utf-8"))
    arms = [arm for run in document["runs"] for cell in run["cells"].values() for arm in cell.values()]
    numbers = {f"{arm[figure]:.1f}" for arm in arms for figure in ("ttft_ms", "requests_per_s")}
    said = re.findall(r"\d+\.\d+", _prose(page).partition("## Tried and left")[2].partition("## Not run")[0])
    assert len(said) > 12
    assert [number for number in said if number not in numbers] == []


def test_what_each_recording_says_by_itself_is_written_beside_them(recorded: Recorded) -> None:
    assert (RESULTS / EACH).read_text(encoding="utf-8") == each_run(recorded)


@pytest.mark.parametrize("name", [*BEFORE, *SHOWN])
def test_a_committed_summary_is_that_of_its_recording(name: str, recorded: Recorded) -> None:
    committed = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    assert committed == json.loads(json.dumps(summary(recorded[name])))
