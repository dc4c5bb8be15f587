"""From the lines of measure.py to figures: pure functions over plain values.

Which requests and repeats count, and when a change is shown, is in rules.py.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from concurrency.alone import Alone, alone
from concurrency.arms import CHUNK_MAJOR, chunk_major_of, graphs_of
from concurrency.link import Link, floor_of, link_of, raw_bytes_per_us
from concurrency.recording import RecordingError
from concurrency.rules import Change, Mean, Row, change_of, counted, drift_of, in_time, kept, ttft_ms


@dataclass(frozen=True, slots=True)
class ArmFigures:
    """One arm of one cell. Times in milliseconds.

    Attributes:
        unnoticed_ms: from the landing that allowed a request's release to the release, the engine's poll between steps.
        unadmitted_ms: from the release to the next step that prefills.
        first_layer_ms, last_layer_ms: from the engine's having the request to the landing, on the slower rank.
        set_aside: repeats that do not count, because the host was slow.
        last_layer_by_rank_ms: the same of each rank; empty where there is one.
        held_ms: from the first layer's landing to the release; None where none was released.
        loads_ms: from a load's first copy to its last landing, median, p90 and longest; empty where nothing was loaded.
        choices: how often `auto` chose what, over all requests.
        slices: of how many loads, over all requests, so many slices landed apart; by their number.
        predicted_ms: the time to first token that `auto` foresaw when it chose; None where it was not recorded.
        predicted_regret: by which share it foresaw a later first token than by the way best for the request alone.
        link_floor: the least mean time to first token that the link allows for these arrivals; None: no load.
        link_behind_ms: of it, behind others' loads.
    """

    ttft: Mean
    p50: float
    p99: float
    e2e: Mean
    tpot: Mean
    requests_per_s: Mean
    first_layer_ms: float | None
    last_layer_ms: float | None
    unnoticed_ms: float | None
    unadmitted_ms: float | None
    host_stall_ms: float
    link_busy: float
    gpu_busy: float | None
    peak_in_flight_bytes: int
    bystander_tpot: Mean | None
    flawed: int
    set_aside: int
    last_layer_by_rank_ms: tuple[float, ...] = ()
    held_ms: float | None = None
    loads_ms: tuple[float, ...] = ()
    choices: Mapping[str, int] = field(default_factory=dict)
    slices: Mapping[int, int] = field(default_factory=dict)
    predicted_ms: float | None = None
    predicted_regret: float | None = None
    link_floor: Mean | None = None
    link_behind_ms: float | None = None


@dataclass(frozen=True, slots=True)
class CellFigures:
    """A cell: its arms, which of them is the baseline, and what could be gained at most.

    Attributes:
        drift: between the earlier and the later repeats of the opening arm.
        alone_by: T and P by each kind of graphs that a chunk-major arm replays.
        link: what the arms' floors are reckoned with; None where nothing was loaded.
    """

    cell: Mapping[str, Any]
    arms: dict[str, ArmFigures]
    baseline: str
    drift: float
    alone_by: Mapping[str, Alone]
    link: Link | None = None

    @property
    def alone(self) -> Alone:
        """T and P by the graphs that the baseline replays."""
        return self.alone_by.get(graphs_of(self.baseline), Alone(None, None))

    def alone_of(self, arm: str) -> Alone:
        """T and P by the graphs that the arm replays."""
        return self.alone_by.get(graphs_of(arm), self.alone)

    def change(self, arm: str, figure: str = "ttft") -> Change:
        """Against the baseline, and whether the run shows it."""
        mine, base = getattr(self.arms[arm], figure), getattr(self.arms[self.baseline], figure)
        return change_of(mine, base, self.drift)


def is_flawed(row: Row) -> bool:
    """Whether a load failed, or a request hit the engine's own cache, or less of the pool than was meant.

    `auto` may leave a hit alone and compute.
    """
    counters = row["counters"]
    if any(counters.get(name) for name in ("loads_failed", "wait_timeouts", "hook_bypasses", "stores_dropped")):
        return True
    if row["arm"].startswith("recompute"):
        return any(request["cached"] for request in row["requests"])
    cell = row["cell"]
    shapes = cell["mix"] or [[cell["hit"], cell["new"]]]
    for number, request in enumerate(row["requests"]):
        own = cell["miss_every"] and number % cell["miss_every"] == cell["miss_every"] - 1
        wanted = 0 if own else shapes[number % len(shapes)][0]
        meant = {wanted, 0} if row["arm"].startswith("auto") else {wanted}
        if request.get("local_hit") or request["cached"] not in meant:
            return True
    return False


def figures_of(rows: Iterable[Row]) -> dict[str, CellFigures]:
    """Every cell by name, from `repeat` lines; a line that came twice counts once, the later one.

    The `engine` line before them says how quick raw copies were.
    """
    latest: dict[tuple[str, str, int], Row] = {}
    copies: dict[str, float] = defaultdict(float)
    raw = 0.0
    for row in rows:
        if row["kind"] == "engine":
            raw = raw_bytes_per_us(row)
        elif row["kind"] == "repeat":
            name = row["cell"]["name"]
            latest[name, row["arm"], row["repeat"]] = row
            copies[name] = max(copies[name], raw)
    by_cell: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for (cell, arm, _repeat), row in sorted(latest.items(), key=lambda item: item[0]):
        by_cell[cell][arm].append(row)
    return {name: _cell(arms, copies[name]) for name, arms in by_cell.items()}


def _cell(every: Mapping[str, list[Row]], raw: float) -> CellFigures:
    arms = kept(every)
    link = link_of([row for rows in every.values() for row in rows], raw)
    figures = {name: _arm(rows, len(every[name]) - len(rows), link) for name, rows in arms.items()}
    chunk_major = [name for name in chunk_major_of(figures) if name in figures]
    baseline = min(chunk_major or sorted(figures), key=lambda name: figures[name].ttft.value)
    drift = drift_of([ttft_ms(row) for row in in_time(arms.get(chunk_major_of(figures)[0], ()))])
    cell = next(iter(arms.values()))[0]["cell"]
    alone_by = {kind: alone(arms, forms) for kind, forms in CHUNK_MAJOR.items() if arms.keys() & set(forms)}
    return CellFigures(cell, figures, baseline, drift, alone_by, link)


def _arm(rows: Sequence[Row], set_aside: int, link: Link | None) -> ArmFigures:
    requests = [request for row in rows for request in counted(row)]
    pooled = sorted((request["token_us"][0] - request["queued_us"]) / 1e3 for request in requests)
    loaded = [request for request in requests if request.get("landed_us")]
    foreseen = [request for request in requests if "predicted_us" in request]
    floors = [floor_of(row, link) for row in rows] if loaded and link is not None else []
    gpu = [step[5] for row in rows for step in row["steps"] if step[5] is not None]
    wall_us = sum(row["wall_us"] for row in rows)
    others = [gap for row in rows if (gap := _bystander_tpot_ms(row)) is not None]
    return ArmFigures(
        ttft=Mean.of([ttft_ms(row) for row in rows]),
        p50=_quantile(pooled, 0.5),
        p99=_quantile(pooled, 0.99),
        e2e=Mean.of([_mean(counted(row), lambda one: (one["token_us"][-1] - one["queued_us"]) / 1e3) for row in rows]),
        tpot=Mean.of([_mean(counted(row), _tpot_ms) for row in rows]),
        requests_per_s=Mean.of([len(row["requests"]) / _elapsed_us(row) * 1e6 for row in rows]),
        first_layer_ms=_mean(loaded, lambda one: (one["landed_us"][0] - one["queued_us"]) / 1e3) if loaded else None,
        last_layer_ms=_mean(loaded, lambda one: (one["landed_us"][-1] - one["queued_us"]) / 1e3) if loaded else None,
        unnoticed_ms=_mean_of([wait[0] for row in rows for wait in _release_waits_ms(row)]),
        unadmitted_ms=_mean_of([wait[1] for row in rows for wait in _release_waits_ms(row)]),
        host_stall_ms=sum(us for row in rows for us in row["host_stall_us"].values()) / 1e3 / len(rows),
        link_busy=sum(_link_busy_us(row) for row in rows) / wall_us,
        gpu_busy=sum(gpu) / wall_us if gpu else None,
        peak_in_flight_bytes=max(row["peak_in_flight_bytes"] for row in rows),
        bystander_tpot=Mean.of(others) if others else None,
        flawed=sum(map(is_flawed, rows)),
        set_aside=set_aside,
        last_layer_by_rank_ms=_last_by_rank_ms(loaded),
        held_ms=_mean_of(
            [(one["released_us"] - one["landed_us"][0]) / 1e3 for one in loaded if one.get("released_us") is not None]
        ),
        loads_ms=_loads_ms(loaded),
        choices=_choices(rows),
        slices=Counter(len(set(one["landed_us"])) for row in rows for one in row["requests"] if one.get("landed_us")),
        predicted_ms=_mean_of([_predicted_ms(one) for one in foreseen]),
        predicted_regret=_mean_of([one["regret"] for one in foreseen]),
        link_floor=Mean.of([floor.ttft_ms for floor in floors]) if floors else None,
        link_behind_ms=_mean_of([floor.behind_others_ms for floor in floors]),
    )


def _predicted_ms(request: Row) -> float:
    """From the engine's having the request, as a time to first token is; `auto` counts from its look-up."""
    return float(request["asked_us"] - request["queued_us"] + request["predicted_us"]) / 1e3


def _loads_ms(requests: Sequence[Row]) -> tuple[float, ...]:
    times = sorted((one["landed_us"][-1] - one["started_us"]) / 1e3 for one in requests if "started_us" in one)
    return (_quantile(times, 0.5), _quantile(times, 0.9), times[-1]) if times else ()


def _choices(rows: Sequence[Row]) -> dict[str, int]:
    """What `auto` chose, from the connector's counters."""
    counts: Counter[str] = Counter()
    for row in rows:
        counts.update({way: row["counters"].get(f"auto_{way}", 0) for way in ("early", "sync", "chunk_major", "off")})
    return {way: count for way, count in counts.items() if count}


def _last_by_rank_ms(requests: Sequence[Row]) -> tuple[float, ...]:
    lasts = [
        [(landed[-1] - one["queued_us"]) / 1e3 for landed in one["landed_by_rank_us"]]
        for one in requests
        if one.get("landed_by_rank_us")
    ]
    return tuple(statistics.fmean(rank) for rank in zip(*lasts, strict=True))


def _release_waits_ms(row: Row) -> list[tuple[float, float]]:
    """Of each counted request that was loaded and released: until it was, and from then to the next prefilling step."""
    new = min(shape[1] for shape in row["cell"]["mix"] or [[0, row["cell"].get("new", 1)]])
    begins = [step[0] for step in row["steps"] if step[2] >= new]
    found = []
    for one in counted(row):
        landed = [us for us in one.get("landed_us", ()) if us <= one.get("released_us", -1)]
        after = [us for us in begins if us >= one["at_us"] + one.get("released_us", 0)]
        if landed and after:
            released_us = one["released_us"]
            found.append(((released_us - max(landed)) / 1e3, (min(after) - one["at_us"] - released_us) / 1e3))
    return found


def _mean_of(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _mean(requests: Sequence[Row], figure: Any) -> float:
    return statistics.fmean(map(figure, requests))


def _tpot_ms(request: Row) -> float:
    times = request["token_us"]
    return (times[-1] - times[0]) / 1e3 / (len(times) - 1) if len(times) > 1 else 0.0


def _elapsed_us(row: Row) -> int:
    """What the requests of a repeat are counted over: an open loop's window, the same for every arm that keeps up."""
    return int(max(row["wall_us"], row.get("window_us", 0)))


def _bystander_tpot_ms(row: Row) -> float | None:
    spans = [(times[-1] - times[0]) / 1e3 / (len(times) - 1) for times in row["bystander_us"] if len(times) > 1]
    return statistics.fmean(spans) if spans else None


def _link_busy_us(row: Row) -> float:
    spans = sorted(
        (one["at_us"] + one["started_us"], one["at_us"] + one["landed_us"][-1])
        for one in row["requests"]
        if one.get("landed_us") and "started_us" in one
    )
    busy, until = 0.0, -math.inf
    for begin, end in spans:
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    return busy


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


# ---- answers


class Verdict(NamedTuple):
    """Answers of an arm against recomputation: how many are the same, near ties or wrong; the largest deviation."""

    same: int
    near_ties: int
    wrong: int
    largest_deviation: float


_VERDICTS: Final = ("same", "near", "wrong")


def judge(answers: Sequence[Row], rights: Sequence[Sequence[Row]], tolerance: float) -> Verdict:
    """Compares answers token by token up to the first that differs, with every recomputation of them.

    There, an engine that only rounds otherwise has both tokens among its likeliest and their log-probabilities within
    `tolerance` of each other; anything else is wrong. So is a log-probability further off before that. What agrees with
    one recomputation is right: each is, and where three tokens tie they agree no better with each other.

    Raises:
        ValueError: another number of answers, or a longer one.
    """
    counts, largest = dict.fromkeys(_VERDICTS, 0), 0.0
    for mine, *others in zip(answers, *rights, strict=True):
        verdicts = (_judge_one(mine, other, tolerance) for other in others)
        verdict, deviation = min(verdicts, key=lambda found: (_VERDICTS.index(found[0]), found[1]))
        largest = max(largest, deviation)
        counts[verdict] += 1
    return Verdict(counts["same"], counts["near"], counts["wrong"], largest)


def _judge_one(mine: Row, other: Row, tolerance: float) -> tuple[str, float]:
    largest = 0.0
    for token, wanted, top, wanted_top in zip(mine["tokens"], other["tokens"], mine["top"], other["top"], strict=True):
        here, there = dict(top), dict(wanted_top)
        if token == wanted:
            largest = max(largest, abs(here[token] - there[token]))
            if largest > tolerance:
                return "wrong", largest
            continue
        if wanted not in here or token not in there:
            return "wrong", math.inf
        apart = max(abs(here[token] - here[wanted]), abs(there[token] - there[wanted]))
        return ("near" if apart <= tolerance else "wrong"), max(largest, apart)
    return "same", largest


def tolerance_of(rows: Iterable[Row]) -> dict[str, float]:
    """For each verified cell four times the largest deviation of recomputation in company from recomputation alone."""
    taken = {(row["cell"]["name"], row["arm"]): row["answers"] for row in rows if row["kind"] == "verify"}
    found: dict[str, float] = {}
    for cell, arm in taken:
        if arm == "recompute_alone" and (cell, "recompute") in taken:
            noise = judge(taken[cell, "recompute"], [taken[cell, arm]], math.inf).largest_deviation
            found[cell] = max(1e-3, 4 * noise) if math.isfinite(noise) else math.inf
    return found


def verdicts_of(rows: Sequence[Row]) -> dict[tuple[str, str], Verdict]:
    """(cell, arm) of every verified arm, against recomputation in company and alone.

    Raises:
        RecordingError: answers of one cell that are not as many, or not as long, as another arm's.
    """
    taken = {(row["cell"]["name"], row["arm"]): row["answers"] for row in rows if row["kind"] == "verify"}
    lengths: dict[str, tuple[str, list[int]]] = {}
    for (cell, arm), answers in taken.items():
        mine = arm, [len(answer["tokens"]) for answer in answers]
        other = lengths.setdefault(cell, mine)
        if mine[1] != other[1]:
            raise RecordingError(
                f"{cell}: answers of {arm} have {mine[1]} tokens, those of {other[0]} {other[1]}; "
                "remove the verify lines of one of them"
            )
    tolerances = tolerance_of(rows)
    return {
        (cell, arm): judge(answers, [taken[cell, arm] for arm in ("recompute", "recompute_alone")], tolerances[cell])
        for (cell, arm), answers in taken.items()
        if cell in tolerances and arm not in ("recompute", "recompute_alone")
    }
