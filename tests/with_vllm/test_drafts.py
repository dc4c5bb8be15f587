"""Speculative decoding that needs no KV of its own, beside loads that are released early."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from with_vllm.live_engine import LiveEngine
from with_vllm.replays import GRAPHS, HIT, OWN
from with_vllm.tiny_engine import ON_GPU, PLAIN_STEPS, prompt

METHOD = "ngram" if PLAIN_STEPS and find_spec("numba") is not None else "ngram_gpu"
"""The first finds drafts on the host, by numba, and vLLM does not schedule ahead with it; the second by torch."""
P = prompt(HIT + OWN)  # most tokens of an answer are somewhere in it, and draft what follows there
NEW = 24


@pytest.fixture(scope="module")
def drafting(tiny_llama: Path) -> Iterator[LiveEngine]:
    from torch import _dynamo as dynamo

    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        if not ON_GPU:
            zeros = torch.zeros  # there is no other memory than the host's
            patch.setattr(torch, "zeros", lambda *shape, pin_memory=False, **options: zeros(*shape, **options))
            stack.enter_context(dynamo.config.patch(disable=True))  # half a minute of compiling, for a few comparisons
        live = LiveEngine(
            tiny_llama,
            {**GRAPHS, "layers_per_slice": 1, "host_pool_gib": 0.1, "chunk_tokens": 64, "load_timeout_s": 300},
            paced=True,
            num_gpu_blocks_override=40,
            speculative_config={
                "method": METHOD,
                "num_speculative_tokens": 3,
                "prompt_lookup_min": 1,
                "prompt_lookup_max": 2,
            },
        )
        yield live
        live.close()


def test_what_was_loaded_answers_right_while_drafts_are_verified(
    drafting: LiveEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = drafting.stored(P, NEW)
    ordered, drafts = drafting.side.step_orders, []

    def step_orders(output: Any) -> Any:
        drafts.extend(output.scheduled_spec_decode_tokens.values())
        return ordered(output)

    monkeypatch.setattr(drafting.side, "step_orders", step_orders)
    drafting.add("r1", P, NEW)
    drafting.release("r1")
    with drafting.landing_on_demand() as waited:
        answer = drafting.finish("r1")[0]
    assert answer.same(computed)
    assert answer.cached == HIT
    assert waited
    assert len(drafts) > 3


def test_a_load_that_fails_in_its_step_is_reported_in_that_step(drafting: LiveEngine) -> None:
    drafting.stored(P, NEW)
    drafting.fail_at(2)
    drafting.add("r1", P, NEW)
    drafting.release("r1")
    drafting.fail_next(drafting.load_of("r1"))
    answer = drafting.finish("r1")[0]
    assert (answer.reason, answer.tokens) == ("error", ())


@pytest.mark.parametrize("width", [1, "auto"])
def test_steps_that_only_verify_drafts_teach_nothing_of_prefills(
    drafting: LiveEngine, monkeypatch: pytest.MonkeyPatch, width: int | str
) -> None:
    drafting.configure(width, "jit")
    ordered, drafts = drafting.side.step_orders, 0
    prefills: list[bool] = []
    measured: list[bool] = []

    def step_orders(output: Any) -> Any:
        nonlocal drafts
        orders = ordered(output)
        drafts += sum(map(len, output.scheduled_spec_decode_tokens.values()))
        if output.total_num_scheduled_tokens:
            goes_on = any(done < len(P) for done in output.scheduled_cached_reqs.num_computed_tokens)
            prefills.append(goes_on or bool(output.scheduled_new_reqs))
            measured.append(orders.expected_ns > 0)
        return orders

    monkeypatch.setattr(drafting.side, "step_orders", step_orders)
    try:
        drafting.stored(P, NEW)
    finally:
        drafting.configure(1)
    assert drafts > 3
    assert prefills.count(False) > 4
    assert measured == prefills
