"""The check that the world and the recursion agree to the nanosecond, and the scenarios it runs on.

The two share the policies and the stated rules, and no machinery: SimPy events here, a closed form there. Numbers are
small on purpose, so that instants coincide, and zero durations are common.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from lamella.reference.ordering import ORDERS, OrderPolicy
from lamella.reference.pathway import Way, schedule_way
from lamella.reference.release import First, JustInTime, ReleasePolicy, Whole
from lamella.reference.slices import plan_slices
from lamella.reference.timeline import (
    NOTHING_TO_LOAD,
    Chunk,
    Load,
    StepRule,
    TimedRequest,
    Timeline,
    add_members,
    compute_timeline,
)
from lamella.sim.clock import Phase
from lamella.sim.hardware import Hardware, Ratio, Scatter, Staging, Tier
from lamella.sim.scheduler import EngineSettings, Request
from lamella.sim.world import World


@dataclass(frozen=True)
class Scenario:
    requests: tuple[TimedRequest, ...]
    order: OrderPolicy
    release: ReleasePolicy
    rule: StepRule


def random_scenario(rng: random.Random) -> Scenario:
    """Legal by construction: up to six requests, six layers, any widths; half of the scenarios count in single ns."""
    num_layers = rng.randint(1, 6)
    longest = rng.choice((1, 3, 12, 1000))
    slowest = longest * rng.choice((1, 4))  # of the slices: a wire slower than computing makes stalls
    arrival = 0
    requests: list[TimedRequest] = []
    for _ in range(rng.randint(1, 6)):
        arrival += rng.choice((0, 0, rng.randint(0, longest), rng.randint(0, longest * num_layers)))
        load = NOTHING_TO_LOAD
        if rng.random() < 0.85:
            width = [rng.randint(1, num_layers) for _ in range(rng.randint(1, 3))]
            layers = tuple(part.num_layers for part in plan_slices(num_layers, width))
            sizes = tuple(rng.randint(0, slowest) for _ in layers)
            times = sizes if rng.random() < 0.5 else tuple(rng.randint(0, slowest) for _ in layers)
            load = Load(layers, sizes, times)
        requests.append(
            TimedRequest(
                arrival_ns=arrival,
                load=load,
                layer_compute_ns=tuple(rng.randint(0, longest) for _ in range(num_layers)),
                new_tokens=rng.randint(1, 9),
                deadline_ns=rng.choice((None, rng.randint(0, 5 * longest))),
            )
        )
    release: ReleasePolicy = rng.choice(
        (
            Whole(),
            First(),
            First(rng.randint(1, num_layers)),
            JustInTime(),
            JustInTime(rng.randint(0, longest)),
            JustInTime(None),
        )
    )
    rule = StepRule(
        start_delay_ns=rng.choice((0, 0, rng.randint(0, longest))),
        idle_poll_ns=rng.choice((0, 0, rng.randint(1, longest))),
        token_budget=rng.choice((None, rng.randint(1, 12))),
    )
    return Scenario(tuple(requests), rng.choice(list(ORDERS.values())), release, rule)


class ScriptedCompute:
    """A compute model that knows each request by its count of cached tokens: request i has (i + 1) * STRIDE of them."""

    STRIDE = 1_000

    def __init__(self, requests: Sequence[TimedRequest]) -> None:
        self._cost = add_members(requests)
        self.num_layers = len(requests[0].layer_compute_ns)

    def step_layers_ns(
        self, prefills: Sequence[tuple[int, int]], decode_batch: int, decode_context_tokens: int
    ) -> Sequence[int]:
        assert decode_batch == decode_context_tokens == 0, "these scenarios only prefill"
        return self._cost([Chunk(cached // self.STRIDE - 1, cached % self.STRIDE, new) for cached, new in prefills])

    def decode_ns(self, batch: int, context_tokens: int, num_steps: int) -> int:
        raise AssertionError("these scenarios only prefill")


def run_world(scenario: Scenario, hardware: Hardware | None = None, tier: str = "") -> World:
    rule = scenario.rule
    world = World(
        ScriptedCompute(scenario.requests),
        scenario.order,
        scenario.release,
        EngineSettings(rule.start_delay_ns, rule.idle_poll_ns, rule.token_budget, max_batch=None),
        hardware=hardware,
        keep_steps=True,
        keep_slices=True,
    )

    def come(index: int) -> None:
        request = scenario.requests[index]
        due = None if request.deadline_ns is None else request.deadline_ns - request.arrival_ns
        cached = (index + 1) * ScriptedCompute.STRIDE
        tier_of_it = tier if request.load.slice_ns else ""
        world.arrive(Request(cached, request.new_tokens, load=request.load, due_after_ns=due, tier=tier_of_it))
        schedule(index + 1)

    def schedule(index: int) -> None:
        """One after another, so that an arrival races with what the one before it has caused in the same instant."""
        if index < len(scenario.requests):
            world.clock.at(scenario.requests[index].arrival_ns, Phase.HAPPEN, lambda: come(index))

    schedule(0)
    world.run()
    return world


def run_recursion(scenario: Scenario, way: Way | None = None) -> Timeline:
    landings = None if way is None else schedule_way(scenario.requests, way)
    return compute_timeline(scenario.requests, scenario.order, scenario.release, scenario.rule, landing_ns=landings)


def difference(scenario: Scenario, way: Way | None = None) -> str | None:
    """The first thing on which world and recursion differ; None if they agree in everything."""
    timeline = run_recursion(scenario, way)
    world = run_world(scenario) if way is None else run_world(scenario, hardware_of(way), tier_of(way))
    ranks = 1 if way is None else len(way.speeds)
    if len(world.records) != len(timeline.requests):
        return f"{len(world.records)} of {len(timeline.requests)} requests ended in the world"
    for record in world.records:
        expected = timeline.requests[record.sequence]
        seen = (
            record.arrival_ns,
            record.first_layer_ns,
            record.all_landed_ns,
            record.released_ns,
            record.started_ns,
            record.first_token_ns,
        )
        wanted = (
            expected.arrival_ns,
            expected.landing_ns[0],
            expected.landing_ns[-1],
            expected.released_ns,
            expected.started_ns,
            expected.first_token_ns,
        )
        if seen != wanted:
            return f"request {record.sequence}: the world has {seen}, the recursion {wanted}"
    for seen_step, step in zip(world.steps, timeline.steps, strict=False):
        if tuple(seen_step[:6]) != tuple(step):
            return f"step at {step.polled_ns}: the world has {seen_step}, the recursion {step}"
    if len(world.steps) != len(timeline.steps):
        return f"the world took {len(world.steps)} steps, the recursion {len(timeline.steps)}"
    carried = ranks * sum(sum(request.load.slice_bytes) for request in scenario.requests)
    if world.link.carried_bytes != carried:
        return f"the link carried {world.link.carried_bytes} of {carried} bytes"
    return None


def hardware_of(way: Way) -> Hardware:
    """The world's hardware that the recursion's way describes."""
    return Hardware(
        ranks=tuple(Ratio(*speed) for speed in way.speeds),
        staging=None if way.window_bytes is None else Staging(way.window_bytes, way.windows),
        scatter=None if way.scatter_bytes_per_s is None else Scatter(way.scatter_bytes_per_s, way.launch_ns),
        tiers=() if way.tier_bytes_per_s is None else (Tier("disk", way.tier_bytes_per_s, way.tier_latency_ns),),
    )


def tier_of(way: Way) -> str:
    return "" if way.tier_bytes_per_s is None else "disk"


def random_way(rng: random.Random, requests: Sequence[TimedRequest]) -> Way:
    """Legal by construction; rates are such that every station is the slowest in some scenarios."""
    longest = 1 + max((max(request.load.slice_bytes, default=0) for request in requests), default=0)
    return Way(
        tier_bytes_per_s=rng.choice((None, 10**9 // rng.randint(1, 4))),
        tier_latency_ns=rng.choice((0, rng.randint(0, longest))),
        window_bytes=rng.choice((None, rng.randint(1 + longest // 6, longest))),
        windows=rng.randint(1, 3),
        scatter_bytes_per_s=rng.choice((None, 10**9 // rng.randint(1, 3), 3 * 10**9)),
        launch_ns=rng.choice((0, rng.randint(0, 5))),
        speeds=tuple((rng.randint(1, 4), 4) for _ in range(rng.randint(1, 3))),
    )
