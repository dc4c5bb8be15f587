"""Stores that go to a file tier as well: slots stay taken until every rank's files are there, and not too many."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from lamella.connector.step_orders import Ended
from scheduler_side import Request, done, output_of, side_of


@pytest.mark.parametrize("ok", [True, False])
@pytest.mark.parametrize("second_ends", ["before the put", "behind it"])
def test_a_rank_whose_tier_is_done_before_another_rank_has_stored_is_taken_in(
    tmp_path: Path, ok: bool, second_ends: str
) -> None:
    """It ended the engine, and slots of a store that failed on one rank were written while another's tier read them."""
    tmp_path.chmod(0o700)
    side = side_of(num_ranks=2, file_tier=tmp_path)
    side.matched_tokens(request := Request("a", list(range(8))), 0)
    while side.matched_tokens(request, 0)[0] is None:
        threading.Event().wait(0.001)
    side.allocated(request, ([1, 2],), 0)
    (store,) = side.step_orders(output_of(("a", [1, 2], 0, 8))).stores
    reports = [{"stores": {store.number: Ended(1, True)}}, {"puts": {store.number: Ended(1, True)}}]
    reports.insert(1 if second_ends == "before the put" else 2, {"stores": {store.number: Ended(1, ok)}})
    for report in reports:
        done(side, **report)
        assert side.has_open_work
        assert side.objects.index.occupancy().free == 15
    done(side, puts={store.number: Ended(1, ok)})
    assert not side.has_open_work
    assert side.objects.index.occupancy().free == (15 if ok else 16)
    side.close()


def test_a_store_that_was_dropped_is_tried_again_beside_a_tier_too(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    side = side_of(file_tier=tmp_path)
    side.matched_tokens(request := Request("a", list(range(8))), 0)
    while side.matched_tokens(request, 0)[0] is None:
        threading.Event().wait(0.001)
    side.allocated(request, ([1, 2, 3],), 0)
    (store,) = side.step_orders(output_of(("a", [1, 2, 3], 0, 8))).stores
    request.all_token_ids.append(9)
    done(side, stores={store.number: Ended(1, False)}, puts={store.number: Ended(1, False)})
    (again,) = side.step_orders(output_of(("a", [], 8, 1), new=False)).stores
    assert (again.slots, again.keys) == (store.slots, store.keys)
    side.close()


def test_a_disk_that_is_slower_than_the_engine_takes_half_of_the_pool_and_no_more(tmp_path: Path) -> None:
    """Slots are taken until their files are there: behind a slow disk all would be, and nothing new could be kept."""
    tmp_path.chmod(0o700)
    side = side_of(file_tier=tmp_path)
    index = side.objects.index
    keeps, slots = [], []
    for number in range(12):
        name, blocks = f"r{number}", [1, 2, 3, 4]
        request = Request(name, [number] * 16)
        while side.matched_tokens(request, 0)[0] is None:
            threading.Event().wait(0.001)
        side.allocated(request, (blocks,), 0)
        (store,) = side.step_orders(output_of((name, blocks, 0, 16))).stores
        done(side, stores={store.number: Ended(1, True)})
        side.request_ended(request)
        keeps.append(bool(store.keys))
        slots.append(store)
    assert keeps == [True] * 4 + [False] * 8  # of 16 slots, two each
    assert index.occupancy().pins == 8
    done(side, puts={store.number: Ended(1, True) for store in slots if store.keys})
    assert (index.occupancy().pins, side.objects.num_open, side.objects._behind) == (0, 0, 0)
    side.close()
