"""What to do about one regime: every strategy in the world over a range of concurrencies, and what follows from it.

The answer is for the user's own concurrency, with the margin by which it holds; the others say from where on it holds
no longer. Every cell (a concurrency and a repeat) gives all strategies the same arrivals, so changes are paired.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from lamella.reference.ordering import Fifo
from lamella.reference.release import First, JustInTime, ReleasePolicy
from lamella.sim.arrivals import Arrivals
from lamella.sim.bounds import MOST_REQUESTS, check_range
from lamella.sim.parallel import Running, run_cells
from lamella.sim.regimes import WORTH_IT
from lamella.sim.serving import Outcome, Slo, serve, trade_of_off
from lamella.sim.strategies import AUTO, INTERLEAVED, OFF, Device, Regime, Strategy

TIE: Final = WORTH_IT / 2
"""Strategies whose changes differ by less are equal; of these the simplest is recommended."""
CERTAIN: Final = 2.0
"""A gain counts if it is worth it even by so many standard errors less. One that is just not worth it passes in 9% of
cases with three normal repeats (Student's t, 2 degrees of freedom), in 4% with ten."""


def study_strategies(num_layers: int) -> tuple[Strategy, ...]:
    """What is tried: off, widths by powers of two with the release rules, a choice by request, and the control."""
    widths = [width for width in (1, 2, 4, 8, 16) if width <= num_layers]
    releases: list[tuple[ReleasePolicy, list[int]]] = [
        (First(), widths),
        (JustInTime(), [width for width in (1, 4) if width in widths]),
        (JustInTime(None), [width for width in (1, 4) if width in widths]),
    ]
    early = (Strategy(width, Fifo(), release) for release, chosen in releases for width in chosen)
    return (*OFF, *early, AUTO, INTERLEAVED)


WORST_TRADE: Final = 10.0
"""A first token is not worth an answer that ends so many times as much later as the token comes earlier."""


class StudySetting(NamedTuple):
    """What the cells of a study share."""

    device: Device
    strategies: tuple[Strategy, ...]
    requests_per_user: int
    arrivals: Arrivals | None
    slo: Slo


class StudyCell(NamedTuple):
    """A regime, and which of its repeats."""

    regime: Regime
    repeat: int


def _study_cell(shared: StudySetting, cell: StudyCell, seed: int) -> dict[str, Any]:
    """The outcomes of all strategies on the same arrivals."""
    device, strategies, requests, arrivals, slo = shared
    return {"outcomes": [serve(device, cell.regime, one, requests, seed, arrivals, slo)[1:] for one in strategies]}


class Change(NamedTuple):
    """A relative change, as the mean over repeats, and its standard error (0 with one repeat)."""

    mean: float
    error: float

    @property
    def certain_gain(self) -> bool:
        """Whether it is a gain worth having even by `CERTAIN` standard errors less."""
        return self.mean + CERTAIN * self.error <= -WORTH_IT

    def __str__(self) -> str:
        return f"{self.mean:+.1%} ± {self.error:.1%}"


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What to set at the studied point.

    Attributes:
        strategy: what to use; one that is off if layerwise transfer is to be left off.
        off: the best of what is off.
        best_layerwise: the layerwise one that comes nearest, or is recommended.
        change: mean TTFT of `best_layerwise` against `off`.
        price: the same of whole answers.
        margin: how much more TTFT the best strategy of another order and release takes; 0 if there is none.
        next_best: that strategy.
        pays_at: the concurrencies at which `best_layerwise` is a certain gain.
        control_pays_at: those at which interleaving is.
    """

    strategy: Strategy
    off: Strategy
    best_layerwise: Strategy
    change: Change
    price: Change
    margin: float
    next_best: Strategy
    pays_at: tuple[int, ...]
    control_pays_at: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Study:
    """All outcomes: `outcomes[concurrency][repeat][strategy]`, in the orders of the attributes."""

    regime: Regime
    strategies: tuple[Strategy, ...]
    concurrencies: tuple[int, ...]
    outcomes: tuple[tuple[tuple[Outcome, ...], ...], ...]

    def at(self, concurrency: int, strategy: Strategy) -> list[Outcome]:
        """The strategy's outcomes there, a repeat each."""
        index = self.strategies.index(strategy)
        return [repeat[index] for repeat in self.outcomes[self.concurrencies.index(concurrency)]]

    def mean(self, concurrency: int, strategy: Strategy, field: str = "mean_ttft_ns") -> float:
        """A field's mean over the repeats."""
        values = [getattr(one, field) for one in self.at(concurrency, strategy)]
        return math.fsum(values) / len(values)

    def off(self, concurrency: int) -> Strategy:
        """The better of what is off there, by mean TTFT."""
        return min(OFF, key=lambda one: self.mean(concurrency, one))

    def change(self, concurrency: int, strategy: Strategy, field: str = "mean_ttft_ns") -> Change:
        """A field against the better of what is off, repeat by repeat."""
        base = self.at(concurrency, self.off(concurrency))
        mine = self.at(concurrency, strategy)
        shares = [getattr(one, field) / getattr(other, field) - 1 for one, other in zip(mine, base, strict=True)]
        mean = math.fsum(shares) / len(shares)
        if len(shares) < 2:
            return Change(mean, 0.0)
        variance = math.fsum((share - mean) ** 2 for share in shares) / (len(shares) - 1)
        return Change(mean, math.sqrt(variance / len(shares)))

    def recommend(self) -> Recommendation:
        """What to set at the regime's own concurrency."""
        here = self.regime.concurrency
        usable = [one for one in self.strategies if one.layerwise and one != INTERLEAVED]
        changes = {one: self.change(here, one) for one in usable}
        least = min(change.mean for change in changes.values())
        best = min((one for one in usable if changes[one].mean <= least + TIE), key=_effort)
        off = self.off(here)
        others = [one for one in usable if (one.order, one.release) != (best.order, best.release)]
        others += [one for one in (INTERLEAVED, *OFF) if one in self.strategies]
        next_best = min(others, key=lambda one: self.mean(here, one))
        earlier = self.mean(here, off) - self.mean(here, best)
        later = self.mean(here, best, "mean_end_ns") - self.mean(here, off, "mean_end_ns")
        return Recommendation(
            best if changes[best].certain_gain and later <= WORST_TRADE * earlier else off,
            off,
            best,
            changes[best],
            self.change(here, best, "mean_end_ns"),
            self.mean(here, next_best) / self.mean(here, best) - 1,
            next_best,
            self._pays_at(best),
            self._pays_at(INTERLEAVED) if INTERLEAVED in self.strategies else (),
        )

    def _pays_at(self, strategy: Strategy) -> tuple[int, ...]:
        return tuple(one for one in self.concurrencies if self.change(one, strategy).certain_gain)


def _effort(strategy: Strategy) -> tuple[bool, bool, int, str]:
    """What a strategy asks for: one that does not choose, or forecast, is simpler; wider slices are fewer."""
    width = strategy.width if isinstance(strategy.width, int) else 0
    return (strategy.chooses, strategy.release.needs_forecast, -width, str(strategy))


class StudyPlan(NamedTuple):
    """A study to be computed."""

    setting: StudySetting
    regime: Regime
    concurrencies: tuple[int, ...]
    repeats: int


def plan_study(
    device: Device,
    regime: Regime,
    concurrencies: Sequence[int],
    strategies: Sequence[Strategy],
    *,
    requests_per_user: int = 10,
    repeats: int = 3,
    arrivals: Arrivals | None = None,
    slo: Slo | None = None,
) -> StudyPlan:
    """The study of a regime over concurrencies, its own among them, everything checked.

    Raises:
        ValueError: no layerwise strategy, repeats or requests outside 1 .. 100,000, or a regime outside the device's
            profile.
    """
    check_range("repeats", repeats, 1, MOST_REQUESTS)
    check_range("requests", requests_per_user, 1, MOST_REQUESTS)
    tried = (*OFF, *(one for one in dict.fromkeys(strategies) if one not in OFF))
    if not any(one.layerwise and one != INTERLEAVED for one in tried):
        raise ValueError("a study needs a layerwise strategy besides interleaving, such as fifo/1/first")
    rows = tuple(sorted({*concurrencies, regime.concurrency}))
    for row in rows:
        one = replace(regime, concurrency=row)
        device.check(one if arrivals is None else arrivals.largest(one), tried)
    setting = StudySetting(device, tried, requests_per_user, arrivals, slo or Slo())
    return StudyPlan(setting, regime, rows, repeats)


def compute_study(plan: StudyPlan, seed: int = 0, how: Running | None = None) -> Study:
    """The planned study; `how` says where cells are computed.

    Raises:
        ValueError: a negative seed.
        JournalError, ImportError, OSError: as `run_cells`.
    """
    setting, regime, rows, repeats = plan
    cells = [StudyCell(replace(regime, concurrency=row), repeat) for row in rows for repeat in range(repeats)]
    answers = iter(run_cells(_study_cell, setting, cells, seed, how))
    outcomes = tuple(
        tuple(
            tuple(
                Outcome(one, *values) for one, values in zip(setting.strategies, next(answers)["outcomes"], strict=True)
            )
            for _ in range(repeats)
        )
        for _ in rows
    )
    return Study(regime, setting.strategies, rows, outcomes)


# ---------------------------------------------------------------- in words


def answer_lines(study: Study, slo: Slo) -> list[str]:
    """The answer, a sentence a line: break-even, recommendation with its margin, goodput; what to do comes last."""
    found, here = study.recommend(), study.regime.concurrency
    lines = [f"Break-even concurrency: {found.best_layerwise} {_pays(found.pays_at, study.concurrencies)}."]
    if INTERLEAVED in study.strategies:
        lines[0] += f" Interleaving ({INTERLEAVED}) {_pays(found.control_pays_at, study.concurrencies)}."
    if slo != Slo():
        mine, base = ((study.mean(here, one, "slo_met"), one) for one in (found.best_layerwise, found.off))
        rates = [study.mean(here, one, "goodput_per_s") for one in (found.best_layerwise, found.off)]
        lines.append(
            f"Goodput within the SLO: {rates[0]:.1f} requests/s ({mine[0]:.0%} in time) with {mine[1]}, {rates[1]:.1f} "
            f"({base[0]:.0%}) with {base[1]}."
        )
        if not any(study.mean(here, one, "slo_met") for one in study.strategies):
            lines.append(
                f"Nothing that was tried keeps within the SLO at {here} at once: ask for fewer users, or more time."
            )
    other = next(one for one in OFF if one != found.off)
    ttft, end = (
        study.mean(here, other, field) / study.mean(here, found.off, field) for field in ("mean_ttft_ns", "mean_end_ns")
    )
    if traded := trade_of_off(found.off, other, ttft, end):
        lines.append(traded)
    lines.append(_what_to_do(found))
    return lines


def _what_to_do(found: Recommendation) -> str:
    against = f"mean TTFT {found.change}, whole answers {found.price} against {found.off}, the better of what is off"
    if not found.strategy.layerwise:
        head = f"Leave it off ({found.off}): the best layerwise setting, {found.best_layerwise}, gives {against}."
        if found.change.certain_gain:
            return f"{head} Its answers end later by more than {WORST_TRADE:g} times what its first tokens gain."
        if found.change.mean <= -WORTH_IT:
            least = -found.change.mean - CERTAIN * found.change.error
            return (
                f"{head} The repeats do not show that gain: two standard errors less it is {least:.1%}, and "
                f"{WORTH_IT:.0%} counts; more --repeats tell."
            )
        return head
    one = found.strategy
    condition = " only if first tokens matter more than whole answers" if found.price.mean >= WORTH_IT else ""
    setting = f"width {one.width}, order {one.order.name}, release {one.release}"
    if one.chooses:
        setting = "auto, which chooses for each request"
    return (
        f"Turn it on{condition}: {setting}: {against}. "
        f"The next best, {found.next_best}, takes {found.margin:+.1%} TTFT."
    )


def _pays(at: Sequence[int], tried: Sequence[int]) -> str:
    """From where to where it pays.

    >>> _pays([1, 2], [1, 2, 4]), _pays([1, 4], [1, 2, 4])
    ('pays up to 2 at once and no longer at 4', 'pays at 1, 4 at once and not at 2')
    """
    if not at:
        return f"pays at no concurrency tried ({tried[0]} .. {tried[-1]})"
    if len(at) == len(tried):
        return f"pays at every concurrency tried ({tried[0]} .. {tried[-1]})"
    if list(at) == list(tried[: len(at)]):
        return f"pays up to {at[-1]} at once and no longer at {tried[len(at)]}"
    missing = [str(one) for one in tried if one not in at]
    return f"pays at {', '.join(map(str, at))} at once and not at {', '.join(missing)}"
