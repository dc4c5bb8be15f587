"""What `auto` would have lost against the best fixed setting, by the model: bursts by the recursion, and closed loops.

    python benchmarks/auto_regret.py OUT.json [--tuning]

Two grids of regimes. `auto`'s constants were chosen on the tuning grid; what is claimed of it comes from the held-out
one, which shares no hit, no number of new tokens and no link with it. Every arm decodes with the same graphs.

A burst is C requests at once, alone on the device: an arm's figure is the mean time to first token, and regret is the
change against the best fixed arm. In a closed loop those who wait are those who would ask next, so an arm can have
early first tokens at the price of late whole answers, or of bystanders that only decode. There, regret is taken against
the best of those fixed arms that give whole answers no later, and bystanders no fewer tokens, than auto.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parent))

from result_file import write_json

from lamella.reference.auto import AutoPolicy
from lamella.reference.auto_view import Decision
from lamella.reference.ordering import Fifo
from lamella.reference.profile import DeviceProfile
from lamella.reference.release import First, JustInTime
from lamella.sim.profiles import load_profile
from lamella.sim.records import RequestRecord
from lamella.sim.requests import Request
from lamella.sim.strategies import AUTO, CHUNK_MAJOR, RECOMPUTE, Device, Regime, Strategy
from lamella.sim.world import World

WIDTHS: Final = (1, 2, 4, 8, 16)
FIXED: Final = (
    CHUNK_MAJOR,
    RECOMPUTE,
    *(Strategy(width, Fifo(), release) for width in WIDTHS for release in (First(), JustInTime(None))),
)
LOOP_FIXED: Final = (
    CHUNK_MAJOR,
    RECOMPUTE,
    *(Strategy(width, Fifo(), release) for width in (1, 4) for release in (First(), JustInTime(None))),
)
"""Fewer widths: where slices cost what was measured, they differ by little, and each cell runs for long."""
HELD_TOKENS: Final = 700_000
SLACK: Final = 0.01
BYSTANDER_SLACK: Final = 0.05
BYSTANDER_TAG: Final = -1
SETTLED_NS: Final = 300_000_000
"""Bystanders decode by then."""


@dataclass(frozen=True, slots=True)
class GridCell:
    """A regime on a link.

    Attributes:
        gb_per_s: of the link; None for the profile's.
        slice_us: what each slice costs; None for what the profile says.
        concurrency: requests at once, or users.
        hits, news: tokens; each request of a closed loop draws one of each.
        bystanders: requests that do nothing but decode.
    """

    gb_per_s: float | None
    slice_us: int | None
    concurrency: int
    hits: tuple[int, ...]
    news: tuple[int, ...]
    bystanders: int = 0

    def device(self) -> Device:
        """The shipped profile with that link."""
        profile = load_profile()
        wire = profile.wire
        if self.gb_per_s is not None:
            rate = int(self.gb_per_s * 1e9)
            wire = replace(wire, h2d_bytes_per_s=rate, both_bytes_per_s=min(rate, wire.both_bytes_per_s))
        if self.slice_us is not None:
            wire = replace(wire, slice_fixed_ns=self.slice_us * 1000)
        return Device(replace(profile, wire=wire), extrapolate=True)


def burst_cells(*, held_out: bool) -> list[GridCell]:
    """The grid of bursts."""
    if held_out:
        links, costs, users = (None, 30.0, 10.0, 4.0), (None, 240), (1, 3, 6, 12)
        hits, news = (6_144, 24_576, 49_152), (96, 512, 1_536, 3_072)
    else:
        links, costs, users = (None, 20.0, 5.0), (None, 60), (1, 2, 4, 8, 16)
        hits, news = (4_096, 15_152, 65_536), (64, 256, 1_024, 4_096)
    return [
        GridCell(link, cost, count, (hit,), (new,))
        for link in links
        for cost in costs
        for count in users
        for hit in hits
        for new in news
        if count * (hit + new) <= HELD_TOKENS
    ]


def loop_cells(*, held_out: bool) -> list[GridCell]:
    """The grid of closed loops, with and without bystanders."""
    mixes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    if held_out:
        links, users = (None, 30.0, 10.0), (1, 3, 6, 12)
        mixes = (
            *(((hit,), (new,)) for hit, new in ((6_144, 96), (6_144, 1_536), (24_576, 640), (24_576, 1_536))),
            ((12_288,), (2_866,)),
            ((6_144, 24_576, 40_960), (96, 640, 1_536)),
        )
    else:
        links, users = (None, 20.0, 5.0), (1, 2, 4, 8, 16)
        mixes = (
            *(((4_096,), (new,)) for new in (64, 1_024)),
            *(((15_152,), (new,)) for new in (256, 768, 2_048)),
            ((65_536,), (512,)),
            ((4_096, 15_152, 32_768), (128, 512, 2_048)),
        )
    return [
        GridCell(link, None, count, hits, news, bystanders)
        for link in links
        for count in users
        for hits, news in mixes
        for bystanders in (0, 8)
        if count * max(hits) <= HELD_TOKENS
    ]


@dataclass(frozen=True, slots=True)
class Served:
    """What an arm made of a cell: means over requests, and a bystander's time per token (0 without any)."""

    ttft_ns: float
    end_ns: float
    span_ns: int
    bystander_tpot_ns: float = 0.0


def make_engine(
    device: Device,
    strategy: Strategy,
    believed: DeviceProfile | None,
    on_choice: Callable[[Decision], object] | None,
) -> Callable[..., Any]:
    """The arm's engine; `believed`: what `auto` takes the device for, if not for what it is."""
    engine = device.engine(strategy)
    if not strategy.chooses:
        return engine
    policy = AutoPolicy(believed or device.profile)
    return partial(engine, policy=policy, on_choice=on_choice)


def run_burst(
    cell: GridCell,
    strategy: Strategy,
    believed: DeviceProfile | None = None,
    on_choice: Callable[[Decision], object] | None = None,
) -> Served:
    """The cell's requests at once."""
    device = cell.device()
    engine = make_engine(device, strategy, believed, on_choice)
    world = World(device.compute(AUTO), strategy.order, strategy.release, device.settings(), make_engine=engine)
    regime = Regime(cell.hits[0], cell.news[0], cell.concurrency)
    for tag in range(cell.concurrency):
        world.arrive(device.request(regime, strategy, tag))
    records = world.run()
    ttft = sum(record.ttft_ns for record in records) / len(records)
    return Served(ttft, ttft, world.clock.now_ns)


class _AllServedError(Exception):
    """Every request of the cell is answered; bystanders would decode for ever."""


def run_loop(
    cell: GridCell,
    strategy: Strategy,
    requests_per_user: int = 8,
    output_tokens: int = 16,
    seed: int = 0,
    believed: DeviceProfile | None = None,
    on_choice: Callable[[Decision], object] | None = None,
) -> Served:
    """The cell's users ask, and again when they are answered, beside its bystanders."""
    device, rng = cell.device(), random.Random(seed)
    count = cell.concurrency * requests_per_user
    served: list[RequestRecord] = []

    def finished(record: RequestRecord) -> None:
        if record.tag != BYSTANDER_TAG:
            served.append(record)
            if len(served) == count:
                raise _AllServedError

    engine = make_engine(device, strategy, believed, on_choice)
    world = World(
        device.compute(AUTO),
        strategy.order,
        strategy.release,
        device.settings(),
        on_finish=finished,
        keep_steps=bool(cell.bystanders),
        make_engine=engine,
    )
    for _ in range(cell.bystanders):
        world.arrive(Request(0, 64, 1_000_000, tag=BYSTANDER_TAG))
    requests = [
        device.request(Regime(rng.choice(cell.hits), rng.choice(cell.news), 1, output_tokens), strategy, tag)
        for tag in range(count)
    ]
    begin = SETTLED_NS if cell.bystanders else 0
    spread = device.transfer_ns(max(cell.hits)) + device.prefill_ns(max(cell.hits), max(cell.news))
    starts = sorted(begin + rng.randrange(spread) for _ in range(cell.concurrency))
    world.loop_closed(cell.concurrency, requests, starts_ns=starts)
    with suppress(_AllServedError):
        world.run()
    span = world.clock.now_ns - begin
    steps = sum(step.num_steps for step in world.steps if step.decode_batch and step.end_ns > begin)
    return Served(
        sum(record.ttft_ns for record in served) / count,
        sum(record.end_ns - record.arrival_ns for record in served) / count,
        span,
        span / steps if cell.bystanders else 0.0,
    )


@dataclass(frozen=True, slots=True)
class GridRow:
    """A cell's verdict on auto: relative changes, 0.1 for a tenth more.

    Attributes:
        regret: of mean time to first token against the best fixed arm that may be compared.
        best: that arm.
        on_chunk_major, on_recompute: of mean time to first token against these.
        end_on_chunk_major, span_on_chunk_major: of whole answers, and of the time that all of it took.
        bystanders_on_chunk_major: of their time per token, at chunk-major's throughput.
        auto: its own figures.
        arms: how often auto chose each.
    """

    cell: GridCell
    regret: float
    best: str
    on_chunk_major: float
    on_recompute: float
    end_on_chunk_major: float
    span_on_chunk_major: float
    bystanders_on_chunk_major: float
    auto: Served
    arms: dict[str, int]


def judge(cell: GridCell, auto: Served, fixed: dict[str, Served], arms: Counter[str]) -> GridRow:
    """The cell's row."""
    comparable = {
        name: one
        for name, one in fixed.items()
        if one.end_ns <= (1 + SLACK) * auto.end_ns
        and one.bystander_tpot_ns <= (1 + BYSTANDER_SLACK) * auto.bystander_tpot_ns
    }
    best = min(comparable or fixed, key=lambda name: fixed[name].ttft_ns)
    chunk_major, recompute = fixed[str(CHUNK_MAJOR)], fixed[str(RECOMPUTE)]
    span = auto.span_ns / chunk_major.span_ns - 1
    slower = auto.bystander_tpot_ns / chunk_major.bystander_tpot_ns - 1 if cell.bystanders else 0.0
    return GridRow(
        cell,
        auto.ttft_ns / fixed[best].ttft_ns - 1,
        best,
        auto.ttft_ns / chunk_major.ttft_ns - 1,
        auto.ttft_ns / recompute.ttft_ns - 1,
        auto.end_ns / chunk_major.end_ns - 1,
        span,
        (1 + slower) * (1 + span) - 1 if cell.bystanders else 0.0,
        auto,
        dict(arms),
    )


def burst_rows(cells: Sequence[GridCell]) -> list[GridRow]:
    """Every cell as a burst. Whole answers end with the first token, so all arms may be compared."""
    rows = []
    for cell in cells:
        arms: Counter[str] = Counter()
        auto = run_burst(cell, AUTO, on_choice=lambda decision, arms=arms: arms.update([decision.arm.value]))
        fixed = {str(one): run_burst(cell, one) for one in FIXED}
        best = min(one.ttft_ns for one in fixed.values())
        rows.append(judge(cell, replace(auto, end_ns=max(auto.end_ns, best)), fixed, arms))
    return rows


def loop_rows(cells: Sequence[GridCell], requests_per_user: int = 8) -> list[GridRow]:
    """Every cell as a closed loop."""
    rows = []
    for cell in cells:
        arms: Counter[str] = Counter()
        auto = run_loop(
            cell,
            AUTO,
            requests_per_user,
            on_choice=lambda decision, arms=arms: arms.update([decision.arm.value]),
        )
        rows.append(judge(cell, auto, {str(one): run_loop(cell, one, requests_per_user) for one in LOOP_FIXED}, arms))
    return rows


def summary(rows: Sequence[GridRow]) -> dict[str, float]:
    """Means and worst cases."""

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    regrets = [row.regret for row in rows]
    beside = [row.bystanders_on_chunk_major for row in rows if row.cell.bystanders]
    return {
        "cells": len(rows),
        "regret_mean": mean(regrets),
        "regret_mean_of_losses": mean([max(0.0, regret) for regret in regrets]),
        "regret_max": max(regrets),
        "cells_beyond_8_percent": len(worst_rows(rows)),
        "on_chunk_major_mean": mean([row.on_chunk_major for row in rows]),
        "on_chunk_major_max": max(row.on_chunk_major for row in rows),
        "on_recompute_max": max(row.on_recompute for row in rows),
        "whole_answers_on_chunk_major_mean": mean([row.end_on_chunk_major for row in rows]),
        "whole_answers_on_chunk_major_max": max(row.end_on_chunk_major for row in rows),
        "time_of_all_on_chunk_major_max": max(row.span_on_chunk_major for row in rows),
        "bystanders_on_chunk_major_mean": mean(beside) if beside else 0.0,
        "bystanders_on_chunk_major_max": max(beside, default=0.0),
    }


def worst_rows(rows: Sequence[GridRow]) -> list[dict[str, Any]]:
    """The rows whose regret is beyond 8%, the worst first."""
    return [asdict(row) for row in sorted(rows, key=lambda row: -row.regret) if row.regret > 0.08]


def main() -> None:
    """Runs a grid, prints its summary and writes it with the rows beyond 8%."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--tuning", action="store_true", help="the grid that constants were chosen on")
    asked = parser.parse_args()
    held_out = not asked.tuning
    bursts = burst_rows(burst_cells(held_out=held_out))
    loops = loop_rows(loop_cells(held_out=held_out), requests_per_user=12)
    document = {
        "kind": "lamella.auto_regret",
        "grid": "tuning" if asked.tuning else "held out",
        "profile": load_profile().name,
        "bursts": {"summary": summary(bursts), "beyond_8_percent": worst_rows(bursts)},
        "closed_loops": {"summary": summary(loops), "beyond_8_percent": worst_rows(loops)},
    }
    write_json(asked.out, document)
    for name in ("bursts", "closed_loops"):
        print(name, json.dumps(document[name]["summary"], indent=1))  # type: ignore[index]


if __name__ == "__main__":
    main()
