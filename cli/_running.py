"""Where cells are computed: `--engine`, `--workers` and `--journal`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from lamella.sim.parallel import JournalError, Runner, Running

WORTH_PROCESSES_S: Final = 4.0
"""Below this much estimated work, starting processes takes longer than they save."""

EngineOption = Annotated[
    str, typer.Option(help="Where cells are computed: serial, processes, ray, or auto (by the amount of work).")
]
WorkersOption = Annotated[int | None, typer.Option(help="Processes. Default: one a core.")]
JournalOption = Annotated[
    Path | None, typer.Option(help="Folder that keeps finished cells, so that the same run can be resumed.")
]


def parse_running(engine: str, workers: int | None, work_s: float) -> Running:
    """Where cells run.

    Raises:
        ValueError: no such engine, fewer than 1 worker, or an engine that needs a package which is not there.
    """
    names = [runner.value for runner in Runner]
    if engine == "auto":
        worth = work_s > WORTH_PROCESSES_S and (os.cpu_count() or 1) > 1
        return Running(Runner.PROCESSES if worth or workers else Runner.SERIAL, workers)
    if engine not in names:
        raise ValueError(f"engine must be one of auto, {', '.join(names)}; got {engine!r}")
    if engine == Runner.RAY.value:
        try:
            import ray  # noqa: F401
        except ImportError as missing:
            raise ValueError("sweeps on a cluster need Ray: pip install 'lamella[ray]'") from missing
    return Running(Runner(engine), workers)


@contextmanager
def refuse_foreign_journal() -> Iterator[None]:
    """Inside the block a journal of another run is the caller's mistake, and one sentence.

    Raises:
        typer.BadParameter: in place of the JournalError.
    """
    try:
        yield
    except JournalError as mistake:
        raise typer.BadParameter(str(mistake)) from mistake


@contextmanager
def stoppable(journal: Path | None) -> Iterator[None]:
    """Inside the block SIGTERM ends the work as ctrl-C does: its processes end with it, and one line says what is kept.

    Raises:
        SystemExit: of SIGTERM, 128 + its number; one that somebody else handles is left to him.
    """

    def stop(signum: int, frame: Any) -> None:
        raise SystemExit(128 + signum)

    mine = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if mine:
        signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        kept = "nothing is kept; with --journal FOLDER finished cells would be"
        if journal is not None:
            kept = f"finished cells are in {journal}, and the same command goes on from there"
        sys.stderr.write(f"Stopped: {kept}.\n")
        raise
    finally:
        if mine:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
