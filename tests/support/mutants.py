"""Wrong models that the ordinary properties must reject, and the machinery that plants them.

A mutant is one replacement in one source file of a copy of the packages. None is written for one test: each is a
mistake that was made elsewhere or is easily made here. A replacement whose text is no longer there is an error, not
a pass: the mutant has to be written anew for the code as it is.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from native_build import MUTANT_SOURCES_VARIABLE, ROOT, compile_library

HEADER = "cuda_ext/csrc/include/lamella/address.cuh"
PLANNER = "cuda_ext/csrc/include/lamella/plan.hpp"
PLAN = "reference/plan.py"
LAYOUT = "reference/layout.py"
NUMPY = "cuda_ext/_numpy.py"

NATIVE_SOURCES = ("cpu_executor.cpp", "host_launch.cpp", "library.cpp")
"""What the executor and the planner need of the native sources; an engine with threads takes long to compile."""

PROPERTIES = (
    "tests/properties/test_transfers.py",
    "tests/properties/test_selector.py",
    "tests/reference/test_plan.py",
    "tests/reference/test_slices.py",
    "tests/reference/test_layout.py",
)


@dataclass(frozen=True, slots=True)
class Mutant:
    """`old` of `path` replaced by `new`."""

    name: str
    path: str
    old: str
    new: str

    @property
    def is_native(self) -> bool:
        """Whether it must be compiled."""
        return "/csrc/" in self.path


MUTANTS = (
    # The shared address header: the CPU executor and the CUDA kernels alike.
    Mutant("layer offset ignored on the engine's side", HEADER, "return s.layer_offset + slot;", "return slot;"),
    Mutant(
        "engine's layer off by one",
        HEADER,
        "return s.layer_offset + slot;",
        "return s.layer_offset + slot + (s.layer_offset > 0 ? -1 : 0);",
    ),
    Mutant(
        "staging strided by L instead of the staged layers",
        HEADER,
        "return ((kv * staged_layers(g, s) + slot) * piece_tokens + token) * hidden_bytes(g);",
        "return ((kv * g.num_layers + slot) * piece_tokens + token) * hidden_bytes(g);",
    ),
    Mutant(
        "default selector stages one layer",
        HEADER,
        "return s.staged_layers == 0 ? g.num_layers : s.staged_layers;",
        "return s.staged_layers == 0 ? 1 : s.staged_layers;",
    ),
    Mutant(
        "K runs of an object swapped",
        HEADER,
        "return g.object_offset + (kv * g.num_layers + layer) * row_bytes(g)",
        "return g.object_offset + ((g.kv - 1 - kv) * g.num_layers + layer) * row_bytes(g)",
    ),
    Mutant(
        "kernel group's offset in the object ignored",
        HEADER,
        "return g.object_offset + (kv * g.num_layers + layer) * row_bytes(g)",
        "return (kv * g.num_layers + layer) * row_bytes(g)",
    ),
    Mutant(
        "host offset not advanced where two registered pieces meet",
        HEADER,
        "return address + static_cast<std::uint64_t>(copied);",
        "return address + static_cast<std::uint64_t>(0 * copied);",
    ),
    Mutant(
        "HND and NHD confused",
        HEADER,
        "return head * g.head_stride + dim * g.dim_stride;",
        "return head * (g.num_heads > 1 && g.block_tokens > 1 ? g.token_stride : g.head_stride) + dim * g.dim_stride;",
    ),
    Mutant(
        "blocks taken to lie side by side",
        HEADER,
        "static_cast<std::uint64_t>(block * g.block_stride + token * g.token_stride)",
        "static_cast<std::uint64_t>(block * plane_bytes(g) + token * g.token_stride)",
    ),
    Mutant(
        "first block id + i assumed",
        HEADER,
        "{ return block_ids[index]; }",
        "{ return block_ids[0] + index; }",
    ),
    Mutant(
        "null block written",
        HEADER,
        "return !has_null_block || block != null_block;",
        "return !has_null_block || block != null_block || block == 0;",
    ),
    Mutant(
        "partial chunk read as if it were whole",
        HEADER,
        "return p.num_tokens == g.chunk_tokens;",
        "return p.first_token == 0;",
    ),
    Mutant(
        "tokens counted from the chunk instead of the sequence",
        HEADER,
        "return std::int64_t{object_index} * g.chunk_tokens + chunk_token;",
        "return std::int64_t{object_index} * 0 + chunk_token + g.chunk_tokens * 0;",
    ),
    Mutant(
        "native planner loses the part that opens the next window",
        PLANNER,
        "        kept_ = part;  // opens the next window\n        has_kept_ = true;\n        break;",
        "        break;",
    ),
    Mutant(
        "partial last chunk dropped",
        PLANNER,
        "return (request_.num_tokens + request_.chunk_tokens - 1) / request_.chunk_tokens;",
        "return request_.num_tokens / request_.chunk_tokens;",
    ),
    # The reference plan.
    Mutant(
        "last layer of a cut piece dropped",
        PLAN,
        "    for layer in range(piece.num_layers):\n",
        "    for layer in range(max(1, piece.num_layers - 1)):\n",
    ),
    Mutant(
        "first layers written twice, later ones never",
        PLAN,
        "first_layer=piece.first_layer + done, num_layers",
        "first_layer=piece.first_layer, num_layers",
    ),
    Mutant(
        "last window of a slice lost",
        PLAN,
        "windows.append(Window(tuple(pieces), used, index))",
        "windows.append(Window((), 0, index))",
    ),
    Mutant(
        "slice reported before its last window",
        PLAN,
        "windows.append(Window(tuple(pieces), used, None))",
        "windows.append(Window(tuple(pieces), used, index))",
    ),
    Mutant(
        "tail padded to a whole block",
        PLAN,
        "        end = min(request.num_tokens, (chunk + 1) * chunk_tokens)\n",
        "        end = min(request.num_tokens + request.num_tokens % 2, (chunk + 1) * chunk_tokens)\n",
    ),
    Mutant(
        "skip rounded down to its chunk",
        PLAN,
        "        start = max(request.skip_tokens, chunk * chunk_tokens)\n",
        "        start = chunk * chunk_tokens\n",
    ),
    Mutant(
        "objects counted from the skip",
        PLAN,
        "                yield Piece(chunk, index,",
        "                yield Piece(chunk - request.skip_tokens // chunk_tokens, index,",
    ),
    Mutant(
        "window one piece larger than the budget",
        PLAN,
        "                if used + size > window_bytes:\n",
        "                if used > window_bytes:\n",
    ),
    # The reference layout, and the NumPy executor.
    Mutant(
        "groups packed without their alignment",
        LAYOUT,
        "            offset += padded * GROUP_ALIGNMENT_BYTES\n",
        "            offset += earlier.geometry.object_bytes + 0 * padded\n",
    ),
    Mutant(
        "planes of an object strided by the slice's layers",
        LAYOUT,
        "plane = base + run * geometry.num_layers * row",
        "plane = base + run * num_layers * row",
    ),
    Mutant(
        "last slice lost where the width does not divide",
        "reference/slices.py",
        "    while layer < num_layers:\n",
        "    while layer + schedule[-1] <= num_layers or not slices:\n",
    ),
    Mutant(
        "skip taken from the destination only",
        NUMPY,
        "    origin = piece.object_index * plan.layout.chunk_tokens + piece.first_token\n",
        "    origin = piece.object_index * plan.layout.chunk_tokens + piece.first_token - plan.request.skip_tokens\n",
    ),
    Mutant(
        "staging images laid over one another",
        NUMPY,
        "        address = staging.ctypes.data + piece.staging_offset\n",
        "        address = staging.ctypes.data\n",
    ),
)


class Verdict(NamedTuple):
    """What the properties said of a mutant: which one failed after how many examples, or None and how many all ran."""

    mutant: Mutant
    killed_by: str | None
    examples: int
    how: str


def plant(mutant: Mutant, folder: Path) -> Path:
    """Leaves a copy of the packages under `folder` with the fault in it.

    Raises:
        LookupError: the text to replace does not stand in the file exactly once.
    """
    package = folder / "lamella"
    for name in ("reference", "cuda_ext"):
        shutil.copytree(ROOT / name, package / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    (package / "__init__.py").write_text('__version__ = "0"\n', encoding="utf-8")
    path = package / mutant.path
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        raise LookupError(
            f"mutant {mutant.name!r}: its text stands {text.count(mutant.old)} times in {mutant.path}; write it anew"
        )
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    return package


def try_mutant(
    mutant: Mutant, folder: Path, library_folder: Path | None, files: tuple[str, ...] = PROPERTIES
) -> Verdict:
    """The verdict of the ordinary properties, run with the ci profile's examples in a process of their own.

    Args:
        mutant: what to plant.
        folder: empty, for the copy.
        library_folder: where the unharmed native library lies; None where there is none.
        files: whose properties to run.

    Raises:
        LookupError: as `plant`.
        RuntimeError: the mutant does not compile, or the run ended without a report.
    """
    package = plant(mutant, folder)
    environment = {**os.environ, "HYPOTHESIS_PROFILE": "mutant"}
    sources = package / "cuda_ext" / "csrc"
    if mutant.is_native:
        library_folder = folder / "native"
        parts = [sources / name for name in NATIVE_SOURCES]
        compile_library(parts, sources / "include", library_folder / "liblamella_cpu.so")
        environment[MUTANT_SOURCES_VARIABLE] = str(sources)
    if library_folder is not None:
        environment["LAMELLA_LIBRARY_DIR"] = str(library_folder)
    report = folder / "report.json"
    command = [sys.executable, str(Path(__file__).with_name("mutant_trial.py")), str(folder), str(report), *files]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    if not report.is_file():
        raise RuntimeError(f"mutant {mutant.name!r}: no property began\n{done.stdout}\n{done.stderr}")
    found = json.loads(report.read_text(encoding="utf-8"))
    if done.returncode < 0:  # reading or writing where nothing is: a verdict too
        return Verdict(mutant, found["property"], found["examples"], f"crashed with signal {-done.returncode}")
    return Verdict(mutant, found["failed"], found["examples"], found["how"])
