"""What one process stored, another loads: every width and release, bytes and answers, from a folder they share."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from child_process import environment
from with_vllm.other_process import HIT, answer_in


def rows_of(mode: str, model: Path, folder: Path) -> list[dict[str, Any]]:
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("other_process.py")), mode, str(model), str(folder)],
        capture_output=True,
        text=True,
        timeout=280,
        env=environment(),
    )
    lines = [line for line in ran.stdout.splitlines() if line.startswith("ROWS ")]
    assert lines, ran.stderr[-3000:]
    rows: list[dict[str, Any]] = json.loads(lines[0].removeprefix("ROWS "))
    return rows


def test_every_width_and_release_loads_what_another_process_stored(deep_llama: Path, tmp_path: Path) -> None:
    """Against the storing engine's own prefix-cache hit: equal bytes, and answers as near as its own repetitions."""
    folder = tmp_path / "objects"
    folder.mkdir(mode=0o700)
    own = rows_of("store", deep_llama, folder)
    spread = max(answer_in(row).deviation(answer_in(own[0])) for row in own)
    loaded = rows_of("load", deep_llama, folder)
    assert len(loaded) == 32
    for row in loaded:
        way = (row["width"], row["release"], row["use_layerwise"])
        assert row["answer"]["cached"] == HIT, way
        assert row["digest"] == own[0]["digest"], way
        assert answer_in(row).deviation(answer_in(own[0])) <= spread, way
        assert row["loads"] == row["expected_loads"], way
