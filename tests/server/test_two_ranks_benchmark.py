"""The program that times one server feeding two ranks, whole, on the CPU device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine_driver import ENGINE_MISSING

pytestmark = pytest.mark.skipif(ENGINE_MISSING is not None, reason=str(ENGINE_MISSING))

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "server_two_ranks.py"


def test_both_ranks_get_their_own_half_and_the_figure_is_the_slowers(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, str(PROGRAM), str(out), "--devices", "cpu", "cpu", "--mib", "16", "--layers", "4"]
    result = subprocess.run(
        [*command, "--repeats", "2"], capture_output=True, text=True, timeout=120, check=False
    )  # 1: above the goal, which a CPU need not reach
    assert result.returncode in (0, 1), result.stderr[-3000:]
    found = json.loads(out.read_text(encoding="utf-8"))
    assert list(found["summary"]) == ["1"]
    figure = found["summary"]["1"]
    assert figure["slower_last_layer_ms"] >= max(figure["rank_0_last_layer_ms"], figure["rank_1_last_layer_ms"])
    for turns in zip(*(rank["1"] for rank in found["turns"]), strict=True):
        begun_ns = turns[0][1]
        for raw_ns, _own_ns, asked_ns, *landed_ns in turns:
            assert raw_ns > 0
            assert begun_ns < asked_ns < landed_ns[-1]
            assert len(landed_ns) == 4
            assert landed_ns == sorted(landed_ns)
