"""The layer loop's claim, and its control: without the waits the same program must come out wrong (REL-2)."""

import subprocess
import sys
from pathlib import Path

import pytest

LOOP = Path(__file__).resolve().parents[2] / "examples" / "llama_layer_loop.py"


@pytest.mark.parametrize(
    ("arguments", "code", "verdict"), [((), 0, "equal to the bit"), (("--no-wait",), 1, "DIFFERENT")]
)
def test_logits_come_back_equal_only_when_each_layer_waits_for_its_slice(
    arguments: tuple[str, ...], code: int, verdict: str, tmp_path: Path
) -> None:
    pytest.importorskip("torch", reason="no CPU build of torch on this machine")
    command = [sys.executable, str(LOOP), *arguments]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert verdict in result.stdout, result.stderr
    assert result.returncode == code
