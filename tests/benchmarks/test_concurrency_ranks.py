"""What several ranks saw of one load, put together: the request runs when the slower rank has landed."""

from __future__ import annotations

from typing import Any

import pytest
from concurrency.figures import figures_of
from concurrency.probe import Probe, load_of_ranks
from concurrency.rank import Ranks


def seen(landed: list[int], released: int, started: int = 10) -> dict[str, Any]:
    return {
        "ordered_ns": started - 1,
        "started_ns": started,
        "landed_ns": landed,
        "released_ns": released,
        "bytes": 100,
        "method": "DIRECT",
    }


def rank(**loads: dict[str, Any]) -> dict[str, Any]:
    return {
        "loads": loads,
        "steps": [[0, 1, 2, 3, 4, None]],
        "host_stall_us": {"0": 5, "1": len(loads)},
        "stream_stall_us": {},
        "peak_live_transfers": 1,
    }


def test_a_layer_has_landed_when_it_has_on_the_slower_rank_and_release_waits_for_both() -> None:
    found = load_of_ranks([seen([20, 60], 61), seen([30, 40], 41, started=12)])
    assert found["landed_ns"] == [30, 60]
    assert found["landed_by_rank_ns"] == [[20, 60], [30, 40]]
    assert found["released_ns"] == 61
    assert (found["ordered_ns"], found["started_ns"], found["bytes"]) == (9, 10, 200)
    assert found["method"] == "DIRECT"


def test_one_rank_leaves_what_it_saw() -> None:
    assert load_of_ranks([seen([20, 60], 61)]) == seen([20, 60], 61)


def test_what_a_rank_did_not_see_does_not_hide_what_another_did() -> None:
    found = load_of_ranks([{"released_ns": 50}, seen([20], 30)])
    assert found["landed_ns"] == [20]
    assert found["released_ns"] == 50


def test_look_ups_and_every_ranks_loads_come_together_by_request() -> None:
    probe = Probe()
    probe.loads["r1"]["asked_ns"] = 3
    taken = probe.taken([rank(r1=seen([20], 21)), rank(r1=seen([25], 26), r2=seen([40], 41))])
    assert taken["loads"]["r1"]["asked_ns"] == 3
    assert taken["loads"]["r1"]["landed_ns"] == [25]
    assert taken["loads"]["r2"]["landed_ns"] == [40]
    assert taken["host_stall_us"] == {"0": 5, "1": 2}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_figures_keep_each_ranks_last_landing_apart(num_ranks: int) -> None:
    cell = {"name": "c", "concurrency": 1, "rate_per_s": None, "hit": 32, "new": 8, "mix": [], "miss_every": 0}
    request = {"queued_us": 1000, "at_us": 0, "token_us": [9000, 9500], "cached": 32, "landed_us": [3000, 6000]}
    request |= {"started_us": 1500}
    if num_ranks > 1:
        request["landed_by_rank_us"] = [[2000, 4000], [3000, 6000]]
    row = {
        "kind": "repeat", "cell": cell | {"bystanders": 0}, "arm": "chunk_bounded", "repeat": 0, "wall_us": 10_000,
        "requests": [request, request], "steps": [], "host_stall_us": {}, "peak_in_flight_bytes": 0,
        "bystander_us": [], "counters": {},
    }  # fmt: skip
    (arm,) = figures_of([row])["c"].arms.values()
    assert arm.last_layer_ms == 5.0
    assert arm.last_layer_by_rank_ms == ((3.0, 5.0) if num_ranks > 1 else ())


class Executor:
    """Two workers, as an engine's executor calls them."""

    def __init__(self) -> None:
        self.workers = [type("Worker", (), {})() for _ in range(2)]

    def collective_rpc(self, method: Any, args: tuple[Any, ...]) -> list[Any]:
        return [method(worker, *args) for worker in self.workers]


def test_each_rank_keeps_its_own_and_a_failure_names_the_rank_and_leaves_no_reply_behind() -> None:
    executor = Executor()
    ranks = Ranks(executor)
    ranks("clear")
    executor.workers[1]._concurrency_rank._probe.clear = None
    executor.workers[0]._concurrency_rank._probe.peak_live = 7
    with pytest.raises(RuntimeError, match="clear failed on rank 1:(.|\n)*TypeError"):
        ranks("clear")
    executor.workers[0]._concurrency_rank._probe.peak_live = 7
    assert [taken["peak_live_transfers"] for taken in ranks("taken")] == [7, 0]
