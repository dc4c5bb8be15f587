"""An engine's scheduler without an engine, beside real loads on real ranks: who holds which block is known here too.

It schedules as vLLM does: running requests first, then waiting ones; a prompt's blocks are hits of its own prefix
cache, loaded, or computed; a parked request runs once every rank has reported it; who finds no block has somebody
preempted; blocks of an ended request are held as long as the connector says. Ranks' reports are added up by name, and
what has neither computed nor told anything is handed out to nobody. Block tables, and what of them a step takes for
computed, are kept apart from the connector's own record of them: by that it is judged.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

from lamella.connector.engine_facts import EngineFacts
from lamella.connector.step_orders import Ended, StepOrders, StepReport
from lamella.connector.tier_prefetch import RankObjects
from lamella.connector.vllm_scheduler import SchedulerSide
from lamella.connector.vllm_settings import ConnectorSettings
from lamella.cuda_ext.transfer import TransferState
from lamella.reference.geometry import ObjectForm
from lamella.reference.keys import KeySpace
from rank_loads import LAYERS, Moving
from small_blocks import BLOCK, SmallBlocks
from small_rank import OneRank

CHUNK, BUDGET = 8, 24
SPACE = KeySpace("m", "float32", ObjectForm.TOKEN, "logical", CHUNK, 0, 1, (0, LAYERS))


@dataclass
class Prompt:
    """A request as the connector sees it, and what the engine knows of it."""

    request_id: str
    all_token_ids: list[int]
    state: str = "waiting"
    table: list[int] = field(default_factory=list)
    computed: int = 0
    has_run: bool = False
    ends_at: int = 0
    load: int | None = None
    status: Any = None
    cache_salt = lora_request = mm_features = prompt_embeds = pooling_params = None

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


class Part(NamedTuple):
    """One request's part of a step, as the engine made it."""

    one: Prompt
    taken: frozenset[int]
    written: frozenset[int]
    load: int | None


class Forecasting(SchedulerSide):
    """Lets parked requests, and now and then others, join the next step at random, whatever has landed."""

    chance: random.Random | None = None

    @property
    def _wants_hand_outs(self) -> bool:
        return self.chance is not None and bool(self.book._parked)

    def _may_join(self) -> Sequence[str]:
        if self.chance is None:
            return ()
        return [name for name in [*self.book._parked, *self._requests] if self.chance.random() < 0.3]


class SmallEngine:
    """See the module.

    Args:
        ranks: of tensor parallelism.
        ahead: a step is made before the last one has run.
        joins: loads join the next step instead of parking their request.
        chance: by which requests are released at hand-outs, before any rank reports them; None: none is.
    """

    def __init__(
        self, ranks: int = 1, *, ahead: bool = False, joins: bool = False, chance: random.Random | None = None
    ) -> None:
        self.side = Forecasting(
            ConnectorSettings(layers_per_slice=1, use_layerwise=joins), EngineFacts((BLOCK,), 64, ranks, SPACE)
        )
        self.side.chance = chance
        self.side.set_ranks([RankObjects(b"s" * 32, 512)] * ranks, 64)
        self.blocks = SmallBlocks()
        self.side.bind_block_pool(self.blocks)
        self.ranks = [OneRank() for _ in range(ranks)]
        self.depth = int(ahead)
        self.starved: str | None = None
        self.seen: Counter[str] = Counter()
        self.requests: dict[str, Prompt] = {}
        self.held: dict[str, list[int]] = {}
        self.gone: set[str] = set()
        self._received: set[str] = set()
        self._reports: Counter[str] = Counter()
        self._queue: deque[tuple[StepOrders, list[Part]]] = deque()
        self._late: set[str] = set()
        self._told = False
        self._added = 0

    # ---- what a test does

    def add(self, tokens: Sequence[int], new: int = 3, name: str = "") -> str:
        """A request for these tokens and so many more; by default under a name of its own."""
        name = name or f"r{self._added}"
        self._added += 1
        self.gone.discard(name)
        self.requests[name] = Prompt(name, list(tokens), ends_at=len(tokens) + new)
        return name

    def abort(self, name: str) -> None:
        """The request's client is gone."""
        self.seen["aborted before its report"] += self.side.book.awaits_report(name)
        self._end(self.requests[name], "FINISHED_ABORTED")

    def abort_late(self, name: str) -> None:
        """The same, while the step runs whose outputs are handed out next."""
        self._late.add(name)

    def preempt(self, name: str) -> None:
        """A running request loses its blocks."""
        one = self.requests[name]
        self.seen["preempted before its report"] += self.side.book.awaits_report(name)
        self.blocks.give_back(one.table)
        one.table, one.computed, one.state = [], 0, "waiting"

    def forget_cache(self) -> None:
        """The engine's own prefix cache is empty."""
        self.blocks.cached.clear()

    def step(self) -> None:
        """A step is made, and the one before it, or it itself, runs."""
        self._queue.append(self._make_step())
        while len(self._queue) > self.depth:
            self._run(*self._queue.popleft())

    def of_state(self, state: str) -> list[str]:
        """Requests in this state."""
        return [name for name, one in self.requests.items() if one.state == state]

    # ---- a step is made

    def _make_step(self) -> tuple[StepOrders, list[Part]]:
        budget, batch = BUDGET, dict[str, int]()
        fresh: list[Any] = []
        going: list[tuple[str, list[int], int]] = []
        resumed: set[str] = set()
        parts: list[Part] = []

        def grown(one: Prompt) -> list[int] | None:
            return self.blocks.grow(one.table, min(one.num_tokens, one.computed + budget))

        def scheduled(one: Prompt, blocks: list[int]) -> None:
            nonlocal budget
            new = min(budget, one.num_tokens - one.computed)
            budget -= new
            batch[one.request_id] = new
            if one.state == "running":
                going.append((one.request_id, blocks, one.computed))
            elif one.has_run:
                going.append((one.request_id, list(one.table), one.computed))
                resumed.add(one.request_id)
            else:
                table = [*one.table]
                fresh.append(
                    SimpleNamespace(req_id=one.request_id, block_ids=(table,), num_computed_tokens=one.computed)
                )
            end = one.computed + new
            taken = frozenset(one.table[: -(-one.computed // BLOCK)])
            parts.append(Part(one, taken, frozenset(one.table[one.computed // BLOCK : -(-end // BLOCK)]), one.load))
            one.state, one.has_run, one.computed = "running", True, end
            self.blocks.commit(one.all_token_ids, one.table, end)
            if end == one.num_tokens and end < one.ends_at:
                one.all_token_ids.append(1_000 + self._added * 37 + end)

        for name in self.of_state("running"):
            one = self.requests[name]
            if one.state != "running" or one.computed >= one.num_tokens or not budget:
                continue
            blocks = grown(one)
            while blocks is None and one.state == "running":
                self.preempt([other for other in self.of_state("running") if other not in batch][-1])
                blocks = grown(one) if one.state == "running" else None
            if blocks is not None:
                scheduled(one, blocks)
        for name in [*self.of_state("parked"), *self.of_state("promoted"), *self.of_state("waiting")]:
            one = self.requests[name]
            if one.state == "parked":
                if name not in self._received:
                    continue
                self._received.discard(name)
                one.state = "promoted"
                self.blocks.commit(one.all_token_ids, one.table, one.computed)
            if not budget or (one.state == "waiting" and not self._admit(one)) or one.state == "parked":
                continue
            blocks = None if name == self.starved else grown(one)
            if blocks is not None:
                scheduled(one, blocks)
            elif one.state != "promoted":
                one.state = "promoted"  # it has blocks and runs when it finds more
        cached = SimpleNamespace(
            req_ids=[name for name, *_rest in going],
            new_block_ids=[(blocks,) if blocks else None for _name, blocks, _computed in going],
            num_computed_tokens=[computed for *_rest, computed in going],
            resumed_req_ids=resumed,
        )
        output = SimpleNamespace(
            scheduled_new_reqs=fresh,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=batch,
            total_num_scheduled_tokens=sum(batch.values()),
        )
        orders = self.side.step_orders(output)
        for order in orders.loads:
            if order.request in self.requests:
                own = tuple(self.requests[order.request].table[: -(-order.num_tokens // BLOCK)])
                assert order.blocks == (own,), f"load {order.number} goes to {order.blocks}, and its request has {own}"
        return orders, parts

    def _admit(self, one: Prompt) -> bool:
        """Whether the waiting request has blocks for what it hits, parked or not."""
        hits = self.blocks.hits(one.all_token_ids)
        local = len(hits) * BLOCK
        self.seen["asks before its report"] += self.side.book.awaits_report(one.request_id)
        wanted, parked = self.side.matched_tokens(one, local)
        if wanted is None:
            return False
        needed = -(-(local + wanted) // BLOCK) - len(hits)
        if self.blocks.num_free_beside(hits) < needed:
            return False
        self.blocks.use(hits)
        one.table = [*hits, *self.blocks.take(needed)]
        self.side.allocated(one, (list(one.table),), wanted)
        one.load = self.side._new_loads[-1].number if wanted else None
        one.computed, one.state = local + wanted, "parked" if parked else "waiting"
        return True

    # ---- a step runs, and its output is taken in

    def _run(self, orders: StepOrders, parts: list[Part]) -> None:
        report: StepReport | None = None
        invalid: set[int] = set()
        for number, rank in enumerate(self.ranks):
            rank.loads.begin_step(orders)
            self.judge(rank, parts)
            if orders.num_tokens:
                for layer in range(LAYERS):
                    rank.loads.wait_layer(layer)
                rank.loads.settle()
            polled = rank.loads.poll()
            invalid |= rank.loads.errors()
            self._reports.update(polled.received)
            stores = {store.number: Ended(1, True) for store in orders.stores}
            mine = StepReport(loads=polled.ended, stores=stores, ready_slots={number: 64})
            if not mine.is_empty or orders.wants_report or not self._told:
                report = mine if report is None else report.merged(mine)
        self._told = True
        self._hand_out(parts, invalid, report)

    def _hand_out(self, parts: list[Part], invalid: set[int], report: StepReport | None) -> None:
        """As the engine does it: who is aborted or done ends first, and the connector hears of the rest."""
        for name in self._late & self.requests.keys():
            self.abort(name)
        self._late.clear()
        self._end_those_done(parts, invalid)
        received = {name for name, count in self._reports.items() if count == len(self.ranks)}
        for name in received:
            del self._reports[name]
        if not (parts or received or invalid or report):
            self.seen["not handed out"] += 1
            return
        output = SimpleNamespace(finished_recving=received, finished_sending=None, invalid_block_ids=invalid)
        self.side.step_done(output, report)
        for name in output.finished_recving or ():
            parked = name in self.requests and self.requests[name].state == "parked" and name not in self._received
            assert parked, f"{name} is passed on, and no request of this name is parked"
            self._received.add(name)
            if self.side.book.awaits_report(name):
                self._count_forecast(name)
        for name in output.finished_sending or ():
            self.blocks.give_back(self.held.pop(name))
            self.gone.add(name)

    def _count_forecast(self, name: str) -> None:
        number = self.side.book._ahead[name]
        landed = [rank.moving[number].query().landed for rank in self.ranks if number in rank.moving]
        self.seen["by forecast"] += 1
        self.seen["before any layer"] += sum(landed) == 0
        self.seen["between two ranks' reports"] += self._reports[name] > 0
        self.seen["before a rank has its order"] += any(number not in rank.orders for rank in self.ranks)
        self.seen["ended on a rank"] += any(
            number in rank.orders and rank.loads.find(number) is None for rank in self.ranks
        )

    def _end_those_done(self, parts: list[Part], invalid: set[int]) -> None:
        for one in list(self.requests.values()):
            in_step = next((part for part in parts if part.one is one), None)
            takes = in_step.taken if in_step is not None else frozenset(one.table) if one.state == "parked" else ()
            if not invalid.isdisjoint(takes):
                self._end(one, "FINISHED_ERROR")
            elif in_step is not None and one.computed >= one.ends_at:
                self._end(one, "FINISHED_LENGTH_CAPPED")

    def _end(self, one: Prompt, status: str) -> None:
        del self.requests[one.request_id]
        self._received.discard(one.request_id)
        one.status = SimpleNamespace(name=status)
        if self.side.request_ended(one):
            self.held[one.request_id] = one.table
        else:
            self.blocks.give_back(one.table)
            self.gone.add(one.request_id)
        one.table, one.state = [], "ended"

    def judge(self, rank: OneRank, parts: list[Part]) -> None:
        """The step waits for exactly those loads that have not landed and write a block its batch takes for computed.

        By brute force over every load, every request of the batch and every block; and nobody writes such a block.
        """
        for part in parts:
            assert part.load is None or part.load in rank.orders, f"load {part.load} was never ordered"
        waits = {load.order.number for load in rank.loads.gated}
        for number in rank.unlanded():
            writes = rank.writes(number)
            readers = [part.one.request_id for part in parts if not writes.isdisjoint(part.taken)]
            assert (number in waits) == bool(readers), (
                f"load {number} writes {sorted(writes)}, read by {readers}; the step waits for {sorted(waits)}"
            )
            assert not [part for part in parts if not writes.isdisjoint(part.written)] or number in waits
            own = rank.orders[number].request
            load = rank.loads.find(number)
            self.seen["own"] += own in readers
            self.seen["sharers"] += any(name != own for name in readers)
            self.seen["sharers alone"] += bool(readers) and own not in readers
            self.seen["sharers of a part"] += bool(readers) and not any(writes <= part.taken for part in parts)
            self.seen["bystanders"] += bool(parts) and not readers and load is not None and load.released

    def left_over(self) -> str:
        """What is still kept of anybody, when nobody is there any more; "" if nothing is."""
        book = self.side.book
        kept: dict[str, object] = {
            "requests": [*self.requests],
            "held": [*self.held],
            "work": book.num_open,
            "parked": book._parked,
            "reports that are to come": book._ahead,
            "reports of some ranks": dict(+self._reports),
            "releases to send": self.side._released,
            "loads of ranks": [rank.loads.num_open for rank in self.ranks if rank.loads.num_open],
        }
        return ", ".join(f"{what}: {left}" for what, left in kept.items() if left)

    # ---- what lands

    def open_transfers(self) -> list[tuple[OneRank, Moving]]:
        """Those that have not ended, by rank."""
        return [
            (rank, one) for rank in self.ranks for one in rank.moving.values() if one.state is TransferState.RUNNING
        ]
