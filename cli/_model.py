"""What `simulate` and `sweep` share: the profile option, files beside the table, and times as people read them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from lamella.cli._refusal import check_writable
from lamella.reference.profile import DeviceProfile
from lamella.sim.profiles import DEFAULT_PROFILE, load_profile, shipped_profiles
from lamella.sim.strategies import Device

ModelOption = Annotated[str | None, typer.Option(help="Model; must be the one that the profile was measured with.")]
ProfileOption = Annotated[
    str, typer.Option(help=f"Shipped profile ({', '.join(shipped_profiles())}) or the path of a .json file.")
]
ExtrapolateOption = Annotated[
    bool, typer.Option("--extrapolate", help="Go on in straight lines where the profile was not measured.")
]
OutOption = Annotated[Path, typer.Option(help="Folder for the JSON and the PNG; made if it is missing.")]
SeedOption = Annotated[int, typer.Option(help="Seed of everything random.")]

__all__ = ["DEFAULT_PROFILE", "ExtrapolateOption", "ModelOption", "OutOption", "ProfileOption", "SeedOption"]


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


def check_out(folder: Path, name: str) -> None:
    """The folder is there, and `write_result` can write to it.

    Raises:
        OSError: it cannot be made, or its files cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for suffix in (".json", ".png"):
        check_writable(folder / f"{name}{suffix}")


def write_result(folder: Path, name: str, document: dict[str, Any], draw: Callable[[Path], None]) -> None:
    """`name`.json and, where matplotlib is there, `name`.png lie in the folder; what was written is said on stdout.

    Call `check_out` before the work.

    Raises:
        OSError: a file cannot be written.
    """
    written = [folder / f"{name}.json"]
    written[0].write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    picture = folder / f"{name}.png"
    try:
        draw(picture)
        written.append(picture)
    except ImportError as missing:
        typer.echo(f"No picture: {missing}", err=True)
    typer.echo(f"Written: {', '.join(map(str, written))}")


def wide_console() -> Console:
    """Where tables go: stdout, not narrower than they are when it is a file or a pipe."""
    return Console(width=max(130, Console().width))


def milliseconds(nanoseconds: float) -> str:
    """As a table shows it."""
    return f"{nanoseconds / 1e6:,.1f}"
