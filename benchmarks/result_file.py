"""A result file holds all of a result or what it held before, as what the verbs of `lamella` write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lamella.cli._outputs import write_text

__all__ = ["write_json", "write_text"]


def write_json(path: Path, document: Any, indent: int | None = 1) -> None:
    """The file holds the document, as JSON.

    Raises:
        OSError: it cannot be written; what it held stays.
        ValueError, TypeError: it is no JSON; what the file held stays.
    """
    write_text(path, json.dumps(document, indent=indent) + "\n")
