"""What queueing theory says of such a system in closed form, and what pressure on an engine's blocks must not do."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lamella.reference.ordering import Fifo
from lamella.reference.release import First, Whole
from lamella.reference.slices import plan_slices
from lamella.reference.timeline import NOTHING_TO_LOAD, Load
from lamella.sim.clock import Phase
from lamella.sim.kv_blocks import KvBlocks
from lamella.sim.profiles import load_profile
from lamella.sim.replay import ARMS, run_arm
from lamella.sim.requests import Job, Request
from lamella.sim.routing import PoolSizes, route
from lamella.sim.scheduler import Scheduler
from lamella.sim.settings import EngineSettings
from lamella.sim.stations import Prefill
from lamella.sim.strategies import AUTO, IN_TURN, Device, Regime, Strategy
from lamella.sim.workload import TraceRequest, generate_conversations, load_trace
from lamella.sim.world import World

DEVICE = Device(load_profile())
GIB = 1 << 30
BLOCK = 16


class FixedCompute:
    """Every prefill takes so long in each layer, whoever shares its step; nobody decodes."""

    def __init__(self, num_layers: int, layer_ns: int) -> None:
        self.num_layers = num_layers
        self._layer_ns = layer_ns

    def step_layers_ns(self, prefills: Sequence[Prefill], decode_batch: int, decode_context_tokens: int) -> list[int]:
        return [self._layer_ns * len(prefills)] * self.num_layers

    def decode_ns(self, batch: int, context_tokens: int, num_steps: int) -> int:
        raise AssertionError("requests of one token do not decode")


def load_of(num_layers: int, width: int, layer_ns: int) -> Load:
    widths = tuple(part.num_layers for part in plan_slices(num_layers, width))
    return Load(widths, widths, tuple(layers * layer_ns for layers in widths))


# ---------------------------------------------------------------- one request: a pipeline of link and engine


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 50), st.integers(0, 50))
def test_a_request_alone_is_a_pipeline_of_two_stations(layers: int, width: int, wire_ns: int, layer_ns: int) -> None:
    """The last slice that holds the engine up decides: it lands, and its layers and those behind it are computed."""
    width = min(width, layers)
    world = World(FixedCompute(layers, layer_ns), Fifo(), First())
    world.arrive_at(0, Request(1, 1, load=load_of(layers, width, wire_ns)))
    (record,) = world.run()
    begins = range(0, layers, width)
    assert record.ttft_ns == max(wire_ns * min(layers, begin + width) + layer_ns * (layers - begin) for begin in begins)


# ---------------------------------------------------------------- many: one server, fixed service


@pytest.mark.parametrize("busy", [0.3, 0.6, 0.8])
def test_at_random_arrivals_loads_wait_as_in_front_of_any_server_of_fixed_service(busy: float) -> None:
    """M/D/1: a load of S waits rho S / (2 (1 - rho)) in the mean (Pollaczek and Khinchine)."""
    service_ns, count, rng = 1_000_000, 20_000, random.Random(3)
    world = World(FixedCompute(1, 0), Fifo(), Whole(), EngineSettings(token_budget=None, max_batch=None))
    instant = 0.0
    for _ in range(count):
        instant += rng.expovariate(busy / service_ns)
        world.arrive_at(round(instant), Request(1, 1, load=load_of(1, 1, service_ns)))
    waits = [record.ttft_ns - service_ns for record in world.run()]
    expected_ns = busy * service_ns / (2 * (1 - busy))
    means = [sum(waits[begin : begin + count // 20]) / (count // 20) for begin in range(0, count, count // 20)]
    mean_ns = sum(means) / len(means)
    error_ns = (sum((one - mean_ns) ** 2 for one in means) / (len(means) * (len(means) - 1))) ** 0.5
    assert abs(mean_ns - expected_ns) < 3 * error_ns < 0.3 * expected_ns
    assert world.link.busy_ns == count * service_ns


@given(st.integers(1, 8), st.integers(1, 12), st.integers(1, 200), st.integers(0, 200))
def test_users_who_ask_again_get_what_the_slower_station_gives(users: int, each: int, wire: int, layer: int) -> None:
    """Asymptotic bounds of a closed loop; met where one user asks, and where the link is the slower station."""
    count = users * each
    world = World(FixedCompute(1, layer), Fifo(), Whole(), EngineSettings(token_budget=None, max_batch=None))
    world.loop_closed(users, [Request(1, 1, load=load_of(1, 1, wire))] * count)
    took_ns = max(record.end_ns for record in world.run())
    assert took_ns >= max(each * (wire + layer), count * wire + layer, wire + count * layer)
    if users == 1:
        assert took_ns == count * (wire + layer)
    elif wire >= layer:
        assert took_ns == count * wire + layer, "the link never idles"


# ---------------------------------------------------------------- blocks


@given(st.lists(st.integers(1, 40), max_size=12), st.integers(1, 9), st.lists(st.integers(0, 30), max_size=4))
def test_decoding_asks_for_a_block_whenever_a_context_fills_one(
    contexts: list[int], size: int, stretches: list[int]
) -> None:
    blocks = KvBlocks(10_000, size)
    for number, context in enumerate(contexts):
        job = Job(number, Request(0, context), 0, 0)
        blocks.hold(job)
        blocks.begin_decoding(job)
    for steps in stretches:
        grown = [context + steps for context in contexts]
        more = sum(-(-after // size) - -(-before // size) for before, after in zip(contexts, grown, strict=True))
        assert blocks.growth(steps) == more
        blocks.advance(steps)
        contexts = grown
        assert blocks.held == sum(-(-context // size) for context in contexts)
        assert blocks.room == blocks.free - len(contexts)


def test_a_prefill_that_begins_again_is_cut_once() -> None:
    """Twice in that queue it took two seats, and one of them when it lost its blocks."""
    scheduler = Scheduler(EngineSettings(token_budget=10))
    job = Job(0, Request(0, 35), 0, 0)
    scheduler.waiting[0] = job
    scheduler.release(job, 0)
    for _ in range(2):
        assert [chunk.num_tokens for _, chunk in scheduler.fill_step()] == [10]
        scheduler.throw_back(job)
    assert [chunk.num_tokens for _, chunk in scheduler.fill_step()] == [10]
    assert scheduler.cut() == [(10, 25)]


def under_pressure(strategy: Strategy, coming: Sequence[tuple[int, int, int, int]], blocks: int) -> World:
    """The strategy with so few blocks; ends with an error if requests are not served in any sensible time.

    Args:
        strategy: of the requests.
        coming: (instant in ms, blocks cached, blocks new, outputs) of each request.
        blocks: of the engine.
    """
    settings_ = DEVICE.settings()
    settings_ = EngineSettings(0, settings_.idle_poll_ns, settings_.token_budget, kv_blocks=blocks)
    engine = DEVICE.engine(strategy)
    world = World(DEVICE.compute(strategy), strategy.order, strategy.release, settings_, make_engine=engine)
    for tag, (instant_ms, cached, new, outputs) in enumerate(coming):
        admission_ns = DEVICE.profile.engine.admit_ns(BLOCK * new)
        request = Request(0, BLOCK * new, outputs, NOTHING_TO_LOAD, tag=tag, admission_ns=admission_ns)
        if cached:
            request = DEVICE.request(Regime(BLOCK * cached, BLOCK * new, 1, outputs), strategy, tag)
        world.arrive_at(instant_ms * 1_000_000, request)
    alone_ns = [
        DEVICE.prefill_ns(0, BLOCK * (cached + new)) + outputs * 50_000_000 for _, cached, new, outputs in coming
    ]
    last_ns = 1_000_000 * max(one[0] for one in coming) + 3 * sum(alone_ns)

    def give_up() -> None:
        assert len(world.records) == len(coming), f"{len(coming) - len(world.records)} requests wait for each other"

    world.clock.at(last_ns, Phase.HAPPEN, give_up)
    world.run()
    return world


@given(
    st.sampled_from([AUTO, IN_TURN, *ARMS[:3]]),
    st.lists(
        st.tuples(st.integers(0, 400), st.sampled_from([0, 0, 300, 900]), st.integers(1, 600), st.integers(1, 60)),
        min_size=1,
        max_size=8,
    ),
    st.integers(0, 1200),
)
@example(AUTO, [(0, 900, 50, 1), (0, 900, 50, 1), (0, 0, 1900, 1)], 1000)
@example(IN_TURN, [(0, 900, 50, 1), (0, 900, 50, 1), (0, 0, 1900, 1)], 1000)
@settings(max_examples=60)
def test_requests_that_compete_for_blocks_never_wait_for_each_other(
    strategy: Strategy, coming: list[tuple[int, int, int, int]], spare: int
) -> None:
    """Loads that hold blocks and are held back must not wait for a prefill that waits for these very blocks."""
    largest = max(-(-(BLOCK * (cached + new) + outputs) // BLOCK) for _, cached, new, outputs in coming)
    world = under_pressure(strategy, sorted(coming), largest + spare)
    assert sorted(record.tag for record in world.records) == list(range(len(coming)))
    assert world.blocks is not None
    assert world.blocks.free == world.blocks.capacity
    computed = sum(record.new_tokens for record in world.records)
    assert computed + sum(record.cached_tokens for record in world.records) == sum(
        BLOCK * (cached + new) for _, cached, new, _ in coming
    )


# ---------------------------------------------------------------- traces


def renamed(trace: Sequence[TraceRequest]) -> list[TraceRequest]:
    return [one._replace(chunk_ids=tuple(10**9 - 7 * chunk for chunk in one.chunk_ids)) for one in trace]


@given(st.integers(0, 50), st.integers(1, 4), st.sampled_from([1, 40, 300]))
@settings(max_examples=20)
def test_what_a_chunk_is_called_does_not_matter(seed: int, instances: int, pool_gib: int) -> None:
    trace, sizes = generate_conversations(seed, 12), PoolSizes(pool_gib * GIB)
    assert route(renamed(trace), DEVICE, instances, sizes) == route(trace, DEVICE, instances, sizes)


@pytest.fixture(params=["mooncake_conversation_trace.jsonl", "mooncake_synthetic_trace.jsonl"])
def published(request: pytest.FixtureRequest) -> list[TraceRequest]:
    folder = os.environ.get("LAMELLA_TRACE_DIR")
    if not folder:
        pytest.skip("LAMELLA_TRACE_DIR names no folder with the Mooncake traces")
    return load_trace(Path(folder) / request.param)


def test_a_published_trace_is_routed_by_its_prefixes_alone_and_loses_no_token(published: list[TraceRequest]) -> None:
    routing = route(published, DEVICE, 4, PoolSizes(256 * GIB))
    assert routing == route(renamed(published), DEVICE, 4, PoolSizes(256 * GIB))
    routed = {request.position: request for request in routing.requests}
    assert len(routed) + len(routing.excluded) == len(published)
    for position, request in routed.items():
        asked = published[position]
        assert request.cached_tokens + request.new_tokens == asked.input_tokens
        assert request.loaded_tokens <= request.cached_tokens < asked.input_tokens
        assert (request.arrival_ns, request.output_tokens) == (asked.arrival_ns, asked.output_tokens)
    assert all(one.arrival_ns <= other.arrival_ns for one, other in pairwise(routing.requests))


@pytest.mark.parametrize("strategy", ARMS, ids=str)
def test_a_published_trace_on_too_few_gpus_is_served_to_the_end(
    published: list[TraceRequest], strategy: Strategy
) -> None:
    """Its beginning on one: for minutes more wait for blocks than have them."""
    routing = route(published[:1500], DEVICE, 1, PoolSizes(256 * GIB))
    arm = run_arm(strategy, routing, DEVICE)
    assert arm.num_requests == len(routing.requests)
    loaded = sum(request.loaded_tokens for request in routing.requests) * DEVICE.profile.token_bytes
    assert arm.loaded_bytes >= (loaded if strategy.loads and not strategy.chooses and not arm.preemptions else 0)
