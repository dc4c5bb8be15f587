"""Which instance serves a request of a trace, and how much of its prompt that instance's pool holds.

Both are settled before anything is simulated, from arrivals, hashes and the profile's estimates alone, so that every
policy is given the same requests, instances and hits, and only the policy differs.

The rule: a request goes to the instance that holds the longest prefix of its prompt, among those whose estimated
backlog is within `MAX_BACKLOG_GAP_NS` of the least; ties go to the least backlog, then the lowest number. Its whole
chunks enter that instance's pools when an estimate says that its prefill is done; a hit is used, and becomes the most
recent, when its request arrives. Hits are whole engine blocks and never the last token.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from lamella.sim.host_pool import PrefixPool
from lamella.sim.strategies import CHUNK_MAJOR, Device
from lamella.sim.workload import TRACE_CHUNK_TOKENS, TraceRequest

BLOCK_TOKENS: Final = 16
MAX_BACKLOG_GAP_NS: Final = 2_000_000_000
NOMINAL_DECODE_BATCH: Final = 16
"""The batch over which an estimate spreads what a decode step costs whoever is in it."""
TARGET_LOAD: Final = 0.5
"""`choose_instances` adds instances until the busier of GPU and link is estimated to be this busy."""
MAX_INSTANCES: Final = 1024


class RoutedRequest(NamedTuple):
    """A request with its instance and its hit.

    Attributes:
        position: its place in the trace, from 0.
        cached_tokens: prompt tokens that need not be computed.
        loaded_tokens: those of them that come from the host pool over the link.
        alone_ns: estimate of its time to first token on an idle instance, loading chunk-major.
    """

    position: int
    instance: int
    arrival_ns: int
    cached_tokens: int
    loaded_tokens: int
    new_tokens: int
    output_tokens: int
    alone_ns: int


class ExcludedRequest(NamedTuple):
    """A request that is not simulated, because the profile was not measured there, or because it never fits."""

    position: int
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Routing:
    """A trace, distributed.

    Attributes:
        num_instances: how many serve it.
        requests: those inside the profile's domain that fit into an engine, by arrival.
        excluded: the others.
        span_ns: from the first arrival to the last.
        gpu_load: estimated busy share of an instance's GPU, instances taken together.
        link_load: the same of its link to the GPU.
    """

    num_instances: int
    requests: tuple[RoutedRequest, ...]
    excluded: tuple[ExcludedRequest, ...]
    span_ns: int
    gpu_load: float
    link_load: float

    @property
    def hit_share(self) -> float:
        """Cached prompt tokens over all prompt tokens."""
        cached = sum(request.cached_tokens for request in self.requests)
        return cached / max(1, cached + sum(request.new_tokens for request in self.requests))


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """What each instance holds of past prompts.

    Attributes:
        host_bytes: pool in host memory; its hits are loaded over the link.
        gpu_bytes: the engine's own prefix cache; its hits are there already.

    Raises:
        ValueError: a negative size.
    """

    host_bytes: int
    gpu_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("host_bytes", "gpu_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")


def route(trace: Sequence[TraceRequest], device: Device, num_instances: int, sizes: PoolSizes) -> Routing:
    """The trace over that many instances, by the rule of this module.

    Raises:
        ValueError: instances outside 1 .. MAX_INSTANCES.
    """
    if not 1 <= num_instances <= MAX_INSTANCES:
        raise ValueError(f"instances must be between 1 and {MAX_INSTANCES}, got {num_instances}")
    profile = device.profile
    chunk_bytes = TRACE_CHUNK_TOKENS * profile.token_bytes
    instances = [
        _Instance(PrefixPool(sizes.host_bytes, chunk_bytes), PrefixPool(sizes.gpu_bytes, chunk_bytes))
        for _ in range(num_instances)
    ]
    filling: list[tuple[int, int, tuple[int, ...]]] = []  # (instant, instance, chunks) still to enter a pool
    routed: list[RoutedRequest] = []
    excluded: list[ExcludedRequest] = []
    gpu_ns = loaded_bytes = 0
    for position, request in enumerate(trace):
        now = request.arrival_ns
        while filling and filling[0][0] <= now:
            _, number, chunks = heapq.heappop(filling)
            instances[number].insert(chunks)
        room = profile.engine.kv_capacity_tokens // BLOCK_TOKENS * BLOCK_TOKENS
        fits = request.input_tokens + request.output_tokens <= room
        if not fits or not profile.covers(0, request.input_tokens, request.output_tokens):
            excluded.append(ExcludedRequest(position, request.input_tokens, request.output_tokens))
            continue
        chunks = request.whole_chunks
        number = _choose(instances, chunks, now)
        instance = instances[number]
        usable = (request.input_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        cached, here = (min(held * TRACE_CHUNK_TOKENS, usable) for held in instance.use(chunks))
        new = request.input_tokens - cached
        prefill = device.prefill_ns(cached, new)
        begin = max(now, instance.free_ns)
        instance.free_ns = begin + prefill + _decode_share_ns(device, request.input_tokens, request.output_tokens)
        heapq.heappush(filling, (begin + prefill, number, chunks))
        gpu_ns += instance.free_ns - begin
        alone = profile.engine.admit_ns(request.input_tokens) + device.transfer_ns(cached - here) + prefill
        loaded_bytes += (cached - here) * profile.token_bytes
        routed.append(RoutedRequest(position, number, now, cached, cached - here, new, request.output_tokens, alone))
    span = max(1, trace[-1].arrival_ns - trace[0].arrival_ns) if trace else 1
    link_ns = loaded_bytes * 1e9 / profile.wire.h2d_bytes_per_s
    share = 1 / (span * num_instances)
    return Routing(num_instances, tuple(routed), tuple(excluded), span, gpu_ns * share, link_ns * share)


def choose_instances(trace: Sequence[TraceRequest], device: Device, sizes: PoolSizes) -> Routing:
    """The routing over the fewest tried instances that are estimated to be busy for at most `TARGET_LOAD`.

    Raises:
        ValueError: more than MAX_INSTANCES would be needed.
    """
    if len(trace) < 2:
        return route(trace, device, 1, sizes)
    num_instances = 1
    while True:
        routing = route(trace, device, num_instances, sizes)
        load = max(routing.gpu_load, routing.link_load)
        if load <= TARGET_LOAD:
            return routing
        # Nine tenths of the step that the load asks for: more instances have more pool, so the next load is lower.
        num_instances = max(num_instances + 1, math.floor(0.9 * num_instances * load / TARGET_LOAD))
        if num_instances > MAX_INSTANCES:
            raise ValueError(
                f"a load of {TARGET_LOAD:.0%} would take more than {MAX_INSTANCES} instances; "
                "name a number of instances, or let requests arrive more slowly (timestamps are milliseconds)"
            )


class _Instance:
    """What the router knows of an instance: its pools, and when it has done what it was given so far."""

    __slots__ = ("_gpu", "_host", "free_ns")

    def __init__(self, host: PrefixPool, gpu: PrefixPool) -> None:
        self._host = host
        self._gpu = gpu
        self.free_ns = 0

    def held_prefix(self, chunks: Sequence[int]) -> int:
        """Chunks of the prompt's beginning in either pool."""
        return max(self._host.held_prefix(chunks), self._gpu.held_prefix(chunks))

    def use(self, chunks: Sequence[int]) -> tuple[int, int]:
        """(chunks of the prompt's beginning in either pool, those on the GPU); both pools note the use."""
        on_gpu = self._gpu.use(chunks)
        return max(self._host.use(chunks), on_gpu), on_gpu

    def insert(self, chunks: Sequence[int]) -> None:
        """The prompt has been computed: both pools have it, as far as they reach."""
        self._host.insert(chunks)
        self._gpu.insert(chunks)


def _choose(instances: Sequence[_Instance], chunks: Sequence[int], now_ns: int) -> int:
    latest = max(now_ns, min(instance.free_ns for instance in instances)) + MAX_BACKLOG_GAP_NS
    open_to = [number for number, instance in enumerate(instances) if instance.free_ns <= latest]
    if len(open_to) == 1:
        return open_to[0]
    return min(open_to, key=lambda i: (-instances[i].held_prefix(chunks), max(now_ns, instances[i].free_ns), i))


def _decode_share_ns(device: Device, prompt_tokens: int, output_tokens: int) -> int:
    """What a request's decoding costs its instance: its share of the steps of a nominal batch of its like."""
    batch = NOMINAL_DECODE_BATCH
    steps = device.compute(CHUNK_MAJOR).decode_ns(batch, batch * prompt_tokens, output_tokens - 1)
    return steps // batch
