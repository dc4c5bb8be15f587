"""Real engines whose objects a real cache server keeps. One lives at a time: vLLM has one connector a process."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

from lamella.reference.keys import chunk_keys
from rank_driver import ServerProcess
from with_vllm.answers import Answer
from with_vllm.live_engine import LiveEngine

HIT: Final = 448
"""Tokens that can be loaded of a prompt of 500."""
EXTRA: Final[dict[str, Any]] = {
    "layers_per_slice": 1,
    "chunk_tokens": 64,
    "wait_timeout_s": 60.0,
    "load_timeout_s": 300,
}


def until_served(server: ServerProcess) -> None:
    end = time.monotonic() + 20
    while not (server.folder / "server.sock").exists():
        assert time.monotonic() < end, "the server did not start"
        time.sleep(0.05)


def on(server: ServerProcess, model: Path, *, paced: bool = False, **more: Any) -> LiveEngine:
    """An engine whose objects that server keeps."""
    return on_folder(server.folder, model, paced=paced, **more)


def on_folder(folder: Path, model: Path, *, paced: bool = False, **more: Any) -> LiveEngine:
    """An engine whose objects the server of that folder keeps."""
    # eager on a GPU too: with captured graphs one start took a minute there
    options = {"num_gpu_blocks_override": 40 if paced else 100, "enforce_eager": True, **more.pop("options", {})}
    live = LiveEngine(model, {**EXTRA, "server": str(folder), **more}, paced=paced, **options)
    live.side.objects._answer_s = 5.0  # the machine that runs the tests may be busy
    live.wait_until(lambda: live.worker.mover._mover.ready_slots > 0)
    time.sleep(1.0)  # the server hears of them with the next ping
    return live


def kept(live: LiveEngine, tokens: list[int], num_new: int = 12) -> Answer:
    """The prompt's answer when everything is computed; the server has its KV afterwards, the engine has it not."""
    live.forget_blocks()
    with live.nothing_loaded():
        computed = live.generate(tokens, num_new)
    assert computed.cached == 0
    live.forget_blocks()
    live.wait_until(lambda: found(live, tokens) == len(tokens) // 64)
    return computed


def only_computed(live: LiveEngine, tokens: list[int]) -> Answer:
    """The prompt's answer; nobody keeps its KV."""
    live.forget_blocks()
    live.side.stores.enabled = False
    try:
        with live.nothing_loaded():
            answer = live.generate(tokens)
    finally:
        live.side.stores.enabled = True
    assert answer.cached == 0
    return answer


def found(live: LiveEngine, tokens: list[int]) -> int:
    """Chunks of the prompt that the server has."""
    objects = live.side.objects
    keys = chunk_keys(live.side._facts.space, tokens)
    chunks = objects.find("probe", keys, 0)
    objects.forget("probe")
    return chunks


def parts(live: LiveEngine) -> float:
    """Leases on the server, of every kind."""
    figures = live.side.objects._session.stats().figures
    return sum(value for name, value in figures.items() if name.startswith("lamella_server_parts"))
