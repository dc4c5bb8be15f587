"""The rules of the house that a reviewer would otherwise have to check by eye, read off the syntax trees."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

# Dependencies point one way: a package may import those named here, and itself.
MAY_IMPORT = {
    "reference": set[str](),
    "sim": {"reference"},
    "cuda_ext": {"reference"},
    "connector": {"reference", "cuda_ext"},
    "server": {"reference", "cuda_ext", "connector"},
    "cli": {"reference", "sim", "cuda_ext", "connector", "server"},
}
# reference is the meaning: what it computes depends on its arguments and on nothing else.
REFERENCE_MAY_NOT_IMPORT = {
    *("asyncio", "concurrent", "datetime", "io", "multiprocessing", "os", "pathlib", "queue", "random", "select"),
    *("shutil", "socket", "subprocess", "sys", "tempfile", "threading", "time"),
    *("matplotlib", "simpy", "torch", "typer", "vllm"),
}
MAX_LINES = 400
NAMES_THAT_SAY_NOTHING = {"common", "data", "helper", "helpers", "info", "manager2", "misc", "util", "utils"}


def _imports(source: str, package: str) -> set[str]:
    """Dotted names of every module that `source`, a module directly in lamella.`package`, imports anywhere."""
    found = set[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert node.module is not None
            found.add(node.module)
            if node.module == "lamella":
                found |= {f"lamella.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(f"lamella.{package}.<relative>")
    return found


def _broken_rules(source: str, package: str) -> list[str]:
    broken = []
    for name in sorted(_imports(source, package)):
        first, *rest = name.split(".")
        if first == "lamella" and rest and rest[0] not in MAY_IMPORT[package] | {package}:
            broken.append(f"lamella.{package} may not import {name}")
        if first in MAY_IMPORT:
            broken.append(f"import lamella.{first}, not {first}")
        if package == "reference" and first in REFERENCE_MAY_NOT_IMPORT:
            broken.append(f"lamella.reference may not import {name}")
        if first == "simpy" and package != "sim":
            broken.append(f"only lamella.sim may import simpy, not lamella.{package}")
    return broken


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_what_lies_below_it(package: str, root: Path) -> None:
    broken = {
        str(path.relative_to(root)): rules
        for path in (root / package).rglob("*.py")
        if (rules := _broken_rules(path.read_text(encoding="utf-8"), package))
    }
    assert broken == {}


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("reference", "import time"),
        ("reference", "def f():\n    from os.path import join"),
        ("reference", "from lamella.sim.world import World"),
        ("sim", "from lamella import connector"),
        ("cuda_ext", "import simpy"),
        ("connector", "import reference.plan"),
    ],
)
def test_the_check_itself_notices_a_broken_rule(package: str, source: str) -> None:
    assert _broken_rules(source, package) != []


def _modules(root: Path) -> list[Path]:
    return [path for package in MAY_IMPORT for path in sorted((root / package).rglob("*.py"))]


def test_a_module_does_one_thing_and_is_split_before_it_is_long(root: Path) -> None:
    lengths = {
        str(path.relative_to(root)): len(path.read_text(encoding="utf-8").splitlines()) for path in _modules(root)
    }
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


def test_modules_are_named_for_what_they_hold(root: Path) -> None:
    assert [path for path in _modules(root) if path.stem.strip("_") in NAMES_THAT_SAY_NOTHING] == []


def test_nothing_is_left_for_later_in_the_code(root: Path) -> None:
    # Spelt in pieces, or this file would find itself.
    marks = ("TO" + "DO", "FIX" + "ME", "XX" + "X:", "Not" + "ImplementedError")
    folders = [*MAY_IMPORT, "tests", "benchmarks", "examples", "notebooks"]
    sources = [
        path
        for folder in folders
        for path in (root / folder).rglob("*")
        if path.suffix in (".py", ".cpp", ".cu", ".cuh", ".h")
    ]
    left = [f"{path}: {mark}" for path in sources for mark in marks if mark in path.read_text(encoding="utf-8")]
    assert left == []


def test_the_command_starts_without_torch_or_matplotlib() -> None:
    code = "import sys, lamella.cli.main as m; m.build_app(); print(*({'torch', 'matplotlib'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == ""
