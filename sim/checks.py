"""A recorded arm beside the world's prediction for it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from lamella.sim.overheads import Overheads
from lamella.sim.recorded import RecordedRepeat, RecordedRun
from lamella.sim.recorded_arms import InputsWait, Modelled, model_of, predict, ttft_ns
from lamella.sim.recorded_moments import Moments, link_bytes_per_s
from lamella.sim.records import RequestRecord
from lamella.sim.strategies import Device

PERCENTILES: Final = (50, 90, 99)
FELL_BEHIND: Final = 0.5
"""A lane whose pace can fall did if a repeat's loads moved slower than such a share of the wire's rate."""
DRAWS: Final = 16
"""Runs of the world per prediction, each with another draw of the thread's times."""


class Parts(NamedTuple):
    """Mean instants of requests that loaded something, in ns from the engine's queue.

    Attributes:
        begun_ns: the load was begun.
        released_ns: a look found that it may run; of one released by forecast, as recorded, its step had begun.
        landed_ns: all of it had landed.
        stepped_ns: the pass began that gave its first token; of a prompt computed in one step.
    """

    begun_ns: float
    released_ns: float
    landed_ns: float
    stepped_ns: float


class Measured(NamedTuple):
    """An arm of a cell as recorded, over its repeats; times in ns."""

    ttft_ns: float
    error_ns: float
    tpot_ns: float
    percentiles_ns: tuple[int, ...]
    repeats: int
    parts: Parts | None = None


class Predicted(NamedTuple):
    """The same arm as the world has it."""

    ttft_ns: float
    tpot_ns: float
    percentiles_ns: tuple[int, ...]
    parts: Parts | None = None


class ArmCheck(NamedTuple):
    """One arm of one cell.

    Attributes:
        setting: what of it the world knows, the same for arms that differ in nothing else.
        graphs: what it replays, as recorded.
        spoiled: a known fault of the recorded product, no part of the model, shows in its own instants.
        other_auto: it was chosen by other rules than the model's.
        commit: of the connector; the same cell and arm of another commit are another engine's.
    """

    cell: str
    arm: str
    measured: Measured
    predicted: Predicted
    setting: str = ""
    graphs: str = "piecewise"
    spoiled: bool = False
    other_auto: bool = False
    commit: str = ""

    @property
    def error(self) -> float:
        """Of the mean time to first token, as a share of the recorded one."""
        return self.predicted.ttft_ns / self.measured.ttft_ns - 1

    @property
    def spread(self) -> float:
        """The recording's own standard error, as a share."""
        return self.measured.error_ns / self.measured.ttft_ns

    @property
    def percentile_errors(self) -> tuple[float, ...]:
        """At each of `PERCENTILES`."""
        pairs = zip(self.predicted.percentiles_ns, self.measured.percentiles_ns, strict=True)
        return tuple(mine / theirs - 1 for mine, theirs in pairs)


class Where(NamedTuple):
    """A cell as one engine ran it; what another commit of the connector recorded is not averaged with it."""

    cell: str
    commit: str


@dataclass(frozen=True, slots=True)
class RecordedArm:
    """All repeats of an arm of a cell that the world can run."""

    model: Modelled
    repeats: tuple[RecordedRepeat, ...]

    @property
    def measured(self) -> Measured:
        """Over its repeats: a repeat is one observation."""
        means = [statistics.fmean(one.ttft_ns for one in repeat.counted) for repeat in self.repeats]
        every = [one.ttft_ns for repeat in self.repeats for one in repeat.counted]
        error = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.inf
        tpot = statistics.fmean(one.tpot_ns for repeat in self.repeats for one in repeat.counted)
        parts = _mean_parts(found for repeat in self.repeats for found in _recorded_parts(repeat))
        return Measured(statistics.fmean(means), error, tpot, percentiles(every), len(means), parts)

    @property
    def other_auto(self) -> bool:
        """Whether the world chooses for its requests, and by other rules than a repeat of it did."""
        return self.model.strategy.chooses and any(one.other_auto for one in self.repeats)

    def spoiled(self, device: Device) -> bool:
        """Whether a lane whose pace can fall let a repeat's loads crawl, by what the link carried."""
        wire = device.profile.wire.h2d_bytes_per_s
        rates = [link_bytes_per_s(one) for one in self.repeats if one.slow_lane and one.cell.tier_bytes_per_s is None]
        return any(rate is not None and rate < FELL_BEHIND * wire for rate in rates)


def _recorded_parts(repeat: RecordedRepeat) -> Iterable[Parts]:
    moments = Moments(repeat)
    for one in repeat.counted:
        if one.released_ns is None or one.ordered_ns is None:
            continue
        gave = moments.gave(one)
        if gave is not None:
            instants = (one.ordered_ns, one.released_ns, one.landed_ns[-1], gave.begin_ns - one.at_ns)
            yield Parts(*(instant - one.queued_ns for instant in instants))


def _predicted_parts(records: Iterable[RequestRecord]) -> Iterable[Parts]:
    for one in records:
        if one.load_bytes and one.began_ns > one.submitted_ns:  # else it was loaded inside its step
            instants = (one.submitted_ns, one.ready_ns, one.all_landed_ns, one.began_ns)
            yield Parts(*(instant - one.admitted_ns for instant in instants))


def _mean_parts(found: Iterable[Parts]) -> Parts | None:
    columns = list(zip(*found, strict=True))
    return Parts(*map(statistics.fmean, columns)) if columns else None


def percentiles(values: Sequence[int]) -> tuple[int, ...]:
    """Nearest-rank, at `PERCENTILES`.

    >>> percentiles([3, 1, 2, 4])
    (2, 4, 4)
    """
    ranked = sorted(values)
    return tuple(ranked[-(-len(ranked) * percent // 100) - 1] for percent in PERCENTILES)


def group_arms(
    repeats: Iterable[RecordedRepeat], inputs: InputsWait = InputsWait.TURN
) -> tuple[dict[Where, dict[str, RecordedArm]], dict[str, int]]:
    """(where -> arm -> its repeats, reason -> repeats left out): arms that the world can run, with what counts."""
    found: dict[Where, dict[str, tuple[Modelled, list[RecordedRepeat]]]] = {}
    left_out: dict[str, int] = {}
    for repeat in repeats:
        try:
            model = model_of(repeat, inputs)
        except ValueError as error:
            raise ValueError(f"{repeat.cell.name}, {repeat.arm}: {error}") from error
        if not repeat.counted:
            model = "no request of it counts"
        if isinstance(model, str):
            reason = f"{repeat.arm}: {model}"
            left_out[reason] = left_out.get(reason, 0) + 1
            continue
        where = Where(repeat.cell.name, repeat.commit)
        found.setdefault(where, {}).setdefault(repeat.arm, (model, []))[1].append(repeat)
    arms = {
        where: {arm: RecordedArm(model, tuple(rows)) for arm, (model, rows) in by_arm.items()}
        for where, by_arm in found.items()
    }
    return arms, left_out


def check_arm(arm: RecordedArm, run: RecordedRun, device: Device, overheads: Overheads) -> ArmCheck:
    """The arm's recording beside the world's prediction, over its repeats and draws of the thread's times.

    Raises:
        ValueError: the profile does not cover the cell.
    """
    first = arm.repeats[0]
    draws = DRAWS if overheads.scatter_permille or overheads.drift_permille else 1
    try:
        records = [
            record
            for draw in range(draws)
            for record in predict(arm.repeats[draw % len(arm.repeats)], arm.model, run, device, overheads, draw)
        ]
    except ValueError as error:
        raise ValueError(f"{first.cell.name}, {first.arm}: {error}, or take the cell out of the split") from error
    times = [ttft_ns(record) for record in records]
    tpot = statistics.fmean(record.tpot_ns for record in records)
    parts = _mean_parts(_predicted_parts(records))
    predicted = Predicted(statistics.fmean(times), tpot, percentiles(times), parts)
    return ArmCheck(
        first.cell.name,
        first.arm,
        arm.measured,
        predicted,
        str(arm.model),
        first.graphs,
        arm.spoiled(device),
        arm.other_auto,
        first.commit,
    )
