"""One thing at a time: the table of causes, its picture, and what two GPUs gain by where the limit lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from concurrency.figures import figures_of
from concurrency.finding import NAMES, beyond, causes_table
from concurrency.rules import Change
from concurrency.two_gpus import FOUR_AT_ONCE, launches_table, limits_table

from recorded_rows import CELL, row

NAME = "c4_hit15360_new768_chunk256_finding"
FULL, PREFILLS = FOUR_AT_ONCE


def switched(name: str = NAME, **arms: list[float]) -> list[dict[str, Any]]:
    cell = {**CELL, "name": name}
    return [row(arm, repeat, ttft, cell=cell) for arm, times in arms.items() for repeat, ttft in enumerate(times)]


def test_a_cause_is_the_difference_of_two_arms_and_says_what_is_known_of_it() -> None:
    rows = switched(
        fifo_first=[100, 101], interleaved_first=[200, 201], fifo_no_turns=[120, 130], fifo_thread=[90, 120]
    )
    lines = causes_table(figures_of(rows)).splitlines()[4:]
    assert [line.split(" | ")[1:6] for line in lines] == [
        ["fifo_first → interleaved_first", "1", "100.5 → 200.5", "+99.5% ± 1.1%", "beyond two errors"],
        ["fifo_first → fifo_no_turns", "1", "100.5 → 125.0", "+24.4% ± 5.0%", "beyond two errors"],
        ["fifo_first → fifo_thread", "1", "100.5 → 105.0", "+4.5% ± 14.9%", "-"],
    ]


def test_a_second_process_through_mps_is_told_from_one_that_takes_turns() -> None:
    arms = {"fifo_first": [100, 101], "fifo_beside": [200, 201]}
    rows = [one for kind in ("beside", "beside_mps") for one in switched(NAME.replace("finding", kind), **arms)]
    lines = causes_table(figures_of(rows)).splitlines()[4:]
    assert [line.split(" | ")[0] for line in lines] == [
        "| a second process multiplies on the device", "| a second process multiplies on the device, through MPS",
    ]  # fmt: skip


def test_other_cells_have_no_causes_in_that_table() -> None:
    assert NAME in NAMES
    assert causes_table(figures_of(switched("c", fifo_first=[1, 2], interleaved_first=[3, 4]))).splitlines()[4:] == []


@pytest.mark.parametrize(
    ("change", "known"),
    [
        (Change(0.1, 0.01, True, ""), "shown"),
        (Change(0.1, 0.049, False, "standard error 4.9%"), "beyond two errors"),
        (Change(-0.1, 0.049, False, "baseline drift 12.0%"), "beyond two errors"),
        (Change(-0.1, 0.05, False, "within two standard errors"), "-"),
        (Change(0.1, float("inf"), False, "standard error inf%"), "-"),
    ],
)
def test_what_is_beyond_two_errors_is_not_called_shown(change: Change, known: str) -> None:
    assert beyond(change) == known


def test_causes_have_a_picture_and_stand_in_no_other(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from concurrency.plots import draw

    causes = switched(chunk_bounded=[100, 102], fifo_first=[50, 51])
    assert [path.name for path in draw(figures_of(causes), tmp_path)] == ["one-thing.svg", "why.svg"]
    both = [*causes, *switched("elsewhere", chunk_bounded=[100, 102], fifo_first=[50, 51])]
    assert [path.name for path in draw(figures_of(both), tmp_path)] == [
        "one-thing.svg", "why.svg", "ttft-change.svg", "ttft-and-tpot.svg",
    ]  # fmt: skip
    texts = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.svg")}
    assert [name for name, text in texts.items() if NAME in text] == ["one-thing.svg"]
    assert [name for name, text in texts.items() if "elsewhere" in text] == ["ttft-change.svg"]


def test_the_pictures_that_are_seen_first_name_no_arm(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from concurrency.plots import draw

    causes = switched(chunk_bounded=[100, 102], fifo_first=[50, 51], fifo_thread=[70, 71])
    glance = switched("c4_hit15360_new768_chunk256_full", chunk_full_graphs=[100, 102], auto_full_graphs=[50, 51])
    names = {path.name for path in draw(figures_of([*causes, *glance]), tmp_path)}
    assert {"first-tokens.svg", "why.svg"} < names
    for name, said in (("first-tokens.svg", "at once, "), ("why.svg", "released with the first layer")):
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert said in text
        assert "fifo_" not in text
        assert "auto_full" not in text


def test_what_two_gpus_gain_is_told_by_limit_for_runs_with_looks() -> None:
    def looked(*looks_us: int) -> list[dict[str, Any]]:
        rows = switched(FULL, chunk_full_graphs=[100, 100], auto_full_graphs=[40, 40, 60, 80])
        return [{**one, "probe_us": [[us, 700]]} for one, us in zip(rows, (700, 700, *looks_us), strict=True)]

    table = limits_table({"one": looked(700, 900, 1000, 1600), "none": switched(FULL, auto_full_graphs=[1.0])})
    head, _line, *rows = table.splitlines()[2:]
    assert head == "| limit | one, auto_full_graphs |"
    assert [one.split(" ± ")[0] for one in rows] == [
        "| 1.3 | -60.0%", "| 1.5 | -53.3%", "| 2.2 | -53.3%", "| none | -45.0%",
    ]  # fmt: skip
    assert [one.rsplit(" ", 2)[1] for one in rows] == ["(2)", "(3)", "(3)", "(4)"]


def test_what_two_gpus_gain_by_prefills_graphs_is_told_against_chunk_major_by_the_same() -> None:
    rows = switched(
        PREFILLS, chunk_full_graphs=[100, 102], auto_full_graphs=[60, 61], chunk_both_graphs=[80, 82],
        auto_both_graphs=[20, 21],
    )  # fmt: skip
    head, _line, *lines = limits_table({"one": [{**one, "probe_us": [[700, 700]]} for one in rows]}).splitlines()[2:]
    assert head == "| limit | one, auto_full_graphs | one, auto_both_graphs |"
    assert {line.split(" | ", 1)[1] for line in lines} == {"-40.1% ± 0.8% (2) | -74.7% ± 0.7% (2) |"}


def test_what_a_ranks_prefill_takes_is_told_beside_its_launching() -> None:
    def launched(*steps_ms: tuple[int, int], cell: str = FULL, graphs: str = "full") -> list[dict[str, Any]]:
        rows = switched(cell, **{f"chunk_{graphs}_graphs": [100] * len(steps_ms), f"auto_{graphs}_graphs": [40, 40]})
        looked = [{**one, "probe_us": [[700, 900], [800, 600]], "steps": []} for one in rows]
        for one, (launching, step) in zip(looked, steps_ms, strict=False):
            new = one["cell"]["new"]
            one["steps"] = [[0, 1_000 * launching, new, 0, 5, 1_000 * step], [0, 1_000, 1, 0, 5, 2_000]]
        return looked

    slow = (16, 23), (30, 31), (18, 23), (20, 23)
    quick = (8, 20), (9, 20), (7, 21), (12, 20)
    two = [*launched(*slow, cell=PREFILLS), *launched(*quick, cell=PREFILLS, graphs="both")]
    rows = launches_table({"one": launched(*slow), "two": two, "few": launched(*slow[:3]), "none": []}).splitlines()[4:]
    assert rows == [
        "| one | chunk_full_graphs | 0.80 to 0.90 | 19.0 → 23.0 | 16.0 → 23.0 | 30.0 → 31.0 |",
        "| two | chunk_full_graphs | 0.80 to 0.90 | 19.0 → 23.0 | 16.0 → 23.0 | 30.0 → 31.0 |",
        "| two | chunk_both_graphs | 0.80 to 0.90 | 8.5 → 20.0 | 7.0 → 21.0 | 12.0 → 20.0 |",
    ]
