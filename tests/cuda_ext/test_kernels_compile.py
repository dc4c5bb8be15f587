"""The kernels compile where there is nvcc and no GPU, for every architecture that is shipped."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from native_build import SOURCES

NVCC = os.environ.get("CUDACXX") or shutil.which("nvcc")

pytestmark = [pytest.mark.slow, pytest.mark.skipif(NVCC is None, reason="no nvcc: set CUDACXX or put it on PATH")]


@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_no_kernel_spills_a_register(architecture: int, tmp_path: Path) -> None:
    command = [str(NVCC), "-std=c++17", "-O3", f"-I{SOURCES / 'include'}", "-Xptxas", "-v", "-Werror", "all-warnings"]
    command += [f"-gencode=arch=compute_{architecture},code=sm_{architecture}"]
    command += ["-c", str(SOURCES / "scatter.cu"), "-o", str(tmp_path / "scatter.o")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    # Five vector widths, two dense sides, two sizes of piece table.
    assert len(spills) == 20
    assert set(spills) == {("0", "0", "0")}
