"""What can be done about a cache hit, and a measured device to try it on.

A strategy says how a hit reaches the engine: as whole objects (chunk-major), slice by slice in some order with some
release rule, or not at all (recompute). The first and the last are what one has without layerwise transfer, so "leave
it off" means the better of these two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Final

from lamella.reference.auto import AutoPolicy
from lamella.reference.auto_view import Abilities
from lamella.reference.ordering import Fifo, OrderPolicy, RoundRobin, parse_order
from lamella.reference.profile import DeviceProfile, Graphs
from lamella.reference.release import First, JustInTime, ReleasePolicy, WeighedRelease, Whole, parse_release
from lamella.reference.slices import parse_width, plan_slices
from lamella.reference.tables import MeasuredCompute
from lamella.reference.timeline import NOTHING_TO_LOAD, Load, StepRule
from lamella.sim.ahead import AheadEngine
from lamella.sim.auto import AutoAheadEngine, AutoEngine
from lamella.sim.bounds import MOST_TOKENS, MOST_USERS, check_range
from lamella.sim.engine import Engine
from lamella.sim.hardware import Hardware
from lamella.sim.overheads import WHOLE, Overheads
from lamella.sim.scheduler import EngineSettings, Request, SubmitAt
from lamella.sim.stations import ComputeModel, plan_load

FULL_GRAPHS: Final = {"before": Graphs.FULL, "never": Graphs.PIECEWISE}
"""What steps that only decode replay where steps wait for layers, by the vLLM connector's setting of that name. Its
`inside` has no model."""

ANY_WAY: Final = Abilities()


@dataclass(frozen=True, slots=True)
class Strategy:
    """How a hit reaches the engine.

    Attributes:
        width: layers per slice, a schedule of widths, or None for all layers in one slice.
        order: whose slice the link carries next.
        release: when a request may run.
        loads: False computes the hit's tokens again and loads nothing.
        chooses: `auto`: for each request one of all these ways, by `lamella.reference.auto`.
        can: what it may choose from.
    """

    width: int | tuple[int, ...] | None
    order: OrderPolicy
    release: ReleasePolicy
    loads: bool = True
    chooses: bool = False
    can: Abilities = ANY_WAY

    @property
    def layerwise(self) -> bool:
        """Whether layers wait for their own slices, so that the layerwise transfer must be on."""
        return self.loads and (self.width is not None or self.waits)

    @property
    def waits(self) -> bool:
        """Whether steps may have to wait for layers."""
        return self.loads and not isinstance(self.release, Whole) and (self.can.early or self.can.sync)

    def __str__(self) -> str:
        if not self.loads:
            return "recompute"
        if self.chooses:
            return "auto" if self.waits else "chunk-major-in-turn"
        if self == CHUNK_MAJOR:
            return "chunk-major"
        width = "all" if self.width is None else ",".join(map(str, _as_tuple(self.width)))
        return f"{self.order.name}/{width}/{self.release}"


CHUNK_MAJOR: Final = Strategy(None, Fifo(), Whole())
RECOMPUTE: Final = Strategy(None, Fifo(), Whole(), loads=False)
INTERLEAVED: Final = Strategy(1, RoundRobin(), First())

AUTO: Final = Strategy(None, Fifo(), WeighedRelease(), chooses=True)
IN_TURN: Final = replace(AUTO, can=Abilities(early=False, sync=False, off=False))
"""`auto` that may only move whole objects. What is left of it is that hits take turns where prefills had better not
share a step, and what it gains has nothing to do with layers."""

OFF: Final = (CHUNK_MAJOR, RECOMPUTE)
"""What one has with layerwise transfer off."""

CANDIDATES: Final = (
    *OFF,
    Strategy(1, Fifo(), First()),
    Strategy(8, Fifo(), First()),
    Strategy(1, Fifo(), JustInTime()),
    Strategy(1, Fifo(), JustInTime(None)),
    AUTO,
    INTERLEAVED,
)
"""What is compared unless said otherwise; interleaving is the control arm."""


def parse_strategy(text: str) -> Strategy:
    """The strategy written as `chunk-major`, `recompute`, `auto`, or `order/width/release` such as `fifo/1/first`.

    Raises:
        ValueError: any other text, or an order, width or release that does not exist.

    >>> str(parse_strategy("shortest_remaining/1,1,2,4/jit:2ms")), str(parse_strategy("fifo/all/whole"))
    ('shortest_remaining/1,1,2,4/jit:2ms', 'chunk-major')
    """
    for known in (*OFF, AUTO):
        if text == str(known):
            return known
    parts = text.split("/")
    if len(parts) != 3:
        raise ValueError(
            f"a strategy is chunk-major, recompute, auto or order/width/release, such as fifo/1/first; got {text!r}"
        )
    order, width, release = parts
    return Strategy(None if width == "all" else parse_width(width), parse_order(order), parse_release(release))


@dataclass(frozen=True, slots=True)
class Regime:
    """A kind of load: so many users, whose prompts hit so many cached tokens and bring so many new ones.

    Raises:
        ValueError: a count below 1 (a regime without a hit has nothing to decide), or one beyond sense.
    """

    hit_tokens: int
    new_tokens: int
    concurrency: int
    output_tokens: int = 1

    def __post_init__(self) -> None:
        for name in ("hit_tokens", "new_tokens", "concurrency", "output_tokens"):
            check_range(name, getattr(self, name), 1, MOST_USERS if name == "concurrency" else MOST_TOKENS)


class Device:
    """A profile as the model needs it: loads, requests and step times of a strategy in a regime.

    Args:
        profile: the measured device.
        extrapolate: go on in straight lines where the profile was not measured; False refuses there.
        overheads: of an engine's host side, which then schedules ahead (`lamella.sim.ahead`); None: the bare device,
            whose steps follow each other.
        overheads_said: where those come from, in a sentence; empty without them.
        graphs: what steps that only decode replay where a strategy lets steps wait: full graphs, which wait in front of
            them, as by the vLLM connector's default; or piecewise ones, which wait layer by layer.
        before_batch: loads that join their own step begin before the host prepares its batch; of the bare device, which
            prepares none, it says nothing.
    """

    def __init__(
        self,
        profile: DeviceProfile,
        *,
        extrapolate: bool = False,
        overheads: Overheads | None = None,
        overheads_said: str = "",
        graphs: Graphs = Graphs.FULL,
        before_batch: bool = False,
    ) -> None:
        self.profile = profile
        self.extrapolate = extrapolate
        self.overheads = overheads
        self.overheads_said = overheads_said
        self.graphs = graphs
        self.before_batch = before_batch
        computing = profile
        for tokens, permille in overheads.prefill_rows if overheads is not None else ():
            computing = replace(computing, prefill=computing.prefill.with_row(tokens, permille / WHOLE))
        self._loads: dict[tuple[int, int | tuple[int, ...] | None], Load] = {}  # users ask for the same again and again
        self._compute = {graphs: computing.compute(graphs, extrapolate=extrapolate) for graphs in Graphs}

    def __repr__(self) -> str:
        said = f"extrapolate={self.extrapolate}, overheads={self.overheads!r}, graphs={self.graphs}"
        begun = ", before_batch=True" if self.before_batch else ""  # journals name devices by this
        return f"Device({self.profile!r}, {said}{begun})"

    def with_overheads(self, overheads: Overheads | None) -> Device:
        """The same device behind such a host; None: the bare device."""
        return Device(
            self.profile,
            extrapolate=self.extrapolate,
            overheads=overheads,
            graphs=self.graphs,
            before_batch=self.before_batch,
        )

    def check(self, regime: Regime, strategies: tuple[Strategy, ...]) -> None:
        """The profile was measured where this regime would be run.

        Raises:
            ValueError: it was not, and extrapolation was not asked for; or a width that the model's layers do not
                allow.
        """
        for strategy in strategies:
            if strategy.loads and strategy.width is not None:
                plan_slices(self.profile.num_layers, strategy.width)
            strategy.release.layers_needed(self.profile.num_layers)
        if self.extrapolate:
            return
        profile, prompt = self.profile, regime.hit_tokens + regime.new_tokens
        held = regime.concurrency * (prompt + regime.output_tokens)
        outside = [
            f"{cached:,} cached + {prompt - cached:,} new tokens, {regime.output_tokens:,} generated"
            for cached in {0 if strategy in OFF[1:] else regime.hit_tokens for strategy in strategies}
            if not profile.covers(cached, prompt - cached, regime.output_tokens)
        ]
        if regime.concurrency > profile.max_batch:
            outside.append(f"{regime.concurrency} requests at once")
        if held > profile.engine.kv_capacity_tokens:
            outside.append(f"{held:,} tokens of KV held at once")
        if outside:
            raise ValueError(
                f"the profile {profile.name} does not cover {'; '.join(outside)}. It covers {profile.regimes()}. "
                "Measure a profile there, or pass --extrapolate to go on in straight lines"
            )

    def graphs_of(self, strategy: Strategy) -> Graphs:
        """What steps that only decode replay: where no step waits, full graphs in any case, as vLLM does by default."""
        return self.graphs if strategy.waits else Graphs.FULL

    def compute(self, strategy: Strategy) -> ComputeModel:
        """Step times. Where the host's launches are modelled, the device's own times are those of full graphs."""
        return self._compute[Graphs.FULL if self.overheads is not None else self.graphs_of(strategy)]

    @property
    def full_compute(self) -> MeasuredCompute:
        """The device's own step times."""
        return self._compute[Graphs.FULL]

    def engine(self, strategy: Strategy, seed: int | None = None) -> Callable[..., Engine]:
        """What makes the world's engine: one that chooses for each request, or one that does as it is told.

        Args:
            strategy: how hits reach it.
            seed: for the scatter of the host's times; None: they do not scatter.
        """
        made: Callable[..., Engine] = AutoEngine if strategy.chooses else Engine
        if self.overheads is not None:
            kind = AutoAheadEngine if strategy.chooses else AheadEngine
            made = partial(kind, overheads=self.overheads, seed=seed, before_batch=self.before_batch)
        made = partial(made, full_graphs=self.graphs_of(strategy) is Graphs.FULL)
        if not strategy.chooses:
            return made
        return partial(made, policy=self._policy, load_of=self._load_of, can=strategy.can)

    @cached_property
    def _policy(self) -> AutoPolicy:
        return AutoPolicy(self.profile)

    def hardware(self, hardware: Hardware | None = None) -> Hardware:
        """The way of a load, with what the host adds before its first slice."""
        way = hardware or Hardware()
        return way if self.overheads is None else replace(way, first_slice_ns=self.overheads.first_slice_ns)

    def _load_of(self, tokens: int, width: int | tuple[int, ...]) -> Load:
        return self.load(tokens, replace(AUTO, width=width))

    def settings(self) -> EngineSettings:
        """As measured, where step times include their start; loads are submitted at the engine's poll, as vLLM does."""
        engine = self.profile.engine
        return EngineSettings(0, engine.idle_poll_ns, engine.token_budget, self.profile.max_batch, SubmitAt.POLL)

    def rule(self) -> StepRule:
        """The same for the recursion."""
        return StepRule(0, self.profile.engine.idle_poll_ns, self.profile.engine.token_budget)

    def load(self, hit_tokens: int, strategy: Strategy) -> Load:
        """What the link carries for a hit."""
        if not strategy.loads:
            return NOTHING_TO_LOAD
        load = self._loads.get((hit_tokens, strategy.width))
        if load is None:
            load = self._loads[hit_tokens, strategy.width] = self._plan(hit_tokens, strategy.width)
        return load

    def _plan(self, hit_tokens: int, width: int | tuple[int, ...] | None) -> Load:
        profile = self.profile
        slices = plan_slices(profile.num_layers, width or profile.num_layers)
        layer_bytes = hit_tokens * profile.token_bytes // profile.num_layers
        bytes_per_s = float(profile.wire.h2d_bytes_per_s)
        if self.overheads is not None:
            bytes_per_s = 1e9 / (1e9 / bytes_per_s + self.overheads.load_ns_per_mib / 2**20)
        return plan_load(slices, layer_bytes, bytes_per_s, profile.wire.slice_fixed_ns)

    def request(self, regime: Regime, strategy: Strategy, tag: int = 0) -> Request:
        """One request of the regime as the strategy lets it come to the world."""
        prompt = regime.hit_tokens + regime.new_tokens
        cached = regime.hit_tokens if strategy.loads else 0
        return Request(
            cached,
            prompt - cached,
            regime.output_tokens,
            self.load(regime.hit_tokens, strategy),
            tag=tag,
            admission_ns=self.profile.engine.admit_ns(prompt),
        )

    def transfer_ns(self, hit_tokens: int) -> int:
        """T: a hit's time on the wire, nothing beside it."""
        return sum(self.load(hit_tokens, CHUNK_MAJOR).slice_ns)

    def prefill_ns(self, hit_tokens: int, new_tokens: int) -> int:
        """P: the time to compute the new tokens over the hit, alone; in chunks of the token budget."""
        compute, budget = self._compute[Graphs.FULL], self.profile.engine.token_budget
        return sum(
            sum(compute.step_layers_ns([(hit_tokens + done, min(budget, new_tokens - done))], 0, 0))
            for done in range(0, new_tokens, budget)
        )


def _as_tuple(width: int | tuple[int, ...]) -> tuple[int, ...]:
    return (width,) if isinstance(width, int) else width
