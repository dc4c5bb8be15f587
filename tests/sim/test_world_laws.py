"""What must be true of any right model, of one world beside another: of worlds with everything in them, either engine.

`test_laws.py` holds one world to itself; here a world is changed in a way whose effect is known beforehand.
"""

import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from lamella.reference.ordering import ORDERS, RoundRobin
from lamella.reference.release import First, JustInTime, WeighedRelease, Whole
from lamella.reference.timeline import NOTHING_TO_LOAD, Chunk, Load
from lamella.sim.arrivals import ClosedLoop
from lamella.sim.clock import Clock, Phase
from lamella.sim.hardware import Sharing, Tier
from lamella.sim.loads import Loads
from lamella.sim.overheads import open_overheads
from lamella.sim.profiles import load_profile
from lamella.sim.records import Station
from lamella.sim.requests import Job, Request
from lamella.sim.scheduler import Scheduler
from lamella.sim.serving import run_world
from lamella.sim.stations import Link, Prefill, Transfer
from lamella.sim.step_runner import StepRunner
from lamella.sim.strategies import CANDIDATES, Device, Regime, Strategy
from lamella.sim.what_if import with_compute, with_link
from lamella.sim.world import World
from rich_world import LAYERS, LinearCompute, Rich, load_of, random_ahead, random_rich

WORLDS = 60
SLOWER = 7
FAR_APART_NS = 1_000_000
PROFILE = load_profile()
OVERHEADS = replace(open_overheads("vllm-0.26-h200-llama-3.1-8b").overheads, scatter_permille=0, drift_permille=0)


def rich_worlds() -> Iterator[Rich]:
    for seed in range(WORLDS):
        for make in (random_rich, random_ahead):
            yield make(random.Random(seed))


def with_loads(rich: Rich, load: Callable[[Load], Load]) -> Rich:
    """The world with other loads, none of them at fault or from a tier."""
    changed = ((at, request._replace(load=load(request.load), tier="", fault=None)) for at, request in rich.coming)
    return replace(rich, coming=tuple(changed))


def everything(world: World) -> tuple[object, ...]:
    return world.records, world.steps, world.slices


# ---------------------------------------------------------------- the laws: None, or what is wrong


def a_spare_tier_changes_something(rich: Rich) -> str | None:
    spare = replace(rich.hardware, tiers=(*rich.hardware.tiers, Tier("spare", 10**7, 3)))
    return "a tier" if everything(replace(rich, hardware=spare).run()) != everything(rich.run()) else None


def a_rule_or_an_order_matters_without_a_hit(rich: Rich) -> str | None:
    """Without a hit every strategy computes the whole prompt, and so is recomputation."""
    bare = with_loads(rich, lambda _: NOTHING_TO_LOAD)
    rules = (Whole(), First(2), JustInTime(), JustInTime(None), WeighedRelease())
    if rich.ahead is not None and rich.ahead.joins_at_once:
        rules = rules[:2]
    first = everything(replace(bare, release=Whole()).run())
    for order in ORDERS.values():
        for rule in rules:
            if everything(replace(bare, order=order, release=rule).run()) != first:
                return f"{order.name}, {rule}"
    return None


def one_slice_is_not_chunk_major(rich: Rich) -> str | None:
    whole = with_loads(rich, lambda load: load_of(sum(load.slice_bytes), LAYERS) if load.slice_ns else load)
    first = everything(replace(whole, release=Whole()).run())
    return "first" if everything(replace(whole, release=First()).run()) != first else None


def an_order_matters_with_one_load_at_a_time(rich: Rich) -> str | None:
    coming = tuple((place * FAR_APART_NS, request) for place, (_, request) in enumerate(rich.coming))
    found = [everything(replace(rich, coming=coming, order=order).run()) for order in ORDERS.values()]
    return "an order" if any(one != found[0] for one in found) else None


def who_asks_matters(rich: Rich) -> str | None:
    """Tags are the caller's."""
    coming = tuple((at, request._replace(tag=-request.tag)) for at, request in rich.coming)
    renamed = [record._replace(tag=-record.tag) for record in replace(rich, coming=coming).run().records]
    return "a tag" if renamed != rich.run().records else None


def the_link_idles_beside_work(rich: Rich) -> str | None:
    """From a load's submission to its last byte a serial link carries something at every instant.

    One of an engine that schedules ahead may begin behind the steps that were made before.
    """
    hardware = rich.hardware
    simple = hardware.plain and not hardware.tiers and hardware.sharing is Sharing.SERIAL
    if not simple or hardware.first_slice_ns or rich.settings.kv_blocks or rich.settings.load_timeout_ns:
        return None
    world = rich.run()
    rows = sorted((row.begin_ns, row.end_ns, row.sequence) for row in world.slices if row.station is Station.H2D)
    for record in world.records:
        mine = [end for _, end, sequence in rows if sequence == record.sequence]
        if not mine:
            continue
        covered = record.submitted_ns
        if rich.ahead is not None:
            made_before = (step.end_ns for step in world.steps if step.polled_ns <= covered)
            covered = max([covered, *made_before])
        for begin, end, _ in rows:
            if end > covered and covered < max(mine):
                if begin > covered:
                    return f"request {record.tag} waited from {covered} to {begin}"
                covered = end
    return None


class Slower(LinearCompute):
    """Layers that take so many times as long, each a whole number of ns."""

    def __init__(self, times: int) -> None:
        self._times = times * LAYERS

    def step_layers_ns(self, prefills: Sequence[Prefill], decode_batch: int, decode_context_tokens: int) -> list[int]:
        return [self._times * ns for ns in super().step_layers_ns(prefills, decode_batch, decode_context_tokens)]

    def decode_ns(self, batch: int, context_tokens: int, num_steps: int) -> int:
        return self._times * super().decode_ns(batch, context_tokens, num_steps)


def slowed(rich: Rich, times: int) -> Rich:
    """The world with every time so many times as long."""

    def load(one: Load) -> Load:
        return one._replace(slice_ns=tuple(times * ns for ns in one.slice_ns))

    def later(request: Request) -> Request:
        fault, due = request.fault, request.due_after_ns
        if fault is not None and fault.late_ns is not None:
            fault = fault._replace(late_ns=times * fault.late_ns)
        return request._replace(
            load=load(request.load),
            store=load(request.store),
            admission_ns=times * request.admission_ns,
            due_after_ns=None if due is None else times * due,
            fault=fault,
        )

    settings, release = rich.settings, rich.release
    if isinstance(release, JustInTime) and release.patience_ns is not None:
        release = JustInTime(times * release.patience_ns)
    return replace(
        rich,
        coming=tuple((times * at, later(request)) for at, request in rich.coming),
        release=release,
        settings=replace(
            settings,
            load_timeout_ns=None if settings.load_timeout_ns is None else times * settings.load_timeout_ns,
            **{
                name: times * getattr(settings, name)
                for name in ("start_delay_ns", "idle_poll_ns", "launch_ns", "submit_ns", "wake_ns")
            },
        ),
        hardware=replace(rich.hardware, first_slice_ns=times * rich.hardware.first_slice_ns),
    )


def times_do_not_scale(rich: Rich) -> str | None:
    """Where nothing is a share of a time, which is rounded to a ns: no shared or slowed link, no share of a step."""
    hardware = rich.hardware
    exact = hardware.plain and not hardware.tiers and hardware.sharing is Sharing.SERIAL
    exact = exact and all(speed.denominator % speed.numerator == 0 for speed in hardware.ranks)
    if rich.ahead is not None or not exact or rich.release == JustInTime(None):
        return None
    fields = ("arrival_ns", "submitted_ns", "all_landed_ns", "released_ns", "first_token_ns", "end_ns", "stored_ns")
    for before, after in zip(
        rich.run(Slower(1)).records, slowed(rich, SLOWER).run(Slower(SLOWER)).records, strict=True
    ):
        for name in fields:
            then, now = getattr(before, name), getattr(after, name)
            if now != (then if then < 0 else SLOWER * then):
                return f"request {before.tag}: {name} {then} became {now}"
    return None


LAWS = [
    a_spare_tier_changes_something,
    a_rule_or_an_order_matters_without_a_hit,
    one_slice_is_not_chunk_major,
    an_order_matters_with_one_load_at_a_time,
    who_asks_matters,
    the_link_idles_beside_work,
    times_do_not_scale,
]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_no_world_breaks_it(law: Callable[[Rich], str | None]) -> None:
    for number, rich in enumerate(rich_worlds()):
        assert law(rich) is None, f"world {number}: {law(rich)}"


# ---------------------------------------------------------------- of a measured device


def devices(gb_per_s: float, speed: float = 1) -> list[Device]:
    profile = with_compute(with_link(PROFILE, f"{gb_per_s:g}GB/s"), speed)
    return [Device(profile, overheads=overheads, extrapolate=True) for overheads in (None, OVERHEADS)]


@pytest.mark.parametrize("faster", [(2, 1), (1, 2)], ids=["link", "GPU"])
@pytest.mark.parametrize("strategy", CANDIDATES, ids=str)
def test_to_one_user_a_machine_twice_as_fast_is_never_later(strategy: Strategy, faster: tuple[float, float]) -> None:
    """By more than a poll, which may come a little before a landing or behind it."""
    link, speed = faster
    poll_ns = PROFILE.engine.idle_poll_ns
    for gb_per_s in (2.0, 20.0):
        for slow, fast in zip(devices(gb_per_s), devices(link * gb_per_s, speed), strict=True):
            for hit, new in [(16, 64), (1024, 768), (15_152, 64), (15_152, 256), (15_152, 2048), (30_000, 9_000)]:
                for outputs in (1, 20):
                    regime = Regime(hit, new, 1, outputs)
                    before, after = (
                        [record.ttft_ns for record in run_world(one, regime, strategy, 4, 0).records]
                        for one in (slow, fast)
                    )
                    assert sum(after) <= sum(before) + poll_ns * len(before), (gb_per_s, regime, before, after)


@pytest.mark.parametrize("strategy", CANDIDATES, ids=str)
@pytest.mark.parametrize("overheads", [None, OVERHEADS], ids=["bare", "ahead"])
def test_users_who_ask_at_once_keep_as_many_in_flight_as_they_are(strategy: Strategy, overheads: object) -> None:
    """So that requests in flight are their rate times their time, while there are questions left."""
    users, each = 4, 6
    device = Device(PROFILE, overheads=OVERHEADS if overheads else None)
    world = run_world(device, Regime(4_096, 768, users, 8), strategy, each, 3, ClosedLoop())
    ends = sorted(record.end_ns for record in world.records)
    begins = sorted(record.arrival_ns for record in world.records)
    assert begins[users:] == ends[:-users], "each question follows an answer at once, and nothing else begins one"
    for instant in begins[users - 1 : -1]:
        assert bisect_right(begins, instant) - bisect_right(ends, instant) == users


# ---------------------------------------------------------------- planted wrong models


def every_load_reads_the_last_tier(patch: pytest.MonkeyPatch) -> None:
    start = Loads.start

    def wrong(self: Loads, job: Job) -> None:
        job.request = job.request._replace(tier=next(reversed(self._tiers), ""))
        start(self, job)

    patch.setattr(Loads, "start", wrong)


def a_rule_that_weighs_steps_makes_them_longer(patch: pytest.MonkeyPatch) -> None:
    begin = StepRunner._begin_stretch

    def wrong(self: StepRunner) -> None:
        self._delay_ns += self._release.weighs_steps
        begin(self)

    patch.setattr(StepRunner, "_begin_stretch", wrong)


def an_early_release_takes_a_nanosecond(patch: pytest.MonkeyPatch) -> None:
    release = Scheduler.release

    def wrong(self: Scheduler, job: Job, now_ns: int) -> None:
        early = job.gate is not None and job.gate._release_after_layers < job.gate.num_layers
        release(self, job, now_ns + early)

    patch.setattr(Scheduler, "release", wrong)


def taking_turns_takes_time(patch: pytest.MonkeyPatch) -> None:
    carry = Link._carry

    def wrong(self: Link, transfer: Transfer, part: int) -> None:
        load = transfer.load
        if isinstance(self._order, RoundRobin):
            transfer.load = load._replace(slice_ns=tuple(ns + 1 for ns in load.slice_ns))
        carry(self, transfer, part)
        transfer.load = load

    patch.setattr(Link, "_carry", wrong)


def ready_ones_go_by_the_callers_number(patch: pytest.MonkeyPatch) -> None:
    release = Scheduler.release

    def wrong(self: Scheduler, job: Job, now_ns: int) -> None:
        release(self, job, now_ns)
        self._ready = sorted((one.request.tag, one) for _, one in self._ready)

    patch.setattr(Scheduler, "release", wrong)


def the_link_rests_between_two_slices(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: Clock, phase: Phase, action: Callable[[], object]) -> None:
        self.at(self.now_ns + (phase is Phase.CHOOSE), phase, action)

    patch.setattr(Clock, "soon", wrong)


def every_step_has_a_cost_that_nobody_set(patch: pytest.MonkeyPatch) -> None:
    begin = StepRunner._begin_step

    def wrong(self: StepRunner, taken: list[tuple[Job, Chunk]]) -> None:
        self._delay_ns += 1
        begin(self, taken)

    patch.setattr(StepRunner, "_begin_step", wrong)


WRONG = [
    every_load_reads_the_last_tier,
    a_rule_that_weighs_steps_makes_them_longer,
    an_early_release_takes_a_nanosecond,
    taking_turns_takes_time,
    ready_ones_go_by_the_callers_number,
    the_link_rests_between_two_slices,
    every_step_has_a_cost_that_nobody_set,
]


@pytest.mark.parametrize(("law", "plant"), [*zip(LAWS, WRONG, strict=True)], ids=lambda one: one.__name__)
def test_a_wrong_world_breaks_it(
    law: Callable[[Rich], str | None], plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert any(law(rich) for rich in rich_worlds()), f"{2 * WORLDS} worlds did not notice"
