"""The scheduler side without an engine: requests, steps and reports as vLLM would make them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lamella.connector.engine_facts import EngineFacts
from lamella.connector.step_orders import Ended, StepReport
from lamella.connector.tier_prefetch import RankObjects
from lamella.connector.vllm_scheduler import SchedulerSide
from lamella.connector.vllm_settings import ConnectorSettings
from lamella.reference.geometry import ObjectForm
from lamella.reference.keys import KeySpace

BLOCK, CHUNK = 4, 8
SPACE = KeySpace("m", "float32", ObjectForm.TOKEN, "logical", CHUNK, 0, 1, (0, 4))


class Request:
    """A request as vLLM has it, as far as the connector looks."""

    cache_salt = lora_request = mm_features = prompt_embeds = pooling_params = None

    def __init__(self, name: str, tokens: list[int]) -> None:
        self.request_id = name
        self.all_token_ids = tokens

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


class Pool:
    """The engine's block pool: remembers what was evicted."""

    def __init__(self) -> None:
        self.evicted: set[int] = set()

    def evict_blocks(self, blocks: set[int]) -> None:
        self.evicted |= blocks


def side_of(num_ranks: int = 1, **settings: Any) -> SchedulerSide:
    facts = EngineFacts((BLOCK,), 64, num_ranks, SPACE)
    side = SchedulerSide(ConnectorSettings(**{"layers_per_slice": 1, **settings}), facts)
    side.set_ranks([RankObjects(b"s" * 32, 512)] * num_ranks, 16)
    side.bind_block_pool(Pool())
    return side


def output_of(*batch: tuple[str, list[int], int, int], new: bool = True) -> Any:
    """vLLM's SchedulerOutput: (name, blocks, computed, scheduled) of each request."""
    fresh = (
        [SimpleNamespace(req_id=n, block_ids=([*b],), num_computed_tokens=c) for n, b, c, _s in batch] if new else []
    )
    cached = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
    if not new:
        cached.req_ids = [name for name, *_rest in batch]
        cached.new_block_ids = [([*blocks],) if blocks else None for _name, blocks, *_rest in batch]
        cached.num_computed_tokens = [computed for _name, _blocks, computed, _scheduled in batch]
    return SimpleNamespace(
        scheduled_new_reqs=fresh,
        scheduled_cached_reqs=cached,
        num_scheduled_tokens={name: scheduled for name, _b, _c, scheduled in batch},
        total_num_scheduled_tokens=sum(scheduled for *_rest, scheduled in batch),
    )


def done(side: SchedulerSide, received: set[str] | None = None, bad: set[int] | None = None, **ended: Any) -> Any:
    output = SimpleNamespace(finished_recving=received, finished_sending=None, invalid_block_ids=bad or set())
    side.step_done(output, StepReport(**ended))
    return output


def stored(side: SchedulerSide, name: str, num_tokens: int, blocks: list[int]) -> Request:
    """A request whose full chunks were computed in one step and stored."""
    request = Request(name, list(range(num_tokens)))
    assert side.matched_tokens(request, 0) == (0, False)
    side.allocated(request, (blocks,), 0)
    orders = side.step_orders(output_of((name, blocks, 0, num_tokens)))
    (store,) = orders.stores
    done(side, stores={store.number: Ended(side._facts.num_ranks, True)})
    assert not side.request_ended(request)
    return request


def loading(side: SchedulerSide, name: str, num_tokens: int, blocks: list[int]) -> tuple[Request, Any]:
    request = Request(name, list(range(num_tokens)))
    wanted, parked = side.matched_tokens(request, 0)
    assert parked
    assert wanted
    side.allocated(request, (blocks,), wanted)
    (load,) = side.step_orders(output_of()).loads
    return request, load
