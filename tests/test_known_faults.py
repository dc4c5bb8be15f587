"""tests/known_faults.toml and the `known_fault` markers say the same, row by row, in both directions."""

import ast
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FAULTS = tomllib.loads((ROOT / "tests" / "known_faults.toml").read_text(encoding="utf-8"))["fault"]


def _rows_marked_on(node: ast.FunctionDef | ast.ClassDef) -> set[int]:
    """Rows of every `known_fault(...)` in the decorators, also inside a `pytest.param(..., marks=...)`."""
    calls = (call for decorator in node.decorator_list for call in ast.walk(decorator) if isinstance(call, ast.Call))
    marks = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "known_fault"]
    return {ast.literal_eval(argument) for call in marks for argument in call.args}


def _marked_tests(source: str, path: str) -> dict[int, set[str]]:
    found = defaultdict[int, set[str]](set)
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            for row in _rows_marked_on(node):
                found[row].add(f"{path}::{node.name}")
        if isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    for row in _rows_marked_on(method):
                        found[row].add(f"{path}::{node.name}::{method.name}")
    return dict(found)


@pytest.fixture(scope="module")
def marked() -> dict[int, set[str]]:
    found = defaultdict[int, set[str]](set)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for row, tests in _marked_tests(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()).items():
            found[row] |= tests
    return found


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"row{fault['row']}")
def test_a_row_lists_exactly_the_tests_that_carry_its_number(fault: dict, marked: dict[int, set[str]]) -> None:
    assert set(fault.get("tests", [])) == marked.get(fault["row"], set())


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"row{fault['row']}")
def test_a_row_without_a_test_says_which_part_will_bring_it(fault: dict) -> None:
    assert fault.get("tests") or fault.get("waits_for"), "neither tests nor waits_for"


def test_every_marker_names_a_row_of_the_list(marked: dict[int, set[str]]) -> None:
    rows = [fault["row"] for fault in FAULTS]
    assert len(set(rows)) == len(rows)
    assert set(marked) <= set(rows)


def test_the_check_sees_markers_on_functions_methods_classes_and_parameters() -> None:
    source = """
@pytest.mark.known_fault(1, 2)
def test_a(): ...
@pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.known_fault(3))])
def test_b(x): ...
@pytest.mark.known_fault(4)
class TestC:
    @pytest.mark.known_fault(5)
    def test_d(self): ...
"""
    found = {1: {"f::test_a"}, 2: {"f::test_a"}, 3: {"f::test_b"}, 4: {"f::TestC"}, 5: {"f::TestC::test_d"}}
    assert _marked_tests(source, "f") == found
