#!/usr/bin/env python3
"""How long an engine step takes in real vLLM on a GPU: the tables a device profile is made from.

  vllm_step_times.py OUT.json --arm full       vLLM's default CUDA graphs, prefix caching off
  vllm_step_times.py OUT.json --arm piecewise  piecewise graphs (what waits per layer need), prefix caching on,
                                               and the claimed hits checked against real prefix-cache hits
  vllm_step_times.py OUT.json --dry-run        the cells, without vLLM

Model: the shape of Llama-3.1-8B with dummy weights, right for timing and useless for its tokens. Measured are
`prefill` (n new tokens over m cached, time to the first token and GPU time of the step), `decode` (steps by batch and
context, every request with blocks of its own), `batched` (several prefills in one step), `mixed` (a prefill that joins
decodes) and `wire` (pinned copies). Every raw value is kept; OUT is rewritten after each section, so a run that is cut
short keeps what it has. Milliseconds everywhere, as the keys say.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pathlib
import random
import statistics
import sys
import tempfile
import time
from typing import Any

import device_facts
from result_file import write_json
from step_time_cells import (
    BATCHED,
    BATCHES,
    BLOCK_TOKENS,
    CACHED,
    CONTEXTS,
    MIXED,
    MIXED_CONTEXT,
    MODEL,
    NEW,
    REAL_HITS,
)

from lamella.cuda_ext.commit import commit_of


class OutOfTimeError(Exception):
    """The time given with --deadline-s has passed; what was measured is written."""


class Bench:
    """One engine, the results so far and where they go."""

    def __init__(self, args: argparse.Namespace, begin: float) -> None:
        self.args, self.begin = args, begin
        self.rng = random.Random(args.seed)
        self.num_added = 0
        self.results: dict[str, Any] = {"schema_version": 1, "arm": args.arm, "complete": False, "skipped": []}

    def start(self) -> None:
        """Builds the engine; fills in `provenance` and `settings`."""
        os.environ.update(
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_USE_FLASHINFER_SAMPLER="0",
            HF_HUB_OFFLINE="1",
            VLLM_NO_USAGE_STATS="1",
            VLLM_LOGGING_LEVEL="WARNING",
        )
        sys.path.insert(0, str(pathlib.Path(__file__).parent))
        import torch
        import vllm
        from vllm.config import KVTransferConfig

        self.torch, self.SamplingParams = torch, vllm.SamplingParams
        facts = device_facts.provenance(torch, vllm)
        self.results["provenance"] = {**facts, "commit": self.args.commit, "seed": self.args.seed}
        model = tempfile.mkdtemp(prefix="llama8b-")
        (pathlib.Path(model) / "config.json").write_text(json.dumps(MODEL))
        piecewise = self.args.arm == "piecewise"
        llm = vllm.LLM(
            model=model,
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=False,
            max_model_len=140000,
            gpu_memory_utilization=0.92,
            max_num_batched_tokens=8192,
            max_num_seqs=256,
            enable_prefix_caching=piecewise,
            disable_log_stats=True,
            disable_hybrid_kv_cache_manager=True,
            kv_transfer_config=KVTransferConfig(
                kv_connector="FakeHitConnector",
                kv_connector_module_path="fake_hit_connector",
                kv_role="kv_both",
                kv_connector_extra_config={"piecewise": piecewise},
            ),
        )
        import fake_hit_connector

        self.fake = fake_hit_connector
        self.engine = llm.llm_engine
        config = self.engine.vllm_config
        self.capacity_tokens = config.cache_config.num_gpu_blocks * BLOCK_TOKENS
        layer = next(iter(config.compilation_config.static_forward_context.values()))
        self.results["settings"] = {
            "init_s": round(time.perf_counter() - self.begin, 1),
            "kv_capacity_tokens": self.capacity_tokens,
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
            "cudagraph_capture_max": config.compilation_config.max_cudagraph_capture_size,
            "async_scheduling": config.scheduler_config.async_scheduling,
            "prefix_caching": piecewise,
            "max_num_batched_tokens": 8192,
            "max_num_seqs": 256,
            "block_tokens": BLOCK_TOKENS,
            "attention": getattr(getattr(layer, "attn_backend", None), "__name__", type(layer).__name__),
            "model": MODEL,
        }
        self.results["wire"] = device_facts.wire_rates(torch)
        self.say(f"wire: {self.results['wire']}")
        torch.cuda.empty_cache()
        self.write()
        self.say(f"engine ready: {json.dumps({k: v for k, v in self.results['settings'].items() if k != 'model'})}")

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.begin:6.1f} s] {text}", flush=True)

    def write(self) -> None:
        write_json(pathlib.Path(self.args.out), self.results, indent=None)

    def check_time(self) -> None:
        if time.perf_counter() - self.begin > self.args.deadline_s:
            raise OutOfTimeError

    def prompt(self, num_tokens: int) -> list[int]:
        return self.rng.choices(range(1000, 100000), k=num_tokens)

    def add(self, token_ids: list[int], output_tokens: int) -> None:
        params = self.SamplingParams(
            max_tokens=output_tokens, min_tokens=output_tokens, temperature=0, ignore_eos=True, detokenize=False
        )
        self.engine.add_request(f"r{self.num_added}", {"prompt_token_ids": token_ids}, params)
        self.num_added += 1

    def drain(self) -> list[tuple[float, int]]:
        """Steps until nothing is left; the wall clock and number of outputs of every step that had some."""
        seen = []
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            if outputs:
                seen.append((time.perf_counter(), len(outputs)))
        return seen

    def steps(self) -> list[dict[str, float]]:
        """The steps since the last call: batch, GPU time, and GPU time since the end of the step before."""
        self.torch.cuda.synchronize()
        rows, before = [], None
        for step in self.fake.STEPS:
            period = before.elapsed_time(step.end) if before is not None else None
            rows.append(
                {
                    "requests": step.num_requests,
                    "tokens": step.num_tokens,
                    "gpu_ms": step.begin.elapsed_time(step.end),
                    "period_ms": period,
                }
            )
            before = step.end
        self.fake.STEPS.clear()
        return rows

    def first_token(self, prompts: list[list[int]], cached: int, new: int) -> dict[str, float]:
        """Adds the prompts together, runs them to their first token in one step."""
        self.fake.Claim.tokens = cached
        self.steps()
        begin = time.perf_counter()
        for token_ids in prompts:
            self.add(token_ids, 1)
        added = time.perf_counter()
        end = self.drain()[-1][0]
        steps = self.steps()
        if [step["tokens"] for step in steps] != [new * len(prompts)]:
            raise RuntimeError(
                f"cached {cached} new {new}: wanted one step of {new * len(prompts)} tokens, got {steps}"
            )
        return {"ttft_ms": 1e3 * (end - begin), "add_ms": 1e3 * (added - begin), "gpu_ms": steps[0]["gpu_ms"]}

    def prefill(self, section: str, cells: list[tuple[int, int, int]], repeats: int) -> None:
        """(requests, cached, new) cells: one unrecorded repeat, then `repeats`; a second call adds to the first's."""
        rows = self.results.setdefault(section, [])
        for count, cached, new in cells:
            self.check_time()
            row = next((r for r in rows if (r["requests"], r["cached"], r["new"]) == (count, cached, new)), None)
            if row is None:
                row = {"requests": count, "cached": cached, "new": new, "ttft_ms": [], "add_ms": [], "gpu_ms": []}
                rows.append(row)
            for repeat in range(repeats + 1):
                times = self.first_token([self.prompt(cached + new) for _ in range(count)], cached, new)
                if repeat:
                    for key, value in times.items():
                        row[key].append(round(value, 4))
            if (count, new) == (cells[0][0], cells[0][2]) or section != "prefill":
                self.say(
                    f"{section} {count} x {cached}+{new}: TTFT {statistics.median(row['ttft_ms']):.2f} ms, "
                    f"GPU {statistics.median(row['gpu_ms']):.2f} ms"
                )
        self.write()

    def decode(self, num_steps: int) -> None:
        rows = self.results.setdefault("decode", [])
        for context in CONTEXTS:
            for batch in BATCHES:
                self.check_time()
                if batch * (context + num_steps + BLOCK_TOKENS) > 0.97 * self.capacity_tokens:
                    self.results["skipped"].append(
                        {
                            "section": "decode",
                            "batch": batch,
                            "context": context,
                            "reason": (f"needs {batch * context} tokens of KV, the GPU holds {self.capacity_tokens}"),
                        }
                    )
                    continue
                self.fake.Claim.tokens = context - BLOCK_TOKENS
                self.steps()
                for token_ids in [self.prompt(context) for _ in range(batch)]:
                    self.add(token_ids, num_steps)
                seen = self.drain()
                steps = [s for s in self.steps() if (s["requests"], s["tokens"]) == (batch, batch) and s["period_ms"]]
                walls = [1e3 * (b - a) for (a, _), (b, n) in itertools.pairwise(seen) if n == batch]
                rows.append(
                    {
                        "batch": batch,
                        "context": context,
                        "first_context": context + 1,
                        "gpu_ms": [round(s["gpu_ms"], 4) for s in steps],
                        "period_ms": [round(s["period_ms"], 4) for s in steps],
                        "wall_ms": [round(w, 4) for w in walls],
                    }
                )
                if batch in (1, 32):
                    self.say(
                        f"decode {batch} x {context}: period {statistics.median(rows[-1]['period_ms']):.2f} ms, "
                        f"GPU {statistics.median(rows[-1]['gpu_ms']):.2f} ms, wall {statistics.median(walls):.2f} ms"
                    )
            self.write()

    def mixed(self, repeats: int) -> None:
        """A prefill that joins a running decode batch: the step that holds both, and the decode steps around it."""
        rows = self.results.setdefault("mixed", [])
        for batch, cached, new in MIXED:
            self.check_time()
            prompts = [self.prompt(cached + new) for _ in range(repeats)]
            self.fake.Claim.tokens = MIXED_CONTEXT - BLOCK_TOKENS
            self.steps()
            for token_ids in [self.prompt(MIXED_CONTEXT) for _ in range(batch)]:
                self.add(token_ids, 12 * repeats + 12)
            for token_ids in prompts:
                for _ in range(10):
                    self.engine.step()
                self.fake.Claim.tokens = cached
                self.add(token_ids, 1)
            self.drain()
            steps = self.steps()
            both = [s["gpu_ms"] for s in steps if (s["requests"], s["tokens"]) == (batch + 1, batch + new)]
            alone = [s["gpu_ms"] for s in steps if (s["requests"], s["tokens"]) == (batch, batch)]
            rows.append(
                {
                    "batch": batch,
                    "context": MIXED_CONTEXT,
                    "cached": cached,
                    "new": new,
                    "gpu_ms": both,
                    "decode_gpu_ms": alone,
                }
            )
            self.say(
                f"mixed {batch} decodes + {cached}+{new}: {both} ms, decode alone {statistics.median(alone):.2f} ms"
            )
        self.write()

    def real_hits(self, repeats: int) -> None:
        """The same cells by claimed hits and by real hits in the engine's own prefix cache."""
        rows = self.results.setdefault("real_hits", [])
        for cached, new in REAL_HITS:
            self.check_time()
            prefix = self.prompt(cached)
            self.fake.Claim.tokens = 0
            self.add(prefix + self.prompt(BLOCK_TOKENS), 1)
            self.drain()
            claimed, real = [], []
            for _ in range(repeats + 1):
                claimed.append(self.first_token([self.prompt(cached + new)], cached, new))
                real.append(self.first_token([prefix + self.prompt(new)], 0, new))
            rows.append({"cached": cached, "new": new, "claimed": claimed[1:], "real": real[1:]})
            medians = [
                statistics.median(r[key] for r in side[1:]) for side in (claimed, real) for key in ("ttft_ms", "gpu_ms")
            ]
            self.say(
                f"hits {cached}+{new}: claimed TTFT {medians[0]:.2f} GPU {medians[1]:.2f}, "
                f"real TTFT {medians[2]:.2f} GPU {medians[3]:.2f} ms"
            )
        self.write()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="JSON file to write")
    parser.add_argument("--arm", choices=("full", "piecewise"), default="full")
    parser.add_argument("--repeats", type=int, default=4, help="a round of prefill cells; the full arm runs two rounds")
    parser.add_argument("--decode-steps", type=int, default=28)
    parser.add_argument("--deadline-s", type=float, default=240.0, help="measure no further cell after this long")
    parser.add_argument("--commit", default=commit_of())
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    grid = [(1, cached, new) for new in NEW for cached in CACHED]
    if args.dry_run:
        decode = len(BATCHES) * len(CONTEXTS)
        print(f"prefill {len(grid)} cells, decode up to {decode}, batched {len(BATCHED)}, mixed {len(MIXED)}")
        return 0
    bench = Bench(args, time.perf_counter())
    bench.start()
    try:
        bench.prefill("warm_up", [(1, 4096, new) for new in NEW], 1)
        if args.arm == "full":
            bench.prefill("prefill", grid, args.repeats)
            bench.decode(args.decode_steps)
            bench.prefill("batched", list(BATCHED), args.repeats)
            bench.mixed(4)
            bench.prefill("prefill", grid, args.repeats)
        else:
            bench.real_hits(7)
            bench.prefill(
                "prefill", [cell for cell in grid if cell[1] in (0, 4096, 15152, 65536) and cell[2] <= 2048], 7
            )
            bench.decode(args.decode_steps)
            bench.mixed(4)
        bench.results["complete"] = True
    except OutOfTimeError:
        bench.say("stopped at the deadline")
    bench.results["wall_s"] = round(time.perf_counter() - bench.begin, 1)
    bench.write()
    bench.say(f"done: {args.out}, complete: {bench.results['complete']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
