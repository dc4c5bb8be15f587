"""The example of two engines on one cache server fails where a load is left out; that it runs, test_programs shows."""

import subprocess
import sys
from pathlib import Path

import pytest

from engine_driver import ENGINE_MISSING

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytestmark = pytest.mark.skipif(ENGINE_MISSING is not None, reason=str(ENGINE_MISSING))


def _run(program: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture(autouse=True)
def _needs_torch_and_a_server() -> None:
    for package in ("torch", "zmq"):
        pytest.importorskip(package, reason=f"{package} is not installed")


def test_without_the_load_its_answer_differs(tmp_path: Path) -> None:
    text = (EXAMPLES / "shared_cache.py").read_text(encoding="utf-8")
    begin, end = text.index("            worker.retrieve("), text.index("        else:\n            worker.begin_step")
    (tmp_path / "shared_cache.py").write_text(text[:begin] + "            worker.give_back(found)\n" + text[end:])
    (tmp_path / "small_llama.py").write_text((EXAMPLES / "small_llama.py").read_text())
    result = _run(tmp_path / "shared_cache.py")
    assert result.returncode == 1
    assert "the answers DIFFER" in result.stderr
