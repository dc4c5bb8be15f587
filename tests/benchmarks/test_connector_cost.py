"""What a step costs with nothing to load: engines of one round are compared, and raw values make the summary."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_connector_cost import ARMS, COMPARED, summary

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "vllm_connector_cost.py"
MEASURED = PROGRAM.parent / "results" / "h200-2026-11-29-connector-cost.json"


def test_rounds_are_compared_and_not_medians() -> None:
    default, before = [1.0, 2.0, 4.0, 8.0, 100.0], [1.01, 2.02, 4.04, 8.08, 1.0]
    found = summary({"default": {"decode 1": default}, "before": {"decode 1": before}})["decode 1"]
    assert found["median_ms"] == {"default": 4.0, "before": 2.02}
    assert found["before over default, %"] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("arm", sorted(set(ARMS) - {"default"}))
def test_every_arm_is_compared_with_the_engine_as_it_is(arm: str) -> None:
    assert (arm, "default") in COMPARED


def test_a_summary_is_made_anew_from_raw_values(tmp_path: Path) -> None:
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))
    copy = tmp_path / "cost.json"
    copy.write_text(json.dumps({**measured, "summary": {}}), encoding="utf-8")
    subprocess.run([sys.executable, PROGRAM, copy, "--summarize"], check=True)
    assert json.loads(copy.read_text(encoding="utf-8")) == measured
    assert measured["summary"]["decode 1"]["before over default, %"][1] < 0
