"""Each part of the way and each setting of the engine, in one example that a newcomer can follow."""

from collections.abc import Sequence
from operator import attrgetter

import pytest

from lamella.reference.ordering import Fifo
from lamella.reference.release import First, ReleasePolicy, Whole
from lamella.reference.timeline import Load
from lamella.sim.clock import Phase
from lamella.sim.hardware import Fault, Hardware, Ratio, Scatter, Sharing, Staging, Tier
from lamella.sim.records import Ending, RequestRecord, Station
from lamella.sim.scheduler import EngineSettings, Request, SubmitAt
from lamella.sim.settings import OnLoadFailure
from lamella.sim.world import World
from rich_world import LinearCompute, load_of

Coming = tuple[int, Request]


def run(
    *coming: Coming,
    release: ReleasePolicy | None = None,
    settings: EngineSettings | None = None,
    hardware: Hardware | None = None,
) -> tuple[list[RequestRecord], World]:
    world = World(
        LinearCompute(),
        Fifo(),
        release or Whole(),
        settings,
        hardware=hardware,
        keep_steps=True,
        keep_slices=True,
    )
    for instant, request in coming:
        world.arrive_at(instant, request)
    world.run()
    return sorted(world.records, key=attrgetter("sequence")), world


def hit(total_ns: int = 400, *, width: int = 1, **more: object) -> Request:
    return Request(8, 1, load=load_of(total_ns, width), **more)  # type: ignore[arg-type]


# ---------------------------------------------------------------- the way


def test_wire_and_scatter_overlap_where_there_are_two_windows_and_take_turns_where_there_is_one() -> None:
    for windows, landed in ((2, 8 * 50 + 50), (1, 8 * 100)):
        hardware = Hardware(staging=Staging(50, windows), scatter=Scatter(10**9))
        (record,), _ = run((0, hit(400)), hardware=hardware)
        assert record.all_landed_ns == landed


def test_a_slice_is_there_when_it_has_been_scattered() -> None:
    (record,), _ = run((0, hit(400)), hardware=Hardware(scatter=Scatter(10**9, launch_ns=7)))
    assert record.first_layer_ns == 100 + 7 + 100


def test_another_contexts_kernel_waits_for_its_time_slice_only_while_the_engine_computes() -> None:
    hardware = Hardware(scatter=Scatter(10**12, foreign_wait_ns=1_000))
    (idle,), _ = run((0, hit(400)), hardware=hardware)
    (_, beside), _ = run((0, Request(0, 1, output_tokens=300)), (50, hit(400)), hardware=hardware)
    assert idle.all_landed_ns == 400
    assert beside.all_landed_ns - beside.submitted_ns == pytest.approx(100 + 4 * 1_000, abs=10)


def test_equal_shares_land_two_loads_together_and_late() -> None:
    serial, _ = run((0, hit(400)), (0, hit(400)))
    shared, _ = run((0, hit(400)), (0, hit(400)), hardware=Hardware(sharing=Sharing.EQUAL))
    assert [record.all_landed_ns for record in serial] == [400, 800]
    assert [record.all_landed_ns for record in shared] == [800, 800]
    assert [record.first_layer_ns for record in shared] == [200, 200]


def test_a_short_load_leaves_a_shared_link_to_the_long_one() -> None:
    shared, _ = run((0, hit(400)), (0, hit(80)), hardware=Hardware(sharing=Sharing.EQUAL))
    assert [record.all_landed_ns for record in shared] == [480, 160]


def test_a_tier_brings_slices_one_by_one_behind_its_latency() -> None:
    hardware = Hardware(tiers=(Tier("disk", 5 * 10**8, latency_ns=30),))
    (record,), world = run((0, hit(400, tier="disk")), hardware=hardware)
    assert (record.first_layer_ns, record.all_landed_ns) == (200 + 30 + 100, 4 * 200 + 30 + 100)
    assert [row.end_ns for row in world.slices if row.station is Station.TIER] == [200, 400, 600, 800]


def test_a_hit_of_the_host_pool_passes_one_that_waits_for_a_tier() -> None:
    hardware = Hardware(tiers=(Tier("disk", 10**7),))
    (slow, quick), _ = run((0, hit(400, tier="disk")), (0, hit(400)), hardware=hardware)
    assert quick.all_landed_ns == 400 < slow.first_layer_ns


def test_a_layer_has_landed_when_the_slowest_rank_has_it_and_the_record_names_that_rank() -> None:
    (record,), world = run((0, hit(400)), hardware=Hardware(ranks=(Ratio(1, 1), Ratio(1, 2), Ratio(2, 3))))
    assert (record.first_layer_ns, record.all_landed_ns, record.rank) == (200, 800, 1)
    assert world.link.carried_bytes == 3 * 400


def test_a_store_slows_a_load_and_is_slowed_by_it() -> None:
    storing = Request(0, 1, store=load_of(400))
    for both, landed, stored in ((Ratio(1, 1), 40 + 400, 40 + 400), (Ratio(1, 2), 40 + 800, 40 + 800)):
        (store, load), _ = run((0, storing), (40, hit(400)), hardware=Hardware(both_busy=both))
        assert (load.all_landed_ns, store.stored_ns) == (landed, stored)


def test_what_crossed_before_the_store_began_is_not_carried_again() -> None:
    storing = Request(0, 10, store=load_of(400))  # its prefill ends at 400, in the midst of the load
    (_, load), _ = run((0, storing), (0, hit(800, width=4)), hardware=Hardware(both_busy=Ratio(1, 2)))
    assert load.all_landed_ns == 400 + 800


def test_the_first_slice_begins_after_the_hand_over() -> None:
    (record,), _ = run((0, hit(400)), hardware=Hardware(first_slice_ns=30))
    assert (record.submitted_ns, record.first_layer_ns, record.all_landed_ns) == (0, 130, 430)


@pytest.mark.parametrize(
    "hardware",
    [
        Hardware(staging=Staging(500)),
        Hardware(staging=Staging(70)),
        Hardware(sharing=Sharing.EQUAL),
        Hardware(ranks=(Ratio(1, 1), Ratio(1, 2))),
    ],
)
def test_a_forecast_in_the_midst_of_a_slice_comes_true(hardware: Hardware) -> None:
    for instant in (1, 130, 333):
        world = World(LinearCompute(), Fifo(), Whole(), hardware=hardware)
        forecasts: list[dict[int, list[int]]] = []
        for _ in range(2):
            world.arrive_at(0, hit(400, width=2))
        world.clock.at(instant, Phase.FORM, lambda world=world, into=forecasts: into.append(world.link.forecast_ns()))
        landed = {record.sequence: record.all_landed_ns for record in world.run()}
        assert {sequence: row[-1] for sequence, row in forecasts[0].items()} == landed


# ---------------------------------------------------------------- the engine


@pytest.mark.parametrize(
    ("submit_at", "submitted"), [(SubmitAt.ARRIVAL, 10), (SubmitAt.POLL, 200), (SubmitAt.AFTER_FORWARD, 200 + 30)]
)
def test_a_load_is_submitted_at_once_at_the_poll_or_behind_the_next_forward(
    submit_at: SubmitAt, submitted: int
) -> None:
    settings = EngineSettings(submit_at=submit_at, launch_ns=30)
    records, _ = run((0, Request(0, 5, output_tokens=50)), (10, hit(400)), settings=settings)
    assert records[1].submitted_ns == submitted


def test_a_launch_that_waits_for_layers_submits_behind_the_last_of_its_waits() -> None:
    settings = EngineSettings(submit_at=SubmitAt.AFTER_FORWARD, launch_ns=5)
    first, second = run((0, hit(4000)), (1500, hit(400)), release=First(), settings=settings)[0]
    assert first.started_ns == 1000
    assert second.submitted_ns == first.first_token_ns, (
        "the step that stood for the first load had been launched before"
    )


def test_submissions_keep_the_engines_thread_busy() -> None:
    settings = EngineSettings(submit_at=SubmitAt.POLL, submit_ns=6)
    (first, _), _ = run((0, Request(0, 1)), (0, hit(400)), settings=settings)
    assert first.started_ns == 6


def test_an_engine_that_admits_requests_itself_polls_only_afterwards_and_one_request_after_another() -> None:
    settings = EngineSettings(admits_itself=True)
    decoding, first, second = run(
        (0, Request(0, 1, output_tokens=9)),
        (41, Request(0, 1, admission_ns=100)),
        (41, Request(0, 1, admission_ns=100)),
        settings=settings,
    )[0]
    assert (first.admitted_ns, second.admitted_ns) == (141, 241)
    assert decoding.end_ns > 241
    assert first.started_ns == second.started_ns == 241


def test_a_blocked_step_goes_on_a_wake_up_later() -> None:
    (record,), world = run((0, hit(4000)), release=First(), settings=EngineSettings(wake_ns=5))
    assert record.first_token_ns == 4000 + 5 + 10
    assert world.stall_ns == 3 * (1000 - 10) - 3 * 0 + 5


# ---------------------------------------------------------------- blocks


def test_a_load_holds_its_prompts_blocks_and_a_later_one_waits_for_them() -> None:
    settings = EngineSettings(kv_blocks=3, block_tokens=8)
    first, second = run((0, hit(400)), (0, hit(400)), settings=settings)[0]
    assert second.submitted_ns == first.end_ns


def test_nobody_passes_a_request_that_waits_for_blocks() -> None:
    settings = EngineSettings(kv_blocks=5, block_tokens=8)
    large = Request(0, 30, output_tokens=2)
    first, second, third = run((0, Request(0, 16, output_tokens=9)), (1, large), (2, Request(0, 1)), settings=settings)[
        0
    ]
    assert third.started_ns >= second.started_ns == first.end_ns, "though the third would have had room at once"


def test_the_youngest_loses_its_blocks_and_computes_again_what_it_had() -> None:
    settings = EngineSettings(kv_blocks=6, block_tokens=4)
    asked = Request(0, 8, output_tokens=12)
    (old, young), world = run((0, asked), (0, asked), settings=settings)
    assert (old.preemptions, young.preemptions) == (0, 1)
    assert [step.preempted for step in world.steps if step.preempted] == [(young.sequence,)]
    again = [chunk for step in world.steps for chunk in step.chunks if chunk.request == young.sequence][1:]
    assert sum(chunk.num_tokens for chunk in again) > 8, "its prompt, and the tokens that it had generated"
    assert young.first_token_ns == old.first_token_ns < old.end_ns < young.end_ns
    assert world.blocks is not None
    assert world.blocks.held == 0


def test_blocks_are_held_until_they_have_been_stored() -> None:
    settings = EngineSettings(kv_blocks=1)
    first, second = run((0, Request(0, 1, store=load_of(800))), (1, Request(0, 1)), settings=settings)[0]
    assert second.started_ns == first.stored_ns == 40 + 800


def test_a_request_that_never_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="40 tokens never fits into 2 blocks of 16"):
        run((0, Request(0, 20, output_tokens=20)), settings=EngineSettings(kv_blocks=2))


# ---------------------------------------------------------------- faults


def test_a_late_slice_holds_up_those_behind_it() -> None:
    (record,), _ = run((0, hit(400, fault=Fault(1, 1_000))))
    assert (record.first_layer_ns, record.all_landed_ns, record.failure) == (100, 1_200, "")


@pytest.mark.parametrize("release", [Whole(), First()], ids=str)
@pytest.mark.parametrize("policy", OnLoadFailure)
def test_a_lost_slice_is_given_up_in_time_and_the_prompt_computed_or_failed(
    release: ReleasePolicy, policy: OnLoadFailure
) -> None:
    settings = EngineSettings(load_timeout_ns=5_000, on_failure=policy)
    decoding = Request(0, 1, output_tokens=400)
    (_, record), world = run((0, decoding), (0, hit(400, fault=Fault(2))), release=release, settings=settings)
    assert record.failure == "slice 2 had not landed 5000 ns after submission"
    if policy is OnLoadFailure.FAIL:
        assert (record.ending, record.first_token_ns) == (Ending.FAILED, -1)
    else:
        assert (record.cached_tokens, record.new_tokens, record.load_bytes) == (0, 9, 0)
        assert record.first_token_ns > 5_000 + 9 * 4 * 10 - 1
    if isinstance(release, First):
        assert world.stall_ns > 4_000, "whoever was in the step stood until the load was given up"


def test_only_what_was_not_on_the_device_is_computed_again() -> None:
    settings = EngineSettings(load_timeout_ns=1_000)
    (record,), _ = run((0, hit(400, fault=Fault(0), resident_tokens=6)), settings=settings)
    assert (record.cached_tokens, record.new_tokens) == (6, 3)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (hit(tier="tape"), "no tier 'tape' in this hardware; it has disk"),
        (hit(fault=Fault(4, 1)), "one of the load's 4 slices"),
        (hit(fault=Fault(0)), "without a load_timeout_ns would never end"),
        (hit(resident_tokens=9), "some of the 8 cached ones, got 9"),
        (Request(0, 1, store=Load((1,), (1,), (1,))), "all 4 layers"),
    ],
)
def test_impossible_requests_are_refused(request_: Request, words: str) -> None:
    hardware = Hardware(tiers=(Tier("disk", 10**9),))
    with pytest.raises(ValueError, match=words):
        run((0, request_), hardware=hardware)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Hardware(ranks=()), "at least one speed"),
        (lambda: Hardware(ranks=(Ratio(2, 1),)), "above 0 and at most 1, got 2/1"),
        (lambda: Hardware(tiers=(Tier("a", 1), Tier("a", 2))), "different names, got a, a"),
        (lambda: Hardware(sharing=Sharing.EQUAL, staging=Staging(1)), "lands whole slices"),
        (lambda: Hardware(first_slice_ns=-1), "at least 0"),
        (lambda: Staging(0), "window_bytes must be at least 1, got 0"),
        (lambda: Scatter(0), "bytes_per_s must be at least 1"),
        (lambda: Tier("a", 0), "bytes_per_s must be at least 1"),
        (lambda: EngineSettings(kv_blocks=0), "kv_blocks must be at least 1, got 0"),
        (lambda: EngineSettings(load_timeout_ns=0), "load_timeout_ns must be at least 1, got 0"),
        (lambda: EngineSettings(wake_ns=-1), "wake_ns must be at least 0, got -1"),
    ],
)
def test_impossible_hardware_and_settings_are_refused(make: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()  # type: ignore[operator]


# ---------------------------------------------------------------- more is never slower


def landings(hardware: Hardware, requests: Sequence[Coming]) -> list[int]:
    return [record.all_landed_ns for record in run(*requests, hardware=hardware)[0]]


def test_under_fifo_a_faster_part_lands_nothing_later() -> None:
    requests = [(at, hit(size, tier="disk")) for at, size in ((0, 400), (10, 1200), (500, 80), (510, 800))]

    def way(tier: int, windows: int, scatter: int, rank: Ratio) -> list[int]:
        hardware = Hardware(
            (Ratio(1, 1), rank),
            staging=Staging(64, windows),
            scatter=Scatter(scatter, 3),
            tiers=(Tier("disk", tier),),
        )
        return landings(hardware, requests)

    base = way(10**9, 1, 10**9, Ratio(2, 3))
    better = (
        way(2 * 10**9, 1, 10**9, Ratio(2, 3)),
        way(10**9, 2, 10**9, Ratio(2, 3)),
        way(10**9, 1, 2 * 10**9, Ratio(2, 3)),
        way(10**9, 1, 10**9, Ratio(3, 3)),
    )
    for faster in better:
        assert all(quick <= slow for quick, slow in zip(faster, base, strict=True))
        assert faster != base
