"""How a verb answers bad input: one sentence on stderr and exit code 2."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

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
    except OSError as mistake:
        where = f"{mistake.filename}: " if mistake.filename else ""
        raise typer.BadParameter(f"{where}{mistake.strerror or mistake}") from mistake
    except ValueError as mistake:
        raise typer.BadParameter(str(mistake)) from mistake


def check_writable(path: Path) -> None:
    """The file can be written at the end of the work: what is there keeps its bytes, and nothing is left that was not.

    Raises:
        OSError: it cannot; its folder is not there, or it is a folder itself.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(
            errno.ENOENT, f"No such file or directory: make the folder {path.parent} first", str(path)
        )
    was_there = path.exists()
    with path.open("ab"):
        pass
    if not was_there:
        path.unlink()


def check_outputs(outputs: Iterable[Path | None], reads: Iterable[Path | str | None] = ()) -> None:
    """Each output can be written (`check_writable`), and none takes the place of another or of what the verb reads.

    Args:
        outputs: files; None is one that was not asked for.
        reads: files, and names of what is shipped, which are no files.

    Raises:
        ValueError: an output that is read, or named twice.
        OSError: one that cannot be written.
    """
    kept = {Path(read).resolve() for read in reads if read is not None and Path(read).is_file()}
    taken: set[Path] = set()
    for path in outputs:
        if path is None:
            continue
        check_writable(path)
        if (real := path.resolve()) in kept:
            raise ValueError(f"{path} is read here, and writing there would lose it; name another file")
        if real in taken:
            raise ValueError(f"{path} is to hold two results, and would keep the last; name a file for each")
        if path.is_file() or not path.exists():  # not a device such as /dev/null
            taken.add(real)
