"""Lines of a recording of benchmarks/concurrency, as small as they may be."""

from __future__ import annotations

from typing import Any

CELL = {
    "name": "c", "concurrency": 1, "hit": 100, "new": 10, "chunk": 256, "output": 3, "rate_per_s": None, "mix": [],
    "miss_every": 0, "bystanders": 0, "tier_gb_per_s": None,
}  # fmt: skip


def request(ttft_ms: float, queued_ms: float = 1.0, **more: Any) -> dict[str, Any]:
    first = round((queued_ms + ttft_ms) * 1e3)
    return {
        "at_us": 0, "queued_us": round(queued_ms * 1e3), "token_us": [first, first + 5_000, first + 10_000],
        "tokens": [1, 2, 3], "cached": 100, "local_hit": 0, "started_us": 2_000, "landed_us": [3_000, 42_000], **more,
    }  # fmt: skip


def row(arm: str, repeat: int, ttft_ms: float, **more: Any) -> dict[str, Any]:
    return {
        "schema": 1, "kind": "repeat", "cell": CELL, "arm": arm, "repeat": repeat, "wall_us": 100_000,
        "requests": [request(999.0), request(ttft_ms), request(ttft_ms)],
        "steps": [[0, 11_000, 10, 0, 5, 10_000], [20_000, 9_000, 1, 1, 5, 8_000]],
        "host_stall_us": {"0": 500}, "peak_in_flight_bytes": 7, "bystander_us": [], "counters": {}, **more,
    }  # fmt: skip


def lines(**arms: list[float]) -> list[dict[str, Any]]:
    return [row(arm, repeat, ttft) for arm, times in arms.items() for repeat, ttft in enumerate(times)]


def engine(**more: Any) -> dict[str, Any]:
    return {"schema": 1, "kind": "engine", "commit": "abcdef0123", "wire": {"gb_per_s": {"h2d": [54.0]}}, **more}


def answers(arm: str, *tokens: list[int], cell: str = "c") -> dict[str, Any]:
    found = [{"tokens": one, "top": [[[token, -1.0], [token + 1, -2.0]] for token in one]} for one in tokens]
    return {"schema": 1, "kind": "verify", "cell": {"name": cell}, "arm": arm, "answers": found}
