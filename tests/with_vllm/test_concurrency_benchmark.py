"""The concurrency benchmark, whole, with a tiny model: what a GPU run relies on is seen here first."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(out: Path, *arguments: str) -> list[dict[str, Any]]:
    command = [sys.executable, str(BENCHMARKS / "concurrency" / "measure.py"), str(out), "--tiny", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(tmp_path_factory.mktemp("run") / "run.jsonl", "--only", "c4_hit15360_new768", "--repeats", "1")


def figures() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    from concurrency import figures

    return figures


def judged() -> set[str]:
    """Arms whose answers are held to recomputation, besides the control."""
    sys.path.insert(0, str(BENCHMARKS))
    from concurrency.run import VERIFY_ARMS

    return set(VERIFY_ARMS) - {"recompute", "early_read"}


def test_every_arm_answers_as_recomputation_does_and_the_early_reader_does_not(rows: list[dict[str, Any]]) -> None:
    verdicts = {arm: verdict for (_cell, arm), verdict in figures().verdicts_of(rows).items()}
    wrong = verdicts.pop("early_read").wrong
    assert wrong > 0, "the control that does not wait must be seen to read early"
    assert set(verdicts) == judged()
    assert all(verdict.wrong == verdict.near_ties == 0 for verdict in verdicts.values())


def test_every_hit_comes_from_the_pool_and_every_request_has_all_its_times(rows: list[dict[str, Any]]) -> None:
    repeats = [row for row in rows if row["kind"] == "repeat"]
    assert {row["arm"] for row in repeats} == set(repeats[0]["cell"]["arms"])
    assert not [row["arm"] for row in repeats if figures().is_flawed(row)]
    for row in repeats:
        for request in row["requests"]:
            assert 0 < request["queued_us"] < request["token_us"][0]
            assert request["token_us"] == sorted(request["token_us"])
            assert len(request["token_us"]) == row["cell"]["output"]
            if row["arm"] != "recompute":
                slices = 4 if row["arm"] in ("fifo_first", "fifo_jit", "interleaved_first") else 1
                assert len(request["landed_us"]) >= slices
                assert request["ordered_us"] <= request["landed_us"][0] <= request["landed_us"][-1]
                if row["arm"].startswith("sync"):  # it joined the very next step: nobody waited for its release
                    assert "released_us" not in request
                    continue
                if row["arm"].startswith("auto") and "released_us" not in request:
                    continue  # as it chose
                assert request["landed_us"][0] <= request["released_us"] <= request["token_us"][0]
        assert sum(step[2] for step in row["steps"]) > 0


def test_what_an_arm_leaves_on_does_not_reach_the_next(tmp_path: Path) -> None:
    out = tmp_path / "run.jsonl"
    options = (
        "--cells",
        "extra+beside",
        "--only",
        "misses,tier20,c1_hit15360_new768_chunk256_beside",
        "--repeats",
        "1",
    )
    options += ("--arms", "fifo_first,fifo_beside")
    run(out, *options)
    again = run(out, *options)
    repeats = [row for row in again if row["kind"] == "repeat"]
    beside = [row["arm"] for row in repeats if row["cell"]["name"].endswith("beside")]
    assert sorted(beside) == ["chunk_bounded", "chunk_bounded", "fifo_beside", "fifo_first"]
    assert len(repeats) == 2 * 2 + 4, "a second call found everything done"
    assert not [row for row in repeats if figures().is_flawed(row)]
    stored = [row["counters"].get("stored_tokens", 0) for row in repeats if row["cell"]["stores"]]
    assert min(stored) > 0
    assert not any(row["counters"].get("stored_tokens") for row in repeats if not row["cell"]["stores"])
    assert all(row["choosing"]["looks_us"] == [[]] for row in repeats), "no cores are chosen beside other work"


def test_two_ranks_answer_as_recomputation_does_and_every_layer_counts_from_the_slower(tmp_path: Path) -> None:
    """The scheduler here, each rank in a process of its own: exchange, pool and probe go there."""
    options = ("--tp", "2", "--cells", "two_gpus", "--only", "c4", "--repeats", "1", "--arms", "fifo_first,sync")
    rows = run(tmp_path / "run.jsonl", *options)
    verdicts = {arm: verdict for (_cell, arm), verdict in figures().verdicts_of(rows).items()}
    assert verdicts.pop("early_read").wrong > 0, "the control that does not wait must be seen to read early"
    assert set(verdicts) == judged()
    assert all(verdict.wrong == verdict.near_ties == 0 for verdict in verdicts.values())
    repeats = [row for row in rows if row["kind"] == "repeat"]
    assert {row["arm"] for row in repeats} == {"chunk_bounded", "fifo_first", "sync"}
    assert not [row["arm"] for row in repeats if figures().is_flawed(row)]
    hit_bytes = repeats[0]["cell"]["hit"] * 4096  # a token of the tiny model, both ranks together
    for row in repeats:
        for request in row["requests"]:
            ranks = request["landed_by_rank_us"]
            assert len(ranks) == 2
            assert request["landed_us"] == [max(layer) for layer in zip(*ranks, strict=True)]
            assert request["bytes"] == hit_bytes
            if row["arm"] == "fifo_first":
                assert request["landed_us"][0] <= request["released_us"] <= request["token_us"][0]
