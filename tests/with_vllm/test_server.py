"""Real engines on a real cache server: what one stored the next one loads, to the bit, in every way there is."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lamella.server.engine_objects import ANSWER_S
from rank_driver import ServerProcess, serving
from with_vllm.answers import Answer
from with_vllm.live_engine import LiveEngine
from with_vllm.served_engines import EXTRA, HIT, found, kept, on, parts, until_served
from with_vllm.test_processes import engine as answers_of
from with_vllm.tiny_engine import prompt, sampling

P = prompt(500)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(tmp_path_factory.mktemp("served") / "s", "--memory", "256MiB") as process:
        until_served(process)
        yield process


@pytest.fixture(scope="module")
def engines(server: ServerProcess, tiny_llama: Path) -> Iterator[tuple[Answer, LiveEngine]]:
    """The answer of an engine that is gone, and the next one."""
    first = on(server, tiny_llama)
    computed = kept(first, P)
    first.close()
    second = on(server, tiny_llama)
    yield computed, second
    second.close()


@pytest.mark.parametrize(("width", "release"), [(1, "first"), (1, "whole"), (3, "first"), (4, "whole"), (0, "whole")])
def test_an_engine_loads_what_another_one_left_on_the_server(
    engines: tuple[Answer, LiveEngine], width: int, release: str
) -> None:
    computed, live = engines
    sliced = live.configure(width, release)
    live.forget_blocks()
    name = "loads_layerwise" if sliced else "loads_whole"
    before = live.worker.metrics.total(name)
    loaded = live.generate(P)
    assert (loaded.cached, loaded.same(computed)) == (HIT, True)
    live.settle()
    assert live.worker.metrics.total(name) == before + 1


def test_a_load_that_joins_its_step_and_layerwise_stores_are_exact(engines: tuple[Answer, LiveEngine]) -> None:
    _computed, live = engines
    live.configure(1, use_layerwise=True)
    tokens = prompt(300, salt=31)
    computed = kept(live, tokens)
    loaded = live.generate(tokens)
    assert (loaded.cached, loaded.same(computed)) == (256, True)


def test_a_load_goes_on_where_the_engines_own_hit_ends(engines: tuple[Answer, LiveEngine]) -> None:
    computed, live = engines
    live.configure(1)
    live.forget_blocks()
    with live.nothing_loaded():
        live.generate(P[:100], 1)  # 96 tokens, in the middle of the second chunk
    before = live.side.metrics.total("hit_tokens")
    assert live.generate(P).same(computed)
    assert live.side.metrics.total("hit_tokens") - before == HIT - 96


def test_tenants_do_not_see_each_other(engines: tuple[Answer, LiveEngine]) -> None:
    computed, live = engines
    live.configure(1)
    live.forget_blocks()
    live.llm.llm_engine.add_request("other", {"prompt_token_ids": P, "cache_salt": "tenant"}, sampling(12))
    other = live.finish("other")[0]
    assert (other.cached, other.same(computed)) == (0, True)


def test_nothing_stays_locked_or_reserved_when_requests_are_done(engines: tuple[Answer, LiveEngine]) -> None:
    _computed, live = engines
    live.generate(P)
    live.settle()
    live.wait_until(lambda: parts(live) == 0)


def test_a_server_that_stands_still_costs_one_bounded_wait_and_answers_again(
    engines: tuple[Answer, LiveEngine], server: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    computed, live = engines
    live.configure(1)
    live.forget_blocks()
    live.side.objects._answer_s = ANSWER_S
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        waited = [found(live, P) for _ in range(20)]
        took_s = time.monotonic() - began
        assert live.generate(P).same(computed)
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
        live.side.objects._answer_s = 5.0
    assert waited == [0] * 20
    assert took_s < 0.2
    assert sum("has not answered within" in record.message for record in caplog.records) == 1
    live.wait_until(lambda: found(live, P) == len(P) // 64)
    live.forget_blocks()
    assert live.generate(P).cached == HIT
    live.wait_until(lambda: parts(live) == 0)


# ---- engines that are processes


def test_without_a_server_the_engine_is_refused_with_what_to_do(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="lamella serve --folder"):
        answers_of(tiny_llama, {**EXTRA, "server": str(tmp_path / "none")})


def test_two_ranks_and_an_engine_core_of_its_own_load_what_an_engine_left(tiny_llama: Path, tmp_path: Path) -> None:
    """Tensor parallel 2, each rank a process with its own part of a lease."""
    with serving(tmp_path / "s", "--memory", "256MiB") as server:
        until_served(server)
        extra = {**EXTRA, "server": str(server.folder)}
        asked: dict[str, Any] = {"options": {"tensor_parallel_size": 2, "enforce_eager": True}, "forget": True}
        two = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
        first = answers_of(tiny_llama, extra, two, **asked, prompts=[prompt(40, 77), P, P])
        again = answers_of(tiny_llama, extra, two, **asked, prompts=[P])
    assert [answer[3] for answer in (*first[1:], *again)] == [0, HIT, HIT]
    assert first[1][:3] == first[2][:3] == again[0][:3]
