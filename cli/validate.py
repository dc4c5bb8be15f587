"""`lamella validate RESULTS`: the model's predictions beside recorded runs of the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from lamella.cli._model import DEFAULT_PROFILE, ProfileOption, open_device
from lamella.cli._outputs import check_outputs, write_text
from lamella.cli._progress import progress_by_name
from lamella.cli._refusal import refuse_bad_input


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command(short_help="Holds the model's predictions against recorded runs.")(validate)


def validate(
    results: Annotated[
        list[Path],
        typer.Argument(
            metavar="RESULTS",
            help="Recorded runs, JSON lines of benchmarks/concurrency/measure.py, also as .xz; several of one engine.",
        ),
    ],
    split: Annotated[
        Path,
        typer.Option(
            help='JSON with two lists of cells, {"calibrate": [...], "test": [...]}, and what is known of "commits".'
        ),
    ] = Path("benchmarks/results/validation-split.json"),
    profile: ProfileOption = DEFAULT_PROFILE,
    overheads: Annotated[
        str | None,
        typer.Option(help="Overheads: a shipped set's name, or a .json file. Left out: measured in calibrated cells."),
    ] = None,
    overheads_out: Annotated[
        Path | None, typer.Option(help="Write the overheads there, for --overheads here and in sweep and simulate.")
    ] = None,
    inputs_wait: Annotated[
        str,
        typer.Option(
            help="What the engine's copy of a joining prompt waited for beside loads: none; turn, of the lane's "
            "copies; load-end, as in runs from before copies took turns."
        ),
    ] = "turn",
    together: Annotated[
        bool,
        typer.Option(help="Predict with what all engines show together, not each engine with what its own cells show."),
    ] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write everything there.")] = None,
) -> None:
    """Replays recorded runs in the model: error by cell and percentile, the side of zero, the regret of its advice.

    An error stands beside the spread of the recording's own repeats. Overheads of the host are measured in one list of
    cells; what counts are the cells of the other.
    """
    from lamella.sim.checks import Where
    from lamella.sim.overheads import open_overheads
    from lamella.sim.recorded import read_recorded
    from lamella.sim.recorded_arms import InputsWait
    from lamella.sim.splits import Split
    from lamella.sim.validate import validate as validate_run

    with refuse_bad_input():
        if inputs_wait not in [way.value for way in InputsWait]:
            known = ", ".join(way.value for way in InputsWait)
            raise ValueError(f"--inputs-wait must be one of {known}, got {inputs_wait!r}")
        check_outputs((json_path, overheads_out), (*results, split, profile, overheads))
        device = open_device(profile, None, extrapolate=False)
        if len({path.resolve() for path in results}) < len(results):
            raise ValueError(f"a run counts once; got {', '.join(map(str, results))}")
        if not split.exists():
            raise ValueError(f"{split} is not there; name with --split which cells to fit on and which to judge by")
        lines = [line for path in results for line in _text(path).splitlines()]
        run = read_recorded(lines, ", ".join(map(str, results)))
        described = _text(split)
        try:
            cells = Split.parse(described)
        except ValueError as error:
            raise ValueError(f"{split}: {error}") from error
        given = None if overheads is None else open_overheads(overheads)
        with progress_by_name("validating", "arms") as told:

            def tell(where: Where, done: int, total: int) -> None:
                told(f"{where.cell} at {where.commit[:7]}" if where.commit else where.cell, done, total)

            waits = InputsWait(inputs_wait)
            found = validate_run(run, device, cells, given, waits, together=together, tell=tell)
    if json_path is not None:
        write_text(json_path, json.dumps(found.document(), indent=1) + "\n")
    if overheads_out is not None:
        write_text(overheads_out, json.dumps(found.overheads.document(), indent=1) + "\n")
    for line in found.lines():
        typer.echo(line)


def _text(path: Path) -> str:
    """The file's text, of an `.xz` file what is packed in it.

    Raises:
        ValueError: it is not text, or not packed as its name says.
        OSError: it cannot be read.
    """
    import lzma

    try:
        return (lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()).decode("utf-8-sig")
    except lzma.LZMAError as error:
        raise ValueError(f"{path} is not an .xz file: {error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file: {error}") from error
