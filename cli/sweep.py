"""`lamella sweep`: a map of regimes, concurrency by transfer over computing time, and where layerwise transfer pays."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from string import ascii_lowercase
from typing import Annotated, Final, TypeVar

import typer

from lamella.cli._model import (
    DEFAULT_PROFILE,
    ExtrapolateOption,
    ModelOption,
    OutOption,
    ProfileOption,
    SeedOption,
    check_out,
    open_device,
    wide_console,
    write_result,
)
from lamella.cli._refusal import refuse_bad_input
from lamella.sim.regimes import Cell, RegimeMap

MOST_COLUMNS: Final = 10
"""Columns of the printed table; the JSON and the picture have them all."""

NumberT = TypeVar("NumberT", int, float)


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command()(sweep)


def sweep(
    hit_tokens: Annotated[int, typer.Option(help="Prompt tokens found in host memory.")] = 15_152,
    concurrency: Annotated[
        str, typer.Option(help="Requests that arrive together, between commas.")
    ] = "1,2,3,4,5,6,8,10,12,16",
    ratios: Annotated[
        str | None,
        typer.Option(
            help="Transfer over computing time, between commas; default: 20 over all that the profile reaches."
        ),
    ] = None,
    strategy: Annotated[
        list[str] | None, typer.Option(help="order/width/release to try; repeat it. Default: the usual ones.")
    ] = None,
    model: ModelOption = None,
    profile: ProfileOption = DEFAULT_PROFILE,
    extrapolate: ExtrapolateOption = False,
    seed: SeedOption = 0,
    out: OutOption = Path("lamella-out"),
) -> None:
    """Maps where layerwise transfer pays: colour is the change of mean TTFT against the best that is to be had without.

    Answers come from the recursion; a tenth of the cells is run again as discrete events, and must agree.
    """
    from rich.box import SIMPLE
    from rich.table import Table

    from lamella.sim.regimes import check_in_world, map_regimes, reachable_ratios
    from lamella.sim.report import BURST, draw_map, map_document
    from lamella.sim.strategies import CANDIDATES, OFF, parse_strategy

    begun = time.perf_counter()
    with refuse_bad_input():
        device = open_device(profile, model, extrapolate)
        tried = [parse_strategy(text) for text in strategy] if strategy else CANDIDATES
        check_out(out, "sweep")
        regime_map = map_regimes(
            device,
            hit_tokens,
            _numbers(concurrency, "concurrency", int),
            _numbers(ratios, "ratio", float) if ratios else reachable_ratios(device, hit_tokens, 20),
            tried,
        )
    mapped = time.perf_counter()
    checked = check_in_world(device, regime_map, seed)
    document = map_document(device, regime_map, seed, checked)

    columns = len({cell.ratio for cell in regime_map.cells})
    stride = -(-columns // MOST_COLUMNS)
    table = Table(box=SIMPLE, title="change of mean TTFT with the best strategy, by requests at once (C) and T/P")
    table.add_column("C", justify="right")
    for cell in regime_map.cells[:columns:stride]:
        table.add_column(f"{cell.ratio:.2f}\n{cell.regime.new_tokens:,} new", justify="right", no_wrap=True)
    for first in range(0, len(regime_map.cells), columns):
        row = regime_map.cells[first : first + columns]
        table.add_row(
            str(row[0].regime.concurrency),
            *(_entry(regime_map, cell) for cell in row[::stride]),
        )
    wide_console().print(table)
    legend = (f"{letter} = {one}" for letter, one in zip(ascii_lowercase, regime_map.strategies, strict=False))
    typer.echo(f"{'; '.join(legend)}; against the better of {' and '.join(map(str, OFF))}.")
    typer.echo(
        f"{len(regime_map.cells)} regimes × {len(regime_map.strategies)} strategies by the recursion in "
        f"{mapped - begun:.1f} s; {checked} of them again as discrete events: equal to the nanosecond."
    )
    typer.echo(f"Profile: {device.profile.name}, {device.profile.regimes()}.")
    for assumption in BURST:
        typer.echo(f"Assumed: {assumption}.")
    write_result(out, "sweep", document, lambda path: draw_map(regime_map, path))
    typer.echo(regime_map.verdict())


def _entry(regime_map: RegimeMap, cell: Cell) -> str:
    """The best strategy's letter and what it changes, or "off" and which of those it is."""
    best = regime_map.best(cell)
    letter = ascii_lowercase[regime_map.strategies.index(best)]
    return f"{letter} {regime_map.change(cell, best):+.0%}" if best.layerwise else f"off {letter}"


def _numbers(text: str, what: str, kind: Callable[[str], NumberT]) -> list[NumberT]:
    """Different positive numbers between commas, sorted.

    Raises:
        ValueError: one of them is not.
    """
    found: set[NumberT] = set()
    for part in text.split(","):
        try:
            value = kind(part)
        except ValueError:
            raise ValueError(f"each {what} must be a number, got {part.strip()!r}") from None
        if not 0 < value < math.inf:
            raise ValueError(f"each {what} must be positive, got {part.strip()}")
        found.add(value)
    return sorted(found)
