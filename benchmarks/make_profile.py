#!/usr/bin/env python3
"""The shipped device profile out of the measurements beside it.

  make_profile.py [OUT.json]     default: sim/profiles/h200-llama-3.1-8b.json

Medians of results/h200-2026-11-29-*.json. Prefill times are GPU times of the step (claimed hits: the same step without
the load), decode times are periods of successive steps, host time is what the time to the first token has on top.
Prints how well the step rule of `lamella.reference.tables` predicts the batches and mixed steps that were measured and
did not enter the tables.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from result_file import write_text

from lamella.reference.profile import Graphs, profile_from_mapping

HERE = Path(__file__).parent
RUN = "h200-2026-11-29"
NS_PER_MS = 1_000_000
WARM_STEPS = 4  # of a decode cell
DECODE_STEPS = 28


def median_ns(milliseconds: list[float]) -> int:
    return round(statistics.median(milliseconds) * NS_PER_MS)


def results(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((HERE / "results" / f"{RUN}-{name}.json").read_text())
    return loaded


def prefill_table(run: dict[str, Any]) -> dict[str, Any]:
    cells = {(row["cached"], row["new"]): median_ns(row["gpu_ms"]) for row in run["prefill"]}
    cached = sorted({c for c, _ in cells})
    new = sorted({n for _, n in cells})
    return {"cached_tokens": cached, "new_tokens": new, "step_ns": [[cells[c, n] for c in cached] for n in new]}


def decode_table(run: dict[str, Any]) -> dict[str, Any]:
    """A cell begins at its context and decodes 28 tokens; its median over steps 5 .. 27 stands for context + 16."""
    cells = {(row["batch"], row["context"]): median_ns(row["period_ms"][WARM_STEPS:]) for row in run["decode"]}
    batches = sorted({b for b, _ in cells})
    contexts = sorted({c for _, c in cells})
    return {
        "batch": batches,
        "context_tokens": [c + (WARM_STEPS + DECODE_STEPS) // 2 for c in contexts],
        "step_ns": [[cells.get((b, c)) for c in contexts] for b in batches],
    }


def admission(run: dict[str, Any]) -> tuple[int, int]:
    """Host time of a request, in ns: that of none and of a thousand prompt tokens.

    What the time to the first token has on top of GPU time, as a line through the cells' medians by Theil and Sen: some
    cells were hit by the host's own pauses, and a median of slopes does not follow them.
    """
    points = []
    for row in run["prefill"]:
        above = [ttft - gpu for ttft, gpu in zip(row["ttft_ms"], row["gpu_ms"], strict=True)]
        points.append(((row["cached"] + row["new"]) / 1000, statistics.median(above)))
    slope = statistics.median((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(points, 2) if x1 != x2)
    base = statistics.median(y - slope * x for x, y in points)
    return round(base * NS_PER_MS), round(slope * NS_PER_MS)


def system(run: dict[str, Any]) -> str:
    p = run["provenance"]
    driver = p["nvidia_smi"].split(",")[0]
    return f"{p['gpu']}, driver {driver}, CUDA {p['cuda']}, torch {p['torch']}, vLLM {p['vllm']}, dummy weights"


def build() -> dict[str, Any]:
    full, piecewise, copies = results("step-times-full"), results("step-times-piecewise"), results("copies")
    admission_ns, per_1000_ns = admission(full)
    gb = {name: statistics.median(rates) for name, rates in full["wire"]["gb_per_s"].items()}
    slices = copies["slices_of_1_gib_ms"]
    slice_fixed_ms = (slices["batch_and_scatter"]["1"] - slices["raw_copy"]) / 32
    program = f"benchmarks/vllm_step_times.py at {full['provenance']['commit']}"
    date = full["provenance"]["date"][:10]
    return {
        "schema_version": 1,
        "name": "h200-llama-3.1-8b",
        "device": "one NVIDIA H200, PCIe 5 x16",
        "model": "llama-3.1-8b",
        "num_layers": 32,
        "token_bytes": 131072,
        "sources": [
            {
                "covers": "prefill, decode.full, engine, wire rates",
                "measured": date,
                "program": program,
                "system": system(full),
                "note": "FULL_AND_PIECEWISE graphs, prefix caching off, hits claimed and not loaded; medians of 8 "
                "(prefill, two rounds), 24 (decode) and 10 (wire) values. Real prefix-cache hits took as long on "
                "the GPU within 2% in four cells",
            },
            {
                "covers": "decode.piecewise",
                "measured": piecewise["provenance"]["date"][:10],
                "program": program,
                "system": system(piecewise),
                "note": "PIECEWISE graphs, prefix caching on; small batches are bound by the host: "
                "their medians lie up to a third above the fastest step",
            },
            {
                "covers": "copies, wire.slice_fixed_ns",
                "measured": copies["measured"],
                "program": copies["programs"],
                "system": copies["system"],
                "note": "another machine of the same kind. slice_fixed_ns: 1 GiB in 32 slices by batch copy "
                "and scatter, less the raw copy, a slice. batch_dma beside small GEMMs costs up to 14%, "
                "beside large ones 0 to 3%",
            },
        ],
        "wire": {
            "h2d_bytes_per_s": round(gb["h2d"] * 1e9),
            "d2h_bytes_per_s": round(gb["d2h"] * 1e9),
            "both_bytes_per_s": round(gb["each_of_both"] * 1e9),
            "slice_fixed_ns": round(slice_fixed_ms * NS_PER_MS),
        },
        "copies": [
            {
                "method": method,
                "run_bytes": [int(run) for run in curve],
                "bytes_per_s": [round(rate * 1e9) for rate in curve.values()],
                "entry_ns": round(1000 * copies["entry_us"].get(method, [0])[0]),
                "slowdown": [round(percent / 100, 4) for percent in copies["compute_slowdown_percent"][method]],
            }
            for method, curve in copies["gb_per_s_by_run_bytes"].items()
        ],
        "engine": {
            "admission_ns": admission_ns,
            "admission_ns_per_1000_tokens": per_1000_ns,
            "idle_poll_ns": NS_PER_MS,
            "token_budget": full["settings"]["max_num_batched_tokens"],
            "kv_capacity_tokens": full["settings"]["kv_capacity_tokens"],
        },
        "prefill": prefill_table(full),
        "decode": {"full": decode_table(full), "piecewise": decode_table(piecewise)},
    }


def report(mapping: dict[str, Any]) -> None:
    compute = profile_from_mapping(mapping).compute(Graphs.FULL)
    run = results("step-times-full")
    errors = []
    for row in run["batched"] + run["mixed"]:
        joined = "batch" in row
        prefills = [(row["cached"], row["new"])] * row.get("requests", 1)
        context = row.get("context", 0) + 50  # a mixed cell's prefills join after some ten to fifty decode steps
        predicted = compute.step_ns(prefills, row["batch"] if joined else 0, row["batch"] * context if joined else 0)
        measured = median_ns(row["gpu_ms"])
        errors.append(predicted / measured - 1)
        beside = f"{row['batch']} decodes + " if joined else ""
        times = f"predicted {predicted / 1e6:.2f} ms, measured {measured / 1e6:.2f} ms"
        print(f"{beside}{prefills}: {times} ({errors[-1]:+.1%})")
    mean, largest = statistics.mean(map(abs, errors)), max(map(abs, errors))
    print(f"mean |error| {mean:.1%}, largest {largest:.1%} over {len(errors)} cells")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shipped = HERE.parent / "sim" / "profiles" / "h200-llama-3.1-8b.json"
    parser.add_argument("out", nargs="?", type=Path, default=shipped, help="the profile's file")
    out = parser.parse_args().out
    mapping = build()
    report(mapping)
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in mapping.items()]
    write_text(out, "{\n" + ",\n".join(lines) + "\n}\n")
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
