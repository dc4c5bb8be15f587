"""`lamella simulate`: one regime as a closed loop, the strategy asked for beside the others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lamella.cli._model import (
    DEFAULT_PROFILE,
    ExtrapolateOption,
    ModelOption,
    OutOption,
    ProfileOption,
    SeedOption,
    check_out,
    milliseconds,
    open_device,
    wide_console,
    write_result,
)
from lamella.cli._refusal import refuse_bad_input
from lamella.reference.ordering import ORDERS


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command()(simulate)


def simulate(
    hit_tokens: Annotated[int, typer.Option(help="Prompt tokens found in host memory.")] = 15_152,
    new_tokens: Annotated[int, typer.Option(help="Prompt tokens to compute.")] = 768,
    concurrency: Annotated[int, typer.Option(help="Users; each asks again when it has its answer.")] = 4,
    width: Annotated[str, typer.Option(help="Layers per slice: 1, 8, a schedule such as 1,1,2,4, or all.")] = "1",
    order: Annotated[str, typer.Option(help=f"Whose slice goes next across requests: {', '.join(ORDERS)}.")] = "fifo",
    release: Annotated[str, typer.Option(help="whole, first, first:K, jit, jit:Nms or jit:step.")] = "first",
    output_tokens: Annotated[int, typer.Option(help="Tokens to generate for each request.")] = 50,
    requests: Annotated[int, typer.Option(help="Requests per user.")] = 10,
    model: ModelOption = None,
    profile: ProfileOption = DEFAULT_PROFILE,
    extrapolate: ExtrapolateOption = False,
    seed: SeedOption = 0,
    out: OutOption = Path("lamella-out"),
) -> None:
    """Says whether layerwise transfer pays in one regime, before anything is deployed.

    The strategy asked for (width, order, release) is run beside chunk-major loading, recomputing, and the usual others.
    """
    from rich.box import SIMPLE
    from rich.table import Table

    from lamella.sim.report import CLOSED_LOOP, chosen_strategies, draw_outcomes, loop_document
    from lamella.sim.serving import serve, verdict_of
    from lamella.sim.strategies import CANDIDATES, Regime, parse_strategy

    with refuse_bad_input():
        device = open_device(profile, model, extrapolate)
        asked = parse_strategy(f"{order}/{width}/{release}")
        regime = Regime(hit_tokens, new_tokens, concurrency, output_tokens)
        strategies = chosen_strategies([asked], CANDIDATES)
        device.check(regime, strategies)
        if requests < 1:
            raise ValueError(f"requests must be at least 1, got {requests}")
        check_out(out, "simulate")

    outcomes = [serve(device, regime, strategy, requests, seed) for strategy in strategies]
    asked_for = outcomes[strategies.index(asked)]
    verdict = verdict_of(asked_for, [outcome for outcome in outcomes if outcome is not asked_for])
    document = loop_document(device, regime, outcomes, requests, seed, verdict)

    numbers = document["regime"]
    typer.echo(
        f"{concurrency} users on {device.profile.device}, {device.profile.model}: {hit_tokens:,} cached + "
        f"{new_tokens:,} new tokens ({numbers['hit_fraction']:.0%} hit), {output_tokens:,} generated. Alone, transfer "
        f"{milliseconds(numbers['transfer_ns'])} ms, prefill {milliseconds(numbers['prefill_ns'])} ms, T/P "
        f"{numbers['transfer_to_prefill']:.2f}; overlap can save at most {numbers['overlap_ceiling']:.0%}."
    )
    table = Table(box=SIMPLE, title="ms; stall: the engine stood for this request's layers; victim: for others'")
    table.add_column("strategy", no_wrap=True)
    for column in (
        "TTFT",
        "p50",
        "p90",
        "p99",
        "first layer",
        "TPOT",
        "answer",
        "stall",
        "victim",
        "req/s",
        "GPU",
        "link",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for one in outcomes:
        table.add_row(
            ("→ " if one is asked_for else "  ") + str(one.strategy),
            *map(milliseconds, (one.mean_ttft_ns, one.p50_ttft_ns, one.p90_ttft_ns, one.p99_ttft_ns)),
            *map(milliseconds, (one.first_layer_ns, one.mean_tpot_ns, one.mean_end_ns)),
            *map(milliseconds, (one.caused_stall_ns, one.victim_stall_ns)),
            f"{one.requests_per_s:.1f}",
            f"{one.gpu_busy:.0%}",
            f"{one.link_busy:.0%}",
        )
    wide_console().print(table)
    for assumption in CLOSED_LOOP:
        typer.echo(f"Assumed: {assumption}.")
    write_result(out, "simulate", document, lambda path: draw_outcomes(regime, outcomes, path))
    typer.echo(verdict)
