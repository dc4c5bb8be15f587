"""What the wheel holds, what it leaves out, and that it works from wherever it is installed."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from extras import NEEDS_AN_EXTRA

PACKAGES = ("cli", "connector", "cuda_ext", "reference", "server", "sim")


def _names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if not name.endswith("/")]


def _run_python(code: str, *, cwd: Path, pythonpath: Path) -> subprocess.CompletedProcess[str]:
    # -S: a .pth file of this environment may hold an editable install, which would win over the folder under test.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(pythonpath), sysconfig.get_path("purelib")])}
    return subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=cwd, env=environment, capture_output=True, text=True, timeout=60
    )


def test_the_wheel_puts_nothing_into_site_packages_but_lamella_and_its_metadata(wheel: Path) -> None:
    top = {name.split("/")[0] for name in _names(wheel)}
    assert top == {"lamella", next(part for part in top if part.endswith(".dist-info"))}


def test_the_wheel_serves_every_cpython_on_its_platform(wheel: Path) -> None:
    interpreter, abi, platform = wheel.stem.split("-")[-3:]
    assert (interpreter, abi) == ("py3", "none")
    assert platform != "any", "the wheel may hold native libraries, so it must name its platform"


def test_every_source_module_is_in_the_wheel_and_no_other(wheel: Path, root: Path) -> None:
    expected = {
        f"lamella/{source.relative_to(root).as_posix()}"
        for package in PACKAGES
        for source in (root / package).rglob("*.py")
        if "csrc" not in source.parts
    }
    found = {name for name in _names(wheel) if name.startswith("lamella/") and name.endswith(".py")}
    assert found == expected | {"lamella/__init__.py"}


def test_every_file_of_measurements_is_in_the_wheel(wheel: Path, root: Path) -> None:
    """Profiles and sets of overheads: without them an installed simulator has nothing to answer from."""
    expected = {
        f"lamella/{kept.relative_to(root).as_posix()}"
        for package in PACKAGES
        for kept in (root / package).rglob("*.json")
    }
    assert {name.split("/")[2] for name in expected} >= {"overhead_sets", "profiles"}
    assert {name for name in _names(wheel) if name.startswith("lamella/") and name.endswith(".json")} == expected


def test_no_native_source_and_no_build_file_is_in_the_wheel(wheel: Path) -> None:
    unwanted = [name for name in _names(wheel) if "/csrc/" in name or name.endswith(("CMakeLists.txt", ".pyc", ".o"))]
    assert unwanted == []


def test_the_wheel_says_that_it_is_typed(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("lamella/py.typed").strip(), "an empty template would not have been written at all"


def _libraries(wheel: Path) -> set[str]:
    return {Path(name).stem for name in _names(wheel) if name.startswith("lamella/cuda_ext/liblamella_")}


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler on this machine")
def test_a_machine_with_a_compiler_ships_the_native_cpu_library(wheel: Path) -> None:
    assert "liblamella_cpu" in _libraries(wheel)


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc on this machine")
def test_a_machine_with_nvcc_ships_the_cuda_library(wheel: Path) -> None:
    assert "liblamella_cuda" in _libraries(wheel)


@pytest.mark.skipif(not shutil.which("readelf"), reason="no readelf on this machine")
def test_native_libraries_need_nothing_but_the_c_library(installed: Path) -> None:
    libraries = sorted((installed / "lamella" / "cuda_ext").glob("liblamella_*.so"))
    for library in libraries:
        dynamic = subprocess.run(["readelf", "-d", str(library)], check=True, capture_output=True, text=True).stdout
        needed = {
            line.split("[")[1].split("]")[0].split(".so")[0] for line in dynamic.splitlines() if "(NEEDED)" in line
        }
        allowed = {"libc", "libm", "libdl", "librt", "libpthread", "ld-linux-x86-64", "ld-linux-aarch64"}
        assert needed <= allowed, f"{library.name} would not load on a machine without {needed - allowed}"


def test_the_installed_wheel_imports_from_the_folder_it_was_put_in(installed: Path, tmp_path: Path) -> None:
    code = (
        "import lamella.reference, lamella.cuda_ext, sys; print(lamella.reference.__file__); print(lamella.__version__)"
    )
    result = _run_python(code, cwd=tmp_path, pythonpath=installed)
    assert result.returncode == 0, result.stderr
    path, version = result.stdout.split()
    assert Path(path).is_relative_to(installed)
    assert version == "0.1.0"


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_a_package_by_its_folder_name_is_refused_with_the_right_spelling(
    package: str, installed: Path, root: Path
) -> None:
    result = _run_python(f"import {package}", cwd=root, pythonpath=installed)
    assert result.returncode == 1
    assert f"ImportError: import lamella.{package}, not {package}" in result.stderr


def test_every_module_imports_with_nothing_but_the_base_dependencies(installed: Path, tmp_path: Path) -> None:
    code = f"""
import importlib, pkgutil, sys
for extra in ("torch", "matplotlib", "vllm", "redis", "obstore", "pytest", "hypothesis", "msgspec", "zmq",
              "prometheus_client"):
    sys.modules[extra] = None  # importing it raises ImportError, as if it were not installed
import lamella
for found in pkgutil.walk_packages(lamella.__path__, "lamella."):
    # A native library beside the modules looks like an extension module to pkgutil.
    if found.name not in {set(NEEDS_AN_EXTRA)!r} and not found.name.startswith("lamella.cuda_ext.lib"):
        importlib.import_module(found.name)
        print(found.name)
"""
    result = _run_python(code, cwd=tmp_path, pythonpath=installed)
    assert result.returncode == 0, result.stderr
    assert {"lamella.cli.main", "lamella.reference.geometry"} <= set(result.stdout.split())


def test_the_wheel_brings_the_lamella_command(wheel: Path) -> None:
    (entry_points,) = [name for name in _names(wheel) if name.endswith(".dist-info/entry_points.txt")]
    with zipfile.ZipFile(wheel) as archive:
        assert "lamella = lamella.cli.main:main" in archive.read(entry_points).decode()
