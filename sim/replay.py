"""A trace replayed through the world, once for each strategy, on the same instances with the same hits.

An instance is a `World` of its own; `lamella.sim.routing` has settled before which requests it gets and what its pools
hold of them. Stores use the other direction of the link and are not simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from lamella.reference.ordering import Fifo, RoundRobin
from lamella.reference.release import First, JustInTime
from lamella.reference.slices import plan_slices
from lamella.reference.timeline import NOTHING_TO_LOAD, Load
from lamella.sim.outcome import ArmResult, Tally, judge
from lamella.sim.parallel import Running, run_cells
from lamella.sim.request_table import request_rows
from lamella.sim.routing import BLOCK_TOKENS, RoutedRequest, Routing
from lamella.sim.scheduler import Request
from lamella.sim.serving import Slo
from lamella.sim.strategies import AUTO, CHUNK_MAJOR, IN_TURN, RECOMPUTE, Device, Strategy
from lamella.sim.world import RequestRecord, World

SLICE_WIRE_NS: Final = 500_000
"""`width=None` gives a load slices of at least this much wire time: two of them are the millisecond that may be in
flight, and a short hit is not cut into crumbs."""

ARMS: Final = (
    CHUNK_MAJOR,
    Strategy(1, Fifo(), First()),
    Strategy(1, Fifo(), JustInTime(None)),
    AUTO,
    Strategy(1, RoundRobin(), First()),
    RECOMPUTE,
    IN_TURN,
)
"""What a replay compares; the width of the layerwise ones is the replay's. Of equal ones the first is named, so the
control arms stand behind those that must beat them: interleaving, and what `auto` gains without any layers."""


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


def run_arm(
    strategy: Strategy,
    routing: Routing,
    device: Device,
    width: int | None = None,
    on_finish: Callable[[RequestRecord], object] | None = None,
    slo: Slo | None = None,
) -> ArmResult:
    """The routed trace served by that strategy.

    Args:
        width: layers per slice of a layerwise strategy, in place of its own; None for as many as `SLICE_WIRE_NS` asks
            for.
        on_finish: called as requests are completed, instance after instance.
        slo: what counts as goodput; None: every answer does.

    Raises:
        ValueError: a width outside 1 .. layers.
    """
    loader = _Loader(device, strategy, width)
    tally = Tally(loader.alone_ns, slo)
    for instance in range(routing.num_instances):
        mine, world = _serve(loader, routing, instance, on_finish, keep=False)
        tally.add(world, mine)
    return tally.result(loader.name)


class ReplaySetting(NamedTuple):
    """What the cells of a replay share."""

    routing: Routing
    device: Device
    width: int | None
    slo: Slo
    keep_rows: bool


class ReplayCell(NamedTuple):
    """One instance under one strategy."""

    strategy: Strategy
    instance: int


def _replay_cell(shared: ReplaySetting, cell: ReplayCell, seed: int) -> dict[str, Any]:
    """What one instance makes of its part of the trace; nothing in it is random."""
    routing, device, width, slo, keep_rows = shared
    loader = _Loader(device, cell.strategy, width)
    mine, world = _serve(loader, routing, cell.instance, None, keep=False)
    tally = Tally(loader.alone_ns, slo)
    tally.add(world, mine)
    return {"tally": tally.document(), "rows": request_rows(loader.name, world.records) if keep_rows else []}


class ReplayCells(NamedTuple):
    """A replay computed in cells: the result, every time to first token by arm, and rows for a table if asked for."""

    result: ReplayResult
    ttft_ns: dict[str, tuple[int, ...]]
    rows: list[tuple[Any, ...]]


def plan_replay(routing: Routing) -> list[ReplayCell]:
    """The cells of a replay: every instance under every arm."""
    return [ReplayCell(strategy, instance) for strategy in ARMS for instance in range(routing.num_instances)]


def replay_cells(setting: ReplaySetting, how: Running | None = None) -> ReplayCells:
    """All arms over the routed trace, an instance a cell; `how` says where.

    Raises:
        ValueError: a width outside 1 .. layers.
        JournalError, ImportError, OSError: as `run_cells`.
    """
    routing, device, width, slo, _ = setting
    tallies = {strategy: Tally(lambda request: 0, slo) for strategy in ARMS}
    names = {strategy: name_arm(strategy, device, width) for strategy in ARMS}
    rows: list[tuple[Any, ...]] = []
    cells = plan_replay(routing)
    for cell, answer in zip(cells, run_cells(_replay_cell, setting, cells, 0, how), strict=True):
        tallies[cell.strategy].absorb(answer["tally"])
        rows += map(tuple, answer["rows"])
    results = tuple(tallies[strategy].result(names[strategy]) for strategy in ARMS)
    ttft_ns = {names[strategy]: tally.ttft_ns for strategy, tally in tallies.items()}
    return ReplayCells(ReplayResult(routing, results, _verdict(results)), ttft_ns, rows)


def _verdict(results: Sequence[ArmResult]) -> str:
    layerwise = [result for strategy, result in zip(ARMS, results, strict=True) if strategy.layerwise]
    auto, in_turn = (results[ARMS.index(strategy)] for strategy in (AUTO, IN_TURN))
    return judge(results[ARMS.index(CHUNK_MAJOR)], layerwise, {auto.arm: in_turn})


def record_instance(
    strategy: Strategy, routing: Routing, device: Device, instance: int, width: int | None = None
) -> World:
    """The world of one instance after it has served its part, with all that a recording needs kept.

    Raises:
        ValueError: a width outside 1 .. layers, or no such instance.
    """
    if not 0 <= instance < routing.num_instances:
        raise ValueError(f"instance must be between 0 and {routing.num_instances - 1}, got {instance}")
    return _serve(_Loader(device, strategy, width), routing, instance, None, keep=True)[1]


def name_arm(strategy: Strategy, device: Device, width: int | None = None) -> str:
    """The name that an arm of that strategy has in a result."""
    return _Loader(device, strategy, width).name


def _serve(
    loader: _Loader,
    routing: Routing,
    instance: int,
    on_finish: Callable[[RequestRecord], object] | None,
    *,
    keep: bool,
) -> tuple[list[RoutedRequest], World]:
    """An instance's requests, and its world after it has served them."""
    mine = [request for request in routing.requests if request.instance == instance]
    world = loader.world(on_finish, keep=keep)
    for request in mine:
        world.arrive_at(request.arrival_ns, loader.request(request))
    world.run()
    return mine, world


class _Loader:
    """Turns routed requests into the world's, with loads in slices of a given width or of the least that is allowed."""

    def __init__(self, device: Device, strategy: Strategy, width: int | None) -> None:
        self._device = device
        self._strategy = strategy
        self._width = width
        self._loads: dict[int, Load] = {}
        if width is not None:
            plan_slices(device.profile.num_layers, width)  # an impossible width is refused before anything runs
        self.name = str(strategy)
        if strategy.layerwise and not strategy.chooses:
            self.name = f"{strategy.order.name}/{'auto' if width is None else width}/{strategy.release}"

    def world(self, on_finish: Callable[[RequestRecord], object] | None, *, keep: bool) -> World:
        """An instance of the strategy, nothing in it yet."""
        device, strategy = self._device, self._strategy
        return World(
            device.compute(strategy),
            strategy.order,
            strategy.release,
            replace(device.settings(), kv_blocks=device.profile.engine.kv_capacity_tokens // BLOCK_TOKENS),
            on_finish=on_finish,
            keep_steps=keep,
            keep_slices=keep,
            make_engine=device.engine(strategy),
        )

    def alone_ns(self, routed: RoutedRequest) -> int:
        """What the request's time to first token would be on an idle instance, without overlap."""
        if self._strategy.loads:
            return routed.alone_ns
        prompt = routed.cached_tokens + routed.new_tokens
        return self._device.profile.engine.admit_ns(prompt) + self._device.prefill_ns(0, prompt)

    def request(self, routed: RoutedRequest) -> Request:
        """The request as the world gets it."""
        prompt = routed.cached_tokens + routed.new_tokens
        cached = routed.cached_tokens if self._strategy.loads else 0
        return Request(
            cached,
            prompt - cached,
            routed.output_tokens,
            self._load(routed.loaded_tokens) if cached else NOTHING_TO_LOAD,
            tag=routed.position,
            admission_ns=self._device.profile.engine.admit_ns(prompt),
        )

    def _load(self, tokens: int) -> Load:
        if tokens == 0:
            return NOTHING_TO_LOAD
        if tokens not in self._loads:
            self._loads[tokens] = self._device.load(tokens, self._with_width(tokens))
        return self._loads[tokens]

    def _with_width(self, tokens: int) -> Strategy:
        if not self._strategy.layerwise or self._strategy.chooses:
            return self._strategy
        width = self._width
        if width is None:
            layers = self._device.profile.num_layers
            width = min(layers, -(-SLICE_WIRE_NS * layers // self._device.transfer_ns(tokens)))
        return replace(self._strategy, width=width)
