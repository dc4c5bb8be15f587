"""Two real ranks whose loads are let move one by one: what they load is right, and what happens when one lags behind.

    LAMELLA_TEST_GATES=FOLDER python -c "from with_vllm.two_ranks import main; main()" MODEL OBJECTS

Prints one line of JSON: `shared`, the prompt's answers over nothing, computed and loaded; `expected`, answers to be had
in blocks of an aborted load, the engine's own with its steps cut otherwise; and for each rule that is off ("" for none)
the answer there, and whether the blocks were used anew before rank 0 was done with them. `let_run`: the prompt's answer
when it runs before either rank has landed anything, and what is still awaited afterwards.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm.config import KVTransferConfig

from lamella.connector.safety_rules import ALL_RULES
from with_vllm.answers import Answer, answer_of
from with_vllm.tiny_engine import BEFORE_BATCH, BLOCK, make_llm, prompt, sampling

P = prompt(500)
OTHER = prompt(980, salt=5)  # 31 blocks of 39, of which a held load has 16
LAYERS = 4
BOUND_S = 60.0
BLOCKS = 40


class TwoRanks:
    """An engine of two ranks, stepped by hand."""

    def __init__(self, model: Path, objects: Path) -> None:
        self.gates = Path(os.environ["LAMELLA_TEST_GATES"])
        self.granted = [0, 0]
        transfer = KVTransferConfig(
            kv_connector="GatedRanksConnector",
            kv_connector_module_path="with_vllm.gated_ranks",
            kv_role="kv_both",
            kv_connector_extra_config={
                "layers_per_slice": 1,
                "before_batch": BEFORE_BATCH,
                "host_pool_gib": 0.05,
                "chunk_tokens": 64,
                "wait_timeout_s": 60,
                "load_timeout_s": 300,
                "file_tier": str(objects),
            },
        )
        self.llm = make_llm(
            model,
            None,
            kv_transfer_config=transfer,
            tensor_parallel_size=2,
            num_gpu_blocks_override=BLOCKS,
            enforce_eager=True,
        )
        core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.side = core.scheduler.connector.scheduler
        self.aggregator = core.model_executor.kv_output_aggregator
        self.outputs: dict[str, Answer] = {}
        self.matched_tokens = self.side.matched_tokens
        self.side.matched_tokens = self.matched_unless_other

    def matched_unless_other(self, request: Any, local_hit: int) -> tuple[int | None, bool]:
        """OTHER is computed, wherever it is stored."""
        found = self.matched_tokens(request, local_hit)
        return (0, False) if list(request.prompt_token_ids[:BLOCK]) == OTHER[:BLOCK] else found

    def grant(self, rank: int, windows: int) -> None:
        self.granted[rank] += windows
        part = self.gates / f"rank-{rank}.part"
        part.write_text(str(self.granted[rank]))
        part.replace(self.gates / f"rank-{rank}")

    def add(self, name: str, tokens: list[int], num_new: int = 12) -> None:
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": tokens}, sampling(num_new))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for output in self.llm.llm_engine.step():
                if output.finished:
                    self.outputs[output.request_id] = answer_of(output)

    def step_until(self, holds: Callable[[], bool]) -> None:
        until = time.monotonic() + BOUND_S
        while not holds():
            if time.monotonic() > until:
                raise AssertionError("it did not come to hold in time")
            self.step()

    def finish(self, name: str) -> Answer:
        self.step_until(lambda: name in self.outputs)
        return self.outputs.pop(name)

    def generate(self, name: str, tokens: list[int]) -> Answer:
        self.add(name, tokens)
        return self.finish(name)

    def cut_otherwise(self, tokens: list[int]) -> list[Answer]:
        """The prompt's answer computed whole, then over hits of the engine's own prefix cache; nothing is loaded."""
        answers = [self.generate("whole", tokens), self.generate("again", tokens)]
        for length in (500, 320):
            self.settle()
            self.add("part", tokens[:length], 1)
            self.finish("part")
            answers.append(self.generate(f"over-{length}", tokens))
        self.settle()
        return answers

    def settle(self) -> None:
        """Nothing is in flight, and the engine's own prefix cache is empty."""
        while self.side.has_open_work:
            if not self.llm.llm_engine.has_unfinished_requests():
                self.add("settle", prompt(3, salt=99), 1)
            self.step()
        self.outputs.clear()
        assert self.llm.reset_prefix_cache()

    @property
    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    @contextmanager
    def without(self, *rules: str) -> Iterator[None]:
        off = replace(ALL_RULES, **dict.fromkeys(rules, False))
        self.side._rules = self.side.book._rules = off
        try:
            yield
        finally:
            self.side._rules = self.side.book._rules = ALL_RULES

    def aborted_with_one_rank_behind(self, rule: str) -> dict[str, Any]:
        """Rank 0 reports after a layer, then the request is aborted, then rank 1 is done; rank 0 still moves one."""
        with self.without(*filter(None, [rule])):
            self.add("r1", P)
            self.step_until(lambda: self.side.book.num_open == 1)
            (work,) = self.side.book.open_loads()
            self.grant(0, 1)
            self.step_until(lambda: self.aggregator._recv_remaining_count.get(work.request) == 1)
            self.llm.llm_engine.abort_request([work.request], internal=True)
            self.add("r3", OTHER)
            self.step(3)
            self.grant(1, 1)  # of a load that was cancelled, only the layer that was handed to the device still moves
            until = time.monotonic() + 2.0
            freed = False
            while time.monotonic() < until and not freed:  # a hold shows only in that nothing comes of waiting
                self.step()
                freed = any(one.num_output_tokens >= 2 for one in self.scheduler.running)
            self.grant(0, 1)
            answer = self.finish("r3")
        self.outputs.clear()
        self.settle()
        return {"answer": answer._asdict(), "used_before_rank_0_was_done": freed}

    def let_run_before_anything_landed(self) -> dict[str, Any]:
        """The request runs as soon as outputs are handed out; rank 0 lands at once, rank 1 half a second later."""
        side: Any = type(self.side)
        kept = {name: vars(side)[name] for name in ("_may_join", "_wants_hand_outs")}
        side._may_join = lambda side: list(side.book._parked)
        side._wants_hand_outs = property(lambda side: bool(side.book._parked))
        try:
            before = self.side.metrics.total("released_by_forecast")
            self.add("r1", P)
            self.step_until(lambda: self.side.metrics.total("released_by_forecast") > before)
            self.grant(0, LAYERS)
            slower = threading.Timer(0.5, self.grant, (1, LAYERS))
            slower.start()
            answer = self.finish("r1")
            slower.join()
        finally:
            for name, one in kept.items():
                setattr(side, name, one)
        self.settle()
        left = {"of some ranks": self.aggregator._recv_remaining_count, "of any": self.side.book._ahead}
        return {"answer": answer._asdict(), "left": left}


def main() -> None:
    model, objects = map(Path, sys.argv[1:])
    ranks = TwoRanks(model, objects)
    expected = ranks.cut_otherwise(OTHER)
    ranks.side.reset()
    computed = ranks.generate("computed", P)
    ranks.settle()
    for rank in (0, 1):
        ranks.grant(rank, LAYERS)
    loaded = ranks.generate("loaded", P)
    ranks.settle()
    print("free", ranks.free_blocks, file=sys.stderr)
    found = {rule: ranks.aborted_with_one_rank_behind(rule) for rule in ("", "free_on_minimum")}
    let_run = ranks.let_run_before_anything_landed()
    left = {"free_blocks": ranks.free_blocks, "holds": ranks.side.book.num_held}
    rows = {
        "expected": [one._asdict() for one in expected],
        "shared": [computed._asdict(), loaded._asdict()],
        "cases": found,
        "let_run": let_run,
        "left": left,
    }
    print("ROWS " + json.dumps(rows), flush=True)
    ranks.llm.llm_engine.engine_core.shutdown()
