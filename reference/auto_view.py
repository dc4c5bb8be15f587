"""What `lamella.reference.auto` chooses from, by what it knows, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from lamella.reference.release import ReleasePolicy


class Arm(Enum):
    """The ways of a hit; of equal ones the first is taken."""

    EARLY = "early"
    """Parked, loaded slice by slice, released while the rest is on the wire."""
    SYNC = "sync"
    """In the next step at once; each layer waits for its slice."""
    CHUNK_MAJOR = "chunk_major"
    """Parked, loaded as whole objects, released when all has landed."""
    OFF = "off"
    """Not loaded: computed again."""


class WaitingLoad(NamedTuple):
    """A request that waits for its load.

    Attributes:
        landed_ns: until its last layer lands, from now; at most 0 if it has.
        compute_ns: its prefill.
    """

    landed_ns: int
    compute_ns: int


@dataclass(frozen=True, slots=True)
class AutoView:
    """What is known when a request asks. Times are from now.

    Attributes:
        load_tokens: the hit, as far as the engine does not hold it already.
        cached_tokens: context of the new tokens if the hit is loaded: `load_tokens` and what the engine holds.
        new_tokens: prompt tokens behind the hit.
        link_wait_ns: until the link would begin this load.
        engine_wait_ns: until the next step can form.
        queued_ns: computing that goes before anything released from now on: prefills ready or cut.
        sharing: prefills that the next step computes whatever is chosen: released, cut, or without a load.
        waiting: loads that are under way and whose requests are not released, in the order of the link.
        decoding: requests that decode.
        bystanders: those of them whose own hit was not loaded.
        step_ns: length of a step in which only they do.
        idle: whether the engine computes nothing, so that it looks every idle poll.
        release_lag_ns: from the look or hand-out that lets a request run to the start of its step, while the engine
            computes a step for others; 0 where steps follow each other.
        joining_ns: what the host takes to put the request into a step.
        ordering_ns: of that, what goes before its load begins if it joins at once; None: all of it.
        first_tokens: of the step that computes now. An engine that schedules ahead hands them out when the next step
            has been launched, which ends with the landing of what that step waits for.
    """

    load_tokens: int
    cached_tokens: int
    new_tokens: int
    link_wait_ns: int = 0
    engine_wait_ns: int = 0
    queued_ns: int = 0
    sharing: int = 0
    waiting: tuple[WaitingLoad, ...] = ()
    decoding: int = 0
    bystanders: int = 0
    step_ns: int = 0
    idle: bool = True
    release_lag_ns: int = 0
    joining_ns: int = 0
    ordering_ns: int | None = None
    first_tokens: int = 0


class Prediction(NamedTuple):
    """What one arm would bring: the request's own time to first token, and that with what it costs others."""

    arm: Arm
    width: int | tuple[int, ...]
    ttft_ns: int
    cost_ns: int


@dataclass(frozen=True, slots=True)
class Decision:
    """The arm for one request.

    Attributes:
        chosen: what is done.
        predictions: of every arm the engine can do.
        release: when the request may run; means nothing for `SYNC` and `OFF`.
        compute_ns: the prefill's first step, over the loaded hit; what release decisions compare with.
        prefill_ns: all of its steps.
        load_ns: on the link, 0 if nothing is loaded.
        probe: loaded to see how fast the link is, although computing again seemed to cost less.
    """

    chosen: Prediction
    predictions: tuple[Prediction, ...]
    release: ReleasePolicy
    compute_ns: int
    prefill_ns: int
    load_ns: int
    probe: bool = False

    @property
    def arm(self) -> Arm:
        """The chosen arm."""
        return self.chosen.arm

    @property
    def loads(self) -> bool:
        """Whether anything is loaded."""
        return self.chosen.arm is not Arm.OFF

    @property
    def regret(self) -> float:
        """By how much the request's own first token is later than with the arm best for it alone; 0.1 for a tenth.

        Above 0 where another's delay, or a tie, decided otherwise.
        """
        return self.chosen.ttft_ns / max(1, min(one.ttft_ns for one in self.predictions)) - 1

    @property
    def regret_ns(self) -> int:
        """The same in ns."""
        return self.chosen.ttft_ns - min(one.ttft_ns for one in self.predictions)

    def reason(self) -> str:
        """The decision in one line, for a log."""
        told = ", ".join(
            f"{one.arm.value} {one.ttft_ns / 1e6:.1f}"
            + (f" (+{(one.cost_ns - one.ttft_ns) / 1e6:.1f} for others)" if one.cost_ns > one.ttft_ns else "")
            for one in self.predictions
        )
        how = "" if self.arm in (Arm.OFF, Arm.CHUNK_MAJOR) else f", {_width_text(self.chosen.width)} layers a slice"
        probe = " as a probe" if self.probe else ""
        return f"{self.arm.value}{how}{probe}; time to first token, ms: {told}; regret {self.regret:.1%}"


@dataclass(frozen=True, slots=True)
class Abilities:
    """What may be done with a hit; chunk-major always may.

    Attributes:
        early: release before all has landed.
        sync: take the request into the next step.
        off: compute it again.
        least_width: narrowest slices that copy near the rate of the wire.
    """

    early: bool = True
    sync: bool = True
    off: bool = True
    least_width: int = 1


def _width_text(width: int | tuple[int, ...]) -> str:
    return str(width) if isinstance(width, int) else ",".join(map(str, width))
