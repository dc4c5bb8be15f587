#!/usr/bin/env python3
"""The table of a concurrency run: every arm of every cell beside the better chunk-major form and the ceiling.

    concurrency/report.py RUN ... [--json SUMMARY.json] [--svg FOLDER] [--cell WORD] [--predicted FILE] [--goals]
        [--newest] [--each FILE]

A change counts only where the standard errors of both arms are at most 2%, the earlier and the later half of the
baseline's repeats differ by at most 5%, and it is beyond twice its own standard error; otherwise the table says "not
shown" and why. Last come the goals beside what was measured, and what one thing at a time changes. Runs of one engine
are joined; of runs of several commits `--newest` takes each cell from the last run named that measured it, which takes
two repeats of an arm, and `--each` writes what every run says by itself. A goal of which several runs of today's `auto`
have the cell has a line for all of them together. Two GPUs stand beside one GPU's cell of their own commit where one
has the same T/P, whichever run is the last.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # the modules beside this one are concurrency.NAME

from result_file import write_json, write_text

from concurrency.arms import CHUNK_MAJOR
from concurrency.choices import choices_table, link_table
from concurrency.figures import ArmFigures, CellFigures, figures_of, verdicts_of
from concurrency.finding import causes_table
from concurrency.goals import goals
from concurrency.link import Link
from concurrency.recording import RecordingError, read
from concurrency.rules import Mean, Row
from concurrency.several_runs import over_runs, with_runs
from concurrency.tables import cells_table, differences_table, gains_table, goals_table, predictions_of
from concurrency.two_gpus import beside_one_gpu, launches_table, limits_table, on_two_gpus


def newest(runs: Sequence[Sequence[Row]]) -> list[Row]:
    """Each cell's lines of the last run that measured it, and its answers of the last that has answers of it.

    A run that ended before any arm but a chunk-major one had two repeats of a cell did not measure it: one repeat has
    no standard error. Where none did, the last run that has the cell counts.
    """
    last = _last(runs)
    return [
        row
        for number, rows in enumerate(runs)
        for row in rows
        if row["kind"] == "engine" or last[_subject(row)] == number
    ]


def _last(runs: Sequence[Sequence[Row]]) -> dict[tuple[str, str], int]:
    """Of each subject the number of the run that counts."""
    having: dict[tuple[str, str], int] = {}
    measured: dict[tuple[str, str], int] = {}
    chunk_major = {form for forms in CHUNK_MAJOR.values() for form in forms}
    for number, rows in enumerate(runs):
        having |= dict.fromkeys((_subject(row) for row in rows if row["kind"] != "engine"), number)
        repeats = Counter((_subject(row), row["arm"]) for row in rows if row["kind"] == "repeat")
        twice = [of for (of, arm), count in repeats.items() if count > 1 and arm not in chunk_major]
        measured |= dict.fromkeys(twice, number)
    return having | measured


def _subject(row: Row) -> tuple[str, str]:
    cell = row["cell"]
    return row["kind"], cell if isinstance(cell, str) else cell["name"]


def commits_of(runs: Sequence[Sequence[Row]]) -> dict[str, str]:
    """Of each cell the commit, as seven digits, of the engine of the repeats that `newest` takes; of several, all."""
    ran: dict[tuple[int, str], set[str]] = defaultdict(set)
    for number, rows in enumerate(runs):
        for commit, part in of_each_commit(rows).items():
            for row in part:
                if row["kind"] == "repeat":
                    ran[number, row["cell"]["name"]].add(commit)
    return {cell: "+".join(sorted(ran[number, cell])) for (kind, cell), number in _last(runs).items()
            if kind == "repeat"}  # fmt: skip


def of_each_commit(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """A run's lines by the commit, as seven digits, of the engine that stands before them."""
    parts: dict[str, list[Row]] = {}
    commit = "-"
    for row in rows:
        if row["kind"] == "engine":
            commit = str(row["commit"])[:7]
        parts.setdefault(commit, []).append(row)
    return parts


def commit_of(rows: Sequence[Row]) -> str:
    """A run's commit as seven digits; of a run of several, all of them."""
    return "+".join(sorted({str(row["commit"])[:7] for row in rows if row["kind"] == "engine"})) or "-"


def by_run(runs: Sequence[Sequence[Row]]) -> list[tuple[str, Mapping[str, CellFigures]]]:
    """Of each run its commit and its cells; one of engines of several commits is a run of each."""
    return [(commit, figures_of(part)) for rows in runs for commit, part in of_each_commit(rows).items()]


def each_run(runs: Mapping[str, Sequence[Row]]) -> str:
    """What every run says by itself, in Markdown.

    Args:
        runs: the lines of each, by its name.
    """
    text = [
        "# Goals and gains of each recording by itself",
        "",
        "Printed by `benchmarks/concurrency/report.py --each`.",
    ]
    for name, rows in runs.items():
        cells = figures_of(rows)
        lines = goals(cells, verdicts_of(rows), rows)
        tables = [goals_table(lines), gains_table(cells), differences_table(cells)]
        text += ["", f"## {name}, {commit_of(rows)}", "", *tables, choices_table(cells, commits_of([rows])).rstrip()]
    return "\n".join(text) + "\n"


def table(cell: CellFigures) -> str:
    """One cell in Markdown."""
    spec = cell.cell
    ceiling = "unknown" if cell.alone.ceiling is None else f"{cell.alone.ceiling:.0%}"
    transfer = "?" if cell.alone.transfer_ms is None else f"{cell.alone.transfer_ms:.1f}"
    prefill = "?" if cell.alone.prefill_ms is None else f"{cell.alone.prefill_ms:.1f}"
    share = spec["hit"] / (spec["hit"] + spec["new"])
    lines = [
        f"### {spec['name']}",
        "",
        f"T {transfer} ms, P {prefill} ms, ceiling of one request alone {ceiling}, hit fraction {share:.0%}, baseline "
        f"{cell.baseline}, drift {cell.drift:.1%}{_rate(cell.link)}",
        "",
        "| arm | n | aside | TTFT mean ± se | change | p50 | p99 | first layer | all landed | e2e | TPOT | req/s "
        "| link floor | stall | held | unnoticed | not admitted | load p50, p90, longest | link | GPU | peak in flight "
        "| bystanders' TPOT |",
        "|---|" + "---|" * 21,
    ]
    for name, arm in sorted(cell.arms.items(), key=lambda item: item[1].ttft.value):
        change = cell.change(name)
        text = "baseline" if name == cell.baseline else f"{change.value:+.1%} ± {change.error:.1%}"
        if name != cell.baseline and not change.shown:
            text += f" not shown: {change.why_not}"
        if arm.flawed:
            text += f"; {arm.flawed} repeats FLAWED"
        lines.append(
            f"| {name} | {arm.ttft.repeats} | {arm.set_aside} | {_pm(arm.ttft)} | {text} | {arm.p50:.1f} | "
            f"{arm.p99:.1f} | "
            f"{_or_dash(arm.first_layer_ms)} | {_or_dash(arm.last_layer_ms)} | {_pm(arm.e2e)} | {arm.tpot.value:.2f} | "
            f"{arm.requests_per_s.value:.2f} | {_floor(arm)} | {arm.host_stall_ms:.1f} | "
            f"{_or_dash(arm.held_ms)} | {_or_dash(arm.unnoticed_ms)} | {_or_dash(arm.unadmitted_ms)} | "
            f"{', '.join(f'{ms:.1f}' for ms in arm.loads_ms) or '-'} | {arm.link_busy:.0%} | "
            f"{'-' if arm.gpu_busy is None else f'{arm.gpu_busy:.0%}'} | {arm.peak_in_flight_bytes / 1e6:.0f} MB | "
            f"{'-' if arm.bystander_tpot is None else _pm(arm.bystander_tpot)} |"
        )
    lines += [
        f"\n{name}: all landed by rank {', '.join(f'{ms:.1f}' for ms in arm.last_layer_by_rank_ms)} ms"
        for name, arm in sorted(cell.arms.items())
        if arm.last_layer_by_rank_ms
    ]
    lines += [
        f"\n{name} chose {', '.join(f'{way} {count}' for way, count in arm.choices.items())}; slices a load: "
        + ", ".join(f"{slices} in {count}" for slices, count in sorted(arm.slices.items(), reverse=True))
        for name, arm in sorted(cell.arms.items())
        if arm.choices
    ]
    return "\n".join(lines) + "\n"


def overview(cells: Mapping[str, CellFigures]) -> str:
    """One line a cell: how each arm's mean time to first token differs from the baseline's; a star: shown."""
    arms = sorted({arm for cell in cells.values() for arm in cell.arms})
    lines = [
        "### mean TTFT against the better chunk-major form (a star: shown)",
        "",
        f"| cell | ceiling | drift | baseline ms | {' | '.join(arms)} |",
        "|---|---|---|---|" + "---|" * len(arms),
    ]
    for name, cell in cells.items():
        changes = []
        for arm in arms:
            if arm == cell.baseline:
                changes.append("baseline")
            elif arm not in cell.arms:
                changes.append("")
            else:
                change = cell.change(arm)
                changes.append(f"{change.value:+.0%}{'*' if change.shown else ''}")
        ceiling = "?" if cell.alone.ceiling is None else f"{cell.alone.ceiling:.0%}"
        base = cell.arms[cell.baseline].ttft.value
        lines.append(f"| {name} | {ceiling} | {cell.drift:.0%} | {base:.1f} | {' | '.join(changes)} |")
    return "\n".join(lines) + "\n"


def _pm(mean: Mean) -> str:
    return f"{mean.value:.1f} ± {mean.error:.1f}"


def _floor(arm: ArmFigures) -> str:
    return (
        "-" if arm.link_floor is None else f"{arm.link_floor.value:.1f} ({arm.link_floor.value / arm.ttft.value:.0%})"
    )


def _rate(link: Link | None) -> str:
    return "" if link is None else f", link {link.bytes_per_us / 1e3:.1f} GB/s by its {link.shown_by}"


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """What is committed: figures without the requests they come from."""
    cells = figures_of(rows)
    return {
        "schema_version": 1,
        "engines": [
            {key: row[key] for key in row if key not in ("schema", "kind")} for row in rows if row["kind"] == "engine"
        ],
        "cells": {name: _plain(cell) for name, cell in cells.items()},
        "answers": {f"{cell} {arm}": verdict._asdict() for (cell, arm), verdict in verdicts_of(rows).items()},
    }


def _plain(cell: CellFigures) -> Mapping[str, Any]:
    arms = {
        name: {
            field.name: value._asdict() if isinstance(value := getattr(arm, field.name), Mean) else value
            for field in dataclasses.fields(arm)
        }
        for name, arm in cell.arms.items()
    }
    changes = {
        name: {figure: cell.change(name, figure)._asdict() for figure in ("ttft", "e2e", "tpot", "requests_per_s")}
        for name in cell.arms
    }
    return {
        "cell": cell.cell,
        "baseline": cell.baseline,
        "drift": cell.drift,
        "transfer_ms": cell.alone.transfer_ms,
        "prefill_ms": cell.alone.prefill_ms,
        "link": None if cell.link is None else cell.link._asdict(),
        "ceiling": cell.alone.ceiling,
        "arms": arms,
        "changes": changes,
    }


def answers_table(rows: Sequence[Row]) -> str:
    """What recomputation says about the arms' answers."""
    lines = ["### answers against recomputation", "", "| cell | arm | same | near ties | wrong | largest deviation |"]
    lines.append("|---|---|---|---|---|---|")
    for (cell, arm), verdict in sorted(verdicts_of(rows).items()):
        lines.append(
            f"| {cell} | {arm} | {verdict.same} | {verdict.near_ties} | {verdict.wrong} | "
            f"{verdict.largest_deviation:.3g} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Prints the tables; 2 where a file is broken or there is nothing to tell, which stderr says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--json", type=Path, help="the figures without the requests")
    parser.add_argument("--svg", type=Path, help="a folder for the pictures")
    parser.add_argument("--predicted", type=Path, help="what `lamella validate --json` wrote of the same cells")
    parser.add_argument("--goals", action="store_true", help="only the goals and what one thing changes")
    parser.add_argument("--newest", action="store_true", help="each cell from the last of the runs that measured it")
    parser.add_argument("--each", type=Path, help="what every run says by itself is written there, in Markdown")
    parser.add_argument("--cell", default="", help="only cells whose name holds this")
    asked = parser.parse_args()
    try:
        report(asked, [read([path]) for path in asked.runs])
    except RecordingError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def report(asked: argparse.Namespace, runs: Sequence[Sequence[Row]]) -> None:
    """The tables are printed and what was asked for is written.

    Raises:
        RecordingError: nothing is there to tell, lines that do not fit together, or a file that cannot be written.
    """
    rows = newest(runs) if asked.newest else [row for run in runs for row in run]
    every = figures_of(rows)
    cells = {name: cell for name, cell in every.items() if asked.cell in name}
    if not cells:
        named = f"of a cell named like {asked.cell!r}, only of {', '.join(every)}" if every else "at all"
        raise RecordingError(f"{', '.join(map(str, asked.runs))}: no repeats {named}; name other recordings or cells")
    verdicts = verdicts_of(rows)
    predicted = predictions_in(asked.predicted) if asked.predicted else {}
    if not asked.goals:
        for cell in cells.values():
            print(table(cell))
        print(answers_table(rows))
        print(overview(cells))
    print(gains_table(cells))
    print(differences_table(cells))
    print(causes_table(cells))
    print(cells_table(cells, predicted))
    print(choices_table(cells, commits_of(runs)))
    print(link_table(cells))
    by_name = {path.name.partition(".")[0]: run for path, run in zip(asked.runs, runs, strict=True)}
    beside = []
    if any(map(on_two_gpus, cells)):
        beside = beside_one_gpu(by_run(runs))
        print(limits_table(by_name))
        print(launches_table(by_name))
    print(goals_table([*with_runs(goals(cells, verdicts, rows), over_runs(by_run(runs))), *beside]))
    try:
        if asked.json:
            write_json(asked.json, summary(rows))
        if asked.each:
            write_text(asked.each, each_run(by_name))
        if asked.svg:
            from concurrency.plots import draw

            for path in draw(cells, asked.svg):
                print(path, file=sys.stderr)
    except OSError as error:
        raise RecordingError(f"{error.filename}: {error.strerror}; name a place that can be written to") from error


def predictions_in(path: Path) -> dict[tuple[str, str], float]:
    """As `predictions_of`, of a file.

    Raises:
        RecordingError: it is not there, or `lamella validate --json` did not write it.
    """
    try:
        return predictions_of(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise RecordingError(f"{path}: {error.strerror}; write it by `lamella validate --json`") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecordingError(
            f"{path}: not as `lamella validate --json` writes it ({error!r}); write it anew"
        ) from error


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader that has seen enough, such as head, ends it quietly
    raise SystemExit(main())
