#!/usr/bin/env python3
"""What the connector costs a real vLLM on a GPU when there is nothing to load: decode steps and prefill steps.

  vllm_connector_cost.py OUT.json [--rounds 11] [--deadline-s 400] [--arms ARM ...] [--decode-only] [--tiny]
  vllm_connector_cost.py OUT.json --summarize    measures nothing: the summary anew, from the raw values in OUT.json

Six engines, each a process of its own on one GPU, of which one at a time works while the others wait for orders:

  default    vLLM's default CUDA graphs, no connector        piecewise  piecewise CUDA graphs, no connector
  layerwise  layers_per_slice 1, full_graphs never           off        layers_per_slice 0: chunk-major, default graphs
  before     as layerwise, with full_graphs before: default graphs, full ones behind what is landing
  captured   as layerwise, with full_graphs inside: default graphs, whose layers wait inside

In each round every engine, in a new random order, measures every cell: `decode` (milliseconds a step, over 48 steps)
by batch, and `prefill` (milliseconds to the first token of a new prompt) by length. In `prefill` nothing is stored
either; `prefill_stored` is the same with every chunk going to host memory. Compared are the engines of one round:
`layerwise` with `piecewise` is the connector's cost, `piecewise` with `default` the loss that piecewise graphs bring by
themselves, `off` with `default` what is left where the layerwise path is off, `before` and `captured` with `default`
what waits before and inside full graphs cost. Every raw value is kept; the summary has medians and quartiles of the
rounds' ratios. Model: the shape of Llama-3.1-8B with dummy weights.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import device_facts
from result_file import write_json
from step_time_cells import MODEL

CONTEXT, STEPS, WARM = 1024, 48, 8
LAYERWISE: dict[str, Any] = {"layers_per_slice": 1, "release": "first", "full_graphs": "never", "host_pool_gib": 4}
ARMS: dict[str, tuple[str | None, dict[str, Any] | None]] = {  # (graphs, the connector's settings)
    "default": (None, None),
    "piecewise": ("PIECEWISE", None),
    "layerwise": (None, LAYERWISE),
    "off": (None, {**LAYERWISE, "layers_per_slice": 0}),
    "before": (None, {**LAYERWISE, "full_graphs": "before"}),
    "captured": (None, {**LAYERWISE, "full_graphs": "inside"}),
}
CELLS = [("decode", 1), ("decode", 16), ("prefill", 512), ("prefill", 4096), ("prefill_stored", 4096)]
COMPARED = [
    ("layerwise", "piecewise"),
    ("piecewise", "default"),
    ("layerwise", "default"),
    ("off", "default"),
    ("before", "default"),
    ("captured", "default"),
    ("captured", "layerwise"),
]
TINY = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 64}


class Engine:
    """One arm, in this process."""

    def __init__(self, arm: str, model: str, tiny: bool) -> None:
        os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_USE_FLASHINFER_SAMPLER="0", HF_HUB_OFFLINE="1")
        os.environ.update(VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="WARNING", VLLM_CPU_KVCACHE_SPACE="1")
        import torch
        import vllm
        from vllm.config import KVTransferConfig

        self.gpu = torch.cuda.is_available()
        self.sampling, self.torch = vllm.SamplingParams, torch
        graphs, extra = ARMS[arm]
        options: dict[str, Any] = {"compilation_config": {"cudagraph_mode": graphs}} if graphs else {}
        if extra is not None:
            if extra.get("full_graphs") == "inside":
                os.environ["LAMELLA_TRY_GRAPH_WAITS"] = "1"
            options["kv_transfer_config"] = KVTransferConfig(
                kv_connector="LamellaConnector",
                kv_connector_module_path="lamella.connector.vllm",
                kv_role="kv_both",
                kv_connector_extra_config={**extra, **({"host_pool_gib": 0.1} if tiny else {})},
            )
        if self.gpu:
            options |= {"gpu_memory_utilization": 0.15, "kv_cache_memory_bytes": 6 << 30}
        started = time.perf_counter()
        self.llm = vllm.LLM(
            model=model,
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=not self.gpu,
            max_model_len=8192,
            max_num_batched_tokens=8192,
            max_num_seqs=32,
            disable_log_stats=True,
            **options,
        )
        self.rng = random.Random(arm)
        self.added = 0
        self.side = self.llm.llm_engine.engine_core.engine_core.scheduler.connector
        config = self.llm.llm_engine.vllm_config
        self.settings = {
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
            "async_scheduling": config.scheduler_config.async_scheduling,
            "model_runner_v2": bool(getattr(config, "use_v2_model_runner", False)),
            "init_s": round(time.perf_counter() - started, 1),
        }

    def add(self, tokens: list[int], new: int) -> None:
        params = self.sampling(max_tokens=new, min_tokens=new, temperature=0, ignore_eos=True, detokenize=False)
        self.llm.llm_engine.add_request(f"r{self.added}", {"prompt_token_ids": tokens}, params)
        self.added += 1

    def run(self) -> list[float]:
        """Steps until nothing is left; the moment of each step that gave every request a token."""
        seen: list[float] = []
        while self.llm.llm_engine.has_unfinished_requests():
            if self.llm.llm_engine.step():
                seen.append(time.perf_counter())
        return seen

    def prompt(self, tokens: int, rng: random.Random) -> list[int]:
        return [rng.randrange(1000, 100000) for _ in range(tokens)]

    def decode(self, batch: int) -> float:
        """Milliseconds a step. The prompts are the engine's own prefix-cache hits from the second time on."""
        rng = random.Random(batch)
        for _ in range(batch):
            self.add(self.prompt(CONTEXT, rng), WARM + STEPS + 2)
        seen = self.run()
        return (seen[-2] - seen[-2 - STEPS]) / STEPS * 1e3

    def prefill(self, tokens: int, stored: bool) -> float:
        """Milliseconds from a new prompt's arrival to its first token."""
        side = self.side.scheduler if self.side is not None else None
        if side is not None:
            side.stores.enabled = stored
        tokens_ids = self.prompt(tokens, self.rng)
        if self.gpu:
            self.torch.cuda.synchronize()
        started = time.perf_counter()
        self.add(tokens_ids, 1)
        return (self.run()[0] - started) * 1e3

    def settle(self) -> None:
        """Stores have left."""
        self.add([1, 2, 3], 2)
        self.run()
        if self.gpu:
            self.torch.cuda.synchronize()
        time.sleep(0.04)


def serve(arm: str, model: str, tiny: bool) -> None:
    """Answers orders from stdin, a line each, with a line of JSON."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever vLLM prints goes to the log
    engine = Engine(arm, model, tiny)
    print(json.dumps(engine.settings), file=answers)
    for line in sys.stdin:
        kind, size, repeats = line.split()
        values = []
        for _ in range(int(repeats)):
            if kind == "decode":
                values.append(engine.decode(int(size)))
            else:
                values.append(engine.prefill(int(size), kind == "prefill_stored"))
                engine.settle()
        print(json.dumps(values), file=answers)


class Arm:
    """A worker process, as its parent sees it."""

    def __init__(self, name: str, model: str, out: pathlib.Path, tiny: bool) -> None:
        self.name = name
        command = [
            sys.executable,
            __file__,
            str(out),
            "--worker",
            name,
            "--model",
            model,
            *(["--tiny"] if tiny else []),
        ]
        self.log = out.with_suffix(f".{name}.log")
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log.open("w"), text=True, bufsize=1
        )

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"arm {self.name} ended: {self.log.read_text()[-1500:]}")
        return json.loads(line)

    def ask(self, kind: str, size: int, repeats: int) -> list[float]:
        assert self.process.stdin is not None
        print(kind, size, repeats, file=self.process.stdin)
        return self.answer()


def summary(raw: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Medians by arm, and for each comparison the median and quartiles of the rounds' ratios, in percent."""
    found: dict[str, Any] = {}
    for cell in next(iter(raw.values()), {}):
        medians = {arm: round(statistics.median(cells[cell]), 3) for arm, cells in raw.items() if cells.get(cell)}
        found[cell] = {"median_ms": medians}
        for arm, base in COMPARED:
            rounds = list(zip(raw.get(arm, {}).get(cell, ()), raw.get(base, {}).get(cell, ()), strict=False))
            ratios = [100 * (mine / other - 1) for mine, other in rounds]
            if len(ratios) > 1:
                low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
                found[cell][f"{arm} over {base}, %"] = [round(value, 2) for value in (low, middle, high)]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--deadline-s", type=float, default=400, help="no new round begins after so many seconds")
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    parser.add_argument("--decode-only", action="store_true", help="leave the prefill cells out")
    parser.add_argument("--tiny", action="store_true", help="a small model: to try the program out")
    parser.add_argument("--summarize", action="store_true", help="measure nothing: the summary anew, from raw values")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        serve(args.worker, args.model, args.tiny)
        return 0
    if args.summarize:
        result = json.loads(args.out.read_text())
        result["summary"] = summary(result["raw_ms"])
        write_json(args.out, result)
        return 0
    began = time.perf_counter()
    folder = tempfile.mkdtemp(prefix="llama8b-")
    (pathlib.Path(folder) / "config.json").write_text(json.dumps({**MODEL, **(TINY if args.tiny else {})}))
    arms = {name: Arm(name, folder, args.out, args.tiny) for name in args.arms}
    result: dict[str, Any] = {"settings": {}, "raw_ms": {name: {} for name in arms}, "rounds": 0}
    order = list(arms)
    rng = random.Random(1)
    try:
        for name, arm in list(arms.items()):
            try:
                result["settings"][name] = arm.answer()
                print(f"[{time.perf_counter() - began:5.1f} s] {name}: {result['settings'][name]}", flush=True)
            except RuntimeError as error:
                print(error, flush=True)
                result["settings"][name] = {"error": str(error)[-1500:]}
                order.remove(name)
        for number in range(args.rounds + 1):  # the first warms up
            if time.perf_counter() - began > args.deadline_s:
                print(f"out of time after {number - 1} rounds", flush=True)
                break
            rng.shuffle(order)
            for name in order:
                for kind, size in CELLS[:2] if args.decode_only else CELLS:
                    values = arms[name].ask(kind, size, 2 if kind == "prefill" else 1)
                    if number:
                        cell = result["raw_ms"][name].setdefault(f"{kind} {size}", [])
                        cell.append(statistics.median(values))
            result["rounds"] = number
            result["summary"] = summary(result["raw_ms"])
            write_json(args.out, result)
    finally:
        for arm in arms.values():
            arm.process.kill()
    for cell, found in result.get("summary", {}).items():
        print(cell, json.dumps(found), flush=True)
    try:
        import torch
        import vllm

        result["provenance"] = device_facts.provenance(torch, vllm)
    except (ImportError, RuntimeError, AssertionError) as error:
        result["provenance"] = {"error": str(error)}
    write_json(args.out, result)
    return 0 if len(order) == len(args.arms) and result["rounds"] >= min(9, args.rounds) else 1


if __name__ == "__main__":
    sys.exit(main())
