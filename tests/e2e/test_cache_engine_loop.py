"""The cache engine's example across processes: it computes with what was stored, and with nothing else."""

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


def _run(folder: Path, which: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, str(EXAMPLES), str(folder), which]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_a_second_process_loads_what_the_first_stored_and_refuses_it_with_one_wrong_bit(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="no CPU build of torch on this machine")
    first = _run(tmp_path / "kv", "first")
    assert first.returncode == 0, first.stderr
    second = _run(tmp_path / "kv", "second")
    assert second.returncode == 0, second.stderr
    assert second.stdout.splitlines()[-1] == first.stdout.splitlines()[-1]
    stored = sorted((tmp_path / "kv").rglob("*.kv"))
    assert len(stored) == 3
    data = bytearray(stored[0].read_bytes())
    data[-1] ^= 0x40  # the last layer's last value: its exponent
    stored[0].write_bytes(data)
    third = _run(tmp_path / "kv", "second")
    assert third.returncode == 1
    assert f"{stored[0]} is damaged" in third.stderr
