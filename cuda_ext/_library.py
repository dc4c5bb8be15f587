"""The native libraries: found, loaded, their C ABI declared (`csrc/include/lamella/lamella.h`).

Each structure below mirrors one of the header's, field for field. A library of another ABI version is refused, because
a structure that is read with the wrong offsets is memory corruption with no message.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable
from ctypes import POINTER, Structure, c_char_p, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import lamella

ABI_VERSION = 1
"""`LM_ABI_VERSION` of the header that these declarations follow."""

LIBRARY_FOLDER_VARIABLE = "LAMELLA_LIBRARY_DIR"
"""Environment variable that names a folder to load the libraries from in place of the installed ones."""

INVALID, NO_MEMORY, CUDA = 1, 2, 3
"""`lm_status` other than LM_OK."""

OnSlice = ctypes.CFUNCTYPE(None, c_void_p, c_int32)
"""`lm_on_slice`."""


class GroupStruct(Structure):
    """`lm_group`."""

    _fields_ = (
        ("num_layers", c_int32),
        ("kv", c_int32),
        ("num_heads", c_int32),
        ("head_dim", c_int32),
        ("element_bytes", c_int32),
        ("block_tokens", c_int32),
        ("num_blocks", c_int32),
        ("num_block_ids", c_int32),
        ("object_offset", c_int64),
        ("layers", POINTER(c_int32)),
        ("block_ids", POINTER(c_int32)),
        ("bases", POINTER(c_uint64)),
        ("block_stride", c_int64),
        ("token_stride", c_int64),
        ("head_stride", c_int64),
        ("dim_stride", c_int64),
    )


class SliceStruct(Structure):
    """`lm_slice`."""

    _fields_ = (("first_layer", c_int32), ("num_layers", c_int32))


class RequestStruct(Structure):
    """`lm_request`."""

    _fields_ = (
        ("form", c_int32),
        ("direction", c_int32),
        ("chunk_tokens", c_int32),
        ("num_groups", c_int32),
        ("groups", POINTER(GroupStruct)),
        ("num_slices", c_int32),
        ("has_null_block", c_int32),
        ("slices", POINTER(SliceStruct)),
        ("null_block", c_int64),
        ("num_tokens", c_int64),
        ("skip_tokens", c_int64),
        ("window_bytes", c_int64),
    )


class PieceStruct(Structure):
    """`lm_piece`."""

    _fields_ = (
        ("object_index", c_int32),
        ("group", c_int32),
        ("first_layer", c_int32),
        ("num_layers", c_int32),
        ("first_token", c_int32),
        ("num_tokens", c_int32),
        ("staging_offset", c_int64),
    )


class WindowStruct(Structure):
    """`lm_window`."""

    _fields_ = (
        ("first_piece", c_int64),
        ("num_pieces", c_int64),
        ("num_bytes", c_int64),
        ("completes_slice", c_int64),
    )


class HostObjectsStruct(Structure):
    """`lm_host_objects`."""

    _fields_ = (
        ("addresses", POINTER(c_uint64)),
        ("num_objects", c_int64),
        ("registered_base", c_uint64),
        ("registered_piece_bytes", c_int64),
    )


class CpuOptionsStruct(Structure):
    """`lm_cpu_options`."""

    _fields_ = (
        ("method", c_int32),
        ("threads", c_int32),
        ("staging", c_uint64),
        ("staging_bytes", c_int64),
        ("on_slice", OnSlice),
        ("context", c_void_p),
    )


_CPU_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "lm_plan": (
        c_int32,
        (
            POINTER(RequestStruct),
            POINTER(PieceStruct),
            c_int64,
            POINTER(WindowStruct),
            c_int64,
            POINTER(c_int64),
            POINTER(c_int64),
        ),
    ),
    "lm_cpu_execute": (c_int32, (POINTER(RequestStruct), POINTER(HostObjectsStruct), POINTER(CpuOptionsStruct))),
    "lm_cpu_scatter": (c_int32, (POINTER(RequestStruct), POINTER(PieceStruct), c_int64, c_uint64)),
    "lm_cpu_move_mapped": (
        c_int32,
        (POINTER(RequestStruct), POINTER(PieceStruct), c_int64, POINTER(HostObjectsStruct)),
    ),
}

_REMEDIES = {
    "lamella_cpu": "install a C++17 compiler (apt-get install g++) and then Lamella again (make native in a checkout)",
    "lamella_cuda": (
        "put the CUDA toolkit's nvcc on PATH and install Lamella again with "
        "--config-settings=cmake.define.LAMELLA_CUDA=ON (make native in a checkout)"
    ),
}


class LibraryMissingError(ImportError):
    """A native library was not built here, or cannot be loaded; the message says which command changes that."""


def find_library(name: str, folder: Path | None = None) -> Path:
    """Path of `lib<name>`, beside this module or in the folder that `LAMELLA_LIBRARY_DIR` names.

    Args:
        name: `"lamella_cpu"` or `"lamella_cuda"`.
        folder: where to look instead of both.

    Raises:
        LibraryMissingError: it is not there, or (in a checkout) it was built before its C ABI header last changed.
    """
    suffix = ".dylib" if sys.platform == "darwin" else ".so"
    chosen = os.environ.get(LIBRARY_FOLDER_VARIABLE)
    folders = [folder] if folder else [Path(chosen)] if chosen else _installed_folders()
    for place in folders:
        path = place / f"lib{name}{suffix}"
        if path.is_file():
            if not (folder or chosen):
                refuse_stale(path, Path(__file__).parent / "csrc" / "include" / "lamella")
            return path
    raise LibraryMissingError(
        f"lib{name}{suffix} is not in {' or '.join(str(place) for place in folders)}: {_REMEDIES[name]}"
    )


def refuse_stale(path: Path, headers: Path) -> None:
    """The library at `path` is not older than any C header in `headers`, which only a checkout has.

    Structures of an older header are read with the wrong offsets, and between two releases the version is the same.

    Raises:
        LibraryMissingError: it is older; the message names the header.
    """
    built = path.stat().st_mtime
    for header in sorted(headers.glob("*.h")):
        if header.stat().st_mtime > built:
            raise LibraryMissingError(f"{path} was built before {header.name} changed: make native")


def _installed_folders() -> list[Path]:
    """The package's folder; an editable install has its sources here and what it built beside `lamella/__init__`."""
    package = Path(lamella.__file__).parent if lamella.__file__ else Path(__file__).parent.parent
    return list(dict.fromkeys([Path(__file__).parent, package / "cuda_ext"]))


def open_library(path: Path, name: str, signatures: dict[str, tuple[Any, tuple[Any, ...]]]) -> ctypes.CDLL:
    """The library at `path`, its version checked and its functions declared.

    Args:
        path: of the shared object.
        name: as in `find_library`; it chooses the remedy in a message.
        signatures: function name to (result type, argument types); `lm_abi_version` and `lm_last_error` are implied.

    Raises:
        LibraryMissingError: the loader refuses it, it lacks a function, or it was built for another ABI version.
    """
    try:
        library = ctypes.CDLL(str(path))
        library.lm_abi_version.restype = c_int32
        library.lm_abi_version.argtypes = ()
        library.lm_last_error.restype = c_char_p
        library.lm_last_error.argtypes = ()
        version = library.lm_abi_version()
        if version == ABI_VERSION:
            for function, (result, arguments) in signatures.items():
                declared = getattr(library, function)
                declared.restype = result
                declared.argtypes = arguments
    except (OSError, AttributeError) as error:
        raise LibraryMissingError(f"{path} cannot be used ({error}): {_REMEDIES[name]}") from error
    if version != ABI_VERSION:
        raise LibraryMissingError(
            f"{path} has ABI version {version}, this package needs {ABI_VERSION}: rebuild it (make native in a "
            "checkout, pip install --force-reinstall lamella otherwise)"
        )
    return library


@functools.cache
def cpu_library() -> ctypes.CDLL:
    """`liblamella_cpu`, loaded once.

    Raises:
        LibraryMissingError: it was not built here or cannot be loaded.
    """
    return open_library(find_library("lamella_cpu"), "lamella_cpu", _CPU_SIGNATURES)


def open_cpu_library(path: Path) -> ctypes.CDLL:
    """Another build of the CPU library, such as one with a planted fault.

    Raises:
        LibraryMissingError: as `open_library`.
    """
    return open_library(path, "lamella_cpu", _CPU_SIGNATURES)


def check(library: ctypes.CDLL, status: int) -> None:
    """Returns if `status` is LM_OK; otherwise raises with the library's sentence.

    Call it on the thread that made the call.

    Raises:
        ValueError: LM_INVALID.
        MemoryError: LM_NO_MEMORY.
        RuntimeError: any other status, LM_CUDA among them.
    """
    if status == 0:
        return
    raised: Callable[[str], Exception] = {INVALID: ValueError, NO_MEMORY: MemoryError}.get(status, RuntimeError)
    raise raised(library.lm_last_error().decode(errors="replace"))
