"""Recorded runs of an engine, as benchmarks/concurrency/measure.py writes them: JSON lines, one repeat of one arm each.

Times in the file are microseconds; a request's own count from its arrival. A closed loop begins with all requests at
once, so the first `concurrency` of a repeat do not count.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lamella.sim.settings import StepsWait

SCHEMA_VERSION: Final = 1
NS_PER_US: Final = 1_000
COUNTS_OF_AN_ENGINE: Final = ("max_num_batched_tokens", "cudagraph_capture_max", "tensor_parallel")


@dataclass(frozen=True, slots=True)
class RecordedCell:
    """A workload; names as in the benchmark.

    Attributes:
        shapes: (hit, new) tokens of the requests, in turn.
        bystanders: requests that decode all the while.
        rate_per_s: of an open loop; None: closed, `concurrency` at once.
        tier_bytes_per_s: the host pool answers at that rate; None: at the wire's.
    """

    name: str
    concurrency: int
    shapes: tuple[tuple[int, int], ...]
    output_tokens: int
    width: int
    bystanders: int
    rate_per_s: float | None
    stores: bool
    miss_every: int
    tier_bytes_per_s: int | None


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One request of a repeat.

    Attributes:
        at_ns: its arrival, from the repeat's begin.
        queued_ns: from its arrival until the engine had it.
        token_ns: from its arrival to each output.
        loaded_tokens: what its load brought; None where the run does not say.
        resident_tokens: what the engine had already.
        asked_ns: from its arrival until the scheduler asked for what is stored of it; None: it did not.
        ordered_ns: the same until the pass began with which its load did.
        started_ns: the same until the lane took its load up.
        released_ns: the same until a look found that it may run; None also for a load inside its step.
        by_forecast: no look did: the scheduler side released it, and `released_ns` is when its step had been told, a
            moment after that step's begin.
        landed_ns: the same until each layer had landed; layers of one slice together.
        load_bytes: what was loaded.
    """

    at_ns: int
    queued_ns: int
    token_ns: tuple[int, ...]
    loaded_tokens: int | None
    resident_tokens: int
    asked_ns: int | None = None
    ordered_ns: int | None = None
    started_ns: int | None = None
    released_ns: int | None = None
    landed_ns: tuple[int, ...] = ()
    load_bytes: int = 0
    by_forecast: bool = False

    @property
    def ttft_ns(self) -> int:
        """From the queue to the first token."""
        return self.token_ns[0] - self.queued_ns

    @property
    def tpot_ns(self) -> float:
        """Mean time of an output token after the first; 0 if there is none."""
        outputs = len(self.token_ns)
        return (self.token_ns[-1] - self.token_ns[0]) / (outputs - 1) if outputs > 1 else 0.0


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One pass of the engine's thread.

    Attributes:
        begin_ns: the worker began it, from the repeat's begin.
        host_ns: from there until its forward was launched.
        tokens: of its step; 0 if it computed nothing.
        decoding: requests that decode in it.
        orders_ns: of `host_ns`, beginning loads.
        device_ns: the step on the device, by its events; None where it was not timed.
    """

    begin_ns: int
    host_ns: int
    tokens: int
    decoding: int
    orders_ns: int
    device_ns: int | None

    @property
    def end_ns(self) -> int:
        """Its forward was launched."""
        return self.begin_ns + self.host_ns

    @property
    def decodes(self) -> bool:
        """Whether it only decoded."""
        return self.tokens == self.decoding > 0


@dataclass(frozen=True, slots=True)
class RecordedRepeat:
    """One repeat of one arm.

    Attributes:
        cell: what was asked.
        arm: how it was called.
        settings: the connector's; None where nothing was loaded.
        requests: in the order in which they were asked.
        steps: passes of the thread, in order; none where they were not kept.
        graphs: which steps replayed captured graphs: `piecewise` those up to `captured_tokens`, layer by layer; `full`
            those that only decode as one graph; `both` as `full`, and more tokens layer by layer.
        prefill_graph_tokens: of `both`, the most of those tokens; 0 where the run does not say.
        waited_ns: for each layer, how long the thread was in waits for loads, in all.
        commit: of the connector; empty where the run does not say.
        steps_wait: what its steps waited for.
        slow_lane: its lane could take looks in vain behind a fence for a slow wire, and keep that pace.
        other_auto: its `auto` went by other rules than the model's.
        ranks: processes that shared each layer (tensor parallel).
        shows: which parts of the overheads are measured in it; None: all.
    """

    cell: RecordedCell
    arm: str
    settings: Mapping[str, Any] | None
    requests: tuple[RecordedRequest, ...]
    steps: tuple[RecordedStep, ...] = ()
    waited_ns: tuple[int, ...] = ()
    graphs: str = "piecewise"
    prefill_graph_tokens: int = 0
    commit: str = ""
    steps_wait: StepsWait = StepsWait.BATCH
    slow_lane: bool = False
    other_auto: bool = False
    ranks: int = 1
    shows: frozenset[str] | None = None

    @property
    def whole_graphs(self) -> bool:
        """Whether steps that only decode replay one graph."""
        return self.graphs in ("full", "both")

    def prompt_tokens(self, number: int) -> int:
        """Of its request of that number."""
        return sum(self.cell.shapes[number % len(self.cell.shapes)])

    @property
    def counted(self) -> tuple[RecordedRequest, ...]:
        """Those that count."""
        first = self.cell.concurrency if self.cell.rate_per_s is None else 0
        return self.requests[first:]


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """All repeats of one file or several, and the engine they ran in.

    Attributes:
        steps_ahead: the engine scheduled a step ahead.
        token_budget: most tokens of its steps; None where the run does not say.
        captured_tokens: most tokens of a step that replays captured graphs; None where the run does not say.
        vllm: its version.
        machine: the device, and the day.
        repeats: in order.
        passed_over: lines that are no repeat and no engine: verifications, failures; by kind.
    """

    steps_ahead: bool
    token_budget: int | None
    captured_tokens: int | None
    vllm: str
    machine: str
    repeats: tuple[RecordedRepeat, ...]
    passed_over: Mapping[str, int]


def read_recorded(lines: Iterable[str], name: str) -> RecordedRun:
    """The run that the lines record.

    Args:
        lines: of one file or several of one engine.
        name: what they are called in messages.

    Raises:
        ValueError: a line that is not JSON, of another schema version, or a repeat without what is needed; the line is
            numbered. Or no repeat at all.
    """
    engine: Mapping[str, Any] = {}
    commit = ""
    vllm = machine = "unknown"
    repeats: list[RecordedRepeat] = []
    passed_over: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = _parsed(line)
            if not isinstance(row, dict):
                raise ValueError(f"a line is a JSON object, got {type(row).__name__}")
            if row.get("schema") != SCHEMA_VERSION:
                raise ValueError(f"schema must be {SCHEMA_VERSION}, got {row.get('schema')!r}; record it anew")
            kind = row.get("kind")
            if kind == "engine":
                found = _object(row["engine"], "engine"), str(row.get("vllm", vllm))
                if engine and _facts(*found) != _facts(engine, vllm):
                    raise ValueError(f"another engine than before: {_facts(*found)}, not {_facts(engine, vllm)}")
                engine, vllm = found
                for fact in COUNTS_OF_AN_ENGINE:
                    if engine.get(fact) is not None and (type(engine[fact]) is not int or engine[fact] < 1):
                        raise ValueError(f"{fact} must be a whole number of at least 1, got {engine[fact]!r}")
                commit = str(row.get("commit", ""))
                of = _object(row.get("machine", {}), "machine")
                machine = f"{of.get('gpu', 'a machine without a name')}, {str(of.get('date', 'no date'))[:10]}"
            elif kind == "repeat":
                repeats.append(_repeat(row, engine, commit))
            else:
                passed_over[str(kind)] = passed_over.get(str(kind), 0) + 1
        except KeyError as missing:
            raise ValueError(f"{name}, line {number}: {missing.args[0]} is missing; is it a recorded run?") from missing
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ValueError(f"{name}, line {number}: {error}") from error
    if not repeats:
        raise ValueError(f"{name} holds no repeat; record one with benchmarks/concurrency/measure.py")
    return RecordedRun(
        bool(engine.get("async_scheduling", False)),
        engine.get("max_num_batched_tokens"),
        engine.get("cudagraph_capture_max"),
        vllm,
        machine,
        tuple(repeats),
        passed_over,
    )


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON ({error}); repair or remove the line") from error


def _object(value: Any, name: str, or_else: str = "") -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object{or_else}, got {value!r}")
    return value


def _facts(engine: Mapping[str, Any], vllm: str) -> tuple[Any, ...]:
    """What must be the same in all that is judged together."""
    names = ("async_scheduling", "max_num_batched_tokens")
    return (vllm, *(engine.get(name) for name in names))


def _graphs(engine: Mapping[str, Any]) -> str:
    """Of arms that do not say."""
    return "full" if "FULL" in str(engine.get("cudagraph_mode", "")).upper() else "piecewise"


def _captured_sizes(engine: Mapping[str, Any]) -> list[int]:
    """Tokens of the steps whose graphs the engine captured; none where the run does not say."""
    sizes = engine.get("cudagraph_capture_sizes") or []
    if not isinstance(sizes, list) or not all(type(size) is int and size > 0 for size in sizes):
        raise ValueError(f"cudagraph_capture_sizes must be a list of whole numbers of at least 1, got {sizes!r}")
    return sizes


def _repeat(row: Mapping[str, Any], engine: Mapping[str, Any], commit: str) -> RecordedRepeat:
    cell = _object(row["cell"], "cell")
    shapes = tuple((int(hit), int(new)) for hit, new in cell["mix"]) or ((int(cell["hit"]), int(cell["new"])),)
    tier = cell.get("tier_gb_per_s")
    requests = tuple(_request(_object(request, "a request")) for request in row["requests"])
    where = f"{cell['name']}, {row['arm']}"
    if not requests:
        raise ValueError(f"{where}: a repeat has at least one request")
    settings = None if row["settings"] is None else _object(row["settings"], f"{where}: settings", " or null")
    least = {"concurrency": 1, "output": 1, "width": 0, "bystanders": 0, "miss_every": 0}
    for name, bound in least.items():
        if int(cell.get(name, 0)) < bound:
            raise ValueError(f"{where}: {name} must be at least {bound}, got {cell[name]}")
    for hit, new in shapes:
        if hit < 0 or new < 1:
            raise ValueError(f"{where}: hit must be at least 0 and new at least 1, got {hit} and {new}")
    graphs = str(row.get("graphs", _graphs(engine)))
    return RecordedRepeat(
        RecordedCell(
            str(cell["name"]),
            int(cell["concurrency"]),
            shapes,
            int(cell["output"]),
            int(cell["width"]),
            int(cell["bystanders"]),
            None if cell["rate_per_s"] is None else float(cell["rate_per_s"]),
            bool(cell["stores"]),
            int(cell.get("miss_every", 0)),
            None if tier is None else round(tier * 1e9),
        ),
        str(row["arm"]),
        settings,
        requests,
        tuple(_step(step) for step in row.get("steps", ())),
        tuple(int(us) * NS_PER_US for us in _object(row.get("host_stall_us", {}), "host_stall_us").values()),
        graphs,
        max(_captured_sizes(engine), default=0) if graphs == "both" else 0,
        commit,
        ranks=engine.get("tensor_parallel") or 1,
    )


def _step(row: Sequence[Any]) -> RecordedStep:
    begin, host, tokens, decoding, orders, device = row
    if min(host, tokens, decoding, orders, device or 0) < 0 or decoding > tokens:
        raise ValueError(f"a step's times and counts are at least 0, and who decodes is in its tokens; got {row}")
    return RecordedStep(
        int(begin) * NS_PER_US,
        int(host) * NS_PER_US,
        int(tokens),
        int(decoding),
        int(orders) * NS_PER_US,
        None if device is None else int(device) * NS_PER_US,
    )


def _request(row: Mapping[str, Any]) -> RecordedRequest:
    if not row["token_us"]:
        raise ValueError("a request has no token")
    times = [0, row["queued_us"], *row["token_us"]]
    if row["at_us"] < 0 or times != sorted(times):
        raise ValueError(
            f"a request's times rise: at_us {row['at_us']}, queued_us {row['queued_us']}, token_us from "
            f"{row['token_us'][0]} to {row['token_us'][-1]}"
        )
    loadable = row.get("loadable")
    return RecordedRequest(
        int(row["at_us"]) * NS_PER_US,
        int(row["queued_us"]) * NS_PER_US,
        tuple(int(token) * NS_PER_US for token in row["token_us"]),
        None if loadable is None else int(loadable),
        int(row.get("local_hit", 0)),
        _moment(row.get("asked_us")),
        _moment(row.get("ordered_us")),
        _moment(row.get("started_us")),
        _moment(row.get("released_us")),
        tuple(int(landed) * NS_PER_US for landed in row.get("landed_us", ())),
        int(row.get("bytes", 0)),
        bool(row.get("by_forecast", False)),
    )


def _moment(microseconds: Any) -> int | None:
    return None if microseconds is None else int(microseconds) * NS_PER_US
