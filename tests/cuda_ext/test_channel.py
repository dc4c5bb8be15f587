"""A CUDA window that fails in the middle of being issued: what of it is on its way drains before it counts as drained.

The channel's own code, on a CUDA runtime that is made up (`channel_driver.cpp`): a real one refuses too seldom.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from native_build import COMPILER, SOURCES

NVCC = os.environ.get("CUDACXX") or shutil.which("nvcc")
HEADERS = next(
    (
        folder
        for root in (Path(NVCC).resolve().parents[1] if NVCC else None, *sorted(Path("/usr/local").glob("cuda*")))
        if root is not None and (folder := root / "include").joinpath("cuda_runtime.h").is_file()
    ),
    None,
)

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler is here"),
    pytest.mark.skipif(HEADERS is None, reason="no CUDA headers: put the toolkit's nvcc on PATH"),
]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("channel") / "driver"
    command = [str(COMPILER), "-std=c++17", "-O0", f"-I{SOURCES}", f"-I{SOURCES / 'include'}", "-isystem", str(HEADERS)]
    command += [str(Path(__file__).with_name("channel_driver.cpp")), str(SOURCES / "engine_transfer.cpp")]
    subprocess.run([*command, "-o", str(program), "-lpthread"], check=True)
    return program


def _say(driver: Path, what: str) -> str:
    return subprocess.run([str(driver), what], check=True, capture_output=True, text=True, timeout=60).stdout.strip()


@pytest.mark.parametrize("path", ["direct", "staged", "store"])
def test_a_window_that_was_issued_in_part_drains_before_its_mark_is_reached(driver: Path, path: str) -> None:
    """SAFE-1: its blocks, objects and slot are free behind that mark."""
    assert _say(driver, path) == "behind all"


def test_what_a_failed_window_had_collected_is_not_copied_by_the_next_one(driver: Path) -> None:
    assert _say(driver, "leftover") == "its own"
