"""What a concurrency run keeps in each worker process of an engine: kept host memory, the exchange's half, the probe's.

With one rank the worker is this process, with tensor parallelism each is a process of its own; either way everything
here is called through the engine's executor, on the worker's own thread between two steps:

    executor.collective_rpc(call, args=("exchange", settings))       one reply a rank, in rank order
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from concurrency.graph_choice import FULL, GraphChoice
from concurrency.host_cores import HostCores, cores_near
from concurrency.kept_pool import KeptPool, keep_pool
from concurrency.probe import RankProbe

_CONTROL_GB_PER_S: Final = 5.0
"""The control that reads early gets its KV so slowly that layers are read before they have landed."""
_WINDOW_S: Final = 0.002
_LATE_WINDOW_S: Final = 0.02
"""Between windows of a slower link on the CPU device, and of the control's there."""


@dataclass(frozen=True, slots=True)
class RankSettings:
    """A connector to be exchanged for, as every rank hears of it.

    Attributes:
        extra: `kv_connector_extra_config`.
        obeys_waits: false only in the control that reads early on purpose.
        tier_gb_per_s: a slower link; None: the wire as it is.
        tiny: on the CPU device.
        layers_timed: whether each layer's wait is timed on the stream.
        graphs: which steps replay captured graphs, see `GraphChoice`.
        begins_in_thread: a thread in Python begins the loads.
    """

    extra: Mapping[str, Any]
    obeys_waits: bool
    tier_gb_per_s: float | None
    tiny: bool
    layers_timed: bool
    graphs: str = "piecewise"
    begins_in_thread: bool = False

    @property
    def gb_per_s(self) -> float | None:
        """The rate of the link; None: as it is."""
        return self.tier_gb_per_s if self.obeys_waits else _CONTROL_GB_PER_S

    def config_of(self, engine_config: Any) -> Any:
        """The engine's configuration with these settings in it; the engine's own stays as it is."""
        config = copy.copy(engine_config)
        config.kv_transfer_config = copy.copy(config.kv_transfer_config)
        config.kv_transfer_config.kv_connector_extra_config = dict(self.extra)
        mode = config.compilation_config.cudagraph_mode
        if self.graphs not in FULL and mode is not None and mode.has_full_cudagraphs():  # captured, and not replayed
            config.compilation_config = copy.copy(config.compilation_config)
            config.compilation_config.cudagraph_mode = type(mode).PIECEWISE
        return config

    @contextmanager
    def seams(self) -> Iterator[None]:
        """Connectors made meanwhile obey the rules asked for, on the link asked for."""
        from lamella.connector.safety_rules import SafetyRules
        from lamella.connector.vllm import LamellaConnector

        LamellaConnector._rules = SafetyRules(wait_for_released=self.obeys_waits)
        LamellaConnector._engine_options = _tier_options(self.gb_per_s, self.tiny)
        try:
            yield
        finally:
            LamellaConnector._rules, LamellaConnector._engine_options = SafetyRules(), {}


class Rank:
    """One rank's half of a run; see the module.

    Args:
        worker: vLLM's.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._graphs: GraphChoice | None = None
        self._probe = RankProbe(None)
        self._pool: KeptPool | None = None
        self._tensors: dict[str, Any] = {}
        self._cores = HostCores((), "none were given")

    @property
    def _connector(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()

    def keep_pool(self, num_bytes: int) -> int:
        """Connectors made from now on take their host memory from one that is kept; returns its bytes."""
        self._pool = KeptPool(self._connector.worker._device, num_bytes)
        keep_pool(self._pool)
        return self._pool.num_bytes

    def watch(self, on_cuda: bool) -> None:
        """Steps are timed on the device too."""
        import torch

        self._probe = RankProbe(torch if on_cuda else None)

    def near_cores(self) -> tuple[int, ...]:
        """The logical cores near this rank's device; empty where that is not known."""
        return cores_near(str(self._worker.device))

    def take_cores(self, shares: Sequence[Sequence[tuple[int, ...]]], why_not: str) -> None:
        """This process has its rank's share, from `choose_cores` on; an empty one: as it is, for that reason."""
        self._cores = HostCores(shares[self._worker.rank], why_not)

    def choose_cores(self) -> None:
        """This thread, which launches, has the quickest core of the share, and this process's others the rest."""
        self._cores.choose()

    def give_up_slow_core(self, limit_us: float) -> None:
        """See `HostCores.give_up_slow`."""
        self._cores.give_up_slow(limit_us)

    def look_at_core(self) -> float | None:
        """See `HostCores.look`."""
        return self._cores.look()

    def facts_of_cores(self) -> dict[str, Any]:
        """See `HostCores.facts`."""
        return self._cores.facts()

    def exchange(self, settings: RankSettings) -> tuple[int, Any]:
        """The rank's connector is another one; its rank, and what it tells the scheduler side."""
        with self._cores.shared():
            return self._exchange(settings)

    def _exchange(self, settings: RankSettings) -> tuple[int, Any]:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        held = self._connector
        config = settings.config_of(held._vllm_config)
        if held.worker is not None:  # none is left where the exchange before failed
            self._tensors = held.worker.tensors
            held.worker.close()
        with settings.seams():  # anew in its place: vLLM holds the object itself
            held.__init__(config, KVConnectorRole.WORKER, held._kv_cache_config)
            held.register_kv_caches(self._tensors)
        handshake = held.get_handshake_metadata()
        assert handshake is not None
        if settings.tiny and settings.gb_per_s is not None:
            period_s = _WINDOW_S if settings.obeys_waits else _LATE_WINDOW_S
            threading.Thread(target=_let_windows_move, args=(held.worker.engine, period_s), daemon=True).start()
        if settings.begins_in_thread:
            thread = ThreadPoolExecutor(1, thread_name_prefix="begins-loads")
            thread.submit(int).result()  # it is there, with the cores of threads that are made now
            held.worker.loads._executor = thread
        if self._graphs is None:
            self._graphs = GraphChoice(self._worker.model_runner)
        self._graphs.choose(settings.graphs)
        self._probe.layers_timed = settings.layers_timed
        self._probe.attach(held.worker)
        return config.parallel_config.rank, handshake

    def pause_garbage(self) -> None:
        """Nothing is collected until `resume_garbage`."""
        gc.collect()
        gc.disable()

    def resume_garbage(self) -> None:
        """Garbage is collected as before."""
        gc.enable()

    def freeze_garbage(self) -> None:
        """What is there now is not looked at again."""
        gc.collect()
        gc.freeze()

    def clear(self) -> None:
        """The probe has seen nothing."""
        self._probe.clear()

    def taken(self) -> dict[str, Any]:
        """What the probe has seen; waits for the device."""
        return self._probe.taken()

    def counters(self) -> dict[str, int]:
        """What this rank counted since the arm began."""
        return dict(self._connector.worker.metrics._total)

    def durations(self) -> dict[str, list[int]]:
        """What this rank timed since the arm began: observations, total and longest ns."""
        return {name: list(times) for name, times in self._connector.worker.metrics._times.items()}

    def peak_in_flight_bytes(self) -> int:
        """The most bytes that were enqueued at this rank's device since the arm began."""
        from lamella.reference.plan import Direction

        return int(self._connector.worker.engine.lane(Direction.RETRIEVE).peak_in_flight_bytes)


def call(worker: Any, name: str, *arguments: Any) -> tuple[str, Any]:
    """Why it failed, or "", and what `Rank`'s method of that name returns; a worker's `Rank` lives as long as it does.

    A failure is a reply like others: an executor that meets one reads no other rank's, and would take it for the next.
    """
    rank = worker.__dict__.get("_concurrency_rank")
    if rank is None:
        rank = worker.__dict__["_concurrency_rank"] = Rank(worker)
    try:
        return "", getattr(rank, name)(*arguments)
    except Exception:
        return traceback.format_exc(), None


class Ranks:
    """Every rank of an engine.

    Args:
        executor: the engine's.
    """

    def __init__(self, executor: Any) -> None:
        self._executor = executor

    def __call__(self, name: str, *arguments: Any) -> list[Any]:
        """Each rank's reply, in rank order.

        Raises:
            RuntimeError: it failed on a rank, with its traceback there.
        """
        replies: list[tuple[str, Any]] = self._executor.collective_rpc(call, args=(name, *arguments))
        for number, (failure, _reply) in enumerate(replies):
            if failure:
                raise RuntimeError(f"{name} failed on rank {number}:\n{failure}")
        return [reply for _failure, reply in replies]


_TIER_WINDOWS: Final = 8
"""In flight on a throttled link, so that a window's copy that comes late behind busy kernels holds up no other."""


def _tier_options(gb_per_s: float | None, tiny: bool) -> dict[str, Any]:
    """A lane that looks for its windows no sooner than that rate allows: a slower link.

    It looks when half of what is in flight should be there, finds all of it and lets as much follow; so it is told half
    the rate. A lane learns to look up to a tenth earlier than that. On the CPU windows move when they are let.
    """
    from lamella.cuda_ext.rates import H200_RATES

    if gb_per_s is None:
        return {}
    if tiny:
        return {"paced": True, "in_flight_bytes": 1, "window_bytes": 1 << 17}
    rates = dataclasses.replace(H200_RATES, wire_bytes_per_s=0.9e9 * gb_per_s / 2)
    window = (1 << 20) if gb_per_s < 10 else 4 << 20
    return {
        "rates": rates,
        "in_flight_bytes": _TIER_WINDOWS * window,
        "window_bytes": window,
        "gather_factor": 0.0,
    }


def _let_windows_move(engine: Any, period_s: float) -> None:
    """A window of 128 KiB each period, until the engine is closed."""
    from lamella.cuda_ext._engine_library import TransferStopped
    from lamella.reference.plan import Direction

    try:
        engine.grant(Direction.STORE, 1 << 40)
        while True:
            engine.grant(Direction.RETRIEVE, 1)
            time.sleep(period_s)
    except TransferStopped:
        return
