"""A real vLLM engine stepped by this process whose connector can be exchanged while nothing is in flight.

Starting an engine costs a minute, so one engine runs many arms. A new connector is made through vLLM's own interface,
as at an engine's start, and takes the place of the one before; the host pool's memory and its index stay. `step` does
what vLLM's own loop does after an empty step: it sleeps a millisecond. With tensor parallelism the scheduler stays in
this process, and each rank computes and moves in one of its own.
"""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from concurrency.arms import Arm
from concurrency.cells import Cell, Group
from concurrency.closed_loop import Delivered, Request, serve
from concurrency.connector_exchange import ConnectorExchange
from concurrency.documents import StoredDocuments
from concurrency.host_cores import EngineCores
from concurrency.kept_pool import KeptPool, keep_pool
from concurrency.llm import make_llm, set_environment
from concurrency.probe import Probe
from concurrency.prompts import BYSTANDER_OUTPUT, BYSTANDER_TOKENS, Prompts
from concurrency.rank import Ranks
from concurrency.second_process import SecondProcess
from concurrency.weights import count_parameters, seed_weights


class ConcurrencyEngine:
    """See the module.

    Args:
        group: what will run.
        tiny: a Llama of four layers on the CPU instead of the 8B shape on a GPU; cells must have been shrunk.
        tensor_parallel: ranks, each with its share of the heads.
        options: more of vLLM's own, over those chosen here.
        side_by_side: (which, of how many) engines on this host; each has cores of its own.
    """

    def __init__(
        self,
        group: Group,
        tiny: bool,
        tensor_parallel: int = 1,
        options: Mapping[str, Any] | None = None,
        side_by_side: tuple[int, int] = (0, 1),
    ) -> None:
        set_environment(tiny, tensor_parallel)
        self.group, self.tiny, self._tensor_parallel = group, tiny, tensor_parallel
        self.peer = group.peer
        self._pool: KeptPool | None = None
        self._pool_bytes = group.pool_bytes
        if self.peer is None:
            self._pool_bytes = 64 << 20 if tiny else group.pool_bytes // tensor_parallel
        if self.peer is None and tensor_parallel == 1:  # registered while the engine starts
            self._pool = KeptPool("cpu" if tiny else "cuda:0", self._pool_bytes)
            self._pool_bytes = self._pool.num_bytes
            keep_pool(self._pool)
        begin = time.perf_counter()
        self.llm = make_llm(group, tiny, tensor_parallel, options or {})
        logging.getLogger("vllm.distributed.kv_transfer.kv_connector.v1.base").setLevel(logging.ERROR)
        self.started_s = time.perf_counter() - begin
        self._engine = self.llm.llm_engine
        self._core = self._engine.engine_core.engine_core
        self._scheduler = self._core.scheduler
        self._executed = True
        post_step = self._core.post_step

        def noting_post_step(model_executed: bool) -> None:
            self._executed = model_executed
            post_step(model_executed)

        self._core.post_step = noting_post_step
        import torch

        self.torch = torch
        self.ranks = Ranks(self._core.model_executor)
        self.probe = Probe()
        self.ranks("watch", not tiny)
        if self.peer is None and tensor_parallel > 1:
            self._pool_bytes = sum(self.ranks("keep_pool", self._pool_bytes))
        self.prompts = Prompts(group, tiny, fresh=self.peer is not None)
        self.documents = StoredDocuments(group, self.prompts, self._scheduler)
        self._ballast: list[Any] = []
        self._usable: set[int] = set()
        self._open: set[str] = set()
        self._settles = 0
        self._exchange: ConnectorExchange | None = None
        if self.peer is None:
            self._exchange = ConnectorExchange(self._engine, self.ranks, group, tiny, self.probe)
        self._top: dict[str, list[Any]] = {}
        self.cached: dict[str, int] = {}
        self.switch_ms = 0.0
        gc.collect()
        gc.freeze()  # as vLLM's own core does: what is there now is not looked at again
        self.ranks("freeze_garbage")
        self.cores = EngineCores(self.ranks, *side_by_side, wanted=not tiny)
        self.second = SecondProcess("cpu" if tiny else "cuda:0", self.cores.shared)
        self.parameters = sum(self.llm.apply_model(count_parameters if tiny else seed_weights))

    # ---- set-up

    def facts(self) -> dict[str, Any]:
        """Settings of the engine that decide its times."""
        config = self._engine.vllm_config
        sizes = list(config.compilation_config.cudagraph_capture_sizes or ())
        usual = 2 * config.scheduler_config.max_num_seqs  # what arms that say nothing of graphs replay at most
        return {
            "parameters": self.parameters,
            "tensor_parallel": self._tensor_parallel,
            "started_s": round(self.started_s, 1),
            "kv_capacity_tokens": config.cache_config.num_gpu_blocks * config.cache_config.block_size,
            "block_tokens": config.cache_config.block_size,
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
            "cudagraph_capture_max": max((size for size in sizes if size <= usual), default=None),
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "second_runner": bool(getattr(config, "use_v2_model_runner", False)),
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "switch_interval_s": sys.getswitchinterval(),
            "custom_all_reduce": not config.parallel_config.disable_custom_all_reduce,
            "host_pool_bytes": self._pool_bytes,
            "cudagraph_capture_sizes": sizes,
        }

    # ---- arms

    @property
    def _block_pool(self) -> Any:
        return self._scheduler.kv_cache_manager.block_pool

    def switch(self, arm: Arm | None, cell: Cell) -> None:
        """A new connector with the arm's settings is in place; None: one that stores, to fill the pool.

        Raises:
            RuntimeError: something is in flight.
        """
        if self._exchange is None:
            return
        begin = time.perf_counter()
        self.settle()
        with self.cores.shared():
            if not self._exchange.exchange(arm, cell):
                self.documents.forget()
        self.switch_ms = 1e3 * (time.perf_counter() - begin)

    # ---- documents

    def fill(self, cell: Cell) -> float:
        """Every document the cell draws on is in the host pool; returns the seconds that took.

        Raises:
            RuntimeError: one of them is not, whatever was done.
        """
        begin = time.perf_counter()
        if self.peer is None and self.documents.chunk_tokens != cell.chunk:
            self.switch(None, cell)
        missing = self.documents.missing(cell)
        if not missing:
            return 0.0
        self.reset(cell, ballast=False)
        self.switch(None, cell)
        for number in missing:
            tokens = [*self.prompts.document(number), *self.prompts.alphabet[:8]]
            serve(self, [Request(f"fill{self._settles}.{number}", tokens, self._fill_output)], 1)
        self.settle()
        if lost := self.documents.filled(missing, cell):
            raise RuntimeError(f"documents {lost} are not in the host pool of {self.facts()['host_pool_bytes']} bytes")
        return time.perf_counter() - begin

    @property
    def _fill_output(self) -> int:
        """Tokens of a document's answer. Peers store a step's blocks in a later step of the same request or never."""
        return 1 if self.peer is None else 4

    def reset(self, cell: Cell, ballast: bool = True) -> None:
        """The engine's prefix cache is empty, and no more blocks are free than the cell needs and one request more.

        Raises:
            ValueError: the cell does not fit into the engine's cache.
            RuntimeError: blocks are still in use.
        """
        size = self._engine.vllm_config.cache_config.block_size
        others = 64 if self.tiny else 32 + cell.bystanders * (-(-(BYSTANDER_TOKENS + BYSTANDER_OUTPUT) // size))
        needed = (cell.concurrency + 1) * (-(-cell.longest // size) + 2) + others
        pool = self._block_pool
        if ballast and len(self._usable) == needed:
            self._nudge_until(lambda: pool.get_num_free_blocks() == needed)
            pool.evict_blocks(self._usable)
            return
        if self._ballast:
            pool.free_blocks(self._ballast)
            self._ballast, self._usable = [], set()
        self._nudge_until(self.llm.reset_prefix_cache)
        if not ballast:
            return
        free = pool.get_num_free_blocks()
        if needed > free:
            raise ValueError(f"{cell.name} needs {needed} blocks, and the engine has {free}: lower concurrency or hit")
        self._ballast = pool.get_new_blocks(free - needed)
        taken = {block.block_id for block in self._ballast}
        self._usable = {block.block_id for block in pool.blocks if not block.is_null} - taken

    def _nudge_until(self, holds: Callable[[], bool]) -> None:
        """An engine that schedules a step ahead lets go of blocks a step late."""
        for _ in range(50):
            if holds():
                return
            self._settles += 1
            self.add(Request(f"nudge{self._settles}", list(self.prompts.alphabet[:3]), 2))
            self.settle()
        raise RuntimeError("blocks are still in use though nothing is in flight")

    def settle(self) -> None:
        """Nothing is in flight. An engine with nothing to compute does not look at stores, so it is given something.

        Raises:
            RuntimeError: something stays in flight for a minute.
        """
        for _ in range(3000):
            busy = self._engine.has_unfinished_requests()
            if self.peer is None:
                if not busy and not self._core.batch_queue and not self._scheduler.connector.scheduler.has_open_work:
                    return
            elif not busy and self._settles % 40 == 39:
                self._settles += 1
                return
            if not busy and not self._core.batch_queue:
                self._settles += 1
                self.add(Request(f"settle{self._settles}", list(self.prompts.alphabet[:3]), 1))
            self.step()
            time.sleep(0.001 if self.peer is None else 0.02)
        raise RuntimeError("something stayed in flight for a minute")

    def recover(self) -> None:
        """After an error: no request is left.

        Raises:
            RuntimeError: as `settle`.
        """
        self.abort(list(self._open))
        self.settle()

    def after_repeat(self, cell: Cell) -> None:
        """Nothing is in flight, and of the pool only documents are left."""
        self.settle()
        if self.peer is None and cell.stores:
            self.documents.keep_only_these(cell)

    # ---- as the loop's engine

    def add(self, request: Request, top_logprobs: int | None = None) -> None:
        """The engine has the request."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=request.output,
            min_tokens=request.output,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            logprobs=self._top_wanted if top_logprobs is None else top_logprobs,
        )
        self._open.add(request.name)
        self._engine.add_request(request.name, {"prompt_token_ids": request.tokens}, params)

    _top_wanted: int | None = None

    def step(self) -> Sequence[Delivered]:
        """One step, and the pause that vLLM's own loop makes after one that computed nothing."""
        outputs = self._engine.step()
        if not outputs:
            if not self._executed and self._scheduler.has_requests():
                time.sleep(0.001)
            return ()
        delivered = []
        for output in outputs:
            best = output.outputs[0]
            name = output.request_id
            if name not in self.cached:
                self.cached[name] = int(output.num_cached_tokens or 0)
            if self._top_wanted is not None and best.logprobs:
                self._top.setdefault(name, []).extend(
                    [[token, entry.logprob] for token, entry in top.items()] for top in best.logprobs
                )
            if output.finished:
                self._open.discard(name)
            delivered.append(Delivered(name, tuple(best.token_ids), output.finished))
        return delivered

    def now_ns(self) -> int:
        """As everything here: `time.monotonic_ns`."""
        return time.monotonic_ns()

    def sleep(self, seconds: float) -> None:
        """Nothing to serve."""
        time.sleep(seconds)

    def abort(self, names: Sequence[str]) -> None:
        """These requests are gone."""
        self._engine.abort_request(list(names))
        self._open.difference_update(names)

    def answers(self, requests: Sequence[Request], concurrency: int, top: int = 10) -> list[dict[str, Any]]:
        """Each request's tokens and, for each of them, the likeliest tokens with their log-probabilities."""
        self._top, self._top_wanted = {}, top
        try:
            served = serve(self, requests, concurrency)
        finally:
            self._top_wanted = None
        return [{"tokens": one.tokens, "top": self._top[one.name]} for one in served]

    # ---- what a repeat leaves

    @contextmanager
    def without_garbage(self) -> Iterator[None]:
        """No garbage is collected meanwhile, here or on a rank."""
        gc.collect()
        gc.disable()
        self.ranks("pause_garbage")
        try:
            yield
        finally:
            gc.enable()
            self.ranks("resume_garbage")

    def clear(self) -> None:
        """Nothing has been seen, here or on a rank."""
        self.probe.clear()
        self.ranks("clear")

    def taken(self) -> dict[str, Any]:
        """What has been seen since `clear`, here and on every rank; waits for the devices."""
        return self.probe.taken(self.ranks("taken"))

    def counters(self) -> dict[str, int]:
        """What both sides counted since the arm began, ranks together."""
        if self.peer is not None:
            return {}
        found = dict(self._scheduler.connector.scheduler.metrics._total)
        of_ranks: Counter[str] = Counter()
        for rank in self.ranks("counters"):
            of_ranks.update(rank)
        return {**found, **of_ranks}

    def durations(self) -> dict[str, list[int]]:
        """What both sides timed since the arm began: observations, total and longest ns, ranks together."""
        if self.peer is not None:
            return {}
        found = {name: list(times) for name, times in self._scheduler.connector.scheduler.metrics._times.items()}
        of_ranks: dict[str, list[int]] = {}
        for rank in self.ranks("durations"):
            for name, (count, total, longest) in rank.items():
                before = of_ranks.get(name, [0, 0, 0])
                of_ranks[name] = [before[0] + count, before[1] + total, max(before[2], longest)]
        return {**found, **of_ranks}

    def peak_in_flight_bytes(self) -> int:
        """The most bytes that were enqueued at one device since the arm began."""
        return 0 if self.peer is not None else max(self.ranks("peak_in_flight_bytes"))

    def close(self) -> None:
        """The engine is down, and the process beside it."""
        self.second.close()
        self.settle()
        self.reset(self.group.cells[0], ballast=False)
        self._engine.engine_core.shutdown()
        del self.llm
        gc.collect()
        if self._pool is not None:
            self._pool.close()
