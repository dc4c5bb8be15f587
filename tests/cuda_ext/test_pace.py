"""When a lane looks: soon enough to keep the wire busy, and seldom; also after it was held up for long."""

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

COMPILER = shutil.which("c++") or shutil.which("g++")
SOURCES = Path(__file__).parents[2] / "cuda_ext" / "csrc"
BYTES_A_SECOND = 55e9
WINDOWS = 64

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler is here")


class Ran(NamedTuple):
    """One transfer on a made-up wire: what the wire needs, what it took, and the lane's looks."""

    wire_ns: int
    taken_ns: int
    looks: int


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert COMPILER is not None
    program = tmp_path_factory.mktemp("pace") / "driver"
    source = Path(__file__).with_name("pace_driver.cpp")
    subprocess.run([COMPILER, "-std=c++17", "-O1", f"-I{SOURCES}", str(source), "-o", str(program)], check=True)
    return program


def _run(driver: Path, *, factor: float = 1.0, hold_ns: int = 0, transfers: int = 4) -> list[Ran]:
    command = [str(driver), str(BYTES_A_SECOND), str(factor), str(hold_ns), str(WINDOWS), str(transfers)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.splitlines()
    return [Ran(*map(int, line.split())) for line in lines]


def test_a_wire_as_fast_as_told_is_kept_busy_with_few_looks(driver: Path) -> None:
    for ran in _run(driver):
        assert ran.taken_ns <= 1.01 * ran.wire_ns + 100_000
        assert ran.looks <= 1.5 * WINDOWS


@pytest.mark.parametrize("hold_ms", [1, 30, 100, 1000])
def test_a_window_that_was_held_up_does_not_slow_what_comes_after_it(driver: Path, hold_ms: int) -> None:
    """Behind a fence any number of looks are in vain. Taken for a slow wire, they made later windows wait for looks."""
    held, *later = _run(driver, hold_ns=hold_ms * 1_000_000)
    assert held.taken_ns <= hold_ms * 1_000_000 + 1.03 * held.wire_ns + 600_000  # one look, behind the fence, is late
    for ran in later:
        assert ran.taken_ns <= 1.01 * ran.wire_ns + 100_000


@pytest.mark.parametrize("factor", [0.8, 2.0, 4.0, 10.0])
def test_a_wire_other_than_told_is_learned(driver: Path, factor: float) -> None:
    *_, last = _run(driver, factor=factor, transfers=6)
    assert last.taken_ns <= 1.02 * last.wire_ns + 600_000
    assert last.looks <= 4.5 * WINDOWS
