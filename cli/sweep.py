"""`lamella sweep`: should layerwise transfer be turned on at your point, with what setting, and where does it pay."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from string import ascii_lowercase
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import typer

from lamella.cli._config import ConfigOption
from lamella.cli._model import (
    DEFAULT_PROFILE,
    ExtrapolateOption,
    ModelOption,
    OutOption,
    OverheadsOption,
    ProfileOption,
    SeedOption,
    check_out,
    milliseconds,
    write_results,
)
from lamella.cli._progress import progress_bar
from lamella.cli._refusal import refuse_bad_input
from lamella.cli._regime import (
    BeforeBatchOption,
    ComputeSpeedOption,
    ConcurrencyOption,
    FullGraphsOption,
    HitOption,
    HitTokensOption,
    LinkOption,
    NewTokensOption,
    OutputTokensOption,
    PrefillGraphsOption,
    PromptOption,
    SloTpotOption,
    SloTtftOption,
    describe_regime,
    open_derived_device,
    parse_regime,
    parse_slo,
    within_slo,
)
from lamella.cli._running import (
    EngineOption,
    JournalOption,
    WorkersOption,
    parse_running,
    refuse_foreign_journal,
    stoppable,
)
from lamella.cli._tables import draw_table, fits, print_table, print_whole
from lamella.sim.bounds import MOST_USERS, check_range, check_seed
from lamella.sim.parallel import Running
from lamella.sim.regimes import Cell, RegimeMap

if TYPE_CHECKING:
    from lamella.sim.serving import Slo
    from lamella.sim.strategies import Device, Regime, Strategy
    from lamella.sim.study import Study

MOST_COLUMNS: Final = 10
"""Columns of the printed table; the JSON and the picture have them all."""
FILES: Final = ("sweep.json", "sweep.html", "sweep.png", "sweep-point.png")

NumberT = TypeVar("NumberT", int, float)


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command(short_help="Says whether to turn it on at your point, and where it pays.")(sweep)


def sweep(
    prompt_tokens: PromptOption = None,
    hit: HitOption = None,
    hit_tokens: HitTokensOption = None,
    new_tokens: NewTokensOption = None,
    concurrency: ConcurrencyOption = 4,
    output_tokens: OutputTokensOption = 50,
    link: LinkOption = None,
    compute_speed: ComputeSpeedOption = 1.0,
    slo_ttft: SloTtftOption = None,
    slo_tpot: SloTpotOption = None,
    concurrencies: Annotated[
        str, typer.Option(help="Rows of the map and of the search for break-even, between commas.")
    ] = "1,2,3,4,5,6,8,10,12,16",
    ratios: Annotated[
        str | None,
        typer.Option(help="Columns: transfer over computing time, between commas; default: 20 over all in reach."),
    ] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STRATEGY", help="order/width/release or auto to try; repeatable. Default: the usual ones."
        ),
    ] = None,
    requests: Annotated[int, typer.Option(help="Requests per user at your point.")] = 10,
    repeats: Annotated[int, typer.Option(help="Repeats with other seeds at your point.")] = 3,
    model: ModelOption = None,
    profile: ProfileOption = DEFAULT_PROFILE,
    overheads: OverheadsOption = None,
    full_graphs: FullGraphsOption = "before",
    prefill_graphs: PrefillGraphsOption = 0,
    before_batch: BeforeBatchOption = False,
    extrapolate: ExtrapolateOption = False,
    engine: EngineOption = "auto",
    workers: WorkersOption = None,
    journal: JournalOption = None,
    seed: SeedOption = 0,
    out: OutOption = Path("lamella-out"),
    config: ConfigOption = None,
) -> None:
    """Says whether to turn layerwise transfer on at your point, with what setting, and maps where it pays.

    Your point is run as discrete events at each concurrency, with several seeds. The map around it comes from the
    recursion; some of its cells are run again as discrete events, and must agree.
    """
    from lamella.sim.pictures import draw_map, draw_study
    from lamella.sim.regimes import check_in_world, compute_map, plan_map, reachable_ratios
    from lamella.sim.report import BURST, profile_lines, study_lines, sweep_document
    from lamella.sim.strategies import CANDIDATES, OFF, parse_strategy
    from lamella.sim.study import answer_lines, compute_study, plan_study, study_strategies

    begun = time.perf_counter()
    with refuse_bad_input():
        device = open_derived_device(
            profile,
            model,
            link,
            compute_speed,
            extrapolate=extrapolate,
            overheads=overheads,
            full_graphs=full_graphs,
            prefill_graphs=prefill_graphs,
            before_batch=before_batch,
        )
        point = parse_regime(prompt_tokens, hit, hit_tokens, new_tokens, concurrency, output_tokens)
        slo = parse_slo(slo_ttft, slo_tpot)
        asked = [parse_strategy(text) for text in strategy] if strategy else None
        on_map = asked or list(CANDIDATES)
        at_point = asked or list(study_strategies(device.profile.num_layers))
        device.check(point, (*OFF, *on_map, *at_point))
        rows = sorted({*_numbers(concurrencies, "concurrency", int), point.concurrency})
        _check_rows(device, point, rows, (*OFF, *on_map, *at_point))
        bare = device.with_overheads(None)  # as the map is: what a host thread or its loads add is not in it
        columns = (
            _numbers(ratios, "ratio", float) if ratios is not None else reachable_ratios(bare, point.hit_tokens, 20)
        )
        check_out(out, FILES)
        work = _estimate_s(len(rows) * len(columns) * len(on_map), sum(rows) * requests * repeats * len(at_point))
        how = parse_running(engine, workers, work)
        if journal is not None:
            journal.mkdir(parents=True, exist_ok=True)
        map_plan = plan_map(bare, point.hit_tokens, rows, columns, on_map, (point.new_tokens,))
        study_plan = plan_study(device, point, rows, at_point, requests_per_user=requests, repeats=repeats, slo=slo)
        check_seed(seed)

    def where(name: str, advance: Callable[[int], object]) -> Running:
        return replace(how, journal=None if journal is None else journal / f"{name}.jsonl", on_done=advance)

    with refuse_foreign_journal(), stoppable(journal):
        with progress_bar("map", len(map_plan.regimes)) as advance:
            regime_map = compute_map(map_plan, where("map", advance))
        mapped = time.perf_counter()
        with progress_bar("your point", len(study_plan.concurrencies) * repeats) as advance:
            study = compute_study(study_plan, seed, where("point", advance))
    checked = check_in_world(bare, regime_map, seed)
    document = sweep_document(device, regime_map, study, slo, seed, checked)

    typer.echo(describe_regime(device, point))
    _print_map(regime_map)
    typer.echo(
        f"{len(regime_map.cells)} regimes × {len(regime_map.strategies)} strategies by the recursion in "
        f"{mapped - begun:.1f} s; {checked} of them again as discrete events: equal to the nanosecond."
    )
    typer.echo(f"Over the whole map: {regime_map.verdict()}")
    _print_point(study, slo, out)
    for assumption in (*profile_lines(device), *BURST, *study_lines(study)):
        typer.echo(f"Assumed: {assumption}.")
    lines = answer_lines(study, slo)
    pictures = {
        "sweep.png": lambda path: draw_map(regime_map, path, point),
        "sweep-point.png": lambda path: draw_study(study, path),
    }
    write_results(out, {"sweep.json": document, "sweep.html": _html(regime_map, study, slo, document)}, pictures)
    for line in lines:
        typer.echo(line)


def _check_rows(device: Device, point: Regime, rows: Sequence[int], strategies: tuple[Strategy, ...]) -> None:
    """The profile covers so many at once, in every row of the map.

    Raises:
        ValueError: not in one of them; with the rows that it does cover.
    """
    covered: list[int] = []
    for row in rows:
        try:
            device.check(replace(point, concurrency=row), strategies)
        except ValueError as refusal:
            fit = ",".join(map(str, covered))
            raise ValueError(
                f"{row} at once, a row of the map: {refusal}"
                + (f"; or ask for fewer: --concurrencies {fit}" if fit else "")
            ) from None
        covered.append(row)


def _estimate_s(timelines: int, requests: int) -> float:
    """Seconds of one core for so many timelines of the map and requests of the study: an order of magnitude."""
    return timelines * 0.5e-3 + requests * 0.12e-3


def _print_map(regime_map: RegimeMap) -> None:
    from lamella.sim.strategies import OFF

    columns = len({cell.ratio for cell in regime_map.cells})
    first_row = regime_map.cells[:columns]
    heads = ["C", *(f"{cell.ratio:.2f}\n{cell.regime.new_tokens:,} new" for cell in first_row)]
    rows = [
        [str(row[0].regime.concurrency), *(_entry(regime_map, cell) for cell in row)]
        for row in (regime_map.cells[first : first + columns] for first in range(0, len(regime_map.cells), columns))
    ]
    title = "change of mean TTFT with the best strategy, by requests at once (C) and T/P"
    stride = -(-columns // MOST_COLUMNS)
    while not fits(draw_table(heads, rows, (0, *range(1, columns + 1, stride)))) and stride < columns:
        stride += 1
    print_whole(draw_table(heads, rows, (0, *range(1, columns + 1, stride)), title))
    legend = (f"{letter} = {one}" for letter, one in zip(ascii_lowercase, regime_map.strategies, strict=False))
    typer.echo(f"{'; '.join(legend)}; against the better of {' and '.join(map(str, OFF))}.")


POINT_HEADS: Final = ("strategy", "TTFT", "p50", "p90", "p99", "change", "answer", "TPOT", "goodput/s", "in time")


def _point_rows(study: Study, slo: Slo) -> list[list[str]]:
    """What each strategy does at the user's own concurrency."""
    here = study.regime.concurrency
    rows = []
    for one in study.strategies:
        times = (
            study.mean(here, one, field) for field in ("mean_ttft_ns", "p50_ttft_ns", "p90_ttft_ns", "p99_ttft_ns")
        )
        rows.append(
            [
                str(one),
                *map(milliseconds, times),
                str(study.change(here, one)),
                milliseconds(study.mean(here, one, "mean_end_ns")),
                milliseconds(study.mean(here, one, "mean_tpot_ns")),
                *within_slo(slo, study.mean(here, one, "goodput_per_s"), study.mean(here, one, "slo_met")),
            ]
        )
    return rows


def _print_point(study: Study, slo: Slo, out: Path) -> None:
    repeats = len(study.outcomes[0])
    runs = "one run" if repeats == 1 else f"means of {repeats} repeats"
    print_table(
        POINT_HEADS,
        _point_rows(study, slo),
        title=f"your point, {study.regime.concurrency} users, {runs}; ms",
        spare=("p90", "TPOT", "p50", "p99"),
        fuller=str(out / "sweep.html"),
    )


def _html(regime_map: RegimeMap, study: Study, slo: Slo, document: dict[str, object]) -> str:
    from lamella.sim.html_report import HtmlPicture, HtmlTable, render_html
    from lamella.sim.pictures import draw_map, draw_study

    changes = [[str(one), *(str(study.change(row, one)) for row in study.concurrencies)] for one in study.strategies]
    answer, assumptions = document["answer"], document["assumptions"]
    assert isinstance(answer, list)
    assert isinstance(assumptions, list)
    return render_html(
        "Should layerwise transfer be turned on?",
        list(reversed(answer)),
        [
            HtmlTable("At your point, in ms", POINT_HEADS, _point_rows(study, slo)),
            HtmlTable("Change of mean TTFT by users", ["strategy", *map(str, study.concurrencies)], changes),
        ],
        [
            HtmlPicture("Your point over concurrency", lambda buffer: draw_study(study, buffer)),
            HtmlPicture("Where it pays", lambda buffer: draw_map(regime_map, buffer, study.regime)),
        ],
        [*assumptions, f"over the whole map: {regime_map.verdict()}"],
        document,
    )


def _entry(regime_map: RegimeMap, cell: Cell) -> str:
    """The best strategy's letter and what it changes, or "off" and which of those it is."""
    best = regime_map.best(cell)
    letter = ascii_lowercase[regime_map.strategies.index(best)]
    return f"{letter} {regime_map.change(cell, best):+.0%}" if best.layerwise else f"off {letter}"


def _numbers(text: str, what: str, kind: Callable[[str], NumberT]) -> list[NumberT]:
    """Different positive numbers between commas, sorted.

    Raises:
        ValueError: one of them is not, or is more than 10,000.
    """
    found: set[NumberT] = set()
    for part in text.split(","):
        try:
            value = kind(part)
        except ValueError:
            raise ValueError(f"each {what} must be a number, got {part.strip()!r}") from None
        if not value > 0:
            raise ValueError(f"each {what} must be positive, got {part.strip()}")
        check_range(f"each {what}", value, 0, MOST_USERS)
        found.add(value)
    return sorted(found)
