"""Loads that join their step begin when a worker first hears of it: once, and only where the setting asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lamella.connector.before_batch import runner_writes_blocks, told_first
from lamella.connector.step_orders import LoadOrder, StepOrders
from lamella.connector.vllm_settings import ConnectorSettings
from lamella.connector.vllm_worker import WorkerSide

pytest.importorskip("torch")
from connector.test_worker_start import start


def orders_of(*joins: bool) -> StepOrders:
    """A step with as many loads, in the order in which they were ordered."""
    loads = (
        LoadOrder(number, f"r{number}", (number,), 0, ((1 + number,),), 16, 0, one) for number, one in enumerate(joins)
    )
    return StepOrders(num_tokens=1, loads=tuple(loads))


ORDERS = orders_of(True, False)


@pytest.fixture(params=[True, False], ids=["before_batch", "by default"])
def rank(request: pytest.FixtureRequest) -> Iterator[WorkerSide]:
    side = start(use_layerwise=True, before_batch=request.param, chunk_tokens=16)
    yield side
    side.close()


@pytest.mark.parametrize(
    ("joins", "early"),
    [
        ((True, False, False), [0]),
        ((False, True, False), [0, 1]),
        ((False, True, True), [0, 1, 2]),
        ((True, False, True), [0, 1, 2]),
        ((False, False, False), []),
    ],
)
def test_loads_up_to_the_last_that_joins_begin_at_the_first_sight_of_a_step_once_and_the_rest_with_it(
    rank: WorkerSide, joins: tuple[bool, ...], early: list[int]
) -> None:
    """The link keeps their order, by which `auto` has chosen each: one that joins does not overtake."""
    orders = orders_of(*joins)
    begun: list[int] = []
    begin = rank.loads.begin

    def noted(order: LoadOrder, now_ns: int) -> None:
        begun.append(order.number)
        begin(order, now_ns)

    rank.loads.begin = noted  # type: ignore[method-assign]
    for _sight in range(2):  # the second model runner's are two
        rank.see(orders)
        assert begun == (early if rank._settings.before_batch else [])
    rank.begin_step(orders)
    assert begun == [0, 1, 2]


def test_loads_begin_when_stores_that_read_what_the_step_writes_have_ended(
    rank: WorkerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(rank.stores, "flush", lambda numbers, timeout_s: seen.append(numbers))
    monkeypatch.setattr(rank.loads, "begin", lambda order, now_ns: seen.append(order.number))
    orders = replace(ORDERS, flushes=(7,))
    rank.see(orders)
    rank.begin_step(orders)
    assert seen[0] == (7,)
    assert seen.count((7,)) == 1


@pytest.mark.parametrize("how", ["whole", "slices"])
def test_what_has_begun_for_a_step_that_never_came_does_not_outlive_its_rank(how: str) -> None:
    """The runner may fail while it prepares the batch; the engine ends then."""
    side = start(use_layerwise=True, before_batch=True, chunk_tokens=16, layers_per_slice=int(how == "slices"))
    side.see(ORDERS)
    load = side.loads.find(0)
    assert load is not None
    assert load.transfer is not None
    side.close()
    assert load.transfer.state.is_final


@pytest.mark.parametrize("name", ["new_block_ids_to_zero", "kv_cache_block_copies"])
def test_a_step_in_which_the_runner_zeroes_or_copies_blocks_is_known(name: str) -> None:
    assert runner_writes_blocks(SimpleNamespace(**{name: [7]}))
    for nothing in ([], None):
        assert not runner_writes_blocks(SimpleNamespace(**{name: nothing}))
    assert not runner_writes_blocks(SimpleNamespace())


def test_no_load_begins_ahead_of_what_the_runner_writes(rank: WorkerSide) -> None:
    """It would zero, or copy over, what has landed."""
    writes = replace(ORDERS, runner_writes=True)
    rank.see(writes)
    assert rank.loads.num_open == 0
    rank.begin_step(writes)
    assert rank.loads.num_open == 2


def test_the_runner_computes_behind_what_is_told_and_gives_what_it_gave() -> None:
    seen: list[Any] = []

    def execute_model(runner: Any, scheduler_output: Any, more: int = 1, *, dummy_run: bool = False) -> Any:
        """Says what it was given."""
        seen.append("computes")
        return runner, scheduler_output.number, more, dummy_run

    told = told_first(execute_model, seen.append)
    step = SimpleNamespace(number=3, kv_connector_metadata="orders")
    assert told("runner", step, 2, dummy_run=True) == ("runner", 3, 2, True)
    assert seen == ["orders", "computes"]
    assert told("runner", scheduler_output=step) == ("runner", 3, 1, False)
    assert seen == ["orders", "computes"] * 2
    assert told.__doc__ == execute_model.__doc__


@pytest.mark.parametrize("step", [SimpleNamespace(number=3, kv_connector_metadata=None), SimpleNamespace(number=3)])
def test_a_step_without_orders_tells_nothing(step: Any) -> None:
    seen: list[Any] = []
    told_first(lambda runner, scheduler_output: None, seen.append)("runner", step)
    assert not seen


@pytest.mark.parametrize("other", [lambda runner: None, lambda runner, batch: None, lambda runner, *steps: None])
def test_a_runner_that_takes_something_else_is_refused_with_the_remedy(other: Any) -> None:
    with pytest.raises(RuntimeError, match=r"before_batch wraps .*execute_model\(self, scheduler_output, .*leave"):
        told_first(other, print)


@pytest.mark.parametrize("value", [1, "true", None])
def test_the_setting_is_true_or_false(value: object) -> None:
    with pytest.raises(TypeError, match="before_batch must be true or false, got"):
        ConnectorSettings.from_mapping({"before_batch": value})
