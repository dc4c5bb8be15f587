"""The model held against recorded runs: how far off, which side of zero, and what its advice would have cost.

Cells are in one of two lists. On the first the few overheads of `lamella.sim.overheads` are fitted; on the second,
which the fit never saw, the model is judged. An error is judged beside the spread of the recording's own repeats:
nobody can predict a cell better than it repeats. Arms that a known fault of the recorded product spoiled are shown and
not judged by; the commit and the lane's recorded rate say which those are, not the error.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any, Final, NamedTuple

from lamella.sim.checks import PERCENTILES, ArmCheck, Measured, Predicted, RecordedArm, Where, check_arm, group_arms
from lamella.sim.host_fit import fit
from lamella.sim.overheads import MeasuredOverheads, Overheads, shipped_overheads
from lamella.sim.recorded import RecordedRepeat, RecordedRun
from lamella.sim.recorded_arms import InputsWait
from lamella.sim.splits import Split
from lamella.sim.strategies import Device

BASELINES: Final[Mapping[str, tuple[str, ...]]] = {
    "piecewise": ("chunk_bounded", "chunk_deep"),
    "full": ("chunk_full_graphs", "chunk_deep_full_graphs"),
    "both": ("chunk_both_graphs", "chunk_deep_both_graphs"),
}
"""The forms of chunk-major by the graphs that they replay; an arm's effect is against the better of those that replay
what it does, as recorded."""
_FORMS: Final = tuple(name for names in BASELINES.values() for name in names)
NOT_ADVISED: Final = ("recompute", "recompute_full_graphs")
"""Arms that are compared and not recommended: they leave the cache unused."""
RELIABLE: Final = 0.10
"""An arm whose recorded mean has a larger standard error, or none because it ran once, is shown and not judged by."""
SURE: Final = 2.0
"""An effect is one that the run shows if it is larger than so many of its standard errors."""


class Sign(NamedTuple):
    """Whether an arm is faster than chunk-major: as recorded, its standard error, and as predicted."""

    cell: str
    arm: str
    recorded: float
    error: float
    predicted: float
    commit: str = ""

    @property
    def shown(self) -> bool:
        """Whether the run shows an effect at all."""
        return abs(self.recorded) > SURE * self.error

    @property
    def right(self) -> bool:
        """Whether both are on the same side of zero."""
        return (self.recorded < 0) == (self.predicted < 0)


class Advice(NamedTuple):
    """What the model would have set for a cell, what was best there, and what following the model costs, as a share."""

    cell: str
    recommended: str
    best: str
    regret: float
    commit: str = ""


@dataclass(frozen=True, slots=True)
class Judgement:
    """The checks of one list of cells; `errors`, `signs` and `advice` are of the arms that the recording is sure of."""

    arms: tuple[ArmCheck, ...]
    signs: tuple[Sign, ...]
    advice: tuple[Advice, ...]

    @property
    def errors(self) -> list[float]:
        """Sizes of the arms' errors, sorted."""
        return sorted(abs(arm.error) for arm in self.arms if is_reliable(arm))

    @property
    def all_errors(self) -> list[float]:
        """The same of all arms, whatever they were recorded to and whatever spoiled them."""
        return sorted(abs(arm.error) for arm in self.arms)

    @property
    def spoiled(self) -> int:
        """How many arms a known fault of the recorded product spoiled."""
        return sum(arm.spoiled for arm in self.arms)

    @property
    def other_auto(self) -> int:
        """How many arms were chosen by other rules than the model's."""
        return sum(arm.other_auto for arm in self.arms)

    def error_at(self, share: float, *, of_all: bool = False) -> float:
        """The error that such a share of the arms does not exceed, of those judged by or of all; 0 without arms."""
        errors = self.all_errors if of_all else self.errors
        return errors[max(0, math.ceil(share * len(errors)) - 1)] if errors else 0.0

    @property
    def shown(self) -> list[Sign]:
        """Effects that the run shows."""
        return [sign for sign in self.signs if sign.shown]

    @property
    def right_signs(self) -> int:
        """How many of those are on the side that was predicted."""
        return sum(sign.right for sign in self.shown)

    @property
    def largest_regret(self) -> float:
        """Over the cells."""
        return max((advice.regret for advice in self.advice), default=0.0)


@dataclass(frozen=True, slots=True)
class Validation:
    """The whole.

    Attributes:
        profile: name of the device's profile.
        inputs: what a joining prompt was taken to wait for.
        overheads: measured in the first list, in all engines together; or as given.
        engines: by commit, those that each engine's own cells of that list show: its arms are predicted with them.
            Empty where they were given, or asked for together.
        fitted: whether they were measured here.
        calibrate, test: the judgement of each list.
        left_out: arms and cells without an answer, with the reason and how many repeats.
    """

    profile: str
    inputs: InputsWait
    overheads: MeasuredOverheads
    engines: Mapping[str, Overheads]
    fitted: bool
    calibrate: Judgement
    test: Judgement
    left_out: Mapping[str, int]

    def document(self) -> dict[str, Any]:
        """All of it as JSON can hold it."""
        return {
            "schema_version": 1,
            "kind": "lamella.validate",
            "profile": self.profile,
            "inputs_wait": self.inputs.value,
            "overheads": self.overheads.document(),
            "overheads_of_engines": {commit: asdict(found) for commit, found in self.engines.items()},
            "overheads_fitted": self.fitted,
            "calibrate": _judgement_document(self.calibrate),
            "test": _judgement_document(self.test),
            "left_out": dict(self.left_out),
        }

    def lines(self) -> list[str]:
        """What to print: arm by arm, then the four figures that decide."""
        said: list[str] = []
        for title, judgement in (("calibrated on", self.calibrate), ("held out", self.test)):
            for arm in judgement.arms:
                tail = ", ".join(
                    f"p{percent} {error:+.0%}"
                    for percent, error in zip(PERCENTILES, arm.percentile_errors, strict=True)
                )
                recorded, predicted = (times.ttft_ns / 1e6 for times in (arm.measured, arm.predicted))
                at = f" at {arm.commit[:7]}" if arm.commit else ""
                repeats = arm.measured.repeats
                scatter = f"± {arm.spread:.1%}, {repeats} repeats" if repeats > 1 else "one repeat"
                said.append(
                    f"{title}: {arm.cell}{at} {arm.arm}: recorded {recorded:.1f} ms ({scatter}), "
                    f"predicted {predicted:.1f} ({arm.error:+.1%}); {tail}"
                    + ("; not judged by: its lane fell behind" if arm.spoiled else "")
                    + ("; not judged by: its auto went by other rules" if arm.other_auto else "")
                )
        if self.fitted and not self.calibrate.arms:
            said.append(
                "Overheads: no cell in which they are measured was recorded, so all is predicted on the bare device; "
                f"--overheads takes a measured set: {', '.join(shipped_overheads())}, or a .json file."
            )
        test = self.test
        said.append(
            f"Held out: error of the mean time to first token {test.error_at(0.5):.1%} in the median and "
            f"{test.error_at(0.9):.1%} at p90 of {len(test.errors)} arms (over all {len(test.arms)} "
            f"{test.error_at(0.5, of_all=True):.1%} and {test.error_at(0.9, of_all=True):.1%}; of the others a slow "
            f"lane spoiled {test.spoiled}, auto went by other rules in {test.other_auto}, the rest are recorded only "
            f"once or to worse than {RELIABLE:.0%}); "
            f"the side of zero right in {test.right_signs} "
            f"of {len(test.shown)} effects that the run shows; regret of the advice at most "
            f"{test.largest_regret:.1%} in {len(test.advice)} cells."
        )
        said += [f"Left out: {reason} ({count} repeats)." for reason, count in self.left_out.items()]
        return said


def _judgement_document(judgement: Judgement) -> dict[str, Any]:
    return {
        "median_error": judgement.error_at(0.5),
        "p90_error": judgement.error_at(0.9),
        "median_error_of_all": judgement.error_at(0.5, of_all=True),
        "p90_error_of_all": judgement.error_at(0.9, of_all=True),
        "signs_shown": len(judgement.shown),
        "signs_right": judgement.right_signs,
        "largest_regret": judgement.largest_regret,
        "arms": [
            {
                "cell": arm.cell,
                "commit": arm.commit,
                "arm": arm.arm,
                "error": arm.error,
                "spread": arm.spread if math.isfinite(arm.spread) else None,
                "judged": is_reliable(arm),
                "spoiled": arm.spoiled,
                "other_auto": arm.other_auto,
                "recorded": {**_without_parts(arm.measured), "error_ns": _finite(arm.measured.error_ns)},
                "predicted": _without_parts(arm.predicted),
                "parts_ns": _parts_document(arm),
                "percentile_errors": dict(zip(map(str, PERCENTILES), arm.percentile_errors, strict=True)),
            }
            for arm in judgement.arms
        ],
        "signs": [
            {**sign._asdict(), "error": _finite(sign.error), "shown": sign.shown, "right": sign.right}
            for sign in judgement.signs
        ],
        "advice": [advice._asdict() for advice in judgement.advice],
    }


def _without_parts(times: Measured | Predicted) -> dict[str, Any]:
    return {name: value for name, value in times._asdict().items() if name != "parts"}


def _parts_document(arm: ArmCheck) -> dict[str, list[int]] | None:
    """(recorded, predicted) mean instants of requests that loaded, by what happened."""
    mine, theirs = arm.measured.parts, arm.predicted.parts
    if mine is None or theirs is None:
        return None
    return {
        name: [round(recorded), round(predicted)]
        for name, recorded, predicted in zip(mine._fields, mine, theirs, strict=True)
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def is_reliable(check: ArmCheck) -> bool:
    """Whether the recording is sure enough of the arm to judge a prediction by it, and it is what the model is of."""
    return not check.spoiled and not check.other_auto and check.spread <= RELIABLE


def judge(checks: Sequence[ArmCheck]) -> Judgement:
    """Signs and advice of the cells whose arms were checked."""
    signs: list[Sign] = []
    advice: list[Advice] = []
    for where in dict.fromkeys(Where(check.cell, check.commit) for check in checks):
        arms = {check.arm: check for check in checks if (check.cell, check.commit) == where and is_reliable(check)}
        bases = {
            graphs: min((arms[name] for name in names if name in arms), key=_recorded, default=None)
            for graphs, names in BASELINES.items()
        }
        for name, check in arms.items():
            base = bases.get(check.graphs)
            if base is not None and name not in (*_FORMS, *NOT_ADVISED):
                signs.append(_sign(check, base))
        if any(base is not None for base in bases.values()):
            advice.append(_advice(where, [check for name, check in arms.items() if name not in NOT_ADVISED]))
    return Judgement(tuple(checks), tuple(signs), tuple(advice))


def _recorded(check: ArmCheck) -> float:
    return check.measured.ttft_ns


def _advice(where: Where, checks: Sequence[ArmCheck]) -> Advice:
    """By setting: arms that are the same to the world count as one, by their mean."""
    settings: dict[str, list[ArmCheck]] = {}
    for check in checks:
        settings.setdefault(check.setting or check.arm, []).append(check)
    recorded = {name: statistics.fmean(one.measured.ttft_ns for one in of) for name, of in settings.items()}
    predicted = {name: statistics.fmean(one.predicted.ttft_ns for one in of) for name, of in settings.items()}
    best, mine = (min(means, key=means.__getitem__) for means in (recorded, predicted))
    return Advice(where.cell, mine, best, recorded[mine] / recorded[best] - 1, where.commit)


def _sign(check: ArmCheck, base: ArmCheck) -> Sign:
    recorded = check.measured.ttft_ns / base.measured.ttft_ns
    error = recorded * math.hypot(check.spread, base.spread)
    predicted = check.predicted.ttft_ns / base.predicted.ttft_ns
    return Sign(check.cell, check.arm, recorded - 1, error, predicted - 1, check.commit)


def measure(arms: Sequence[RecordedArm], run: RecordedRun, device: Device) -> MeasuredOverheads:
    """The overheads that recorded arms show, with where they come from; of all engines together."""
    repeats = _sound(arms, device)
    found = fit(repeats, run, device)
    cells = "; ".join(_cells(repeats)) or "0 repeats of no cell"
    graphs = " and ".join(sorted({repeat.graphs for repeat in repeats} - {"both"}, reverse=True)) or "no"
    return MeasuredOverheads(f"vLLM {run.vllm} with {graphs} graphs on {run.machine}", cells, *found[:2])


def _cells(repeats: Sequence[RecordedRepeat]) -> list[str]:
    """In which cells what was measured, and in how many repeats."""
    said: dict[frozenset[str] | None, list[RecordedRepeat]] = {}
    for repeat in (repeat for repeat in repeats if repeat.steps):
        said.setdefault(repeat.shows, []).append(repeat)
    return [
        ("" if shows is None else f"{', '.join(sorted(shows))} in ")
        + f"{len(of)} repeats of {', '.join(dict.fromkeys(repeat.cell.name for repeat in of))}"
        for shows, of in said.items()
    ]


def measure_each(
    arms: Sequence[RecordedArm], run: RecordedRun, device: Device, together: Overheads
) -> dict[str, Overheads]:
    """By commit of the engines, what each one's own arms show; what they do not show is as in all together."""
    found: dict[str, Overheads] = {}
    repeats = _sound(arms, device)
    for commit in dict.fromkeys(repeat.commit for repeat in repeats):
        own = fit([repeat for repeat in repeats if repeat.commit == commit], run, device)
        found[commit] = together.with_parts_of(own.overheads, own.shown)
    return found


def _sound(arms: Sequence[RecordedArm], device: Device) -> list[RecordedRepeat]:
    sound = [arm for arm in arms if not arm.spoiled(device)]
    return [repeat for arm in sound for repeat in arm.repeats if repeat.settings is not None]


def validate(
    run: RecordedRun,
    device: Device,
    split: Split,
    overheads: MeasuredOverheads | None = None,
    inputs: InputsWait = InputsWait.TURN,
    *,
    together: bool = False,
    tell: Callable[[Where, int, int], object] = lambda where, done, total: None,
) -> Validation:
    """The run's cells beside the world's predictions.

    Args:
        run: what was recorded.
        device: the profile the predictions are made with.
        split: which cells are fitted on, and which judged by.
        overheads: as they are; None measures them in the first list.
        inputs: what a joining prompt waited for in the engine that ran.
        together: every engine's arms are predicted with what all show together.
        tell: called before each arm: where it was recorded, how many are done, and of how many.

    Raises:
        ValueError: none of the cells to be judged by was recorded, or the profile does not cover one of them.
    """
    run = split.tell(run)
    arms, left_out = group_arms(run.repeats, inputs)
    lists = split.arms_of(arms)
    for where, of in arms.items():
        if where.cell not in (*split.calibrate, *split.test):
            reason = f"cell {where.cell}: in neither list"
            left_out[reason] = left_out.get(reason, 0) + sum(len(arm.repeats) for arm in of.values())
    if not lists["test"]:
        recorded = ", ".join(sorted({where.cell for where in arms})) or "none"
        raise ValueError(
            f"no cell of the list test was recorded; recorded are {recorded}, asked for {', '.join(split.test)}"
        )
    fitted = overheads is None
    if overheads is None:
        overheads = measure(lists["calibrate"], run, device)
    engines = measure_each(lists["calibrate"], run, device, overheads.overheads) if fitted and not together else {}
    common, done, total = overheads.overheads, count(), sum(map(len, lists.values()))

    def check(arm: RecordedArm) -> ArmCheck:
        first = arm.repeats[0]
        tell(Where(first.cell.name, first.commit), next(done), total)
        return check_arm(arm, run, device, engines.get(first.commit, common))

    judged = {name: judge([check(arm) for arm in chosen]) for name, chosen in lists.items()}
    return Validation(
        device.profile.name, inputs, overheads, engines, fitted, judged["calibrate"], judged["test"], left_out
    )
