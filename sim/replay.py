"""A trace replayed through the world, once for each policy, on the same instances with the same hits.

An instance is a `World` of its own; `lamella.sim.routing` has settled before which requests it gets and what its host
pool holds of them. A request reaches its engine when the host side has admitted it (`EngineTimes.admit_ns`), and its
time to first token counts from its arrival in the trace. Loads are submitted at the engine's next poll, as vLLM does;
stores use the other direction of the link and are not simulated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from lamella.reference.ordering import Fifo, OrderPolicy, RoundRobin
from lamella.reference.profile import DeviceProfile, Graphs
from lamella.reference.release import First, JustInTime, ReleasePolicy, Whole
from lamella.reference.slices import Slice, plan_slices
from lamella.reference.timeline import NOTHING_TO_LOAD, Load
from lamella.sim.outcome import ArmResult, Tally, judge
from lamella.sim.routing import RoutedRequest, Routing
from lamella.sim.scheduler import EngineSettings, Request, SubmitAt
from lamella.sim.stations import plan_load
from lamella.sim.world import RequestRecord, World

SLICE_WIRE_NS: Final = 500_000
"""`width=None` gives a load slices of at least this much wire time: two of them are the millisecond that may be in
flight, and a short hit is not cut into crumbs."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to serve the trace.

    Attributes:
        name: in tables and JSON.
        order: whose slice the link carries next.
        release: when a request may run.
        layerwise: whether loads move in slices; else each is one slice of all layers.
        graphs: how the engine replays its steps; waits per layer need piecewise graphs.
        loads: False recomputes every hit.
    """

    name: str
    order: OrderPolicy
    release: ReleasePolicy
    layerwise: bool
    graphs: Graphs
    loads: bool = True


BASELINE: Final = Arm("chunk-major", Fifo(), Whole(), layerwise=False, graphs=Graphs.FULL)
ARMS: Final = (
    BASELINE,
    Arm("interleaved+first", RoundRobin(), First(), layerwise=True, graphs=Graphs.PIECEWISE),
    Arm("fifo+first", Fifo(), First(), layerwise=True, graphs=Graphs.PIECEWISE),
    Arm("fifo+jit", Fifo(), JustInTime(None), layerwise=True, graphs=Graphs.PIECEWISE),
    Arm("recompute", Fifo(), Whole(), layerwise=False, graphs=Graphs.FULL, loads=False),
)


def run_arm(
    arm: Arm,
    routing: Routing,
    profile: DeviceProfile,
    width: int | None = None,
    on_finish: Callable[[RequestRecord], object] | None = None,
) -> ArmResult:
    """The routed trace served by that arm.

    Args:
        width: layers a slice, in the arms that move slices; None for as many as `SLICE_WIRE_NS` asks for.
        on_finish: called as requests are completed, in no order between instances.

    Raises:
        ValueError: a width outside 1 .. layers.
    """
    compute = profile.compute(arm.graphs)
    settings = EngineSettings(
        idle_poll_ns=profile.engine.idle_poll_ns,
        token_budget=profile.engine.token_budget,
        max_batch=profile.max_batch,
        submit_at=SubmitAt.POLL,
    )
    loader = _Loader(profile, width if arm.layerwise else profile.num_layers)
    tally = Tally(arm.loads)
    for instance in range(routing.num_instances):
        mine = [request for request in routing.requests if request.instance == instance]
        world = World(compute, arm.order, arm.release, settings, on_finish=on_finish)
        for request in mine:
            prompt = request.cached_tokens + request.new_tokens
            world.arrive_at(request.arrival_ns + profile.engine.admit_ns(prompt), _as_request(request, arm, loader))
        world.run()
        tally.add(world, mine)
    return tally.result(arm.name)


class _Loader:
    """Loads of any length in slices of one width, or of the least width that `SLICE_WIRE_NS` allows."""

    def __init__(self, profile: DeviceProfile, width: int | None) -> None:
        self._wire = profile.wire
        self._num_layers = profile.num_layers
        self._layer_bytes = profile.token_bytes // profile.num_layers  # of one token
        self._width = width
        self._plans: dict[int, tuple[Slice, ...]] = {}
        self._loads: dict[int, Load] = {}
        if width is not None:
            self._slices(width)  # an impossible width is reported before anything runs

    def load(self, tokens: int) -> Load:
        """What the link carries for a hit of that many tokens."""
        known = self._loads.get(tokens)
        if known is not None:
            return known
        layer_bytes = tokens * self._layer_bytes
        width = self._width
        if width is None:
            layers = -(-SLICE_WIRE_NS * self._wire.h2d_bytes_per_s // (layer_bytes * 1_000_000_000))
            width = min(layers, self._num_layers)
        slices, wire = self._slices(width), self._wire
        load = plan_load(slices, layer_bytes, wire.h2d_bytes_per_s, wire.slice_fixed_ns)
        self._loads[tokens] = load
        return load

    def _slices(self, width: int) -> tuple[Slice, ...]:
        if width not in self._plans:
            self._plans[width] = plan_slices(self._num_layers, width)
        return self._plans[width]


def _as_request(request: RoutedRequest, arm: Arm, loader: _Loader) -> Request:
    cached, new, load = request.cached_tokens, request.new_tokens, NOTHING_TO_LOAD
    if not arm.loads:
        cached, new = 0, cached + new
    elif request.loaded_tokens:
        load = loader.load(request.loaded_tokens)
    return Request(cached, new, request.output_tokens, load, tag=request.position)


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """A trace replayed through all arms.

    Attributes:
        routing: instances, hits and what was left out.
        arms: one result for each of `ARMS`, in their order.
        verdict: one sentence.
    """

    routing: Routing
    arms: tuple[ArmResult, ...]
    verdict: str


def replay(
    routing: Routing,
    profile: DeviceProfile,
    width: int | None = None,
    on_finish: Callable[[RequestRecord], object] | None = None,
) -> ReplayResult:
    """All arms over the routed trace; arguments and errors as for `run_arm`."""
    results = tuple(run_arm(arm, routing, profile, width, on_finish) for arm in ARMS)
    layerwise = [result for arm, result in zip(ARMS, results, strict=True) if arm.layerwise]
    return ReplayResult(routing, results, judge(results[ARMS.index(BASELINE)], layerwise))
