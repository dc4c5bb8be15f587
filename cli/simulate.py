"""`lamella simulate`: one regime served by the strategy asked for, beside the others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from lamella.cli._config import ConfigOption
from lamella.cli._durations import parse_time_ns
from lamella.cli._model import (
    DEFAULT_PROFILE,
    ExtrapolateOption,
    ModelOption,
    OutOption,
    OverheadsOption,
    ProfileOption,
    SeedOption,
    check_out,
    check_table,
    milliseconds,
    write_results,
)
from lamella.cli._outputs import whole_file
from lamella.cli._progress import progress_by_name
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
    RanksOption,
    SharingOption,
    SloTpotOption,
    SloTtftOption,
    TierOption,
    describe_regime,
    open_derived_device,
    parse_hardware,
    parse_regime,
    parse_slo,
    within_slo,
)
from lamella.cli._tables import print_table
from lamella.reference.ordering import ORDERS
from lamella.sim.bounds import MOST_REQUESTS, check_range, check_seed

if TYPE_CHECKING:
    from lamella.sim.arrivals import Arrivals
    from lamella.sim.serving import Outcome, Slo


FILES: Final = ("simulate.json", "simulate.html", "simulate.trace.json", "simulate.png")
QUESTION_TOKENS: Final = 64
HEADS: Final = (
    *("strategy", "TTFT", "p50", "p90", "p99", "first layer", "TPOT", "answer", "stall", "victim", "req/s"),
    *("goodput/s", "in time", "GPU", "link"),
)


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command(short_help="Runs one setting beside the usual others: does it pay?")(simulate)


def simulate(
    prompt_tokens: PromptOption = None,
    hit: HitOption = None,
    hit_tokens: HitTokensOption = None,
    new_tokens: NewTokensOption = None,
    concurrency: ConcurrencyOption = 4,
    width: Annotated[
        str, typer.Option(help="Layers per slice: 1, 8, a schedule such as 1,1,2,4, all, or auto: chosen by request.")
    ] = "1",
    order: Annotated[str, typer.Option(help=f"Whose slice goes next across requests: {', '.join(ORDERS)}.")] = "fifo",
    release: Annotated[str, typer.Option(help="whole, first, first:K, jit, jit:Nms, jit:step or weighed.")] = "first",
    output_tokens: OutputTokensOption = 50,
    requests: Annotated[int, typer.Option(help="Requests per user.")] = 10,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Requests come at random, so many a second, whatever the engine does: concurrency × requests of them."
        ),
    ] = None,
    turns: Annotated[
        int | None, typer.Option(help="Users have conversations of so many turns; each sends all that was said before.")
    ] = None,
    think: Annotated[
        str | None,
        typer.Option(help="From an answer to the same user's next question, such as 5s; with --turns a mean."),
    ] = None,
    question_tokens: Annotated[
        int, typer.Option(help="Tokens of each later turn of a conversation.")
    ] = QUESTION_TOKENS,
    link: LinkOption = None,
    compute_speed: ComputeSpeedOption = 1.0,
    tier: TierOption = None,
    ranks: RanksOption = None,
    sharing: SharingOption = "serial",
    slo_ttft: SloTtftOption = None,
    slo_tpot: SloTpotOption = None,
    model: ModelOption = None,
    profile: ProfileOption = DEFAULT_PROFILE,
    overheads: OverheadsOption = None,
    full_graphs: FullGraphsOption = "before",
    prefill_graphs: PrefillGraphsOption = 0,
    before_batch: BeforeBatchOption = False,
    extrapolate: ExtrapolateOption = False,
    table: Annotated[Path | None, typer.Option(help="Every request of every strategy, as .csv or .parquet.")] = None,
    seed: SeedOption = 0,
    out: OutOption = Path("lamella-out"),
    config: ConfigOption = None,
) -> None:
    """Says whether layerwise transfer pays in one regime, before anything is deployed.

    The strategy asked for (width, order, release) is run beside chunk-major loading, recomputing, and the usual others.
    Its run is also written as a trace, which `lamella explain` and Perfetto read.
    """
    import json

    from lamella.reference.chrome_trace import to_chrome_trace
    from lamella.sim.html_report import HtmlPicture, HtmlTable, render_html
    from lamella.sim.pictures import draw_outcomes
    from lamella.sim.record_run import record_world
    from lamella.sim.report import chosen_strategies, simulate_document
    from lamella.sim.request_table import request_rows, write_requests
    from lamella.sim.serving import run_world, summarise, verdict_of
    from lamella.sim.strategies import AUTO, CANDIDATES, parse_strategy

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
        if width == "auto" and (order, release) != ("fifo", "first"):
            raise ValueError(
                f"auto chooses width and release itself, one load after another; got {order} and {release}"
            )
        asked = AUTO if width == "auto" else parse_strategy(f"{order}/{width}/{release}")
        regime = parse_regime(prompt_tokens, hit, hit_tokens, new_tokens, concurrency, output_tokens)
        arrivals = _arrivals(rate, turns, think, question_tokens)
        slo = parse_slo(slo_ttft, slo_tpot)
        hardware, way = parse_hardware(tier, ranks, sharing)
        strategies = chosen_strategies([asked], CANDIDATES)
        device.check(arrivals.largest(regime), strategies)
        check_range("requests", requests, 1, MOST_REQUESTS)
        check_seed(seed)
        check_out(out, FILES)
        if table is not None:
            check_table(table)

    outcomes: list[Outcome] = []
    rows: list[tuple[Any, ...]] = []
    trace: dict[str, Any] = {}
    with progress_by_name("simulating", "strategies") as tell:
        for done, strategy in enumerate(strategies):
            tell(str(strategy), done, len(strategies))
            world = run_world(device, regime, strategy, requests, seed, arrivals, hardware, keep=strategy == asked)
            outcomes.append(summarise(strategy, world, slo))
            if table is not None:
                rows += request_rows(str(strategy), world.records)
            if strategy == asked:
                said = (f"Assumed: {device.overheads_said}.",) if device.overheads_said else ()
                recording = record_world(world, device.profile.name, str(strategy), device.profile.num_layers, said)
                trace = to_chrome_trace(recording)
    asked_for = outcomes[strategies.index(asked)]
    verdict = verdict_of(asked_for, [outcome for outcome in outcomes if outcome is not asked_for])
    come, who = str(arrivals), None
    if rate is not None:
        count = requests * regime.concurrency
        come += f": {count:,} of them, so what a longer stream would pile up is not in the answer (--requests)"
        who = f"{count:,} requests at {rate:g} a second"
    document = simulate_document(device, regime, outcomes, requests, seed, come, way, slo, verdict, hardware)

    described = describe_regime(device, regime, hardware, who)
    typer.echo(described)
    lines = [_row(one, slo, marked=one is asked_for) for one in outcomes]
    _print(lines, out)
    for assumption in document["assumptions"]:
        typer.echo(f"Assumed: {assumption}.")
    page = render_html(
        "Does layerwise transfer pay?",
        [verdict, described],
        [HtmlTable("Each strategy, in ms", HEADS, lines)],
        [HtmlPicture("Where the time to first token goes", lambda buffer: draw_outcomes(regime, outcomes, buffer))],
        document["assumptions"],
        document,
    )
    if table is not None:
        with whole_file(table) as place:
            write_requests(place, rows)
        typer.echo(f"Written: {table}")
    write_results(
        out,
        {"simulate.json": document, "simulate.html": page, "simulate.trace.json": json.dumps(trace) + "\n"},
        {"simulate.png": lambda path: draw_outcomes(regime, outcomes, path)},
    )
    typer.echo(verdict)


def _arrivals(rate: float | None, turns: int | None, think: str | None, question_tokens: int) -> Arrivals:
    """How requests come.

    Raises:
        ValueError: options that do not go together, or impossible values.
    """
    from lamella.sim.arrivals import ClosedLoop, Conversations, Poisson

    if turns is None and question_tokens != QUESTION_TOKENS:
        raise ValueError(
            f"--question-tokens is of the turns of a conversation: add --turns, got {question_tokens} alone"
        )
    think_ns = None if think is None else parse_time_ns(think)
    if rate is not None:
        if turns is not None or think_ns is not None:
            raise ValueError("--rate says when requests come; --turns and --think let users decide: give one of them")
        return Poisson(rate)
    if turns is not None:
        chosen = Conversations(turns, question_tokens)
        return chosen if think_ns is None else Conversations(turns, question_tokens, think_ns)
    return ClosedLoop(think_ns or 0)


def _row(one: Outcome, slo: Slo, *, marked: bool) -> list[str]:
    return [
        ("→ " if marked else "  ") + str(one.strategy),
        *map(milliseconds, (one.mean_ttft_ns, one.p50_ttft_ns, one.p90_ttft_ns, one.p99_ttft_ns)),
        *map(milliseconds, (one.first_layer_ns, one.mean_tpot_ns, one.mean_end_ns)),
        *map(milliseconds, (one.caused_stall_ns, one.victim_stall_ns)),
        f"{one.requests_per_s:.1f}",
        *within_slo(slo, one.goodput_per_s, one.slo_met),
        f"{one.gpu_busy:.0%}",
        f"{one.link_busy:.0%}",
    ]


def _print(rows: list[list[str]], out: Path) -> None:
    print_table(
        HEADS,
        rows,
        title="ms; stall: the engine stood for this request's layers; victim: for others'",
        spare=("link", "GPU", "p90", "victim", "p50", "first layer", "req/s", "stall", "TPOT"),
        fuller=str(out / "simulate.html"),
    )
