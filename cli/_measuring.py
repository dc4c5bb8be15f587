"""Options of the verbs that measure this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lamella.cli._sizes import MOST_LAYERS

DeviceOption = Annotated[str, typer.Option(help='"cpu" or "cuda:N".')]
RepeatsOption = Annotated[int, typer.Option(min=1, max=1000, help="Runs of each kind that count.")]
RowsOption = Annotated[int, typer.Option(min=1, max=65_536, help="Rows of the matrix products beside.")]
LayersOption = Annotated[
    int | None, typer.Option(min=1, max=MOST_LAYERS, help="Layers of every shape, for a quick look.")
]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Write every repeat to this file.")]
