"""A server that has no room, or does not answer, while an engine stores: its request stores the same chunks later."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from engine_driver import ENGINE_MISSING
from lamella.connector.objects import Refusal
from lamella.connector.step_orders import StoreOrder
from rank_driver import CHUNK, ServerProcess, serving
from server.test_engine_objects import HERE, TOKENS, Engine, Request, step_of
from waiting import wait_until

pytestmark = pytest.mark.skipif(ENGINE_MISSING is not None, reason=str(ENGINE_MISSING))


@pytest.fixture
def small(tmp_path: Path) -> Iterator[tuple[ServerProcess, Engine]]:
    with serving(tmp_path / "s", "--memory", "256KiB") as process:
        wait_until(lambda: (process.folder / "server.sock").exists(), "it serves")
        engine = Engine(process.folder)
        yield process, engine
        engine.close()


def computing(engine: Engine) -> Request:
    """A request that has its blocks, and whose tokens their KV."""
    request = Request("a", [*TOKENS])
    assert engine.side.matched_tokens(request, 0) == (0, False)
    engine.side.allocated(request, (HERE,), 0)
    engine.ranks[0].memory.fill(engine.side._keys.keys(request, len(TOKENS)), HERE)
    return request


def goes_on(engine: Engine, request: Request) -> None:
    """One more token of it is computed."""
    request.all_token_ids.append(7)
    engine.step(step_of(("a", (*HERE, 9), len(TOKENS), 1)))
    engine.settle()


def filled(engine: Engine) -> list[StoreOrder]:
    """Others write into every slot."""
    orders: list[StoreOrder] = []
    for number in count(1):
        tokens = [1_000 * number + token for token in range(CHUNK)]
        keys = engine.side._keys.keys(Request(f"other {number}", tokens), CHUNK)
        taken = engine.objects.reserve(f"other {number}", keys, 0, (HERE,), engine.side._number)
        if taken.refusal is not None:
            assert taken == ([], Refusal.NO_ROOM)
            break
        orders += taken.orders
    return orders


def test_what_a_full_server_refused_is_stored_once_it_has_room(small: tuple[ServerProcess, Engine]) -> None:
    _server, engine = small
    others = filled(engine)
    request = computing(engine)
    engine.step(step_of(("a", HERE, 0, len(TOKENS))))
    assert engine.side.metrics.total("stores_without_room") == 1
    for order in others:
        engine.objects.drop(order)
    wait_until(lambda: engine.held() == 0, "nothing is held")
    goes_on(engine, request)
    assert engine.finds(TOKENS) == len(TOKENS) // CHUNK
    assert engine.side.metrics.total("stores_after_waiting") == 1


def test_what_a_silent_server_did_not_answer_is_stored_once_it_does_and_counts_as_no_want_of_room(
    small: tuple[ServerProcess, Engine],
) -> None:
    server, engine = small
    request = computing(engine)
    engine.objects._answer_s = 0.05
    os.kill(server.process.pid, signal.SIGSTOP)
    engine.step(step_of(("a", HERE, 0, len(TOKENS))))
    os.kill(server.process.pid, signal.SIGCONT)
    engine.objects._answer_s = 5.0
    wait_until(lambda: not engine.objects._is_late(), "it answers again")
    goes_on(engine, request)
    assert engine.finds(TOKENS) == len(TOKENS) // CHUNK
    assert engine.side.metrics.total("stores_without_room") == 0
