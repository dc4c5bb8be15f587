"""The scheduler side without an engine: claims, stores, flushes, errors by block, and everything it lets go of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lamella.connector.batch_blocks import BatchBlocks, Scheduled
from lamella.connector.step_orders import Ended, StepReport
from scheduler_side import BLOCK, Request, done, loading, output_of, side_of, stored


def test_a_hit_is_whole_blocks_and_leaves_the_last_token() -> None:
    side = side_of()
    stored(side, "a", 24, [1, 2, 3, 4, 5, 6])
    for length, claimed in [(8, 4), (9, 8), (12, 8), (16, 12), (17, 16), (24, 20), (25, 24), (40, 24)]:
        assert side.matched_tokens(Request(f"q{length}", list(range(length))), 0) == (claimed, True)


@pytest.mark.parametrize("kept", [True, False])
def test_chunks_that_were_loaded_are_not_stored_again_and_what_follows_only_while_they_are_kept(kept: bool) -> None:
    side = side_of()
    stored(side, "a", 16, [1, 2, 3, 4])
    _request, load = loading(side, "b", 24, [5, 6, 7, 8])
    done(side, {"b"}, loads={load.number: Ended(1, True)})
    if not kept:
        side.reset()  # others had need of the room meanwhile
    stores = side.step_orders(output_of(("b", [5, 6, 7, 8, 9, 10], 16, 8))).stores
    found = [(store.first_chunk, store.skip_tokens, store.num_tokens) for store in stores]
    assert found == ([(2, 16, 24)] if kept else [])  # a tail without its head could never be hit


@pytest.mark.known_fault(38)
def test_objects_of_a_load_stay_until_it_has_ended_on_every_rank() -> None:
    side = side_of()
    stored(side, "a", 16, [1, 2, 3, 4])
    _request, load = loading(side, "b", 20, [5, 6, 7, 8, 9])
    assert side.objects.index.occupancy().pins == 2
    done(side, {"b"})
    assert side.objects.index.occupancy().pins == 2
    done(side, loads={load.number: Ended(1, True)})
    assert side.objects.index.occupancy().pins == 0


@pytest.mark.parametrize(("status", "stays"), [("FINISHED_LENGTH_CAPPED", True), ("FINISHED_ABORTED", False)])
def test_blocks_of_a_request_that_gave_its_last_token_stay_hits_and_those_of_an_aborted_one_do_not(
    status: str, stays: bool
) -> None:
    """The step that gave the token waited for the load, whose end is reported behind it."""
    side = side_of()
    stored(side, "a", 16, [1, 2, 3, 4])
    request, load = loading(side, "b", 20, [5, 6, 7, 8, 9])
    done(side, {"b"})
    request.status = SimpleNamespace(name=status)  # type: ignore[attr-defined]
    assert side.request_ended(request)
    assert done(side, loads={load.number: Ended(1, True)}).finished_sending == {"b"}
    assert side._pool.evicted == (set() if stays else {5, 6, 7, 8, 9})


def test_a_failed_load_is_kept_by_block_until_the_block_is_computed_anew() -> None:
    side = side_of()
    stored(side, "a", 16, [1, 2, 3, 4])
    _request, load = loading(side, "b", 20, [5, 6, 7, 8, 9])
    done(side, {"b"})  # released, promoted, and not scheduled
    done(side, loads={load.number: Ended(1, False)})
    assert side._pool.evicted >= {5, 6, 7, 8}
    sharer = side.step_orders(output_of(("c", [5, 6, 7, 8, 10], 16, 4)))
    assert sharer.held_blocks == {5, 6, 7, 8}
    again = side.step_orders(output_of(("b", [5, 6, 7, 8, 9], 0, 10)))  # two blocks and a half
    assert (again.rewritten_blocks, again.held_blocks) == ({5, 6}, frozenset())
    mixed = side.step_orders(output_of(("b", [], 10, 1), ("c", [], 20, 1), new=False))
    assert mixed.held_blocks == {7, 8}  # the sharer still takes them for computed
    rest = side.step_orders(output_of(("b", [], 11, 9), new=False))
    assert rest.rewritten_blocks == {7, 8}
    assert side._bad_blocks == set()


def test_a_failed_load_is_a_miss_for_its_request_until_it_has_run() -> None:
    side = side_of()
    stored(side, "a", 16, [1, 2, 3, 4])
    request, load = loading(side, "b", 20, [5, 6, 7, 8, 9])
    done(side, {"b"}, {5, 6, 7, 8}, loads={load.number: Ended(1, False)})
    assert side.matched_tokens(request, 0) == (0, False)
    side.step_orders(output_of(("b", [5, 6, 7, 8, 9], 0, 20)))
    assert side.matched_tokens(request, 0) == (16, True)


@pytest.mark.parametrize("released", [False, True])
def test_a_load_whose_failure_ended_its_request_counts_as_failed_and_leaves_no_name_behind(released: bool) -> None:
    """By the policy fail vLLM ends the request before it hands the connector the step's report."""
    side = side_of()
    stored(side, "a", 16, [1, 2, 3, 4])
    request, load = loading(side, "b", 20, [5, 6, 7, 8, 9])
    if released:
        done(side, {"b"})
    request.status = SimpleNamespace(name="FINISHED_ERROR")  # type: ignore[attr-defined]
    assert side.request_ended(request)
    output = done(side, None if released else {"b"}, bad={5, 6, 7, 8}, loads={load.number: Ended(1, False)})
    assert output.finished_sending == {"b"}
    assert (side.metrics.total("loads_failed"), side.metrics.total("loads_cancelled")) == (1, 0)
    assert not side._failed
    assert not side._requests


@pytest.mark.known_fault(34)
def test_a_store_ends_before_somebody_writes_into_its_blocks() -> None:
    side = side_of()
    request = Request("a", list(range(16)))
    side.matched_tokens(request, 0)
    side.allocated(request, ([1, 2, 3, 4],), 0)
    (store,) = side.step_orders(output_of(("a", [1, 2, 3, 4], 0, 16))).stores
    assert side.step_orders(output_of(("b", [7, 8], 0, 8))).flushes == ()
    assert side.step_orders(output_of(("c", [1, 9], 4, 4))).flushes == ()  # block 1 is a hit, and only read
    assert side.step_orders(output_of(("d", [9, 3], 4, 4))).flushes == (store.number,)


@pytest.mark.known_fault(35)
def test_blocks_of_a_request_that_ends_while_a_step_that_stores_them_is_in_flight_are_held_until_that_has_ended() -> (
    None
):
    """With asynchronous scheduling the next step is made before the last one's end is known."""
    side = side_of(num_ranks=2)
    request = Request("a", list(range(16)))
    side.matched_tokens(request, 0)
    side.allocated(request, ([1, 2, 3, 4],), 0)
    (store,) = side.step_orders(output_of(("a", [1, 2, 3, 4], 0, 16))).stores
    side.step_orders(output_of(("a", [5], 16, 1), new=False))  # a step ahead
    assert side.request_ended(request)
    assert done(side).finished_sending is None
    assert done(side, stores={store.number: Ended(1, True)}).finished_sending is None  # one rank of two
    assert done(side, stores={store.number: Ended(1, True)}).finished_sending == {"a"}


def test_a_store_that_was_dropped_gives_its_slots_back_and_is_tried_again() -> None:
    side = side_of()
    request = Request("a", list(range(20)))
    side.matched_tokens(request, 0)
    side.allocated(request, ([1, 2, 3, 4, 5],), 0)
    (store,) = side.step_orders(output_of(("a", [1, 2, 3, 4, 5], 0, 16))).stores
    done(side, stores={store.number: Ended(1, False)})
    assert side.objects.index.occupancy().writing == 0
    (again,) = side.step_orders(output_of(("a", [], 16, 4), new=False)).stores
    assert (again.skip_tokens, again.num_tokens) == (0, 16)


def test_a_request_that_ends_while_its_store_reads_is_held_and_freed_once() -> None:
    side = side_of(num_ranks=2)
    request = Request("a", list(range(16)))
    side.matched_tokens(request, 0)
    side.allocated(request, ([1, 2, 3, 4],), 0)
    (store,) = side.step_orders(output_of(("a", [1, 2, 3, 4], 0, 16))).stores
    assert side.request_ended(request)
    assert done(side, stores={store.number: Ended(1, True)}).finished_sending is None
    assert done(side, stores={store.number: Ended(1, True)}).finished_sending == {"a"}
    assert done(side).finished_sending is None


def test_slots_are_used_once_every_rank_has_them_whichever_ranks_a_report_is_of() -> None:
    """Host memory comes up on each rank in its own time, and a rank is in a report if it has something to tell."""
    side = side_of(num_ranks=2)
    index = side.objects.index
    for ready, expected in [({0: 40}, 16), ({1: 24}, 24), ({0: 90}, 24), ({0: 90, 1: 90}, 90), ({}, 90)]:
        output = SimpleNamespace(finished_recving=None, finished_sending=None, invalid_block_ids=set())
        side.step_done(output, StepReport(ready_slots=ready))
        assert index.occupancy().free == expected, ready
    merged = StepReport(ready_slots={0: 3}).merged(StepReport(ready_slots={1: 2}))
    assert merged.ready_slots == {0: 3, 1: 2}


def test_loads_are_bounded_by_count_and_by_bytes_and_one_may_always_run() -> None:
    side = side_of(max_load_gib=1e-9)
    stored(side, "a", 16, [1, 2, 3, 4])
    other = Request("z", [9] * 16)
    side.matched_tokens(other, 0)
    side.allocated(other, ([10, 11, 12, 13],), 0)
    (store,) = side.step_orders(output_of(("z", [10, 11, 12, 13], 0, 16))).stores
    done(side, stores={store.number: Ended(1, True)})
    _request, load = loading(side, "b", 20, [5, 6, 7, 8, 9])
    waits = Request("c", [9] * 16)
    assert side.matched_tokens(waits, 0) == (None, False)
    done(side, {"b"}, loads={load.number: Ended(1, True)})
    assert side.matched_tokens(waits, 0) == (12, True)


def test_a_prompt_with_media_and_another_tenants_chunks_are_a_miss() -> None:
    side = side_of()
    stored(side, "a", 16, [1, 2, 3, 4])
    picture, tenant = Request("p", list(range(16))), Request("t", list(range(16)))
    picture.mm_features = ["an image"]  # type: ignore[assignment]
    tenant.cache_salt = "tenant"  # type: ignore[assignment]
    assert side.matched_tokens(picture, 0) == (0, False)
    assert side.matched_tokens(tenant, 0) == (0, False)


def test_whatever_a_tenant_or_an_adapter_is_called_it_has_keys_of_its_own() -> None:
    """Half of a surrogate pair comes out of a JSON escape or a path, and has no bytes in UTF-8."""
    side, keys = side_of(), set()
    for salt in (None, "a", "\ud83d", "\udc80", "\ud83d\udc80"):
        for adapter in (None, "x", "x\udce9"):
            request = Request(f"{salt!r} {adapter!r}", list(range(16)))
            request.cache_salt = salt  # type: ignore[assignment]
            request.lora_request = adapter and SimpleNamespace(lora_name="x", lora_path=adapter)  # type: ignore[assignment]
            assert side.matched_tokens(request, 0) == (0, False)
            keys.add(side._keys.keys(request, 16))
    assert len(keys) == 15


@pytest.mark.parametrize("settings", [{}, {"layers_per_slice": "auto"}], ids=str)
def test_a_prompt_that_wants_all_of_it_computed_is_a_miss_and_is_stored(settings: dict[str, Any]) -> None:
    """As one whose own log-probabilities are asked for; vLLM 0.26 takes what it is offered all the same."""
    side = side_of(**settings)
    stored(side, "a", 16, [1, 2, 3, 4])
    whole = Request("w", list(range(32)))
    whole.skip_reading_prefix_cache = True  # type: ignore[attr-defined]
    assert side.matched_tokens(whole, 0) == (0, False)
    assert not side._local_hits
    side.allocated(whole, (list(range(5, 13)),), 0)
    (store,) = side.step_orders(output_of(("w", list(range(5, 13)), 0, 32))).stores
    assert (store.skip_tokens, store.num_tokens) == (16, 32)


def test_a_freed_bad_block_that_is_filled_anew_is_bad_only_beyond_what_was_computed() -> None:
    blocks = BatchBlocks([BLOCK])
    blocks.replace("load", [[2, 3]])
    blocks.watch({2, 3}, "load")
    blocks.forget("load")
    assert blocks.rewritten(blocks.take_step(output_of(("a", [1, 2], 0, 6))), {2}) == frozenset()
    assert blocks.held(blocks.take_step(output_of(("a", [], 6, 1), new=False))) == frozenset()
    assert blocks.held(blocks.take_step(output_of(("b", [1, 2], 8, 1)))) == {2}
    assert blocks.held(blocks.take_step(output_of(("c", [1], 4, 1)))) == frozenset()
    assert blocks.held(blocks.take_step(output_of(("c", [3], 8, 1), new=False))) == {3}
    assert blocks.rewritten(blocks.take_step(output_of(("d", [9, 2], 0, 8))), {2}) == {2}
    blocks.unwatch(frozenset({2}))
    assert blocks.held(blocks.take_step(output_of(("b", [], 9, 1), new=False))) == frozenset()


def test_a_load_into_blocks_of_a_preempted_one_is_waited_for_when_that_has_ended() -> None:
    """Steps are made ahead: a request is preempted, and its blocks are another's, before its load has been heard of."""
    side = side_of(use_layerwise=True)
    stored(side, "a", 24, [1, 2, 3, 4, 10, 11])
    first, second = Request("b", list(range(17))), Request("c", list(range(17)))
    second.cache_salt = "c"  # type: ignore[assignment]
    other = Request("d", list(range(17)))
    other.cache_salt = "c"  # type: ignore[assignment]
    side.matched_tokens(other, 0)
    side.allocated(other, ([20, 21, 22, 23, 24],), 0)
    (store,) = side.step_orders(output_of(("d", [20, 21, 22, 23, 24], 0, 17))).stores
    done(side, stores={store.number: Ended(1, True)})
    side.request_ended(other)
    for request, blocks in ((first, [5, 6, 7, 8, 9]), (second, [7, 6, 5, 8, 9])):
        wanted, parked = side.matched_tokens(request, 0)
        assert (wanted, parked) == (16, False)
        side.allocated(request, (blocks,), wanted or 0)
        orders = side.step_orders(output_of((request.request_id, blocks, 16, 1)))
        assert orders.held_blocks == {5, 6, 7, 8}
    done(side, loads={orders.loads[0].number - 1: Ended(1, True)})
    assert side.step_orders(output_of(("c", [], 17, 1), new=False)).held_blocks == {5, 6, 7, 8}
    done(side, loads={orders.loads[0].number: Ended(1, True)})
    assert side.step_orders(output_of(("c", [], 18, 1), new=False)).held_blocks == frozenset()
    assert not side._blocks._watched


def test_what_a_load_in_flight_and_a_failed_block_cost_a_step_does_not_grow_with_those_who_hold_neither() -> None:
    """Counted in the tables' blocks that a step looks at: there are none, but of requests that join it."""
    side = side_of()
    stored(side, "a", 16, [1, 2, 3, 4])
    loading(side, "b", 20, [5, 6, 7, 8, 9])
    side._bad_blocks = {99}
    side._blocks.replace("gone", [[99]])
    side._blocks.watch({99}, "gone")
    names = [f"r{number}" for number in range(50)]
    side.step_orders(output_of(*[(name, list(range(200, 210)), 0, 4) for name in names]))
    looked = []

    class Table(list[int]):
        def __getitem__(self, index: Any) -> Any:
            looked.append(index)
            return super().__getitem__(index)

    side._blocks._tables = {name: [Table(table) for table in tables] for name, tables in side._blocks._tables.items()}
    assert side.step_orders(output_of(*[(name, [], 4, 1) for name in names], new=False)).held_blocks == frozenset()
    assert looked == []


def test_a_request_is_found_in_a_large_batch_without_a_search_for_each() -> None:
    names = [f"r{number}" for number in range(100)]
    output = output_of(*[(name, [1], 4, 1) for name in names], new=False)
    asked = []

    class Names(list[str]):
        def __iter__(self) -> Any:
            asked.append("all")
            return super().__iter__()

        def index(self, *arguments: Any) -> int:
            asked.append("one")
            return super().index(*arguments)

    blocks = BatchBlocks([BLOCK])
    output.scheduled_cached_reqs.req_ids = Names(names)
    batch = blocks.take_step(output)
    asked.clear()
    assert [batch.of(name) for name in names] == [Scheduled(name, 4, 1) for name in names]
    assert asked == ["all"]
