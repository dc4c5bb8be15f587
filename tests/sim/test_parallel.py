"""Cells give the same answers however they ran, and a sweep that was stopped is finished from its journal (SIM-7)."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cell_work
from cell_work import SHARED, counted, failing, which_node, work
from lamella.sim.parallel import JournalError, Runner, Running, cell_seeds, run_cells

CELLS = list(range(13))


def expected() -> list[dict[str, Any]]:
    return run_cells(work, SHARED, CELLS, seed=5)


def test_answers_come_in_the_order_of_the_cells_each_with_its_own_seed() -> None:
    answers = expected()
    assert [answer["list"][0] for answer in answers] == CELLS
    assert [answer["seed"] for answer in answers] == cell_seeds(5, len(CELLS))
    assert len({answer["seed"] for answer in answers}) == len(CELLS)
    assert answers[3]["value"] == math.sin(3) * 0.1


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_several_processes_give_the_same_answers(workers: int) -> None:
    assert run_cells(work, SHARED, CELLS, 5, Running(Runner.PROCESSES, workers)) == expected()


def test_another_seed_gives_other_answers() -> None:
    assert run_cells(work, SHARED, CELLS, seed=6) != expected()


@given(st.integers(0, 2**40), st.integers(1, 30), st.integers(0, 30))
def test_a_seed_does_not_depend_on_how_many_cells_follow(seed: int, count: int, more: int) -> None:
    assert cell_seeds(seed, count) == cell_seeds(seed, count + more)[:count]


def ran(folder: Path) -> list[int]:
    path = folder / "ran"
    return sorted(int(line) for line in path.read_text().split()) if path.exists() else []


@pytest.mark.parametrize("cut", [0, 1, 37, 200, 5000])
def test_a_journal_cut_anywhere_is_finished_to_the_same_answers(tmp_path: Path, cut: int) -> None:
    shared = {"folder": str(tmp_path)}
    journal = tmp_path / "journal.jsonl"
    whole = run_cells(counted, shared, CELLS, 5, Running(journal=journal))
    head = journal.read_bytes().index(b"\n") + 1
    kept = journal.read_bytes()[: head + cut]
    journal.write_bytes(kept)
    done = kept[head:].count(b"\n")
    (tmp_path / "ran").unlink()
    seen: list[int] = []
    again = run_cells(counted, shared, CELLS, 5, Running(journal=journal, on_done=seen.append))
    assert again == whole == expected()
    assert ran(tmp_path) == CELLS[done:], "only what the journal lacked was computed"
    assert sum(seen) == len(CELLS)
    (tmp_path / "ran").unlink(missing_ok=True)
    assert run_cells(counted, shared, CELLS, 5, Running(Runner.PROCESSES, 2, journal)) == whole
    assert ran(tmp_path) == []


def test_a_damaged_line_and_what_follows_it_are_computed_again(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    whole = run_cells(work, SHARED, CELLS, 5, Running(journal=journal))
    lines = journal.read_text().splitlines()
    lines[4] = lines[4][:-3]
    journal.write_text("\n".join(lines) + "\n")
    assert run_cells(work, SHARED, CELLS, 5, Running(journal=journal)) == whole
    assert len(journal.read_text().splitlines()) == 1 + len(CELLS)


@pytest.mark.parametrize("line", range(1, 1 + len(CELLS)))
def test_a_digit_that_changed_in_a_journal_is_no_answer(tmp_path: Path, line: int) -> None:
    """Every digit of the line in turn; the line stays JSON, and the cell one of the sweep."""
    journal = tmp_path / "journal.jsonl"
    whole = run_cells(work, SHARED, CELLS, 5, Running(journal=journal))
    lines = journal.read_text().splitlines()
    for at, letter in enumerate(lines[line]):
        if letter.isdigit():
            changed = lines[line][:at] + str((int(letter) + 1) % 10) + lines[line][at + 1 :]
            journal.write_text("\n".join([*lines[:line], changed, *lines[line + 1 :]]) + "\n")
            assert run_cells(work, SHARED, CELLS, 5, Running(journal=journal)) == whole


@pytest.mark.parametrize(
    ("shared", "cells", "seed"), [({"factor": 0.2}, CELLS, 5), (SHARED, CELLS[1:], 5), (SHARED, CELLS, 6)]
)
def test_the_journal_of_another_sweep_is_refused_and_kept(tmp_path: Path, shared: Any, cells: Any, seed: int) -> None:
    journal = tmp_path / "journal.jsonl"
    run_cells(work, SHARED, CELLS, 5, Running(journal=journal))
    before = journal.read_bytes()
    with pytest.raises(JournalError, match="the journal of another sweep"):
        run_cells(work, shared, cells, seed, Running(journal=journal))
    assert journal.read_bytes() == before


@pytest.mark.parametrize("runner", [Runner.SERIAL, Runner.PROCESSES])
def test_a_failure_is_raised_and_what_was_done_stays_in_the_journal(tmp_path: Path, runner: Runner) -> None:
    journal = tmp_path / "journal.jsonl"
    with pytest.raises(RuntimeError, match="cell 9 is broken"):
        run_cells(failing, {"folder": str(tmp_path)}, CELLS, 5, Running(runner, 2, journal))
    positions = [json.loads(line)["cell"] for line in journal.read_text().splitlines()[1:]]
    assert positions
    assert 9 not in positions


def test_impossible_values_are_refused() -> None:
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        Running(workers=0)
    with pytest.raises(ValueError, match="seed must be at least 0, got -1"):
        run_cells(work, SHARED, CELLS, -1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_ray_cluster_of_two_nodes_gives_the_same_answers(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray", reason="the ray extra is not installed")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        ray.cloudpickle.register_pickle_by_value(cell_work)  # a node does not have the tests' folder
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
        assert len([node for node in ray.nodes() if node["Alive"]]) == 2
        nodes = run_cells(which_node, None, list(range(40)), 5, Running(Runner.RAY))
        assert len({answer["node"] for answer in nodes}) == 2, "both nodes computed cells"
        journal = tmp_path / "journal.jsonl"
        assert run_cells(work, SHARED, CELLS, 5, Running(Runner.RAY, journal=journal)) == expected()
        assert run_cells(work, SHARED, CELLS, 5, Running(journal=journal)) == expected()
    finally:
        ray.shutdown()
        cluster.shutdown()
