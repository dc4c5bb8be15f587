#!/usr/bin/env python3
"""TTFT, latency and throughput of real vLLM under concurrency, by order, release and width of the loads.

    vllm_concurrency.py OUT.jsonl --cells core --budget-s 560        one GPU, vLLM 0.26, Llama-3.1-8B's shape
    vllm_concurrency.py OUT.jsonl --cells core --tiny                the same program on a CPU, to see that it runs
    vllm_concurrency.py OUT.jsonl --cells core --list                cells and arms; nothing runs
    vllm_concurrency.py OUT.jsonl --cells two_gpus --tp 2            two GPUs, a rank each
    concurrency_report.py OUT.jsonl                                  the table

One engine runs every arm: the connector is exchanged between repeats, while nothing is in flight. A cell's rounds each
begin with the baseline, then come the other arms in random order, and the baseline closes the cell. Prompts are a
document of the host pool and new tokens, the same for every arm and repeat; before each repeat vLLM's own prefix cache
is emptied, and it keeps no more than the cell needs and one request more, so that every hit comes from the pool. Each
repeat is one line of OUT; a second call skips the lines that are there, so a run can be cut anywhere. Weights are
seeded, so that an early read changes tokens: `verify` lines hold answers to compare with recomputation. With several
ranks a layer has landed when it has on the slower one; every rank's landings are kept too.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from closed_loop import Served, serve, while_others_decode
from concurrency_cells import ARMS, BASELINE, GROUPS, Arm, Cell, Group

SCHEMA_VERSION = 1
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
_SHRINK = 32
_MOST_FAILURES = 3


class OutOfTimeError(Exception):
    """The budget is spent; what was measured is written."""


def shrunk(group: Group, repeats: int = 2) -> Group:
    """The group with 1/32 of the tokens, for a tiny model on a CPU."""
    cells = tuple(
        dataclasses.replace(
            cell,
            hit=cell.hit // _SHRINK,
            new=max(2, cell.new // _SHRINK),
            mix=tuple((hit // _SHRINK // 32 * 32, new // _SHRINK) for hit, new in cell.mix),
            chunk=max(32, cell.chunk // _SHRINK),
            output=min(cell.output, 4),
            width=min(cell.width, 4),
            requests=cell.concurrency + 3,
            bystanders=min(cell.bystanders, 2),
            rate_per_s=cell.rate_per_s and 20.0,
            repeats=min(cell.repeats, repeats),
        )
        for cell in group.cells
    )
    return dataclasses.replace(group, cells=cells, document_tokens=group.document_tokens // _SHRINK)


def rounds_of(cell: Cell, arms: dict[str, Arm], seed: int) -> list[tuple[str, int]]:
    """(arm, repeat) in the order in which they run: rounds that the baseline opens, and the baseline once more.

    Arms with fewer repeats than the cell leave the later rounds out.
    """
    rng = random.Random(f"{seed} {cell.name}")
    plan: list[tuple[str, int]] = []
    for repeat in range(cell.repeats):
        others = [name for name in cell.arms if name != BASELINE and repeat < (arms[name].repeats or cell.repeats)]
        rng.shuffle(others)
        first = [BASELINE] if BASELINE in cell.arms else []
        plan += [(name, repeat) for name in [*first, *others]]
    if BASELINE in cell.arms:
        plan.append((BASELINE, cell.repeats))
    return plan


def done_in(path: Path, group: str) -> set[tuple[str, str, int]]:
    """(cell, arm, repeat) of the lines that are there; a line cut short by the end of a run does not count.

    A verification counts as repeat -1.
    """
    found: set[tuple[str, str, int]] = set()
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if row.get("group") == group and row["kind"] in ("repeat", "verify"):
            found.add((row["cell"]["name"], row["arm"], row.get("repeat", -1)))
    return found


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
    for name in ("local_hit", "loadable", "lookups", "bytes", "method"):
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
    requests, others = engine.prompts.requests(cell, tag)[: arm.requests_of(cell)], engine.prompts.bystanders(cell, tag)
    concurrency = None if cell.rate_per_s else cell.concurrency
    engine.cached.clear()
    times: dict[str, list[int]] = {}

    def measured(loop: Any) -> list[Served]:
        engine.clear()
        return serve(loop, requests, concurrency)

    with engine.without_garbage():
        if others:
            served, times = while_others_decode(engine, others, engine.abort, measured)
        else:
            served = measured(engine)
        counters, durations, peak = engine.counters(), engine.durations(), engine.peak_in_flight_bytes()
    begin_ns = min(one.arrival_ns for one in served)
    end_ns = max(one.token_ns[-1] for one in served)
    engine.after_repeat(cell)
    noted = engine.taken()
    loads = {name if name in engine.cached else name.rsplit("-", 1)[0]: load for name, load in noted["loads"].items()}
    return {
        "kind": "repeat",
        "cell": dataclasses.asdict(cell),
        "arm": arm.name,
        "settings": arm.settings,
        "repeat": repeat,
        "at_s": time.time(),
        "wall_us": round((end_ns - begin_ns) / 1e3),
        "switch_ms": round(engine.switch_ms, 1),
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
            [round((at_ns - begin_ns) / 1e3) for at_ns in seen if at_ns <= end_ns] for seen in times.values()
        ],
        "counters": counters,
        "durations": durations,
    }


class Run:
    """One call of the program: what is done, what is left, and where it goes. `begin` is when the program began."""

    def __init__(
        self, asked: argparse.Namespace, engine: Any, group: Group, arms: dict[str, Arm], begin: float
    ) -> None:
        self.asked, self.engine, self.group, self.arms, self.begin = asked, engine, group, arms, begin
        self.done = done_in(asked.out, asked.cells)
        self.out = asked.out.open("a", encoding="utf-8")
        self.number = 0

    def say(self, text: str) -> None:
        """A line of progress."""
        print(f"[{time.perf_counter() - self.begin:6.1f} s] {text}", flush=True)

    def write(self, row: dict[str, Any]) -> None:
        """One line, on the disk."""
        self.out.write(json.dumps({"schema": SCHEMA_VERSION, "group": self.asked.cells, **row}) + "\n")
        self.out.flush()

    def check_time(self) -> None:
        """Raises OutOfTimeError once the budget is spent."""
        if time.perf_counter() - self.begin > self.asked.budget_s:
            raise OutOfTimeError

    def tag(self) -> str:
        """Names that no request had before."""
        self.number += 1
        return f"r{self.number}"

    def cell(self, cell: Cell) -> None:
        """Every round of the cell that is not done yet."""
        plan = [
            (name, repeat)
            for name, repeat in rounds_of(cell, self.arms, self.asked.seed)
            if (cell.name, name, repeat) not in self.done and name in self.arms
        ]
        if not plan:
            return
        seconds = self.engine.fill(cell)
        if seconds:
            self.say(f"{cell.name}: documents stored in {seconds:.1f} s")
        warm = dataclasses.replace(cell, requests=min(cell.requests, cell.concurrency + 1), rate_per_s=None)
        for name in dict.fromkeys((plan[0][0], "fifo_first" if "fifo_first" in cell.arms else plan[-1][0])):
            run_repeat(self.engine, warm, self.arms[name], -1, self.tag())  # shapes and kernels of the cell, unrecorded
        begin = time.perf_counter()
        means: dict[str, list[float]] = {}
        for name, repeat in plan:
            self.check_time()
            if cell.stores:
                self.engine.fill(cell)
            row = run_repeat(self.engine, cell, self.arms[name], repeat, self.tag())
            self.write(row)
            counted = row["requests"][cell.concurrency if cell.rate_per_s is None else 0 :]
            means.setdefault(name, []).append(
                sum(one["token_us"][0] - one["queued_us"] for one in counted) / len(counted) / 1e3
            )
        self.say(
            f"{cell.name}: {time.perf_counter() - begin:.1f} s; mean TTFT ms "
            + ", ".join(f"{name} {sum(all_of) / len(all_of):.1f}" for name, all_of in means.items())
        )

    def verify(self, cell: Cell) -> None:
        """Answers of every arm, and of recomputation alone and in company, of the cell's first requests."""
        if self.engine.peer is not None or self.group.full_graphs:
            return
        self.engine.fill(cell)
        taken: dict[str, list[list[int]]] = {}
        cell = dataclasses.replace(cell, requests=min(8, cell.requests), output=min(8, cell.output), rate_per_s=None)
        for name, concurrency in [("recompute", 1), *((name, cell.concurrency) for name in VERIFY_ARMS)]:
            label = "recompute_alone" if (name, concurrency) == ("recompute", 1) else name
            if (cell.name, label, -1) in self.done or name not in self.arms:
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

    def all(self, cells: Iterable[Cell]) -> bool:
        """Whether every cell is done within the budget; one that fails is said, and the next is tried."""
        failures = 0
        for number, cell in enumerate(cells):
            try:
                if number == 0:
                    self.verify(cell)
                self.cell(cell)
            except OutOfTimeError:
                self.say("the budget is spent; a second call goes on from here")
                return False
            except (RuntimeError, ValueError, TimeoutError) as error:
                failures += 1
                traceback.print_exc()
                self.say(f"{cell.name} FAILED: {error}")
                self.write({"kind": "failed", "cell": dataclasses.asdict(cell), "error": str(error)})
                if failures == _MOST_FAILURES:
                    raise
                self.engine.recover()
        return failures == 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="JSON lines; appended to")
    parser.add_argument("--cells", choices=sorted(GROUPS), default="core")
    parser.add_argument("--only", default="", help="cells whose name holds one of these words, split by commas")
    parser.add_argument("--arms", default="", help="only these arms, split by commas; the baseline stays")
    parser.add_argument("--arm", action="append", default=[], metavar="NAME=JSON", help="an arm of your own")
    parser.add_argument("--repeats", type=int, default=0, help="instead of each cell's own")
    parser.add_argument("--shard", default="0/1", help="I/N: every N-th cell from the I-th on")
    parser.add_argument("--budget-s", type=float, default=560.0, help="no repeat begins later than this")
    parser.add_argument(
        "--stream-stalls", action="store_true", help="time layers' waits on the stream; not for figures"
    )
    parser.add_argument("--tp", type=int, default=1, metavar="RANKS", help="tensor parallelism, a GPU a rank")
    parser.add_argument(
        "--no-custom-all-reduce", action="store_true", help="ranks add up by NCCL alone, not by vLLM's own kernels"
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU, 1/32 of the tokens")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--commit", default="unknown", help="written down with the machine's facts")
    parser.add_argument("--list", action="store_true")
    return parser.parse_args()


def main() -> int:
    """Runs what was asked; 0 when everything is done, 3 when the budget ended it or a cell failed."""
    begin = time.perf_counter()
    asked = parse()
    group, arms = GROUPS[asked.cells], dict(ARMS)
    for text in asked.arm:
        name, _equals, settings = text.partition("=")
        arms[name] = Arm(name, json.loads(settings))
        with_it = (dataclasses.replace(cell, arms=tuple(dict.fromkeys((*cell.arms, name)))) for cell in group.cells)
        group = dataclasses.replace(group, cells=tuple(with_it))
    if asked.tiny:
        group = shrunk(group)
    wanted_arms = [name for name in asked.arms.split(",") if name]
    words = [word for word in asked.only.split(",") if word]
    index, count = map(int, asked.shard.split("/"))
    cells = [cell for cell in group.cells if not words or any(word in cell.name for word in words)][index::count]
    cells = [
        dataclasses.replace(
            cell,
            arms=tuple(name for name in cell.arms if not wanted_arms or name in (BASELINE, *wanted_arms)),
            repeats=asked.repeats or cell.repeats,
        )
        for cell in cells
    ]
    group = dataclasses.replace(group, cells=tuple(cells))
    if asked.list or not cells:
        for cell in cells:
            print(cell.name, cell.repeats, ",".join(cell.arms))
        return 0 if cells else 2
    try:
        return measure(asked, group, arms, cells, begin)
    except Exception:
        if asked.tp == 1:
            raise
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # the end of a process waits for workers that failed, and for ever


def measure(asked: argparse.Namespace, group: Group, arms: dict[str, Arm], cells: list[Cell], begin: float) -> int:
    """Everything is measured and written; 0 or 3, as `main`."""
    from concurrency_engine import ConcurrencyEngine

    options = {"disable_custom_all_reduce": True} if asked.no_custom_all_reduce else {}
    engine = ConcurrencyEngine(group, asked.tiny, asked.tp, options)
    engine.probe.layers_timed = asked.stream_stalls
    run = Run(asked, engine, group, arms, begin)
    run.write({"kind": "engine", **facts_of(engine, asked)})
    run.say(f"engine ready: {json.dumps(engine.facts())}")
    complete = run.all(cells)
    engine.close()
    return 0 if complete else 3


def facts_of(engine: Any, asked: argparse.Namespace) -> dict[str, Any]:
    """Where and how: what a reader needs to repeat the run."""
    import vllm

    facts: dict[str, Any] = {"engine": engine.facts(), "commit": asked.commit, "seed": asked.seed, "tiny": asked.tiny}
    if not asked.tiny:
        import device_facts

        facts["machine"] = device_facts.provenance(engine.torch, vllm)
        facts["wire"] = device_facts.wire_rates(engine.torch)
        engine.torch.cuda.empty_cache()
    facts["vllm"] = vllm.__version__
    facts["arguments"] = [argument for argument in sys.argv[1:] if not argument.startswith("/")]
    return facts


if __name__ == "__main__":
    raise SystemExit(main())
