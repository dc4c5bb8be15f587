"""`lamella replay`: a recorded trace through the model, once for each policy."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from lamella.cli._config import ConfigOption
from lamella.cli._model import DEFAULT_PROFILE, ProfileOption, check_table
from lamella.cli._outputs import check_outputs, whole_file, write_text
from lamella.cli._progress import progress_bar
from lamella.cli._refusal import refuse_bad_input
from lamella.cli._regime import (
    ComputeSpeedOption,
    FullGraphsOption,
    LinkOption,
    SloTpotOption,
    SloTtftOption,
    open_derived_device,
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
from lamella.cli._tables import NOTHING, print_table
from lamella.reference.chrome_trace import to_chrome_trace
from lamella.sim.bounds import check_seed
from lamella.sim.outcome import ArmResult, remarks
from lamella.sim.record_run import record_world
from lamella.sim.replay import (
    ARMS,
    ReplayCells,
    ReplayResult,
    ReplaySetting,
    name_arm,
    plan_replay,
    record_instance,
    replay_cells,
)
from lamella.sim.report import describe_profile, profile_lines
from lamella.sim.request_table import write_requests
from lamella.sim.routing import TARGET_LOAD, PoolSizes, Routing, choose_instances, route
from lamella.sim.serving import Slo
from lamella.sim.strategies import CHUNK_MAJOR, Device
from lamella.sim.workload import TraceRequest, generate_conversations, load_trace, scale_rate

SCHEMA_VERSION = 2
REQUEST_S = 0.4e-3
"""Seconds of one core for a request under one arm: an order of magnitude."""
GIB = 1 << 30
MOST_GIB = 1 << 30
NO_HOST = "a replay has no engine's host thread"
ASSUMPTIONS = (
    "a prompt is in its instance's pools from the moment at which its prefill is estimated to be done",
    "loads are submitted at the engine's next poll, and wait for room for their KV; stores are not simulated",
)


def trace_file(named: Path | None) -> Path | None:
    """The trace: the one named, or the one that `LAMELLA_TRACE` names; None for the generated sample."""
    from_environment = os.environ.get("LAMELLA_TRACE")
    return Path(from_environment) if named is None and from_environment else named


def read_workload(trace: Path | None, limit: int | None, seed: int) -> tuple[list[TraceRequest], str]:
    """The requests and what to call them: the trace, or the one `LAMELLA_TRACE` names, or a generated sample.

    Raises:
        ValueError: a limit below 1, a negative seed, or a broken trace.
        OSError: a trace that cannot be read.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    check_seed(seed)
    trace = trace_file(trace)
    if trace is None:
        sample = generate_conversations(seed)[:limit]
        return sample, f"a generated sample of conversations (no trace given; seed {seed})"
    return load_trace(trace, limit), trace.name


def _bytes(gib: float, name: str) -> int:
    """So many GiB.

    Raises:
        ValueError: below 0, or more than any machine has.
    """
    if not 0 <= gib <= MOST_GIB:
        raise ValueError(f"{name} must be between 0 and {MOST_GIB:,}, got {gib:g}")
    return round(gib * GIB)


def document(
    result: ReplayResult, device: Device, settings: dict[str, Any], slo: Slo, said: list[str]
) -> dict[str, Any]:
    """The result as JSON; the same for the same input and settings, to the byte, however it was computed."""
    routing = result.routing
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "lamella.replay",
        "settings": settings,
        "slo": asdict(slo),
        "profile": describe_profile(device.profile, extrapolate=False),
        "routing": {
            "instances": routing.num_instances,
            "requests": len(routing.requests),
            "span_ns": routing.span_ns,
            "hit_share": routing.hit_share,
            "loaded_tokens": sum(request.loaded_tokens for request in routing.requests),
            "estimated_gpu_load": routing.gpu_load,
            "estimated_link_load": routing.link_load,
            "excluded": [request._asdict() for request in routing.excluded],
        },
        "arms": [_arm_document(arm) for arm in result.arms],
        "assumptions": [*profile_lines(device, NO_HOST), *ASSUMPTIONS],
        "remarks": said,
        "verdict": result.verdict,
    }


def _arm_document(result: ArmResult) -> dict[str, Any]:
    quantiles = {name: getattr(result, name)._asdict() for name in ("ttft", "ttft_of_hits", "tpot", "latency")}
    return {**asdict(result), **quantiles, "saturated": result.saturated}


HEADS = (
    *("arm", "TTFT mean", "p50", "p90", "p99", "change", "p50 of hits", "TPOT mean", "TPOT p99"),
    *("goodput/s", "in time", "GPU %", "stall %", "link %"),
)


def _print(result: ReplayResult, device: Device, slo: Slo, head: str, said: list[str]) -> None:
    typer.echo(head)
    print_table(
        HEADS,
        _rows(result, slo),
        title="ms; change: of the mean TTFT, against chunk-major",
        spare=("link %", "stall %", "GPU %", "TPOT p99", "p90", "p50 of hits", "p50", "TPOT mean"),
        fuller="--html FILE",
    )
    for assumption in (*profile_lines(device, NO_HOST), *ASSUMPTIONS):
        typer.echo(f"Assumed: {assumption}.")
    for remark in said:
        typer.echo(f"Remark: {remark}")


def _head(routing: Routing, name: str, *, chosen: bool) -> str:
    how = f"chosen for a load of at most {TARGET_LOAD:.0%}" if chosen else "as asked"
    over = f"{routing.num_instances} instance{'s' if routing.num_instances > 1 else ''}"
    return (
        f"{name}: {len(routing.requests):,} requests in {routing.span_ns / 1e9:,.0f} s over {over} ({how}; estimated "
        f"GPU {routing.gpu_load:.0%}, link {routing.link_load:.1%}), {routing.hit_share:.1%} of prompt tokens cached"
    )


def _rows(result: ReplayResult, slo: Slo) -> list[list[str]]:
    baseline = result.arms[ARMS.index(CHUNK_MAJOR)]
    rows = []
    for arm in result.arms:
        change = arm.ttft.mean_ns / baseline.ttft.mean_ns - 1 if baseline.ttft.mean_ns else 0.0
        rows.append(
            [
                arm.arm + (" (saturated)" if arm.saturated else ""),
                *(_ms(value) for value in arm.ttft),
                NOTHING if arm is baseline else f"{change:+.1%}",
                _ms(arm.ttft_of_hits.p50_ns),
                _ms(arm.tpot.mean_ns),
                _ms(arm.tpot.p99_ns),
                *within_slo(slo, arm.goodput_per_s, arm.slo_met),
                *(f"{100 * share:.1f}" for share in (arm.gpu_busy_share, arm.stall_share, arm.link_busy_share)),
            ]
        )
    return rows


def _page(computed: ReplayCells, slo: Slo, head: str, found: dict[str, Any]) -> str:
    from lamella.sim.html_report import HtmlPicture, HtmlTable, render_html
    from lamella.sim.pictures import draw_distributions

    return render_html(
        "Does layerwise transfer pay on this trace?",
        [computed.result.verdict, head],
        [HtmlTable("Each arm", HEADS, _rows(computed.result, slo))],
        [
            HtmlPicture(
                "Time to first token",
                lambda buffer: draw_distributions(computed.ttft_ns, "time to first token", buffer),
            )
        ],
        [*found["assumptions"], *found["remarks"]],
        found,
    )


def _ms(time_ns: int) -> str:
    return f"{time_ns / 1e6:,.1f}"


def register(app: typer.Typer) -> None:
    """Adds the verb."""

    @app.command("replay", short_help="Replays a trace: does layerwise transfer pay on it?")
    def replay_command(
        trace: Annotated[
            Path | None,
            typer.Argument(
                metavar="TRACE",
                help="Mooncake JSON lines. Left out: the file LAMELLA_TRACE names, or a generated sample.",
            ),
        ] = None,
        instances: Annotated[
            int | None,
            typer.Option(help=f"GPUs that serve it. Left out: enough for an estimated load of {TARGET_LOAD:.0%}."),
        ] = None,
        rate_scale: Annotated[float, typer.Option(help="Requests arrive so many times as fast.")] = 1.0,
        pool_gib: Annotated[float, typer.Option(help="Host pool of each instance.")] = 256.0,
        gpu_cache_gib: Annotated[
            float, typer.Option(help="Prefix cache of each engine; its hits need no load. 0: every hit is loaded.")
        ] = 0.0,
        profile: ProfileOption = DEFAULT_PROFILE,
        link: LinkOption = None,
        compute_speed: ComputeSpeedOption = 1.0,
        full_graphs: FullGraphsOption = "before",
        slo_ttft: SloTtftOption = None,
        slo_tpot: SloTpotOption = None,
        width: Annotated[
            int | None, typer.Option(help="Layers a slice. Left out: at least half a millisecond of wire each.")
        ] = None,
        engine: EngineOption = "auto",
        workers: WorkersOption = None,
        journal: JournalOption = None,
        seed: Annotated[int, typer.Option(help="Of the generated sample.")] = 0,
        limit: Annotated[int | None, typer.Option(help="Only the first so many requests.")] = None,
        json_path: Annotated[Path | None, typer.Option("--json", help="Write everything there.")] = None,
        html: Annotated[Path | None, typer.Option(help="Write a page with a picture there.")] = None,
        table: Annotated[Path | None, typer.Option(help="Every request of every arm, as .csv or .parquet.")] = None,
        trace_out: Annotated[
            Path | None, typer.Option(help="One instance under one arm as a trace, for explain and Perfetto.")
        ] = None,
        trace_arm: Annotated[
            str | None, typer.Option(help="Which arm, as the table names it. Default: the best.")
        ] = None,
        trace_instance: Annotated[int, typer.Option(help="Which instance, from 0.")] = 0,
        config: ConfigOption = None,
    ) -> None:
        """Replays a trace: chunk-major against the layerwise policies and against recomputing."""
        began, began_busy = time.perf_counter(), _busy_s()
        with refuse_bad_input():
            device = open_derived_device(profile, None, link, compute_speed, extrapolate=False, full_graphs=full_graphs)
            layers = device.profile.num_layers
            if width is not None and not 1 <= width <= layers:
                raise ValueError(f"width must be between 1 and {layers} layers, got {width}")
            slo = parse_slo(slo_ttft, slo_tpot)
            requests, name = read_workload(trace, limit, seed)
            requests = scale_rate(requests, rate_scale)
            sizes = PoolSizes(_bytes(pool_gib, "pool_gib"), _bytes(gpu_cache_gib, "gpu_cache_gib"))
            routing = (
                choose_instances(requests, device, sizes)
                if instances is None
                else route(requests, device, instances, sizes)
            )
            arms = {name_arm(strategy, device, width): strategy for strategy in ARMS}
            if trace_arm is not None and trace_out is None:
                raise ValueError(f"trace_arm {trace_arm!r} is of the trace that is written: add --trace-out FILE")
            if trace_arm is not None and trace_arm not in arms:
                raise ValueError(f"trace_arm must be one of {', '.join(arms)}; got {trace_arm!r}")
            if trace_out is not None and not 0 <= trace_instance < routing.num_instances:
                raise ValueError(
                    f"trace_instance must be between 0 and {routing.num_instances - 1}, got {trace_instance}"
                )
            if table is not None:
                check_table(table)
            check_outputs((json_path, html, table, trace_out), (trace_file(trace), profile, config))
            how = parse_running(engine, workers, len(ARMS) * len(routing.requests) * REQUEST_S)
            if journal is not None:
                journal.mkdir(parents=True, exist_ok=True)
        setting = ReplaySetting(routing, device, width, slo, table is not None)
        bar = progress_bar("replaying", len(plan_replay(routing)))
        with refuse_foreign_journal(), stoppable(journal), bar as advance:
            where = None if journal is None else journal / "replay.jsonl"
            computed = replay_cells(setting, replace(how, journal=where, on_done=advance))
        result = computed.result
        said = remarks(routing, result.arms, device.profile.engine.kv_capacity_tokens)
        settings = {
            "workload": name,
            "instances_chosen": instances is None,
            "rate_scale": rate_scale,
            "pool_gib": pool_gib,
            "gpu_cache_gib": gpu_cache_gib,
            "full_graphs": full_graphs,
            "width": width,
            "limit": limit,
        }
        found = document(result, device, settings, slo, said)
        head = _head(routing, name, chosen=instances is None)
        if json_path is not None:
            write_text(json_path, json.dumps(found, indent=1) + "\n")
        if html is not None:
            write_text(html, _page(computed, slo, head, found))
        if table is not None:
            with whole_file(table) as place:
                write_requests(place, computed.rows)
        if trace_out is not None:
            best = min(result.arms, key=lambda arm: arm.ttft.mean_ns).arm
            strategy = arms[trace_arm or best]
            world = record_instance(strategy, routing, device, trace_instance, width)
            title = f"{device.profile.name}, {name}, instance {trace_instance}"
            recording = record_world(world, title, trace_arm or best, layers)
            write_text(trace_out, json.dumps(to_chrome_trace(recording)) + "\n")
        _print(result, device, slo, head, said)
        if written := [str(path) for path in (json_path, html, table, trace_out) if path is not None]:
            typer.echo(f"Written: {', '.join(written)}")
        typer.echo(result.verdict)
        elapsed, busy = time.perf_counter() - began, _busy_s() - began_busy
        speed = routing.span_ns / 1e9 / busy
        typer.echo(
            f"{elapsed:.1f} s, of which {busy:.1f} s of one core: {speed:,.0f} times real time, all arms", err=True
        )


def _busy_s() -> float:
    """Seconds of processors that this process and those it has started took."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
