"""The scheduler side: what can be loaded, which loads and stores are in flight, and who waits for what.

It runs in the engine core's thread, asks what is kept (`Objects`), and tells the workers what to do step by step
(`StepOrders`); they answer with what has ended (`StepReport`). It touches no KV and takes vLLM's objects as they are,
so its tests need neither vLLM nor torch.

Rules: `SafetyRules`. Contracts REL-1, SAFE-1, SAFE-3, SAFE-6 of `lamella.connector.loads` and DESIGN.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

from lamella.connector.auto_choice import AutoChoice
from lamella.connector.batch_blocks import BatchBlocks
from lamella.connector.chunk_stores import ChunkStores
from lamella.connector.connector_metrics import Metrics
from lamella.connector.engine_facts import EngineFacts
from lamella.connector.load_room import LoadRoom
from lamella.connector.loads import Kind, OpenLoad, Work, WorkBook, ended_by_itself
from lamella.connector.objects import Objects, PoolObjects
from lamella.connector.request_keys import RequestKeys
from lamella.connector.safety_rules import ALL_RULES, SafetyRules
from lamella.connector.step_forecast import forecast_if_needed
from lamella.connector.step_orders import LoadOrder, StepOrders, StepReport, StepWeights
from lamella.connector.tier_prefetch import RankObjects
from lamella.connector.vllm_settings import ConnectorSettings
from lamella.reference.auto_view import Arm
from lamella.reference.keys import ChunkKey

_log = logging.getLogger(__name__)


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
        self.room = LoadRoom(settings, facts.token_bytes, self.book, self.metrics)
        self._auto = AutoChoice(settings, facts, self.metrics) if settings.is_auto else None
        self._forecast = self._auto.forecast if self._auto is not None else forecast_if_needed(settings, facts)
        self._keys = RequestKeys(facts.space)
        self._blocks = BatchBlocks(facts.block_tokens)
        self._pool: Any = None  # the engine's block pool
        # with windows a load ends with a chunk: when that is stored, all is there that is asked for at its end
        self._unit = facts.space.chunk_tokens if any(facts.windows) else math.lcm(*facts.block_tokens)
        self._requests: dict[str, Any] = {}
        self._local_hits: dict[str, int] = {}
        self._failed: set[str] = set()
        self._loads: dict[int, OpenLoad] = {}
        self._bad_blocks: set[int] = set()
        self._new_loads: list[LoadOrder] = []
        self._cancels: list[int] = []
        self._released: list[int] = []
        self._releases_whole = facts.is_taken_back_whole
        self._last_number = -1
        self.stores = ChunkStores(
            facts, self.objects, self._keys, self._blocks, self.book, self._requests, self.metrics, self._number
        )
        """What leaves the engine's blocks."""
        self._quiet = StepOrders()

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
        if self.book.awaits_report(name) or self.room.is_refused_again(name, local_hit):
            return None, False
        keys = self._keys.keys(request, request.num_tokens)
        size = self._facts.space.chunk_tokens
        computes_all = getattr(request, "skip_reading_prefix_cache", False)  # as for log-probabilities of a prompt
        hits = 0 if computes_all else self.objects.find(name, keys, min(local_hit // size, len(keys)))
        if hits is None:
            return None, False
        num_tokens = hits * size
        if self._rules.whole_blocks:
            num_tokens = min(num_tokens, (request.num_tokens - 1) // self._unit * self._unit)
        wanted = max(0, num_tokens - local_hit)
        if not wanted:
            self.objects.let_go(name)
            self.room.forget(name)
            if self._auto is not None:
                self._auto.missed(name, local_hit, request.num_tokens)
            return 0, False
        if self._is_coming(keys[local_hit // size : hits]):
            return None, False
        arm = None if self._auto is None else self._auto.choose(name, wanted, local_hit, request.num_tokens)
        if arm is Arm.OFF:
            self.objects.let_go(name)
            self.room.forget(name)
            return 0, False
        if self.room.is_refused(name, local_hit, wanted):
            return None, False
        self._local_hits[name] = local_hit
        return wanted, not (self._joins_step if arm is None else arm is Arm.SYNC)

    @property
    def _joins_step(self) -> bool:
        """Whether loads are synchronous; never where late failures cannot be reported."""
        return self._settings.use_layerwise and not self._facts.is_taken_back_whole

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
        elif self._forecast is not None and not joins:
            plan = self._forecast.plan(num_external, end, request.num_tokens - end)
        order = self.objects.load(LoadOrder(number, name, (), first, blocks, end, skip, joins, plan), keys)
        self.book.begin(
            Work(order.number, name, Kind.LOAD, num_external * self._facts.token_bytes, not order.joins_step)
        )
        targets = frozenset(blocks[0][skip // self._facts.block_tokens[0] :]) - {self._facts.null_block}
        self._loads[order.number] = OpenLoad(order, keys, targets)
        self._blocks.watch(targets, name)
        self._bad_blocks -= targets
        self._new_loads.append(order)
        self.room.begun(name)
        self.stores.has_kept(name, end // size)
        self.metrics.count("hit_tokens", num_external)
        self.metrics.count("loads")

    # ---- a step is made

    def step_orders(self, output: Any) -> StepOrders:
        """What the workers do in the step that `output` (vLLM's SchedulerOutput) describes.

        A step in which nothing begins and nothing is waited for costs no look at its requests, one by one.
        """
        batch = self._blocks.take_step(output)
        if self._failed:
            self._failed.difference_update(batch.names)
        for one in batch.joined:
            self.objects.has_run(one.request)
        rewritten = held = frozenset[int]()
        if self._bad_blocks:
            rewritten = self._blocks.rewritten(batch, self._bad_blocks)
            self._bad_blocks -= rewritten
            self._hold_what_they_should(rewritten)
        if self._bad_blocks or self._loads:
            held = self._blocks.held(batch)
        flushes = self.stores.conflicts(batch, self._new_loads)
        loads, self._new_loads = tuple(self._new_loads), []
        cancels, self._cancels = tuple(self._cancels), []
        released, self._released = tuple(self._released), []
        stores, fetches = self.stores.of_step(batch), self.objects.take_orders()
        weights = None if self._auto is None else self._auto.step_made(batch, self._requests)
        expected_ns = 0
        if self._auto is not None:
            expected_ns = self._auto.expected_ns
        elif self._forecast is not None:
            expected_ns = self._forecast.expected_ns(batch, self._requests)
        num_decoding = batch.num_decoding
        wants_report = bool(self.book.num_held) or (bool(self._loads) and self._wants_hand_outs)
        if not (loads or stores or fetches or cancels or released or flushes or held or rewritten or wants_report):
            return self._quiet_orders(batch.num_tokens, num_decoding, weights, expected_ns)
        return StepOrders(
            loads=loads,
            stores=stores,
            fetches=fetches,
            cancels=cancels,
            released=released,
            flushes=flushes,
            num_tokens=batch.num_tokens,
            num_decoding=num_decoding,
            held_blocks=held,
            held_is_known=True,
            rewritten_blocks=rewritten,
            wants_report=wants_report,
            weights=weights,
            expected_ns=expected_ns,
        )

    def _quiet_orders(
        self, num_tokens: int, num_decoding: int, weights: StepWeights | None, expected_ns: int
    ) -> StepOrders:
        """Orders of a step in which nothing begins: the last such step's, if that was like it."""
        last = self._quiet
        if (last.num_tokens, last.num_decoding, last.expected_ns) != (num_tokens, num_decoding, expected_ns) or (
            last.weights != weights
        ):
            self._quiet = StepOrders(
                num_tokens=num_tokens,
                num_decoding=num_decoding,
                held_is_known=True,
                weights=weights,
                expected_ns=expected_ns,
            )
        return self._quiet

    # ---- a step has run

    def step_done(self, output: Any, report: StepReport | None) -> None:
        """Takes the workers' report in and settles what `output` (vLLM's KVConnectorOutput) reports to the engine.

        `finished_recving` keeps what may be passed on and gains what may run by forecast, and `finished_sending` gains
        the held requests of which nothing is in flight any more; vLLM acts on both right after this call.
        """
        if report is None and not output.finished_recving and not output.invalid_block_ids:
            if self._loads or self._auto is not None:  # somebody to let run, or whoever keeps the time
                self._release_by_forecast(output)
            self._pass_on_freed(output)
            return
        if report is not None:
            if self._forecast is not None:
                self._forecast.observed(report.observed)
            for number, end in report.stores.items():
                work = self.book.ended(number, end)
                if work is not None:
                    self.stores.ended(number, ok=self.book.ended_well(work))
            self.objects.take_in(report)
            self._releases_whole |= report.releases_whole
        failed = getattr(output, "failed_recving", None) or ()  # with several groups, from 0.27 on
        for number, load in self._loads.items() if output.invalid_block_ids or failed else ():
            if load.order.request in failed or not load.blocks.isdisjoint(output.invalid_block_ids):
                self.book.failed(number)
        if output.finished_recving:
            output.finished_recving = self.book.received(output.finished_recving) or None
            if self._auto is not None:
                for name in output.finished_recving or ():
                    self._auto.released(name)
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
        self._release_by_forecast(output)
        self._pass_on_freed(output)

    def _release_by_forecast(self, output: Any) -> None:
        """Requests join the next step by forecast; what a worker's look finds is known a step later.

        Not where workers release nothing before it has landed: with several groups, or once a hook was passed over.
        """
        for name in self._may_join():
            number = None if self._releases_whole else self.book.release(name)
            if number is None:
                continue
            if self._auto is not None:
                self._auto.released(name)
            self._released.append(number)
            output.finished_recving = {*(output.finished_recving or ()), name}
            self.metrics.count("released_by_forecast")

    @property
    def _wants_hand_outs(self) -> bool:
        """Whether somebody could be released by forecast when a step's outputs come, be they empty."""
        return self._auto is not None and self._auto.has_parked

    def _may_join(self) -> Sequence[str]:
        """Parked requests that may join the next step although no rank has said so; their loads were ordered before."""
        return self._auto.handed_out() if self._auto is not None else ()

    def _pass_on_freed(self, output: Any) -> None:
        freed = self.book.take_freed()
        if freed:
            output.finished_sending = set(output.finished_sending or ()) | freed

    def _load_ended(self, work: Work) -> frozenset[int]:
        load = self._loads.pop(work.number)
        if self._auto is not None:
            self._auto.load_ended(work.number)
        self.objects.load_ended(load.order)
        if self.book.ended_well(work):
            self._hold_what_they_should(load.blocks)
            return frozenset()
        if load.cancelled and not work.failed:
            self.metrics.count("loads_cancelled")
            return load.blocks  # a worker may have found it failed before it was cancelled
        self.metrics.count("loads_failed")
        if self._rules.remember_failures and work.request in self._requests:  # vLLM may have ended it for that
            self._failed.add(work.request)
        return load.blocks

    def _hold_what_they_should(self, blocks: frozenset[int]) -> None:
        """A load has landed in these blocks, or they were computed anew; by now another load may write some of them."""
        self._blocks.unwatch(blocks.difference(self._bad_blocks, *(load.blocks for load in self._loads.values())))

    # ---- a request ends

    def request_ended(self, request: Any) -> bool:
        """Whether the request's blocks must stay its own until `step_done` reports it."""
        name = request.request_id
        for work in self.book.open_of(name):
            if work.kind is Kind.LOAD and work.waits_for_report and not work.released and self._rules.hold_on_abort:
                self._loads[work.number].cancelled = True
                self._cancels.append(work.number)
        if (self._loads or self._bad_blocks) and self._rules.evict_on_abort and not ended_by_itself(request):
            doubtful = self._bad_blocks.union(*(load.blocks for load in self._loads.values()))
            self._evict(self._blocks.computed_over(doubtful, name))  # its own loads and others': it may have shared
        if held := self.book.request_ended(name):
            self.metrics.count("holds")
        for forget in (self._keys.forget, self._blocks.forget, self._failed.discard, self.stores.forget):
            forget(name)
        for book in (self._requests, self._local_hits):
            book.pop(name, None)
        self.objects.forget(name)
        self.room.forget(name)
        if self._auto is not None:
            self._auto.forget(name)
        return held

    @property
    def has_open_work(self) -> bool:
        """Whether something is in flight whose end a step must take in."""
        return bool(self.book.num_open or self.objects.num_open)

    def reset(self) -> None:
        """Nothing stored until now is found again, not even where others go on finding it (`RequestKeys.renew`)."""
        self._keys.renew()
        self.objects.reset()

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
