"""Loads in flight are bounded; who waits for room costs a step next to nothing, and waits for so many others only."""

from __future__ import annotations

from typing import Any

import pytest

from lamella.connector.step_orders import Ended
from lamella.connector.vllm_scheduler import SchedulerSide
from scheduler_side import BLOCK, Request, done, output_of, side_of, stored

GIB_OF_40_TOKENS = 40 * 64 / (1 << 30)
FIRST_BLOCK = 1000


def begin(side: SchedulerSide, request: Request, wanted: int) -> int:
    """The request has got blocks of its own, and its load is in flight: its number."""
    first = FIRST_BLOCK + 100 * side._last_number
    side.allocated(request, (list(range(first, first + -(-request.num_tokens // BLOCK))),), wanted)
    (load,) = side.step_orders(output_of()).loads
    return int(load.number)


def lands(side: SchedulerSide, request: Request, number: int) -> None:
    done(side, {request.request_id}, loads={number: Ended(1, True)})


def side_with(num_tokens: int, **settings: Any) -> SchedulerSide:
    side = side_of(**settings)
    side._rules = side._rules.__class__(share_loads=False)
    stored(side, "a", num_tokens, list(range(1, num_tokens // BLOCK + 1)))
    return side


@pytest.mark.parametrize("asks_always", [True, False])
def test_a_large_load_waits_for_so_many_small_ones_at_most(asks_always: bool) -> None:
    """There is always a small load in flight, and always room for one more."""
    side = side_with(40, max_load_gib=GIB_OF_40_TOKENS, max_loads=4)
    large = Request("large", list(range(41)))
    flying: list[tuple[Request, int]] = []
    ahead = 0
    for turn in range(30):
        if not turn:
            first = Request("s", list(range(9)))
            flying.append((first, begin(side, first, side.matched_tokens(first, 0)[0] or 0)))
        if asks_always or turn < 3:
            wanted, _parked = side.matched_tokens(large, 0)
            if wanted is not None:
                assert wanted == 40
                break
        small = Request(f"s{turn}", list(range(9)))
        wanted, _parked = side.matched_tokens(small, 0)
        if wanted:
            ahead += 1
            flying.append((small, begin(side, small, wanted)))
            lands(side, *flying.pop(0))
        elif flying:
            lands(side, *flying.pop(0))
    assert (ahead == 4) if asks_always else (ahead > 15)  # who does not ask holds up nobody


def test_who_waits_for_room_is_weighed_anew_when_there_is_some_or_the_engine_holds_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side = side_with(40, max_loads=1)
    looks: list[str] = []
    find = side.objects.find
    monkeypatch.setattr(side.objects, "find", lambda name, *rest: (looks.append(name), find(name, *rest))[1])
    first, waits = Request("first", list(range(41))), Request("waits", list(range(41)))
    number = begin(side, first, side.matched_tokens(first, 0)[0] or 0)
    for _ in range(50):
        assert side.matched_tokens(waits, 0) == (None, False)
    assert looks == ["first", "waits"]
    assert side.metrics.total("bound_waits") == 50
    assert side.matched_tokens(waits, 40) == (0, False), "others have computed it meanwhile"
    assert side.matched_tokens(waits, 0) == (None, False)
    lands(side, first, number)
    assert side.matched_tokens(waits, 0) == (40, True)
    begin(side, waits, 40)
    gone = Request("gone", list(range(41)))
    assert side.matched_tokens(gone, 0) == (None, False)
    side.request_ended(gone)
    assert not side.room._waiting
