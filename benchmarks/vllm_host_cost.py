#!/usr/bin/env python3
"""What the connector costs the host in a decode step of real vLLM with nothing to load or store; a CPU is enough.

  vllm_host_cost.py MODEL [--batches 1 16 64] [--steps 100] [--json OUT] [SETTING=VALUE ...]

Two figures, in microseconds a step, of all that vLLM calls on both sides, with the hooks of 32 layers:

  in an engine   each call timed where vLLM makes it, between computing that has emptied the processor's caches; medians
                 over the steps, added up, less what timing an empty call takes there
  in a row       the same calls with one step's real SchedulerOutput again and again: the code alone, caches warm

MODEL: a folder such as tests/with_vllm/tiny_llama.py writes; its KV and its size do not matter here.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from result_file import write_json

LAYERS = 32
SCHEDULER = ("build_connector_meta", "update_connector_output", "get_kv_connector_stats")
WORKER = (
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_save",
    "get_finished",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)


class Timed:
    """Calls of an object timed where they are made, outermost only."""

    def __init__(self) -> None:
        self.spent_ns: dict[str, list[int]] = {}
        self._undo: list[tuple[Any, str]] = []
        self._inside = False

    def watch(self, owner: Any, name: str, label: str, before: Callable[[], object] | None = None) -> None:
        original = getattr(owner, name)
        spent = self.spent_ns.setdefault(label, [])

        def call(*arguments: Any, **named: Any) -> Any:
            if self._inside:
                return original(*arguments, **named)
            if before is not None:
                before()
            self._inside = True
            began = time.perf_counter_ns()
            try:
                return original(*arguments, **named)
            finally:
                spent.append(time.perf_counter_ns() - began)
                self._inside = False

        setattr(owner, name, call)
        self._undo.append((owner, name))

    def end(self) -> None:
        for owner, name in self._undo:
            delattr(owner, name)


class Empty:
    """What is timed to know what timing takes."""

    def call(self) -> None:
        return None


def hooks_of(worker: Any) -> Callable[[], None]:
    """The hooks of 32 layers, as vLLM's attention calls them."""
    names = (list(worker.worker.tensors) * LAYERS)[:LAYERS]

    def hooks() -> None:
        for name in names:
            if worker.has_connector_metadata():
                worker.wait_for_layer_load(name)
                worker.save_kv_layer(name, None, None)

    return hooks


def in_an_engine(llm: Any, worker: Any, side: Any, steps: int) -> dict[str, float]:
    """Medians by call while the engine decodes."""
    engine, timed, empty = llm.llm_engine, Timed(), Empty()
    hooked = type("Hooked", (), {"call": staticmethod(hooks_of(worker))})()
    timed.watch(hooked, "call", f"hooks of {LAYERS} layers")
    timed.watch(empty, "call", "(an empty call)")
    for name in SCHEDULER:
        timed.watch(side, name, f"scheduler: {name}")
    for name in WORKER:
        if hasattr(worker, name):
            before = hooked.call if name == "wait_for_save" else empty.call if name == "handle_preemptions" else None
            timed.watch(worker, name, f"worker: {name}", before)
    gc.disable()
    for _step in range(steps):
        engine.step()
    gc.enable()
    timed.end()
    nothing_ns = statistics.median(timed.spent_ns.pop("(an empty call)"))
    return {
        name: round(max(0.0, statistics.median(spent) - nothing_ns) / 1e3, 2)
        for name, spent in timed.spent_ns.items()
        if len(spent) >= steps // 2
    }


def in_a_row(llm: Any, worker: Any, side: Any, repeats: int = 3000) -> float:
    """One quiet step's calls again and again."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.outputs import KVConnectorOutput

    kept: list[Any] = []
    make = side.build_connector_meta

    def keep(output: Any) -> Any:
        if not output.scheduled_new_reqs and not any(output.scheduled_cached_reqs.new_block_ids):
            kept.append(output)
        return make(output)

    side.build_connector_meta = keep
    while not kept:
        llm.llm_engine.step()
    del side.build_connector_meta
    hooks, context = hooks_of(worker), type("Context", (), {"attn_metadata": {"layer": 0}})()
    poll = worker.get_transfer_results if hasattr(KVConnectorBase_V1, "get_transfer_results") else worker.get_finished
    found = []
    for _repeat in range(repeats):
        began = time.perf_counter_ns()
        orders = side.build_connector_meta(kept[0])
        worker.handle_preemptions(orders)
        worker.bind_connector_metadata(orders)
        worker.start_load_kv(context)
        hooks()
        worker.wait_for_save()
        poll(set())
        errors = worker.get_block_ids_with_load_errors()
        worker.get_kv_connector_stats()
        meta = worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        side.update_connector_output(KVConnectorOutput(invalid_block_ids=errors, kv_connector_worker_meta=meta))
        side.get_kv_connector_stats()
        found.append(time.perf_counter_ns() - began)
    return round(statistics.median(found) / 1e3, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("settings", nargs="*", help="of the connector, as NAME=VALUE")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR", OMP_NUM_THREADS="1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    import vllm
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    extra = {"layers_per_slice": 1, "release": "first", "host_pool_gib": 0.1}
    extra |= {name: json.loads(value) if value[:1] in "0123456789tfn[{" else value
              for name, value in (one.split("=", 1) for one in args.settings)}  # fmt: skip
    extra = {name: value for name, value in extra.items() if value is not None}
    llm = vllm.LLM(
        model=args.model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=max(args.batches),
        max_num_batched_tokens=4096,
        kv_transfer_config=KVTransferConfig(
            kv_connector="LamellaConnector",
            kv_connector_module_path="lamella.connector.vllm",
            kv_role="kv_both",
            kv_connector_extra_config=extra,
        ),
    )
    engine = llm.llm_engine
    side, worker = engine.engine_core.engine_core.scheduler.connector, get_kv_transfer_group()
    result: dict[str, Any] = {"schema_version": 1, "kind": "connector-host-cost", "vllm": vllm.__version__}
    result |= {"settings": extra, "steps": args.steps, "us_a_step": {}}
    for batch in args.batches:
        new = args.steps + 20
        for number in range(batch):
            params = vllm.SamplingParams(
                temperature=0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False
            )
            tokens = [(index * 37 + number * 101 + batch * 7) % 500 + 3 for index in range(40 + number % 29)]
            engine.add_request(f"{batch}-{number}", {"prompt_token_ids": tokens}, params)
        for _step in range(6):
            engine.step()
        parts = in_an_engine(llm, worker, side, args.steps)
        row = in_a_row(llm, worker, side)
        result["us_a_step"][str(batch)] = {
            "in_an_engine": round(sum(parts.values()), 1),
            "in_a_row": row,
            "parts": parts,
        }
        print(f"batch {batch}: {sum(parts.values()):.1f} us a step in an engine, {row} in a row", flush=True)
        while engine.has_unfinished_requests():
            engine.step()
    if args.json is not None:
        write_json(args.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
