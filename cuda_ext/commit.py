"""Which commit a measurement was made with: one rule for every program that writes one down."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

VARIABLE: Final = "LAMELLA_COMMIT"
BUILT_FROM: Final = "BUILT_FROM"
UNKNOWN: Final = "unknown"
HOME: Final = Path(__file__).resolve().parents[1]
"""Where this package lies: a checkout, or the `lamella` folder of an installation."""


def commit_of(home: Path = HOME, environ: Mapping[str, str] = os.environ) -> str:
    """The commit of the code that runs; "unknown" where nothing says it.

    The first of these that says one: the variable `LAMELLA_COMMIT`; the file `BUILT_FROM` in the installed package,
    which whoever builds an installation from a checkout writes there; the checkout itself, with "-dirty" behind the
    hash where something of it is not committed.

    Args:
        home: of the package.
        environ: of the process.
    """
    for said in (environ.get(VARIABLE, ""), _read(home / BUILT_FROM), _of_checkout(home)):
        if said.strip():
            return said.strip()
    return UNKNOWN


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _of_checkout(home: Path) -> str:
    if not (home / ".git").exists():  # else git would look in the folders above
        return ""
    command = ["git", "-C", str(home), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
