"""The cores an engine's thread gets, and the captured graphs an arm may replay."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import host_cores
import pytest
from graph_choice import GraphChoice, usual_sizes
from host_cores import HostCores, cores_of_node, physical_cores, share_of


def machine(folder: Path, siblings: dict[int, str]) -> Path:
    for cpu, text in siblings.items():
        topology = folder / f"devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(text + "\n")
    node = folder / "devices/system/node/node1"
    node.mkdir(parents=True)
    (node / "cpulist").write_text("2-3,6-7\n")
    return folder


def test_logical_cores_of_one_physical_core_stay_together(tmp_path: Path) -> None:
    folder = machine(tmp_path, {cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)})
    assert physical_cores(range(8), folder) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert physical_cores([1, 2, 6], folder) == [(1,), (2, 6)], "of those allowed"
    assert physical_cores([0, 1], tmp_path / "unknown") == [(0,), (1,)]
    assert cores_of_node(1, folder) == (2, 3, 6, 7)
    assert cores_of_node(None, folder) == cores_of_node(5, folder) == ()


def test_two_engines_side_by_side_share_no_core() -> None:
    cores = [(number, number + 16) for number in range(16)]
    shares = [share_of(cores, [*range(8), *range(16, 24)], part, 2) for part in (0, 1)]
    assert not {cpu for core in shares[0] for cpu in core} & {cpu for core in shares[1] for cpu in core}
    assert all(core[0] < 8 for share in shares for core in share), "near the device"
    few = share_of(cores, [0, 1], 1, 2)
    assert few == cores[1::2], "too few are near: any"


def test_where_cores_are_few_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})
    before = HostCores(0, 1)
    before.choose()
    with before.shared():
        pass
    assert before.facts() == {"cores": [], "main": None, "probe_us": {}}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_the_first_thread_has_the_quickest_core_and_others_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    every = sorted(os.sched_getaffinity(0))
    monkeypatch.setattr(host_cores, "_FEWEST_CORES", 2)
    monkeypatch.setattr(host_cores, "physical_cores", lambda allowed: [(cpu,) for cpu in every[:2]])
    monkeypatch.setattr(host_cores, "_probe_us", lambda: 1.0 if os.sched_getaffinity(0) == {every[1]} else 2.0)
    chosen = HostCores(0, 1)
    seen: dict[str, set[int]] = {}
    end = threading.Event()

    def look(name: str, wait_s: float) -> threading.Thread:
        def work() -> None:
            end.wait(wait_s)
            seen[name] = os.sched_getaffinity(0)

        thread = threading.Thread(target=work)
        thread.start()
        return thread

    try:
        older = look("older", 10.0)
        chosen.choose()
        assert os.sched_getaffinity(0) == {every[1]}
        with chosen.shared():
            look("made inside", 0.0).join()
        assert os.sched_getaffinity(0) == {every[1]}
        end.set()
        older.join()
        assert seen == {"older": {every[0]}, "made inside": {every[0]}}
    finally:
        end.set()
        for name in os.listdir("/proc/self/task"):
            with suppress(OSError):  # it has ended meanwhile
                os.sched_setaffinity(int(name), every)


# ---- graphs


def manager(full: bool, sizes: list[int]) -> Any:
    """Candidates as vLLM's second runner has them: for every number of tokens, the graphs of the next captured size."""
    candidates: dict[tuple[int, int], list[Any]] = {}
    begin = 0
    for size in sizes:
        modes = ["FULL", "PIECEWISE"] if full and size <= 128 else ["PIECEWISE"]
        for tokens in range(begin, size + 1):
            candidates[tokens, 0] = [SimpleNamespace(cg_mode=SimpleNamespace(name=mode), num_tokens=size)
                                     for mode in modes]  # fmt: skip
        begin = size + 1
    return SimpleNamespace(_candidates=candidates)


def choice(full: bool, prefills: tuple[int, ...]) -> tuple[GraphChoice, Any]:
    made = manager(full, [*usual_sizes(64), *prefills])
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=64))
    return GraphChoice(SimpleNamespace(vllm_config=config, cudagraph_manager=made)), made


def replayed(made: Any, tokens: int) -> list[str]:
    return [f"{one.cg_mode.name} {one.num_tokens}" for one in made._candidates.get((tokens, 0), [])]


def test_an_arm_replays_only_the_graphs_it_says() -> None:
    graphs, made = choice(full=True, prefills=(768, 776))
    graphs.choose("piecewise")
    assert (replayed(made, 3), replayed(made, 770)) == (["PIECEWISE 4"], [])
    graphs.choose("prefill")
    assert (replayed(made, 3), replayed(made, 770)) == (["PIECEWISE 4"], ["PIECEWISE 776"])
    assert replayed(made, 200) == [], "a step is not padded from 200 to 768 tokens"
    graphs.choose("full")
    assert (replayed(made, 3), replayed(made, 770)) == (["FULL 4", "PIECEWISE 4"], [])
    graphs.choose("piecewise")
    assert (replayed(made, 3), replayed(made, 770)) == (["PIECEWISE 4"], [])


@pytest.mark.parametrize("kind", ["prefill", "full"])
def test_graphs_that_were_not_captured_are_refused(kind: str) -> None:
    graphs, _made = choice(full=False, prefills=())
    with pytest.raises(ValueError, match=f"captured no {kind} graphs"):
        graphs.choose(kind)
    with pytest.raises(ValueError, match="must be one of piecewise, prefill, full, got 'half'"):
        graphs.choose("half")


def test_an_engine_without_graphs_leaves_no_choice() -> None:
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=64))
    GraphChoice(SimpleNamespace(vllm_config=config)).choose("full")


def test_the_usual_sizes_are_those_that_vllm_says() -> None:
    assert usual_sizes(64)[:5] == [1, 2, 4, 8, 16]
    assert usual_sizes(64)[-1] == 128
