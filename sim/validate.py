"""The model held against recorded runs: how far off, which side of zero, and what its advice would have cost.

Cells are in one of two lists. On the first the few overheads of `lamella.sim.overheads` are fitted; on the second,
which the fit never saw, the model is judged. An error is judged beside the spread of the recording's own repeats:
nobody can predict a cell better than it repeats.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from lamella.sim.checks import PERCENTILES, ArmCheck, Measured, Predicted, RecordedArm, check_arm, group_arms
from lamella.sim.host_fit import fit
from lamella.sim.overheads import MeasuredOverheads
from lamella.sim.recorded import RecordedRun
from lamella.sim.recorded_arms import InputsWait
from lamella.sim.strategies import Device

BASELINES: Final = ("chunk_bounded", "chunk_deep")
"""The forms of chunk-major; effects are against the better of them, as recorded."""
NOT_ADVISED: Final = ("recompute",)
"""Arms that are compared and not recommended: they leave the cache unused."""
RELIABLE: Final = 0.10
"""An arm whose recorded mean has a larger standard error, or none because it ran once, is shown and not judged by."""
SURE: Final = 2.0
"""An effect is one that the run shows if it is larger than so many of its standard errors."""


class Split(NamedTuple):
    """Names of the cells to fit on and of those to be judged by; no name is in both."""

    calibrate: tuple[str, ...]
    test: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Split:
        """The split that JSON describes: `{"calibrate": [...], "test": [...]}`.

        Raises:
            ValueError: anything else, a cell in both lists, or no cell to be judged by.
        """
        try:
            found = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"a split is JSON: {error}") from error
        if not isinstance(found, dict) or set(found) - {"calibrate", "test", "note"}:
            raise ValueError('a split is an object with the lists "calibrate" and "test", and perhaps a "note"')
        lists = {name: found.get(name, []) for name in ("calibrate", "test")}
        for name, cells in lists.items():
            if not isinstance(cells, list) or not all(isinstance(cell, str) for cell in cells):
                raise ValueError(f"{name} must be a list of cells' names, got {cells!r}")
        both = set(lists["calibrate"]) & set(lists["test"])
        if both:
            raise ValueError(f"{', '.join(sorted(both))} in both lists: a cell that was fitted on proves nothing")
        if not lists["test"]:
            raise ValueError("the list test is empty: nothing would be judged")
        return cls(tuple(lists["calibrate"]), tuple(lists["test"]))


class Sign(NamedTuple):
    """Whether an arm is faster than chunk-major: as recorded, its standard error, and as predicted."""

    cell: str
    arm: str
    recorded: float
    error: float
    predicted: float

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

    def error_at(self, share: float) -> float:
        """The error that such a share of the arms does not exceed; 0 without arms."""
        errors = self.errors
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
        overheads: measured in the first list, or as given.
        fitted: whether they were measured here.
        calibrate, test: the judgement of each list.
        left_out: arms and cells without an answer, with the reason and how many repeats.
    """

    profile: str
    inputs: InputsWait
    overheads: MeasuredOverheads
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
                said.append(
                    f"{title}: {arm.cell} {arm.arm}: recorded {recorded:.1f} ms (± {arm.spread:.1%}, "
                    f"{arm.measured.repeats} repeats), predicted {predicted:.1f} ({arm.error:+.1%}); {tail}"
                )
        test = self.test
        said.append(
            f"Held out: error of the mean time to first token {test.error_at(0.5):.1%} in the median and "
            f"{test.error_at(0.9):.1%} at p90 of {len(test.errors)} arms (of {len(test.arms)}; the others are recorded "
            f"only once or to worse than {RELIABLE:.0%}); the side of zero right in {test.right_signs} "
            f"of {len(test.shown)} effects that the run shows; regret of the advice at most "
            f"{test.largest_regret:.1%} in {len(test.advice)} cells."
        )
        said += [f"Left out: {reason} ({count} repeats)." for reason, count in self.left_out.items()]
        return said


def _judgement_document(judgement: Judgement) -> dict[str, Any]:
    return {
        "median_error": judgement.error_at(0.5),
        "p90_error": judgement.error_at(0.9),
        "signs_shown": len(judgement.shown),
        "signs_right": judgement.right_signs,
        "largest_regret": judgement.largest_regret,
        "arms": [
            {
                "cell": arm.cell,
                "arm": arm.arm,
                "error": arm.error,
                "spread": arm.spread if math.isfinite(arm.spread) else None,
                "judged": is_reliable(arm),
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
    """Whether the recording is sure enough of the arm to judge a prediction by it."""
    return check.spread <= RELIABLE


def judge(checks: Sequence[ArmCheck]) -> Judgement:
    """Signs and advice of the cells whose arms were checked."""
    signs: list[Sign] = []
    advice: list[Advice] = []
    for cell in dict.fromkeys(check.cell for check in checks):
        arms = {check.arm: check for check in checks if check.cell == cell and is_reliable(check)}
        base = min(
            (arms[name] for name in BASELINES if name in arms), key=lambda check: check.measured.ttft_ns, default=None
        )
        if base is None:
            continue
        for name, check in arms.items():
            if name not in (*BASELINES, *NOT_ADVISED):
                signs.append(_sign(check, base))
        advice.append(_advice(cell, [check for name, check in arms.items() if name not in NOT_ADVISED]))
    return Judgement(tuple(checks), tuple(signs), tuple(advice))


def _advice(cell: str, checks: Sequence[ArmCheck]) -> Advice:
    """By setting: arms that are the same to the world count as one, by their mean."""
    settings: dict[str, list[ArmCheck]] = {}
    for check in checks:
        settings.setdefault(check.setting or check.arm, []).append(check)
    recorded = {name: statistics.fmean(one.measured.ttft_ns for one in of) for name, of in settings.items()}
    predicted = {name: statistics.fmean(one.predicted.ttft_ns for one in of) for name, of in settings.items()}
    best, mine = (min(means, key=means.__getitem__) for means in (recorded, predicted))
    return Advice(cell, mine, best, recorded[mine] / recorded[best] - 1)


def _sign(check: ArmCheck, base: ArmCheck) -> Sign:
    recorded = check.measured.ttft_ns / base.measured.ttft_ns
    error = recorded * math.hypot(check.spread, base.spread)
    predicted = check.predicted.ttft_ns / base.predicted.ttft_ns
    return Sign(check.cell, check.arm, recorded - 1, error, predicted - 1)


def measure(arms: Sequence[RecordedArm], run: RecordedRun, device: Device) -> MeasuredOverheads:
    """The overheads that recorded arms show, with where they come from."""
    repeats = [repeat for arm in arms for repeat in arm.repeats if repeat.settings is not None]
    found = fit(repeats, run, device)
    cells = ", ".join(dict.fromkeys(repeat.cell.name for repeat in repeats)) or "no cell"
    graphs = "full graphs" if run.full_graphs else "piecewise graphs"
    return MeasuredOverheads(
        f"vLLM {run.vllm} with {graphs} on {run.machine}", f"{found.repeats} repeats of {cells}", *found[:2]
    )


def validate(
    run: RecordedRun,
    device: Device,
    split: Split,
    overheads: MeasuredOverheads | None = None,
    inputs: InputsWait = InputsWait.TURN,
) -> Validation:
    """The run's cells beside the world's predictions.

    Args:
        run: what was recorded.
        device: the profile the predictions are made with.
        split: which cells are fitted on, and which judged by.
        overheads: as they are; None measures them in the first list.
        inputs: what a joining prompt waited for in the engine that ran.

    Raises:
        ValueError: none of the cells to be judged by was recorded, or the profile does not cover one of them.
    """
    arms, left_out = group_arms(run.repeats, inputs)
    lists = {
        name: [arm for cell in cells if cell in arms for arm in arms[cell].values()]
        for name, cells in (("calibrate", split.calibrate), ("test", split.test))
    }
    for cell in arms:
        if cell not in (*split.calibrate, *split.test):
            left_out[f"cell {cell}: in neither list"] = sum(len(arm.repeats) for arm in arms[cell].values())
    if not lists["test"]:
        raise ValueError(
            f"no cell of the list test was recorded; recorded are {', '.join(sorted(arms)) or 'none'}, asked for "
            f"{', '.join(split.test)}"
        )
    fitted = overheads is None
    if overheads is None:
        overheads = measure(lists["calibrate"], run, device)
    judged = {
        name: judge([check_arm(arm, run, device, overheads.overheads) for arm in chosen])
        for name, chosen in lists.items()
    }
    return Validation(device.profile.name, inputs, overheads, fitted, judged["calibrate"], judged["test"], left_out)
