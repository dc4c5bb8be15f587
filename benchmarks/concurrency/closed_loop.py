"""A closed or an open loop of requests through an engine that is stepped by hand, with a time for every token.

The loop does nothing while it runs but add requests, step and note times: prompts are made before. A request's times
are `arrival_ns` (it was handed over), `queued_ns` (the engine has it: checked, hashed and in the queue; done on this
thread, so that it also holds up the others) and one for each output of the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(slots=True)
class Request:
    """What to ask, and when in an open loop."""

    name: str
    tokens: list[int]
    output: int
    at_ns: int = 0


@dataclass(slots=True)
class Served:
    """One request's times, by the engine's clock, and its answer."""

    name: str
    arrival_ns: int
    queued_ns: int
    token_ns: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finished: bool = False


@dataclass(frozen=True, slots=True)
class Delivered:
    """What one step brought for one request."""

    name: str
    tokens: Sequence[int]
    finished: bool


class SteppedEngine(Protocol):
    """What the loop needs of an engine."""

    def add(self, request: Request) -> None:
        """The engine has the request."""

    def step(self) -> Sequence[Delivered]:
        """One step; what came out."""

    def now_ns(self) -> int:
        """The clock."""

    def sleep(self, seconds: float) -> None:
        """Nothing happens for so long."""


def serve(
    engine: SteppedEngine, requests: Sequence[Request], concurrency: int | None, bound_s: float = 120.0
) -> list[Served]:
    """Every request's times, in the order of `requests`.

    Args:
        engine: with nothing of these requests in it yet; what else it delivers is passed over.
        requests: in order.
        concurrency: so many at once, the next as soon as one has its answer; None: each at its `at_ns` after the start.
        bound_s: the loop ends by then.

    Raises:
        ValueError: a concurrency below 1, or a name twice.
        TimeoutError: a request has no answer within the bound.
    """
    if concurrency is not None and concurrency < 1:
        raise ValueError(f"concurrency must be at least 1, got {concurrency}")
    served: dict[str, Served] = {}
    if len({request.name for request in requests}) != len(requests):
        raise ValueError("two requests have the same name")
    begin_ns = engine.now_ns()
    waiting = list(reversed(requests))
    running = 0

    def may_add() -> bool:
        if not waiting:
            return False
        if concurrency is not None:
            return running < concurrency
        return engine.now_ns() - begin_ns >= waiting[-1].at_ns

    while waiting or running:
        while may_add():
            request = waiting.pop()
            arrival_ns = engine.now_ns() if concurrency is not None else begin_ns + request.at_ns
            engine.add(request)
            served[request.name] = Served(request.name, arrival_ns, engine.now_ns())
            running += 1
        if not running:
            engine.sleep(max(0.0, (begin_ns + waiting[-1].at_ns - engine.now_ns()) / 1e9))
            continue
        delivered = engine.step()
        now_ns = engine.now_ns()
        for one in delivered:
            record = served.get(one.name)
            if record is None:
                continue
            if one.tokens:
                record.token_ns += [now_ns] * len(one.tokens)
                record.tokens += one.tokens
            if one.finished:
                record.finished = True
                running -= 1
        if now_ns - begin_ns > bound_s * 1e9:
            late = [record.name for record in served.values() if not record.finished]
            raise TimeoutError(f"{', '.join(late)} had no answer after {bound_s:g} s")
    return [served[request.name] for request in requests]


def while_others_decode(
    engine: SteppedEngine,
    others: Sequence[Request],
    abort: Callable[[Sequence[str]], None],
    body: Callable[[SteppedEngine], list[Served]],
    bound_s: float = 60.0,
) -> tuple[list[Served], dict[str, list[int]]]:
    """What `body` served while `others` decoded, and when each of those got its tokens meanwhile.

    Args:
        engine: as for `serve`.
        others: the bystanders; each has enough output to outlast the body.
        abort: ends them.
        body: runs on an engine whose deliveries to the others are noted.
        bound_s: the bystanders decode by then.

    Raises:
        TimeoutError: they do not.
        RuntimeError: one of them was done before the body was.
    """
    times: dict[str, list[int]] = {other.name: [] for other in others}
    ended: set[str] = set()

    class Noting:
        add = staticmethod(engine.add)
        now_ns = staticmethod(engine.now_ns)

        @staticmethod
        def sleep(seconds: float) -> None:
            """The others go on: an engine that has them never rests."""
            until_ns = engine.now_ns() + round(seconds * 1e9)
            while engine.now_ns() < until_ns:
                Noting.step()

        @staticmethod
        def step() -> Sequence[Delivered]:
            delivered = engine.step()
            now_ns = engine.now_ns()
            for one in delivered:
                if one.name in times:
                    times[one.name] += [now_ns] * len(one.tokens)
                    if one.finished:
                        ended.add(one.name)
            return delivered

    for other in others:
        engine.add(other)
    begin_ns = engine.now_ns()
    while min(map(len, times.values()), default=3) < 3:
        Noting.step()
        if engine.now_ns() - begin_ns > bound_s * 1e9:
            raise TimeoutError(f"the bystanders did not decode within {bound_s:g} s")
    for seen in times.values():
        del seen[:-1]
    served = body(Noting())
    if ended:
        raise RuntimeError(f"bystanders ended before the requests: {', '.join(sorted(ended))}; give them more output")
    abort(list(times))
    return served, times
