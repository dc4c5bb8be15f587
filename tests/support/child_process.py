"""What a program that a test starts finds: the same modules as the test."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

SUPPORT: Final = Path(__file__).parent
TESTS: Final = SUPPORT.parent


def environment(**more: str) -> dict[str, str]:
    """This process's, with the folders on the path that pytest puts there (`pythonpath` in pyproject.toml)."""
    before = filter(None, [os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(SUPPORT), *before]), **more}
