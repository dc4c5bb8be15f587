"""`LamellaConnector`: Lamella as a KV connector of vLLM, in the engine's own worker processes.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "LamellaConnector",
        "kv_connector_module_path": "lamella.connector.vllm", "kv_role": "kv_both",
        "kv_connector_extra_config": {"layers_per_slice": 1, "host_pool_gib": 32}}'

This class only says who does what when vLLM calls: `SchedulerSide` decides, `WorkerSide` moves. Written for vLLM 0.26
(GPU) and 0.32 (CPU build); another version is taken by its features, and named in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.forward_context import get_forward_context, is_forward_context_available

from lamella.connector.back_end import back_end_of
from lamella.connector.before_batch import runner_writes_blocks, tell_second_runner_first
from lamella.connector.safety_rules import ALL_RULES, SafetyRules
from lamella.connector.step_orders import StepOrders, StepReport
from lamella.connector.tier_prefetch import RankObjects
from lamella.connector.vllm_engine import (
    check_engine,
    check_stands_alone,
    engine_facts,
    full_graphs,
    rank_facts,
    why_refused,
)
from lamella.connector.vllm_scheduler import SchedulerSide
from lamella.connector.vllm_settings import ConnectorSettings
from lamella.connector.vllm_stats import LamellaPromMetrics, LamellaStats
from lamella.connector.vllm_worker import WorkerSide

_log = logging.getLogger(__name__)
_RESULTS = getattr(base, "KVConnectorTransferResults", None)  # from 0.27 on


def _is_replay() -> bool:
    """Whether the step that begins is one captured graph: its context says so, or (Model Runner V2) there is none."""
    if not is_forward_context_available():
        return True
    context = get_forward_context()
    mode = getattr(context, "cudagraph_runtime_mode", None)
    return getattr(context, "attn_metadata", ()) is None or getattr(mode, "name", "") == "FULL"


@dataclass
class LamellaOrders(base.KVConnectorMetadata):  # type: ignore[misc]
    """One step's orders on their way to the workers."""

    orders: StepOrders


@dataclass
class LamellaReport(base.KVConnectorWorkerMetadata):  # type: ignore[misc]
    """One step's report on its way to the scheduler side."""

    report: StepReport

    def aggregate(self, other: LamellaReport) -> LamellaReport:
        """Both ranks' reports as one."""
        return LamellaReport(self.report.merged(other.report))


@dataclass
class LamellaHandshake(base.KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What a worker tells the scheduler side once, before the first step."""

    objects: RankObjects
    ready_slots: int
    least_width: int = 1


class LamellaConnector(KVConnectorBase_V1, base.SupportsHMA):  # type: ignore[misc]
    """See the module. vLLM makes one for the scheduler and one for each worker.

    Raises:
        ValueError: settings that cannot be, or an engine in which they cannot be right, with what makes it right.
    """

    _rules: ClassVar[SafetyRules] = ALL_RULES
    """Seam of the tests that show what each rule is for."""
    _engine_options: ClassVar[dict[str, Any]] = {}
    """Seam of the tests that let a load move window by window."""
    _worker_side: ClassVar[type[WorkerSide]] = WorkerSide
    """What a rank's worker is; a connector that records has its own."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.settings = ConnectorSettings.from_mapping(extra)
        check_engine(vllm_config, self.settings)
        refusal = why_refused(vllm_config, kv_cache_config, reports_requests=_RESULTS is not None)
        if refusal:
            _log.warning("nothing is stored or loaded: %s", refusal)
        self.scheduler: SchedulerSide | None = None
        self.worker: WorkerSide | None = None
        self._refused = bool(refusal)
        self._orders = LamellaOrders(StepOrders())
        if role is KVConnectorRole.SCHEDULER:
            facts = engine_facts(vllm_config, kv_cache_config, self.settings, refusal)
            self.scheduler = SchedulerSide(
                self.settings,
                facts,
                self._rules,
                None if refusal else back_end_of(self.settings).objects(self.settings, facts),
            )
        else:
            self._rank_facts = rank_facts(vllm_config, kv_cache_config, self.settings)

    @property
    def _scheduler(self) -> SchedulerSide:
        assert self.scheduler is not None, "vLLM calls this on the scheduler's connector"
        return self.scheduler

    # ---- before anything is there

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Whether forward passes wait layer by layer in hooks, which a captured full graph would pass over (B8)."""
        settings = ConnectorSettings.from_mapping(extra_config)
        return settings.waits_in_forward and settings.full_graphs == "never"

    @property
    def requires_kv_delivery(self) -> bool:
        """Nobody waits for what is stored: what is lost is a miss later, and no reason to compute a request again."""
        return False

    # ---- the worker's hooks, in the order of a step

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The rank's caches are known: memory and the transfer engine come up.

        Raises:
            ValueError: below another connector, or as `WorkerSide`.
        """
        check_stands_alone(self)
        if not self._refused:
            facts = replace(self._rank_facts, full_graphs=full_graphs(self._vllm_config))
            if self.settings.before_batch:
                self._hear_first(released_whole=facts.is_taken_back_whole)
            self.worker = self._worker_side(self.settings, facts, kv_caches, self._rules, self._engine_options)

    def _hear_first(self, *, released_whole: bool) -> None:
        """A step's orders are seen before its batch is prepared, where a load can join its step."""
        if released_whole or not (self.settings.use_layerwise or self.settings.is_auto):
            why = (
                "where loads are released whole"
                if released_whole
                else "unless use_layerwise is set, or auto chooses it"
            )
            _log.warning("before_batch changes nothing: no load joins the step of its request %s", why)
        elif getattr(self._vllm_config, "use_v2_model_runner", False):
            tell_second_runner_first(LamellaConnector)

    def get_handshake_metadata(self) -> LamellaHandshake | None:
        """How this rank names its objects, and its slots."""
        if self.worker is None:
            return None
        return LamellaHandshake(self.worker.objects, self.worker.ready_slots, self.worker.least_width)

    def has_connector_metadata(self) -> bool:
        """Whether vLLM calls the hooks of layers, who alone asks: in steps in which one of them would do something, and
        while a graph is captured whose replays shall wait by themselves.
        """  # noqa: D205 - one sentence more than a line
        worker = self.worker
        if worker is None:
            return False
        if worker.needs_hooks:
            return self._connector_metadata is not None
        return worker.captured is not None and worker.captured.is_capturing()

    def handle_preemptions(self, kv_connector_metadata: LamellaOrders) -> None:
        """The first that a worker hears of a step; it may hear it twice."""
        if self.worker is not None and isinstance(kv_connector_metadata, LamellaOrders):
            self.worker.see(kv_connector_metadata.orders)

    def bind_connector_metadata(self, connector_metadata: LamellaOrders) -> None:
        """The step's loads begin here, and where no layer will wait they are waited for.

        In every version this is before the forward pass, which `start_load_kv` is not.
        """
        super().bind_connector_metadata(connector_metadata)
        if self.worker is not None:
            self.worker.begin_step(connector_metadata.orders)
            if self.worker.loads.gated:
                self.worker.before_forward(replays=_is_replay())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads have begun already, and it may be too late to wait: 0.32 calls this behind the launch of most steps."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Every released load has landed in this layer."""
        if self.worker is not None:
            self.worker.wait_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """The layer's new KV is in its blocks."""
        if self.worker is not None:
            self.worker.layer_computed(layer_name)

    def wait_for_save(self) -> None:
        """The step's stores have left; they are waited for where their blocks would be freed or written."""
        if self.worker is not None:
            self.worker.step_computed()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """(None, requests received): what the engine polls, up to 0.26."""
        received = self.worker.finished()[0] if self.worker is not None else None
        return None, received or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Requests received and those of them that failed: what the engine polls, from 0.27 on."""
        received, failed = self.worker.finished() if self.worker is not None else (set(), set())
        assert _RESULTS is not None, "only engines that have this type call this"
        return _RESULTS(finished_recving=received, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Failed blocks that this step's batch takes for computed, and those of parked requests."""
        return self.worker.errors() if self.worker is not None else set()

    def build_connector_worker_meta(self) -> LamellaReport | None:
        """What has ended on this rank."""
        report = self.worker.report() if self.worker is not None else None
        return LamellaReport(report) if report is not None else None

    def shutdown(self) -> None:
        """Everything in flight has ended, and memory and threads are given back."""
        if self.worker is not None:
            worker, self.worker = self.worker, None
            worker.close()
        if self.scheduler is not None:
            self.scheduler.close()

    # ---- the scheduler's hooks

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], LamellaHandshake]) -> None:
        """Every rank has said how it names its objects; nothing was said where nothing is stored or loaded."""
        ranks = list(metadata.values())
        if not ranks:  # 0.26 calls this without any
            return
        self._scheduler.set_ranks(
            [rank.objects for rank in ranks],
            min(rank.ready_slots for rank in ranks),
            max(rank.least_width for rank in ranks),
        )

    def set_xfer_handshake_metadata(self, metadata: dict[int, LamellaHandshake]) -> None:
        """As `set_xfer_handshake_metadata_pp_aware`, with one stage."""
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): one for rank, one in metadata.items()})

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """The block pool of whose prefix cache blocks are evicted; 0.32 calls this through `bind_kv_cache_manager`."""
        self._scheduler.bind_block_pool(gpu_block_pool)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond the engine's own hit; (None, False): ask again later."""
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has blocks; a load is ordered if there is something to load."""
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> LamellaOrders:
        """The step's orders; the last step's, where both have nothing to do."""
        orders = self._scheduler.step_orders(scheduler_output)
        if self.settings.before_batch and orders.loads and runner_writes_blocks(scheduler_output):
            orders = replace(orders, runner_writes=True)
        if orders is not self._orders.orders:
            self._orders = LamellaOrders(orders)
        return self._orders

    def update_connector_output(self, connector_output: Any) -> None:
        """The workers' reports are taken in; `connector_output`, which vLLM reads next, keeps what it may act on."""
        meta = connector_output.kv_connector_worker_meta
        self._scheduler.step_done(connector_output, meta.report if isinstance(meta, LamellaReport) else None)

    def request_finished(self, request: Any, block_ids: Sequence[int]) -> tuple[bool, dict[str, Any] | None]:
        """Whether the request's blocks are held until its id is reported."""
        return self._scheduler.request_ended(request), None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[Sequence[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`."""
        return self._scheduler.request_ended(request), None

    def has_pending_push_work(self) -> bool:
        """Whether an engine with nothing to compute must go on stepping: somebody's blocks wait to be reported."""
        return self.scheduler is not None and self.scheduler.has_open_work

    def reset_cache(self) -> bool | None:
        """Nothing that was stored until now is found again; a file tier or a cache server keeps it for others.

        None on a worker, which has nothing to forget.
        """
        if self.scheduler is None:
            return None
        self.scheduler.reset()
        return True

    # ---- what can be seen

    def get_kv_connector_stats(self) -> LamellaStats | None:
        """Counters and durations since the last call, of this side."""
        side = self.worker or self.scheduler
        taken = side.metrics.take() if side is not None else {}
        return LamellaStats(data=taken) if taken else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> LamellaStats:
        """Stats as they come out of another process."""
        return LamellaStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> LamellaPromMetrics:
        """Prometheus metrics of every engine of this front end."""
        return LamellaPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
