"""Worlds with everything in them: pressure on blocks, stores, tiers, ranks, faults, any order, release and submission.

No recursion has an answer for these; `broken_law` holds them to what must be true of any. Numbers are small, so that
instants coincide.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from lamella.reference.ordering import ORDERS, Fifo, OrderPolicy
from lamella.reference.release import First, JustInTime, ReleasePolicy, Whole
from lamella.reference.slices import plan_slices
from lamella.reference.timeline import NOTHING_TO_LOAD, Load
from lamella.sim.ahead import AheadEngine
from lamella.sim.clock import Phase
from lamella.sim.engine import Engine
from lamella.sim.hardware import Fault, Hardware, Ratio, Scatter, Sharing, Staging, Tier
from lamella.sim.overheads import Overheads
from lamella.sim.records import Ending, Station
from lamella.sim.scheduler import EngineSettings, Request, SubmitAt
from lamella.sim.settings import OnLoadFailure, StepsWait
from lamella.sim.stations import ComputeModel, Prefill, plan_load
from lamella.sim.world import World

LAYERS = 4
LONGEST_NS = 4_000
"""How far worlds are asked; most requests have come and gone by then."""


class LinearCompute:
    """Layers that take 10 ns a new token and 1 a decoding request; a decode step of 7 + 1 a context token."""

    num_layers = LAYERS

    def step_layers_ns(self, prefills: Sequence[Prefill], decode_batch: int, decode_context_tokens: int) -> list[int]:
        return [10 * sum(new for _, new in prefills) + decode_batch] * self.num_layers

    def decode_ns(self, batch: int, context_tokens: int, num_steps: int) -> int:
        return num_steps * (7 + context_tokens) + batch * num_steps * (num_steps - 1) // 2


@dataclass(frozen=True)
class Ahead:
    """An engine that schedules ahead, and with what."""

    overheads: Overheads
    inputs_behind_ns: int | None = 0
    joins_at_once: bool = False
    seed: int | None = None
    steps_wait: StepsWait = StepsWait.BATCH
    full_graphs: bool = False
    before_batch: bool = False

    def make_engine(self) -> Callable[..., Engine]:
        return partial(
            AheadEngine,
            overheads=self.overheads,
            inputs_behind_ns=self.inputs_behind_ns,
            joins_at_once=self.joins_at_once,
            before_batch=self.before_batch,
            seed=self.seed,
            steps_wait=self.steps_wait,
            full_graphs=self.full_graphs,
        )


@dataclass(frozen=True)
class Rich:
    coming: tuple[tuple[int, Request], ...]
    order: OrderPolicy
    release: ReleasePolicy
    settings: EngineSettings
    hardware: Hardware
    ahead: Ahead | None = None
    full_graphs: bool = False

    def run(
        self, compute: ComputeModel | None = None, *, fast_forward: bool = True, ask_every_ns: int | None = None
    ) -> World:
        """The world at its end; asked meanwhile what its way has still to carry, if it is."""
        world = World(
            compute or LinearCompute(),
            self.order,
            self.release,
            self.settings,
            hardware=self.hardware,
            keep_steps=True,
            keep_slices=True,
            fast_forward=fast_forward,
            make_engine=partial(Engine, full_graphs=self.full_graphs)
            if self.ahead is None
            else self.ahead.make_engine(),
        )
        for instant, request in self.coming:
            world.arrive_at(instant, request)
        for instant in range(0, LONGEST_NS, ask_every_ns) if ask_every_ns else ():
            for way in (world.link, world.back):
                world.clock.at(instant, Phase.HAPPEN, way.ahead_ns)
                world.clock.at(instant, Phase.HAPPEN, way.forecast_ns)
        world.run()
        return world


BUDGET = 10_000


def run_ahead(
    ahead: Ahead, *coming: tuple[int, Request], release: ReleasePolicy | None = None, **settings: int | SubmitAt | None
) -> World:
    """What becomes of requests that come at these instants; records in the order in which they came."""
    world = World(
        LinearCompute(),
        Fifo(),
        release or Whole(),
        EngineSettings(**{"token_budget": BUDGET, "submit_at": SubmitAt.POLL, **settings}),
        keep_steps=True,
        keep_slices=True,
        make_engine=ahead.make_engine(),
    )
    for instant, request in coming:
        world.arrive_at(instant, request)
    world.run()
    world.records.sort(key=lambda record: record.sequence)
    return world


def load_of(total_ns: int, width: int = 1) -> Load:
    return plan_load(plan_slices(LAYERS, width), layer_bytes=total_ns // LAYERS, bytes_per_s=1e9)


def random_rich(rng: random.Random) -> Rich:
    """Legal by construction."""
    blocks = rng.choice((None, rng.randint(14, 40)))
    faulty = rng.random() < 0.3
    tiers = (Tier("disk", rng.choice((10**9, 10**8)), rng.randint(0, 50)),) if rng.random() < 0.3 else ()
    instant = 0
    coming: list[tuple[int, Request]] = []
    for tag in range(rng.randint(1, 12)):
        instant += rng.choice((0, rng.randint(0, 900)))
        load, fault = NOTHING_TO_LOAD, None
        cached = rng.randint(0, 50)
        if rng.random() < 0.7:
            load = load_of(LAYERS * rng.randint(1, 200), rng.randint(1, LAYERS))
            if faulty and rng.random() < 0.4:
                late = rng.choice((None, rng.randint(0, 900)))
                fault = Fault(rng.randrange(len(load.slice_ns)), late)
        coming.append(
            (
                instant,
                Request(
                    cached,
                    rng.randint(1, 40),
                    rng.randint(1, 30),
                    load,
                    rng.choice((None, rng.randint(1, 900))),
                    tag,
                    admission_ns=rng.choice((0, 5)),
                    resident_tokens=rng.choice((0, cached // 2)),
                    tier="disk" if tiers and load.slice_ns and rng.random() < 0.7 else "",
                    store=load_of(LAYERS * rng.randint(1, 100)) if rng.random() < 0.3 else NOTHING_TO_LOAD,
                    fault=fault,
                ),
            )
        )
    sharing = rng.choice((Sharing.SERIAL, Sharing.SERIAL, Sharing.EQUAL))
    serial = sharing is Sharing.SERIAL
    return Rich(
        tuple(coming),
        rng.choice(list(ORDERS.values())),
        rng.choice((Whole(), First(), First(2), JustInTime(), JustInTime(30), JustInTime(None))),
        EngineSettings(
            start_delay_ns=rng.choice((0, 3)),
            idle_poll_ns=rng.choice((0, 11)),
            token_budget=rng.choice((None, 16)),
            max_batch=rng.choice((None, 3)),
            submit_at=rng.choice(list(SubmitAt)),
            launch_ns=rng.choice((0, 20)),
            submit_ns=rng.choice((0, 2)),
            kv_blocks=blocks,
            block_tokens=rng.choice((16, 9)),
            load_timeout_ns=rng.randint(100, 3000) if faulty else None,
            on_failure=rng.choice(list(OnLoadFailure)),
            wake_ns=rng.choice((0, 0, 4)),
            admits_itself=rng.random() < 0.3,
        ),
        Hardware(
            ranks=tuple(Ratio(rng.randint(1, 4), 4) for _ in range(rng.choice((1, 1, 2, 3)))),
            sharing=sharing,
            staging=rng.choice((None, Staging(rng.randint(40, 120), rng.randint(1, 3)))) if serial else None,
            scatter=rng.choice((None, Scatter(10**9, 2, rng.choice((0, 30))))) if serial else None,
            tiers=tiers,
            both_busy=rng.choice((Ratio(1, 1), Ratio(2, 3))),
            first_slice_ns=rng.choice((0, 0, 6)),
        ),
        full_graphs=rng.random() < 0.5,
    )


def random_overheads(rng: random.Random) -> Overheads:
    """Of the size of the worlds' own times."""
    times = {
        name: rng.choice((0, rng.randint(0, 60)))
        for name in Overheads.names()
        if name.endswith("_ns") and name not in ("idle_ns", "gate_ns")
    }
    return Overheads(
        **times,
        idle_ns=rng.randint(1, 40),
        gate_ns=rng.choice((0, 2)),
        captured_tokens=rng.choice((4, 16)),
        prefill_graph_tokens=rng.choice((0, 40)),
        beside_permille=rng.choice((1000, 1500)),
        scatter_permille=rng.choice((0, 200)),
        drift_permille=rng.choice((0, 200)),
    )


def random_ahead(rng: random.Random) -> Rich:
    """A random world whose engine schedules ahead; without counted blocks and faults, which it does not model."""
    rich = random_rich(rng)
    coming = tuple((instant, request._replace(fault=None)) for instant, request in rich.coming)
    settings = replace(rich.settings, kv_blocks=None, load_timeout_ns=None)
    ahead = Ahead(
        random_overheads(rng),
        rng.choice((0, 40, None)),
        rng.random() < 0.2 and not isinstance(rich.release, JustInTime),
        rng.choice((None, rng.randint(0, 9))),
        rng.choice(list(StepsWait)),
        rng.random() < 0.3,
        rng.random() < 0.5,
    )
    return replace(rich, coming=coming, settings=settings, ahead=ahead)


def broken_law(rich: Rich, world: World) -> str | None:
    """The first law that the world does not keep; None if it keeps all."""
    return (
        _requests_come_out(rich, world)
        or _times_are_in_order(world, ahead=rich.ahead is not None)
        or _stalls_are_charged_once(world)
        or _prompts_are_computed(world)
        or _bytes_come_out(rich, world)
        or _blocks_come_back(rich, world)
        or _stations_do_one_thing(rich, world)
    )


def _requests_come_out(rich: Rich, world: World) -> str | None:
    if sorted(record.tag for record in world.records) != list(range(len(rich.coming))):
        return f"{len(rich.coming)} requests went in, {sorted(record.tag for record in world.records)} came out"
    asked = {request.tag: request for _, request in rich.coming}
    for record in world.records:
        request = asked[record.tag]
        if record.cached_tokens + record.new_tokens != request.cached_tokens + request.new_tokens:
            return f"request {record.tag}: its prompt changed its length"
        if (record.ending is Ending.FAILED) != (
            bool(record.failure) and rich.settings.on_failure is OnLoadFailure.FAIL
        ):
            return f"request {record.tag}: {record.ending} with failure {record.failure!r}"
    if world.backlog_tokens and all(record.ending is Ending.DONE for record in world.records):
        return f"{world.backlog_tokens} tokens are still to be computed"
    return None


def _times_are_in_order(world: World, *, ahead: bool) -> str | None:
    for record in world.records:
        if record.ending is Ending.FAILED:
            continue
        parts = record.ttft_parts()
        if sum(parts) != record.ttft_ns or min(parts) < 0:
            return f"request {record.tag}: {parts} are not the parts of {record.ttft_ns}"
        if not record.failure and not record.preemptions and record.all_landed_ns > record.first_token_ns:
            return f"request {record.tag}: its first token came before its last layer"
        if record.end_ns < record.first_token_ns or -1 < record.stored_ns < record.first_token_ns:
            return f"request {record.tag} ended, or was stored, before its first token"
        if (record.stored_ns >= 0) != (record.store_bytes > 0):
            return f"request {record.tag}: {record.store_bytes} bytes to store, stored at {record.stored_ns}"
    for before, after in pairwise(world.steps):
        if before.end_ns > (after.start_ns if ahead else after.polled_ns) or after.polled_ns > after.start_ns:
            return f"steps overlap: {before}, {after}"
    return None


def _stalls_are_charged_once(world: World) -> str | None:
    caused = sum(record.caused_stall_ns for record in world.records)
    if caused != world.stall_ns:
        return f"{caused} ns of stall are charged and {world.stall_ns} happened"
    for record in world.records:
        if record.ending is Ending.DONE and sum(one.stall_ns for one in record.suffered) != record.prefill_stall_ns:
            return f"request {record.tag}: {record.suffered} are not the {record.prefill_stall_ns} ns that it stood"
        if sum(record.layer_stall_ns) != record.caused_stall_ns or record.victim_stall_ns < 0:
            return f"request {record.tag}: stall by layer {record.layer_stall_ns}, in all {record.caused_stall_ns}"
    return None


def _prompts_are_computed(world: World) -> str | None:
    """What gave the first token was a prefill of the whole prompt, and nothing that a failure made worthless."""
    for record in world.records:
        if record.ending is Ending.FAILED or record.preemptions:
            continue
        chunks = [
            (chunk, step.start_ns) for step in world.steps for chunk in step.chunks if chunk.request == record.sequence
        ]
        begin = max(index for index, (chunk, _) in enumerate(chunks) if chunk.first_token == 0)
        computed = 0
        for chunk, _ in chunks[begin:]:
            if chunk.first_token != computed:
                return f"request {record.tag}: tokens {computed} .. {chunk.first_token} were not computed"
            computed += chunk.num_tokens
        if computed != record.new_tokens or chunks[begin][1] != record.started_ns:
            return f"request {record.tag}: {computed} of {record.new_tokens} tokens were computed"
    return None


def _bytes_come_out(rich: Rich, world: World) -> str | None:
    ranks = len(rich.hardware.ranks)
    asked = {request.tag: request for _, request in rich.coming}
    loads = {tag: sum(request.load.slice_bytes) for tag, request in asked.items()}
    sound = [record for record in world.records if not record.failure]
    least = ranks * sum(loads[record.tag] for record in sound)
    most = ranks * sum(loads[record.tag] * (1 + record.preemptions) for record in world.records)
    if not least <= world.link.carried_bytes <= most:
        return f"the link carried {world.link.carried_bytes} bytes, not {least} .. {most}"
    wire_ns = [sum(asked[record.tag].load.slice_ns) for record in sound]
    if world.link.busy_ns < (0 if ranks > 1 else sum(wire_ns) - 2 * len(world.slices)):
        return f"{sum(wire_ns)} ns of slices crossed in {world.link.busy_ns} ns"
    stored = sum(record.store_bytes for record in world.records if record.stored_ns >= 0)
    if world.back.carried_bytes != stored:
        return f"{stored} bytes are stored, {world.back.carried_bytes} went back"
    return None


def _blocks_come_back(rich: Rich, world: World) -> str | None:
    blocks = world.blocks
    if blocks is None:
        return None
    if blocks.held:
        return f"{blocks.held} blocks are still held"
    if any(step.held_blocks > blocks.capacity for step in world.steps):
        return "more blocks are held than there are"
    return None


def _stations_do_one_thing(rich: Rich, world: World) -> str | None:
    if rich.hardware.sharing is Sharing.EQUAL:
        return None
    for station in Station:
        for rank in range(len(rich.hardware.ranks)):
            rows = sorted(
                (row.begin_ns, row.end_ns) for row in world.slices if (row.station, row.rank) == (station, rank)
            )
            if any(before[1] > after[0] for before, after in pairwise(rows)):
                return f"{station.value} of rank {rank} did two things at once"
    return None


def forecast_is_exact(rich: Rich) -> bool:
    """Whether the release asks for no forecast, or for one that does not change until something happens."""
    hardware, settings = rich.hardware, rich.settings
    simple = hardware.plain and not hardware.tiers and not hardware.first_slice_ns
    sound = not any(request.fault for _, request in rich.coming) and settings.kv_blocks is None
    return not rich.release.needs_forecast or (simple and sound and hardware.sharing is Sharing.SERIAL)
