"""The worker side: one rank's loads and stores, driven by vLLM's hooks, whatever moves their bytes (`Mover`).

It decides nothing about what is cached: slots and block tables come with each step's orders, and what has ended goes
back with each step's report. It runs on the model runner's thread; bytes move on native threads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from lamella.connector.back_end import back_end_of
from lamella.connector.cache_shapes import DescribedCaches, GroupShape, describe_caches
from lamella.connector.captured_waits import CapturedWaits
from lamella.connector.connector_metrics import Metrics
from lamella.connector.engine_facts import is_taken_back_whole
from lamella.connector.mover import Mover, PoolMover, RankPlace
from lamella.connector.observations import Observations, marks_of
from lamella.connector.safety_rules import ALL_RULES, SafetyRules
from lamella.connector.slice_width import choose_width, planned_slices
from lamella.connector.step_orders import LoadOrder, StepOrders, StepReport
from lamella.connector.tier_prefetch import RankObjects
from lamella.connector.vllm_settings import ConnectorSettings
from lamella.connector.worker_loads import WorkerLoads
from lamella.cuda_ext.device import Device
from lamella.cuda_ext.engine import TransferEngine
from lamella.cuda_ext.shared_memory import HostMemory
from lamella.cuda_ext.slots import SlotMemory, SlotShape
from lamella.cuda_ext.transfer import Arriving
from lamella.reference.keys import KeySpace
from lamella.reference.slices import Slice, plan_slices

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)
_GIB: Final = 1 << 30
_STORE_FLUSH_S: Final = 10.0
_UNDRAINED: Final[list[Mover]] = []
"""Whose device may still read and write their host memory, which is unmapped with them."""


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What a worker must know of its place.

    Attributes:
        groups: the engine's KV cache groups.
        space: key space of the engine; this rank's own puts rank, layers, form and inner layout in.
        tp_rank: this rank's share of the heads.
        first_layer: model layer of this stage's first.
        full_graphs: batches that are replayed as one captured graph: "", "decode" or "any".
        recomputes_windows: as the scheduler side's, see `EngineFacts`.
        engine: name of the engine, the same for all of its ranks and no other's.
        rank, num_ranks: counted over the engine.
    """

    groups: tuple[GroupShape, ...]
    space: KeySpace
    tp_rank: int
    first_layer: int
    full_graphs: str = ""
    recomputes_windows: bool = False
    engine: str = ""
    rank: int = 0
    num_ranks: int = 1

    @property
    def is_taken_back_whole(self) -> bool:
        """As the scheduler side's."""
        return is_taken_back_whole(len(self.groups), self.recomputes_windows)


def _check_release(settings: ConnectorSettings, num_layers: int) -> None:
    try:
        settings.release_policy.layers_needed(num_layers)
    except ValueError as error:
        raise ValueError(f"release {settings.release} on a rank of {num_layers} layers: {error}; name fewer") from error


class WorkerSide:
    """See the module.

    Args:
        settings: the connector's.
        facts: of this rank.
        caches: every layer's cache tensor by name, in layer order.
        rules: all of them, outside tests.
        engine_options: for the transfer engine, in tests.

    Raises:
        ValueError: caches that no known layout fits, a release that waits for more layers than there are, a host pool
            too small for one object, or no server in its folder.
        LibraryMissingError, RuntimeError, OSError: no native library, no device, or no memory.
    """

    def __init__(
        self,
        settings: ConnectorSettings,
        facts: RankFacts,
        caches: Mapping[str, torch.Tensor],
        rules: SafetyRules = ALL_RULES,
        engine_options: Mapping[str, Any] | None = None,
    ) -> None:
        from lamella.cuda_ext.torch import device_of

        self._settings = settings
        self._rank = facts.rank
        self.tensors = dict(caches)
        """The caches, which outlive every transfer."""
        self.metrics = Metrics()
        self.caches: DescribedCaches = describe_caches(
            caches, facts.groups, facts.space.chunk_tokens, settings.object_form
        )
        layout = self.caches.layout
        self._device = device_of(list(caches.values()))
        choice = choose_width(settings.layers_per_slice, layout)
        self.least_width = choice.width if isinstance(choice.width, int) and settings.is_auto else 1
        """Under `auto`, the narrowest slices that copy near the rate of the wire."""
        self.slices = plan_slices(layout.num_layers, choice.width)
        _log.info("%s: %d slices of %d layers, %s", self._device, len(self.slices), layout.num_layers, choice.reason)
        _check_release(settings, layout.num_layers)
        self._space = replace(
            facts.space,
            form=layout.form,
            inner_layout=self.caches.inner,
            tp_rank=facts.tp_rank,
            layers=(facts.first_layer, facts.first_layer + layout.num_layers),
        )
        place = RankPlace(
            settings,
            self._space,
            self.caches,
            self._device,
            self._stream,
            facts.engine,
            facts.rank,
            facts.num_ranks,
            engine_options or {},
        )
        self.mover = back_end_of(settings).mover(place, self._make_memory)
        """What moves the bytes, and knows where the objects are."""
        self._observations: Observations | None = None
        if settings.needs_forecast:
            sees_landings = self.mover.engine is not None  # a server that moves them is looked at once a step
            self._observations = Observations(marks_of(self._device), sees_landings=sees_landings)
        self._by_request = facts.is_taken_back_whole
        self._layerwise = choice.layerwise
        self.captured: CapturedWaits | None = None
        """Waits inside captured graphs, where they are asked for."""
        if facts.full_graphs and settings.waits_in_forward and settings.full_graphs == "inside":
            assert self.mover.engine is not None, "the settings refuse it with a server"
            self.captured = CapturedWaits(
                self.mover.engine,
                layout.num_layers,
                self._stream,
                self._is_capturing,
                facts.full_graphs == "any",
                self.metrics,
            )
        self.loads = WorkerLoads(
            self._submit_load,
            layout.num_layers,
            settings.release_policy,
            self.caches.block_tokens[0][0],
            sum(group.geometry.token_bytes for group in layout.groups),
            settings.wait_timeout_s,
            self._stream,
            rules,
            self.metrics,
            self._by_request,
            self.mover.executor,
            observer=self._observations,
            captured=self.captured,
        )
        self.stores = self.mover.stores(self.slices, settings.use_layerwise and choice.layerwise, self.metrics)
        self._orders = StepOrders()
        self._seen: StepOrders | None = None
        self._received: set[str] = set()
        self._failed_requests: set[str] = set()
        self._report = StepReport()
        self._told_slots = 0
        self.needs_hooks = False
        """Whether the layers of the step under way must be told of: to wait for loads, or to let stores leave."""
        self._idle = False  # nothing is in flight or to be told, and the step under way brings nothing
        self._has_news = False

    def _make_memory(self, object_bytes: int) -> SlotMemory:
        shape = SlotShape(object_bytes, 1)
        num_slots = int(self._settings.host_pool_gib * _GIB) // shape.pitch_bytes
        if num_slots < 1:
            raise ValueError(
                f"host_pool_gib {self._settings.host_pool_gib} holds no object of {object_bytes} bytes: raise it, or "
                "lower chunk_tokens"
            )
        shape = SlotShape(object_bytes, num_slots)
        device = Device(self._device)
        try:
            memory = HostMemory.anonymous(shape.total_bytes)
            return SlotMemory(memory, shape, device.registrar(), numa_node=device.numa_node())
        except OSError as error:
            raise OSError(
                f"host_pool_gib {self._settings.host_pool_gib}, which each rank takes: {error}; lower it, or raise the "
                "limits that lamella doctor names"
            ) from error

    @property
    def objects(self) -> RankObjects:
        """How this rank names and sizes its objects."""
        return RankObjects(self._space.digest(), self.caches.layout.object_bytes)

    @property
    def engine(self) -> TransferEngine | None:
        """This process's own, where it moves the bytes."""
        return self.mover.engine

    @property
    def memory(self) -> SlotMemory:
        """The host pool.

        Raises:
            TypeError: the objects are kept elsewhere.
        """
        if not isinstance(self.mover, PoolMover):
            raise TypeError("this rank's objects are not in a pool of its own")
        return self.mover.memory

    @property
    def ready_slots(self) -> int:
        """Slots from 0 on that the scheduler side may use."""
        return self.mover.ready_slots

    # ---- the hooks, in the order of a step

    def see(self, orders: StepOrders) -> None:
        """Stores whose blocks the step writes have ended: at the first sight of its orders, and once.

        Under `before_batch` loads that it waits for begin.
        """
        if self._seen is orders:
            return
        self._seen = orders
        if orders.flushes:
            self.stores.flush(orders.flushes, _STORE_FLUSH_S)
        if self._settings.before_batch and not orders.runner_writes:
            self.loads.begin_joining(orders)

    def begin_step(self, orders: StepOrders) -> None:
        """The step's loads begin and its stores are known."""
        if self._seen is not orders:  # nearly always it is: what a quiet step costs is counted in calls
            self.see(orders)
        self._orders = orders
        if orders.stores or orders.fetches:
            self.stores.begin_step(orders.stores, orders.fetches)
        self.loads.begin_step(orders)
        self._idle = self.loads.is_quiet and not (orders.stores or self.stores.num_open or self._has_news)
        self.needs_hooks = not self._idle and (bool(self.loads.gated) or self.stores.wait_for_layers)
        if self._observations is not None:
            self._observations.step_begins(orders, waits=bool(self.loads.gated))

    def before_forward(self, *, replays: bool = False) -> None:
        """Where no layer will wait, all that the step must wait for has landed before it.

        Args:
            replays: the step is one captured graph.
        """
        if not self.loads.gated:
            return
        if replays:
            self.loads.replays()
        if (
            self.loads.hooks_bypassed
            or (self._settings.use_layerwise and not self._settings.waits_in_forward)
            or (self.loads.replayed and self.captured is None)
        ):
            self.loads.wait_whole()

    def wait_layer(self, name: str) -> None:
        """Every released load has landed in the layer of that name."""
        layer = self.caches.layers.get(name)
        if layer is None:
            return
        if self.captured is not None and self.captured.is_capturing():
            self.captured.capture(layer)
        elif self.loads.gated:
            self.loads.wait_layer(layer)

    def layer_computed(self, name: str) -> None:
        """The layer's KV of this step is in its blocks."""
        layer = self.caches.layers.get(name)
        if layer is not None:
            self.stores.layer_computed(layer)

    def step_computed(self) -> None:
        """The forward pass was launched: its loads have ended, and stores leave unless their blocks have failed.

        With speculative decoding vLLM's first model runner asks for what has `finished` before it says this.
        """
        if self._observations is not None:
            self._observations.step_computed()
        self._take_in()
        if not self._idle and self.stores.wait_for_step:
            self.stores.step_computed(self.loads.spoils)

    def finished(self) -> tuple[set[str], set[str]]:
        """(requests received, those of them that failed), each once."""
        self._take_in()
        received, self._received = self._received, set()
        failed, self._failed_requests = self._failed_requests, set()
        return received, failed if self._by_request else set()

    def errors(self) -> set[int]:
        """Blocks whose load failed, to report in this step."""
        return set() if self._idle else self.loads.errors()

    def report(self) -> StepReport | None:
        """What has ended since the last report; None if nothing has and nobody asked."""
        report, ready_slots = self._report, self.mover.ready_slots
        nobody_asked = ready_slots == self._told_slots and not self._orders.wants_report
        if self._idle and nobody_asked and self._observations is None:
            return None
        if self._observations is not None:
            report.observed = self._observations.take()
        if report.is_empty and nobody_asked:
            self._has_news = False
            return None
        report.ready_slots[self._rank] = self._told_slots = ready_slots
        report.releases_whole = self.loads.hooks_bypassed
        self._report, self._has_news = StepReport(), False
        return report

    def _take_in(self) -> None:
        if self.loads.gated:
            self.loads.settle()
        self.mover.look()
        if self._idle:
            return
        self._has_news = True
        if not self.loads.is_quiet:
            polled = self.loads.poll()
            self.mover.loads_ended(polled.ended)
            self._received |= polled.received
            self._failed_requests |= polled.failed
            self._report.loads.update(polled.ended)
        if self.stores.num_open or self._orders.stores:
            stores, puts, fetches = self.stores.poll()
            self._report.stores.update(stores)
            self._report.puts.update(puts)
            self._report.fetches.update(fetches)

    # ---- transfers

    def _submit_load(self, order: LoadOrder) -> Callable[[], Arriving]:
        return self.mover.load(order, self._slices_of(order))

    def _slices_of(self, order: LoadOrder) -> tuple[Slice, ...]:
        width = None if order.plan is None else order.plan.width
        if width is None:
            return self.slices
        return planned_slices(self.caches.layout.num_layers, width)

    def _stream(self) -> int:
        if not self._device.startswith("cuda"):
            return 0
        from lamella.cuda_ext.torch import current_stream

        return current_stream(self._device)

    def _is_capturing(self) -> bool:
        if not self._device.startswith("cuda"):
            return False
        import torch

        return bool(torch.cuda.is_current_stream_capturing())

    # ---- the end

    def close(self) -> None:
        """Stores have ended, a tier has kept them, loads were cancelled; threads ended, memory given back."""
        self.loads.close()
        try:
            self.stores.drain(_STORE_FLUSH_S)
        except TimeoutError as error:
            _log.error("stores are lost: %s", error)
        self.stores.close()
        try:
            self.mover.close()
        except TimeoutError as error:  # if it were raised, vLLM would keep this connector for the process's next engine
            _log.error("%s: %s; the memory of its transfers stays taken", self._device, error)
            _UNDRAINED.append(self.mover)
