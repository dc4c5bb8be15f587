"""The native library as the property tests need it: whether it is there, and the address header compiled on its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from lamella.cuda_ext._library import LibraryMissingError
from lamella.cuda_ext.executors import NativeExecutor

ROOT = Path(__file__).parents[2]
MUTANT_SOURCES_VARIABLE = "LAMELLA_MUTANT_SOURCES"
SOURCES = Path(os.environ.get(MUTANT_SOURCES_VARIABLE, ROOT / "cuda_ext" / "csrc"))
"""The native sources under test: the checkout's, or the mutation suite's copy with a fault in it."""


def _why_missing() -> str | None:
    try:
        NativeExecutor(1)
    except LibraryMissingError as error:
        if MUTANT_SOURCES_VARIABLE in os.environ:
            raise  # a mutant that cannot be loaded must not pass for one that was tried
        return str(error)
    return None


NATIVE_MISSING = _why_missing()
"""Why there is no native executor here, or None."""

COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
"""A C++ compiler, or None."""


def compile_library(sources: list[Path], include: Path, target: Path) -> None:
    """Leaves a shared library at `target`.

    Raises:
        RuntimeError: with the compiler's own text.
    """
    assert COMPILER is not None
    target.parent.mkdir(parents=True, exist_ok=True)
    command = [COMPILER, "-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", f"-I{include}"]
    command += ["-Wl,--no-undefined"] if sys.platform == "linux" else []
    command += [*map(str, sources), "-o", str(target), "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
