"""Every notebook and every example runs to its end on a CPU, fast, without a screen, and without a warning.

They assert their own claims; here a claim that no longer holds is a non-zero exit.
"""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.py"))
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MAX_CPU_S = 30
MAX_WALL_S = 240  # a machine that does something else as well takes longer for no fault of the program's
MAX_EXAMPLE_LINES = 80


def _run(program: Path, folder: Path) -> None:
    source = program.read_text(encoding="utf-8")
    if "import torch" in source:
        pytest.importorskip("torch", reason="no CPU build of torch on this machine")
    # Plain Python as it stands; in another folder, so that it leans on the install and not on the checkout.
    environment = {**os.environ, "MPLBACKEND": "Agg", "PYTHONWARNINGS": "error"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(
        [sys.executable, str(program)], cwd=folder, env=environment, capture_output=True, text=True, timeout=MAX_WALL_S
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime <= MAX_CPU_S
    assert result.returncode == 0, f"{program.name}:\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_holds_its_claim(notebook: Path, tmp_path: Path) -> None:
    source = notebook.read_text(encoding="utf-8")
    assert "# %%" in source, f"{notebook.name} is not in jupytext's percent format"
    assert "assert " in source, f"{notebook.name} asserts nothing, so running it proves nothing"
    _run(notebook, tmp_path)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_fits_on_a_screen(example: Path, tmp_path: Path) -> None:
    assert len(example.read_text(encoding="utf-8").splitlines()) <= MAX_EXAMPLE_LINES
    _run(example, tmp_path)
