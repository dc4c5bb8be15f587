"""Across processes: stored by one engine and loaded by another, an engine core of its own, a compiled model.

Each engine is a process; they run one after another, since vLLM's threads leave little of a small machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import child_process
from with_vllm.tiny_engine import prompt

PROMPTS = [prompt(500), prompt(300, salt=4)]
HITS = [448, 256]
BASE: dict[str, Any] = {"host_pool_gib": 0.05, "chunk_tokens": 64, "wait_timeout_s": 60, "load_timeout_s": 120}


def engine(model: Path, extra: dict[str, Any] | None, environment: dict[str, str] | None = None, **asked: Any) -> list:
    """[tokens, logprobs in hex, reason, cached tokens] of each prompt, from an engine in a process of its own."""
    command = {"model": str(model), "extra": extra, "prompts": PROMPTS, **asked}
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("engine_process.py")), json.dumps(command)],
        capture_output=True,
        text=True,
        timeout=280,
        env=child_process.environment(**(environment or {})),
    )
    lines = [line for line in ran.stdout.splitlines() if line.startswith("ANSWERS ")]
    assert lines, ran.stderr[-3000:]
    return json.loads(lines[0].removeprefix("ANSWERS "))


@pytest.fixture(scope="module")
def computed(tiny_llama: Path) -> list:
    """What an engine without a connector answers."""
    return engine(tiny_llama, None)


@pytest.fixture(scope="module")
def stored(tiny_llama: Path, computed: list, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of objects that an engine has left."""
    folder = tmp_path_factory.mktemp("objects")
    folder.chmod(0o700)
    answers = engine(tiny_llama, {**BASE, "layers_per_slice": 1, "file_tier": str(folder)})
    assert [answer[:3] for answer in answers] == [answer[:3] for answer in computed]
    assert [answer[3] for answer in answers] == [0, 0]
    return folder


@pytest.mark.parametrize(
    "settings",
    [
        {"layers_per_slice": "1,1,2", "release": "jit:step"},
        {"layers_per_slice": 2, "use_layerwise": True},
    ],
    ids=lambda settings: ",".join(map(str, settings.values())),
)
def test_what_one_process_stored_another_loads_exactly(
    tiny_llama: Path, computed: list, stored: Path, settings: dict[str, Any]
) -> None:
    answers = engine(tiny_llama, {**BASE, **settings, "file_tier": str(stored)})
    assert [answer[:3] for answer in answers] == [answer[:3] for answer in computed]
    assert [answer[3] for answer in answers] == HITS


def test_an_engine_core_in_its_own_process_is_exact(tiny_llama: Path, computed: list, stored: Path) -> None:
    extra = {**BASE, "layers_per_slice": 1, "file_tier": str(stored)}
    answers = engine(tiny_llama, extra, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    assert [answer[:3] for answer in answers] == [answer[:3] for answer in computed]
    assert [answer[3] for answer in answers] == HITS


def test_a_compiled_model_calls_the_hooks_and_is_exact(tiny_llama: Path) -> None:
    """Compiled code rounds otherwise than eager code, so it is compared with itself: computed, then loaded."""
    asked = {"options": {"enforce_eager": False}, "forget": True, "prompts": [PROMPTS[0], PROMPTS[0]]}
    computed, loaded = engine(tiny_llama, {**BASE, "layers_per_slice": 1}, **asked)
    assert loaded[:3] == computed[:3]
    assert (computed[3], loaded[3]) == (0, 448)
