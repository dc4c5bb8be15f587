"""The loop that drives an engine: how many at once, who comes next, and which times are noted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from concurrency.closed_loop import Delivered, Request, serve, while_others_decode

STEP_NS = 1_000_000


class CountingEngine:
    """Serves everybody a token a step; a step takes a millisecond, and adding a request a tenth of one."""

    def __init__(self) -> None:
        self.time_ns = 0
        self.left: dict[str, int] = {}
        self.most_at_once = 0
        self.aborted: list[str] = []
        self.slept: list[float] = []

    def add(self, request: Request) -> None:
        self.time_ns += STEP_NS // 10
        self.left[request.name] = request.output
        self.most_at_once = max(self.most_at_once, len(self.left))

    def step(self) -> Sequence[Delivered]:
        self.time_ns += STEP_NS
        delivered = []
        for name in list(self.left):
            self.left[name] -= 1
            delivered.append(Delivered(name, (7,), self.left[name] == 0))
            if not self.left[name]:
                del self.left[name]
        return delivered

    def now_ns(self) -> int:
        return self.time_ns

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time_ns += round(seconds * 1e9)

    def abort(self, names: Sequence[str]) -> None:
        self.aborted += names
        for name in names:
            self.left.pop(name, None)


def requests(count: int, output: int = 3, at_ns: Sequence[int] = ()) -> list[Request]:
    return [Request(f"r{n}", [1, 2], output, at_ns[n] if at_ns else 0) for n in range(count)]


def test_never_more_than_the_concurrency_is_in_the_engine() -> None:
    engine = CountingEngine()
    served = serve(engine, requests(7), concurrency=2)
    assert engine.most_at_once == 2
    assert [one.name for one in served] == [f"r{n}" for n in range(7)]
    assert all(one.finished and one.tokens == [7, 7, 7] for one in served)


def test_the_next_request_comes_as_soon_as_one_has_its_answer() -> None:
    first, second, third = serve(CountingEngine(), requests(3), concurrency=2)
    assert third.arrival_ns == first.token_ns[-1] == second.token_ns[-1]


def test_handing_over_and_queueing_are_told_apart() -> None:
    (one,) = serve(CountingEngine(), requests(1), concurrency=1)
    assert one.queued_ns - one.arrival_ns == STEP_NS // 10
    assert [at - one.queued_ns for at in one.token_ns] == [STEP_NS, 2 * STEP_NS, 3 * STEP_NS]


def test_open_arrivals_are_when_they_were_due_even_if_the_engine_was_away() -> None:
    engine = CountingEngine()
    early, late, much_later = serve(engine, requests(3, at_ns=(0, STEP_NS // 2, 50 * STEP_NS)), concurrency=None)
    assert (early.arrival_ns, late.arrival_ns, much_later.arrival_ns) == (0, STEP_NS // 2, 50 * STEP_NS)
    assert late.queued_ns > late.arrival_ns + STEP_NS // 10, "it was due in the middle of a step"
    assert len(engine.slept) == 1, "an engine without work is left alone until the next is due"


def test_an_answer_that_does_not_come_is_an_error_that_names_it() -> None:
    with pytest.raises(TimeoutError, match="r0 had no answer after 0.01 s"):
        serve(CountingEngine(), requests(1, output=1000), concurrency=1, bound_s=0.01)


@pytest.mark.parametrize(
    ("wrong", "concurrency", "message"),
    [
        (requests(1), 0, "concurrency must be at least 1, got 0"),
        (requests(1) * 2, 1, "two requests have the same name"),
    ],
)
def test_what_cannot_be_served_is_refused(wrong: list[Request], concurrency: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        serve(CountingEngine(), wrong, concurrency)


def test_bystanders_decode_before_and_while_and_are_ended_after() -> None:
    engine = CountingEngine()
    others = [Request("b0", [1], 1000), Request("b1", [1], 1000)]
    served, times = while_others_decode(
        engine, others, engine.abort, lambda loop: serve(loop, requests(3), concurrency=1)
    )
    assert [len(one.tokens) for one in served] == [3, 3, 3]
    assert engine.aborted == ["b0", "b1"]
    assert all(len(seen) == 1 + 9 for seen in times.values()), "the last token before, and one a step"
    assert not engine.left


def test_bystanders_that_end_too_soon_spoil_the_measurement() -> None:
    engine = CountingEngine()
    with pytest.raises(RuntimeError, match="bystanders ended before the requests: b0"):
        while_others_decode(
            engine, [Request("b0", [1], 5)], engine.abort, lambda loop: serve(loop, requests(3), concurrency=1)
        )


def test_bystanders_decode_on_between_arrivals() -> None:
    engine = CountingEngine()
    others = [Request("other", [1], 1000)]
    far_apart = requests(3, at_ns=(0, 20 * STEP_NS, 45 * STEP_NS))
    served, times = while_others_decode(engine, others, engine.abort, lambda loop: serve(loop, far_apart, None))
    assert not engine.slept
    gaps = [later - earlier for earlier, later in zip(times["other"], times["other"][1:], strict=False)]
    assert max(gaps) <= 1.2 * STEP_NS, "a step, and a request handed over"
    arrived = [one.arrival_ns - served[0].arrival_ns for one in served]
    assert arrived == [0, 20 * STEP_NS, 45 * STEP_NS]
    assert all(one.queued_ns - one.arrival_ns <= 1.2 * STEP_NS for one in served), "handed over after the step it met"
