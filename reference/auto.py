"""`auto`: for each request, which way its hit should reach the engine, from a calibrated device and the state of now.

A hit can be loaded slice by slice and released early, loaded whole (chunk-major), loaded into the very next step
(synchronous), or left where it is and computed again (off). `AutoPolicy.choose` predicts the time to first token of
each of these *arms*, adds what it would cost others, and takes the least:

    cost = own time to first token + delay of the requests that wait + bystander_weight * decoding * extra time

The prediction is a chain of the requests known now, in the order in which the link serves them; with c the computing
time of each and A the landing of its last layer::

    ends(e, i) = max(e + c_i, A_i + c_i * width / layers)         released early: the last slice's layers come behind it
    ends(e, i) = max(e, A_i) + c_i                                 released whole

The same `AutoPolicy` runs in the simulator and in the connector. It is pure: what it knows of the device beyond the
profile is a `Correction`, which observations turn into the next one.

Contracts: AUTO-1, AUTO-2 of `lamella.reference`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from lamella.reference.auto_view import Abilities, Arm, AutoView, Decision, Prediction, WaitingLoad
from lamella.reference.correction import Correction
from lamella.reference.profile import DeviceProfile, Graphs
from lamella.reference.release import ReleasePolicy, StallPrice, WeighedRelease, Whole
from lamella.reference.tables import PrefillTable

TIE: Final = 0.003
"""Costs this close are equal; then the arm that comes first in `Arm`'s order is taken."""
BYSTANDER_WEIGHT: Final = 0.3
"""Below it decoding requests pay visibly for others' first tokens; above it first tokens come later than chunk-major's
in some regimes. Source: the closed loops of benchmarks/auto_regret.py."""

READER_SHARE: Final = 1 / 3
"""Of the bystander weight, what a stall counts for those who come back to the link. With all of it, an engine that
schedules ahead waits a step too often; with none, tokens come visibly later. Source: the closed loops of
benchmarks/auto_regret.py, in which it changes little, and the model of the recorded cells (docs/model.md)."""


class AutoPolicy:
    """Chooses an arm for each request.

    Args:
        profile: the calibrated device; its link, host side and prefill times are used.
        num_layers: of the served model; None for the profile's.
        token_bytes: KV bytes of a token over all layers, on one rank; None for the profile's.
        token_budget: most tokens in a step; None for the profile's.
        bystander_weight: what a ns counts for which a decoding request stands still, against a ns of time to first
            token. Those whose own hit was loaded come back to the link when they are done: a stall costs them nothing
            while the link is busy with others, since they would only queue there the earlier.

    Raises:
        ValueError: a count below 1, or a weight below 0.
    """

    def __init__(
        self,
        profile: DeviceProfile,
        num_layers: int | None = None,
        token_bytes: int | None = None,
        token_budget: int | None = None,
        bystander_weight: float = BYSTANDER_WEIGHT,
    ) -> None:
        self._prefill: PrefillTable = profile.prefill
        self._compute = profile.compute(Graphs.PIECEWISE, extrapolate=True)
        self.num_layers = profile.num_layers if num_layers is None else num_layers
        self.token_bytes = profile.token_bytes if token_bytes is None else token_bytes
        self._budget = profile.engine.token_budget if token_budget is None else token_budget
        for name, value in (("num_layers", self.num_layers), ("token_bytes", self.token_bytes)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self._budget < 1:
            raise ValueError(f"token_budget must be at least 1, got {self._budget}")
        self._ns_per_byte = 1e9 / profile.wire.h2d_bytes_per_s
        self.slice_ns = profile.wire.slice_fixed_ns
        """What each slice costs on the link besides its bytes."""
        self._poll_ns = profile.engine.idle_poll_ns
        if not 0 <= bystander_weight < math.inf:
            raise ValueError(f"bystander_weight must be at least 0 and finite, got {bystander_weight}")
        self._weight = bystander_weight
        self._schedules = _schedules(self.num_layers)

    # ---- times

    def wire_ns(self, tokens: int) -> int:
        """The profile's time of that many tokens' bytes on the link, fixed costs apart."""
        return round(tokens * self.token_bytes * self._ns_per_byte)

    def load_ns(self, tokens: int, num_slices: int, correction: Correction) -> int:
        """A load's time on the link."""
        return round(self.wire_ns(tokens) * correction.wire) + num_slices * self.slice_ns

    def prefill_ns(self, cached: int, new: int, correction: Correction) -> tuple[int, int]:
        """(the first step of a prefill, all of its steps), each alone in its step."""
        first = total = 0.0
        done = 0
        while done < new:
            tokens = min(self._budget, new - done)
            step = correction.step_ns(self._prefill.alone_ns(cached + done, tokens))
            total += step
            first = first or step
            done += tokens
        return round(first), round(total)

    def step_ns(self, prefills: Sequence[tuple[int, int]], decoding: int = 0, context_tokens: int = 0) -> int:
        """The profile's time of a step with these (cached, new) prefills beside so many decoding requests."""
        return self._compute.step_ns(prefills, decoding, context_tokens)

    # ---- the choice

    def step_fixed_ns(self, correction: Correction) -> int:
        """What a step costs besides its tokens."""
        return round(self._prefill.alone_ns(0, 1) * correction.steps)

    def stall_price(self, bystanders: int, readers: int, prefills: int) -> StallPrice:
        """What a stall costs others; how long the link is busy, and readers are away, is the caller's to fill in."""
        return StallPrice(self._weight * bystanders + prefills, READER_SHARE * self._weight * readers)

    def choose(self, view: AutoView, correction: Correction, can: Abilities) -> Decision:
        """The arm whose cost is least (AUTO-1).

        Args:
            view: the request and the state of now.
            correction: what was observed so far.
            can: what the engine can do.

        Raises:
            ValueError: nothing to load or to compute, or a negative time.
        """
        if min(view.load_tokens, view.new_tokens) < 1 or view.cached_tokens < view.load_tokens:
            raise ValueError(f"a choice needs a hit and new tokens behind it, got {view}")
        times = (view.link_wait_ns, view.engine_wait_ns, view.queued_ns, view.step_ns, view.release_lag_ns)
        if (
            min(*times, view.joining_ns, view.ordering_ns or 0, view.first_tokens, view.sharing) < 0
            or not 0 <= view.bystanders <= view.decoding
        ):
            raise ValueError(f"times and counts must be at least 0, got {view}")
        first_ns, prefill_ns = self.prefill_ns(view.cached_tokens, view.new_tokens, correction)
        free_ns = view.engine_wait_ns + view.queued_ns
        ahead = _chain(free_ns, view.waiting)  # when each of those that wait is done, if nothing joins
        # Whoever is released computes behind them, and no sooner than in the step after the one that is made now.
        begin_ns = max(ahead[-1] if ahead else free_ns, free_ns + view.release_lag_ns)
        alone = view.idle and not view.decoding
        poll_ns = (self._poll_ns if alone else view.step_ns) // 2
        # From a landing to the start of the step that it lets begin; where others compute, the host joins it meanwhile.
        look_ns = poll_ns + view.release_lag_ns + (view.joining_ns if alone else 0)
        hurt = self._weight * view.decoding
        wire_ns = self.wire_ns(view.load_tokens) * correction.wire
        whole_ns = view.link_wait_ns + round(wire_ns) + self.slice_ns
        least = min(can.least_width, self.num_layers)

        found: list[Prediction] = []
        if can.early and least < self.num_layers:
            found.append(self._early(view, wire_ns, first_ns, prefill_ns, begin_ns, poll_ns, look_ns, hurt, least))
        if can.sync and least < self.num_layers:
            found.append(self._sync(view, wire_ns, first_ns, prefill_ns, ahead, hurt, least))
        ttft = max(whole_ns + look_ns, begin_ns) + prefill_ns
        found.append(Prediction(Arm.CHUNK_MAJOR, self.num_layers, ttft, round(ttft + hurt * prefill_ns)))
        if can.off:
            found.append(self._off(view, correction, ahead, hurt))
        bound = min(one.cost_ns for one in found) * (1 + TIE)
        chosen = next(one for one in found if one.cost_ns <= bound)
        release: ReleasePolicy = WeighedRelease() if chosen.arm is Arm.EARLY else Whole()
        load_ns = 0
        if chosen.arm is not Arm.OFF:
            load_ns = round(wire_ns) + self._num_slices(chosen.width) * self.slice_ns
        return Decision(chosen, tuple(found), release, first_ns, prefill_ns, load_ns)

    def _early(
        self,
        view: AutoView,
        wire_ns: float,
        first_ns: int,
        prefill_ns: int,
        begin_ns: int,
        poll_ns: int,
        look_ns: int,
        hurt: float,
        least: int,
    ) -> Prediction:
        """Slices of the best width, released with the first or just in time, whichever costs less."""
        start_ns = begin_ns - view.link_wait_ns  # from the load's first byte
        width, done_ns, landed_ns = self._best_width(wire_ns, first_ns, start_ns, look_ns, least, len(view.waiting))
        begun_ns = max(start_ns, landed_ns + look_ns)
        stall_ns = max(0, done_ns - begun_ns - first_ns)
        extra_ns = min(hurt * stall_ns, float(poll_ns)) if hurt else 0.0  # waits for a later poll where that is cheaper
        ttft = view.link_wait_ns + done_ns + prefill_ns - first_ns
        if hurt and hurt * stall_ns > poll_ns:
            ttft += poll_ns
            extra_ns = 0.0
        return Prediction(Arm.EARLY, width, ttft, round(ttft + extra_ns + hurt * prefill_ns))

    def _sync(
        self,
        view: AutoView,
        wire_ns: float,
        first_ns: int,
        prefill_ns: int,
        ahead: Sequence[int],
        hurt: float,
        least: int,
    ) -> Prediction:
        """In the next step: everybody who decodes, and every load released meanwhile, stands until this one landed.

        Until the step starts the engine computes for them: only what the first layer lands later than that is idle.
        First tokens that are computed now are handed out when this load has landed, and those of prefills that share
        the step when all of it is computed.
        """
        ordering_ns = view.joining_ns if view.ordering_ns is None else min(view.ordering_ns, view.joining_ns)
        begins_ns = max(view.link_wait_ns, ordering_ns)  # the load, which the step brings with it
        start_ns = max(view.engine_wait_ns, view.joining_ns) + view.queued_ns - begins_ns
        width, done_ns, landed_ns = self._best_width(wire_ns, first_ns, start_ns, None, least, len(view.waiting))
        ttft = begins_ns + done_ns + prefill_ns - first_ns
        stall_ns = max(0, done_ns - start_ns - first_ns)
        others_ns = _delay(ttft, view.waiting, ahead)
        others_ns += view.first_tokens * max(0, begins_ns + round(wire_ns) - view.engine_wait_ns)
        others_ns += view.sharing * first_ns
        idle_ns = view.decoding * max(0, landed_ns - start_ns)  # in which nobody gains anything
        return Prediction(Arm.SYNC, width, ttft, round(ttft + others_ns + idle_ns + hurt * (stall_ns + prefill_ns)))

    def _off(self, view: AutoView, correction: Correction, ahead: Sequence[int], hurt: float) -> Prediction:
        """Computed again, from now on: loads that land meanwhile wait for it."""
        held = view.cached_tokens - view.load_tokens
        _, again_ns = self.prefill_ns(held, view.load_tokens + view.new_tokens, correction)
        ttft = view.engine_wait_ns + view.queued_ns + again_ns
        others_ns = _delay(ttft, view.waiting, ahead)
        again_hurts = max(hurt, float(view.decoding))  # nobody gets back what computing again takes
        return Prediction(Arm.OFF, self.num_layers, ttft, round(ttft + others_ns + again_hurts * again_ns))

    def _best_width(
        self, wire_ns: float, first_ns: int, start_ns: int, look_ns: int | None, least: int, company: int
    ) -> tuple[int | tuple[int, ...], int, int]:
        """(width, end of the prefill's first step, landing of the first slice), from the load's first byte on.

        Of those that cost least within `TIE` the narrowest: its first layer lands soonest, should the engine be free
        before it is expected to be.

        Args:
            start_ns: when the engine could begin; may be negative.
            look_ns: from a landing until the engine looks; None if it does not wait for the first slice.
            company: loads that wait now. As many are taken to come behind this one, and each slice delays them all.
        """
        layers, fixed = self.num_layers, self.slice_ns
        tried: list[tuple[float, int | tuple[int, ...], int, int]] = []
        for width, slices in self._schedules:
            if slices[0] < least or slices[-1] < least:
                continue
            landed, reached, done = 0.0, 0.0, 0
            for part in slices:
                landed += wire_ns * part / layers + fixed
                if not done:
                    first_landed = landed
                    reached = max(float(start_ns), landed if look_ns is None else landed + look_ns)
                done += part
                reached = max(reached, landed) + first_ns * part / layers
            tried.append((reached + company * fixed * len(slices), width, round(reached), round(first_landed)))
        assert tried, "all layers in one slice are always wide enough"
        least_cost = min(one[0] for one in tried)
        chosen = next(one for one in tried if one[0] <= least_cost + TIE * abs(least_cost))
        return chosen[1:]

    def _num_slices(self, width: int | tuple[int, ...]) -> int:
        return next(len(slices) for known, slices in self._schedules if known == width)


def _chain(free_ns: int, waiting: Sequence[WaitingLoad]) -> list[int]:
    """When each of the waiting requests is done, one after another, each released early."""
    ends: list[int] = []
    for landed_ns, compute_ns in waiting:
        free_ns = max(free_ns + compute_ns, landed_ns)
        ends.append(free_ns)
    return ends


def _delay(free_ns: int, waiting: Sequence[WaitingLoad], ahead: Sequence[int]) -> int:
    """By how much all of them together are later if the engine is free at `free_ns` only."""
    total = 0
    for (landed_ns, compute_ns), undisturbed_ns in zip(waiting, ahead, strict=True):
        free_ns = max(free_ns + compute_ns, landed_ns)
        if free_ns <= undisturbed_ns:
            break  # from here on nobody notices
        total += free_ns - undisturbed_ns
    return total


def _schedules(num_layers: int) -> tuple[tuple[int | tuple[int, ...], tuple[int, ...]], ...]:
    """Widths and schedules worth trying, with the layers of each slice: 1, 2, 4 ..., all, and 1,1,2,4,8 ... rising.

    Where each slice costs something, a rising schedule has the early first layer of width 1 for fewer slices.
    """
    found: list[tuple[int | tuple[int, ...], tuple[int, ...]]] = []
    width = 1
    while width < num_layers:
        whole, rest = divmod(num_layers, width)
        found.append((width, (width,) * whole + ((rest,) if rest else ())))
        width *= 2
    found.append((num_layers, (num_layers,)))
    rising: list[int] = [1]
    while sum(rising) < num_layers:
        rising.append(min(sum(rising), num_layers - sum(rising)))
    if len(rising) > 2:
        found.append((tuple(rising), tuple(rising)))
    return tuple(found)
