"""The control of the cache engine's example: its digest does depend on every byte that the files hold."""

import subprocess
import sys
from pathlib import Path

import pytest

from engine_driver import ENGINE_MISSING

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import cache_engine_loop
print(cache_engine_loop.main(Path(sys.argv[2]), first=sys.argv[3] == "first"))
"""

pytestmark = pytest.mark.skipif(ENGINE_MISSING is not None, reason=str(ENGINE_MISSING))


def _digest(folder: Path, which: str) -> str:
    command = [sys.executable, "-c", PROGRAM, str(EXAMPLES), str(folder), which]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()[-1]


def test_a_second_process_gives_other_logits_when_one_bit_of_one_file_is_another(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="no CPU build of torch on this machine")
    whole = _digest(tmp_path / "kv", "first")
    stored = sorted((tmp_path / "kv").rglob("*.kv"))
    assert len(stored) == 3
    data = bytearray(stored[0].read_bytes())
    data[-1] ^= 0x40  # the last layer's last value: its exponent
    stored[0].write_bytes(data)
    assert _digest(tmp_path / "kv", "second") != whole
