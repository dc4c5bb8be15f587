#!/usr/bin/env python3
"""TTFT, latency and throughput of real vLLM under concurrency, by order, release and width of the loads.

    measure.py OUT.jsonl --cells core --budget-s 560        one GPU, vLLM 0.26, Llama-3.1-8B's shape
    measure.py OUT.jsonl --cells core --tiny                the same program on a CPU, to see that it runs
    measure.py OUT.jsonl --cells core --list                cells and arms; nothing runs
    measure.py OUT.jsonl --cells two_gpus_full --tp 2       two GPUs, a rank each
    report.py OUT.jsonl                                     the table

One engine runs every arm: the connector is exchanged between repeats, while nothing is in flight. A round has each arm
once, in random order, and the baseline before the first half and before the second; every second round runs the one
before it backwards, so that a drift touches all arms alike. First every cell gets its own number of rounds, then those
whose figures are not shown yet get two more in turn, until the budget is spent. Prompts are a document of the host pool
and new tokens, the same for every arm and repeat; before each repeat vLLM's own prefix cache is emptied, and it keeps
no more than the cell needs and one request more, so that every hit comes from the pool. Each repeat is one line of OUT;
a second call skips the lines that are there, so a run can be cut anywhere. Weights are seeded, so that an early read
changes tokens: `verify` lines hold answers to compare with recomputation. With several ranks a layer has landed when it
has on the slower one; every rank's landings are kept too.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # the modules beside this one are concurrency.NAME

from concurrency.arms import ARMS, Arm, chunk_major_of
from concurrency.cells import Cell, Group, joined, shrunk
from concurrency.groups import GROUPS
from concurrency.host_cores import CHOOSING_S, MOST_CHOICES, SLOW_CORE
from concurrency.recording import RecordingError, rows_there
from concurrency.run import Run
from concurrency.second_process import MPS_CONTROL, mps_servers
from lamella.cuda_ext.commit import commit_of


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="JSON lines; appended to")
    parser.add_argument("--cells", default="core", help=f"groups of one engine, joined by +: {', '.join(GROUPS)}")
    parser.add_argument("--only", default="", help="cells whose name holds one of these words, split by commas")
    parser.add_argument("--arms", default="", help="only these arms, split by commas; the baseline stays")
    parser.add_argument("--arm", action="append", default=[], metavar="NAME=JSON", help="an arm of your own")
    parser.add_argument("--repeats", type=int, default=0, help="rounds of every cell, instead of its own and no more")
    parser.add_argument("--shard", default="0/1", help="I/N: every N-th cell from the I-th on")
    parser.add_argument("--budget-s", type=float, default=560.0, help="no repeat begins later than this")
    parser.add_argument(
        "--no-answers", action="store_true", help="time alone: no answer is compared with recomputation in this call"
    )
    parser.add_argument(
        "--stream-stalls", action="store_true", help="time layers' waits on the stream; not for figures"
    )
    parser.add_argument(
        "--side", default="0/1", metavar="I/N", help="the I-th of N engines on this host: cores of its own"
    )
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=JSON", help="an option of vLLM's engine, for every arm"
    )
    parser.add_argument("--tp", type=int, default=1, metavar="RANKS", help="tensor parallelism, a GPU a rank")
    parser.add_argument(
        "--no-custom-all-reduce", action="store_true", help="ranks add up by NCCL alone, not by vLLM's own kernels"
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU, 1/32 of the tokens")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--commit", default=commit_of(), help="written down with the machine's facts")
    parser.add_argument("--list", action="store_true")
    return parser.parse_args()


def main() -> int:
    """Runs what was asked; 0 when everything is done, 3 when the budget ended it or a cell failed, 2 for bad input."""
    begin = time.perf_counter()
    asked = parse()
    try:
        group, arms = joined(asked.cells, GROUPS), dict(ARMS)
        own = [(name, json.loads(settings)) for name, _equals, settings in (text.partition("=") for text in asked.arm)]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    for name, settings in own:
        arms[name] = Arm(name, settings)
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
            arms=tuple(
                name for name in cell.arms if not wanted_arms or name in (chunk_major_of(cell.arms)[0], *wanted_arms)
            ),
            repeats=asked.repeats or cell.repeats,
            most_repeats=asked.repeats or cell.most_repeats,
        )
        for cell in cells
    ]
    group = dataclasses.replace(group, cells=tuple(cells))
    if asked.list or not cells:
        for cell in cells:
            print(cell.name, cell.repeats, ",".join(cell.arms))
        return 0 if cells else 2
    if group.mps and not asked.tiny and mps_servers() is None:
        print(f"{asked.cells} runs through MPS, and none answers here: start it by `{MPS_CONTROL} -d`", file=sys.stderr)
        return 2
    try:
        there = rows_there(asked.out)
        asked.out.open("a").close()  # what cannot be written to is said before a minute of the engine's start
    except RecordingError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{asked.out}: {error.strerror}; name a file that can be written", file=sys.stderr)
        return 2
    try:
        return measure(asked, group, arms, cells, there, begin)
    except Exception:
        if asked.tp == 1:
            raise
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # the end of a process waits for workers that failed, and for ever


def measure(
    asked: argparse.Namespace,
    group: Group,
    arms: dict[str, Arm],
    cells: list[Cell],
    there: list[dict[str, Any]],
    begin: float,
) -> int:
    """Everything that is not `there` is measured and written; 0 or 3, as `main`."""
    from concurrency.engine import ConcurrencyEngine

    options = {"disable_custom_all_reduce": True} if asked.no_custom_all_reduce else {}
    options |= {name: json.loads(value) for name, _equals, value in (text.partition("=") for text in asked.option)}
    part, parts = map(int, asked.side.split("/"))
    engine = ConcurrencyEngine(group, asked.tiny, asked.tp, options, (part, parts))
    engine.probe.layers_timed = asked.stream_stalls
    engine.cores.choose()
    run = Run(asked, engine, group, arms, there, begin)
    run.write({"kind": "engine", **facts_of(engine, asked)})
    run.say(f"engine ready: {json.dumps(engine.facts())}")
    run.say(f"cores: {json.dumps(engine.cores.facts())}")
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
        facts["mps"] = mps_servers()
        engine.torch.cuda.empty_cache()
    facts["vllm"], facts["cores"] = vllm.__version__, engine.cores.facts()
    facts["cores"] |= {"chosen_anew_above": SLOW_CORE, "most_choices": MOST_CHOICES, "choosing_s": CHOOSING_S}
    facts["arguments"] = [argument for argument in sys.argv[1:] if not argument.startswith("/")]
    return facts


if __name__ == "__main__":
    raise SystemExit(main())
