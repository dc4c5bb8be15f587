"""The cores an engine's threads get."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from concurrency.host_cores import (
    CHOOSING_S,
    MOST_CHOICES,
    PAUSE_S,
    EngineCores,
    HostCores,
    cores_of_node,
    dealt,
    physical_cores,
)
from concurrency.rank import Rank, Ranks


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


def flat(share: list[tuple[int, ...]]) -> set[int]:
    return {cpu for core in share for cpu in core}


CORES = [(number, number + 16) for number in range(16)]
NODES = [[*range(8), *range(16, 24)], [*range(8, 16), *range(24, 32)]]


def test_two_engines_side_by_side_share_no_core() -> None:
    shares = dealt(CORES, [NODES[0]] * 2)
    assert not flat(shares[0]) & flat(shares[1])
    assert all(core[0] < 8 for share in shares for core in share), "near the device"
    assert dealt(CORES, [[0, 1]] * 2)[1] == CORES[1::2], "too few are near: any"


def test_each_of_an_engines_processes_has_cores_near_its_own_device() -> None:
    shares = dealt(CORES, [NODES[0], *NODES])
    assert shares == [CORES[0:8:2], CORES[1:8:2], CORES[8:]]
    assert dealt(CORES, [NODES[1]] * 3) == [CORES[8::2], CORES[9::2], CORES[:8]], "too few are near for the last"


def test_a_device_whose_node_is_unknown_takes_no_core_of_others() -> None:
    shares = dealt(CORES, [NODES[0], (), NODES[1]])
    assert not flat(shares[0]) & flat(shares[1])
    assert not flat(shares[1]) & flat(shares[2])
    assert all(len(share) >= 3 for share in shares)


# ---- one process


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Two of this machine's logical cores, the second the quicker one; all are given back."""
    every = sorted(os.sched_getaffinity(0))
    if len(every) < 2:
        pytest.skip("needs two cores")
    monkeypatch.setattr(
        "concurrency.host_cores._probe_us", lambda: 1.0 if os.sched_getaffinity(0) == {every[1]} else 2.0
    )
    yield every[:2]
    for name in os.listdir("/proc/self/task"):
        with suppress(OSError):  # it has ended meanwhile
            os.sched_setaffinity(int(name), every)


def looking(seen: dict[str, set[int]], name: str, end: threading.Event) -> threading.Thread:
    """A thread that notes the cores it may have when the event comes."""

    def work() -> None:
        end.wait(10.0)
        seen[name] = os.sched_getaffinity(0)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_the_first_thread_has_the_quickest_core_and_others_the_rest(two_cores: list[int]) -> None:
    chosen = HostCores([(cpu,) for cpu in two_cores])
    seen: dict[str, set[int]] = {}
    end = threading.Event()
    try:
        threads = [looking(seen, "older", end)]
        chosen.choose()
        assert os.sched_getaffinity(0) == {two_cores[1]}
        with chosen.shared():
            threads.append(looking(seen, "made inside", end))
        assert os.sched_getaffinity(0) == {two_cores[1]}
    finally:
        end.set()
    for thread in threads:
        thread.join()
    assert seen == {"older": {two_cores[0]}, "made inside": {two_cores[0]}}
    assert chosen.facts()["main"] == two_cores[1]


@pytest.mark.parametrize("left", [0, 1, 2, 3, 5])
def test_cores_that_were_taken_away_are_left_out_and_with_fewer_than_two_nothing_is_done(
    left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = set(range(100, 100 + 2 * left))
    mine: list[set[int]] = []

    def set_affinity(thread: int, cpus: Any) -> None:
        if not set(cpus) & (allowed | {0}):
            raise OSError(22, "Invalid argument")
        if not thread:
            mine.append(set(cpus))

    monkeypatch.setattr(os, "sched_setaffinity", set_affinity)
    monkeypatch.setattr(os, "listdir", lambda _folder: [str(os.getpid())])
    chosen = HostCores([(cpu, cpu + 1) for cpu in range(100, 110, 2)])
    for _again in range(2):
        chosen.choose()
        with chosen.shared():
            pass
    facts = chosen.facts()
    if left < 2:
        assert (facts["cores"], facts["main"], facts["why_not"]) == ([], None, f"{left} of 5 physical cores are left")
        assert 0 in mine[-1], "the thread may have any core again"
    else:
        assert [core[0] for core in facts["cores"]] == sorted(allowed)[::2]
        assert facts["main"] in allowed


def test_a_rank_has_its_own_share_and_what_an_exchange_makes_gets_the_other_cores(
    two_cores: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, set[int]] = {}
    end = threading.Event()

    def exchanging(self: Rank, settings: Any) -> tuple[int, Any]:
        looking(seen, "made by the exchange", end).join()
        return 1, settings

    monkeypatch.setattr(Rank, "_exchange", exchanging)
    rank = Rank(SimpleNamespace(rank=1))
    rank.take_cores([[(99,)], [(cpu,) for cpu in two_cores]], "")
    rank.choose_cores()
    assert os.sched_getaffinity(0) == {two_cores[1]}
    end.set()
    rank.exchange(None)
    assert seen == {"made by the exchange": {two_cores[0]}}
    assert os.sched_getaffinity(0) == {two_cores[1]}
    assert rank.facts_of_cores()["main"] == two_cores[1]


# ---- an engine


class Executor:
    """Workers on devices of their own, as an engine's executor calls them."""

    def __init__(self, *devices: str) -> None:
        self.workers = [SimpleNamespace(rank=rank, device=device) for rank, device in enumerate(devices)]

    def collective_rpc(self, method: Any, args: tuple[Any, ...]) -> list[Any]:
        return [method(worker, *args) for worker in self.workers]


@pytest.fixture
def on_two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 16 cores, cuda:0 near the first half of them and cuda:1 near the second."""
    monkeypatch.setattr("concurrency.host_cores.physical_cores", lambda _allowed: CORES)
    monkeypatch.setattr("concurrency.rank.cores_near", lambda device: NODES[int(device[-1])])


@pytest.mark.usefixtures("on_two_nodes")
def test_the_scheduling_process_and_each_rank_have_shares_and_choose_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[list[tuple[int, ...]]] = []
    monkeypatch.setattr(HostCores, "choose", lambda self: chosen.append(self.facts()["cores"]))
    cores = EngineCores(Ranks(Executor("cuda:0", "cuda:1")), 0, 1)
    wanted = [[list(core) for core in share] for share in (CORES[0:8:2], CORES[1:8:2], CORES[8:])]
    facts = cores.facts()
    assert [facts["cores"], *(rank["cores"] for rank in facts["ranks"])] == wanted
    assert "why_not" not in facts
    cores.choose()
    assert chosen == [*wanted[1:], wanted[0]]


@pytest.mark.usefixtures("on_two_nodes")
@pytest.mark.parametrize("part", [0, 1])
def test_with_one_rank_the_engine_has_its_part_of_the_cores_near_the_device(part: int) -> None:
    facts = EngineCores(Ranks(Executor("cuda:1")), part, 2).facts()
    assert facts == {"cores": [list(core) for core in CORES[8:][part::2]], "main": None, "probe_us": {}}


@pytest.mark.usefixtures("on_two_nodes")
@pytest.mark.parametrize("devices", [("cuda:0",), ("cuda:0", "cuda:1")])
def test_where_cores_are_few_nothing_is_done_and_every_rank_says_why(
    devices: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("concurrency.host_cores.physical_cores", lambda _allowed: CORES[: 3 * len(devices) - 1])
    monkeypatch.setattr(os, "sched_setaffinity", None)
    cores = EngineCores(Ranks(Executor(*devices)), 0, 1)
    cores.choose()
    with cores.shared():
        pass
    facts = cores.facts()
    for one in (facts, *facts.get("ranks", ())):
        assert (one["cores"], one["main"], one["probe_us"]) == ([], None, {})
        assert one["why_not"].startswith(f"{3 * len(devices) - 1} physical cores, fewer than 3 for each of")
    assert len(facts.get("ranks", ())) == (2 if len(devices) == 2 else 0)


class Cores:
    """Two ranks and the process that schedules on a machine whose cores are as quick as `takes` says.

    A look costs `look_s`; a choice costs a tenth of a second and brings what is next in `to_come` of that process.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, look_s: float = 0.001) -> None:
        workers = Executor("cuda:0", "cuda:1")
        self.now_s, self.chosen = 0.0, list[str]()
        self.cores = EngineCores(Ranks(workers), 0, 1, clock=lambda: self.now_s, sleep=self.sleep)
        self.takes = {"own": 700.0, "rank 0": 702.0, "rank 1": 690.0}
        self.to_come: dict[str, list[float]] = {name: [] for name in self.takes}
        names = {id(self.cores._own): "own"}
        names |= {id(one.__dict__["_concurrency_rank"]._cores): f"rank {one.rank}" for one in workers.workers}

        self.slept = 0

        def look(one: HostCores) -> float:
            self.now_s += look_s
            one._looked_us = self.takes[names[id(one)]]
            return one._looked_us

        def choose(one: HostCores) -> None:
            self.now_s += 0.1
            name = names[id(one)]
            self.chosen.append(name)
            if self.to_come[name]:
                self.takes[name] = self.to_come[name].pop(0)

        monkeypatch.setattr(HostCores, "look", look)
        monkeypatch.setattr(HostCores, "choose", choose)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.slept += 1


@pytest.mark.usefixtures("on_two_nodes")
def test_before_a_repeat_every_process_is_looked_at_and_those_with_slow_cores_choose_until_none_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Cores(monkeypatch)
    cores, takes = machine.cores, machine.takes
    assert cores.keep_quick() == [[700.0, 702.0, 690.0]]
    takes["rank 1"] = 1.19 * 690
    assert cores.keep_quick() == [[700.0, 702.0, 821.1]]
    assert not machine.chosen, "as slow as quick cores may be"
    takes["rank 1"], machine.to_come["rank 1"] = 1300.0, [1290.0, 900.0, 695.0, 650.0]
    looks = cores.keep_quick()
    assert looks == [[700.0, 702.0, us] for us in (1300.0, 1290.0, 900.0, 695.0)]
    assert machine.chosen == ["rank 1"] * 3, "the others keep their quick cores, and quick is enough"
    assert machine.slept == 2, "between two choices, and no longer than there is need for it"
    assert cores.chosen_anew == 3
    assert cores.look() == looks[-1]
    assert len(machine.chosen) == 3, "to look is not to choose"
    takes.update(dict.fromkeys(takes, 1300.0))
    machine.to_come |= {"own": [710.0], "rank 0": [1300.0, 710.0], "rank 1": [710.0]}
    assert cores.keep_quick()[-1] == [710.0] * 3, "slow beside the quickest look ever, though all were alike"
    assert machine.chosen[3:] == ["rank 0", "rank 1", "own", "rank 0"]


@pytest.mark.usefixtures("on_two_nodes")
def test_where_no_core_is_quick_choosing_ends_after_so_many_times_or_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Cores(monkeypatch)
    machine.cores.look()
    machine.takes["own"] = 1300.0
    looks = machine.cores.keep_quick()
    assert looks == [[1300.0, 702.0, 690.0]] * len(looks)
    assert machine.chosen == ["own"] * (len(looks) - 1)
    assert 2 * (0.1 + PAUSE_S) < CHOOSING_S < machine.now_s < CHOOSING_S + 0.1 + PAUSE_S
    for look_s in (0.2, CHOOSING_S):
        slow = Cores(monkeypatch, look_s)
        slow.cores.look()
        slow.takes.update(dict.fromkeys(slow.takes, 1300.0))
        begin_s = slow.now_s
        looks = slow.cores.keep_quick()
        assert slow.now_s - begin_s <= CHOOSING_S + 3 * (look_s + 0.1), "what began in time ends"
        assert len(looks) == (2 if look_s == 0.2 else 1)
    monkeypatch.setattr("concurrency.host_cores.CHOOSING_S", 1e9)
    assert len(slow.cores.keep_quick()) == 1 + MOST_CHOICES


def test_a_look_is_the_shortest_probe_of_the_core_that_a_thread_has(two_cores: list[int]) -> None:
    mine = HostCores([(cpu,) for cpu in two_cores])
    assert mine.look() is None
    mine.choose()
    assert mine.look() == 1.0
    assert os.sched_getaffinity(0) == {two_cores[1]}
    os.sched_setaffinity(0, {two_cores[0]})
    mine.give_up_slow(1.5)
    assert os.sched_getaffinity(0) == {two_cores[0]}, "the last look was quick enough"
    assert mine.look() == 2.0
    mine.give_up_slow(1.5)
    assert os.sched_getaffinity(0) == {two_cores[1]}


def test_where_nothing_is_wanted_no_rank_is_asked() -> None:
    cores = EngineCores(lambda name, *_more: pytest.fail(f"{name} was called"), 0, 1, wanted=False)
    cores.choose()
    assert cores.keep_quick() == [cores.look()] == [[]]
    assert cores.facts() == {"cores": [], "main": None, "probe_us": {}, "why_not": "not wanted"}
