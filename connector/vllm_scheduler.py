"""The scheduler side: what can be loaded, which loads and stores are in flight, and who waits for what.

It runs in the engine core's thread, asks what is kept (`Objects`), and tells the workers what to do step by step
(`StepOrders`); they answer with what has ended (`StepReport`). It touches no KV and takes vLLM's objects as they are,
so its tests need neither vLLM nor torch.

Rules: `SafetyRules`. Contracts REL-1, SAFE-1, SAFE-3, SAFE-6 of `lamella.connector.loads` and DESIGN.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from lamella.connector.auto_choice import AutoChoice
from lamella.connector.batch_blocks import BatchBlocks, Scheduled
from lamella.connector.connector_metrics import Metrics
from lamella.connector.engine_facts import EngineFacts
from lamella.connector.loads import Kind, OpenLoad, OpenStore, Work, WorkBook, ended_by_itself
from lamella.connector.objects import Objects, PoolObjects
from lamella.connector.request_keys import RequestKeys
from lamella.connector.safety_rules import ALL_RULES, SafetyRules
from lamella.connector.step_orders import LoadOrder, StepOrders, StepReport, StoreOrder
from lamella.connector.tier_prefetch import RankObjects
from lamella.connector.vllm_settings import ConnectorSettings
from lamella.reference.auto_view import Arm
from lamella.reference.keys import ChunkKey

_log = logging.getLogger(__name__)
_GIB: Final = 1 << 30


class SchedulerSide:
    """See the module.

    Args:
        settings: the connector's.
        facts: of the engine.
        rules: all of them, outside tests.
        objects: what is kept; None: in this process's own pool.
    """

    def __init__(
        self,
        settings: ConnectorSettings,
        facts: EngineFacts,
        rules: SafetyRules = ALL_RULES,
        objects: Objects | None = None,
    ) -> None:
        self._settings = settings
        self._facts = facts
        self._rules = rules
        self.objects: Objects = objects or PoolObjects(settings, facts)
        """What is kept, and where."""
        self.book = WorkBook(facts.num_ranks, rules)
        self.metrics = Metrics()
        self._auto = AutoChoice(settings, facts, self.metrics) if settings.is_auto else None
        self._keys = RequestKeys(facts.space)
        self._blocks = BatchBlocks(facts.block_tokens)
        self._pool: Any = None  # the engine's block pool
        self._requests: dict[str, Any] = {}
        self._local_hits: dict[str, int] = {}
        self._stored_chunks: dict[str, int] = {}
        self._failed: set[str] = set()
        self._loads: dict[int, OpenLoad] = {}
        self._stores: dict[int, OpenStore] = {}
        self._bad_blocks: set[int] = set()
        self._new_loads: list[LoadOrder] = []
        self._cancels: list[int] = []
        self._last_number = -1

    # ---- set-up

    def set_ranks(self, ranks: Sequence[RankObjects], ready_slots: int, least_width: int = 1) -> None:
        """Every rank has said how it names its objects, how many slots each has ready at least, and which slices are
        wide enough for all.
        """  # noqa: D205 - one sentence more than a line
        self.objects.set_ranks(ranks, ready_slots, self._number)
        if self._auto is not None:
            self._auto.set_least_width(least_width)

    def bind_block_pool(self, pool: Any) -> None:
        """The engine's block pool, of whose prefix cache blocks are evicted."""
        self._pool = pool

    # ---- a request asks

    def matched_tokens(self, request: Any, local_hit: int) -> tuple[int | None, bool]:
        """Tokens beyond `local_hit` that can be loaded, and whether the request is parked for it; None: ask again."""
        name = request.request_id
        self._requests[name] = request
        if self._facts.refusal or name in self._failed:
            return 0, False
        keys = self._keys.keys(request, request.num_tokens)
        size = self._facts.space.chunk_tokens
        hits = self.objects.find(name, keys, min(local_hit // size, len(keys)))
        if hits is None:
            return None, False
        num_tokens = hits * size
        if self._rules.whole_blocks:
            unit = max(self._facts.block_tokens)
            num_tokens = min(num_tokens, (request.num_tokens - 1) // unit * unit)
        num_tokens = min(num_tokens, request.num_tokens)
        wanted = max(0, num_tokens - local_hit)
        if not wanted:
            self.objects.let_go(name)
            if self._auto is not None:
                self._auto.missed(name, local_hit, request.num_tokens)
            return 0, False
        if self._is_coming(keys[local_hit // size : hits]):
            return None, False
        arm = None if self._auto is None else self._auto.choose(name, wanted, local_hit, request.num_tokens)
        if arm is Arm.OFF:
            self.objects.let_go(name)
            return 0, False
        if self._has_no_room(wanted):
            return None, False
        self._local_hits[name] = local_hit
        return wanted, not (self._joins_step if arm is None else arm is Arm.SYNC)

    @property
    def _joins_step(self) -> bool:
        """Whether loads are synchronous; never with several groups, whose late failures cannot be reported."""
        return self._settings.use_layerwise and len(self._facts.block_tokens) == 1

    def _is_coming(self, keys: Sequence[ChunkKey]) -> bool:
        """Whether a load that nobody can hit yet brings some of these chunks: the request waits for it.

        Loads in flight end without the engine's help, so this waits for nothing that waits for it.
        """
        if not self._rules.share_loads or not self._facts.prefix_caching:
            return False
        wanted = set(keys)
        if any(not work.released and wanted & set(self._loads[work.number].keys) for work in self.book.open_loads()):
            self.metrics.count("shared_waits")
            return True
        return False

    def _has_no_room(self, num_tokens: int) -> bool:
        """Whether a load must wait until others have ended."""
        loads = self.book.open_loads()
        num_bytes = sum(work.num_bytes for work in loads) + num_tokens * self._facts.token_bytes
        if loads and (len(loads) >= self._settings.max_loads or num_bytes > self._settings.max_load_gib * _GIB):
            self.metrics.count("bound_waits")
            return True
        return False

    def allocated(self, request: Any, tables: Sequence[Sequence[int]], num_external: int) -> None:
        """The engine gave the request blocks; `num_external` tokens of them are to be loaded.

        Raises:
            RuntimeError: tokens that `matched_tokens` did not promise.
        """
        name = request.request_id
        self._blocks.replace(name, tables)
        if num_external == 0:
            if self._auto is not None:
                self._auto.declined(name)
            return
        if name not in self._local_hits:
            raise RuntimeError(f"{num_external} tokens are to be loaded for {name}, which was promised none")
        skip, size = self._local_hits.pop(name), self._facts.space.chunk_tokens
        end, first = skip + num_external, skip // size
        keys = self._keys.keys(request, request.num_tokens)[first : -(-end // size)]
        blocks = self._blocks.tables(name, end)
        assert blocks is not None, "the engine allocated blocks for what it is to load"
        number, joins, plan = self._number(), self._joins_step, None
        if self._auto is not None:
            joins, plan = self._auto.joins(name), self._auto.planned(name, number)
        order = self.objects.load(LoadOrder(number, name, (), first, blocks, end, skip, joins, plan), keys)
        self.book.begin(
            Work(order.number, name, Kind.LOAD, num_external * self._facts.token_bytes, not order.joins_step)
        )
        targets = frozenset(blocks[0][skip // self._facts.block_tokens[0] :]) - {self._facts.null_block}
        self._loads[order.number] = OpenLoad(order, keys, targets)
        self._blocks.loaded(targets)
        self._bad_blocks -= targets
        self._new_loads.append(order)
        self._stored_chunks[name] = end // size
        self.metrics.count("hit_tokens", num_external)
        self.metrics.count("loads")

    # ---- a step is made

    def step_orders(self, output: Any) -> StepOrders:
        """What the workers do in the step that `output` (vLLM's SchedulerOutput) describes."""
        batch = self._blocks.take_step(output)
        for one in batch:
            self._failed.discard(one.request)
            self.objects.has_run(one.request)
        rewritten = self._blocks.rewritten(batch, self._bad_blocks)
        self._bad_blocks -= rewritten
        watched = self._bad_blocks.union(*(load.blocks for load in self._loads.values()))
        flushes = self._conflicts(batch)
        loads, self._new_loads = tuple(self._new_loads), []
        cancels, self._cancels = tuple(self._cancels), []
        return StepOrders(
            loads=loads,
            stores=tuple(order for one in batch for order in self._store(one)),
            fetches=self.objects.take_orders(),
            cancels=cancels,
            flushes=flushes,
            num_tokens=output.total_num_scheduled_tokens,
            num_decoding=sum(one.new == 1 for one in batch),
            held_blocks=self._blocks.held(batch, watched),
            rewritten_blocks=rewritten,
            wants_report=bool(self.book.num_held),
            weights=None if self._auto is None else self._auto.step_made(batch, self._requests),
        )

    def _conflicts(self, batch: Sequence[Scheduled]) -> tuple[int, ...]:
        """Stores whose blocks this step writes: their requests were preempted, or lost blocks to a window."""
        if not self._stores:
            return ()
        written = {block for load in self._new_loads for block in self._loads[load.number].blocks}
        for one in batch:
            tables = self._blocks.tables(one.request, one.end) or ()
            for table, size in zip(tables, self._facts.block_tokens, strict=False):
                written.update(table[one.computed // size :])
        written.discard(self._facts.null_block)
        return tuple(number for number, store in self._stores.items() if store.blocks & written)

    def _store(self, one: Scheduled) -> list[StoreOrder]:
        """Orders for the chunks that are complete with this step and not kept yet."""
        request = self._requests.get(one.request)
        if request is None or self._facts.refusal:
            return []
        size = self._facts.space.chunk_tokens
        first, end = self._stored_chunks.get(one.request, 0), min(one.end, request.num_tokens) // size
        if end <= first:
            return []
        keys = self._keys.keys(request, end * size)
        blocks = self._blocks.tables(one.request, end * size)
        if len(keys) < end or blocks is None:
            return []
        self._stored_chunks[one.request] = end
        orders = self.objects.reserve(one.request, keys[first:], first, blocks, self._number)
        if orders is None:
            self.metrics.count("stores_without_room")
        return [order for found in orders or () if (order := self._begin_store(found)) is not None]

    def _begin_store(self, order: StoreOrder) -> StoreOrder | None:
        blocks = self._blocks.tables(order.request, order.num_tokens)
        assert blocks is not None, "they were looked at above"
        sources = {
            block
            for table, block_tokens in zip(blocks, self._facts.block_tokens, strict=True)
            for block in table[order.skip_tokens // block_tokens :]
        }
        if self._facts.null_block in sources:  # a sliding window has left part of the chunk behind
            self.objects.drop(order)
            return None
        order = replace(order, blocks=blocks)
        num_bytes = (order.num_tokens - order.skip_tokens) * self._facts.token_bytes
        self.book.begin(Work(order.number, order.request, Kind.STORE, num_bytes))
        self._stores[order.number] = OpenStore(order, frozenset(sources))
        return order

    # ---- a step has run

    def step_done(self, output: Any, report: StepReport | None) -> None:
        """Takes the workers' report in and settles what `output` (vLLM's KVConnectorOutput) reports to the engine.

        `finished_recving` keeps what may be passed on, and `finished_sending` gains the held requests of which nothing
        is in flight any more; vLLM acts on both right after this call.
        """
        if report is not None:
            if self._auto is not None:
                self._auto.observed(report.observed)
            for number, end in report.stores.items():
                work = self.book.ended(number, end)
                if work is not None:
                    self._store_ended(number, self.book.ended_well(work))
            self.objects.take_in(report)
        if output.finished_recving:
            output.finished_recving = self.book.received(output.finished_recving) or None
        new_bad: set[int] = set()
        for number, end in (report.loads if report is not None else {}).items():
            work = self.book.ended(number, end)
            if work is not None:
                new_bad |= self._load_ended(work)
        if new_bad:
            self._blocks.loaded(new_bad)
            self._bad_blocks |= new_bad
        if (new_bad or output.invalid_block_ids) and self._rules.evict_on_error:
            self._evict(self._blocks.behind(new_bad | set(output.invalid_block_ids or ())))
        freed = self.book.take_freed()
        if freed:
            output.finished_sending = set(output.finished_sending or ()) | freed

    def _load_ended(self, work: Work) -> frozenset[int]:
        load = self._loads.pop(work.number)
        if self._auto is not None:
            self._auto.load_ended(work.number)
        self.objects.load_ended(load.order)
        if self.book.ended_well(work):
            return frozenset()
        if load.cancelled:
            self.metrics.count("loads_cancelled")
            return load.blocks  # a worker may have found it failed before it was cancelled
        self.metrics.count("loads_failed")
        if self._rules.remember_failures:
            self._failed.add(work.request)
        return load.blocks

    def _store_ended(self, number: int, ok: bool) -> None:
        store = self._stores.pop(number)
        self.objects.store_ended(store.order, ok=ok)
        if ok:
            self.metrics.count("stored_tokens", store.order.num_tokens - store.order.skip_tokens)
            return
        self.metrics.count("stores_dropped")
        name = store.order.request
        if name in self._stored_chunks:
            self._stored_chunks[name] = min(self._stored_chunks[name], store.order.first_chunk)

    # ---- a request ends

    def request_ended(self, request: Any) -> bool:
        """Whether the request's blocks must stay its own until `step_done` reports it."""
        name = request.request_id
        for work in self.book.open_of(name):
            if work.kind is not Kind.LOAD:
                continue
            load = self._loads[work.number]
            if work.waits_for_report and not work.released and self._rules.hold_on_abort:
                load.cancelled = True
                self._cancels.append(work.number)
            elif self._rules.evict_on_abort and not ended_by_itself(request):
                self._evict(self._blocks.behind(load.blocks))
        held = self.book.request_ended(name)
        if held:
            self.metrics.count("holds")
        for forget in (self._keys.forget, self._blocks.forget, self._failed.discard):
            forget(name)
        for book in (self._requests, self._local_hits, self._stored_chunks):
            book.pop(name, None)
        self.objects.forget(name)
        if self._auto is not None:
            self._auto.forget(name)
        return held

    @property
    def has_open_work(self) -> bool:
        """Whether something is in flight whose end a step must take in."""
        return bool(self.book.num_open or self.objects.num_open)

    def reset(self) -> bool:
        """Whether every readable object is forgotten, those in use once nobody uses them; others may share them."""
        return self.objects.reset()

    def close(self) -> None:
        """Threads and connections end."""
        self.objects.close()

    def _evict(self, blocks: set[int]) -> None:
        if self._pool is not None and blocks:
            self._pool.evict_blocks(blocks)
            self.metrics.count("blocks_evicted", len(blocks))

    def _number(self) -> int:
        self._last_number += 1
        return self._last_number
