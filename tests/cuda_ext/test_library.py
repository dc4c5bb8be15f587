"""The native libraries: found or missing with a remedy, declared as the header has them."""

import ctypes
import os
import re
import subprocess
from pathlib import Path

import pytest

from lamella.cuda_ext import _library
from lamella.cuda_ext._library import LibraryMissingError
from native_build import COMPILER, NATIVE_MISSING, SOURCES, compile_library

needs_native = pytest.mark.skipif(NATIVE_MISSING is not None, reason=str(NATIVE_MISSING))
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler: set CXX or install g++")

STRUCTURES: dict[str, type[ctypes.Structure]] = {
    "lm_group": _library.GroupStruct,
    "lm_slice": _library.SliceStruct,
    "lm_request": _library.RequestStruct,
    "lm_piece": _library.PieceStruct,
    "lm_window": _library.WindowStruct,
    "lm_host_objects": _library.HostObjectsStruct,
    "lm_cpu_options": _library.CpuOptionsStruct,
}


@pytest.mark.parametrize(("name", "command"), [("lamella_cpu", "apt-get install g++"), ("lamella_cuda", "nvcc")])
def test_a_missing_library_is_an_import_error_that_names_the_command(name: str, command: str, tmp_path: Path) -> None:
    with pytest.raises(ImportError, match=re.escape(command)) as raised:
        _library.find_library(name, tmp_path)
    assert str(tmp_path) in str(raised.value)


def test_the_environment_chooses_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "liblamella_cpu.so").touch()
    monkeypatch.setenv(_library.LIBRARY_FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    assert _library.find_library("lamella_cpu") == tmp_path / "liblamella_cpu.so"


def test_a_library_built_before_its_header_changed_is_refused_and_a_newer_one_is_not(tmp_path: Path) -> None:
    library, header = tmp_path / "liblamella_cpu.so", tmp_path / "engine.h"
    for path in (library, header):
        path.touch()
    os.utime(header, (1_000_000, 1_000_000))
    os.utime(library, (1_000_001, 1_000_001))
    _library.refuse_stale(library, tmp_path)
    os.utime(header, (1_000_002, 1_000_002))
    with pytest.raises(LibraryMissingError, match=re.escape("before engine.h changed: make native")):
        _library.refuse_stale(library, tmp_path)


def test_a_file_that_is_no_library_is_refused_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "liblamella_cpu.so"
    path.write_bytes(b"not a library")
    with pytest.raises(LibraryMissingError, match=r"cannot be used .*make native"):
        _library.open_cpu_library(path)


@needs_compiler
@pytest.mark.parametrize(
    ("version", "message"),
    [(_library.ABI_VERSION + 1, "has ABI version"), (_library.ABI_VERSION, "cannot be used .*lm_plan")],
)
def test_a_library_of_another_version_or_without_a_function_is_refused(
    version: int, message: str, tmp_path: Path
) -> None:
    source = tmp_path / "other.cpp"
    source.write_text(
        '#define API extern "C" __attribute__((visibility("default")))\n'
        f"API int lm_abi_version() {{ return {version}; }}\n"
        'API const char* lm_last_error() { return ""; }\n',
        encoding="utf-8",
    )
    compile_library([source], SOURCES / "include", tmp_path / "other.so")
    with pytest.raises(LibraryMissingError, match=message):
        _library.open_cpu_library(tmp_path / "other.so")


@needs_compiler
def test_python_and_the_header_agree_on_every_structure_field_by_field(tmp_path: Path) -> None:
    lines = ['printf("%d\\n", LM_ABI_VERSION);']
    expected = [str(_library.ABI_VERSION)]
    for name, structure in STRUCTURES.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        expected.append(f"{name} {ctypes.sizeof(structure)}")
        for field, *_ in structure._fields_:
            lines.append(f'printf("{field} %zu %zu\\n", offsetof({name}, {field}), sizeof((({name}*)0)->{field}));')
            described = getattr(structure, field)
            expected.append(f"{field} {described.offset} {described.size}")
    source = tmp_path / "sizes.c"
    source.write_text(
        "#include <stddef.h>\n#include <stdio.h>\n#include <lamella/lamella.h>\n"
        f"int main(void) {{ {' '.join(lines)} return 0; }}\n",
        encoding="utf-8",
    )
    program = tmp_path / "sizes"
    command = [str(COMPILER), "-x", "c", f"-I{SOURCES / 'include'}", str(source), "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    found = subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()
    assert found == expected


def test_the_header_has_no_structure_that_python_forgot() -> None:
    header = (SOURCES / "include" / "lamella" / "lamella.h").read_text(encoding="utf-8")
    assert set(re.findall(r"typedef struct (\w+) \{", header)) == set(STRUCTURES)


@needs_native
def test_every_declared_function_is_in_the_header_with_as_many_arguments() -> None:
    header = (SOURCES / "include" / "lamella" / "lamella.h").read_text(encoding="utf-8")
    declared = dict(re.findall(r"LM_API lm_status (lm_\w+)\(([^)]*)\)", header))
    library = _library.cpu_library()
    for name in ("lm_plan", "lm_cpu_execute", "lm_cpu_scatter", "lm_cpu_move_mapped"):
        assert len(getattr(library, name).argtypes) == len(declared[name].split(",")), name


@needs_native
def test_an_argument_of_the_wrong_type_is_refused_before_it_reaches_c() -> None:
    with pytest.raises(ctypes.ArgumentError):
        _library.cpu_library().lm_cpu_execute(_library.GroupStruct(), None, None)


@needs_native
@pytest.mark.parametrize(
    ("status", "error"),
    [(_library.INVALID, ValueError), (_library.NO_MEMORY, MemoryError), (_library.CUDA, RuntimeError)],
)
def test_each_status_has_its_exception(status: int, error: type[Exception]) -> None:
    library = _library.cpu_library()
    _library.check(library, 0)
    with pytest.raises(error):
        _library.check(library, status)
