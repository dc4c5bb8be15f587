"""The rows of docs/concurrency.md: each says a row, or two, of docs/concurrency-measurements.md in plain words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from concurrency.arms import by_both

Sections = Mapping[str, Sequence[str]]

FULL, BOTH = "auto_full_graphs", "auto_both_graphs"
_GRAPHS: Final = {FULL: "decoding", BOTH: "and prefills"}
_GAINS: Final = (
    ("1", "768", FULL, "C = 1, new = 768, auto_full_graphs"),
    ("1", "768", BOTH, "C = 1, new = 768, auto_both_graphs"),
    ("2", "768", FULL, ""),
    ("4", "256", FULL, "C = 4, new = 256, auto_full_graphs"),
    ("4", "256", BOTH, "C = 4, new = 256, auto_both_graphs"),
    ("4", "768", FULL, "C = 4, new = 768, auto_full_graphs"),
    ("4", "768", BOTH, "C = 4, new = 768, auto_both_graphs"),
    ("4", "1,024", BOTH, ""),
    ("4", "2,048", FULL, "C = 4, new = 2048, auto_full_graphs"),
    ("4", "2,048", BOTH, "C = 4, new = 2048, auto_both_graphs"),
    ("8", "768", FULL, "C = 8, new = 768, auto_full_graphs"),
    ("8", "768", BOTH, "C = 8, new = 768, auto_both_graphs"),
    ("16", "768", FULL, ""),
    ("4", "4,096 + 1,024", BOTH, ""),
    ("4", "12,288 + 768, objects of 1,024", BOTH, ""),
    ("4", "12,288 + 768, objects of 4,096", BOTH, ""),
    ("2", "32,768 + 1,024", BOTH, ""),
    ("1", "65,536 + 1,024", BOTH, ""),
    ("2", "65,536 + 1,024", BOTH, ""),
    ("4", "768, 9 arrivals/s", FULL, ""),
    ("4", "768, 1 of 2 misses", FULL, ""),
    ("4", "768, tier of 20 GB/s", FULL, ""),
    ("4", "768, tier of 5 GB/s", FULL, ""),
)
"""Users, new tokens (cached ones before them, where not 15,360) and what else is so, arm, and the goal's name."""

_CAUSES: Final = (
    ("slices of all in turn, instead of one request after another", "fifo_first → interleaved_first"),
    ("the same, with all enqueued at once and no turns", "fifo_deep_no_turns → interleaved_deep_no_turns"),
    ("release with the last layer instead of the first", "fifo_first → fifo_whole"),
    ("release with the eighth layer instead of the first", "fifo_first → fifo_first8"),
    ("release just in time", "fifo_first → fifo_jit"),
    ("slices instead of whole objects, released alike", "chunk_bounded → fifo_whole"),
    ("the batch waits from a request's admission on", "fifo_first → sync"),
    ("no turns for the engine's own copies", "fifo_first → fifo_no_turns"),
    ("everything enqueued at once", "fifo_first → fifo_deep_first"),
    ("no turns and everything at once", "fifo_first → fifo_deep_no_turns"),
    ("the same, where slices of all go in turn", "interleaved_first → interleaved_deep_no_turns"),
    ("one launch a load instead of 32, released alike", "fifo_whole → fifo_width32"),
    ("a thread in Python begins the loads", "fifo_first → fifo_thread"),
    ("a second process on the GPU", "fifo_first → fifo_beside"),
)
"""Of four users: the cause in plain words, and the arms by piecewise graphs; by prefills' they have others' names."""

_KNOWN: Final = {"shown": "shown", "beyond two errors": "beyond two errors", "-": "within two errors"}

_MISSED_OR_NOT_SHOWN: Final = (
    ("one at once, 768 new", "C = 1, new = 768, auto_full_graphs, over"),
    ("the same, prefills' graphs", "C = 1, new = 768, auto_both_graphs, over"),
    ("four at once, 256 new", "C = 4, new = 256, auto_full_graphs, over"),
    ("the same, prefills' graphs", "C = 4, new = 256, auto_both_graphs, over"),
    ("eight at once, 768 new, prefills' graphs", "C = 8, new = 768, auto_both_graphs, over"),
    ("`auto` behind the best fixed arm", "auto_full_graphs's regret"),
    ("throughput against chunk-major", "auto_full_graphs's throughput over chunk-major's"),
    (
        "whole answers of 50 tokens against chunk-major",
        "auto_full_graphs's end-to-end latency over chunk-major's",
    ),
    (
        "time per token of eight requests that only decode, beside 9 arrivals/s",
        "bystanders' TPOT, auto_full_graphs, 9 arrivals/s, over",
    ),
    ("four at once, piecewise graphs", "C = 4, new = 768, auto"),
    ("wrong answers", "wrong answers"),
)
"""The aim in plain words, and the goal's name."""


def _cells(row: str) -> list[str]:
    return row.strip("| ").split(" | ")


def _goals(sections: Sections) -> dict[str, list[str]]:
    return {(cells := _cells(row))[0]: cells[1:] for row in sections["Goals and what was measured"]}


def gains(sections: Sections) -> list[str]:
    """The rows of the table of gains."""
    goals = _goals(sections)
    found = {tuple((cells := _cells(row))[:3]): cells[3:] for row in sections["What each arm gains"]}
    return [
        f"| {users} | {new} | {_GRAPHS[arm]} | "
        + " | ".join(_of(found[users, _workload(new), arm]))
        + f" | {_aim(goals, goal)} |"
        for users, new, arm, goal in _GAINS
    ]


def _workload(new: str) -> str:
    tokens, _, rest = new.partition(", ")
    return f"{'' if ' + ' in tokens else '15,360 + '}{tokens} → 16{', ' if rest else ''}{rest}"


def _of(figures: Sequence[str]) -> list[str]:
    """TTFT in ms and its change, whole answers, throughput, TPOT."""
    ms, ttft, e2e, tpot, throughput = figures
    return [ms, ttft, e2e, throughput, tpot]


def _aim(goals: Mapping[str, Sequence[str]], name: str) -> str:
    if name not in goals:
        return "-"
    goal, _measured, verdict = goals[name]
    said = f"{goal}: {verdict.partition(':')[0]}"
    for over, (_goal, measured, together) in goals.items():
        if over.startswith(f"{name}, over "):
            value = measured.partition(" of ")[0]
            said += f"; {over.rpartition(', ')[2]} {value}: {together.partition(':')[0]}"
    return said


def causes(sections: Sections) -> list[str]:
    """The rows of the table of causes, of four users: by prefills' graphs, and by piecewise ones beside them."""
    found = {}
    for row in sections["One thing at a time"]:
        _what, arms, users, ms, change, known, *_served = _cells(row)
        if users == "4" and "through MPS" not in _what:
            found[arms] = (ms, change, known)
    rows = []
    for what, arms in _CAUSES:
        ms, change, known = found[" → ".join(map(by_both, arms.split(" → ")))]
        _ms, piecewise, also = found[arms]
        rows.append(f"| {what} | {ms} | {change} | {known} | {piecewise}, {_KNOWN[also]} |")
    return rows


def aims(sections: Sections) -> list[str]:
    """How the rows of aims that were missed or are not shown begin; why stands behind.

    Raises:
        AssertionError: an aim is reached by now; take its row away.
    """
    goals = _goals(sections)
    found = []
    for what, start in _MISSED_OR_NOT_SHOWN:
        name = _named(goals, start)
        goal, measured, verdict = goals[name]
        assert not verdict.startswith("reached"), f"{name} is reached: it is no row of this table"
        over = re.search(r", (over \d+ runs)$", name)
        value = f"{measured.partition(' of ')[0]} {over[1]}" if over else measured.partition(";")[0]
        value = re.sub(r" in c\d+_\w+( \(\w+\))?", "", value)
        found.append(f"| {what} | {goal} | {value} | {verdict.replace('in 1 cells', 'in 1 cell')} |")
    return found


def _named(goals: Mapping[str, Sequence[str]], start: str) -> str:
    """The goal of that name or, if there is none, the only one whose name begins so."""
    (name,) = [start] if start in goals else [name for name in goals if name.startswith(start)]
    return name


def missed_without_a_row(sections: Sections) -> list[str]:
    """Goals that were missed and that no row of aims tells."""
    goals = _goals(sections)
    told = {_named(goals, start) for _what, start in _MISSED_OR_NOT_SHOWN}
    told |= {name.partition(", over ")[0] for name in told}  # of one run and of several: the latter is told
    return [name for name, (*_rest, verdict) in goals.items() if verdict == "missed" and name not in told]
