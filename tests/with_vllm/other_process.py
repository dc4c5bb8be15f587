"""One engine in a process of its own that leaves objects in a folder, or loads them in every way there is.

    python other_process.py store|load MODEL FOLDER

Prints one line of JSON. store: answers over the engine's own prefix-cache hit, and a digest of the hit's bytes, three
times. load: for each width and release the answer, the digest, the tokens that were hit and whether slices moved.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from with_vllm.answers import Answer
from with_vllm.live_engine import LiveEngine
from with_vllm.tiny_engine import prompt

P = prompt(500)
HIT = 448
WIDTHS: tuple[int | tuple[int, ...], ...] = (0, 1, 3, 8, 16, (1, 1, 2, 4))
RELEASES = ("whole", "first", "first:2", "jit", "jit:step")
BASE: dict[str, Any] = {"layers_per_slice": 1, "host_pool_gib": 0.1, "chunk_tokens": 64, "wait_timeout_s": 60.0}


def digest(kv: list[torch.Tensor]) -> str:
    """Of the bytes of every layer."""
    found = hashlib.blake2b(digest_size=16)
    for tensor in kv:
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()


def row(live: LiveEngine, **facts: Any) -> dict[str, Any]:
    """The prompt answered once, as JSON takes it; the answer's numbers lose no bit."""
    answer, kv = live.generate_with_kv(P, HIT)
    return {**facts, "answer": answer._asdict(), "digest": digest(kv)}


def answer_in(found: dict[str, Any]) -> Answer:
    """The answer of a row."""
    return Answer(**{name: tuple(one) if isinstance(one, list) else one for name, one in found["answer"].items()})


def store(live: LiveEngine) -> list[dict[str, Any]]:
    """Fills the folder."""
    rows = []
    with live.nothing_loaded():
        for _repetition in range(3):
            live.forget_blocks()
            live.generate(P[:HIT], 1)
            rows.append(row(live))
    live.forget_blocks()
    return rows


def load(live: LiveEngine) -> list[dict[str, Any]]:
    """Every way to load; the host pool is empty before each, so objects come from the folder."""
    rows = []
    ways = [(width, release, False) for width in WIDTHS for release in (RELEASES if width else ("whole",))]
    ways += [(width, "first", True) for width in WIDTHS]
    for width, release, joins in ways:
        live.forget_blocks()
        live.side.objects.reset()  # its own pool; the keys stay
        sliced = live.configure(width, release, use_layerwise=joins)
        before = live.worker.metrics.total("loads_layerwise"), live.worker.metrics.total("loads_whole")
        found = row(live, width=width, release=release, use_layerwise=joins)
        live.settle()
        after = live.worker.metrics.total("loads_layerwise"), live.worker.metrics.total("loads_whole")
        found["loads"] = [late - early for late, early in zip(after, before, strict=True)]
        found["expected_loads"] = [1, 0] if sliced else [0, 1]
        rows.append(found)
    return rows


def main() -> None:
    mode, model, folder = sys.argv[1:]
    live = LiveEngine(Path(model), {**BASE, "file_tier": folder}, num_gpu_blocks_override=100)
    print("ROWS " + json.dumps({"store": store, "load": load}[mode](live)), flush=True)
    live.close()


if __name__ == "__main__":
    main()
