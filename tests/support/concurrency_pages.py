"""The two pages on concurrency, and what the committed recordings say for each: rows of tables, and whole phrases."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from concurrency.choices import choices_table, link_table
from concurrency.figures import CellFigures, figures_of, verdicts_of
from concurrency.finding import NAMES, causes_table
from concurrency.goals import goals
from concurrency.report import by_run, commit_of, commits_of, newest
from concurrency.several_runs import over_runs, with_runs
from concurrency.tables import differences_table, gains_table, goals_table
from concurrency.two_gpus import beside_one_gpu, launches_table, limits_table

from before_batch_words import before_batch, ranks
from concurrency_words import of_other_runs, phrases, pm, ranges
from finding_words import finding, finding_by_graphs
from long_hits_words import in_flight, long_hits, wire_alone
from prefill_graphs_words import prefill_graphs, shortest_prompts

ROOT: Final = Path(__file__).resolve().parents[2]
RESULTS: Final = ROOT / "benchmarks" / "results"
ONE_GPU: Final = (
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
    "h200-2026-11-30-grid-chunks-and-long",
    "h200-2026-11-30-grid-finding-by-graphs",
    "h200-2026-11-30-grid-eight-and-peers",
    "h200-2026-11-30-grid-in-flight",
    "h200-2026-11-30-grid-wire-alone",
)
"""In the order in which a cell's last one counts; the first three have answers and 50 tokens that no later one has."""
TWO_GPUS: Final = (
    "h200-2026-11-30-grid-two-gpus-full",
    "h200-2026-11-30-grid-two-gpus-quick-cores",
    "h200-2026-11-30-grid-two-gpus-busy-host",
    "h200-2026-11-30-grid-two-gpus-before-batch",
    "h200-2026-11-30-grid-two-gpus-prefill-graphs",
)
SHOWN: Final = (*ONE_GPU, *TWO_GPUS)
BEFORE: Final = (
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
IN_FLIGHT: Final = ("h200-2026-11-30-grid-in-flight", "h200-2026-11-30-grid-wire-alone")
"""Of the engine that counts in flight what waits for its scatter too, and of the one that does not."""
OTHER_RUNS: Final = (
    "h200-2026-11-30-grid-quick-cores",
    "h200-2026-11-30-grid-more-cells",
    "h200-2026-11-29-grid-original",
)
"""Of which the pages quote what is of no cell the last."""
EACH: Final = "concurrency-by-recording.md"

Recorded = dict[str, list[Any]]
Tables = dict[str, list[str]]


def rows_of(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if line.startswith("|")][2:]


def _goals(runs: list[list[Any]]) -> list[str]:
    joined = newest(runs)
    lines = goals(figures_of(joined), verdicts_of(joined), joined)
    return rows_of(goals_table(with_runs(lines, over_runs(by_run(runs)))))


def _gains(runs: list[list[Any]]) -> list[str]:
    """Of the arm that chooses and of one request after another, by full graphs and where prefills replay some too."""
    shown = tuple(f"| {arm}_{graphs}_graphs |" for arm in ("auto", "fifo") for graphs in ("full", "both"))
    cells = {name: cell for name, cell in figures_of(newest(runs)).items() if name not in NAMES}
    return [row for row in rows_of(gains_table(cells)) if any(arm in row for arm in shown)]


def _shared_link(runs: list[list[Any]]) -> list[str]:
    """Where part of the floor is behind others' loads."""
    return [row for row in rows_of(link_table(figures_of(newest(runs)))) if row.split(" | ")[3] != "0.0"]


def _choices(runs: list[list[Any]]) -> list[str]:
    return rows_of(choices_table(figures_of(newest(runs)), commits_of(runs)))


def _recording(name: str, rows: list[Any]) -> str:
    """A line of the table of recordings, but for what it is about."""
    cells = figures_of(rows)
    counts = [arm.ttft.repeats + arm.set_aside for cell in cells.values() for kind, arm in cell.arms.items()
              if kind.startswith("auto")]  # fmt: skip
    repeats = " to ".join(map(str, sorted({min(counts), max(counts)}))) if counts else "-"
    wrong = [line.measured.partition(";")[0] for line in goals(cells, verdicts_of(rows), rows)
             if line.what == "wrong answers"]  # fmt: skip
    return f"| `{name}` | {commit_of(rows)} | {repeats} | {''.join(wrong) or '-'} |"


def sections_of(page: str) -> Tables:
    """The rows of each section's tables, without their heads."""
    found: Tables = {}
    for section in page.split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        found[title] = [row for row in re.findall(r"^\|.*\|$", text, re.MULTILINE) if not row.startswith("|---")]
        heads = {line.split("\n")[0] for line in re.findall(r"^\|.*\|\n\|---", text, re.MULTILINE)}
        found[title] = [row for row in found[title] if row not in heads]
    if "The recordings" in found:
        found["The recordings"] = [row.rsplit(" | ", 1)[0] + " |" for row in found["The recordings"]]
    return found


def prose_of(page: str) -> str:
    """Everything but tables and commands."""
    lines = page.splitlines()
    return "\n".join(line for line in lines if not line.startswith(("|", "    "))).replace("−", "-")


def _before_batch(runs: list[list[Any]]) -> list[str]:
    """What beginning loads before their batch changes."""
    return [row for row in rows_of(differences_table(figures_of(newest(runs)))) if "_before_batch_full_graphs |" in row]


def _prefill_graphs(runs: list[list[Any]]) -> list[str]:
    """What graphs of prefills change."""
    rows = rows_of(differences_table(figures_of(newest(runs))))
    return [row for row in rows if row.startswith("| prefills replay captured graphs too")]


def _in_flight(recording: list[Any]) -> list[str]:
    """What more bytes in flight change, and a larger ring."""
    return [row for row in rows_of(differences_table(figures_of(recording))) if "| chunk_both_graphs |" not in row]


def wanted(recorded: Recorded) -> Tables:
    """What each section must say, row by row."""
    one, two = ([recorded[name] for name in names] for names in (ONE_GPU, TWO_GPUS))
    beside = [line for run in two for line in beside_one_gpu(by_run([*one, run]))]
    return {
        "The recordings": [_recording(name, recorded[name]) for name in SHOWN],
        "Goals and what was measured": _goals(one),
        "What each arm gains": _gains(one),
        "`auto`": _choices(one),
        "One thing at a time": rows_of(causes_table(figures_of(newest(one)))),
        "What the link alone needs": _shared_link(one),
        "Loads that begin before their batch": [*_before_batch(one), *_before_batch(two)],
        "Bytes in flight": [row for name in IN_FLIGHT for row in _in_flight(recorded[name])],
        "Prefills that replay graphs": [*_prefill_graphs(one), *_prefill_graphs(two)],
        "Two GPUs, tensor parallel 2": [
            *_goals(two),
            *rows_of(goals_table(beside)),
            *_gains(two),
            *_choices(two),
            *rows_of(limits_table({name: recorded[name] for name in TWO_GPUS})),
            *rows_of(launches_table({name: recorded[name] for name in TWO_GPUS})),
        ],
    }


def differing(page: str, expected: Tables) -> list[str]:
    """Rows that one of page and recordings has and the other has not, section by section."""
    sections = sections_of(page)
    return [row for title, rows in expected.items() for row in set(rows) ^ set(sections.get(title, ()))]


def unsaid(text: str, tables: str) -> set[str]:
    """Changes in percent and pairs of times in a text that no table has."""
    quoted = set(re.findall(r"[+-]\d+\.\d%", text))
    pairs = set(re.findall(r"(\d+\.\d) to (\d+\.\d) ms", text))
    return {figure for figure in quoted if figure not in tables} | {
        f"{before} to {after}" for before, after in pairs if f"{before} → {after}" not in tables
    }


def words_of(page: str) -> str:
    """All but commands in one line, whatever the length of lines and whichever are points of a list."""
    lines = [line.strip().removeprefix("- ") for line in page.splitlines() if not line.startswith("    ")]
    return " ".join(" ".join(lines).replace("−", "-").split())


def phrases_of(recorded: Recorded, sections: Tables) -> list[str]:
    """What the recordings would say in words; each phrase stands on one of the pages.

    Args:
        sections: of the page of measurements.
    """
    now, two = (figures_of(newest([recorded[name] for name in names])) for names in (ONE_GPU, TWO_GPUS))
    over = over_runs(by_run([recorded[name] for name in ONE_GPU]))
    quiet = figures_of(recorded["h200-2026-11-30-grid-two-steps"])
    each = [figures_of(recorded[name]) for name in TWO_GPUS]
    before, since = (figures_of(recorded[name]) for name in IN_FLIGHT)
    return [
        *phrases(now, two, quiet, over), *ranges(sections), *finding(now), *finding_by_graphs(now),
        *before_batch(now, two), *ranks(each, now),
        *prefill_graphs(now, two, over, sections),
        *long_hits(now, before), *in_flight(before), *wire_alone(since),
        control_of_graph_waits(),
        heavier_weights(*(figures_of(recorded[f"h200-2026-11-30-grid-{name}"]) for name in ("one-step", "two-steps"))),
        *of_other_runs(
            *(figures_of(recorded[name]) for name in OTHER_RUNS)
        ),
        shortest_prompts([(commit_of(recorded[name]), figures_of(recorded[name])) for name in ONE_GPU]),
    ]  # fmt: skip


def heavier_weights(*runs: Mapping[str, CellFigures]) -> str:
    """What those that only decode took a token by `auto` with a `bystander_weight` of 2 instead of 0.3, in each run."""
    said = []
    for run in runs:
        arms = run["c4_hit15360_new768_chunk256_bystanders_open_full"].arms
        usual, heavy = (arms[f"auto{weight}_full_graphs"].bystander_tpot for weight in ("", "_heavy"))
        assert usual is not None
        assert heavy is not None
        assert abs(heavy.value - usual.value) < 2 * math.hypot(heavy.error, usual.error)
        said.append(f"{pm(heavy)} instead of {pm(usual)}")
    first, second = said
    return f"they took {first} ms a token in one run (53723eb, eight repeats) and {second} in another (4b1f1f9, three)"


def control_of_graph_waits() -> str:
    """How far the control without waits was off, of the tests of `full_graphs: inside`."""
    tests = json.loads((RESULTS / "h200-2026-11-29-vllm-tests.json").read_text(encoding="utf-8"))["tests"]
    (text,) = (said for what, said in tests["full_graphs_second"]["failures"].items() if "without_the_gate" in what)
    apart, tolerated = re.findall(r"[\d.]{5,}", text)[0], re.findall(r"[\d.]{5,}", text)[-1]
    return f"moved a log-probability by {float(apart):.2f} where {float(tolerated):.2f} is tolerated"
