#!/usr/bin/env python3
"""A burst of hits in real vLLM, recorded, and the same burst in the model: two traces to lay side by side.

  vllm_recording.py OUT_FOLDER [--concurrency 4] [--hit 15152] [--new 768] [--order fifo] [--tiny]

Each document is stored once; the engine forgets it; then all requests come at once, each with its document and new
tokens. OUT_FOLDER gets `measured.trace.json` and `simulated.trace.json` (ui.perfetto.dev, `lamella explain`), and
`recording.json` with the parts of every time to first token, measured beside simulated. Model: the shape of
Llama-3.1-8B with dummy weights. `--tiny` runs a small model on the CPU build, to try the program out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import device_facts
from result_file import write_json
from step_time_cells import MODEL

from lamella.connector.recorded_run import read_run
from lamella.cuda_ext.commit import commit_of
from lamella.reference.chrome_trace import to_chrome_trace
from lamella.reference.recording import Recording
from lamella.sim.explain import explain, explanation_lines
from lamella.sim.profiles import load_profile
from lamella.sim.record_run import record_world
from lamella.sim.strategies import FULL_GRAPHS, Device, Regime, parse_strategy
from lamella.sim.world import World

BLOCK = 16
FULL_GRAPHS_OF_BOTH = "never"  # what a step waits for before a replay is not seen in a recording


def make_engine(folder: Path, options: argparse.Namespace) -> Any:
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_USE_FLASHINFER_SAMPLER="0", HF_HUB_OFFLINE="1")
    os.environ.update(VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="WARNING", VLLM_CPU_KVCACHE_SPACE="1")
    os.environ["LAMELLA_RECORD"] = str(folder / "logs")
    import vllm
    from vllm.config import KVTransferConfig

    model = Path(tempfile.mkdtemp(prefix="recording-model-"))
    arguments: dict[str, Any] = {
        "max_model_len": options.hit + options.new + 1024,
        "gpu_memory_utilization": 0.86,
        "max_num_batched_tokens": 8192,
        "load_format": "dummy",
    }
    if options.tiny:
        sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
        from with_vllm.tiny_llama import write_tiny_llama

        write_tiny_llama(model)
        arguments = {"max_model_len": 2048, "enforce_eager": True, "dtype": "float32", "block_size": 32}
        arguments["max_num_batched_tokens"] = 256
    else:
        (model / "config.json").write_text(json.dumps(MODEL))
    pool_gib = 0.2 if options.tiny else options.concurrency * options.hit * 131_072 / 2**30 + 1
    return vllm.LLM(
        model=str(model),
        skip_tokenizer_init=True,
        kv_transfer_config=KVTransferConfig(
            kv_connector="RecordingConnector",
            kv_connector_module_path="lamella.connector.vllm_recording",
            kv_role="kv_both",
            kv_connector_extra_config={
                "layers_per_slice": 1,
                "release": "first",
                "full_graphs": FULL_GRAPHS_OF_BOTH,
                "order": options.order,
                "host_pool_gib": pool_gib,
                "chunk_tokens": 64 if options.tiny else 256,
            },
        ),
        **arguments,
    )


def serve(llm: Any, prompts: dict[str, list[int]], num_outputs: int) -> None:
    """All at once, to the end."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=num_outputs, min_tokens=num_outputs, ignore_eos=True, detokenize=False
    )
    for name, tokens in prompts.items():
        llm.llm_engine.add_request(name, {"prompt_token_ids": tokens}, sampling)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()


def settle(llm: Any, rng: random.Random) -> None:
    """Stores have ended: an engine with nothing to do does not look at them."""
    begun = time.monotonic()
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    while scheduler.connector.has_pending_push_work() and time.monotonic() - begun < 30:
        serve(llm, {f"settle-{rng.random()}": [rng.randrange(3, 500) for _ in range(4)]}, 1)
        time.sleep(0.002)


def simulate(options: argparse.Namespace, cached: int) -> Recording:
    """The same burst in the model, on the shipped profile, with the hits that the engine found."""
    device = Device(load_profile(), graphs=FULL_GRAPHS[FULL_GRAPHS_OF_BOTH])
    strategy = parse_strategy(f"{options.order}/1/first")
    world = World(
        device.compute(strategy),
        strategy.order,
        strategy.release,
        device.settings(),
        keep_steps=True,
        keep_slices=True,
    )
    regime = Regime(cached, options.hit + options.new - cached, options.concurrency, options.outputs)
    for tag in range(options.concurrency):
        world.arrive(device.request(regime, strategy, tag))
    world.run()
    return record_world(world, device.profile.name, str(strategy), device.profile.num_layers)


def where(options: argparse.Namespace) -> dict[str, Any]:
    import torch
    import vllm

    if options.tiny:
        return {"device": "cpu", "vllm": vllm.__version__, "commit": commit_of()}
    return device_facts.provenance(torch, vllm)


def parts_of(recording: Recording) -> list[dict[str, Any]]:
    """Of the requests that loaded something."""
    return [
        {"request": one.request, "ttft_ns": one.ttft_ns, "parts_ns": dict(explain(recording, one.request).parts())}
        for one in recording.requests
        if one.landings
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--hit", type=int, default=15_152)
    parser.add_argument("--new", type=int, default=768)
    parser.add_argument("--outputs", type=int, default=16)
    parser.add_argument("--order", default="fifo")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.tiny:
        options.hit, options.new = 512, 48
    options.out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(1)
    vocabulary = 500 if options.tiny else 100_000
    llm = make_engine(options.out, options)
    # A whole number of the connector's chunks is found again; the shorter end of the document is computed.
    documents = [[rng.randrange(3, vocabulary) for _ in range(options.hit)] for _ in range(options.concurrency)]
    for number, document in enumerate(documents):
        serve(llm, {f"store-{number}": document}, 1)
        settle(llm, rng)
    for attempt in range(2):  # the first burst warms graphs and pages; the second counts
        assert llm.reset_prefix_cache()
        questions = [[rng.randrange(3, vocabulary) for _ in range(options.new)] for _ in documents]
        burst = {f"ask-{attempt}-{n}": [*documents[n], *questions[n]] for n in range(options.concurrency)}
        serve(llm, burst, options.outputs)
        settle(llm, rng)
    llm.llm_engine.engine_core.shutdown()
    measured = read_run(options.out / "logs")
    loaded = [one for one in measured.requests if one.landings][-options.concurrency :]
    simulated = simulate(options, loaded[0].cached_tokens if loaded else options.hit)
    for name, recording in (("measured", measured), ("simulated", simulated)):
        write_json(options.out / f"{name}.trace.json", to_chrome_trace(recording), indent=None)
    counted = parts_of(measured)[-options.concurrency :]
    result = {
        "schema_version": 1,
        "provenance": where(options),
        "concurrency": options.concurrency,
        "hit": options.hit,
        "new": options.new,
        "order": options.order,
        "measured": counted,
        "simulated": parts_of(simulated),
    }
    write_json(options.out / "recording.json", result)
    for one in counted:
        print("\n".join(explanation_lines(measured, explain(measured, one["request"]))[:-2]))
    for name in ("measured", "simulated"):
        times = [one["ttft_ns"] / 1e6 for one in result[name]]
        print(f"{name}: mean TTFT {sum(times) / max(1, len(times)):.1f} ms of {len(times)} hits")
    return 0 if len(counted) == options.concurrency else 1


if __name__ == "__main__":
    sys.exit(main())
