"""Many clients on one server, killed in the middle: no wrong byte, and nothing is left of them."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

LOAD = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "cache_server_load.py"))


@pytest.mark.parametrize(
    ("retrieves", "clients", "kill_every"),
    [(300, 3, 60), pytest.param(10_000, 8, 500, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
def test_a_loaded_server_serves_right_bytes_and_is_left_as_it_was(
    retrieves: int, clients: int, kill_every: int, tmp_path: Path
) -> None:
    report: dict[str, Any] = LOAD["run"](tmp_path / "serve", retrieves, clients, kill_every, seed=0)
    assert set(report["outcomes"]) <= {"right", "aborted"}, report
    assert sum(report["outcomes"].values()) >= retrieves
    assert report["evicted_objects"] > 0, "the pool is smaller than what is stored"
    assert report["killed"] >= clients + retrieves // kill_every - 1
    assert (report["sessions_left"], report["pinned_left"], report["writing_left"]) == (0, 0, 0)
    assert report["slots"] == LOAD["NUM_SLOTS"]
    assert report["marks_left"] == 0
    assert report["memories"] == 1, "the pool's own"
    assert report["resident_kib_end"] < report["resident_kib_early"] + 8192


def test_servers_killed_under_load_cost_failed_loads_and_never_a_wrong_byte(tmp_path: Path) -> None:
    report: dict[str, Any] = LOAD["run"](tmp_path / "serve", 900, 3, 400, seed=1, kill_server_every=300)
    assert set(report["outcomes"]) <= {"right", "aborted", "lost"}, report
    assert report["servers"] >= 3
    assert report["outcomes"]["right"] > 850, "clients find each new server by themselves"
    assert (report["sessions_left"], report["pinned_left"], report["writing_left"]) == (0, 0, 0)
    assert (report["slots"], report["marks_left"], report["memories"]) == (LOAD["NUM_SLOTS"], 0, 1)
