"""Blocks that a sliding window has left behind are somebody else's: nobody stores them, or waits for too few."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella.connector.engine_facts import EngineFacts
from lamella.connector.objects import Refusal
from lamella.connector.step_orders import Ended, StoreOrder
from lamella.connector.vllm_scheduler import SchedulerSide
from lamella.connector.vllm_settings import ConnectorSettings
from lamella.connector.windows import Windows
from scheduler_side import BLOCK, CHUNK, SPACE, Request, Running, done, output_of, side_of


class Sliding(Running):
    """A request of an engine with one window: what it leaves behind is written by others at once, as vLLM may."""

    def __init__(self, window: int, *script: Refusal | None, num_tokens: int) -> None:
        super().__init__(*script, num_tokens=num_tokens, windows=(window,))
        self.window = window
        self.gone: set[int] = set()

    @property
    def table(self) -> list[int]:
        """Blocks are counted from 1."""
        return list(range(1, -(-self.computed // BLOCK) + 1))

    def step(self, num_tokens: int = 1) -> tuple[StoreOrder, ...]:
        self.gone |= set(self.table[: max(0, self.computed - self.window + 1) // BLOCK])
        return super().step(num_tokens)


@given(
    st.integers(1, 24),
    st.integers(1, 60),
    st.lists(st.sampled_from([1, 1, 1, 3, 8, 20]), min_size=1, max_size=30),
    st.lists(st.sampled_from([None, Refusal.NO_ROOM]), max_size=8),
)
def test_a_store_reads_no_block_of_others_and_has_all_that_a_load_can_ask_for(
    window: int, num_tokens: int, steps: list[int], script: list[Refusal | None]
) -> None:
    engine = Sliding(window, *script, num_tokens=num_tokens)
    for count in steps:
        for store in engine.step(count):
            (table,) = store.blocks
            read = table[store.skip_tokens // BLOCK :]
            assert not engine.gone & set(read)
            for chunk in range(store.first_chunk, store.num_tokens // CHUNK):
                first_wanted = max(0, (chunk + 1) * CHUNK - window + 1) // BLOCK
                wanted = range(max(first_wanted, chunk * CHUNK // BLOCK), (chunk + 1) * CHUNK // BLOCK)
                assert all(table[index] == engine.table[index] for index in wanted)


@given(st.integers(1, 24), st.integers(1, 20))
def test_what_is_stored_when_it_is_complete_lacks_nothing(window: int, num_tokens: int) -> None:
    engine = Sliding(window, num_tokens=num_tokens)
    stores = [order for count in (num_tokens, *[1] * 30) for order in engine.step(count)]
    assert sum(len(order.slots) for order in stores) == (num_tokens + 30) // CHUNK
    asks = Request("b", engine.request.all_token_ids[: engine.computed // CHUNK * CHUNK])
    assert engine.side.matched_tokens(asks, 0)[0] == (asks.num_tokens - 1) // CHUNK * CHUNK


def test_a_chunk_that_waited_for_room_until_its_window_was_past_is_not_stored() -> None:
    engine = Sliding(CHUNK, *[Refusal.NO_ROOM] * 3, num_tokens=CHUNK)
    assert engine.step(CHUNK) == ()
    assert [order for _ in range(3 * CHUNK) for order in engine.step(1)] == []
    assert engine.side.objects.index.occupancy()[:2] == (16, 0)  # type: ignore[attr-defined]


def test_what_no_load_asks_for_may_be_gone() -> None:
    engine = Sliding(2, num_tokens=CHUNK)
    stores = [order for count in (BLOCK, BLOCK, CHUNK) for order in engine.step(count)]
    assert [(order.first_chunk, order.blocks) for order in stores] == [(0, ((1, 2),)), (1, ((0, 2, 3, 4),))]


@pytest.mark.parametrize("recomputes", [False, True])
def test_where_a_failed_load_is_computed_anew_over_a_window_no_load_joins_its_step(recomputes: bool) -> None:
    """It would have to be taken back in part, over blocks that the window has left behind."""
    facts = EngineFacts((BLOCK,), 64, 1, SPACE, windows=(CHUNK,), recomputes_windows=recomputes)
    for settings in ({"layers_per_slice": 1, "use_layerwise": True}, {"layers_per_slice": "auto"}):
        side = SchedulerSide(ConnectorSettings(**settings), facts)
        assert side._joins_step is (not recomputes and "use_layerwise" in settings)
        assert side._releases_whole is recomputes
        if side._auto is not None:
            assert (side._auto._can.early, side._auto._can.sync) == (not recomputes, not recomputes)


@pytest.mark.parametrize("group", [0, 1])
def test_a_store_ends_before_a_load_writes_into_its_blocks_of_whichever_group(group: int) -> None:
    side = side_of(windows=(None, CHUNK))
    request = Request("a", list(range(16)))
    tables = ([1, 2, 3, 4], [5, 6, 7, 8])
    side.matched_tokens(request, 0)
    side.allocated(request, tables, 0)
    (store,) = side.step_orders(_two(("a", tables, 0, 16))).stores
    done(side, stores={store.number: Ended(1, True)})
    longer = Request("b", [*range(16), *range(50, 67)])
    tables = ([11, 12, 13, 14, 21, 22, 23, 24, 25], [15, 16, 17, 18, 31, 32, 33, 34, 35])
    assert side.matched_tokens(longer, 16) == (0, False)
    side.allocated(longer, tables, 0)
    (store,) = side.step_orders(_two(("b", tables, 16, 16))).stores
    loads = Request("c", list(range(17)))
    wanted, _parked = side.matched_tokens(loads, 0)
    fresh = [[41, 42, 43, 44], [0, 46, 47, 48]]
    fresh[group][3] = tables[group][5]  # the window left it behind, or its request was preempted
    side.allocated(loads, fresh, wanted)
    assert side.step_orders(_two()).flushes == (store.number,)


def _two(*batch: tuple[str, Any, int, int]) -> Any:
    """As `output_of`, with two groups."""
    output = output_of(*((name, [], computed, new) for name, _tables, computed, new in batch))
    output.scheduled_new_reqs = [
        SimpleNamespace(req_id=name, block_ids=tables, num_computed_tokens=computed)
        for name, tables, computed, _new in batch
    ]
    return output


def test_a_group_without_a_window_lacks_whatever_block_it_lacks() -> None:
    windows = Windows((BLOCK, BLOCK), (None, BLOCK), CHUNK, 0)
    assert windows.lacks(((0, 2), (3, 4)), 0)
    assert not windows.lacks(((0, 2), (3, 4)), BLOCK)
    assert windows.left(((1, 2), (3, 4)), 100) == ((1, 2), (0, 0))
