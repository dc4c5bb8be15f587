"""One call of measure.py: which repeats are left, what each leaves behind, and when a cell has enough."""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from concurrency.arms import Arm, chunk_major_of
from concurrency.cells import Cell, Group
from concurrency.closed_loop import Served, serve, while_others_decode
from concurrency.graph_choice import FULL
from concurrency.groups import GROUPS
from concurrency.recording import SCHEMA_VERSION
from concurrency.rules import not_shown_yet, ttft_ms

VERIFY_ARMS = (
    "recompute",
    "chunk_bounded",
    "interleaved_first",
    "fifo_first",
    "fifo_jit",
    "sync",
    "auto",
    "early_read",
)
_MOST_FAILURES = 3
_TAIL_NS = 500_000_000
"""From an open loop's last arrival until its bystanders are looked at no longer: by then every arm has answered."""


class OutOfTimeError(Exception):
    """The budget is spent; what was measured is written."""


def round_of(cell: Cell, arms: dict[str, Arm], number: int, seed: int) -> list[str]:
    """The arms of a round in their order: the baseline before each half of the others; odd rounds run backwards.

    Arms that have run as often as they may are left out.
    """
    rng = random.Random(f"{seed} {cell.name} {number // 2}")
    opening = chunk_major_of(cell.arms)[0]
    others = [name for name in cell.arms if name != opening]
    rng.shuffle(others)
    half = (len(others) + 1) // 2
    first = [opening] if opening in cell.arms else []
    order = [*first, *others[:half], *(first if others[half:] else []), *others[half:]]
    if number % 2:
        order.reverse()
    return [name for name in order if number < (arms[name].repeats or cell.most_repeats)]


def request_row(one: Served, begin_ns: int, seen: dict[str, Any], cached: int) -> dict[str, Any]:
    """A request's times in microseconds from its arrival, and its load's from there too."""

    def since(at_ns: int) -> int:
        return round((at_ns - one.arrival_ns) / 1e3)

    row: dict[str, Any] = {
        "at_us": round((one.arrival_ns - begin_ns) / 1e3),
        "queued_us": since(one.queued_ns),
        "token_us": [since(at_ns) for at_ns in one.token_ns],
        "tokens": one.tokens[:16],
        "cached": cached,
    }
    for name in ("asked_ns", "ordered_ns", "started_ns", "released_ns"):
        if name in seen:
            row[name.replace("_ns", "_us")] = since(seen[name])
    for name in ("local_hit", "loadable", "lookups", "bytes", "method", "by_forecast", "arm", "predicted_us", "regret"):
        if name in seen:
            row[name] = seen[name]
    if "lookup_ns" in seen:
        row["lookup_cost_us"] = seen["lookup_ns"] // 1000
    if "landed_ns" in seen:
        row["landed_us"] = [since(at_ns) for at_ns in seen["landed_ns"]]
    if "landed_by_rank_ns" in seen:
        row["landed_by_rank_us"] = [[since(at_ns) for at_ns in rank] for rank in seen["landed_by_rank_ns"]]
    return row


def run_repeat(engine: Any, cell: Cell, arm: Arm, repeat: int, tag: str) -> dict[str, Any]:
    """One line of the results: everything of one repeat of one arm."""
    engine.switch(arm, cell)
    engine.reset(cell)
    requests, others = engine.prompts.requests(cell, tag)[: cell.requests_of(arm)], engine.prompts.bystanders(cell, tag)
    concurrency = None if cell.rate_per_s else cell.concurrency
    engine.cached.clear()
    times: dict[str, list[int]] = {}
    window_ns = requests[-1].at_ns - requests[0].at_ns + _TAIL_NS
    choosing_ns = -time.monotonic_ns()
    looks = engine.cores.keep_quick()
    choosing_ns += time.monotonic_ns()

    def measured(loop: Any) -> list[Served]:
        engine.clear()
        served = serve(loop, requests, concurrency)
        if concurrency is None and others:  # until an instant that is the same for every arm, however soon it is done
            loop.sleep(max(0, served[0].arrival_ns + window_ns - loop.now_ns()) / 1e9)
        return served

    with engine.without_garbage(), engine.second.multiplying(arm.beside):
        if others:
            served, times = while_others_decode(engine, others, engine.abort, measured)
        else:
            served = measured(engine)
        counters, durations, peak = engine.counters(), engine.durations(), engine.peak_in_flight_bytes()
    begin_ns = min(one.arrival_ns for one in served)
    end_ns = max(one.token_ns[-1] for one in served)
    until_ns = begin_ns + window_ns if concurrency is None else end_ns
    engine.after_repeat(cell)
    probes = [looks[-1], engine.cores.look()]
    noted = engine.taken()
    loads = {name if name in engine.cached else name.rsplit("-", 1)[0]: load for name, load in noted["loads"].items()}
    return {
        "kind": "repeat",
        "cell": dataclasses.asdict(cell),
        "arm": arm.name,
        "settings": arm.settings,
        "graphs": arm.graphs,
        "repeat": repeat,
        "at_s": time.time(),
        "wall_us": round((end_ns - begin_ns) / 1e3),
        "window_us": round((until_ns - begin_ns) / 1e3),
        "switch_ms": round(engine.switch_ms, 1),
        "probe_us": probes,
        "choosing": {
            "looks_us": looks,
            "ms": round(choosing_ns / 1e6, 1),
            "last_probes_us": engine.cores.probes_us() if len(looks) > 1 else {},
        },
        "requests": [
            request_row(one, begin_ns, loads.get(one.name, {}), engine.cached.get(one.name, 0)) for one in served
        ],
        "steps": [
            [round((step[0] - begin_ns) / 1e3), round((step[1] - step[0]) / 1e3), *step[2:]] for step in noted["steps"]
        ],
        "host_stall_us": noted["host_stall_us"],
        "stream_stall_us": noted["stream_stall_us"],
        "peak_in_flight_bytes": peak,
        "peak_live_transfers": noted["peak_live_transfers"],
        "bystander_us": [
            [round((at_ns - begin_ns) / 1e3) for at_ns in seen if at_ns <= until_ns] for seen in times.values()
        ],
        "counters": counters,
        "durations": durations,
    }


class Run:
    """One call of the program: what is done, what is left, and where it goes.

    Args:
        there: the lines that earlier calls wrote.
        begin: when the program began.
    """

    def __init__(
        self,
        asked: argparse.Namespace,
        engine: Any,
        group: Group,
        arms: dict[str, Arm],
        there: Sequence[dict[str, Any]],
        begin: float,
    ) -> None:
        self.asked, self.engine, self.group, self.arms, self.begin = asked, engine, group, arms, begin
        names = asked.cells.split("+")
        self.group_of = {cell.name: name for name in names for cell in GROUPS[name].cells}
        self.seen: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
        self.verified: set[tuple[str, str]] = set()
        for row in there:
            if row.get("group") in names:
                self._note(row)
        self.number = 0
        self.warm: set[str] = set()

    def say(self, text: str) -> None:
        """A line of progress."""
        print(f"[{time.perf_counter() - self.begin:6.1f} s] {text}", flush=True)

    def write(self, row: dict[str, Any]) -> None:
        """One line, on the disk."""
        group = self.group_of[row["cell"]["name"]] if "cell" in row else self.asked.cells
        with self.asked.out.open("a", encoding="utf-8") as out:
            out.write(json.dumps({"schema": SCHEMA_VERSION, "group": group, **row}) + "\n")
        self._note(row)

    def _note(self, row: dict[str, Any]) -> None:
        if row["kind"] == "repeat":
            self.seen[row["cell"]["name"]][row["arm"]].append(row)
        elif row["kind"] == "verify":
            self.verified.add((row["cell"]["name"], row["arm"]))

    def check_time(self) -> None:
        """Raises OutOfTimeError once the budget is spent."""
        if time.perf_counter() - self.begin > self.asked.budget_s:
            raise OutOfTimeError

    def tag(self) -> str:
        """Names that no request had before."""
        self.number += 1
        return f"r{self.number}"

    def left(self, cell: Cell) -> list[str]:
        """What is still to run of the rounds that every cell gets, in order."""
        done = {arm: len(rows) for arm, rows in self.seen[cell.name].items()}
        plan: list[str] = []
        for number in range(cell.repeats):
            for name in round_of(cell, self.arms, number, self.asked.seed):
                if done.get(name, 0) > 0:
                    done[name] -= 1
                else:
                    plan.append(name)
        return plan

    def more(self, cell: Cell) -> list[str]:
        """Two more rounds of the baseline and the arms that are not shown yet; empty where all are, or it is enough."""
        wanted = self._not_shown(cell)
        if not wanted:
            return []
        seen = self.seen[cell.name]
        counts = {name: len(seen[name]) for name in cell.arms}
        opening = chunk_major_of(cell.arms)[0]
        begun = max((count for arm, count in counts.items() if arm != opening), default=0) // 2 * 2
        plan: list[str] = []
        for number in (begun, begun + 1):
            order = round_of(cell, self.arms, number, self.asked.seed)
            for name in order:
                if name in {opening, *wanted} and counts[name] < cell.most_repeats * order.count(name):
                    plan.append(name)
                    counts[name] += 1
        return plan

    def cell(self, cell: Cell, plan: Sequence[str]) -> None:
        """These repeats of the cell, in that order."""
        seconds = self.engine.fill(cell)
        if seconds:
            self.say(f"{cell.name}: documents stored in {seconds:.1f} s")
        if cell.name not in self.warm:
            self._warm_up(cell)
        if not any(self.arms[name].beside for name in plan):
            self.engine.second.close()
        self.engine.cores.choose()
        begin = time.perf_counter()
        seen = self.seen[cell.name]
        for name in plan:
            self.check_time()
            if cell.stores:
                self.engine.fill(cell)
            row = run_repeat(self.engine, cell, self.arms[name], len(seen[name]), self.tag())
            self.write(row)
        self.say(
            f"{cell.name}: {len(plan)} repeats in {time.perf_counter() - begin:.1f} s; mean TTFT ms "
            + ", ".join(
                f"{name} {sum(map(ttft_ms, rows)) / len(rows):.1f} ({len(rows)})" for name, rows in seen.items() if rows
            )
            + f"; not shown yet: {', '.join(sorted(self._not_shown(cell))) or 'nothing'}"
            + f"; cores chosen anew {self.engine.cores.chosen_anew} times so far"
        )

    def _warm_up(self, cell: Cell) -> None:
        """Every arm once, unrecorded: shapes and kernels that the cell meets first."""
        few = dataclasses.replace(
            cell,
            requests=min(cell.requests, cell.concurrency + 2),
            output=min(cell.output, 4),
            rate_per_s=None,
            bystanders=min(cell.bystanders, 1),
        )
        for name in dict.fromkeys(cell.arms):
            if name in self.arms and self.arms[name].settings is not None:
                self.check_time()
                run_repeat(self.engine, few, self.arms[name], -1, self.tag())
        self.warm.add(cell.name)

    def _not_shown(self, cell: Cell) -> set[str]:
        wanted = [name for name in cell.arms if name in self.arms]
        return not_shown_yet(self.seen[cell.name], wanted)

    def verify(self, cell: Cell) -> None:
        """Answers of every arm, and of recomputation alone and in company, of the cell's first requests."""
        if self.engine.peer is not None:
            return
        self.engine.fill(cell)
        taken: dict[str, list[list[int]]] = {}
        cell = dataclasses.replace(cell, requests=min(8, cell.requests), output=min(8, cell.output), rate_per_s=None)
        full = [name for name in cell.arms if name in self.arms and self.arms[name].graphs in FULL]
        for name, concurrency in [("recompute", 1), *((name, cell.concurrency) for name in (*VERIFY_ARMS, *full))]:
            label = "recompute_alone" if (name, concurrency) == ("recompute", 1) else name
            if (cell.name, label) in self.verified or name not in self.arms:
                continue
            self.check_time()
            self.engine.switch(self.arms[name], cell)
            self.engine.reset(cell)
            answers = self.engine.answers(self.engine.prompts.requests(cell, self.tag()), concurrency)
            self.engine.after_repeat(cell)
            self.write({"kind": "verify", "cell": dataclasses.asdict(cell), "arm": label, "answers": answers})
            taken[label] = [answer["tokens"] for answer in answers]
        right = taken.get("recompute_alone", [])
        changed = {
            label: sum(mine != other for mine, other in zip(tokens, right, strict=True))
            for label, tokens in taken.items()
            if right
        }
        different = len({tuple(one) for one in right})
        self.say(f"{cell.name}: {different} different answers of {len(right)}; other than alone: {changed}")

    def all(self, cells: Sequence[Cell]) -> bool:
        """Whether every cell is done within the budget; one that fails is said, and left out from then on."""
        failed: set[str] = set()
        try:
            for number, cell in enumerate(cells):
                self._try(cell, self.left, failed, verify=number == 0 and not self.asked.no_answers)
            while [cell for cell in cells if cell.name not in failed and self._try(cell, self.more, failed)]:
                pass
        except OutOfTimeError:
            self.say("the budget is spent; a second call goes on from here")
            return False
        return not failed

    def _try(self, cell: Cell, plan_of: Callable[[Cell], list[str]], failed: set[str], verify: bool = False) -> bool:
        """Whether there was something to run."""
        try:
            if verify:
                self.verify(cell)
            plan = plan_of(cell)
            if plan:
                self.cell(cell, plan)
            return bool(plan)
        except (RuntimeError, ValueError, TimeoutError) as error:
            failed.add(cell.name)
            traceback.print_exc()
            self.say(f"{cell.name} FAILED: {error}")
            self.write({"kind": "failed", "cell": dataclasses.asdict(cell), "error": str(error)})
            if len(failed) == _MOST_FAILURES:
                raise
            self.engine.recover()
            return False
