"""A replay: nothing is lost, the same input gives the same output, and the last sentence follows from the figures."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamella.reference.release import First
from lamella.sim.outcome import SATURATED_STRETCH, ArmResult, Quantiles, Tally, judge, quantiles, remarks
from lamella.sim.profiles import load_profile
from lamella.sim.replay import ARMS, SLICE_WIRE_NS, ReplayResult, ReplaySetting, record_instance, replay_cells, run_arm
from lamella.sim.request_table import COLUMNS
from lamella.sim.routing import PoolSizes, Routing, choose_instances, route
from lamella.sim.serving import Slo
from lamella.sim.strategies import CHUNK_MAJOR, IN_TURN, RECOMPUTE, Device, Strategy
from lamella.sim.workload import TRACE_CHUNK_TOKENS, TraceRequest, generate_conversations, load_trace, scale_rate
from lamella.sim.world import RequestRecord, World

DEVICE = Device(load_profile())
GIB = 1 << 30
PLENTY = PoolSizes(1024 * GIB)
FIFO_FIRST = ARMS[1]


def small_routing(seed: int = 0, conversations: int = 6, instances: int = 2, sizes: PoolSizes = PLENTY) -> Routing:
    return route(generate_conversations(seed, conversations), DEVICE, instances, sizes)


def replay(routing: Routing, width: int | None = None) -> ReplayResult:
    return replay_cells(ReplaySetting(routing, DEVICE, width, Slo(), keep_rows=False)).result


def one_hit(cached_chunks: int, new_tokens: int, output: int = 1) -> Routing:
    """A prompt, and long after it one that begins with it."""
    chunks = tuple(range(cached_chunks))
    first = TraceRequest(0, cached_chunks * TRACE_CHUNK_TOKENS, 1, chunks)
    tail = tuple(range(1000, 1000 - -new_tokens // TRACE_CHUNK_TOKENS + 1))[: -(-new_tokens // TRACE_CHUNK_TOKENS)]
    second = TraceRequest(10**11, first.input_tokens + new_tokens, output, chunks + tail)
    routing = route([first, second], DEVICE, 1, PLENTY)
    return replace(routing, requests=routing.requests[1:])


@given(st.integers(0, 30), st.integers(1, 3), st.sampled_from([0.0, 1.0, 300.0]), st.sampled_from([None, 1, 7, 32]))
@settings(max_examples=15)
def test_every_request_and_every_byte_that_goes_in_comes_out_in_every_arm(
    seed: int, instances: int, pool_gib: float, width: int | None
) -> None:
    routing = small_routing(seed, 5, instances, PoolSizes(int(pool_gib * GIB), int(pool_gib / 50 * GIB)))
    setting = ReplaySetting(routing, DEVICE, width, Slo(), keep_rows=True)
    result, _, rows = replay_cells(setting)
    positions = [request.position for request in routing.requests]
    assert sorted(row[COLUMNS.index("tag")] for row in rows) == sorted(positions * len(ARMS))
    loaded = sum(request.loaded_tokens for request in routing.requests) * DEVICE.profile.token_bytes
    for strategy, arm in zip(ARMS, result.arms, strict=True):
        assert arm.num_requests == len(positions)
        assert arm.loaded_bytes == (loaded if strategy.loads else 0)
        assert 0 <= arm.stall_share <= arm.gpu_busy_share <= 1
        assert 0 <= arm.link_busy_share <= 1
        assert arm.ttft.p50_ns <= arm.ttft.p90_ns <= arm.ttft.p99_ns <= arm.latency.p99_ns


def test_the_same_input_gives_the_same_result() -> None:
    assert replay(small_routing(3)) == replay(small_routing(3))


@pytest.mark.parametrize("width", [None, 4])
def test_instances_computed_apart_add_up_to_the_same_result(width: int | None) -> None:
    routing = small_routing(3)
    apart = tuple(run_arm(strategy, routing, DEVICE, width) for strategy in ARMS)
    assert replay(routing, width).arms == apart


def test_arms_get_the_same_requests_with_the_same_hits() -> None:
    routing = small_routing()
    seen: dict[str, dict[int, tuple[int, int]]] = {}
    for strategy in ARMS:
        served: dict[int, tuple[int, int]] = {}

        def note(record: RequestRecord, served: dict[int, tuple[int, int]] = served) -> None:
            served[record.tag] = (record.cached_tokens + record.new_tokens, record.output_tokens)

        run_arm(strategy, routing, DEVICE, on_finish=note)
        seen[str(strategy)] = served
    first = next(iter(seen.values()))
    assert all(served == first for served in seen.values())


def test_a_lone_chunk_major_hit_takes_what_was_estimated_for_it_and_at_most_a_poll_more() -> None:
    routing = one_hit(30, 700)
    (request,) = routing.requests
    ttft = run_arm(CHUNK_MAJOR, routing, DEVICE).ttft.p50_ns
    assert request.alone_ns <= ttft <= request.alone_ns + DEVICE.profile.engine.idle_poll_ns + 1


@pytest.mark.parametrize(("chunks", "new"), [(30, 100), (30, 700), (60, 1500), (8, 2000)])
def test_a_lone_layerwise_hit_overlaps_and_stays_within_the_laws(chunks: int, new: int) -> None:
    routing = one_hit(chunks, new)
    (request,) = routing.requests
    transfer = DEVICE.transfer_ns(request.loaded_tokens)
    prefill = DEVICE.prefill_ns(request.cached_tokens, request.new_tokens)
    admitted = DEVICE.profile.engine.admit_ns(request.cached_tokens + request.new_tokens)
    ttft = run_arm(FIFO_FIRST, routing, DEVICE, width=1).ttft.p50_ns - admitted
    overheads = 32 * DEVICE.profile.wire.slice_fixed_ns + DEVICE.profile.engine.idle_poll_ns
    assert max(transfer, prefill) <= ttft <= transfer + prefill + overheads
    slowest = max(transfer, prefill)
    assert ttft <= slowest + min(transfer, prefill) / 8 + overheads, "width 1 hides nearly all of the shorter one"


def test_recomputing_loads_nothing_and_computes_everything() -> None:
    routing = one_hit(30, 700)
    (request,) = routing.requests
    prompt = request.cached_tokens + request.new_tokens
    result = run_arm(RECOMPUTE, routing, DEVICE)
    assert result.loaded_bytes == 0
    assert result.ttft.p50_ns == DEVICE.profile.engine.admit_ns(prompt) + DEVICE.prefill_ns(0, prompt)
    assert result.stretch == 1


@pytest.mark.parametrize(("chunks", "slices"), [(1, 3), (4, 8), (64, 32)])
def test_without_a_width_slices_have_at_least_half_a_millisecond_of_wire(
    chunks: int, slices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = []
    arrive = World.arrive_at
    monkeypatch.setattr(
        World, "arrive_at", lambda self, t, request: (loads.append(request.load), arrive(self, t, request))
    )
    run_arm(FIFO_FIRST, one_hit(chunks, 100), DEVICE)
    (load,) = loads
    assert len(load.slice_ns) == slices
    assert min(load.slice_ns[:-1]) >= SLICE_WIRE_NS


@pytest.mark.parametrize("width", [0, 33, -1])
def test_an_impossible_width_is_refused_before_anything_runs(width: int) -> None:
    with pytest.raises(ValueError, match=f"{width}"):
        run_arm(FIFO_FIRST, small_routing(), DEVICE, width)


@pytest.mark.parametrize("fault", ["lost", "twice", "foreign"])
def test_a_request_that_is_lost_or_served_twice_is_noticed(fault: str) -> None:
    routing = one_hit(3, 50)
    world = World(DEVICE.compute(CHUNK_MAJOR), CHUNK_MAJOR.order, CHUNK_MAJOR.release, DEVICE.settings())
    run_arm(CHUNK_MAJOR, routing, DEVICE)  # the same requests, unharmed, pass
    records = []
    run_arm(CHUNK_MAJOR, routing, DEVICE, on_finish=records.append)
    world.records = {"lost": [], "twice": records * 2, "foreign": [records[0]._replace(tag=99)]}[fault]
    with pytest.raises(RuntimeError, match="not one for one"):
        Tally(lambda request: request.alone_ns).add(world, routing.requests)


# ---------------------------------------------------------------- figures and sentences


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=300))
def test_quantiles_are_times_that_occurred_with_enough_at_or_below_them(times: list[int]) -> None:
    found = quantiles(times)
    for share, value in ((0.5, found.p50_ns), (0.9, found.p90_ns), (0.99, found.p99_ns)):
        assert value in times
        assert sum(time <= value for time in times) >= share * len(times)
        assert sum(time < value for time in times) < share * len(times)


def test_quantiles_of_nothing_are_zero() -> None:
    assert quantiles([]) == Quantiles(0, 0, 0, 0)


def result_of(arm: str, mean: int, p50: int, p99: int, tpot: int = 1000, stretch: float = 1.0) -> ArmResult:
    ttft = Quantiles(mean, p50, p99, p99)
    return ArmResult(arm, 10, ttft, ttft, Quantiles(tpot, tpot, tpot, tpot), ttft, 0.5, 0.0, 0.1, 1, stretch, 100)


BASE = result_of("chunk-major", 1000, 800, 5000)


def test_the_arm_with_the_least_mean_among_those_worth_it_is_named_with_its_price() -> None:
    sentence = judge(BASE, [result_of("a", 900, 700, 5000, tpot=1100), result_of("b", 950, 600, 5000)])
    assert sentence == (
        "Use a: time to first token -10.0% in the mean, -12.5% at p50, +0.0% at p99 against chunk-major; "
        "time per output token +10.0%, whole answers -10.0%."
    )


def test_a_request_of_one_token_has_no_time_between_tokens() -> None:
    routing = one_hit(4, 100, output=50)
    (long,) = routing.requests
    short = long._replace(position=0, output_tokens=1, arrival_ns=long.arrival_ns - 10**10)
    both = run_arm(CHUNK_MAJOR, replace(routing, requests=(short, long)), DEVICE)
    assert both.num_requests == 2
    assert both.tpot == run_arm(CHUNK_MAJOR, routing, DEVICE).tpot


@pytest.mark.parametrize(("latency", "conditional"), [(900, False), (1009, False), (1011, True), (2000, True)])
def test_first_tokens_bought_with_later_answers_are_left_to_the_reader(latency: int, conditional: bool) -> None:
    candidate = replace(result_of("a", 900, 700, 5000), latency=Quantiles(latency, latency, latency, latency))
    sentence = judge(BASE, [candidate])
    assert sentence.startswith("Use a only if first tokens matter more than whole answers:") == conditional
    assert f"whole answers {latency / 1000 - 1:+.1%}" in sentence


def test_the_control_arm_is_not_named_where_another_does_as_well() -> None:
    alone = one_hit(cached_chunks=30, new_tokens=700)
    result = replay(alone)
    assert (
        len({arm.ttft for strategy, arm in zip(ARMS, result.arms, strict=True) if isinstance(strategy.release, First)})
        == 1
    )
    assert result.verdict.startswith("Use fifo/auto/first")


def test_what_a_choice_gains_without_its_transfer_is_said() -> None:
    auto = result_of("auto", 900, 700, 5000)
    said = {
        mean: judge(BASE, [auto], {"auto": result_of("in-turn", mean, 700, 5000)}).partition(". ")[2]
        for mean in (890, 950, 951, 1000)
    }
    assert said[951] == said[1000] == ""
    assert said[950] == (
        "Most of that is not its transfer's: whole objects, of which prefills take turns as auto's do, give -5.0% in "
        "the mean (in-turn)."
    )
    assert "-11.0% in the mean" in said[890]
    other = result_of("b", 890, 700, 5000)
    assert judge(BASE, [auto, other], {"auto": result_of("in-turn", 900, 700, 5000)}).startswith("Use b: ")
    assert ". " not in judge(BASE, [auto, other], {"auto": result_of("in-turn", 900, 700, 5000)})


def test_whole_objects_in_turn_are_chunk_major_but_for_prefills_that_had_better_not_share_a_step() -> None:
    alone = one_hit(30, 5_000)
    (hit,) = alone.requests
    at_once = tuple(hit._replace(position=place) for place in range(3))
    together, in_turn = (_records(strategy, replace(alone, requests=at_once)) for strategy in (CHUNK_MAJOR, IN_TURN))
    assert [record.slice_layers for record in in_turn] == [(32,)] * 3
    assert [record.all_landed_ns for record in in_turn] == [record.all_landed_ns for record in together]
    assert len({record.first_started_ns for record in in_turn}) == 3, "a step each"
    assert mean_ttft(in_turn) < mean_ttft(together)
    sooner = mean_ttft(_records(CHUNK_MAJOR, alone)) - mean_ttft(_records(IN_TURN, alone))
    assert 0 <= sooner <= DEVICE.profile.engine.idle_poll_ns
    assert [IN_TURN.layerwise, IN_TURN.waits] == [False, False]


def _records(strategy: Strategy, routing: Routing) -> list[RequestRecord]:
    return record_instance(strategy, routing, DEVICE, 0).records


def mean_ttft(records: list[RequestRecord]) -> float:
    return sum(record.ttft_ns for record in records) / len(records)


@pytest.mark.parametrize(
    ("mean", "p50", "p99"),
    [(990, 790, 5000), (1000, 800, 5000), (1200, 900, 6000), (900, 700, 5100), (1020, 400, 5000)],
    ids=["too little", "nothing", "worse", "a worse tail", "a better median and a worse mean"],
)
def test_leave_it_off_is_an_answer(mean: int, p50: int, p99: int) -> None:
    assert judge(BASE, [result_of("a", mean, p50, p99)]).startswith("Leave it off: no layerwise arm is worth it")


def test_a_better_median_with_nothing_lost_is_worth_it() -> None:
    assert judge(BASE, [result_of("a", 995, 700, 5000)]).startswith("Use a:")


def test_nothing_is_said_of_nothing() -> None:
    assert judge(replace(BASE, num_requests=0), [BASE]) == "Nothing was compared."


def test_a_saturated_arm_is_called_queueing() -> None:
    slow = result_of("slow", 9000, 9000, 9000, stretch=SATURATED_STRETCH + 1)
    (said,) = remarks(small_routing(), [BASE, slow], kv_capacity_tokens=100)
    assert said.startswith("slow is saturated: the mean time to first token is 3.0 times that of idle instances")


def test_lost_blocks_are_said_and_counted() -> None:
    small = Device(replace(DEVICE.profile, engine=replace(DEVICE.profile.engine, kv_capacity_tokens=20_000)))
    trace = scale_rate(generate_conversations(0, 30), 1000)
    routing = route(trace, small, 1, PLENTY)
    assert len(routing.requests) + len(routing.excluded) == len(trace)
    assert routing.excluded, "a conversation of more tokens than there is room for is left out"
    pressed = run_arm(FIFO_FIRST, routing, small)
    assert pressed.num_requests == len(routing.requests)
    assert pressed.preemptions > 0
    assert pressed.peak_kv_tokens <= 20_000
    (said,) = remarks(small_routing(), [replace(BASE, preemptions=7)], kv_capacity_tokens=99)
    assert said.startswith("chunk-major ran out of room for KV (99 tokens on one GPU): requests lost their blocks 7 ")


def test_requests_outside_the_profile_are_said() -> None:
    trace = [*generate_conversations(0, 2), TraceRequest(10**15, 150_000, 1, tuple(range(10**7, 10**7 + 293)))]
    (said,) = remarks(route(trace, DEVICE, 1, PLENTY), [BASE], kv_capacity_tokens=100)
    assert said.startswith("1 request lies outside the profile")
    assert "150,000" in said


def test_one_instance_saturates_on_what_a_fleet_got() -> None:
    trace = scale_rate(generate_conversations(0, 150), 8)
    crowded = run_arm(CHUNK_MAJOR, route(trace, DEVICE, 1, PLENTY), DEVICE)
    assert crowded.saturated
    assert not run_arm(CHUNK_MAJOR, route(trace, DEVICE, 60, PLENTY), DEVICE).saturated


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mooncake_conversation_trace.jsonl", "mooncake_synthetic_trace.jsonl"])
def test_a_published_trace_is_replayed_at_500_times_real_time_on_one_core_by_every_policy(name: str) -> None:
    """Read, routed and served to the last token."""
    folder = os.environ.get("LAMELLA_TRACE_DIR")
    if not folder:
        pytest.skip("LAMELLA_TRACE_DIR names no folder with the Mooncake traces")
    began = time.process_time()
    trace = load_trace(Path(folder) / name)
    routing = choose_instances(trace, DEVICE, PoolSizes(256 * GIB))
    before = time.process_time() - began
    for strategy in ARMS:
        began = time.process_time()
        arm = run_arm(strategy, routing, DEVICE)
        busy = before + time.process_time() - began
        assert arm.num_requests + len(routing.excluded) == len(trace)
        assert strategy is not CHUNK_MAJOR or not arm.saturated
        assert routing.span_ns / 1e9 / busy >= 500, f"{arm.arm}: {routing.span_ns / 1e9 / busy:.0f} times"
