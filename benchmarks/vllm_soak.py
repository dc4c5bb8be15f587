"""Conversations that share prefixes, under memory pressure, with aborts, failed and held-up loads: every answer right?

    python benchmarks/vllm_soak.py --minutes 30 --model FOLDER [--device-blocks 60] [--json out.json]

Every prompt is answered first alone, with nothing to load; then again and again in a random order, several at once, in
a cache so small that requests are preempted, while requests are aborted, loads fail at their start and in mid-copy, and
layers land one by one with random pauses. Every answer that was not aborted is compared: tokens, and log-probabilities
within 1e-4. They are equal to the bit but for a few: the engine rounds a little differently when it cuts a prompt into
other steps, which `--control` shows, where nothing is loaded (one changed number of one block moves a log-probability
by 0.2). At the end nothing may be left: blocks, pins, slots, holds.

On a GPU answers are rounded otherwise by every other batch: `--control-minutes` first lets the same traffic run with
nothing to load, and twice the largest deviation seen there is allowed. A load that fails ends its requests there, since
vLLM cannot take a running request back.

`--window` is for layers that slide over a window: in an earlier version 252 of 6,578 answers of `all` were wrong.

Exit code 1: a wrong answer, something left behind, or fewer preemptions and aborts than asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

from result_file import write_json

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
for name, value in {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
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
    from with_vllm.tiny_engine import prompt

    prompts = []
    for system in range(6):
        head = prompt(rng.choice([96, 160, 256, 320]), salt=system)
        for turn in range(5):
            prompts.append([*head, *prompt(rng.randrange(20, 400), salt=100 + system * 10 + turn)])
    return prompts


class Troublemaker:
    """Makes loads fail and holds them up at random: at their start, between layers, and in mid-copy.

    The engine moves a load's layers one by one, as a thread of this object lets them; so most requests are released
    while the rest is on its way.
    """

    def __init__(self, live: Any, rng: random.Random, fail: float, longest_pause_s: float) -> None:
        self.failed = 0
        self._gate = live.gate
        self._rng = random.Random(rng.random())
        self._longest_pause_s = longest_pause_s
        self._stop = threading.Event()
        original = live.worker.loads._submit

        def submit(order: Any) -> Any:
            job = original(order)
            fate = rng.random()
            self.failed += fate < fail
            if fate < fail / 2:
                return _refuse
            if fate < fail:
                self._gate.fail_at(rng.randrange(1, 4))
            return job

        live.worker.loads._submit = submit
        self._thread = threading.Thread(target=self._let_layers_land, daemon=True)
        self._thread.start()

    def _let_layers_land(self) -> None:
        while not self._stop.wait(self._rng.uniform(0.0, self._longest_pause_s)):
            if self._gate.live:
                self._gate.grant(1)

    def stop(self) -> None:
        """No more pauses; what is under way lands."""
        self._stop.set()
        self._thread.join()
        self._gate.grant(1 << 40)


def _refuse() -> Any:
    raise RuntimeError("planted by the soak")


class Traffic:
    """Requests in a random order, several at once, some of them aborted; every answer is compared."""

    def __init__(self, live: Any, rng: random.Random, prompts: list[list[int]], expected: list[Any]) -> None:
        self.live, self.rng, self.prompts, self.expected = live, rng, prompts, expected
        self.counts = dict.fromkeys(
            ("answers", "wrong", "not to the bit", "ended by a failed load", "aborts", "preemptions", "steps"), 0
        )
        self.largest = 0.0
        self._number = 0
        self._preempted = live.scheduler._preempt_request
        live.scheduler._preempt_request = self._count_preemption

    def _count_preemption(self, *arguments: Any, **keywords: Any) -> Any:
        self.counts["preemptions"] += 1
        return self._preempted(*arguments, **keywords)

    def run(self, minutes: float, aborts: float, tolerance: float, fails: bool) -> None:
        """Answers farther apart than `tolerance` are wrong; so is an error where no load was made to fail."""
        until = time.monotonic() + minutes * 60
        running: dict[str, tuple[int, int | None]] = {}  # name -> (prompt, step at which it is aborted)
        live, rng, counts = self.live, self.rng, self.counts
        while time.monotonic() < until or running:
            while len(running) < IN_FLIGHT + 2 and time.monotonic() < until:
                pick = rng.randrange(len(self.prompts))
                name, self._number = f"q{self._number}", self._number + 1
                dies = counts["steps"] + rng.randrange(0, 12) if rng.random() < aborts else None
                live.add(name, self.prompts[pick], NEW_TOKENS)
                running[name] = (pick, dies)
            live.step()
            counts["steps"] += 1
            for name, (pick, dies) in list(running.items()):
                if name in live.outputs:
                    self._judge(name, live.outputs.pop(name), self.expected[pick], tolerance, fails)
                    del running[name]
                elif dies is not None and dies <= counts["steps"]:
                    live.abort(name)
                    del running[name]
                    counts["aborts"] += 1
        live.outputs.clear()

    def _judge(self, name: str, answer: Any, right: Any, tolerance: float, fails: bool) -> None:
        self.counts["answers"] += 1
        if answer.reason == "error" and fails:
            self.counts["ended by a failed load"] += 1
            return
        apart = answer.deviation(right) if answer.reason == right.reason else float("inf")
        self.counts["not to the bit"] += apart > 0
        self.largest = max(self.largest, apart)
        if apart > tolerance:
            self.counts["wrong"] += 1
            print(f"wrong: {name}, {apart} apart: {answer} instead of {right}", file=sys.stderr)


def yardsticks(live: Any, prompts: list[list[int]]) -> list[Any]:
    """Each prompt's answer alone, with nothing to load."""
    expected = []
    for tokens in prompts:
        live.forget_blocks()
        live.side.reset()
        expected.append(live.generate(tokens, NEW_TOKENS))
        assert expected[-1].cached == 0, "the yardstick computes everything"
    return expected


def left_behind(live: Any, device_blocks: int) -> dict[str, int]:
    """What is still taken once everything has ended; all of it must be 0."""
    live.settle()
    occupancy = live.side.objects.index.occupancy()
    return {
        "blocks": device_blocks - 1 - live.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        "pins": occupancy.pins,
        "slots being written": occupancy.writing,
        "holds": live.side.book.num_held,
        "work": live.side.book.num_open,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--model", type=Path, required=True, help="written there if it is not")
    parser.add_argument(
        "--window", choices=("some", "all"), help="of its layers slide over 64 tokens, where it is written"
    )
    parser.add_argument("--device-blocks", type=int, default=60)
    parser.add_argument("--release", default="first")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--aborts", type=float, default=0.12, help="share of requests that are aborted")
    parser.add_argument("--failures", type=float, default=0.05, help="share of loads that fail")
    parser.add_argument("--longest-pause-ms", type=float, default=2.0, help="between two layers of a load")
    parser.add_argument("--least-preemptions", type=int, default=20)
    parser.add_argument("--least-aborts", type=int, default=50)
    parser.add_argument("--control", action="store_true", help="nothing is stored or loaded: the engine alone")
    parser.add_argument(
        "--control-minutes", type=float, default=0.0, help="such a time first: what it shows is allowed"
    )
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()

    import torch

    from with_vllm.live_engine import LiveEngine
    from with_vllm.tiny_engine import DTYPE, PLAIN_STEPS
    from with_vllm.tiny_llama import write_tiny_llama

    if not (asked.model / "config.json").exists():
        window = None if asked.window is None else 64
        write_tiny_llama(asked.model, window=window, everywhere=asked.window == "all", dtype=getattr(torch, DTYPE))
    rng = random.Random(asked.seed)
    prompts = conversations(rng)
    live = LiveEngine(
        asked.model,
        {"layers_per_slice": 1, "release": asked.release, "host_pool_gib": 0.02, "chunk_tokens": 64, "max_loads": 3},
        policy="recompute" if PLAIN_STEPS else "fail",
        paced=True,
        num_gpu_blocks_override=asked.device_blocks,
        max_num_seqs=IN_FLIGHT,
    )
    expected = yardsticks(live, prompts)
    tolerance, control = ROUNDING, None
    if asked.control_minutes:
        with live.nothing_loaded():
            alone = Traffic(live, rng, prompts, expected)
            alone.run(asked.control_minutes, asked.aborts, float("inf"), fails=False)
        tolerance = max(ROUNDING, 2 * alone.largest)
        control = {**alone.counts, "largest deviation": alone.largest}
        print(f"control: {control}", file=sys.stderr, flush=True)
        live.scheduler._preempt_request = alone._preempted
    trouble = Troublemaker(live, rng, asked.failures, asked.longest_pause_ms / 1e3)
    if asked.control:
        live.side.matched_tokens = lambda request, local_hit: (0, False)
    traffic = Traffic(live, rng, prompts, expected)
    began = time.monotonic()
    traffic.run(asked.minutes, asked.aborts, tolerance, fails=not PLAIN_STEPS and asked.failures > 0)
    took_s = time.monotonic() - began
    trouble.stop()
    left, counts = left_behind(live, asked.device_blocks), traffic.counts
    result = {
        **counts,
        "loads that were made to fail": trouble.failed,
        "largest deviation": traffic.largest,
        "allowed deviation": tolerance,
        "control": control,
        "left behind": left,
        "metrics": {**live.side.metrics._total, **live.worker.metrics._total},
        "minutes": round(took_s / 60, 2),
        "seed": asked.seed,
        "release": asked.release,
        "device": str(live.tensors[0].device),
    }
    print(json.dumps(result, indent=1))
    if asked.json:
        write_json(asked.json, result)
    enough = counts["preemptions"] >= asked.least_preemptions and counts["aborts"] >= asked.least_aborts
    live.close()
    return 0 if not counts["wrong"] and not any(left.values()) and enough else 1


if __name__ == "__main__":
    sys.exit(main())
