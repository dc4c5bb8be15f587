"""Overheads measured in recorded arms: each from the instants that show it, none from the times that are predicted.

A recording holds the begin and the launch of every pass, its device time, and what happened to each request and load.
From them follows each part by itself, so that no search is needed and every part has a standard error: a repeat is one
observation. What no instant shows stays at nothing.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from lamella.sim.overheads import LEAST_IDLE_NS, WHOLE, Overheads
from lamella.sim.recorded import RecordedRepeat, RecordedRequest, RecordedRun, RecordedStep
from lamella.sim.recorded_moments import Moments, asked_together, ordered_in, started_ns, within
from lamella.sim.strategies import Device

ODD: Final = 4.0
"""Values so many times the median of their repeat, and repeats so many times that of all, are not counted: something
else had the processor."""
DEVICE_BOUND: Final = 1.1
"""A step whose device time is so much longer than its launch shows what the device takes."""
SURE: Final = 1.2
"""Times a launch's mean, so that a launch that took longer than usual is not taken for one that stood."""
FAR: Final = 1.5
"""Lengths so many times apart show a slope."""
FEWEST: Final = 3
"""Observations that a part needs."""
MIB: Final = 1 << 20

Point = tuple[float, float]
"""(what it depends on, value)."""


class Fit(NamedTuple):
    """Overheads, the standard error of each part that was shown, of how many repeats, and which parts they showed."""

    overheads: Overheads
    errors: dict[str, int]
    repeats: int
    shown: frozenset[str]


def fit(repeats: Iterable[RecordedRepeat], run: RecordedRun, device: Device) -> Fit:
    """The overheads that the repeats show.

    Args:
        repeats: of arms of the product, with steps; those without show nothing.
        run: the engine they ran in.
        device: the profile that the overheads are beside.
    """
    moments = [Moments(repeat) for repeat in repeats if repeat.steps]
    errors: dict[str, int] = {}
    found: dict[str, int] = {}
    captured = run.captured_tokens or Overheads().captured_tokens

    def part(name: str, values_of: Callable[[Moments], Iterable[float]], least: int = 0) -> int:
        """The mean over repeats of what each shows; kept with its error."""
        shown = [one for one in moments if _measures(one, name)]
        means = [statistics.fmean(kept) for kept in (_without_odd(values_of(one)) for one in shown) if kept]
        means = _without_odd(means)
        if len(means) >= FEWEST:
            found[name] = max(least, round(statistics.fmean(means)))
            errors[name] = round(statistics.stdev(means) / math.sqrt(len(means)))
        return found.get(name, 0)

    part("prefill_launch_ns", lambda one: _launches(one, max(captured, one.repeat.prefill_graph_tokens) + 1, None))
    part("prefill_graph_launch_ns", lambda one: _launches(one, captured + 1, one.repeat.prefill_graph_tokens))
    part("launch_ns", lambda one: _captured(one, captured, "piecewise"))
    part("full_launch_ns", lambda one: _captured(one, captured, "full", "both"))
    part("gate_ns", _gates)
    part("tail_ns", lambda one: _tails(one, found, captured, device.profile.num_layers))
    report_ns = part("report_ns", _reports)
    pass_ns = part("pass_ns", _passes)
    idle_ns = part("idle_ns", _idles, least=LEAST_IDLE_NS)
    submit_ns = part("submit_ns", _submits)
    part("first_token_ns", lambda one: _first_tokens(one, report_ns))
    part("after_join_ns", lambda one: _behind_joins(one, pass_ns))
    part("order_ns", _orders)
    for name, points_of in (
        ("ask_ns", _asks),
        ("join_ns", lambda one: _joins(one, pass_ns, idle_ns)),
    ):
        line = _line([point for one in moments if _measures(one, name) for point in points_of(one)])
        if line is not None:
            found[name], found[f"{name}_per_1000_tokens"] = line.constant, line.per_1000
            errors[name] = line.error
    for name, share in (
        ("scatter_permille", _scatter([one for one in moments if _measures(one, "scatter_permille")], captured)),
        ("drift_permille", _drift([one for one in moments if _measures(one, "drift_permille")], captured)),
    ):
        if share is not None:
            found[name] = round(WHOLE * share)
    part("load_ns_per_mib", lambda one: _slower_loads(one, device))
    slower = Overheads(load_ns_per_mib=found.get("load_ns_per_mib", 0))
    part("first_slice_ns", lambda one: _first_slices(one, device.with_overheads(slower), submit_ns))
    rows = _rows([one for one in moments if _measures(one, "prefill_rows")], device, errors)
    rowed = device.with_overheads(Overheads(prefill_rows=rows))
    part("beside_permille", lambda one: (WHOLE * ratio for ratio in _ratios(one, rowed, 0.98, 1.0)), least=WHOLE)
    return Fit(
        Overheads(**{**found, "captured_tokens": captured, "prefill_rows": rows}),  # type: ignore[arg-type]
        errors,
        len(moments),
        frozenset(found),
    )


def _measures(one: Moments, name: str) -> bool:
    """Whether that part is to be measured in the repeat."""
    return one.repeat.shows is None or name in one.repeat.shows


def _without_odd(values: Iterable[float]) -> list[float]:
    found = list(values)
    if not found:
        return []
    middle = statistics.median(found)
    return [value for value in found if value <= ODD * middle] or found


# ---------------------------------------------------------------- the thread


def _launches(one: Moments, least: int, most: int | None) -> Iterable[float]:
    for step in one.repeat.steps:
        if least <= step.tokens <= (step.tokens if most is None else most) and not one.gated(step):
            yield step.host_ns - step.orders_ns


def _captured(one: Moments, captured: int, *graphs: str) -> Iterable[float]:
    """Of steps that replay captured graphs of one of those kinds."""
    return _launches(one, 1, captured) if one.repeat.graphs in graphs else ()


def _gates(one: Moments) -> Iterable[float]:
    """A wait that found its layer landed: what the layer of least waiting took, by pass and load."""
    waits = sum(one.gates(load, step) for step in one.repeat.steps if step.tokens for load in one.loads)
    if waits and one.repeat.waited_ns:
        yield min(one.repeat.waited_ns) / waits


def _tails(one: Moments, found: Mapping[str, int], captured: int, num_layers: int) -> Iterable[float]:
    """Of launches that stood for a load to its last layer: what came behind that layer's own launch.

    They did where no earlier landing, nor the begin, lets the thread reach the last layer later than it landed.
    """
    for step in one.repeat.steps:
        if step.decodes and one.repeat.whole_graphs:
            continue  # it has one launch, behind the last layer's landing
        replayed = "launch_ns" if step.tokens <= captured else "prefill_graph_launch_ns"
        most = max(captured, one.repeat.prefill_graph_tokens)
        launch_ns = found.get(replayed if step.tokens <= most else "prefill_launch_ns", 0)
        layer_ns, gates = launch_ns / num_layers, [load for load in one.loads if one.gates(load, step)]
        if not (step.tokens and launch_ns and gates) or any(len(load.landed_ns) != num_layers for load in gates):
            continue
        last_ns = max(load.at_ns + load.landed_ns[-1] for load in gates)
        reached_ns = max(
            load.at_ns + landed_ns + SURE * layer_ns * (num_layers - 1 - layer)
            for load in gates
            for layer, landed_ns in enumerate(load.landed_ns[:-1])
        )
        if max(step.begin_ns + step.orders_ns + SURE * launch_ns, reached_ns) < last_ns < step.end_ns:
            yield max(0.0, step.end_ns - last_ns - layer_ns)


def _scatter(moments: Sequence[Moments], captured: int) -> float | None:
    """Standard deviation of launches within a repeat, of their mean there: the median over repeats."""
    kept = [
        values for one in moments if len(values := _without_odd(_captured(one, captured, "piecewise"))) >= 2 * FEWEST
    ]
    shares = [statistics.stdev(values) / statistics.fmean(values) for values in kept]
    return statistics.median(shares) if shares else None


def _drift(moments: Sequence[Moments], captured: int) -> float | None:
    """The same of the repeats' means."""
    means = [statistics.fmean(kept) for one in moments if (kept := _without_odd(_captured(one, captured, "piecewise")))]
    return statistics.stdev(means) / statistics.fmean(means) if len(means) >= FEWEST else None


def _pairs(one: Moments) -> Iterable[tuple[RecordedStep, RecordedStep]]:
    return pairwise(one.repeat.steps)


def _reports(one: Moments) -> Iterable[float]:
    """From a launch's end to the hand-out behind it, where the step before was done before that launch ended."""
    for before, step in _pairs(one):
        if not (before.decodes and step.decodes) or before.device_ns is None:
            continue
        handed = one.tokens[bisect_left(one.tokens, step.end_ns) :][:1]
        if before.device_ns <= before.host_ns and handed:
            yield handed[0] - step.end_ns


def _passes(one: Moments) -> Iterable[float]:
    for before, step in _pairs(one):
        handed = within(one.tokens, before.end_ns, step.begin_ns)
        if step.decodes and handed and not _disturbed(one, before.end_ns, step.begin_ns):
            yield step.begin_ns - handed[-1]


def _disturbed(one: Moments, begin_ns: int, end_ns: int) -> bool:
    """Whether a request came or asked meanwhile."""
    return bool(within(one.arrivals, begin_ns, end_ns) or within(one.asks, begin_ns, end_ns))


def _idles(one: Moments) -> Iterable[float]:
    for before, step in _pairs(one):
        if before.tokens == step.tokens == 0 and not _disturbed(one, before.begin_ns, step.begin_ns):
            yield step.begin_ns - before.end_ns


def _submits(one: Moments) -> Iterable[float]:
    """Beginning a load, from passes that begin several: of one alone the pass's own share is not told apart."""
    for step, asked in asked_together(one):
        if len(asked) > 1:
            yield step.orders_ns / len(asked)


def _asks(one: Moments) -> Iterable[Point]:
    """From one request's asking to the next one's in the same pass; what a lone one takes is not told from the pass."""
    lengths = {sum(shape) for shape in one.repeat.cell.shapes}
    for _, asked in asked_together(one):
        if len(lengths) == 1:
            yield from ((min(lengths), later - earlier) for earlier, later in pairwise(asked))


def _orders(one: Moments) -> Iterable[float]:
    """Of passes that begin loads and compute nothing: from the last asking to the begin, less that asking itself."""
    for step, asked in asked_together(one):
        if not step.tokens and len(asked) > 1:
            each = (asked[-1] - asked[0]) / (len(asked) - 1)
            yield max(0.0, step.begin_ns - asked[-1] - each)


def _first_tokens(one: Moments, report_ns: int) -> Iterable[float]:
    """Of hand-outs with a first token in them behind a launch that outlasted the device: what they take longer."""
    firsts = sorted(request.at_ns + request.token_ns[0] for request in one.repeat.requests)
    for before, step in _pairs(one):
        handed = within(firsts, step.begin_ns, step.end_ns + 4 * report_ns)
        done_ns = before.begin_ns + (before.device_ns or 0)
        if (
            step.decodes
            and before.tokens > before.decoding
            and handed
            and done_ns < step.end_ns
            and not before.decoding
        ):
            yield max(0, handed[-1] - step.end_ns - report_ns)


def _behind_joins(one: Moments, pass_ns: int) -> Iterable[float]:
    """Of passes behind one that a request joined, with no token handed out between."""
    for before, step in _pairs(one):
        handed = within(one.tokens, before.end_ns, step.begin_ns)
        alone = not handed and not _disturbed(one, before.end_ns, step.begin_ns)
        if alone and before.tokens > before.decoding and step.decodes:
            yield max(0, step.begin_ns - before.end_ns - pass_ns)


def _joins(one: Moments, pass_ns: int, idle_ns: int) -> Iterable[Point]:
    shapes = {new: hit + new for hit, new in one.repeat.cell.shapes}
    if one.repeat.settings is None:
        shapes = {}
    for before, step in _pairs(one):
        prompt = shapes.get(step.tokens - step.decoding)
        if prompt is None or within(one.asks, before.end_ns, step.begin_ns):
            continue
        if within(one.arrivals, before.end_ns, step.begin_ns):
            continue
        handed = within(one.tokens, before.end_ns, step.begin_ns)
        since_ns = handed[-1] if handed else before.end_ns + (0 if before.tokens else idle_ns)
        yield prompt, step.begin_ns - since_ns - pass_ns


class _Line(NamedTuple):
    constant: int
    per_1000: int
    error: int


def _line(points: Sequence[Point]) -> _Line | None:
    """Value by thousand tokens: a line where several lengths were seen, never falling, never below nothing."""
    if len(points) < FEWEST:
        return None
    middle = statistics.median(value for _, value in points)
    kept = [(tokens, value) for tokens, value in points if value <= ODD * middle] or list(points)
    mean = statistics.fmean(value for _, value in kept)
    at = statistics.fmean(tokens for tokens, _ in kept)
    lengths = [tokens for tokens, _ in kept]
    spread = sum((tokens - at) ** 2 for tokens in lengths) if max(lengths) >= FAR * min(lengths) else 0.0
    slope = sum((tokens - at) * (value - mean) for tokens, value in kept) / spread if spread else 0.0
    slope = min(max(0.0, slope), max(0.0, mean) / at if at else 0.0)
    error = statistics.stdev(value - slope * tokens for tokens, value in kept) / math.sqrt(len(kept))
    return _Line(max(0, round(mean - slope * at)), round(1000 * slope), round(error))


# ---------------------------------------------------------------- loads


def _in_turn(one: Moments) -> Iterable[tuple[RecordedRequest, int]]:
    """Loads that the link carried one after another, and when each could begin."""
    settings = one.repeat.settings or {}
    if settings.get("order", "fifo") != "fifo" or one.repeat.cell.tier_bytes_per_s is not None:
        return
    free_ns = 0
    for request in one.loads:
        yield request, max(started_ns(request), free_ns)
        free_ns = request.at_ns + request.landed_ns[-1]


def _slower_loads(one: Moments, device: Device) -> Iterable[float]:
    for request, begin_ns in _in_turn(one):
        if request.load_bytes:
            took_ns = request.at_ns + request.landed_ns[-1] - begin_ns
            yield max(0.0, took_ns - _wire_ns(request, device)) / (request.load_bytes / MIB)


def _first_slices(one: Moments, device: Device, submit_ns: int) -> Iterable[float]:
    """Of loads that found the link idle and are the first of their pass: from submission to their first byte."""
    for step, _ in asked_together(one):
        mine = [load for load in one.loads if ordered_in(load, step)]
        others = [load for load in one.loads if not ordered_in(load, step) and started_ns(load) < step.end_ns]
        if not mine or any(load.at_ns + load.landed_ns[-1] > step.begin_ns for load in others):
            continue
        first = mine[0]
        slices = list(dict.fromkeys(first.landed_ns))
        if len(slices) > 1:
            slice_ns = _wire_ns(first, device) * first.landed_ns.count(slices[0]) / len(first.landed_ns)
            yield max(0.0, first.at_ns + slices[0] - step.begin_ns - submit_ns - slice_ns)


def _wire_ns(request: RecordedRequest, device: Device) -> float:
    """The whole load on the link, with nothing beside it."""
    wire, slower = device.profile.wire, device.overheads.load_ns_per_mib if device.overheads is not None else 0
    slices = len(set(request.landed_ns))
    each = request.load_bytes * 1e9 / wire.h2d_bytes_per_s + slower * request.load_bytes / MIB
    return each + slices * wire.slice_fixed_ns


# ---------------------------------------------------------------- the device


def _ratios(one: Moments, device: Device, least: float, most: float) -> Iterable[float]:
    """Device times of steps with one whole prefill over what the profile says, beside loads for such a share."""
    if one.repeat.settings is None:
        return
    compute = device.full_compute
    hits = {new: hit for hit, new in one.repeat.cell.shapes}
    for step in one.repeat.steps:
        new = step.tokens - step.decoding
        if new not in hits or not step.device_ns or step.device_ns < DEVICE_BOUND * step.host_ns or one.gated(step):
            continue
        if least <= one.beside(step) <= most:
            context = step.decoding * (hits[new] + new)
            yield step.device_ns / compute.step_ns([(hits[new], new)], step.decoding, context)


def _rows(moments: Sequence[Moments], device: Device, errors: dict[str, int]) -> tuple[tuple[int, int], ...]:
    """For each number of new tokens whose steps the device bounded: its time, of what the profile says."""
    rows: list[tuple[int, int]] = []
    for new in sorted({new for one in moments for _, new in one.repeat.cell.shapes}):
        means = [
            statistics.fmean(ratios)
            for one in moments
            if new in {shape[1] for shape in one.repeat.cell.shapes}
            and (ratios := list(_ratios(one, device, 0.0, 0.02)))
        ]
        if len(means) >= FEWEST:
            rows.append((new, round(WHOLE * statistics.fmean(means))))
            errors[f"prefill_rows[{new}]"] = round(WHOLE * statistics.stdev(means) / math.sqrt(len(means)))
    return tuple(rows)
