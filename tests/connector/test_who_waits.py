"""A step waits for the released loads of which its batch holds a block, and for no other: judged by brute force."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella.connector.batch_blocks import BatchBlocks, Scheduled, StepBatch
from lamella.connector.load_in_flight import Load
from small_engine import SmallEngine

BASE = list(range(1, 33))
PROMPTS = [BASE, [*BASE[:16], *range(101, 117)], [*BASE[:8], *range(201, 225)], list(range(301, 333))]
VERBS = ("step",) * 6 + ("add",) * 4 + ("land",) * 2 + ("starve",) * 4 + ("abort", "preempt", "fail", "forget")
VERBS += ("again", "abort late")
Actions = Sequence[tuple[str, int]]


def warmed(ranks: int, *, ahead: bool, joins: bool, chance: random.Random | None = None) -> SmallEngine:
    """An engine in whose host pool the prompts' chunks are, and in whose own cache nothing is."""
    engine = SmallEngine(ranks, ahead=ahead, joins=joins, chance=chance)
    for tokens in PROMPTS:
        engine.add(tokens, 1)
        for _ in range(8):
            engine.step()
    assert not engine.requests
    engine.forget_cache()
    return engine


def run(engine: SmallEngine, actions: Actions) -> None:
    """Whatever the actions, every step is judged as it begins."""
    for verb, number in actions:
        names, moving = list(engine.requests), engine.open_transfers()
        if verb == "step":
            engine.step()
        elif verb == "add" and len(names) < 6:
            tokens = PROMPTS[number % len(PROMPTS)]
            engine.add(tokens[: 9 + number // 7 % (len(tokens) - 9)], 1 + number % 5)
        elif verb in ("land", "fail") and moving:
            _rank, one = moving[number % len(moving)]
            one.fail() if verb == "fail" else one.land(1 + number % 4)
        elif verb == "again" and engine.gone and len(names) < 6:
            tokens = PROMPTS[number % len(PROMPTS)]
            engine.add(tokens, 1 + number % 5, sorted(engine.gone)[number % len(engine.gone)])
        elif verb.startswith("abort") and names:
            (engine.abort if verb == "abort" else engine.abort_late)(names[number % len(names)])
        elif verb == "preempt" and (running := engine.of_state("running")):
            engine.preempt(running[number % len(running)])
        elif verb == "starve":
            parked = engine.of_state("parked") or names
            engine.starved = parked[number % len(parked)] if parked and number % 8 else None
        elif verb == "forget":
            engine.forget_cache()
    engine.starved = None
    for _ in range(100):
        if not engine.left_over():
            break
        for _rank, one in engine.open_transfers():
            one.land()
        engine.step()
    assert not engine.left_over(), f"left over: {engine.left_over()}"


@given(
    st.lists(st.tuples(st.sampled_from(VERBS), st.integers(0, 999)), max_size=80),
    st.sampled_from([1, 2]),
    st.booleans(),
    st.booleans(),
    st.one_of(st.none(), st.integers(0, 99)),
)
def test_every_step_waits_for_the_loads_that_its_batch_reads_and_for_no_other(
    actions: Actions, ranks: int, ahead: bool, joins: bool, forecasts: int | None
) -> None:
    chance = None if forecasts is None else random.Random(forecasts)
    run(warmed(ranks, ahead=ahead, joins=joins, chance=chance), actions)


def test_a_sharer_aborted_while_what_it_reads_is_landing_leaves_nothing_to_hit() -> None:
    """What it computed would stay in the engine's own cache when the load fails: its errors name others' blocks."""
    engine = warmed(1, ahead=True, joins=False)
    first = engine.add(PROMPTS[0], 5)
    for _ in range(8):
        if engine.requests[first].state == "running":
            break
        engine.step()
        for _rank, one in engine.open_transfers():
            if not one.query().landed:
                one.land(1)
    sharer = engine.add([*PROMPTS[0][:24], *range(400, 409)], 5)
    engine._queue.append(engine._make_step())  # made, and the one before it has not run
    table = engine.requests[sharer].table
    landing = set().union(*(load.blocks for load in engine.side._loads.values()))
    own = set(table) - set(engine.requests[first].table)
    assert landing & set(table), "it reads what is landing"
    assert own & set(engine.blocks.cached.values()), "and what it computes can be hit"
    engine.abort(sharer)
    assert not own & set(engine.blocks.cached.values())
    run(engine, [("fail", 0)])


def runs_at_random(count: int, *, forecasts: bool = False) -> Counter[str]:
    """What was met in so many runs; the same ones each time."""
    seen: Counter[str] = Counter()
    for seed in range(count):
        rng = random.Random(seed)
        actions = [(rng.choice(VERBS), rng.randrange(1000)) for _ in range(80)]
        joins = seed % 8 > 5 and not forecasts
        engine = warmed(1 + seed % 2, ahead=seed % 4 > 1, joins=joins, chance=rng if forecasts else None)
        run(engine, actions)
        seen += engine.seen
    return seen


def test_the_runs_meet_readers_sharers_and_bystanders() -> None:
    seen = runs_at_random(180)
    assert min(seen[what] for what in ("own", "sharers", "bystanders")) >= 50, seen
    assert min(seen[what] for what in ("sharers alone", "sharers of a part")) >= 8, seen


class Without:
    """A step's batch, of which some are not seen."""

    def __init__(self, batch: StepBatch, hides: Callable[[Scheduled], bool]) -> None:
        self._batch, self._hides = batch, hides

    def of(self, name: str) -> Scheduled | None:
        one = self._batch.of(name)
        return None if one is None or self._hides(one) else one


HELD: Any = BatchBlocks.held
FAULTS: dict[str, tuple[type, str, Any]] = {
    "every load is waited for": (Load, "may_be_read_by", lambda self, orders: True),
    "none is": (Load, "may_be_read_by", lambda self, orders: False),
    "one block of a load stands for all": (
        Load,
        "may_be_read_by",
        lambda self, orders: bool({max(self.blocks)} & orders.held_blocks),
    ),
    "the last of a batch is passed over": (
        BatchBlocks,
        "held",
        lambda self, batch: HELD(self, Without(batch, lambda one: one.request == [*batch.names][-1])),
    ),
    "only those that are new in the batch count": (
        BatchBlocks,
        "held",
        lambda self, batch: HELD(self, Without(batch, lambda one: one.new == 1)),
    ),
    "who comes back keeps its old table": (BatchBlocks, "replace", BatchBlocks.append),
    "who joins is not looked at": (BatchBlocks, "_look", lambda self, request, first: None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_rule_that_looks_at_less_or_at_more_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises(AssertionError, match="the step waits for|and its request has"):
        runs_at_random(90)
