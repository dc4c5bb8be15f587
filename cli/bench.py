"""`lamella bench`: how fast this machine moves KV, alone and through a running server, against raw copies."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from lamella.cli._device import open_device
from lamella.cli._measuring import DeviceOption, JsonOption, LayersOption, RepeatsOption, RowsOption
from lamella.cli._outputs import check_outputs, write_text
from lamella.cli._refusal import refuse_bad_input
from lamella.cli._sizes import parse_measured_bytes

_LOADS = {"idle": "idle", "here": "products here", "elsewhere": "products elsewhere"}


def _loads(named: str) -> tuple[str, ...]:
    unknown = set(named.split(",")) - set(_LOADS)
    if unknown:
        raise ValueError(f"beside names {', '.join(_LOADS)}, got {', '.join(sorted(unknown))}")
    return tuple(_LOADS[load] for load in named.split(","))


def _widths(named: str, num_layers: int) -> tuple[int, ...]:
    if not re.fullmatch(r"\d{1,4}(,\d{1,4})*", named, flags=re.ASCII):
        raise ValueError(f"widths are whole numbers between commas, 0 for chunk-major; got {named!r}")
    widths = tuple(int(width) for width in named.split(","))
    if max(widths) > num_layers:
        raise ValueError(f"widths must be between 0 and {num_layers} layers, got {named}; name others with --widths")
    return widths


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    bench = typer.Typer(
        help="Measures this machine.", no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False
    )
    app.add_typer(bench, name="bench")

    @bench.callback()
    def _verbs() -> None:
        """Measures this machine."""

    @bench.command(short_help="Times retrieves and stores on a device, against raw copies.")
    def transfer(
        device: DeviceOption = "cuda:0",
        size: Annotated[str, typer.Option(help="Bytes of one transfer, such as 1GiB.")] = "1GiB",
        beside: Annotated[str, typer.Option(help="Loads, of idle, here and elsewhere.")] = "idle,here,elsewhere",
        rows: RowsOption = 1024,
        repeats: RepeatsOption = 7,
        short_runs: Annotated[bool, typer.Option(help="Small ranks, small chunks, MLA, HND as well.")] = True,
        host_cost: Annotated[bool, typer.Option(help="What submitting and waiting cost the host.")] = True,
        layers: LayersOption = None,
        profile: Annotated[str, typer.Option(help="Profile to choose copy methods by.")] = "h200-llama-3.1-8b",
        json_path: JsonOption = None,
    ) -> None:
        """Times retrieves and stores of Llama-3.1-8B's KV, idle and beside matrix products, against raw copies."""
        from lamella.cuda_ext.bench_run import BenchScope, run_bench
        from lamella.cuda_ext.bench_transfer import BenchSettings
        from lamella.cuda_ext.rates import EngineRates
        from lamella.sim.profiles import load_profile

        with refuse_bad_input():
            check_outputs((json_path,), (profile,))
            loads = _loads(beside)
            rates = EngineRates.from_profile(load_profile(profile))
            defaults = BenchScope()
            scope = BenchScope(
                num_bytes=parse_measured_bytes(size, copies=4),
                loads=loads,
                small=defaults.small if short_runs else (),
                host_objects=defaults.host_objects if host_cost else (),
                num_layers=layers,
            )
            settings = BenchSettings(repeats=repeats, rows=rows, rates=rates)
            found = open_device(device)
        checkout = Path.cwd() if (Path.cwd() / "cuda_ext" / "csrc").is_dir() else None
        report = run_bench(
            found, scope, settings, ["lamella", *sys.argv[1:]], checkout, lambda line: typer.echo(f"… {line}", err=True)
        )
        for line in report.lines():
            typer.echo(line)
        if json_path is not None:
            write_text(json_path, json.dumps(report.as_mapping(), indent=1) + "\n")

    @bench.command(short_help="Times retrieves through a running cache server.")
    def server(
        folder: Annotated[Path | None, typer.Option(help="The server's; by default as `lamella serve`.")] = None,
        device: DeviceOption = "cuda:0",
        size: Annotated[str, typer.Option(help="Bytes of one retrieve, such as 1GiB.")] = "1GiB",
        side: Annotated[str, typer.Option(help="Whose process moves the bytes: worker or server.")] = "worker",
        form: Annotated[str, typer.Option(help="Of the objects: token or block.")] = "token",
        widths: Annotated[str, typer.Option(help="Layers per slice, 0 for chunk-major.")] = "1,8,32,0",
        beside: Annotated[str, typer.Option(help="Loads, of idle, here and elsewhere.")] = "idle,here",
        rows: RowsOption = 1024,
        repeats: RepeatsOption = 9,
        layers: LayersOption = None,
        json_path: JsonOption = None,
    ) -> None:
        """Stores, looks up and retrieves through a running `lamella serve`, its bytes checked, against raw copies."""
        from lamella.cuda_ext.bench_cases import BLOCK_SHAPE, MAIN_SHAPES
        from lamella.cuda_ext.provenance import provenance_of

        try:
            from lamella.server.bench import ServerBench, ServerBenchSettings
            from lamella.server.connection import ServerLostError
            from lamella.server.endpoint import default_folder
            from lamella.server.frames import RefusedError
            from lamella.server.protocol import TransferSide
        except ImportError as missing:
            typer.echo(f"Error: {missing}: pip install 'lamella[server]'", err=True)
            raise typer.Exit(1) from missing

        with refuse_bad_input():
            check_outputs((json_path,))
            loads = _loads(beside)
            shapes = {"token": MAIN_SHAPES[0], "block": BLOCK_SHAPE}
            if form not in shapes:
                raise ValueError(f"form is token or block, got {form!r}")
            if side not in (known := [one.value for one in TransferSide]):
                raise ValueError(f"side is {' or '.join(known)}, got {side!r}")
            shape = shapes[form]
            if layers is not None:
                shape = replace(shape, geometry=replace(shape.geometry, num_layers=layers))
            settings = ServerBenchSettings(
                transfer_side=TransferSide(side),
                widths=_widths(widths, shape.geometry.num_layers),
                loads=loads,
                repeats=repeats,
                rows=rows,
            )
            num_bytes = parse_measured_bytes(size, copies=4)
            found = open_device(device)
            try:
                measured = ServerBench(folder or default_folder(), found, shape, num_bytes, settings)
            except RefusedError as refused:
                raise ValueError(f"the server refuses: {refused}") from refused
            except (ServerLostError, OSError) as lost:
                why = f"{lost.filename}: {lost.strerror}" if isinstance(lost, OSError) and lost.filename else str(lost)
                raise ValueError(f"no server to measure: {why}; start one with `lamella serve`") from lost
        with measured:
            report = measured.run(lambda line: typer.echo(f"… {line}", err=True))
        for line in report.lines():
            typer.echo(line)
        if json_path is not None:
            whole = {"provenance": asdict(provenance_of(found, ["lamella", *sys.argv[1:]]))} | report.as_mapping()
            write_text(json_path, json.dumps(whole, indent=1) + "\n")
