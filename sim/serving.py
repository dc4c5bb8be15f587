"""One regime served by one strategy in the world, as discrete events: what its users get, and whether to turn it on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from lamella.sim.arrivals import Arrivals, ClosedLoop, OnFinish, request_maker
from lamella.sim.bounds import MOST_REQUESTS, check_range, check_seed
from lamella.sim.hardware import Hardware
from lamella.sim.records import Ending, RequestRecord
from lamella.sim.regimes import WORTH_IT
from lamella.sim.strategies import OFF, Device, Regime, Strategy
from lamella.sim.world import World


@dataclass(frozen=True, slots=True)
class Slo:
    """What an answer must keep to be worth anything: time to first token, time of each further one; None: no matter.

    Raises:
        ValueError: a bound that is not positive.
    """

    ttft_ns: int | None = None
    tpot_ns: int | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_ns", "tpot_ns"):
            bound = getattr(self, name)
            if bound is not None and bound < 1:
                raise ValueError(f"an SLO must be positive, got {name} {bound}")

    def met(self, record: RequestRecord) -> bool:
        """Whether the request kept both bounds."""
        in_time = self.ttft_ns is None or record.ttft_ns <= self.ttft_ns
        return in_time and (self.tpot_ns is None or record.tpot_ns <= self.tpot_ns)


class Outcome(NamedTuple):
    """What one strategy does: means and quantiles over requests, busy shares of the whole run.

    Admission, submission, transfer_wait, release_wait, queue, stall and computing add up to the mean TTFT.
    `first_layer_ns` counts from submission; `caused_stall_ns` is how long the engine stood for a request's layers,
    `victim_stall_ns` how long a request stood for others'. `goodput_per_s` counts the requests that met the SLO,
    `slo_met` is their share; without an SLO all did.
    """

    strategy: Strategy
    mean_ttft_ns: float
    p50_ttft_ns: int
    p90_ttft_ns: int
    p99_ttft_ns: int
    mean_tpot_ns: float
    mean_end_ns: float
    admission_ns: float
    submission_ns: float
    transfer_wait_ns: float
    release_wait_ns: float
    queue_ns: float
    stall_ns: float
    computing_ns: float
    first_layer_ns: float
    caused_stall_ns: float
    victim_stall_ns: float
    requests_per_s: float
    goodput_per_s: float
    slo_met: float
    gpu_busy: float
    link_busy: float


def serve(
    device: Device,
    regime: Regime,
    strategy: Strategy,
    requests_per_user: int,
    seed: int,
    arrivals: Arrivals | None = None,
    slo: Slo | None = None,
    hardware: Hardware | None = None,
) -> Outcome:
    """The regime's requests come and are served to the end; arguments and errors as for `run_world`."""
    world = run_world(device, regime, strategy, requests_per_user, seed, arrivals, hardware)
    return summarise(strategy, world, slo or Slo())


def run_world(
    device: Device,
    regime: Regime,
    strategy: Strategy,
    requests_per_user: int,
    seed: int,
    arrivals: Arrivals | None = None,
    hardware: Hardware | None = None,
    *,
    keep: bool = False,
) -> World:
    """The world after everything has been served.

    Args:
        device: where.
        regime: who asks for what.
        strategy: how hits are moved.
        requests_per_user: 1 .. 100,000.
        seed: for everything drawn.
        arrivals: how requests come; None for users who ask again, starting within one request's unloaded time.
        hardware: what a load passes on its way; if it has a tier, all hits lie in the first one. None: one link.
        keep: whether the world keeps steps and slices, for a recording.

    Raises:
        ValueError: requests_per_user out of range, or a negative seed.
    """
    check_range("requests_per_user", requests_per_user, 1, MOST_REQUESTS)
    check_seed(seed)
    unloaded = device.transfer_ns(regime.hit_tokens) + device.prefill_ns(regime.hit_tokens, regime.new_tokens)
    coming = arrivals or ClosedLoop()
    if isinstance(coming, ClosedLoop):
        coming = replace(coming, spread_ns=unloaded)

    def build(on_finish: OnFinish) -> World:
        return World(
            device.compute(strategy),
            strategy.order,
            strategy.release,
            device.settings(),
            hardware=device.hardware(hardware),
            on_finish=on_finish,
            keep_steps=keep,
            keep_slices=keep,
            make_engine=device.engine(strategy, seed),
        )

    tier = hardware.tiers[0].name if hardware is not None and hardware.tiers else ""
    make = request_maker(device, strategy, regime.output_tokens, tier)
    world = coming.drive(build, make, regime, requests_per_user * regime.concurrency, seed)
    world.run()
    return world


def percentile(values: Sequence[int], share: float) -> int:
    """The smallest value that at least that share of all does not exceed.

    >>> percentile([5, 1, 3, 2, 4], 0.5), percentile([5, 1, 3, 2, 4], 0.99)
    (3, 5)
    """
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def summarise(strategy: Strategy, world: World, slo: Slo) -> Outcome:
    """What a world that has run means for those who asked.

    Raises:
        ValueError: no request was served.
    """
    records = [record for record in world.records if record.ending is Ending.DONE]
    if not records:
        raise ValueError("no request was served, so there is nothing to summarise")
    count, whole = len(records), world.clock.now_ns
    ttft = [record.ttft_ns for record in records]
    parts = [sum(column) / count for column in zip(*(record.ttft_parts() for record in records), strict=True)]
    admission, blocks, transfer, poll, queue, redone, stall, computing = parts
    met = sum(slo.met(record) for record in records)
    return Outcome(
        strategy,
        sum(ttft) / count,
        percentile(ttft, 0.5),
        percentile(ttft, 0.9),
        percentile(ttft, 0.99),
        sum(record.tpot_ns for record in records) / count,
        sum(record.end_ns - record.arrival_ns for record in records) / count,
        admission,
        blocks,
        transfer,
        poll,
        queue + redone,
        stall,
        computing,
        sum(record.first_layer_ns - record.submitted_ns for record in records) / count,
        sum(record.caused_stall_ns for record in records) / count,
        sum(record.victim_stall_ns for record in records) / count,
        count / (whole / 1e9),
        met / (whole / 1e9),
        met / len(world.records),
        world.busy_ns / whole,
        world.link.busy_ns / whole,
    )


def trade_of_off(off: Strategy, other: Strategy, ttft: float, end: float) -> str:
    """A sentence where the other thing that is off ends answers earlier; empty where it does not.

    Args:
        off: the better of what is off, by mean TTFT.
        other: the other.
        ttft: the other's mean TTFT over off's.
        end: the same of whole answers.

    >>> from lamella.sim.strategies import CHUNK_MAJOR, RECOMPUTE
    >>> trade_of_off(RECOMPUTE, CHUNK_MAJOR, 1.17, 0.622)
    "Of what is off, chunk-major's first tokens come 17.0% later than recompute's, and its answers end 37.8% earlier."
    """
    if end > 1 - WORTH_IT:
        return ""
    return (
        f"Of what is off, {other}'s first tokens come {ttft - 1:.1%} later than {off}'s, and its answers end "
        f"{1 - end:.1%} earlier."
    )


def verdict_of(asked: Outcome, others: Sequence[Outcome]) -> str:
    """Whether to use the strategy asked for, against what is off and against the best of the others."""
    off = min((one for one in others if one.strategy in OFF), key=lambda one: one.mean_ttft_ns)
    change = asked.mean_ttft_ns / off.mean_ttft_ns - 1
    price = asked.mean_end_ns / off.mean_end_ns - 1
    beside = f"mean TTFT {change:+.1%} and whole answers {price:+.1%} against {off.strategy}, the best of what is off"
    best = min((asked, *others), key=lambda one: one.mean_ttft_ns)
    better = best.mean_ttft_ns < (1 - WORTH_IT) * asked.mean_ttft_ns
    if not asked.strategy.layerwise:
        head = f"{asked.strategy} is layerwise transfer left off: {beside}."
    elif change <= -WORTH_IT and price >= WORTH_IT:
        head = f"Turn it on with {asked.strategy} only if first tokens matter more than whole answers: {beside}."
    elif change <= -WORTH_IT:
        head = f"Turn it on with {asked.strategy}: {beside}."
    else:
        head = f"Leave it off: {asked.strategy} gives {beside}."
    if better:
        gained, left = (best.mean_ttft_ns / one.mean_ttft_ns - 1 for one in (asked, off))
        head += f" {best.strategy} does better: mean TTFT {gained:+.1%} against {asked.strategy}"
        head += f", {left:+.1%} against {off.strategy}." if best is not off else "."
    for one in others:
        if one.strategy in OFF and one is not off:
            traded = trade_of_off(
                off.strategy, one.strategy, one.mean_ttft_ns / off.mean_ttft_ns, one.mean_end_ns / off.mean_end_ns
            )
            head += f" {traded}" if traded else ""
    return head
