"""Releases of a scheduler that is told all that workers report before it schedules, and so can release by forecast.

An engine that schedules ahead hears of a worker's look one pass late: what the look finds joins the next pass but one.
What such a scheduler releases itself, just before it schedules, joins the very next pass. It sees no slice land, but
when the device will be through with what is launched is known to it, and so is what will have landed by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from lamella.reference.release import ReleasePolicy, ReleaseView, StallPrice, waits_its_turn

RELEASE_LAG_STEPS: Final = 2
"""Decode steps that pass, where others decode, from a landing to the step of whoever it releases: the one that
computes, and one whose outputs are handed out before the release. A release by forecast may start a step sooner; but
taken for 1, requests whose prefill takes longer than their transfer are parked where they had better joined at once,
and others wait a step too often. Source: one H200 with 1 and with 2 (docs/concurrency.md)."""


def release_lag_ns(decode_ns: int, idle_poll_ns: int) -> int:
    """From a release to the start of its step.

    Args:
        decode_ns: a step of those who decode; 0: nobody does.
        idle_poll_ns: between two looks of an engine with nothing to compute.
    """
    return RELEASE_LAG_STEPS * decode_ns or idle_poll_ns


class CandidateLoad(NamedTuple):
    """A load that began in an earlier pass, of a request that is not released.

    Attributes:
        arrival_ns: per layer, when it landed, or the forecast of when it will; never falling.
        compute_ns: the whole first step of the request's prefill, alone.
        release: when the request may run.
        stall: what it costs others if the step stands; None where nobody has weighed it.
    """

    arrival_ns: tuple[int, ...]
    compute_ns: int
    release: ReleasePolicy
    stall: StallPrice | None


def released_at_hand_out(
    loads: Sequence[CandidateLoad],
    *,
    now_ns: int,
    start_delay_ns: int,
    step_ns: int,
    decoding: int,
    prefills: int,
    step_fixed_ns: int,
    first_tokens: int = 0,
) -> list[int]:
    """Indices of the loads whose requests join the pass that is scheduled now, rising.

    A rule that needs no forecast counts layers that have landed, which the scheduler does not see: its loads are left
    to the workers' looks. Released one after another where sharing a step would cost more.

    Args:
        loads: in the order in which they should be served.
        now_ns: the instant, of the clock of `arrival_ns`.
        start_delay_ns: how long the device still computes what is launched, at least 0: the pass starts then.
        step_ns: how much later the request would start if it were left to a look: the release lag.
        decoding: requests that decode.
        prefills: those that are in the pass already: cut, or released.
        step_fixed_ns: what a step costs besides its tokens.
        first_tokens: of the step that computes now. They are handed out when the one that is scheduled now has been
            launched, and its launch ends with the last layer's landing: none of them waits for a load longer than the
            load's request would for the next chance.
    """
    released: list[int] = []
    for index, load in enumerate(loads):
        if not load.release.needs_forecast:
            continue
        num_layers = len(load.arrival_ns)
        view = ReleaseView(
            now_ns=now_ns,
            arrival_ns=load.arrival_ns,
            layer_compute_ns=(load.compute_ns // num_layers,) * num_layers,
            start_delay_ns=start_delay_ns,
            step_ns=step_ns,
            victims=decoding,
            stall=load.stall,
        )
        if load.release.release_ns(view) > now_ns:
            continue
        if first_tokens * max(0, load.arrival_ns[-1] - now_ns - start_delay_ns) > step_ns:
            continue
        if not waits_its_turn(load.compute_ns, prefills + len(released), len(loads) - index - 1, step_fixed_ns):
            released.append(index)
    return released
