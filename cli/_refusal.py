"""How a verb answers bad input: one sentence on stderr and exit code 2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def refuse_bad_input() -> Iterator[None]:
    """Inside the block a ValueError, or a file that cannot be read, is the caller's mistake and is reported as such.

    Put it around the lines that turn the command line into values, not around the work: a ValueError out of
    the work is our own fault, and must keep its traceback.

    Raises:
        typer.BadParameter: in place of the ValueError or OSError; Typer prints its sentence and exits with 2.
    """
    try:
        yield
    except FileExistsError as mistake:  # of a folder that was to be made
        raise typer.BadParameter(
            f"{mistake.filename} is a file, and a folder is wanted there: name another"
        ) from mistake
    except OSError as mistake:
        where = f"{mistake.filename}: " if mistake.filename else ""
        raise typer.BadParameter(f"{where}{mistake.strerror or mistake}") from mistake
    except ValueError as mistake:
        raise typer.BadParameter(str(mistake)) from mistake
