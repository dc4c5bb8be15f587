"""What the verbs of the model share: the profile option, files beside the table, and times as people read them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from lamella.cli._outputs import check_writable, whole_file, write_text
from lamella.reference.profile import DeviceProfile
from lamella.sim.overheads import shipped_overheads
from lamella.sim.profiles import DEFAULT_PROFILE, load_profile, shipped_profiles
from lamella.sim.request_table import check_table_path
from lamella.sim.strategies import Device

ModelOption = Annotated[str | None, typer.Option(help="Model; must be the one that the profile was measured with.")]
ProfileOption = Annotated[
    str, typer.Option(help=f"Shipped profile ({', '.join(shipped_profiles())}) or the path of a .json file.")
]
ExtrapolateOption = Annotated[
    bool, typer.Option("--extrapolate", help="Go on in straight lines where the profile was not measured.")
]
OverheadsOption = Annotated[
    str | None,
    typer.Option(
        help="An engine's host thread before the device: a measured set that is shipped "
        f"({', '.join(shipped_overheads()) or 'none yet'}), or a .json file of lamella validate --overheads-out."
    ),
]
OutOption = Annotated[Path, typer.Option(help="Folder for what is written; made if it is missing.")]
SeedOption = Annotated[int, typer.Option(help="Seed of everything random.")]

__all__ = [
    "DEFAULT_PROFILE",
    "ExtrapolateOption",
    "ModelOption",
    "OutOption",
    "OverheadsOption",
    "ProfileOption",
    "SeedOption",
]


def open_device(profile: str, model: str | None, extrapolate: bool) -> Device:
    """The device of a profile.

    Raises:
        ValueError: no such profile, or it was measured with another model.
    """
    found: DeviceProfile = load_profile(profile)
    if model is not None and model.lower() != found.model.lower():
        raise ValueError(
            f"the profile {found.name} has step times of {found.model}, not of {model}; "
            f"pass --profile with one measured with {model}"
        )
    return Device(found, extrapolate=extrapolate)


def check_out(folder: Path, names: tuple[str, ...]) -> None:
    """The folder is there, and files of these names can be written into it.

    Raises:
        OSError: it cannot be made, or its files cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        check_writable(folder / name)


def check_table(path: Path) -> None:
    """A table of requests can be written there.

    Raises:
        ValueError: a form that is not known, or that needs a package which is not there.
        OSError: it cannot be written.
    """
    try:
        check_table_path(path)
    except ImportError as missing:
        raise ValueError(str(missing)) from missing
    check_writable(path)


def write_results(folder: Path, documents: Mapping[str, Any], pictures: Mapping[str, Callable[[Path], object]]) -> None:
    """Documents lie in the folder as JSON and texts as they are, pictures where matplotlib is; said on stdout.

    Call `check_out` before the work.

    Raises:
        OSError: a file cannot be written.
    """
    written: list[Path] = []
    for name, content in documents.items():
        text = content if isinstance(content, str) else json.dumps(content, indent=1) + "\n"
        written.append(folder / name)
        write_text(written[-1], text)
    for name, draw in pictures.items():
        try:
            with whole_file(folder / name) as place:
                draw(place)
        except ImportError as missing:
            typer.echo(f"No picture: {missing}", err=True)
            break
        written.append(folder / name)
    typer.echo(f"Written: {', '.join(map(str, written))}")


def milliseconds(nanoseconds: float) -> str:
    """As a table shows it."""
    return f"{nanoseconds / 1e6:,.1f}"
