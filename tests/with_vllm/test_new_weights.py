"""New weights in a running engine: once its caches are reset, no KV of the old ones is found, wherever it is kept."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rank_driver import serving
from with_vllm.answers import Answer
from with_vllm.live_engine import LiveEngine
from with_vllm.served_engines import EXTRA, HIT, until_served
from with_vllm.tiny_engine import prompt

P, Q = prompt(500), prompt(500, salt=5)


@contextmanager
def place(kind: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Settings of an engine whose objects lie there."""
    with ExitStack() as stack:
        settings: dict[str, Any] = {"pool": {}, "file_tier": {"file_tier": str(folder)}}.get(kind, {})
        if kind == "server":
            server = stack.enter_context(serving(folder, "--memory", "64MiB"))
            until_served(server)
            settings = {"server": str(folder)}
        yield {**EXTRA, **settings, **({} if kind == "server" else {"host_pool_gib": 0.1})}


def change_weights(live: LiveEngine) -> None:
    """As an update between two steps of training: other keys and values for the same tokens."""

    def change(model: torch.nn.Module) -> None:
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, weights in model.named_parameters():
                if "layernorm" in name:
                    weights.mul_((1 + torch.rand(weights.shape, generator=generator)).to(weights))

    live.llm.apply_model(change)


def behind(answer: Answer, count: int) -> Answer:
    """The answer without so many first tokens."""
    rest = {name: getattr(answer, name)[count:] for name in ("tokens", "logprobs", "leads")}
    return answer._replace(**rest)


def ask_until_found(live: LiveEngine, tokens: list[int]) -> Answer:
    """The answer from KV that is kept; a store is on its way for some time."""
    end = time.monotonic() + 30
    while True:
        live.forget_blocks()
        answer = live.generate(tokens)
        if answer.cached:
            return answer
        assert time.monotonic() < end, "what was stored was not found"


@pytest.mark.parametrize("kind", ["pool", "file_tier", "server"])
def test_after_new_weights_and_a_reset_no_old_kv_is_found_and_the_new_is_for_nobody_else(
    tiny_llama: Path, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "kept").mkdir(mode=0o700)
    with place(kind, tmp_path / "kept") as settings:
        live = LiveEngine(tiny_llama, settings, num_gpu_blocks_override=100)
        try:
            old = live.generate(P)
            assert ask_until_found(live, P).same(old)
            live.add("under way", Q, 40)
            live.step_until(lambda: live.request("under way").num_output_tokens > 3)
            given = list(live.request("under way").output_token_ids)
            change_weights(live)
            assert live.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
            under_way = live.finish("under way")[0]
            found = [live.generate(P)]
            live.forget_blocks()
            with live.nothing_loaded():
                new = [live.generate(P), live.generate(Q)]
                assert live.generate(Q + given, 40 - len(given)).same(behind(under_way, len(given)))
            live.forget_blocks()
            assert not new[0].same(old)
            found += [ask_until_found(live, P), live.generate(Q)]
            assert [answer.same(right) for answer, right in zip(found, [new[0], *new], strict=True)] == [True] * 3
            assert (found[0].cached, found[1].cached) == (0, HIT)
        finally:
            live.close()
        if kind == "pool":
            return
        other = LiveEngine(tiny_llama, settings, num_gpu_blocks_override=100)  # the weights of the folder again
        try:
            assert ask_until_found(other, P).same(old)
            longer = [*Q, *under_way.tokens]
            loaded = other.generate(longer)
            other.forget_blocks()
            with other.nothing_loaded():
                assert other.generate(longer).same(loaded)
        finally:
            other.close()
