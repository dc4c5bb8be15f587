"""What the GPU report makes of tests that failed beside the stress."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gpu_report
import pytest

FIRST: dict[str, Any] = {"passed": 3, "skipped": [], "exit_code": 1, "seconds": 1.0}


def test_a_run_that_left_no_report_stays_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_report, "run", lambda *_args, **_more: pytest.fail("there is nothing to run again"))
    first = {**FIRST, "failed": ["no report was written"]}
    assert gpu_report.tried_alone(first, tmp_path) == first


def test_what_fails_alone_has_failed_and_what_passes_alone_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def run(command: list[str], _log: Path, _timeout_s: float, **_variables: str) -> int:
        asked.extend(part for part in command if "::" in part)
        (tmp_path / "gpu-tests-alone.xml").write_text(
            '<testsuite><testcase classname="tests.gpu.test_x" name="test_a[1.5]"/>'
            '<testcase classname="tests.gpu.test_x" name="test_b"><failure/></testcase></testsuite>'
        )
        return 1

    monkeypatch.setattr(gpu_report, "run", run)
    first = {**FIRST, "failed": ["tests.gpu.test_x::test_a[1.5]", "tests.gpu.test_x::test_b"]}
    found = gpu_report.tried_alone(first, tmp_path)
    assert asked == ["tests/gpu/test_x.py::test_a[1.5]", "tests/gpu/test_x.py::test_b"]
    assert (found["passed"], found["failed"]) == (4, ["tests.gpu.test_x::test_b"])
    assert found["passed_alone"] == ["tests.gpu.test_x::test_a[1.5]"]
