"""Engines without layer waits on a real server: whole loads in their own words, with placeholders on the wire."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from engine_driver import ENGINE_MISSING
from lamella.server.adapters import BlockTableClient, Finished, SlotMappedClient
from lamella.server.connection import ServerLostError
from lamella.server.moves import Line
from lamella.server.protocol import Message, Retrieve, TransferSide
from lamella.server.rank import RankOfEngine
from rank_driver import RankMemory, ServerProcess, both_sides

pytestmark = pytest.mark.skipif(ENGINE_MISSING is not None, reason=str(ENGINE_MISSING))

TOKENS = list(range(70))  # 8 chunks of 8, and a tail that is not stored
HERE, THERE = list(range(18)), list(range(20, 38))


@pytest.fixture
def num_layers() -> int:
    return 4


def _slots(blocks: list[int]) -> list[int]:
    return [4 * block + token for block in blocks for token in range(4)][: len(TOKENS)]


def _client(
    kind: Callable[..., Any], server: ServerProcess, memory: RankMemory, side: TransferSide = TransferSide.WORKER
) -> Any:
    end = time.monotonic() + 20
    while True:
        try:
            return kind(server.folder, RankOfEngine("other", memory.space), memory.caches, transfer_side=side)
        except (ServerLostError, FileNotFoundError):
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


@pytest.fixture
def retrieves(monkeypatch: pytest.MonkeyPatch) -> list[Retrieve]:
    """Every RETRIEVE that goes on the wire."""
    sent: list[Retrieve] = []
    ask = Line.ask

    def note(self: Line, message: Message) -> Any:
        if isinstance(message, Retrieve):
            sent.append(message)
        return ask(self, message)

    monkeypatch.setattr(Line, "ask", note)
    return sent


# ---- slots a token


@both_sides
def test_tokens_stored_from_some_slots_come_back_into_others(
    server: ServerProcess, memory: RankMemory, side: TransferSide, retrieves: list[Retrieve]
) -> None:
    client = _client(SlotMappedClient, server, memory, side)
    keys = client.keys(TOKENS, b"")
    memory.fill(keys, HERE)
    assert client.store_kv(TOKENS, _slots(HERE)) is True
    memory.poison()
    assert client.load_kv(TOKENS, _slots(THERE)) == 64
    assert memory.right_layers(keys, THERE) == [0, 1, 2, 3]
    assert memory.is_poisoned_outside(THERE[:16])
    assert client.load_kv([*TOKENS[:30], 9], _slots(HERE)[:31]) == 24, "another token in the fourth chunk"
    assert [(one.board, one.events or None, one.layers_per_slice) for one in retrieves] == [(None, None, 0)] * 2, "B10"
    client.close()


def test_what_the_engine_has_is_left_alone_and_the_rest_comes(server: ServerProcess, memory: RankMemory) -> None:
    client = _client(SlotMappedClient, server, memory)
    keys = client.keys(TOKENS, b"")
    memory.fill(keys, HERE)
    client.store_kv(TOKENS, _slots(HERE))
    memory.poison()
    assert client.load_kv(TOKENS, _slots(THERE), offset=20) == 64
    assert memory.is_poisoned_outside(THERE[5:16])
    assert memory.right_layers(keys, THERE, skip_chunks=3) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="whole blocks of 4"):
        client.load_kv(TOKENS, _slots(THERE), offset=21)
    with pytest.raises(ValueError, match="consecutive"):
        client.load_kv(TOKENS, list(reversed(_slots(THERE))))
    with pytest.raises(ValueError, match="an entry a token"):
        client.load_kv(TOKENS, _slots(THERE)[:-1])
    client.close()


@pytest.mark.known_fault(1)
def test_a_miss_and_a_lost_server_are_no_tokens_and_no_error(server: ServerProcess, memory: RankMemory) -> None:
    client = _client(SlotMappedClient, server, memory)
    assert client.load_kv(TOKENS, _slots(HERE)) == 0
    server.kill()
    assert client.store_kv(TOKENS, _slots(HERE)) is False
    assert client.load_kv(TOKENS, _slots(HERE)) == 0
    assert memory.is_poisoned_outside(())
    client.close()


@pytest.mark.known_fault(31)
def test_another_tenants_salt_finds_nothing(server: ServerProcess, memory: RankMemory) -> None:
    """SRV-5."""
    client = _client(SlotMappedClient, server, memory)
    memory.fill(client.keys(TOKENS, b"blue"), HERE)
    client.store_kv(TOKENS, _slots(HERE), salt=b"blue")
    assert client.load_kv(TOKENS, _slots(THERE), salt=b"red") == 0
    assert client.load_kv(TOKENS, _slots(THERE)) == 0
    assert client.load_kv(TOKENS, _slots(THERE), salt=b"blue") == 64
    client.close()


# ---- block tables


def _finish(client: BlockTableClient) -> Finished:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        found = client.get_finished()
        if any(found):
            return found
        time.sleep(0.001)
    raise TimeoutError("nothing has ended")


@both_sides
def test_a_request_is_saved_when_it_ends_and_loaded_by_the_next(
    server: ServerProcess, memory: RankMemory, side: TransferSide, retrieves: list[Retrieve]
) -> None:
    client = _client(BlockTableClient, server, memory, side)
    keys = client.keys(TOKENS, b"")
    assert client.get_num_new_matched_tokens("a", TOKENS, 0) == (0, False)
    client.update_state_after_alloc("a", HERE)
    memory.fill(keys, HERE)
    assert client.request_finished("a", HERE) is True
    assert _finish(client) == Finished(["a"], [], [])
    memory.poison()
    end = time.monotonic() + 20
    while client.get_num_new_matched_tokens("b", TOKENS, 0) != (64, True):  # until the store is committed
        assert time.monotonic() < end
        client.get_finished()
    client.update_state_after_alloc("b", THERE)
    assert _finish(client) == Finished([], ["b"], [])
    assert memory.right_layers(keys, THERE) == [0, 1, 2, 3]
    assert client.request_finished("b", THERE) is False, "all of it is there already"
    assert [(one.board, one.events or None, one.layers_per_slice) for one in retrieves] == [(None, None, 0)]
    client.close()


@pytest.mark.known_fault(56)
def test_a_whole_prompt_that_is_cached_leaves_its_last_token_to_compute(
    server: ServerProcess, memory: RankMemory
) -> None:
    client = _client(BlockTableClient, server, memory)
    prompt = TOKENS[:64]
    client.get_num_new_matched_tokens("a", prompt, 0)
    memory.fill(client.keys(prompt, b""), HERE)
    client.request_finished("a", HERE[:16])
    _finish(client)
    end = time.monotonic() + 20
    while (found := client.get_num_new_matched_tokens("b", prompt, 0)) == (0, False):
        assert time.monotonic() < end
        client.get_finished()
    assert found == (60, True)
    client.update_state_after_alloc("b", THERE)
    assert _finish(client).loaded == ["b"]
    client.close()


def test_a_request_that_ends_before_its_load_keeps_its_blocks_until_that_has_ended(
    server: ServerProcess, memory: RankMemory
) -> None:
    """SAFE-1, REL-1."""
    client = _client(BlockTableClient, server, memory)
    client.get_num_new_matched_tokens("a", TOKENS, 0)
    memory.fill(client.keys(TOKENS, b""), HERE)
    client.request_finished("a", HERE)
    _finish(client)
    end = time.monotonic() + 20
    while not client.get_num_new_matched_tokens("b", TOKENS, 0)[1]:
        assert time.monotonic() < end
        client.get_finished()
    client.update_state_after_alloc("b", THERE)
    assert client.request_finished("b", THERE) is True
    assert _finish(client) == Finished(["b"], [], [])
    assert client.worker.num_open == 0
    client.close()
