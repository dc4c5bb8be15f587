"""What docs/concurrency.md says of prefills that replay graphs in words, as the recordings would say it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from concurrency.figures import CellFigures
from concurrency.goals import Line
from concurrency.rules import change_of
from concurrency.several_runs import TODAYS

from concurrency_words import AUTO, Spoken, pm, set_aside

Cells = Mapping[str, CellFigures]
BOTH: Final = "auto_both_graphs"
CELL: Final = "c{}_hit15360_new{}_chunk256_both".format
TWO: Final = "c4_hit15360_new768_chunk256_two_gpus_prefill_graphs"
BYSTANDERS: Final = f"bystanders' TPOT, {BOTH}, 9 arrivals/s"
SMALL: Final = "c4_hit15360_new256_chunk256_{}".format


def prefill_graphs(now: Cells, two: Cells, over: Mapping[str, Line], rows: Mapping[str, Sequence[str]]) -> list[str]:
    """Of the newest recordings of one GPU and of two, goals over several runs, and the rows of each section."""
    one, four, longer, large, eight, small = (
        Spoken(now, CELL(*cell), BOTH) for cell in ((1, 768), (4, 768), (4, 1024), (4, 2048), (8, 768), (4, 256))
    )
    ranks = two[TWO]
    mine, before = (ranks.arms[f"auto_{kind}_graphs"] for kind in ("both", "full"))
    for cell in (one, four, longer, large, small):
        assert cell.change().shown
    assert not eight.change().shown
    goals = {what: re.match(r"\S+ ± \S+", line.measured) for what, line in over.items()}
    together = {what: found.group() for what, found in goals.items() if found}
    twice = f"C = 8, new = 768, {BOTH}"
    assert over[twice].state.startswith("not shown")
    against_deep = change_of(longer.arm("chunk_both_graphs").ttft, longer.base.ttft, longer.cell.drift)
    floor = small.arm().link_floor
    assert floor is not None
    beside = {arm: _bystanders(now, arm) for arm in ("auto", "fifo")}
    e2e = [cell.change("e2e").value for name, cell in ((name, Spoken(now, name, BOTH)) for name, found in now.items()
           if BOTH in found.arms)]  # fmt: skip
    ways = {name: found.arms[BOTH].choices for name, found in now.items() if BOTH in found.arms}
    joined = {name: f"{of['sync']} of {sum(of.values())}" for name, of in ways.items() if of.get("sync")}
    chunks = [ways[f"c4_hit12288_new768_chunk{size}_both"] for size in (1024, 4096)]
    assert ways["c1_hit4096_new1024_chunk256_both"].keys() == {"sync"}
    assert joined.keys() == {
        *map(CELL, (4, 4), (1024, 2048)), "c4_hit15360_new2048_chunk256_in_flight_both",
        *(f"c4_hit12288_new768_chunk{size}_both" for size in (1024, 4096)),
        *(f"c{users}_hit4096_new1024_chunk256_both" for users in (1, 4)),
    }  # fmt: skip
    return [
        f"came after {pm(mine.ttft)} instead of {pm(before.ttft)} ms",
        f"without them they are known to {before.ttft.relative_error:.1%} only",
        f"{four.percent()}, {longer.percent()} and {large.percent()} at four with 768, 1,024 and 2,048 new and "
        f"{one.percent()} at one user, all shown",
        f"{together[f'14,336 + 818, chunk 2048, C = 8, {BOTH}']} over two runs at eight with 14,336 + 818",
        f"eight with 768 it was {eight.percent_and_error()} in the newer run and {together[twice]} over two, not shown",
        f"over two runs {together[f'C = 4, new = 256, {BOTH}']}",
        f"over two runs {together[f'C = 1, new = 768, {BOTH}']}",
        f"{together[f'C = 4, new = 768, {BOTH}']} over three runs at four with 768",
        f"over two runs {together[BYSTANDERS]} of `auto`",
        f"{small.percent_and_error()} ({small.pair})",
        f"{0.55 * small.base.ttft.value:.1f} ms were wanted, and the "
        f"link alone needs {floor.value:.1f} for these arrivals",
        f"its prefill takes {small.cell.alone.prefill_ms:.1f} ms of the device",
        f"{beside['fifo']} of one request after another",
        f"{beside['auto']} in the newer",
        f"**Whole answers by `auto`** were shorter in {sum(value < 0 for value in e2e)} of {len(e2e)} cells",
        f"the next step for {joined[CELL(4, 1024)]} with 1,024, {joined[CELL(4, 2048)]} and "
        f"{joined['c4_hit15360_new2048_chunk256_in_flight_both']} with 2,048, "
        f"{joined['c4_hit4096_new1024_chunk256_both']} with 4,096 cached and "
        f"{sum(of['sync'] for of in chunks)} of {sum(sum(of.values()) for of in chunks)} with 12,288",
        f"in that cell the two differ by {abs(against_deep.value):.1%} ± {against_deep.error:.1%}",
        f"the ceiling of one request {ranks.alone_of(BOTH).ceiling:.0%} instead of {ranks.alone_of(AUTO).ceiling:.0%}",
        f"{set_aside(two, TWO)} aside",
        *_of_tables(rows),
    ]


def shortest_prompts(each: Sequence[tuple[str, Cells]]) -> str:
    """What C = 4 with 256 new took by full graphs in each run of today's `auto`, by commit."""
    cells = [Spoken(found, name) for commit, found in each if commit in TODAYS
             for name in (SMALL("full"), SMALL("before_batch_full")) if name in found]  # fmt: skip
    base, mine = (sorted(arm.ttft.value for arm in arms) for arms in ([cell.base for cell in cells],
                                                                     [cell.arm() for cell in cells]))  # fmt: skip
    assert len(cells) == 4
    return (
        f"by full graphs it took chunk-major between {base[0]:.1f} and {base[-1]:.1f} ms and `auto` between "
        f"{mine[0]:.1f} and {mine[-1]:.1f} in four other runs"
    )


def _bystanders(now: Cells, arm: str) -> str:
    cell = Spoken(now, "c4_hit15360_new768_chunk256_bystanders_open_both", f"{arm}_both_graphs")
    return cell.percent_and_error("bystander_tpot")


def _of_tables(rows: Mapping[str, Sequence[str]]) -> list[str]:
    """From the rows of the section of two GPUs."""
    ranks = [row.strip("| ").split(" | ") for row in rows["Two GPUs, tensor parallel 2"]]
    (reached,) = (row for row in ranks if row[0].startswith("two GPUs beside one") and row[0].endswith(BOTH))
    points = re.search(r"([+-][\d.]+ ± [\d.]+) points$", reached[2])
    at = re.match(r"(\S+ ± \S+) at T/P (\S+) \(\w+\), one GPU (\S+ ± \S+) at (\S+) in", reached[2])
    assert points
    assert at
    assert reached[3] == "reached"
    (full,), (both,) = (
        [row for row in ranks if row[0].endswith("two-gpus-prefill-graphs") and row[1] == f"chunk_{kind}_graphs"]
        for kind in ("full", "both")
    )
    launching, step = zip(*(row[3].split(" → ") for row in (full, both)), strict=True)
    quickest, slowest = (part.split(" → ")[1] for part in both[4:6])
    return [
        f"{at[1]} at T/P {at[2]} beside {at[3]} at {at[4]} on one GPU, {points[1].lstrip('+')} points less",
        f"launching took {launching[1]} instead of {launching[0]} ms and the step {step[1]} instead of {step[0]}",
        f"the step {step[1]} instead of {step[0]}, whether it was launched quickly ({quickest}) or slowly ({slowest})",
    ]
