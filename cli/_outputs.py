"""What verbs write: checked before the work, and whole at the end of it."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


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


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """What the block writes at the yielded place lies at `path` when it ends; if it fails, `path` is as it was.

    A link, a device, and a file in a folder that takes no new one are written in place.

    Raises:
        OSError: it cannot be written; `filename` is `path`.
    """
    special = path.is_symlink() or (path.exists() and not path.is_file())
    beside = path if special or not os.access(path.parent, os.W_OK) else path.with_name(f".{os.getpid()}{path.suffix}")
    try:
        yield beside
        if beside != path:
            if path.exists():
                shutil.copymode(path, beside)
            os.replace(beside, path)
    except BaseException as failure:
        if beside != path:
            beside.unlink(missing_ok=True)
        if isinstance(failure, OSError):
            failure.filename = str(path)
        raise


def write_text(path: Path, text: str) -> None:
    """The file holds the text (`whole_file`).

    Raises:
        OSError: it cannot be written; what it held stays.
    """
    with whole_file(path) as place:
        place.write_text(text, encoding="utf-8")
