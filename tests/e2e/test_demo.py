"""The demo says what is wrong with its input before it works for a minute."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "demo.sh"


@pytest.mark.parametrize("named", ["none.jsonl", "."])
def test_a_trace_that_cannot_be_read_is_said_first(named: str, tmp_path: Path) -> None:
    trace = str(tmp_path / named)
    command = ["bash", str(DEMO), str(tmp_path / "out")]
    found = subprocess.run(
        command, env={**os.environ, "LAMELLA_TRACE": trace}, capture_output=True, text=True, timeout=20
    )
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr == f"LAMELLA_TRACE is no file that can be read: {trace}\n"
    assert not (tmp_path / "out").exists()
