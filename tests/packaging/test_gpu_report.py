"""The committed GPU report is of the native sources that are here, and it is a good one."""

import json
from pathlib import Path
from typing import Any

import pytest

from lamella.cuda_ext.provenance import source_digest

REPORT = "benchmarks/results/gpu-report.json"
REFRESH = (
    f"on a machine with a GPU run `python benchmarks/gpu_report.py` and copy out/gpu-report.json to {REPORT} "
    "(CONTRIBUTING.md, GPU tests)"
)


@pytest.fixture(scope="module")
def report(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / REPORT).read_text(encoding="utf-8"))
    return found


def test_the_gpu_report_is_of_these_native_sources(root: Path, report: dict[str, Any]) -> None:
    assert report["provenance"]["native_sources"] == source_digest(root / "cuda_ext" / "csrc"), (
        f"the native sources have changed since the GPU tests ran ({report['provenance']['date']}): {REFRESH}"
    )


def test_every_gpu_test_passed_and_the_memory_checker_found_nothing(report: dict[str, Any]) -> None:
    assert report["tests"]["failed"] == []
    assert report["tests"]["passed"] > 50
    for tool, least in (("memcheck", 3), ("initcheck", 1)):
        assert (report["sanitizer"][tool]["errors"], report["sanitizer"][tool]["failed"]) == (0, [])
        assert report["sanitizer"][tool]["passed"] >= least


def test_every_fault_planted_into_the_shared_header_was_found_on_the_gpu(report: dict[str, Any]) -> None:
    assert [mutant["name"] for mutant in report["mutants"] if not mutant["killed"]] == []
    assert len(report["mutants"]) >= 10


def test_minutes_of_stress_lost_and_leaked_nothing(report: dict[str, Any]) -> None:
    assert [run["problems"] for run in report["stress"]] == [[], []]
    assert len({run["seed"] for run in report["stress"]}) == 2
    for run in report["stress"]:
        assert run["seconds"] >= 150
        assert run["kinds"]["retrieve landed"] > 1000
        assert run["kinds"]["abort"] > 100


def test_the_digest_sees_every_name_and_every_byte(tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_text("x")
    first = source_digest(tmp_path)
    (tmp_path / "notes.txt").write_text("not a source")
    assert source_digest(tmp_path) == first
    (tmp_path / "b.hpp").write_text("")
    second = source_digest(tmp_path)
    (tmp_path / "b.hpp").rename(tmp_path / "c.hpp")
    assert len({first, second, source_digest(tmp_path)}) == 3
    with pytest.raises(ValueError, match="holds no native sources"):
        source_digest(tmp_path / "absent")
