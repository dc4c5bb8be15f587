"""The wheel under test: the one `make test` built, or one built here, once a session."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("cli", "connector", "cuda_ext", "reference", "server", "sim")


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    named = os.environ.get("LAMELLA_WHEEL")
    if named:
        return (ROOT / named).resolve(strict=True)
    folder = tmp_path_factory.mktemp("wheel")
    # A build folder of its own: the developer's editable build must not be disturbed.
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder)]
    command += ["-C", f"build-dir={folder / 'build'}", str(ROOT)]
    subprocess.run(command, check=True, timeout=280)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds what the wheel installs, and nothing else."""
    folder = tmp_path_factory.mktemp("target")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), str(wheel)]
    subprocess.run(command, check=True, timeout=120)
    return folder
