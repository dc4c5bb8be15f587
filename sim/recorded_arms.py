"""A recorded arm as the world can run it, and its prediction for a recorded cell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Final

from lamella.reference.auto import BYSTANDER_WEIGHT
from lamella.reference.ordering import parse_order
from lamella.reference.release import parse_release
from lamella.reference.slices import parse_width, plan_slices
from lamella.reference.timeline import NOTHING_TO_LOAD, Load
from lamella.sim.hardware import FULL_SPEED, Hardware, Ratio, Tier
from lamella.sim.overheads import Overheads
from lamella.sim.recorded import RecordedRepeat, RecordedRun
from lamella.sim.records import RequestRecord
from lamella.sim.requests import Request
from lamella.sim.settings import EngineSettings, SubmitAt
from lamella.sim.stations import plan_load
from lamella.sim.strategies import AUTO, CHUNK_MAJOR, RECOMPUTE, Device, Strategy
from lamella.sim.world import World

DEFAULT_TURN_MIB: Final = 32
"""Of recordings that do not say: the connector's `turn_mib`."""
GRAPHS: Final = ("piecewise", "full", "both")
BYSTANDER_TOKENS: Final = 1024
BYSTANDER_TAG: Final = -1
BYSTANDER_OUTPUT: Final = 6000


class InputsWait(Enum):
    """What the engine's own copy of a joining prompt waits for while loads are moving."""

    NONE = "none"
    """Nothing: as if it went another way."""
    TURN = "turn"
    """The present turn of a lane whose copies take turns, `turn_mib` of the recording."""
    LOAD_END = "load-end"
    """The end of the load that ends next: a lane without turns leaves the link idle only between two loads."""


@dataclass(frozen=True, slots=True)
class Modelled:
    """An arm that the world can run.

    Attributes:
        strategy: how its hits reach the engine.
        inputs_behind_bytes: a joining prompt waits for at most so many bytes of loads; None: until a load ends.
        joins_at_once: loads move inside the very step that asks for them.
        full_graphs: steps that only decode replay one graph, and wait in front of it.
        before_batch: loads inside their step begin before its batch is prepared.
        prefill_graph_tokens: steps of up to so many tokens replay graphs; 0: those that the overheads say.
    """

    strategy: Strategy
    inputs_behind_bytes: int | None
    joins_at_once: bool = False
    full_graphs: bool = False
    before_batch: bool = False
    prefill_graph_tokens: int = 0

    def __str__(self) -> str:
        inside = " inside its step" if self.joins_at_once else ""
        begun = " before the batch" if self.before_batch else ""
        graphs = " with full graphs" if self.full_graphs else ""
        return f"{self.strategy}{inside}{begun}{graphs}{' and graphs of prefills' if self.prefill_graph_tokens else ''}"


def model_of(repeat: RecordedRepeat, inputs: InputsWait = InputsWait.TURN) -> Modelled | str:
    """The arm for the world, or why the world has no answer for it."""
    settings: Mapping[str, Any] | None = repeat.settings
    full, prefills = repeat.whole_graphs, repeat.prefill_graph_tokens
    if repeat.ranks > 1:
        return f"{repeat.ranks} ranks, and the profile is of one"
    if settings is None:
        return Modelled(RECOMPUTE, 0, full_graphs=full, prefill_graph_tokens=prefills)
    if repeat.arm.startswith("peer_"):
        return "another connector"
    way = repeat.arm.removesuffix(f"_{repeat.graphs}_graphs")
    if way.endswith("_beside"):
        return "a second process computes on its device"
    if way.endswith("_thread"):
        return "a thread in Python begins its loads"
    if repeat.graphs not in GRAPHS:
        return f"graphs of another kind, {repeat.graphs}"
    if repeat.graphs == "both" and not prefills:
        return "graphs of prefills, of sizes that the run does not say"
    if repeat.arm == "early_read":
        return "a control that does not wait"
    if settings.get("full_graphs") == "inside":
        return "waits inside a graph of the whole step"
    turn_bytes = int(settings.get("turn_mib", DEFAULT_TURN_MIB)) << 20
    behind = None if inputs is InputsWait.LOAD_END else 0 if inputs is InputsWait.NONE else turn_bytes or None
    width = settings.get("layers_per_slice", repeat.cell.width)
    if width == "auto":
        weight = settings.get("bystander_weight", BYSTANDER_WEIGHT)
        if weight != BYSTANDER_WEIGHT:
            return f"bystanders weigh {weight}, and the model has {BYSTANDER_WEIGHT}"
        return Modelled(AUTO, behind, False, full, bool(settings.get("before_batch")), prefills)
    release = parse_release(str(settings.get("release", "first")))
    order = parse_order(str(settings.get("order", "fifo")))
    if width in (0, "0"):
        return Modelled(CHUNK_MAJOR, behind, full_graphs=full, prefill_graph_tokens=prefills)
    strategy = Strategy(parse_width(str(width)), order, release)
    joins, before_batch = bool(settings.get("use_layerwise")), bool(settings.get("before_batch"))
    return Modelled(strategy, behind, joins, full, before_batch, prefills)


def predict(
    repeat: RecordedRepeat,
    model: Modelled,
    run: RecordedRun,
    device: Device,
    overheads: Overheads,
    seed: int | None = None,
) -> list[RequestRecord]:
    """What the world says of the repeat's counted requests, in the order in which they were asked.

    Requests come as they were asked: a closed loop by the world's own answers, an open one at the recorded instants.
    Hits are what the run says it loaded, and handing a request over takes the thread as long as it did.

    Raises:
        ValueError: an engine that did not schedule ahead, or overheads that do not say what its prefills' graphs take.
    """
    if not run.steps_ahead:
        raise ValueError("the engine did not schedule its steps ahead, which recorded runs are predicted for")
    cell, strategy, profile = repeat.cell, model.strategy, device.profile
    settings = EngineSettings(
        idle_poll_ns=profile.engine.idle_poll_ns,
        token_budget=run.token_budget or profile.engine.token_budget,
        max_batch=profile.max_batch,
        submit_at=SubmitAt.POLL if run.vllm.startswith("0.26") else SubmitAt.AFTER_FORWARD,
        admits_itself=True,
    )
    behind = model.inputs_behind_bytes
    behind_ns = None if behind is None else round(behind * 1e9 / profile.wire.h2d_bytes_per_s)
    tiers = () if cell.tier_bytes_per_s is None else (Tier("tier", cell.tier_bytes_per_s),)
    wire = profile.wire
    both_busy = Ratio(wire.both_bytes_per_s, max(wire.h2d_bytes_per_s, wire.d2h_bytes_per_s))
    device = device.with_overheads(overheads.with_prefill_graphs(model.prefill_graph_tokens))
    world = World(
        device.compute(strategy),
        strategy.order,
        strategy.release,
        settings,
        hardware=device.hardware(Hardware(tiers=tiers, both_busy=both_busy if cell.stores else FULL_SPEED)),
        make_engine=partial(
            device.engine(strategy, seed),
            full_graphs=model.full_graphs,
            inputs_behind_ns=behind_ns,
            joins_at_once=model.joins_at_once,
            before_batch=model.before_batch,
            steps_wait=repeat.steps_wait,
        ),
    )
    for _ in range(cell.bystanders):
        world.arrive_at(0, Request(0, BYSTANDER_TOKENS, BYSTANDER_OUTPUT, tag=BYSTANDER_TAG))
    requests = [_request(number, repeat, strategy, device) for number in range(len(repeat.requests))]
    begin_ns = 1_000_000_000 if cell.bystanders else 0
    if cell.rate_per_s is None:
        users = min(cell.concurrency, len(requests))
        world.loop_closed(users, requests, starts_ns=[begin_ns] * users)
    else:
        for recorded, request in zip(repeat.requests, requests, strict=True):
            world.arrive_at(begin_ns + recorded.at_ns, request)
    records = [record for record in world.run() if record.tag >= 0]
    first = len(repeat.requests) - len(repeat.counted)
    return sorted((record for record in records if record.tag >= first), key=lambda record: record.tag)


def _request(number: int, repeat: RecordedRepeat, strategy: Strategy, device: Device) -> Request:
    cell, recorded = repeat.cell, repeat.requests[number]
    hit, new = cell.shapes[number % len(cell.shapes)]
    missed = cell.miss_every and number % cell.miss_every == cell.miss_every - 1
    loaded = recorded.loaded_tokens
    if loaded is None:
        loaded = 0 if missed else hit
    resident = min(recorded.resident_tokens, hit)
    loaded = min(loaded, hit - resident) if strategy.loads else 0
    cached = resident + loaded
    prompt = hit + new
    return Request(
        cached,
        prompt - cached,
        cell.output_tokens,
        device.load(loaded, strategy) if loaded else NOTHING_TO_LOAD,
        tag=number,
        admission_ns=recorded.queued_ns,
        resident_tokens=resident,
        tier="tier" if cell.tier_bytes_per_s is not None and loaded else "",
        store=_store(prompt - cached, device) if cell.stores else NOTHING_TO_LOAD,
    )


def _store(new_tokens: int, device: Device) -> Load:
    """What is carried back of the new tokens, at the rate of the way back, as one slice."""
    profile = device.profile
    layer_bytes = new_tokens * profile.token_bytes // profile.num_layers
    return plan_load(plan_slices(profile.num_layers, profile.num_layers), layer_bytes, profile.wire.d2h_bytes_per_s)


def ttft_ns(record: RequestRecord) -> int:
    """From the queue to the first token, as the benchmark counts it."""
    return record.first_token_ns - record.admitted_ns
