"""`lamella replay`: a recorded trace through the model, once for each policy."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lamella.cli._model import DEFAULT_PROFILE, ProfileOption, open_device
from lamella.cli._progress import progress_bar
from lamella.cli._refusal import check_writable, refuse_bad_input
from lamella.sim.outcome import ArmResult, remarks
from lamella.sim.replay import ARMS, ReplayResult, replay
from lamella.sim.report import describe_profile
from lamella.sim.routing import TARGET_LOAD, PoolSizes, choose_instances, route
from lamella.sim.strategies import CHUNK_MAJOR, Device
from lamella.sim.workload import TraceRequest, generate_conversations, load_trace, scale_rate

if TYPE_CHECKING:
    from rich.table import Table


SCHEMA_VERSION = 1
GIB = 1 << 30
MOST_GIB = 1 << 30
ASSUMPTIONS = (
    "a prompt is in its instance's pools from the moment at which its prefill is estimated to be done",
    "loads are submitted at the engine's next poll; stores are not simulated; KV fits",
    "early release decodes with piecewise graphs, the others with full ones",
)


def read_workload(trace: Path | None, limit: int | None, seed: int) -> tuple[list[TraceRequest], str]:
    """The requests and what to call them: the trace, or the one `LAMELLA_TRACE` names, or a generated sample.

    Raises:
        ValueError: a limit below 1, or a broken trace.
        OSError: a trace that cannot be read.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    if trace is None and os.environ.get("LAMELLA_TRACE"):
        trace = Path(os.environ["LAMELLA_TRACE"])
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


def document(result: ReplayResult, device: Device, settings: dict[str, Any], said: list[str]) -> dict[str, Any]:
    """The result as JSON; the same for the same input and settings, to the byte."""
    routing = result.routing
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "lamella.replay",
        "settings": settings,
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
        "assumptions": list(ASSUMPTIONS),
        "remarks": said,
        "verdict": result.verdict,
    }


def _arm_document(result: ArmResult) -> dict[str, Any]:
    quantiles = {name: getattr(result, name)._asdict() for name in ("ttft", "ttft_of_hits", "tpot", "latency")}
    return {**asdict(result), **quantiles, "saturated": result.saturated}


def _print(result: ReplayResult, device: Device, name: str, said: list[str], *, chosen: bool) -> None:
    from rich.console import Console

    console = Console(highlight=False, width=None if os.isatty(1) else 200)
    routing = result.routing
    how = f"chosen for a load of at most {TARGET_LOAD:.0%}" if chosen else "as asked"
    console.print(
        f"{name}: {len(routing.requests):,} requests in {routing.span_ns / 1e9:,.0f} s over {routing.num_instances} "
        f"instances ({how}; estimated GPU {routing.gpu_load:.0%}, link {routing.link_load:.1%}), "
        f"{routing.hit_share:.1%} of prompt tokens cached",
        soft_wrap=True,
    )
    console.print(f"profile {device.profile.name}: {device.profile.regimes()}\n", soft_wrap=True)
    console.print(_table(result))
    console.print()
    for assumption in ASSUMPTIONS:
        console.print(f"- Assumed: {assumption}.", soft_wrap=True)
    for remark in said:
        console.print(f"- {remark}", soft_wrap=True)
    console.print(f"\n{result.verdict}", soft_wrap=True)


def _table(result: ReplayResult) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("arm")
    for heading in ("TTFT mean", "p50", "p90", "p99 ms", "mean vs chunk-major", "hits p50", "TPOT mean", "p99 ms"):
        table.add_column(heading, justify="right")
    for heading in ("GPU %", "stall %", "link %"):
        table.add_column(heading, justify="right")
    baseline = result.arms[ARMS.index(CHUNK_MAJOR)]
    for arm in result.arms:
        change = arm.ttft.mean_ns / baseline.ttft.mean_ns - 1 if baseline.ttft.mean_ns else 0.0
        table.add_row(
            arm.arm + (" (saturated)" if arm.saturated else ""),
            *(_ms(value) for value in arm.ttft),
            "" if arm is baseline else f"{change:+.1%}",
            _ms(arm.ttft_of_hits.p50_ns),
            _ms(arm.tpot.mean_ns),
            _ms(arm.tpot.p99_ns),
            *(f"{100 * share:.1f}" for share in (arm.gpu_busy_share, arm.stall_share, arm.link_busy_share)),
        )
    return table


def _ms(time_ns: int) -> str:
    return f"{time_ns / 1e6:,.1f}"


def register(app: typer.Typer) -> None:
    """Adds the verb."""

    @app.command("replay")
    def replay_command(
        trace: Annotated[
            Path | None,
            typer.Argument(help="Mooncake JSON lines. Left out: the file LAMELLA_TRACE names, or a generated sample."),
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
        width: Annotated[
            int | None, typer.Option(help="Layers a slice. Left out: at least half a millisecond of wire each.")
        ] = None,
        seed: Annotated[int, typer.Option(help="Of the generated sample.")] = 0,
        limit: Annotated[int | None, typer.Option(help="Only the first so many requests.")] = None,
        json_path: Annotated[Path | None, typer.Option("--json", help="Write everything there.")] = None,
    ) -> None:
        """Replay a trace: chunk-major against the layerwise policies and against recomputing."""
        began, began_busy = time.perf_counter(), time.process_time()
        with refuse_bad_input():
            device = open_device(profile, None, extrapolate=False)
            layers = device.profile.num_layers
            if width is not None and not 1 <= width <= layers:
                raise ValueError(f"width must be between 1 and {layers} layers, got {width}")
            requests, name = read_workload(trace, limit, seed)
            requests = scale_rate(requests, rate_scale)
            sizes = PoolSizes(_bytes(pool_gib, "pool_gib"), _bytes(gpu_cache_gib, "gpu_cache_gib"))
            routing = (
                choose_instances(requests, device, sizes)
                if instances is None
                else route(requests, device, instances, sizes)
            )
            if json_path is not None:
                check_writable(json_path)
        with progress_bar("replaying", len(ARMS) * len(routing.requests), every=256) as advance:
            result = replay(routing, device, width, lambda record: advance(1))
        said = remarks(routing, result.arms, device.profile.engine.kv_capacity_tokens)
        settings = {
            "workload": name,
            "instances_chosen": instances is None,
            "rate_scale": rate_scale,
            "pool_gib": pool_gib,
            "gpu_cache_gib": gpu_cache_gib,
            "width": width,
            "limit": limit,
        }
        if json_path is not None:
            json_path.write_text(json.dumps(document(result, device, settings, said), indent=1) + "\n", "utf-8")
        _print(result, device, name, said, chosen=instances is None)
        elapsed, busy = time.perf_counter() - began, time.process_time() - began_busy
        speed = routing.span_ns / 1e9 / busy
        typer.echo(
            f"{elapsed:.1f} s, of which {busy:.1f} s of one core: {speed:,.0f} times real time, all arms", err=True
        )
