"""What a concurrency run measures, in which order, how often, and which repeats count."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from concurrency.arms import ARMS, BASELINE, DIFFERENCES, Arm, by_both, chunk_major_of
from concurrency.cells import Cell, Group, joined, shrunk
from concurrency.groups import GROUPS
from concurrency.recording import read, rows_there
from concurrency.rules import drift_of, kept, not_shown_yet
from concurrency.run import Run, round_of

from recorded_rows import CELL as ROW_CELL
from recorded_rows import request, row

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
CELL = Cell("c", 1, 256, 8, 6, arms=(BASELINE, "chunk_deep", "fifo_first", "recompute"), repeats=2, most_repeats=8)


def repeat(arm: str, number: int, ttft_ms: float, queued_us: int = 3_000, rate: float | None = None) -> dict[str, Any]:
    requests = [request(ttft_ms, queued_us / 1e3)] * 3
    return row(arm, number, ttft_ms, cell={**ROW_CELL, "rate_per_s": rate}, requests=requests, at_s=float(number))


# ---- order


def test_a_round_has_each_arm_once_and_the_baseline_before_each_half() -> None:
    order = round_of(GROUPS["core"].cells[0], ARMS, 0, seed=1)
    assert order[0] == BASELINE
    assert order.count(BASELINE) == 2
    assert order.index(BASELINE, 1) == 1 + (len(order) - 1) // 2
    assert sorted(set(order)) == sorted(GROUPS["core"].cells[0].arms)


def test_every_second_round_runs_backwards_and_every_pair_has_an_order_of_its_own() -> None:
    rounds = [[one for one in round_of(GROUPS["core"].cells[0], ARMS, number, 1) if one != "recompute"]
              for number in range(6)]  # fmt: skip
    assert rounds[1] == rounds[0][::-1]
    assert rounds[3] == rounds[2][::-1]
    assert rounds[2] not in (rounds[0], rounds[4])


def test_an_arm_of_few_repeats_leaves_the_later_rounds_out() -> None:
    assert ["recompute" in round_of(CELL, ARMS, number, 1) for number in range(4)] == [True, True, False, False]


class OneEngine:
    """Answers for a Run: every repeat takes what `ttft_ms` says."""

    peer = "none"

    class Cores:
        chosen_anew = 0

        def choose(self) -> None: ...

    class Second:
        def close(self) -> None: ...

    def __init__(self) -> None:
        self.cores, self.second = self.Cores(), self.Second()

    def fill(self, cell: Cell) -> float:
        return 0.0

    def recover(self) -> None: ...


def ran(
    monkeypatch: pytest.MonkeyPatch,
    out: Path,
    ttft_ms: Any,
    cell: Cell = CELL,
    budget_s: float = 1e9,
    no_answers: bool = False,
) -> tuple[bool, list[str]]:
    """Whether the run says it is done, and the arms that were measured, in order."""
    order: list[str] = []

    def run_repeat(engine: Any, cell: Cell, arm: Arm, number: int, tag: str) -> dict[str, Any]:
        if number < 0:
            return {}
        order.append(arm.name)
        return repeat(arm.name, number, ttft_ms(arm.name, number))

    monkeypatch.setattr("concurrency.run.run_repeat", run_repeat)
    monkeypatch.setitem(GROUPS, "one", Group((cell,)))
    asked = argparse.Namespace(out=out, cells="one", seed=1, budget_s=budget_s, no_answers=no_answers)
    run = Run(asked, OneEngine(), GROUPS["one"], ARMS, rows_there(out), 0.0)
    return run.all([cell]), order


def test_a_quiet_cell_gets_its_rounds_and_then_what_its_errors_ask_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, order = ran(monkeypatch, tmp_path / "o", lambda arm, number: 100.0 + number % 2)
    assert done
    assert order.count("recompute") == 2
    assert order.count("fifo_first") == order.count("chunk_deep") == 4, "two rounds of its own, and two repeats are few"
    assert order.count(BASELINE) == 8


@pytest.mark.parametrize("no_answers", [False, True])
def test_answers_are_compared_unless_asked_for_times_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_answers: bool
) -> None:
    verified: list[str] = []
    monkeypatch.setattr(Run, "verify", lambda _run, cell: verified.append(cell.name))
    done, _order = ran(monkeypatch, tmp_path / "o", lambda arm, number: 100.0 + number % 2, no_answers=no_answers)
    assert done
    assert verified == ([] if no_answers else [CELL.name])


def test_only_the_arms_that_are_not_shown_and_the_baseline_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noisy = {"fifo_first": 30.0}
    done, order = ran(monkeypatch, tmp_path / "o", lambda arm, number: 100.0 + noisy.get(arm, 1.0) * (number % 2))
    assert done
    assert order.count("fifo_first") == CELL.most_repeats
    assert order.count("chunk_deep") == 4
    assert order.count(BASELINE) == 2 * CELL.most_repeats


@pytest.mark.parametrize("arms", [(BASELINE, "fifo_first"), (BASELINE, "fifo_first", "sync")])
def test_a_cell_that_is_never_shown_ends_with_its_last_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arms: tuple[str, ...]
) -> None:
    cell = dataclasses.replace(CELL, arms=arms, repeats=1, most_repeats=3)
    done, order = ran(monkeypatch, tmp_path / "o", lambda arm, number: 100.0 + 50 * (number % 2), cell)
    assert done
    assert order.count("fifo_first") == 3
    assert order.count(BASELINE) == (3 if len(arms) == 2 else 6), "once a round beside one arm, else twice"
    assert ran(monkeypatch, tmp_path / "o", lambda arm, number: 1.0, cell) == (True, [])


def test_a_second_call_goes_on_where_the_first_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ttft_ms(arm: str, number: int) -> float:
        return 100.0 + number % 2

    order = ran(monkeypatch, tmp_path / "whole", ttft_ms)[1]
    whole = (tmp_path / "whole").read_bytes()
    fifth = len(b"".join(whole.splitlines(keepends=True)[:5]))
    for cut in (fifth, fifth + 1, fifth + 30, whole.index(b"\n", fifth) - 1, whole.index(b"\n", fifth)):
        out = tmp_path / f"o{cut}"
        out.write_bytes(whole[:cut])
        done = 6 if cut == whole.index(b"\n", fifth) else 5  # only the end of the line is missing
        assert ran(monkeypatch, out, ttft_ms)[1] == order[done:]
        assert [(row["arm"], row["repeat"]) for row in read([out])] == [
            (row["arm"], row["repeat"]) for row in map(json.loads, whole.splitlines())
        ]
    assert "cut short" not in capsys.readouterr().err, "nothing of a cut line is left in the file"


def test_lines_of_other_groups_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "o"
    order = ran(monkeypatch, path, lambda arm, number: 100.0 + number % 2)[1]
    path.write_text(path.read_text().replace('"group": "one"', '"group": "other"'))
    assert ran(monkeypatch, path, lambda arm, number: 100.0 + number % 2)[1] == order


def test_nothing_begins_after_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ran(monkeypatch, tmp_path / "o", lambda arm, number: 1.0, budget_s=-1.0) == (False, [])


# ---- which repeats count


def test_repeats_of_a_slow_host_are_set_aside_for_all_arms_alike() -> None:
    arms = {
        name: [repeat(name, number, 100.0, 5_000 if number == slow else 3_000) for number in range(4)]
        for name, slow in ((BASELINE, 1), ("fifo_first", 3))
    }
    assert {name: [row["repeat"] for row in rows] for name, rows in kept(arms).items()} == {
        BASELINE: [0, 2, 3],
        "fifo_first": [0, 1, 2],
    }


def test_no_repeat_is_set_aside_where_an_arm_would_keep_too_few() -> None:
    arms = {
        BASELINE: [repeat(BASELINE, number, 100.0, 5_000 if number else 3_000) for number in range(4)],
        "fifo_first": [repeat("fifo_first", number, 50.0) for number in range(4)],
    }
    assert {name: len(rows) for name, rows in kept(arms).items()} == {BASELINE: 4, "fifo_first": 4}


def test_where_cores_leave_an_arm_too_few_the_hand_over_alone_tells() -> None:
    rows = [repeat("fifo_first", number, 9.0, 5_000 if number == 4 else 3_000) for number in range(5)]
    for number, us in enumerate((700.0, 700.0, 1000.0, 1000.0, 700.0)):
        rows[number]["probe_us"] = [[us], [us]]
    assert [row["repeat"] for row in kept({"fifo_first": rows})["fifo_first"]] == [0, 1, 2, 3]


def test_what_a_repeat_shows_has_no_part_in_whether_it_counts() -> None:
    arms = {"fifo_first": [repeat("fifo_first", number, 10.0 ** (number + 1)) for number in range(4)]}
    assert len(kept(arms)["fifo_first"]) == 4


def test_in_an_open_loop_a_late_hand_over_is_no_slow_host() -> None:
    arms = {"fifo_first": [repeat("fifo_first", number, 10.0, 3_000 * (1 + number), rate=9.0) for number in range(5)]}
    assert len(kept(arms)["fifo_first"]) == 5


def test_a_repeat_is_set_aside_by_the_core_of_any_process_before_or_after_it() -> None:
    quick = [[700.0, 690.0, 710.0], [705.0, 700.0, 690.0]]
    late, other = [[700.0, 690.0, 700.0], [700.0, 690.0, 1000.0]], [[700.0, 1000.0, 700.0], quick[1]]
    arms = {BASELINE: [quick, quick, other, quick, quick], "fifo_first": [quick, late, quick, quick, quick]}
    rows = {
        name: [repeat(name, number, 9.0, rate=9.0) | {"probe_us": one} for number, one in enumerate(looks)]
        for name, looks in arms.items()
    }
    assert {name: [row["repeat"] for row in found] for name, found in kept(rows).items()} == {
        BASELINE: [0, 1, 3, 4],
        "fifo_first": [0, 2, 3, 4],
    }


def test_a_repeat_without_looks_at_its_cores_is_judged_by_its_hand_over_alone() -> None:
    rows = [repeat(BASELINE, number, 9.0, 5_000 if number == 1 else 3_000) for number in range(5)]
    rows[2]["probe_us"], rows[3]["probe_us"], rows[4]["probe_us"] = [[], []], [[700.0], [700.0]], [[700.0], [990.0]]
    assert [row["repeat"] for row in kept({BASELINE: rows})[BASELINE]] == [0, 2, 3]


def test_drift_is_between_earlier_and_later_repeats() -> None:
    assert drift_of([100, 150, 110]) == pytest.approx(10 / 120)
    assert drift_of([100, 104, 120, 124]) == pytest.approx(20 / 112)
    assert drift_of([100, 124, 104, 120]) == pytest.approx(0.0), "noise in each half is no drift"
    assert drift_of([100]) == math.inf, "one repeat shows no drift"


def test_the_surely_worse_chunk_major_form_needs_no_more_repeats() -> None:
    quiet = [repeat(BASELINE, number, 100.0 + number % 2) for number in range(4)]
    wild = [repeat("chunk_deep", number, 200.0 + 40 * (number % 2)) for number in range(4)]
    near = [repeat("chunk_deep", number, 90.0 + 40 * (number % 2)) for number in range(4)]
    wanted = (BASELINE, "chunk_deep")
    assert not_shown_yet({BASELINE: quiet, "chunk_deep": wild}, wanted) == set()
    assert not_shown_yet({BASELINE: quiet, "chunk_deep": near}, wanted) == {"chunk_deep"}
    wild_opening = [repeat(BASELINE, number, 200.0 + 40 * (number % 2)) for number in range(4)]
    quiet_deep = [repeat("chunk_deep", number, 100.0 + number % 2) for number in range(4)]
    assert not_shown_yet({BASELINE: wild_opening, "chunk_deep": quiet_deep}, wanted) == {BASELINE}, "it shows the drift"


def test_a_drifting_baseline_is_not_shown_yet() -> None:
    rows = [repeat(BASELINE, number, 100.0 + 2 * number) for number in range(6)]
    assert not_shown_yet({BASELINE: rows}, (BASELINE,)) == {BASELINE}


# ---- cells and arms as they are written


def test_every_cell_can_be_run_as_it_is_written() -> None:
    for name, group in GROUPS.items():
        for one in (group, shrunk(group)):
            for cell in one.cells:
                where = (name, cell.name)
                assert all(hit % cell.chunk == 0 and hit <= one.document_tokens for hit, _ in cell.shapes), where
                assert cell.requests > (0 if cell.rate_per_s else cell.concurrency), where
                assert one.documents > cell.concurrency + 1 or cell.requests <= one.documents, where
                assert set(cell.arms) <= set(ARMS), where
                assert 1 <= cell.repeats <= cell.most_repeats, where


def test_a_cell_that_memory_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="16 requests of 65536 cached tokens are 1048576 at once, more than 700000"):
        Cell("c", 16, 65_536, 256, 20)


def test_cells_of_several_groups_share_a_name_only_where_no_arm_is_in_both() -> None:
    seen: set[tuple[str, str]] = set()
    for group in GROUPS.values():
        mine = {(cell.name, arm) for cell in group.cells for arm in cell.arms}
        assert not mine & seen
        seen |= mine


def test_arms_that_need_graphs_are_in_groups_that_capture_them() -> None:
    for name, group in GROUPS.items():
        kinds = {ARMS[arm].graphs for cell in group.cells for arm in cell.arms}
        assert not {"full", "both"} & kinds or group.full_graphs, name
        assert not {"prefill", "both"} & kinds or group.prefill_graphs, name


def test_what_one_thing_changes_is_measured_in_one_cell() -> None:
    """Of the usual graphs or of those of prefills; by a group, or by one that is no more and left a recording."""
    cells = [set(cell.arms) for group in GROUPS.values() for cell in group.cells]
    recorded = (RESULTS / "concurrency-by-recording.md").read_text(encoding="utf-8")
    for _thing, without, with_it in DIFFERENCES:
        pairs = (without, with_it), (by_both(without), by_both(with_it))
        by_group = any({*pair} <= arms for arms in cells for pair in pairs)
        assert by_group or any(f"| {' | '.join(pair)} |" in recorded for pair in pairs), (without, with_it)


def test_groups_of_one_engine_are_joined_and_others_refused() -> None:
    both = joined("core+graphs", GROUPS)
    assert both.cells == GROUPS["core"].cells + GROUPS["graphs"].cells
    assert both.prefill_graphs == GROUPS["graphs"].prefill_graphs
    assert joined("core+graphs+core", GROUPS) == both
    for cells in (both.cells, *(group.cells for group in GROUPS.values())):
        assert len({cell.name for cell in cells}) == len(cells)
    with pytest.raises(ValueError, match="do not run in one engine"):
        joined("core+both_long", GROUPS)
    with pytest.raises(ValueError, match="there is no group cores; there are beside, .*both_chunks, .*both_long, core"):
        joined("cores", GROUPS)


def test_an_arm_of_few_requests_still_has_some_that_count() -> None:
    cell = Cell("c", concurrency=4, hit=256, new=8, requests=14)
    assert cell.requests_of(ARMS["recompute"]) == 6
    assert cell.requests_of(ARMS["auto"]) == 14


def test_a_cell_with_full_graphs_alone_opens_each_half_of_a_round_with_their_chunk_major_form() -> None:
    arms = ("chunk_full_graphs", "chunk_deep_full_graphs", "fifo_full_graphs", "auto_full_graphs")
    cell = dataclasses.replace(CELL, arms=arms)
    assert chunk_major_of(arms) == ("chunk_full_graphs", "chunk_deep_full_graphs")
    assert chunk_major_of((BASELINE, *arms)) == (BASELINE, "chunk_deep")
    order = round_of(cell, ARMS, 0, 1)
    assert order[0] == arms[0]
    assert order.count(arms[0]) == 2
    assert set(order) == set(arms)
