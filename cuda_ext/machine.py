"""What this machine can do for Lamella, and for each thing it cannot do, why not and what would change that.

Every probe looks and changes nothing. None of them raises: a probe that fails is itself a finding.
"""

from __future__ import annotations

import ctypes
import enum
import importlib
import importlib.metadata
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lamella.cuda_ext import _library

MIN_DRIVER_FOR_CUDA_13 = 580
"""The CUDA library is built with CUDA 13, whose runtime refuses older drivers."""

_NVIDIA_LIBRARY = "libcuda.so.1"
_GIB = 1 << 30


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB else f"{num_bytes / (1 << 20):.1f} MiB"


class State(enum.Enum):
    """How a finding bears on what can be done here."""

    YES = "yes"
    NO = "no"
    LIMITED = "limited"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Args:
        name: what was looked at.
        state: whether it is there.
        detail: what was found: a version, a path, a count with its unit, or why it is not there.
        remedy: what to do to change a NO or LIMITED; empty where nothing needs doing.
    """

    name: str
    state: State
    detail: str
    remedy: str = ""


def _first_line_of(command: list[str], line: int = 0) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as failure:
        return f"does not run: {failure}"
    lines = result.stdout.strip().splitlines()
    return lines[line] if lines else "prints nothing"


def find_compiler(environment: Mapping[str, str]) -> Finding:
    """A C++ compiler, which the native CPU library is built with."""
    for name in filter(None, (environment.get("CXX"), "c++", "g++", "clang++")):
        path = shutil.which(name, path=environment.get("PATH"))
        if path:
            return Finding("C++ compiler", State.YES, f"{path}: {_first_line_of([path, '--version'])}")
    return Finding("C++ compiler", State.NO, "none on PATH", "apt-get install g++, then reinstall Lamella")


def find_nvcc(environment: Mapping[str, str]) -> Finding:
    """nvcc, which the CUDA library is built with; not needed to run it."""
    for name in filter(None, (environment.get("CUDACXX"), "nvcc", "/usr/local/cuda/bin/nvcc")):
        path = shutil.which(name, path=environment.get("PATH"))
        if path:
            return Finding("nvcc", State.YES, f"{path}: {_first_line_of([path, '--version'], line=-2)}")
    remedy = "install the CUDA toolkit and put its bin folder on PATH, then reinstall with LAMELLA_CUDA=ON"
    return Finding("nvcc", State.NO, "none on PATH", remedy)


def find_native_library(name: str, folder: Path | None = None, sources: Path | None = None) -> Finding:
    """A native library that loads, has the ABI this package needs, and is not older than its sources.

    Args:
        name: `"lamella_cpu"` or `"lamella_cuda"`.
        folder: where to look instead of the installed place.
        sources: the folder of its sources; by default the one beside this module, which only a checkout has.
    """
    title = {"lamella_cpu": "native CPU library", "lamella_cuda": "native CUDA library"}[name]
    try:
        path = _library.find_library(name, folder)
        _library.open_library(path, name, {})
    except _library.LibraryMissingError as failure:
        found, _, remedy = str(failure).rpartition(": ")
        return Finding(title, State.NO, found, remedy)
    sources = sources or Path(__file__).parent / "csrc"
    changed = [file for file in sources.rglob("*") if file.is_file() and file.stat().st_mtime > path.stat().st_mtime]
    if changed:
        return Finding(title, State.LIMITED, f"{path}, older than {changed[0].name}", "make native")
    return Finding(title, State.YES, str(path))


def find_driver(library_name: str = _NVIDIA_LIBRARY) -> Finding:
    """The NVIDIA driver and the GPUs it shows to this process, asked of the driver itself."""
    try:
        driver = ctypes.CDLL(library_name)
    except OSError as failure:
        return Finding("GPU", State.NO, f"no NVIDIA driver: {failure}", "needs an NVIDIA GPU and its driver")
    code = driver.cuInit(0)
    if code != 0:
        return Finding(
            "GPU", State.NO, f"driver found, but cuInit returned error {code}", "run nvidia-smi: it says more"
        )
    count = ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    if count.value == 0:
        return Finding("GPU", State.NO, "the driver shows no GPU to this process", "check CUDA_VISIBLE_DEVICES")
    names = []
    for device in range(count.value):
        text = ctypes.create_string_buffer(128)
        driver.cuDeviceGetName(text, len(text), device)
        names.append(text.value.decode())
    return _judge_driver(_driver_version(), ", ".join(names))


def _driver_version(path: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Such as 580.65.06; None where the kernel module does not say."""
    try:
        match = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", path.read_text(encoding="utf-8"))
    except OSError:
        return None
    return match.group(1) if match else None


def _judge_driver(version: str | None, gpus: str) -> Finding:
    if version is not None and int(version.split(".")[0]) < MIN_DRIVER_FOR_CUDA_13:
        remedy = f"update the driver to {MIN_DRIVER_FOR_CUDA_13} or newer"
        return Finding("GPU", State.LIMITED, f"{gpus}; driver {version} is too old for CUDA 13", remedy)
    return Finding("GPU", State.YES, f"{gpus}; driver {version or 'of unknown version'}")


def find_torch() -> Finding:
    """torch, and whether its build can use a GPU."""
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as failure:  # OSError: a CUDA build whose libraries are not there
        return Finding("torch", State.NO, str(failure), "pip install 'lamella[torch]'")
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return Finding("torch", State.YES, f"{torch.__version__} ({build})")


def find_package(name: str, *, distribution: str, remedy: str, package: str | None = None) -> Finding:
    """An installed distribution and its version, without importing it.

    Args:
        name: what the finding is called.
        distribution: as it is installed by default.
        remedy: how to get it.
        package: what it is imported as, where distributions of other names hold it too, such as builds for a CPU.
    """
    builds = importlib.metadata.packages_distributions().get(package, []) if package else []
    for installed in (distribution, *builds):
        try:
            return Finding(name, State.YES, f"{installed} {importlib.metadata.version(installed)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return Finding(name, State.NO, f"{distribution} is not installed", remedy)


def find_pinned_memory_limit(soft_bytes: int | None = None) -> Finding:
    """How much host memory this process may lock, which bounds a pinned pool that is registered piece by piece.

    Args:
        soft_bytes: the limit to judge; by default this process's RLIMIT_MEMLOCK.
    """
    if soft_bytes is None:
        soft_bytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if soft_bytes == resource.RLIM_INFINITY:
        return Finding("pinned memory", State.YES, "unlimited (RLIMIT_MEMLOCK)")
    remedy = "ulimit -l unlimited, or --ulimit memlock=-1 for a container"
    return Finding("pinned memory", State.LIMITED, f"{_size(soft_bytes)} (RLIMIT_MEMLOCK)", remedy)


def find_cores() -> Finding:
    """The cores this process may run on."""
    usable = len(os.sched_getaffinity(0))
    return Finding("cores", State.YES, f"{usable} usable of {os.cpu_count()}")


def find_numa_nodes(sysfs: Path = Path("/sys/devices/system/node")) -> Finding:
    """The NUMA nodes with memory; a pool should lie on the node its GPU hangs on."""
    nodes = sorted(path.name for path in sysfs.glob("node[0-9]*"))
    if not nodes:
        return Finding("NUMA", State.LIMITED, "the kernel lists no nodes; treated as one")
    return Finding("NUMA", State.YES, f"{len(nodes)} node{'s' if len(nodes) > 1 else ''}: {', '.join(nodes)}")


def find_shared_memory(path: Path = Path("/dev/shm")) -> Finding:
    """Room for pools that several processes map."""
    try:
        usage = shutil.disk_usage(path)
    except OSError as failure:
        return Finding("shared memory", State.NO, f"{path}: {failure.strerror}", "mount a tmpfs there")
    state = State.YES if usage.free >= _GIB else State.LIMITED
    remedy = "" if state is State.YES else "enlarge it: --shm-size for a container"
    return Finding("shared memory", state, f"{path}: {_size(usage.free)} free of {_size(usage.total)}", remedy)
