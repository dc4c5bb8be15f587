"""Does it pay, and where: bursts by the recursion over a map of regimes.

A *burst* is what the recursion can answer exactly: C requests arrive together, alone on the device, and each wants its
first token. The map varies C and the ratio T/P of transfer to computing; T/P is set by the number of new tokens over a
fixed hit.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from lamella.reference.timeline import Chunk, TimedRequest, compute_timeline
from lamella.sim.parallel import Running, run_cells
from lamella.sim.strategies import CHUNK_MAJOR, INTERLEAVED, OFF, Device, Regime, Strategy
from lamella.sim.world import World

WORTH_IT: Final = 0.01
"""A gain below this share of TTFT is not worth turning anything on for."""


def burst_ttft_ns(device: Device, regime: Regime, strategy: Strategy) -> list[int]:
    """TTFT of each request of a burst, by the recursion; by events where an arm is chosen for each request.

    Raises:
        ValueError: the regime is outside the device's profile.
    """
    if strategy.chooses:
        return burst_ttft_in_world_ns(device, regime, strategy)
    request = device.request(regime, strategy)
    compute = device.compute(strategy)
    cached = request.cached_tokens

    def cost(chunks: Sequence[Chunk]) -> Sequence[int]:
        return compute.step_layers_ns([(cached + chunk.first_token, chunk.num_tokens) for chunk in chunks], 0, 0)

    alone = (0,) * device.profile.num_layers  # never asked for: `cost` knows the steps
    burst = [TimedRequest(request.admission_ns, request.load, alone, request.new_tokens)] * regime.concurrency
    timeline = compute_timeline(burst, strategy.order, strategy.release, device.rule(), cost)
    return [times.first_token_ns for times in timeline.requests]


def burst_ttft_in_world_ns(device: Device, regime: Regime, strategy: Strategy) -> list[int]:
    """The same by discrete events; equal to the nanosecond."""
    world = World(
        device.compute(strategy),
        strategy.order,
        strategy.release,
        device.settings(),
        make_engine=device.engine(strategy),
    )
    for tag in range(regime.concurrency):
        world.arrive(device.request(regime, strategy, tag)._replace(output_tokens=1))
    return [record.ttft_ns for record in sorted(world.run(), key=lambda record: record.tag)]


# ---------------------------------------------------------------- the map


class Cell(NamedTuple):
    """One regime of the map: mean TTFT of every strategy, in their order."""

    regime: Regime
    transfer_ns: int
    prefill_ns: int
    mean_ttft_ns: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """T/P."""
        return self.transfer_ns / self.prefill_ns

    @property
    def ceiling(self) -> float:
        """The most that overlapping one request with itself can save: min(T, P) / (T + P)."""
        return min(self.transfer_ns, self.prefill_ns) / (self.transfer_ns + self.prefill_ns)


@dataclass(frozen=True, slots=True)
class RegimeMap:
    """Cells by concurrency (rows) and T/P (columns), and what follows from them."""

    strategies: tuple[Strategy, ...]
    cells: tuple[Cell, ...]

    def change(self, cell: Cell, strategy: Strategy) -> float:
        """TTFT against the best that is to be had with layerwise transfer off; -0.2 is a fifth less."""
        off = min(cell.mean_ttft_ns[self.strategies.index(one)] for one in OFF)
        return cell.mean_ttft_ns[self.strategies.index(strategy)] / off - 1

    def best(self, cell: Cell) -> Strategy:
        """The strategy for this cell: a layerwise one if it gains `WORTH_IT`, else the best of what is off."""
        layerwise = [one for one in self.strategies if one.layerwise]
        winner = min(layerwise, key=lambda one: self.change(cell, one), default=CHUNK_MAJOR)
        if winner.layerwise and self.change(cell, winner) <= -WORTH_IT:
            return winner
        return min(OFF, key=lambda one: self.change(cell, one))

    def recommended(self) -> Strategy:
        """The one strategy to set everywhere: chunk-major, unless a layerwise one gains somewhere and loses nowhere.

        Of several such, the one with the best mean.
        """
        layerwise = [(one, self._changes(one)) for one in self.strategies if one.layerwise]
        fit = [(one, changes) for one, changes in layerwise if min(changes) <= -WORTH_IT and max(changes) < WORTH_IT]
        return min(fit, key=lambda pair: sum(pair[1]), default=(CHUNK_MAJOR, []))[0]

    def verdict(self) -> str:
        """What to do, in a few sentences."""
        count = len(self.cells)
        worth = sum(self.best(cell).layerwise for cell in self.cells)
        if not worth:
            return (
                f"Leave it off: in none of {count} regimes does layerwise transfer save {WORTH_IT:.0%} of mean TTFT; "
                f"{self.best(self.cells[0])} is the best of what is off."
            )
        one = self.recommended()
        if not one.layerwise:
            one = min((one for one in self.strategies if one.layerwise), key=lambda one: sum(self._changes(one)))
            return (
                f"Leave it off as one setting for all {count} regimes: every layerwise strategy loses somewhere. "
                f"{worth} regimes gain if each gets its own; the best single one is {self._effect(one)}."
            )
        sentence = f"Turn it on with {self._effect(one)}."
        if worth < count:
            sentence += f" It makes no difference in {count - worth} of them, where nothing gains {WORTH_IT:.0%}."
        if INTERLEAVED in self.strategies and one != INTERLEAVED:
            control = self._changes(INTERLEAVED)
            lost = sum(change >= WORTH_IT for change in control)
            sentence += (
                f" Interleaving ({INTERLEAVED}) would lose in {lost}, by up to {max(control):+.0%}." if lost else ""
            )
        return sentence

    def _changes(self, strategy: Strategy) -> list[float]:
        return [self.change(cell, strategy) for cell in self.cells]

    def _effect(self, strategy: Strategy) -> str:
        changes = self._changes(strategy)
        gained, lost = (sum(sign * change >= WORTH_IT for change in changes) for sign in (-1, 1))
        return (
            f"{strategy}: mean TTFT {min(changes):+.0%} at best, {sum(changes) / len(changes):+.0%} on average and "
            f"{max(changes):+.0%} at worst against what is best without it; it gains in {gained} of {len(changes)} "
            f"regimes and loses in {lost or 'none'}"
        )


def new_tokens_for(device: Device, hit_tokens: int, ratio: float) -> int:
    """New tokens over the hit whose prefill takes 1/ratio of the hit's transfer, or the nearest number.

    Raises:
        ValueError: no number within the profile does; the message says what is in reach.
    """
    device.check(Regime(hit_tokens, 1, 1), OFF)
    most = device.profile.prefill.new_tokens[-1] * (8 if device.extrapolate else 1)
    transfer = device.transfer_ns(hit_tokens)
    low, high = (transfer / device.prefill_ns(hit_tokens, tokens) for tokens in (most, 1))
    if not low * 0.999 <= ratio <= high * 1.001:
        raise ValueError(
            f"no number of new tokens over {hit_tokens:,} cached ones gives T/P = {ratio:g}; "
            f"{device.profile.name} reaches {low:.2f} .. {high:.2f}"
        )
    wanted = transfer / ratio
    tokens = 1 + bisect_left(range(1, most), wanted, key=lambda new: device.prefill_ns(hit_tokens, new))
    below = max(1, tokens - 1)
    return min((below, tokens), key=lambda new: abs(device.prefill_ns(hit_tokens, new) - wanted))


def reachable_ratios(device: Device, hit_tokens: int, count: int) -> list[float]:
    """`count` values of T/P between the ends of what the profile reaches, by equal factors.

    Raises:
        ValueError: a hit of no tokens, or of more than the profile has.
    """
    device.check(Regime(hit_tokens, 1, 1), OFF)
    transfer = device.transfer_ns(hit_tokens)
    ends = (device.profile.prefill.new_tokens[-1], device.profile.prefill.new_tokens[0])
    low, high = (transfer / device.prefill_ns(hit_tokens, tokens) for tokens in ends)
    return [low * (high / low) ** (index / max(1, count - 1)) for index in range(count)]


class MapPlan(NamedTuple):
    """A map to be computed: what is compared, and the regimes by row and column."""

    device: Device
    strategies: tuple[Strategy, ...]
    regimes: tuple[Regime, ...]


def plan_map(
    device: Device,
    hit_tokens: int,
    concurrencies: Sequence[int],
    ratios: Sequence[float],
    strategies: Sequence[Strategy],
    more_new_tokens: Sequence[int] = (),
) -> MapPlan:
    """The map's regimes, every one checked. What is off is always among the strategies.

    Args:
        device: where.
        hit_tokens: of every regime.
        concurrencies: rows.
        ratios: columns, as T/P; those that no number of new tokens tells apart are one.
        strategies: what is compared.
        more_new_tokens: further columns, by their new tokens.

    Raises:
        ValueError: no concurrency or ratio, or a regime outside the device's profile.
    """
    if not concurrencies or not (ratios or more_new_tokens):
        raise ValueError("a map needs at least one concurrency and one ratio")
    tried = (*OFF, *(one for one in dict.fromkeys(strategies) if one not in OFF))
    new_tokens = {*more_new_tokens, *(new_tokens_for(device, hit_tokens, ratio) for ratio in ratios)}
    columns = sorted(new_tokens, key=lambda new: (-device.prefill_ns(hit_tokens, new), -new))
    regimes = tuple(Regime(hit_tokens, new, concurrency) for concurrency in concurrencies for new in columns)
    for regime in regimes:
        device.check(regime, tried)
    return MapPlan(device, tried, regimes)


def compute_map(plan: MapPlan, how: Running | None = None) -> RegimeMap:
    """The planned map, by the recursion; `how` says where cells are computed.

    Raises:
        JournalError, ImportError, OSError: as `run_cells`.
    """
    device, strategies, regimes = plan
    answers = run_cells(_map_cell, MapSetting(device, strategies), regimes, seed=0, how=how)
    cells = [
        Cell(
            regime,
            device.transfer_ns(regime.hit_tokens),
            device.prefill_ns(regime.hit_tokens, regime.new_tokens),
            tuple(answer["mean_ttft_ns"]),
        )
        for regime, answer in zip(regimes, answers, strict=True)
    ]
    return RegimeMap(strategies, tuple(cells))


class MapSetting(NamedTuple):
    """What the cells of a map share."""

    device: Device
    strategies: tuple[Strategy, ...]


def _map_cell(shared: MapSetting, regime: Regime, seed: int) -> dict[str, Any]:
    """One cell of a map; nothing in it is random."""
    device, strategies = shared
    means = [sum(burst_ttft_ns(device, regime, one)) / regime.concurrency for one in strategies]
    return {"mean_ttft_ns": means}


def check_in_world(device: Device, regime_map: RegimeMap, seed: int, share: float = 0.1, most: int = 40) -> int:
    """The world agrees with a random share of the cells, 1 .. `most`; returns how many were compared.

    Raises:
        AssertionError: not to the nanosecond; one of the two is wrong, and no answer of either should be believed.
    """
    count = min(most, max(1, round(len(regime_map.cells) * share)))
    for cell in random.Random(seed).sample(regime_map.cells, count):
        for strategy in regime_map.strategies:
            if strategy.chooses:
                continue  # of it the recursion knows nothing
            by_recursion = burst_ttft_ns(device, cell.regime, strategy)
            in_world = burst_ttft_in_world_ns(device, cell.regime, strategy)
            if by_recursion != in_world:
                raise AssertionError(
                    f"{cell.regime}, {strategy}: the recursion says {by_recursion}, the world {in_world}"
                )
    return count
