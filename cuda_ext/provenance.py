"""Where a figure comes from: what a reader needs to judge a measurement or to repeat it."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import lamella
from lamella.cuda_ext.commit import commit_of
from lamella.cuda_ext.device import Device

_WHOLE_PATH = re.compile(r"(?:(?<==)|^)/(?:[^/\s]+/)*([^/\s]+)")
_SOURCES = {".c", ".cpp", ".cu", ".cuh", ".h", ".hpp"}


@dataclass(frozen=True, slots=True)
class Provenance:
    """One run of one program on one machine.

    `native_sources` is `source_digest` of the checkout the program was run in, "" elsewhere;
    `commit` is `commit_of()`.
    """

    date: str
    command: str
    device: str
    device_name: str
    driver: str
    host: str
    cores: int
    python: str
    lamella: str
    packages: dict[str, str]
    native_sources: str
    commit: str


def command_line(command: Sequence[str]) -> str:
    """The program and its arguments as a result names them: of a whole path only the last name, since folders are a
    machine's.

    >>> command_line(["/opt/run.py", "/tmp/out/a.json", "--json=/tmp/b.json", "--link", "24GB/s", "a/b"])
    'run.py a.json --json=b.json --link 24GB/s a/b'
    """  # noqa: D205 - one sentence more than a line
    return " ".join(_WHOLE_PATH.sub(r"\1", argument) for argument in command)


def provenance_of(device: Device, command: Sequence[str], checkout: Path | None = None) -> Provenance:
    """This run, now.

    Args:
        device: the one that is measured.
        command: the program and its arguments.
        checkout: a source tree of Lamella, if that is where this runs from.
    """
    facts = device.facts()
    packages = {}
    for name in ("numpy", "torch", "vllm"):
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return Provenance(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command_line(command),
        device=device.name,
        device_name=facts.name,
        driver=facts.driver,
        host=f"{platform.system()} {platform.release()} {platform.machine()}",
        cores=len(os.sched_getaffinity(0)),
        python=sys.version.split()[0],
        lamella=lamella.__version__,
        packages=packages,
        native_sources=source_digest(checkout / "cuda_ext" / "csrc") if checkout else "",
        commit=commit_of(),
    )


def source_digest(folder: Path) -> str:
    """SHA-256 over the native sources of a folder: names and bytes, in order of name.

    Raises:
        ValueError: a folder without native sources, which would make every digest equal.
    """
    sources = sorted(path for path in folder.rglob("*") if path.suffix in _SOURCES)
    if not sources:
        raise ValueError(f"{folder} holds no native sources")
    digest = hashlib.sha256()
    for path in sources:
        name, content = path.relative_to(folder).as_posix().encode(), path.read_bytes()
        digest.update(len(name).to_bytes(8, "little") + name + len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()
