"""`lamella calibrate`: a profile of this machine's device, for the choice of copy methods and for the simulator."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from lamella.cli._device import open_device
from lamella.cli._measuring import DeviceOption, RepeatsOption
from lamella.cli._outputs import check_writable, write_text
from lamella.cli._refusal import refuse_bad_input
from lamella.cli._sizes import parse_measured_bytes


def register(app: typer.Typer) -> None:
    """Adds the verb."""

    @app.command(short_help="Measures this machine, and writes a profile for the model.")
    def calibrate(
        output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="The profile to write, NAME.json.")],
        device: DeviceOption = "cuda:0",
        base: Annotated[
            str, typer.Option(help="Profile whose model and engine times are carried over.")
        ] = "h200-llama-3.1-8b",
        size: Annotated[str, typer.Option(help="Bytes of a long copy, such as 1GiB.")] = "1GiB",
        repeats: RepeatsOption = 5,
        prefill: Annotated[
            bool | None,
            typer.Option(
                help="Time prefill steps in torch. Default: on a GPU other than the base profile's; slow on a CPU."
            ),
        ] = None,
    ) -> None:
        """Measures the link, every copy method by run length, slices and interference, and writes a profile."""
        from lamella.cuda_ext.calibrate import CalibrationSettings
        from lamella.cuda_ext.calibrate import calibrate as measure
        from lamella.reference.profile import profile_to_mapping
        from lamella.sim.profiles import load_profile

        with refuse_bad_input():
            if output.suffix != ".json" or not output.absolute().parent.is_dir():
                raise ValueError(f"the profile must be a .json file in a folder that exists, got {output}")
            check_writable(output)
            carried = load_profile(base)
            found = open_device(device)
            wanted = found.is_cuda and found.facts().name not in carried.device if prefill is None else prefill
            num_bytes = parse_measured_bytes(size, copies=4)
            settings = CalibrationSettings(num_bytes, repeats, prefill=wanted)
        profile = measure(
            found,
            output.stem,
            carried,
            settings,
            ["lamella", *sys.argv[1:]],
            lambda line: typer.echo(f"… {line}", err=True),
        )
        write_text(output, json.dumps(profile_to_mapping(profile), indent=1) + "\n")
        wire = profile.wire
        typer.echo(
            f"{profile.device}: {wire.h2d_bytes_per_s / 1e9:.2f} GB/s to the device, {wire.d2h_bytes_per_s / 1e9:.2f} "
            f"back, {wire.both_bytes_per_s / 1e9:.2f} each way at once, {wire.slice_fixed_ns} ns a further slice"
        )
        for curve in profile.copies:
            table = ", ".join(
                f"{run >> 10} KiB {rate / 1e9:.1f}"
                for run, rate in zip(curve.run_bytes, curve.bytes_per_s, strict=True)
            )
            least, most = curve.slowdown
            typer.echo(
                f"{curve.method.value}: GB/s by run {table}; {curve.entry_ns} ns a run; computing beside it takes "
                f"{least:.0%} to {most:.0%} longer"
            )
        typer.echo(f"written to {output}; use it with --profile {output}")
