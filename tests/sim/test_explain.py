"""An explained time to first token adds up to the nanosecond (SIM-6), and blames whom the world blames."""

import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lamella.reference.chrome_trace import from_chrome_trace, to_chrome_trace
from lamella.reference.ordering import ORDERS
from lamella.reference.recording import (
    LEFT_OUT,
    Landing,
    LayerStall,
    Occupation,
    Recording,
    RequestSpan,
    RunSource,
    StepSpan,
)
from lamella.reference.release import First, JustInTime, Whole
from lamella.reference.slices import plan_slices
from lamella.reference.timeline import NOTHING_TO_LOAD, Chunk
from lamella.sim.engine import Engine
from lamella.sim.explain import explain, explanation_document, explanation_lines
from lamella.sim.hardware import Fault, Hardware, Ratio, Scatter, Sharing, Staging, Tier
from lamella.sim.record_run import record_world
from lamella.sim.records import Ending, RequestRecord
from lamella.sim.requests import Request
from lamella.sim.settings import EngineSettings, OnLoadFailure, SubmitAt
from lamella.sim.stations import Prefill, plan_load
from lamella.sim.world import World
from rich_world import Ahead, random_overheads

LAYERS = 4
HARDWARE = (
    Hardware(),
    Hardware(sharing=Sharing.EQUAL),
    Hardware(ranks=(Ratio(1, 1), Ratio(2, 3))),
    Hardware(staging=Staging(150), scatter=Scatter(10**9, launch_ns=3, foreign_wait_ns=5)),
    Hardware(tiers=(Tier("disk", 2 * 10**8, 40),), both_busy=Ratio(9, 10), first_slice_ns=7),
)
SETTINGS = (
    EngineSettings(),
    EngineSettings(start_delay_ns=5, idle_poll_ns=11, token_budget=6, submit_at=SubmitAt.POLL),
    EngineSettings(token_budget=5, max_batch=3, submit_at=SubmitAt.AFTER_FORWARD, launch_ns=9, submit_ns=2),
    EngineSettings(kv_blocks=9, block_tokens=4, token_budget=7),
    EngineSettings(load_timeout_ns=900, on_failure=OnLoadFailure.RECOMPUTE),
    EngineSettings(load_timeout_ns=900, on_failure=OnLoadFailure.FAIL),
)


class LinearCompute:
    """A layer takes 10 ns and 1 ns a token; a decode step as much a layer and 1 ns a request more."""

    num_layers = LAYERS

    def step_layers_ns(self, prefills: list[Prefill], decode_batch: int, decode_context_tokens: int) -> list[int]:
        return [10 + sum(new for _, new in prefills) + decode_batch] * LAYERS

    def decode_ns(self, batch: int, context_tokens: int, num_steps: int) -> int:
        return num_steps * LAYERS * (10 + batch)


def random_world(seed: int) -> World:
    """A world of any kind with a dozen requests, after it has run."""
    rng = random.Random(seed)
    hardware = rng.choice(HARDWARE)
    settings = rng.choice(SETTINGS)
    release = rng.choice([Whole(), First(), First(2), JustInTime(), JustInTime(30), JustInTime(None)])
    order = rng.choice(list(ORDERS.values()))
    make_engine: Callable[..., Engine] = Engine
    if settings.kv_blocks is None and settings.load_timeout_ns is None and rng.random() < 0.3:
        make_engine = Ahead(random_overheads(rng), seed=seed).make_engine()
    world = World(
        LinearCompute(),
        order,
        release,
        settings,
        hardware=hardware,
        keep_steps=True,
        keep_slices=True,
        make_engine=make_engine,
    )
    instant = 0
    for _ in range(12):
        instant += rng.choice((0, 0, 20, 300))
        load = NOTHING_TO_LOAD
        if rng.random() < 0.7:
            load = plan_load(
                plan_slices(LAYERS, rng.choice((1, 2, 4))), rng.choice((40, 200)), 10**9, rng.choice((0, 3))
            )
        can_fail = settings.load_timeout_ns is not None and load is not NOTHING_TO_LOAD
        fault = Fault(0, rng.choice((25, None))) if can_fail and rng.random() < 0.3 else None
        world.arrive_at(
            instant,
            Request(
                8 if load is not NOTHING_TO_LOAD else 0,
                rng.randint(1, 9),
                rng.choice((1, 1, 3, 10)),
                load,
                admission_ns=rng.choice((0, 4)),
                tier="disk" if hardware.tiers and load is not NOTHING_TO_LOAD and rng.random() < 0.5 else "",
                fault=fault,
            ),
        )
    world.run()
    return world


def recorded(world: World) -> tuple[Recording, list[RequestRecord]]:
    recording = record_world(world, "a test", "any", LAYERS)
    return recording, [record for record in world.records if record.ending is Ending.DONE]


@given(st.integers(0, 2**32))
def test_the_parts_of_any_request_add_up_to_its_time_to_first_token(seed: int) -> None:
    recording, records = recorded(random_world(seed))
    for record in records:
        explanation = explain(recording, record.sequence)
        parts = dict(explanation.parts())
        assert sum(parts.values()) == record.ttft_ns == explanation.ttft_ns
        assert min(parts.values()) >= 0, parts


@given(st.integers(0, 2**32))
def test_the_recording_says_of_every_part_what_the_record_says(seed: int) -> None:
    recording, records = recorded(random_world(seed))
    for record in records:
        found, truth = explain(recording, record.sequence), record.ttft_parts()
        assert (found.admission_ns, found.submission_ns) == (truth.admission_ns, truth.blocks_ns)
        transfer_ns = found.own_transfer_ns + found.behind_ns + found.link_idle_ns
        assert transfer_ns + found.held_ns == truth.transfer_ns
        assert not found.held_ns or record.all_landed_ns == record.ready_ns - found.held_ns
        assert found.release_in_step_ns + found.release_idle_ns == truth.poll_ns
        assert (found.queue_ns, found.redone_ns) == (truth.queue_ns, truth.redone_ns)
        assert found.computing_ns + found.between_steps_ns + found.handing_out_ns == truth.compute_ns


@given(st.integers(0, 2**32))
def test_every_stall_is_blamed_on_whom_the_world_blames(seed: int) -> None:
    world = random_world(seed)
    recording, records = recorded(world)
    done = {record.sequence for record in records}
    for record in records:
        blamed = Counter[tuple[int, int]]()
        for stall in explain(recording, record.sequence).stalls:
            blamed[stall.layer, stall.culprit] += stall.stall_ns
        suffered = Counter[tuple[int, int]]()
        for one in record.suffered:
            suffered[one.layer, one.culprit if one.culprit in done else LEFT_OUT] += one.stall_ns
        assert blamed == suffered


@given(st.integers(0, 2**32))
@example(2_455_485_478)  # every load is given up before its first slice
def test_a_recording_survives_the_way_through_a_trace(seed: int) -> None:
    recording, _ = recorded(random_world(seed))
    assert from_chrome_trace(to_chrome_trace(recording)) == recording


@given(st.integers(0, 2**32))
def test_the_link_carries_nobody_longer_than_the_stalls_last(seed: int) -> None:
    recording, records = recorded(random_world(seed))
    for record in records:
        explanation = explain(recording, record.sequence)
        assert sum(blame.ns for blame in explanation.stall_wire) <= explanation.stall_ns


def test_random_worlds_reach_every_part() -> None:
    """Or the properties above would say nothing about it."""
    reached = Counter[str]()
    for seed in range(150):
        recording, records = recorded(random_world(seed))
        for record in records:
            reached.update(name for name, ns in explain(recording, record.sequence).parts() if ns)
    names = [name for name, _ in explain(_example(), 0).parts()]
    assert set(reached) == set(names)


def _example() -> Recording:
    """Two requests: the second waits behind the first on the link, then for a step, then for its own last layer."""
    first = RequestSpan(0, 8, 4, 1, 0, 1, 2, 12, 13, 13, 13, 50, 50, (Landing(0, 1, 12), Landing(1, 1, 22)))
    second = RequestSpan(1, 8, 4, 1, 0, 1, 4, 32, 50, 52, 52, 90, 90, (Landing(0, 1, 32), Landing(1, 1, 70)))
    steps = (
        StepSpan(13, 13, 50, (Chunk(0, 0, 4),), (LayerStall(1, 2, 0),), 0),
        StepSpan(50, 52, 90, (Chunk(1, 0, 4),), (LayerStall(1, 8, 1),), 0),
    )
    wire = (
        Occupation("h2d", 0, 0, 0, 2, 12, 5),
        Occupation("h2d", 0, 0, 1, 12, 22, 5),
        Occupation("h2d", 0, 1, 0, 24, 32, 5),
        Occupation("h2d", 0, 1, 1, 60, 70, 5),
    )
    return Recording(RunSource.MEASURED, "a machine", "fifo/1/first", 2, (first, second), steps, wire, ("by hand",))


def test_an_example_can_be_checked_by_hand() -> None:
    explanation = explain(_example(), 1)
    assert dict(explanation.parts()) == {
        "admission": 1,
        "waits to be submitted": 3,
        "transfer wait: own slices": 8,
        "transfer wait: behind others": 18,
        "transfer wait: link idle": 2,
        "held back by the release rule": 0,
        "release wait: engine in a step": 18,
        "release wait: idle poll": 0,
        "queue": 2,
        "done again": 0,
        "stall": 8,
        "between steps": 0,
        "computing": 30,
        "handing out": 0,
    }
    assert [tuple(blame) for blame in explanation.behind] == [(0, 18)]
    assert explanation.stalls == (LayerStall(1, 8, 1),)
    assert [tuple(blame) for blame in explanation.stall_wire] == [(1, 8)]


def test_what_has_landed_and_may_not_run_yet_waits_for_its_rule_and_not_for_the_link() -> None:
    example = _example()
    fields = [getattr(example, name) for name in Recording.__dataclass_fields__]
    patient = example.requests[1]._replace(
        landings=tuple(one._replace(landed_ns=30) for one in example.requests[1].landings)
    )
    explanation = explain(Recording(*fields[:4], (example.requests[0], patient), *fields[5:]), 1)
    parts = dict(explanation.parts())
    assert (parts["transfer wait: own slices"], parts["transfer wait: behind others"]) == (6, 18)
    assert (parts["transfer wait: link idle"], parts["held back by the release rule"]) == (2, 2)
    assert sum(parts.values()) == explanation.ttft_ns


def test_where_several_are_on_the_link_at_once_the_time_is_its_own_first() -> None:
    example = _example()
    shared = [Occupation("h2d", 0, request, 0, 4, 32, 5) for request in (0, 1)]
    both = Recording(*(getattr(example, name) for name in list(Recording.__dataclass_fields__)[:6]), tuple(shared))
    explanation = explain(both, 1)
    assert (explanation.own_transfer_ns, explanation.behind) == (28, ())


def test_a_stall_for_a_load_that_failed_is_nobodys_in_the_recording() -> None:
    settings = EngineSettings(load_timeout_ns=900, on_failure=OnLoadFailure.FAIL)
    world = World(LinearCompute(), ORDERS["fifo"], First(), settings, keep_steps=True, keep_slices=True)
    load = plan_load(plan_slices(LAYERS, 1), 40, 10**9)
    world.arrive(Request(8, 2, load=load, fault=Fault(1, None)))
    world.arrive_at(40, Request(0, 2))  # as the first slice lands, so that both are in one step
    world.run()
    recording, (survivor,) = recorded(world)
    explanation = explain(recording, survivor.sequence)
    assert explanation.stall_ns == survivor.prefill_stall_ns > 800
    assert LEFT_OUT in {stall.culprit for stall in explanation.stalls}
    said = explanation_lines(recording, explanation)
    assert any(line.endswith("of a request whose load failed") for line in said)
    assert said[-1] == "Note: 1 requests whose load failed are left out"


def test_it_is_said_in_words_and_in_numbers() -> None:
    lines = explanation_lines(_example(), explain(_example(), 1))
    assert lines[0].startswith("Request 1 (measured, fifo/1/first): 8 cached + 4 new tokens, first token after")
    assert any(line.strip().endswith("ms  request 0") for line in lines)
    assert any(line.strip().endswith("ms  layer 1, its own") for line in lines)
    assert lines[-1] == "Note: by hand"
    document = explanation_document(explain(_example(), 1))
    assert document["ttft_ns"] == 90
    assert document["stalls"] == [{"layer": 1, "stall_ns": 8, "culprit": 1}]


def test_an_unknown_request_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no request 7 in this recording; it holds 2 \(0 .. 1\)"):
        explain(_example(), 7)


@pytest.mark.parametrize("kept", [{"keep_steps": True}, {"keep_slices": True}])
def test_a_world_that_kept_nothing_is_refused(kept: dict[str, bool]) -> None:
    world = World(LinearCompute(), ORDERS["fifo"], First(), **kept)
    world.arrive(Request(8, 1, load=plan_load(plan_slices(LAYERS, 1), 40, 10**9)))
    world.run()
    with pytest.raises(ValueError, match="the world kept no (steps|slices)"):
        record_world(world, "a test", "any", LAYERS)
