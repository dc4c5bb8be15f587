"""The captured graphs an arm may replay."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from concurrency.graph_choice import GraphChoice, usual_sizes


def manager(full: bool, sizes: list[int]) -> Any:
    """Candidates as vLLM's second runner has them: for every number of tokens, the graphs of the next captured size."""
    candidates: dict[tuple[int, int], list[Any]] = {}
    begin = 0
    for size in sizes:
        modes = ["FULL", "PIECEWISE"] if full and size <= 128 else ["PIECEWISE"]
        for tokens in range(begin, size + 1):
            candidates[tokens, 0] = [SimpleNamespace(cg_mode=SimpleNamespace(name=mode), num_tokens=size)
                                     for mode in modes]  # fmt: skip
        begin = size + 1
    return SimpleNamespace(_candidates=candidates)


def choice(full: bool, prefills: tuple[int, ...]) -> tuple[GraphChoice, Any]:
    made = manager(full, [*usual_sizes(64), *prefills])
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=64))
    return GraphChoice(SimpleNamespace(vllm_config=config, cudagraph_manager=made)), made


def replayed(made: Any, tokens: int) -> list[str]:
    return [f"{one.cg_mode.name} {one.num_tokens}" for one in made._candidates.get((tokens, 0), [])]


def test_an_arm_replays_only_the_graphs_it_says() -> None:
    graphs, made = choice(full=True, prefills=(768, 776))
    graphs.choose("piecewise")
    assert (replayed(made, 3), replayed(made, 770)) == (["PIECEWISE 4"], [])
    graphs.choose("prefill")
    assert (replayed(made, 3), replayed(made, 770)) == (["PIECEWISE 4"], ["PIECEWISE 776"])
    assert replayed(made, 200) == [], "a step is not padded from 200 to 768 tokens"
    graphs.choose("full")
    assert (replayed(made, 3), replayed(made, 770)) == (["FULL 4", "PIECEWISE 4"], [])
    graphs.choose("both")
    assert (replayed(made, 3), replayed(made, 770)) == (["FULL 4", "PIECEWISE 4"], ["PIECEWISE 776"])
    graphs.choose("piecewise")
    assert (replayed(made, 3), replayed(made, 770)) == (["PIECEWISE 4"], [])


@pytest.mark.parametrize(("full", "prefills", "kind"), [(True, (), "prefill"), (False, (768,), "full")])
def test_both_kinds_of_graphs_are_refused_where_one_was_not_captured(
    full: bool, prefills: tuple[int, ...], kind: str
) -> None:
    graphs, _made = choice(full, prefills)
    with pytest.raises(ValueError, match=f"captured no {kind} graphs"):
        graphs.choose("both")


@pytest.mark.parametrize("kind", ["prefill", "full"])
def test_graphs_that_were_not_captured_are_refused(kind: str) -> None:
    graphs, _made = choice(full=False, prefills=())
    with pytest.raises(ValueError, match=f"captured no {kind} graphs"):
        graphs.choose(kind)
    with pytest.raises(ValueError, match="must be one of piecewise, prefill, full, both, got 'half'"):
        graphs.choose("half")


def test_an_engine_without_graphs_leaves_no_choice() -> None:
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=64))
    GraphChoice(SimpleNamespace(vllm_config=config)).choose("full")


def test_the_usual_sizes_are_those_that_vllm_says() -> None:
    assert usual_sizes(64)[:5] == [1, 2, 4, 8, 16]
    assert usual_sizes(64)[-1] == 128
