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
from collections.abc import Sequence
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
from lamella.connector.vllm_settings import ConnectorSettings
from lamella.cuda_ext.commit import commit_of


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a number, 0 or more, got {text!r}")
    return int(text)


def _part(text: str) -> tuple[int, int]:
    index, _slash, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise argparse.ArgumentTypeError(f"must be I/N with I below N, as 0/2 and 1/2, got {text!r}")
    return int(index), int(count)


def _named(text: str) -> tuple[str, Any]:
    name, _equals, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be NAME=JSON, got {text!r}: {error}") from error


def _own_arm(text: str) -> Arm:
    name, settings = _named(text)
    if name in ARMS:
        raise argparse.ArgumentTypeError(f"{name} is an arm already: give yours another name")
    if not isinstance(settings, dict):
        raise argparse.ArgumentTypeError(f"{name} must be settings of the connector, as {{}}, got {settings!r}")
    try:
        ConnectorSettings.from_mapping(settings)
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{name}: {error}") from error
    return Arm(name, settings)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="JSON lines; appended to")
    parser.add_argument("--cells", default="core", help=f"groups of one engine, joined by +: {', '.join(GROUPS)}")
    parser.add_argument("--only", default="", help="cells whose name holds one of these words, split by commas")
    parser.add_argument("--arms", default="", help="only these arms, split by commas; the baseline stays")
    parser.add_argument(
        "--arm", action="append", default=[], type=_own_arm, metavar="NAME=JSON", help="an arm of your own"
    )
    parser.add_argument("--repeats", type=_count, default=0, help="rounds of every cell, and no more")
    parser.add_argument(
        "--shard", default="0/1", type=_part, metavar="I/N", help="every N-th cell from the I-th on, counted from 0"
    )
    parser.add_argument("--budget-s", type=float, default=560.0, help="no repeat begins later than this")
    parser.add_argument(
        "--no-answers", action="store_true", help="time alone: no answer is compared with recomputation in this call"
    )
    parser.add_argument(
        "--stream-stalls", action="store_true", help="time layers' waits on the stream; not for figures"
    )
    parser.add_argument(
        "--side",
        default="0/1",
        type=_part,
        metavar="I/N",
        help="the I-th of N engines on this host, counted from 0: cores of its own",
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        type=_named,
        metavar="NAME=JSON",
        help="an option of vLLM's engine, for every arm",
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


def chosen(asked: argparse.Namespace, cells: Sequence[Cell]) -> list[Cell]:
    """The cells of the groups that were asked for, with the arms and repeats that were.

    Raises:
        ValueError: a word or an arm that no cell has, or a shard without one.
    """
    names = ", ".join(cell.name for cell in cells)
    words = [word for word in asked.only.split(",") if word]
    if lost := [word for word in words if not any(word in cell.name for cell in cells)]:
        raise ValueError(f"--only {','.join(lost)}: no cell of {asked.cells} is called so; there are {names}")
    here = [cell for cell in cells if not words or any(word in cell.name for word in words)]
    own = [arm.name for arm in asked.arm]
    known = dict.fromkeys((*(name for cell in here for name in cell.arms), *own))
    wanted = [name for name in asked.arms.split(",") if name]
    if lost := [name for name in wanted if name not in known]:
        raise ValueError(f"--arms {','.join(lost)}: these cells have no such arm; they have {', '.join(known)}")
    index, count = asked.shard
    if index >= len(here):
        raise ValueError(f"--shard {index}/{count}: there are {len(here)} cells, so this one has none")
    found = []
    for cell in here[index::count]:
        names_here = tuple(dict.fromkeys((*cell.arms, *own)))
        kept = (chunk_major_of(names_here)[0], *wanted) if wanted else names_here
        repeats = {"repeats": asked.repeats, "most_repeats": asked.repeats} if asked.repeats else {}
        found.append(dataclasses.replace(cell, arms=tuple(n for n in names_here if n in kept), **repeats))
    return found


def main() -> int:
    """Runs what was asked; 0 when everything is done, 3 when the budget ended it or a cell failed, 2 for bad input."""
    begin = time.perf_counter()
    asked = parse()
    try:
        group = joined(asked.cells, GROUPS)
        if asked.tiny:
            group = shrunk(group)
        cells = chosen(asked, group.cells)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    arms = ARMS | {arm.name: arm for arm in asked.arm}
    group = dataclasses.replace(group, cells=tuple(cells))
    if asked.list:
        for cell in cells:
            print(cell.name, cell.repeats, ",".join(cell.arms))
        return 0
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
    engine = ConcurrencyEngine(group, asked.tiny, asked.tp, options | dict(asked.option), asked.side)
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
