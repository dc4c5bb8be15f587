"""Whose turn it is to be released, and that nothing is remembered of a load that is gone, however it went."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from connector.test_auto_choice import MS, Clock
from lamella.connector.connector_metrics import Metrics
from lamella.connector.load_in_flight import Load
from lamella.connector.step_orders import LoadOrder, LoadPlan, StepOrders, StepWeights
from lamella.connector.turns import Turns
from lamella.reference.release import First, StallPrice, WeighedRelease
from rank_loads import LAYERS, TABLE, Moving, Rank


def weights(prefills: tuple[int, ...] = ()) -> StepWeights:
    return StepWeights(StallPrice(0), False, prefills, 5 * MS)


def step() -> StepOrders:
    return StepOrders(num_tokens=1, num_decoding=1, weights=weights())


def load(number: int, compute_ms: int = 27, ordered_ns: int = 0) -> Load:
    plan = LoadPlan(1, WeighedRelease(), compute_ms * MS, 36 * MS)
    order = LoadOrder(number, f"r{number}", (0,), 0, ((0,),), 256, 0, False, plan)
    return Load(order, Future(), ordered_ns, frozenset())


def test_of_long_prefills_one_is_released_in_a_step_in_the_order_of_the_loads() -> None:
    metrics, clock = Metrics(), Clock()
    turns = Turns(metrics, clock)
    loads = [load(number) for number in range(3)]
    left = []
    for _ in range(3):
        turns.step_begins(step())
        waiting = [one for one in loads if not one.reported]
        for one in waiting:
            is_left = turns.is_left(one, waiting)
            left.append((one.order.number, is_left))
            one.reported = not is_left
    assert left == [(0, False), (1, True), (2, True), (1, False), (2, True), (2, False)]
    assert metrics.total("auto_turns") == 2


def test_short_prefills_and_loads_without_a_plan_wait_for_nobody() -> None:
    turns = Turns(Metrics(), Clock())
    short = [load(number, compute_ms=2) for number in range(3)]
    turns.step_begins(step())
    assert [turns.is_left(one, short) for one in short] == [False] * 3
    turns.step_begins(StepOrders())
    assert not turns.is_left(load(7), [])


def test_nobody_waits_for_a_prefill_that_came_after_him_nor_for_ever() -> None:
    clock = Clock()
    turns = Turns(Metrics(), clock)
    turns.step_begins(StepOrders(weights=weights(prefills=(4,))))
    assert turns.is_left(load(5), [])  # it began when load 4 was the last
    assert not turns.is_left(load(4), [])
    turns.step_begins(StepOrders(weights=weights(prefills=(0, 0))))
    clock.now_ns = 6_000 * MS
    assert not turns.is_left(load(5), [])


# ---------------------------------------------------------------- whole lives on a rank


def kept(*owners: object) -> dict[str, Any]:
    """What these objects keep, of loads or of anything; which layers a step has hooked is its own."""
    books = [(name, one) for owner in owners for name, one in vars(owner).items() if isinstance(one, dict | set | list)]
    return {name: one for name, one in books if one and name != "_hooked"}


ENDS = st.sampled_from(["lands", "is cancelled", "fails"])


@given(st.lists(st.lists(st.tuples(st.integers(0, 7), ENDS), max_size=3), min_size=1, max_size=8))
def test_a_load_that_is_left_counts_once_and_nothing_is_kept_of_it_when_it_is_gone(
    ends: list[list[tuple[int, str]]],
) -> None:
    """Eight long prefills whose first layer is there: one a step is released, the others are left, and any may end."""
    rank, open_loads, left = Rank(), set(range(8)), set()
    turns = rank.loads._turns = Turns(rank.metrics, Clock())
    seen = turns.is_left

    def noted(load: Load, loads: Any) -> bool:
        is_left = seen(load, loads)
        left.update([load.order.number] if is_left else [])
        return is_left

    setattr(turns, "is_left", noted)  # noqa: B010 - mypy knows no method as a variable
    plan = LoadPlan(1, First(1), 27 * MS, 36 * MS)
    rank.moving = [Moving() for _ in open_loads]
    orders = tuple(LoadOrder(number, f"r{number}", (0,), 0, (TABLE,), 32, 0, False, plan) for number in open_loads)
    rank.loads.begin_step(StepOrders(loads=orders, weights=weights()))
    rank.loads.poll()
    for in_this_step in [*ends, [(number, "is cancelled") for number in range(8)]]:
        cancels = []
        for number, how in in_this_step:
            if how == "lands":
                rank.moving[number].land(LAYERS)
            elif how == "fails" and not rank.moving[number].state.is_final:
                rank.moving[number].fail()
            else:
                cancels.append(number)
                rank.moving[number].cancel()
        rank.step(StepOrders(num_tokens=1, cancels=tuple(cancels), weights=weights()), hooked=True)
        for number in cancels:
            rank.moving[number].wait_final(1.0)
    rank.loads.poll()
    rank.loads.errors()
    rank.loads.begin_step(StepOrders(num_tokens=1, rewritten_blocks=frozenset(TABLE), weights=weights()))
    assert rank.metrics.total("auto_turns") == len(left)
    assert rank.loads.num_open == 0
    assert kept(rank.loads, turns) == {}
