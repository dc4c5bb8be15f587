"""A recorded run as the benchmark would write it, made by the world with known overheads."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from lamella.sim.overheads import Overheads
from lamella.sim.recorded import read_recorded
from lamella.sim.recorded_arms import model_of, predict, ttft_ns
from lamella.sim.strategies import Device

ARMS: dict[str, dict[str, Any] | None] = {
    "chunk_bounded": {"layers_per_slice": 0, "release": "whole"},
    "interleaved_first": {"order": "round_robin", "release": "first"},
    "fifo_first": {"order": "fifo", "release": "first"},
    "recompute": None,
}
ENGINE = {"async_scheduling": True, "cudagraph_mode": "PIECEWISE", "max_num_batched_tokens": 8192}


def cell(name: str, concurrency: int, hit: int = 15_360, new: int = 768, **more: Any) -> dict[str, Any]:
    base = {
        "name": name,
        "concurrency": concurrency,
        "hit": hit,
        "new": new,
        "requests": 2 * concurrency + 1,
        "chunk": 256,
        "output": 16,
        "width": 1,
        "bystanders": 0,
        "rate_per_s": None,
        "mix": [],
        "stores": False,
        "miss_every": 0,
        "tier_gb_per_s": None,
    }
    return {**base, **more}


def engine_row(**more: Any) -> dict[str, Any]:
    return {"schema": 1, "group": "core", "kind": "engine", "engine": {**ENGINE, **more}, "vllm": "0.26.0"}


def repeat_row(of: dict[str, Any], arm: str, repeat: int, requests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "schema": 1,
        "group": "core",
        "kind": "repeat",
        "cell": of,
        "arm": arm,
        "settings": ARMS[arm],
        "repeat": repeat,
        "requests": list(requests),
    }


def request_row(ttft_us: int, queued_us: int = 3_000, outputs: int = 16, **more: Any) -> dict[str, Any]:
    first = queued_us + ttft_us
    return {
        "at_us": 0,
        "queued_us": queued_us,
        "token_us": [first + 6_000 * n for n in range(outputs)],
        "tokens": [],
        "cached": 0,
        **more,
    }


def recorded_lines(
    cells: Sequence[dict[str, Any]], device: Device, overheads: Overheads, noise: float = 0.0, repeats: int = 3
) -> list[str]:
    """What an engine with those overheads would have been recorded as."""
    rng = random.Random(1)
    rows = [engine_row()]
    for of in cells:
        for arm in ARMS:
            blank = repeat_row(of, arm, 0, [request_row(1)] * of["requests"])
            run = read_recorded(map(json.dumps, (rows[0], blank)), "blank")
            (first,) = run.repeats
            model = model_of(first)
            assert not isinstance(model, str)
            records = predict(first, model, run, device, overheads)
            for repeat in range(repeats):
                factor = 1 + noise * rng.uniform(-1, 1)
                counted = [
                    {
                        **request_row(round(ttft_ns(record, overheads) / 1e3 * factor)),
                        "token_us": [
                            3_000
                            + round(ttft_ns(record, overheads) / 1e3 * factor)
                            + round(record.tpot_ns / 1e3 * factor * output)
                            for output in range(record.output_tokens)
                        ],
                    }
                    for record in records
                ]
                uncounted = [request_row(1)] * (of["requests"] - len(counted))
                rows.append(repeat_row(of, arm, repeat, [*uncounted, *counted]))
    return [json.dumps(row) for row in rows]
