"""The scheduler side without an engine: requests, steps and reports as vLLM would make them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from lamella.connector.engine_facts import EngineFacts
from lamella.connector.objects import PoolObjects, Refusal, Taken
from lamella.connector.step_orders import Ended, StepReport, StoreOrder
from lamella.connector.tier_prefetch import RankObjects
from lamella.connector.vllm_scheduler import SchedulerSide
from lamella.connector.vllm_settings import ConnectorSettings
from lamella.reference.geometry import ObjectForm
from lamella.reference.keys import ChunkKey, KeySpace, chunk_keys

BLOCK, CHUNK = 4, 8
SPACE = KeySpace("m", "float32", ObjectForm.TOKEN, "logical", CHUNK, 0, 1, (0, 4))


class Request:
    """A request as vLLM has it, as far as the connector looks."""

    cache_salt: Any = None
    lora_request = mm_features = prompt_embeds = pooling_params = None

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


def side_of(num_ranks: int = 1, windows: Sequence[int | None] = (), **settings: Any) -> SchedulerSide:
    """Of an engine with a KV cache group for each of `windows`, or with one that keeps its blocks."""
    facts = EngineFacts((BLOCK,) * max(1, len(windows)), 64, num_ranks, SPACE, windows=tuple(windows))
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


class Stingy:
    """A pool that refuses by a script, each look counted; what it does not refuse, the real one answers."""

    def __init__(self, pool: PoolObjects, script: list[Refusal | None]) -> None:
        self._reserve = pool.reserve
        self.script = script
        self.tries: list[int] = []
        """Chunks of each try."""

    def reserve(self, request: str, keys: Any, first: int, *rest: Any) -> Taken:
        self.tries.append(len(keys) - first)
        refusal = self.script.pop(0) if self.script else None
        return self._reserve(request, keys, first, *rest) if refusal is None else Taken([], refusal)


class Running:
    """One request that decodes, a token a step; its pool refuses by a script.

    Args:
        script: see `Stingy`.
        num_tokens: of its prompt.
        windows: as `side_of`.
    """

    def __init__(self, *script: Refusal | None, num_tokens: int = 2 * CHUNK, windows: Sequence[int] = ()) -> None:
        self.side = side_of(windows=windows)
        self.pool = self.side.objects
        assert isinstance(self.pool, PoolObjects)
        self.stingy = Stingy(self.pool, [*script])
        self.pool.reserve = self.stingy.reserve  # type: ignore[method-assign]
        self.computed = 0
        self.request = Request("a", list(range(num_tokens)))
        self.side.matched_tokens(self.request, 0)
        self.side.allocated(self.request, ([],), 0)

    def step(self, num_tokens: int = 1) -> tuple[StoreOrder, ...]:
        """So many more tokens are computed, of which the last gives another; its stores end with it."""
        first, end = -(-self.computed // BLOCK), -(-(self.computed + num_tokens) // BLOCK)
        output = output_of(("a", list(range(first + 1, end + 1)), self.computed, num_tokens), new=not self.computed)
        self.computed += num_tokens
        while self.request.num_tokens <= self.computed:
            self.request.all_token_ids.append(self.request.num_tokens)
        orders = self.side.step_orders(output).stores
        done(self.side, stores={order.number: Ended(1, True) for order in orders})
        return orders

    @property
    def num_kept(self) -> int:
        """Chunks of the request that could be hit."""
        return self.pool.index.leading_hits(self.keys)

    @property
    def keys(self) -> tuple[ChunkKey, ...]:
        return chunk_keys(SPACE, self.request.all_token_ids)

    def count(self, name: str) -> int:
        return self.side.metrics.total(name)
