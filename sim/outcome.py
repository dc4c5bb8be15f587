"""What a replay found: the figures of each arm, whether they are queueing, and the sentence that follows from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from lamella.sim.routing import BLOCK_TOKENS, RoutedRequest, Routing
from lamella.sim.serving import Slo
from lamella.sim.world import World

SATURATED_STRETCH: Final = 2.0
"""With a stretch above this, requests wait longer for each other than they take."""
LEAST_GAIN: Final = 0.02
"""A smaller gain in time to first token is no reason to switch anything on."""


class Quantiles(NamedTuple):
    """Nearest-rank quantiles and the mean, in ns; all 0 if there was nothing."""

    mean_ns: int
    p50_ns: int
    p90_ns: int
    p99_ns: int


@dataclass(frozen=True, slots=True)
class ArmResult:
    """What one arm did with the trace.

    Attributes:
        arm: its name.
        num_requests: requests that were served to the end.
        ttft: from arrival to first token.
        ttft_of_hits: the same, of requests with something cached.
        tpot: time of an output token after the first.
        latency: from arrival to last token.
        gpu_busy_share: time in steps over the instances' time up to the last token.
        stall_share: time in which a step stood waiting for a layer, over the same.
        link_busy_share: time in which slices moved, over the same.
        loaded_bytes: what the links carried.
        stretch: mean time to first token by what it would be if each request had an idle instance to itself, loading
            chunk-major (or computing everything, in an arm that does).
        peak_kv_tokens: most tokens that one instance's blocks held at a time, loads on their way included.
        slo_met: share of the requests that met the SLO; 1 without one.
        goodput_per_s: requests that met it over the time up to the last token of all.
        preemptions: how often a request lost its blocks to others and began again.
    """

    arm: str
    num_requests: int
    ttft: Quantiles
    ttft_of_hits: Quantiles
    tpot: Quantiles
    latency: Quantiles
    gpu_busy_share: float
    stall_share: float
    link_busy_share: float
    loaded_bytes: int
    stretch: float
    peak_kv_tokens: int
    slo_met: float = 1.0
    goodput_per_s: float = 0.0
    preemptions: int = 0

    @property
    def saturated(self) -> bool:
        """Whether times to first token are mostly queueing."""
        return self.stretch > SATURATED_STRETCH


class Tally:
    """Sums over the instances of one arm.

    Args:
        alone_ns: estimate of a request's time to first token on an idle instance, served as this arm serves it.
        slo: what counts as goodput.
    """

    def __init__(self, alone_ns: Callable[[RoutedRequest], int], slo: Slo | None = None) -> None:
        self._estimate_ns = alone_ns
        self._slo = slo or Slo()
        self._times: dict[str, list[int]] = {name: [] for name in ("ttft", "ttft_of_hits", "tpot", "latency")}
        summed = ("busy_ns", "stall_ns", "link_ns", "instance_ns", "alone_ns", "bytes", "met", "preemptions")
        self._sums = dict.fromkeys(summed, 0)
        self._most = dict.fromkeys(("peak_tokens", "last_ns"), 0)

    def add(self, world: World, requests: Sequence[RoutedRequest]) -> None:
        """Counts what a world made of the requests it was given.

        Raises:
            RuntimeError: a request was lost, or came out twice.
        """
        records = world.records
        given = {request.position: request for request in requests}
        if sorted(record.tag for record in records) != sorted(given):
            raise RuntimeError(f"{len(given)} requests went in and {len(records)} came out, not one for one")
        times, sums = self._times, self._sums
        for record in records:
            request = given[record.tag]
            times["ttft"].append(record.ttft_ns)
            if request.cached_tokens:
                times["ttft_of_hits"].append(record.ttft_ns)
            if record.output_tokens > 1:
                times["tpot"].append(round(record.tpot_ns))
            times["latency"].append(record.end_ns - record.arrival_ns)
            sums["alone_ns"] += self._estimate_ns(request)
            sums["met"] += self._slo.met(record)
            sums["preemptions"] += record.preemptions
        last_ns = max((record.end_ns for record in records), default=0)
        sums["busy_ns"] += world.busy_ns
        sums["stall_ns"] += world.stall_ns
        sums["link_ns"] += world.link.busy_ns
        sums["bytes"] += world.link.carried_bytes
        sums["instance_ns"] += last_ns
        self._note_most("last_ns", last_ns)
        if world.blocks is not None:
            self._note_most("peak_tokens", (world.blocks.capacity - world.blocks.least_free) * BLOCK_TOKENS)

    def _note_most(self, name: str, value: int) -> None:
        self._most[name] = max(self._most[name], value)

    @property
    def ttft_ns(self) -> tuple[int, ...]:
        """Every time to first token, in the order of the instances and of completion."""
        return tuple(self._times["ttft"])

    def document(self) -> dict[str, Any]:
        """What was counted, for `absorb`; JSON can hold it."""
        return {"times": self._times, "sums": self._sums, "most": self._most}

    def absorb(self, document: Mapping[str, Any]) -> None:
        """Adds what another tally of the same arm counted."""
        for name, values in document["times"].items():
            self._times[name] += values
        for name, value in document["sums"].items():
            self._sums[name] += value
        for name, value in document["most"].items():
            self._note_most(name, value)

    def result(self, arm: str) -> ArmResult:
        """The sums as shares and quantiles."""
        times, sums = self._times, self._sums
        time, count = max(1, sums["instance_ns"]), len(times["ttft"])
        return ArmResult(
            arm,
            count,
            quantiles(times["ttft"]),
            quantiles(times["ttft_of_hits"]),
            quantiles(times["tpot"]),
            quantiles(times["latency"]),
            sums["busy_ns"] / time,
            sums["stall_ns"] / time,
            sums["link_ns"] / time,
            sums["bytes"],
            sum(times["ttft"]) / max(1, sums["alone_ns"]),
            self._most["peak_tokens"],
            sums["met"] / max(1, count),
            sums["met"] / max(1, self._most["last_ns"]) * 1e9,
            sums["preemptions"],
        )


def quantiles(times_ns: Sequence[int]) -> Quantiles:
    """Mean and nearest-rank quantiles.

    >>> quantiles([3, 1, 2, 4])
    Quantiles(mean_ns=2, p50_ns=2, p90_ns=4, p99_ns=4)
    """
    if not times_ns:
        return Quantiles(0, 0, 0, 0)
    ranked = sorted(times_ns)
    at = [ranked[-(-len(ranked) * percent // 100) - 1] for percent in (50, 90, 99)]
    return Quantiles(sum(ranked) // len(ranked), *at)


def judge(baseline: ArmResult, candidates: Sequence[ArmResult], in_turn: Mapping[str, ArmResult] | None = None) -> str:
    """Which candidate to use in place of the baseline, or that none is worth it.

    Worth it is one that gains `LEAST_GAIN` in the mean or the median of the time to first token and does not lose half
    of that in the mean or at p99; of several, the one with the least mean. If it makes whole answers later by as much,
    the sentence leaves the choice to the reader. If half of its gain or more is there without a layer moved early, a
    second sentence says so.

    Args:
        baseline: what is off.
        candidates: what may be named.
        in_turn: by candidate, an arm that does of it only this: prefills take turns where sharing a step costs more.
    """
    if not candidates or not baseline.num_requests:
        return "Nothing was compared."
    worth = [result for result in candidates if _is_worth_it(result.ttft, baseline.ttft)]
    best = min(worth or candidates, key=lambda result: result.ttft.mean_ns)
    changes = (
        f"{_change(best.ttft.mean_ns, baseline.ttft.mean_ns)} in the mean, "
        f"{_change(best.ttft.p50_ns, baseline.ttft.p50_ns)} at p50, "
        f"{_change(best.ttft.p99_ns, baseline.ttft.p99_ns)} at p99"
    )
    tpot = (
        f"time per output token {_change(best.tpot.mean_ns, baseline.tpot.mean_ns)}, "
        f"whole answers {_change(best.latency.mean_ns, baseline.latency.mean_ns)}"
    )
    if not worth:
        return (
            f"Leave it off: no layerwise arm is worth it against {baseline.arm}; the best, {best.arm}, changes time to "
            f"first token by {changes}, {tpot}."
        )
    price = best.latency.mean_ns - baseline.latency.mean_ns
    only = price > LEAST_GAIN / 2 * baseline.latency.mean_ns
    condition = " only if first tokens matter more than whole answers" if only else ""
    said = f"Use {best.arm}{condition}: time to first token {changes} against {baseline.arm}; {tpot}."
    control = (in_turn or {}).get(best.arm)
    if control is not None:
        gain, without = (baseline.ttft.mean_ns - arm.ttft.mean_ns for arm in (best, control))
        if 0 < gain <= 2 * without:
            said += (
                f" Most of that is not its transfer's: whole objects, of which prefills take turns as {best.arm}'s do, "
                f"give {_change(control.ttft.mean_ns, baseline.ttft.mean_ns)} in the mean ({control.arm})."
            )
    return said


def _is_worth_it(ttft: Quantiles, reference: Quantiles) -> bool:
    gains = max(1 - ttft.mean_ns / reference.mean_ns, 1 - ttft.p50_ns / reference.p50_ns) >= LEAST_GAIN
    losses = max(ttft.mean_ns / reference.mean_ns, ttft.p99_ns / reference.p99_ns) - 1 > LEAST_GAIN / 2
    return gains and not losses


def remarks(routing: Routing, arms: Sequence[ArmResult], kv_capacity_tokens: int) -> list[str]:
    """What a reader of the figures must know: queueing, memory, and what was left out."""
    said: list[str] = []
    for arm in arms:
        if arm.saturated:
            said.append(
                f"{arm.arm} is saturated: the mean time to first token is {arm.stretch:.1f} times that of idle "
                f"instances, so it is mostly queueing; give it more instances or a lower rate."
            )
        if arm.preemptions:
            said.append(
                f"{arm.arm} ran out of room for KV ({kv_capacity_tokens:,} tokens on one GPU): requests lost their "
                f"blocks {arm.preemptions:,} times and began again, in its figures too."
            )
    if routing.excluded:
        count = len(routing.excluded)
        longest = max(request.input_tokens for request in routing.excluded)
        said.append(
            f"{count} request{' lies' if count == 1 else 's lie'} outside the profile and had to be left out (prompts "
            f"up to {longest:,} tokens); the JSON lists them."
        )
    return said


def _change(value: int, reference: int) -> str:
    return f"{value / reference - 1:+.1%}" if reference else "unchanged"
