"""Conversations that share prefixes, under memory pressure, with aborts, failed and held-up loads: every answer right?

    python benchmarks/vllm_soak.py --minutes 30 --model FOLDER [--device-blocks 60] [--json out.json]

An engine without a connector answers every conversation's turns first, alone and one after another; then one with
`LamellaConnector` answers them again and again in a random order, several at once, in a cache so small that requests
are preempted, while requests are aborted, loads fail and loads are held up at random. Every answer that was not aborted
is compared: tokens, and log-probabilities within 1e-4. They are equal to the bit but for a few: the engine rounds a
little differently when it cuts a prompt into other steps, which `--control` shows, where nothing is loaded (one changed
number of one block moves a log-probability by 0.2). At the end nothing may be left: blocks, pins, slots, holds.

Exit code 1: a wrong answer, something left behind, or fewer preemptions and aborts than asked for.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
for name, value in {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "CRITICAL",
}.items():
    os.environ.setdefault(name, value)

NEW_TOKENS = 12
IN_FLIGHT = 6
ROUNDING = 1e-4


def conversations(rng: random.Random) -> list[list[int]]:
    """Prompts of which many share a beginning: six systems, some turns each."""
    from with_vllm.live_engine import prompt

    prompts = []
    for system in range(6):
        head = prompt(rng.choice([96, 160, 256, 320]), salt=system)
        for turn in range(5):
            prompts.append([*head, *prompt(rng.randrange(20, 400), salt=100 + system * 10 + turn)])
    return prompts


def deviation(answer: Any, right: Any) -> float:
    """The largest difference of a log-probability; infinite if tokens or the reason differ."""
    if (answer.tokens, answer.reason) != (right.tokens, right.reason):
        return math.inf
    return max(abs(mine - other) for mine, other in zip(answer.logprobs, right.logprobs, strict=True))


class Troublemaker:
    """Makes loads fail and hangs them up, at random, below the connector's own code."""

    def __init__(self, live: Any, rng: random.Random, fail: float, delay: float) -> None:
        self.failed = self.delayed = 0
        original = live.worker.loads._submit

        def submit(order: Any) -> Any:
            job = original(order)
            if rng.random() < fail:
                self.failed += 1
                return _refuse
            if rng.random() < delay:
                self.delayed += 1
                return lambda: (threading.Event().wait(rng.uniform(0.001, 0.03)), job())[1]
            return job

        live.worker.loads._submit = submit


def _refuse() -> Any:
    raise RuntimeError("planted by the soak")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--model", type=Path, required=True, help="written there if it is not")
    parser.add_argument("--device-blocks", type=int, default=60)
    parser.add_argument("--release", default="first")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--aborts", type=float, default=0.12, help="share of requests that are aborted")
    parser.add_argument("--failures", type=float, default=0.05, help="share of loads that fail")
    parser.add_argument("--delays", type=float, default=0.3, help="share of loads that are held up")
    parser.add_argument("--least-preemptions", type=int, default=20)
    parser.add_argument("--least-aborts", type=int, default=50)
    parser.add_argument("--control", action="store_true", help="nothing is stored or loaded: the engine alone")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()

    from with_vllm.live_engine import LiveEngine
    from with_vllm.tiny_llama import write_tiny_llama

    if not (asked.model / "config.json").exists():
        write_tiny_llama(asked.model)
    rng = random.Random(asked.seed)
    prompts = conversations(rng)
    live = LiveEngine(
        asked.model,
        {"layers_per_slice": 1, "release": asked.release, "host_pool_gib": 0.02, "chunk_tokens": 64, "max_loads": 3},
        policy="recompute",
        num_gpu_blocks_override=asked.device_blocks,
        max_num_seqs=IN_FLIGHT,
    )
    expected = []
    for tokens in prompts:
        live.side.reset()
        live.forget_blocks()
        answer = live.generate(tokens, NEW_TOKENS)
        assert answer.cached == 0, "the yardstick computes everything"
        expected.append(answer)
    trouble = Troublemaker(live, rng, asked.failures, asked.delays)
    if asked.control:
        live.side.matched_tokens = lambda request, local_hit: (0, False)
    counts = {"answers": 0, "wrong": 0, "not to the bit": 0, "aborts": 0, "preemptions": 0, "steps": 0}
    running: dict[str, tuple[int, int | None]] = {}  # name -> (prompt, step at which it is aborted)
    preempted = live.scheduler._preempt_request

    def count_preemption(*arguments: Any, **keywords: Any) -> Any:
        counts["preemptions"] += 1
        return preempted(*arguments, **keywords)

    live.scheduler._preempt_request = count_preemption
    largest = 0.0
    until, number = time.monotonic() + asked.minutes * 60, 0
    while time.monotonic() < until or running:
        while len(running) < IN_FLIGHT + 2 and time.monotonic() < until:
            pick = rng.randrange(len(prompts))
            name, number = f"q{number}", number + 1
            dies = counts["steps"] + rng.randrange(0, 12) if rng.random() < asked.aborts else None
            live.add(name, prompts[pick], NEW_TOKENS)
            running[name] = (pick, dies)
        live.step()
        counts["steps"] += 1
        for name, (pick, dies) in list(running.items()):
            if name in live.outputs:
                answer = live.outputs.pop(name)
                del running[name]
                counts["answers"] += 1
                apart = deviation(answer, expected[pick])
                counts["not to the bit"] += apart > 0
                largest = max(largest, apart)
                if apart > ROUNDING:
                    counts["wrong"] += 1
                    print(f"wrong: {name}, prompt {pick}: {answer} instead of {expected[pick]}", file=sys.stderr)
            elif dies is not None and dies <= counts["steps"]:
                live.abort(name)
                del running[name]
                counts["aborts"] += 1
    live.outputs.clear()
    live.settle()
    free = live.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    occupancy = live.side.index.occupancy()
    left = {
        "blocks": asked.device_blocks - 1 - free,
        "pins": occupancy.pins,
        "slots being written": occupancy.writing,
        "holds": live.side.book.num_held,
        "work": live.side.book.num_open,
    }
    totals = {**live.side.metrics._total, **live.worker.metrics._total}
    result = {
        **counts,
        "loads that were made to fail": trouble.failed,
        "loads that were held up": trouble.delayed,
        "largest deviation": largest,
        "left behind": left,
        "metrics": totals,
        "minutes": asked.minutes,
        "seed": asked.seed,
        "release": asked.release,
    }
    print(json.dumps(result, indent=1))
    if asked.json:
        asked.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    enough = counts["preemptions"] >= asked.least_preemptions and counts["aborts"] >= asked.least_aborts
    live.close()
    return 0 if not counts["wrong"] and not any(left.values()) and enough else 1


if __name__ == "__main__":
    sys.exit(main())
