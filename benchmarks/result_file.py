"""A result file holds all of a result or what it held before: one definition for all programs here."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, document: Any, indent: int | None = 1) -> None:
    """The file holds the document, as JSON.

    Raises:
        OSError: it cannot be written; what it held stays.
        ValueError, TypeError: it is no JSON; what the file held stays.
    """
    write_text(path, json.dumps(document, indent=indent) + "\n")


def write_text(path: Path, text: str) -> None:
    """The file holds the text; a program that ends meanwhile leaves it as it was.

    A link or a device is written in place.

    Raises:
        OSError: it cannot be written; what it held stays.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_text(text, encoding="utf-8")
        return
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        error.filename = str(path)
        raise
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
