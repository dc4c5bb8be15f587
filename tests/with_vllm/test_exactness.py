"""Whatever the width, the release and the flow: loaded KV gives the tokens and log-probabilities of computed KV.

Equal to the bit. Negative controls show that the comparison sees a layer of zeros, a single changed number, and blocks
of two requests swapped.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from with_vllm.answers import Tolerance
from with_vllm.live_engine import LiveEngine
from with_vllm.replays import GRAPHS, HIT, OWN, REPLAYED, replays
from with_vllm.tiny_engine import BLOCK, PLAIN_STEPS, prompt

P = prompt(HIT + OWN)
LONGER = [prompt(HIT + 52, salt) for salt in (0, 7)]  # so that many tokens read what a control spoils
WIDTHS: tuple[int | str | tuple[int, ...], ...] = (0, 1, 3, 8, 16, (1, 1, 2, 4))
RELEASES = ("whole", "first", "first:2", "first:4", "jit", "jit:1ms", "jit:step")


@pytest.fixture(scope="module")
def free(deep_llama: Path) -> Iterator[LiveEngine]:
    live = LiveEngine(
        deep_llama,
        {
            **GRAPHS,
            "layers_per_slice": 1,
            "host_pool_gib": 0.25,
            "chunk_tokens": 64,
            "wait_timeout_s": 60.0,
            "load_timeout_s": 300,
        },
        num_gpu_blocks_override=100,
    )
    yield live
    live.close()


@pytest.mark.parametrize("width", WIDTHS, ids=str)
def test_asynchronous_loads_are_exact_for_every_release(free: LiveEngine, width: int | str | tuple[int, ...]) -> None:
    free.configure(width)
    computed = free.stored(P)
    for release in RELEASES if width else ("whole",):
        layerwise = free.configure(width, release)
        before = {name: free.worker.metrics.total(name) for name in ("loads_layerwise", "loads_whole")}
        loaded = free.generate(P)
        assert loaded.same(computed), (width, release)
        assert loaded.cached == HIT
        free.forget_blocks()
        engaged = "loads_layerwise" if layerwise else "loads_whole"
        assert free.worker.metrics.total(engaged) == before[engaged] + 1


@pytest.mark.skipif(not REPLAYED, reason="steps that read what is loaded compute several tokens: they are no replays")
def test_every_step_that_reads_what_was_loaded_replays_a_graph_of_the_whole_step(free: LiveEngine) -> None:
    for use_layerwise in (False, True):
        free.configure(1, use_layerwise=use_layerwise)
        computed = free.stored(P)
        with replays(free) as seen:
            loaded = free.generate(P)
        assert loaded.same(computed)
        assert len(seen) >= len(loaded.tokens), seen


@pytest.mark.parametrize("before_batch", [False, True], ids=["", "before_batch"])
@pytest.mark.parametrize("width", WIDTHS, ids=str)
def test_synchronous_loads_and_layerwise_stores_are_exact(
    free: LiveEngine, width: int | str | tuple[int, ...], before_batch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    free.configure(width, use_layerwise=True, before_batch=before_batch)
    computed = free.stored(P)
    under_way, begin_step = list[int](), free.worker.begin_step
    monkeypatch.setattr(
        free.worker, "begin_step", lambda orders: (under_way.append(free.worker.loads.num_open), begin_step(orders))
    )
    free.add("r1", P)
    free.step()
    assert under_way[0] == before_batch  # its load has begun by the time that the connector's step begins
    assert free.request("r1").num_computed_tokens == len(P)  # it joined the very first step
    loaded = free.finish("r1")[0]
    assert loaded.same(computed)
    assert loaded.cached == HIT


@pytest.mark.parametrize("before_batch", [False, True], ids=["", "before_batch"])
def test_blocks_that_the_runner_zeroes_for_a_step_are_loaded_behind_that(
    free: LiveEngine, before_batch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for models with recurrent state or caches of several precisions: zeroed while the batch is prepared."""
    free.configure(1, use_layerwise=True, before_batch=before_batch)
    computed = free.stored(P)
    blocks, allocated = list[int](), free.side.allocated

    def noted(request: Any, tables: Any, num_external: int) -> None:
        blocks.extend(tables[0])
        allocated(request, tables, num_external)

    def to_zero() -> list[int]:
        taken = blocks.copy()
        blocks.clear()
        return taken

    runner = free.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    zeroed, zero = list[int](), runner._zero_block_ids
    monkeypatch.setattr(free.side, "allocated", noted)
    monkeypatch.setattr(free.scheduler, "_get_new_block_ids_to_zero", to_zero)
    monkeypatch.setattr(runner, "_zero_block_ids", lambda ids: (zeroed.extend(ids), zero(ids)))
    loaded = free.generate(P)
    assert len(zeroed) >= HIT // BLOCK
    assert loaded.same(computed)
    assert loaded.cached == HIT


@pytest.mark.parametrize("width", WIDTHS, ids=str)
def test_a_load_answers_as_the_engines_own_hit_of_the_same_length_and_its_bytes_are_the_same(
    free: LiveEngine, width: int | str | tuple[int, ...]
) -> None:
    """Equal steps, so the answers differ by no more than the engine's own repetitions do: by nothing, on a CPU."""
    own = []
    with free.nothing_loaded():
        for _repetition in range(3):
            free.side.reset()
            free.forget_blocks()
            free.generate(P[:HIT], 1)
            own.append(free.generate_with_kv(P, HIT))
    spread = max(answer.deviation(own[-1][0]) for answer, _kv in own)
    free.forget_blocks()
    for release in ("first", "jit:step", "whole") if width else ("whole",):
        free.configure(width, release)
        loaded, kv = free.generate_with_kv(P, HIT)
        assert (loaded.cached, own[-1][0].cached) == (HIT, HIT)
        assert all(torch.equal(mine, right) for mine, right in zip(kv, own[-1][1], strict=True))
        assert loaded.deviation(own[-1][0]) <= spread, (width, release)
        free.forget_blocks()


def test_a_prompt_of_many_lengths_is_exact(free: LiveEngine) -> None:
    free.configure(1)
    for length in (1, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 200, 448, 700):
        tokens = prompt(length, salt=length)
        computed = free.stored(tokens)
        loaded = free.generate(tokens)
        assert loaded.same(computed), length
        assert loaded.cached == min(length // 64 * 64, (length - 1) // 32 * 32)


@pytest.mark.known_fault(53, 59)
def test_a_load_goes_on_where_the_engines_own_hit_ends(free: LiveEngine) -> None:
    free.configure(1)
    computed = free.stored(P)
    free.generate(P[:100], 1)  # 96 tokens, in the middle of the second chunk, are in the engine's cache
    before = free.side.metrics.total("hit_tokens")
    loaded = free.generate(P)
    assert loaded.same(computed)
    assert free.side.metrics.total("hit_tokens") - before == HIT - 96


@pytest.mark.known_fault(58)
def test_nothing_is_loaded_where_the_engines_own_hit_is_longer(free: LiveEngine) -> None:
    free.configure(1)
    computed = free.stored(P)
    free.generate(P)
    before = free.side.metrics.total("hit_tokens")
    assert free.generate(P).same(computed)
    assert free.side.metrics.total("hit_tokens") == before


@pytest.mark.known_fault(31, 74)
def test_tenants_do_not_see_each_other(free: LiveEngine) -> None:
    free.configure(1)
    computed = free.stored(P)
    free.llm.llm_engine.add_request("other", {"prompt_token_ids": P, "cache_salt": "tenant"}, _sampling())
    other = free.finish("other")[0]
    assert other.cached == 0
    assert other.same(computed)


@pytest.mark.parametrize("width", [1, "auto"])
def test_log_probabilities_of_a_prompt_are_those_of_all_its_tokens(free: LiveEngine, width: int | str) -> None:
    """For those every token has to be computed, whatever is kept."""
    free.configure(width)
    free.stored(P)
    loads = free.side.metrics.total("loads")
    sampling = _sampling()
    sampling.prompt_logprobs, sampling.skip_reading_prefix_cache = 0, True
    found = []
    for name in ("kept", "own hit"):
        free.llm.llm_engine.add_request(name, {"prompt_token_ids": P}, sampling.clone())
        while not (ended := [one for one in free.llm.llm_engine.step() if one.finished]):
            pass
        steps = ended[0].prompt_logprobs
        assert ended[0].num_cached_tokens == 0
        assert steps[0] is None
        found.append([step[token].logprob for token, step in zip(P[1:], steps[1:], strict=True)])
    assert len(found[0]) == len(P) - 1
    assert found[0] == pytest.approx(found[1], abs=1e-5 + Tolerance.logprob)
    assert free.side.metrics.total("loads") == loads


def _sampling() -> Any:
    from with_vllm.tiny_engine import sampling

    return sampling(12)


def answers_of_reuse(free: LiveEngine, spoil: Callable[[list[np.ndarray]], None]) -> list[bool]:
    """Whether two prompts answer to the bit as before from objects that `spoil` changed.

    An object is `[L, blocks, block bytes]`, as words of one number each.
    """
    free.configure(1)
    computed = [free.stored(LONGER[0])]
    computed.append(free.generate(LONGER[1]))
    free.forget_blocks()
    right = []
    for tokens, yardstick in zip(LONGER, computed, strict=True):
        right.append(free.generate(tokens))
        assert right[-1].same(yardstick)
        free.forget_blocks()
    slots = free.side.objects.index.occupancy().ready
    layout = free.worker.caches.layout
    words = {2: np.uint16, 4: np.uint32}[layout.groups[0].geometry.element_bytes]
    objects = [
        np.frombuffer(free.worker.memory.buffer(slot), words).reshape(layout.num_layers, -1)
        for slot in range(free.worker.memory.shape.num_slots)
        if slot in free.side.objects.index._by_slot
    ]
    assert len(objects) == slots
    kept = [one.copy() for one in objects]
    try:
        spoil(objects)
        answers = []
        for tokens in LONGER:
            answers.append(free.generate(tokens))
            assert answers[-1].cached == HIT
            free.forget_blocks()
        return [answer.deviation(own) == 0 for answer, own in zip(answers, right, strict=True)]
    finally:
        for one, was in zip(objects, kept, strict=True):
            one[:] = was


def _zero_layer_2(objects: list[np.ndarray]) -> None:
    for one in objects:
        one[2] = 0


def _change_one_number(objects: list[np.ndarray]) -> None:
    for one in objects:
        one[3, 12345] ^= 1 << (one.itemsize * 8 - 9)  # twice or half as large


def _swap_requests(objects: list[np.ndarray]) -> None:
    half = len(objects) // 2
    for mine, other in itertools.islice(zip(objects, objects[half:], strict=False), half):
        mine[1], other[1] = other[1].copy(), mine[1].copy()


def test_control_untouched_objects_answer_right(free: LiveEngine) -> None:
    assert answers_of_reuse(free, lambda objects: None) == [True, True]


@pytest.mark.parametrize("spoil", [_zero_layer_2, _change_one_number, _swap_requests])
def test_control_a_spoilt_object_is_seen(free: LiveEngine, spoil: Callable[[list[np.ndarray]], None]) -> None:
    assert answers_of_reuse(free, spoil) == [False, False]


@pytest.mark.skipif(not PLAIN_STEPS, reason="recompute is refused with asynchronous scheduling or Model Runner V2")
def test_a_failed_object_is_computed_and_nothing_wrong_is_stored(free: LiveEngine) -> None:
    """After a failure what was computed from failed blocks is not kept: the next load is right again."""
    from lamella.reference.plan import Direction

    free.configure(1)
    computed = free.stored(P)
    longer = [*P, *prompt(100, salt=21)]
    expected = free.stored(longer)
    free.side.reset()
    free.stored(P)
    free.scheduler.recompute_kv_load_failures = True
    try:
        lane = free.worker.engine.lane(Direction.RETRIEVE)
        free.worker.engine.plant_fault(Direction.RETRIEVE, lane.windows + 2)
        assert free.generate(longer).same(expected)
        free.forget_blocks()
        assert free.generate(longer).same(expected)
        free.forget_blocks()
        assert free.generate(P).same(computed)
    finally:
        free.scheduler.recompute_kv_load_failures = False
    assert free.side.metrics.total("loads_failed") >= 1
